"""An opened checkpoint of any format: which models, optimizers and other values it holds, and how their tensors are read."""

from __future__ import annotations

import io
import json
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from zero_core.deferred import SafetensorsFile
from zero_core.errors import CheckpointError
from zero_core.manifest import Manifest
from zero_core.sharded_state import clean, is_extra_state
from zero_core.storage import Folder, IndexedReader, Reader, has_torch_index, read_index, recover

_MODEL, _OPTIMIZER = "model", "optimizer"
Runs = dict[str, dict[str, list[tuple[int, int, Any]]]]


@dataclass
class StoredOptimizer:
    """One optimizer of a checkpoint.

    Attributes:
        tensors: by parameter's name and key, the name under which the reader finds the tensor.
        param_groups: hyper-parameters, with the parameters' names; `None` where the checkpoint has none.
        shared: values of a whole slice that are at hand; see `sharded_state.OptimizerState`.
        positional: whether "names" are the parameters' numbers, counted through the groups.
    """

    tensors: dict[str, dict[str, str]] = field(default_factory=dict)
    param_groups: list[dict[str, Any]] | None = None
    shared: Runs = field(default_factory=dict)
    positional: bool = False


@dataclass
class Stored:
    """An opened checkpoint.

    Attributes:
        folder: where it is.
        reader: reads its tensors.
        models: by key: by clean name, the name under which the reader finds the tensor.
        optimizers: by key.
        extra: everything else, as the run that saved it gave it.
        rng: per rank of that run, the state of its random number generators.
        values: per model, what its modules keep beside tensors.
        manifest: of our own format only.
    """

    folder: Folder
    reader: IndexedReader
    models: dict[str, dict[str, str]]
    optimizers: dict[str, StoredOptimizer]
    extra: dict[str, Any] = field(default_factory=dict)
    rng: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    manifest: Manifest | None = None

    def entry(self, name: str) -> TensorStorageMetadata:
        """Shape, dtype and chunks of a tensor, by the reader's name."""
        found = self.reader.index.state_dict_metadata[name]
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"'{name}' of {self.folder.name} is not a tensor.")
        return found

    def tied(self, model: str) -> dict[str, str]:
        """Further names of a model's tensors, each with the first one."""
        places, first, found = self.reader.places(), dict[Hashable, str](), dict[str, str]()
        for name, place in self.models[model].items():
            kept = first.setdefault(places[place], name)
            if kept != name:
                found[name] = kept
        return found

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads whole tensors; by this process alone."""
        entries = {name: self.entry(name) for name in names}
        found: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()
        }
        if found:
            planner = local_planner()
            planner.set_up_planner(found, self.reader.index, is_coordinator=True)
            self.reader.read_data(planner.create_local_plan(), planner).wait()
        return found


def local_planner() -> DefaultLoadPlanner:
    """A planner for flat dicts of tensors; torch's, which otherwise changes names."""
    return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


class TensorReader(IndexedReader):
    """Reads tensors that are indexed lazily: memory-mapped ones, or slices of a safetensors file.

    Args:
        sources: by name: what indexing reads, shape and dtype.
    """

    def __init__(self, sources: Mapping[str, tuple[Any, tuple[int, ...], torch.dtype]]) -> None:
        super().__init__(
            Metadata(
                {
                    name: TensorStorageMetadata(
                        TensorProperties(dtype=dtype),
                        torch.Size(shape),
                        [ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))],
                    )
                    for name, (_, shape, dtype) in sources.items()
                }
            )
        )
        self._sources = sources

    def places(self) -> dict[str, Hashable]:
        """By name, the memory that holds it; what is read when it is indexed has one name only."""
        return {
            name: (source.data_ptr(), shape, source.stride(), dtype)
            if isinstance(source, Tensor) and source.numel()
            else name
            for name, (source, shape, dtype) in self._sources.items()
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan names, and no more."""
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._part(item).reshape(target.shape))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _part(self, item: ReadItem) -> Tensor:
        source = self._sources[item.storage_index.fqn][0]
        region = tuple(slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True))
        return torch.as_tensor(source[region if region else ...])


def open_checkpoint(path: str) -> Stored:
    """Opens a checkpoint; reads its small files only.

    Understands, without being told: our own directories, those of `torch.distributed.checkpoint` (FSDP2, Lightning's and
    Accelerate's FSDP), one file of torch or safetensors, and directories of Hugging Face models and trainers.

    Raises:
        CheckpointError: nothing is there, or nothing that can be read.
    """
    folder = Folder(path)
    recover(folder)
    if not folder.exists():
        raise CheckpointError(f"there is no checkpoint at {path}.")
    if not folder.fs.isdir(folder.path):
        return _of_file(folder)
    manifest = folder.manifest()
    if manifest is not None:
        return _of_our_own(folder, manifest)
    if has_torch_index(folder):
        return _of_torch(folder, read_index(folder))
    below = [name for name in folder.names() if folder.fs.isdir(folder / name) and has_torch_index(folder, f"{name}/")]
    if below:
        return _of_torch_directories(folder, below)
    return _of_hugging_face(folder)


def _of_our_own(folder: Folder, manifest: Manifest) -> Stored:
    for name, record in manifest.files.items():
        folder.check(name, record, content=name in (manifest.index, manifest.extra))
    reader = Reader(folder, read_index(folder))
    extra = torch.load(io.BytesIO(folder.read(manifest.extra)), map_location="cpu", weights_only=True)
    models: dict[str, dict[str, str]] = {key: {} for key in manifest.models}
    optimizers = {
        key: StoredOptimizer(param_groups=extra["param_groups"][key], shared=extra["shared"][key])
        for key in manifest.optimizers
    }
    for name in reader.index.state_dict_metadata:
        key, _, rest = name.partition(".")
        if key in models:
            if "_extra_state" not in rest.split("."):  # it is in `values`; here for plain torch only
                models[key][rest] = name
        elif key in optimizers and rest.startswith("state."):
            param, _, entry = rest.removeprefix("state.").rpartition(".")
            if entry not in optimizers[key].shared.get(param, {}):
                optimizers[key].tensors.setdefault(param, {})[entry] = name
    return Stored(folder, reader, models, optimizers, extra["extra"], extra["rng"], extra["values"], manifest)


def _of_torch(folder: Folder, index: Metadata) -> Stored:
    """A directory of `torch.distributed.checkpoint`: its index says how the state dicts were nested."""
    stored = Stored(folder, Reader(folder, index), {}, {})
    paths = index.planner_data or {name: (name,) for name in index.state_dict_metadata}
    for name, entry in index.state_dict_metadata.items():
        path = tuple(str(step) for step in paths.get(name, (name,)))
        if len(path) >= 3 and path[-3] == "state":
            optimizer = stored.optimizers.setdefault(".".join(path[:-3]) or _OPTIMIZER, StoredOptimizer())
            if isinstance(entry, TensorStorageMetadata):
                optimizer.tensors.setdefault(clean(path[-2]), {})[path[-1]] = name
            else:
                value = _value(stored, name)
                optimizer.shared.setdefault(clean(path[-2]), {})[path[-1]] = [(0, 2**62, value)]
        elif path[-1] == "param_groups" and isinstance(entry, BytesStorageMetadata):
            optimizer = stored.optimizers.setdefault(".".join(path[:-1]) or _OPTIMIZER, StoredOptimizer())
            optimizer.param_groups = _value(stored, name)
        elif isinstance(entry, TensorStorageMetadata):
            key = ".".join(path[:-1]) or _MODEL
            stored.models.setdefault(key, {})[clean(path[-1])] = name
    if folder.exists("meta.pt"):  # Lightning's FSDP
        stored.extra = _load_file(folder, "meta.pt")
    return stored


def _of_torch_directories(folder: Folder, below: list[str]) -> Stored:
    """Directories beside each other, as Accelerate's FSDP writes: one for each model, one for each optimizer."""
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    paths: dict[str, Any] = {}
    for name in sorted(below):
        index = read_index(folder, f"{name}/")
        given = index.planner_data or {key: (key,) for key in index.state_dict_metadata}
        entries.update({f"{name}.{key}": entry for key, entry in index.state_dict_metadata.items()})
        paths.update({f"{name}.{key}": (name, *given[key][-3:]) for key in index.state_dict_metadata})
        places.update({type(k)(f"{name}.{k.fqn}", k.offset, k.index): v for k, v in index.storage_data.items()})
    return _of_torch(folder, Metadata(entries, planner_data=paths, storage_data=places))


def _value(stored: Stored, name: str) -> Any:
    """A value of a DCP directory that is not a tensor."""
    reader = stored.reader
    if not isinstance(reader, Reader):
        raise AssertionError("only directories hold such values")
    place = next(place for index, place in reader.index.storage_data.items() if index.fqn == name)
    with reader.folder.open(place.relative_path) as file:
        file.seek(place.offset)
        return _plain(io.BytesIO(file.read(place.length)), f"'{name}' of {stored.folder.name}")


def _of_file(folder: Folder) -> Stored:
    if folder.path.endswith(".safetensors"):
        return _of_safetensors(folder, [folder.path])
    return _of_tree(folder, _mapped(folder.path, folder) if folder.is_local else _plain_of(folder))


def _of_safetensors(folder: Folder, files: list[str]) -> Stored:
    if not folder.is_local:
        raise CheckpointError(f"{folder.name}: safetensors files are read from local paths only; copy it first.")
    sources: dict[str, tuple[Any, tuple[int, ...], torch.dtype]] = {}
    for path in files:
        file = SafetensorsFile(path)
        for key in file.keys():
            part = file.slice(key)
            sources[key] = (part, tuple(part.get_shape()), SAFETENSORS_DTYPES[part.get_dtype()])
    return Stored(folder, TensorReader(sources), {_MODEL: {clean(key): key for key in sources}}, {})


def _of_tree(folder: Folder, tree: Any) -> Stored:
    """A torch file: a state dict, or a dict that holds some (Lightning's, or the usual {"model": ..., "optimizer": ...})."""
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{folder.name} holds a {type(tree).__name__}; expected a state dict or a dict of some.")
    sources: dict[str, tuple[Any, tuple[int, ...], torch.dtype]] = {}
    stored = Stored(folder, TensorReader({}), {}, {})
    for key, value in ({_MODEL: tree} if _is_model(tree) else tree).items():
        if _is_model(value):
            name = _MODEL if key == "state_dict" else str(key)
            tensors = {k: t for k, t in value.items() if isinstance(t, Tensor) and not is_extra_state(k)}
            stored.models[name] = {clean(k): f"{name}.{k}" for k in tensors}
            stored.values[name] = {clean(k): v for k, v in value.items() if k not in tensors}
            sources.update({f"{name}.{k}": _source(t) for k, t in tensors.items()})
        elif key == "optimizer_states" and isinstance(value, list):
            for number, state in enumerate(value):
                stored.optimizers[f"{_OPTIMIZER}_{number}"] = _positional(f"{_OPTIMIZER}_{number}", state, sources)
        elif isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys():
            stored.optimizers[str(key)] = _positional(str(key), value, sources)
        else:
            stored.extra[str(key)] = value
    stored.reader = TensorReader(sources)
    return stored


def _positional(key: str, state: Mapping[str, Any], sources: dict[str, Any]) -> StoredOptimizer:
    found = StoredOptimizer(param_groups=list(state["param_groups"]))
    ids = [param for group in state["param_groups"] for param in group["params"]]
    found.positional = all(isinstance(param, int) for param in ids)
    for number, param in enumerate(ids):
        for entry, value in state["state"].get(param, {}).items():
            name = str(number) if found.positional else clean(str(param))
            if isinstance(value, Tensor) and entry != "step":
                sources[f"{key}.state.{name}.{entry}"] = _source(value)
                found.tensors.setdefault(name, {})[entry] = f"{key}.state.{name}.{entry}"
            else:
                found.shared.setdefault(name, {})[entry] = [(0, 2**62, value)]
    return found


def _of_hugging_face(folder: Folder) -> Stored:
    """A directory of a model or trainer: weights in one or several files, optimizer and scheduler beside them."""
    names = folder.names()
    weights = [n for n in names if n.endswith((".safetensors.index.json", ".bin.index.json"))]
    files = sorted(
        {file for n in weights for file in json.loads(folder.read(n))["weight_map"].values()}
        or ({"model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin"} & set(names))
    )
    if not files:
        raise CheckpointError(
            f"{folder.name} is no checkpoint: it has neither a manifest (a save that was interrupted leaves none) nor "
            f"torch's index nor weights. It holds {sorted(names) or 'nothing'}."
        )
    if all(file.endswith(".safetensors") for file in files):
        stored = _of_safetensors(folder, [folder / file for file in files])
    else:
        merged = {k: v for file in files for k, v in _mapped(folder / file, folder).items()}
        stored = _of_tree(folder, merged)
    reader = stored.reader
    if not isinstance(reader, TensorReader):
        raise AssertionError("files are read by a TensorReader")
    sources = dict(reader._sources)
    for name in ("optimizer.pt", "optimizer.bin"):
        if name in names:
            stored.optimizers[_OPTIMIZER] = _positional(_OPTIMIZER, _mapped(folder / name, folder), sources)
            stored.reader = TensorReader(sources)
    return stored


def _is_model(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(
        isinstance(k, str) and (isinstance(v, Tensor) or is_extra_state(k)) for k, v in value.items()
    )  # fmt: skip


def _source(tensor: Tensor) -> tuple[Any, tuple[int, ...], torch.dtype]:
    return tensor, tuple(tensor.shape), tensor.dtype


def _mapped(path: str, folder: Folder) -> Any:
    """A torch file whose tensors are read when they are touched."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        with open(path, "rb") as file:  # written by a torch before 1.6
            return _plain(file, path)
    except Exception as error:
        raise _refusal(path, error) from error


def _plain_of(folder: Folder) -> Any:
    with folder.fs.open(folder.path, "rb") as file:
        return _plain(io.BytesIO(file.read()), folder.name)


def _load_file(folder: Folder, name: str) -> Any:
    return _plain(io.BytesIO(folder.read(name)), folder / name)


def _plain(file: Any, where: str) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _refusal(where, error) from error


def _refusal(where: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{where} holds more than tensors and plain values, so opening it could run code: {str(error).splitlines()[0]} "
        "If you trust where it comes from, allow what it names with torch.serialization.add_safe_globals([...])."
    )


SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
