"""An opened checkpoint of any format: which models, optimizers and other values it holds, and how their tensors are read."""

from __future__ import annotations

import io
import json
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from zero_core import deepspeed
from zero_core.deferred import SafetensorsFile
from zero_core.errors import CheckpointError
from zero_core.manifest import Manifest
from zero_core.pickled import load_mapped, load_plain
from zero_core.sharded_state import EVERYWHERE, clean, is_extra_state
from zero_core.storage import Folder, IndexedReader, Reader, has_torch_index, read_index, recover
from zero_core.tensor_reader import LazyTensor, TensorReader

_MODEL, _OPTIMIZER = "model", "optimizer"
Runs = dict[str, dict[str, list[tuple[int, int, Any]]]]

# Whole weights as transformers, PEFT, Accelerate and its FSDP name them.
_WEIGHTS = {
    "model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin", "pytorch_model_fsdp.bin",
}  # fmt: skip


@dataclass
class StoredOptimizer:
    """One optimizer of a checkpoint.

    Attributes:
        tensors: by parameter's name and key, the name under which the reader finds the tensor.
        param_groups: hyper-parameters, with the parameters' names; `None` where the checkpoint has none.
        settings: hyper-parameters by parameter's name, where the checkpoint has these instead of groups.
        shared: values of a whole slice that are at hand; see `sharded_state.OptimizerState`.
        positional: whether "names" are the parameters' numbers, counted through the groups.
    """

    tensors: dict[str, dict[str, str]] = field(default_factory=dict)
    param_groups: list[dict[str, Any]] | None = None
    settings: dict[str, dict[str, Any]] | None = None
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


def open_checkpoint(path: str, *, trusted: bool = False) -> Stored:
    """Opens a checkpoint; reads its small files only.

    Understands, without being told:

    - our own directories;
    - those of `torch.distributed.checkpoint`: of FSDP2, of Lightning's `FSDPStrategy` and `ModelParallelStrategy`, of
      Accelerate's FSDP; optimizers by name, nested or flattened (`flatten_optimizer_state_dict`);
    - one file of torch or safetensors: a state dict, a dict of several, a Lightning checkpoint;
    - directories of Hugging Face models and trainers, and of Accelerate with whole weights;
    - DeepSpeed's directories of ZeRO stage 1 to 3 (the folder with the file `latest`, or the one with the ranks' files):
      weights in fp32 from the partitions, optimizer state by name, and as `extra` the client state, the scheduler's and
      the counters. What was divided over ranks in another way too (tensor or pipeline parallelism, experts), and universal
      checkpoints, are refused.

    Files of torch and DeepSpeed are pickles, which can hold any object, and opening such a one runs code of the file's
    choice. They are opened as tensors and plain values only; DeepSpeed's own small classes become inert.

    Args:
        path: the checkpoint.
        trusted: open what holds more all the same. It can run any code: say so only of files whose origin you know.

    Raises:
        CheckpointError: nothing is there, or nothing that can be read; or a file holds more than tensors and plain values:
            names what.
    """
    folder = Folder(path)
    recover(folder)
    if not folder.exists():
        raise CheckpointError(f"there is no checkpoint at {path}.")
    if not folder.fs.isdir(folder.path):
        return _of_file(folder, trusted)
    manifest = folder.manifest()
    if manifest is not None:
        return _of_our_own(folder, manifest)
    if has_torch_index(folder):
        return _of_torch(folder, read_index(folder), trusted)
    tag = deepspeed.find(folder)
    if tag is not None:
        return _of_deepspeed(tag, trusted)
    below = [name for name in folder.names() if folder.fs.isdir(folder / name) and has_torch_index(folder, f"{name}/")]
    if below:
        return _of_torch_directories(folder, below, trusted)
    return _of_hugging_face(folder, trusted)


def _of_our_own(folder: Folder, manifest: Manifest) -> Stored:
    for name, record in manifest.files.items():
        folder.check(name, record, content=name in (manifest.index, manifest.extra))
    reader = Reader(folder, read_index(folder))
    extra = torch.load(io.BytesIO(folder.read(manifest.extra)), map_location="cpu", weights_only=True)
    models: dict[str, dict[str, str]] = {key: {} for key in manifest.models}
    optimizers: dict[str, StoredOptimizer] = {}
    for key in manifest.optimizers:
        groups = extra["param_groups"][key]
        by_name = isinstance(groups, dict)  # converted from a checkpoint that has them so
        optimizers[key] = StoredOptimizer(
            param_groups=None if by_name else groups, settings=groups if by_name else None, shared=extra["shared"][key]
        )
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


# -- directories of torch.distributed.checkpoint ---------------------------------------------------------------------


def _of_torch(folder: Folder, index: Metadata, trusted: bool) -> Stored:
    """Its index says how the state dicts were nested."""
    stored = Stored(folder, Reader(folder, index), {}, {})
    values = _values(stored, trusted)
    paths = {name: tuple((index.planner_data or {}).get(name, (name,))) for name in index.state_dict_metadata}
    flat = {path[:-1] for path in paths.values() if str(path[-1]).startswith("param_groups.")}
    loose: dict[tuple[str, str], dict[str, tuple[Any, ...]]] = {}
    for name, path in paths.items():
        root, kind, rest = _place(_unflattened(path) if path[:-1] in flat else path)
        if kind == "state":
            _add_state(stored.optimizers.setdefault(root or _OPTIMIZER, StoredOptimizer()), name, rest, values)
        elif kind == "tensor" and name not in values:
            stored.models.setdefault(_MODEL if root in ("", "state_dict") else root, {})[clean(rest[0])] = name
        else:
            owner, inner = ((root, kind), rest) if kind != "tensor" else (("", "extra"), path)
            loose.setdefault(owner, {})[name] = inner
    for (root, kind), names in loose.items():
        found = {name: values[name] for name in names if name in values}
        found |= stored.read(name for name in names if name not in values)
        tree = unflatten_state_dict(found, {name: ("all", *rest) for name, rest in names.items()})["all"]
        if kind == "param_groups":
            optimizer = stored.optimizers.setdefault(root or _OPTIMIZER, StoredOptimizer())
            if isinstance(tree, list):
                optimizer.param_groups = tree
            else:
                optimizer.settings = {clean(str(name)): settings for name, settings in tree.items()}
        elif kind == "extra_state":
            stored.values.setdefault(root or _MODEL, {}).update({clean(name): value for name, value in tree.items()})
        else:
            stored.extra.update(tree)
    if folder.exists("meta.pt"):  # Lightning's
        stored.extra.update(load_plain(io.BytesIO(folder.read("meta.pt")), folder / "meta.pt", trusted))
    return stored


def _unflattened(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The path that an entry of a flattened optimizer ("state.layer.weight.exp_avg") has in a nested one."""
    kind, _, rest = str(path[-1]).partition(".")
    name, _, key = rest.rpartition(".")
    return (*path[:-1], kind, name, key)


def _place(path: tuple[Any, ...]) -> tuple[str, str, tuple[Any, ...]]:
    """Of an entry the model or optimizer it belongs to, as what, and its path in that."""
    for at, step in enumerate(path):
        root = ".".join(map(str, path[:at]))
        if step == "param_groups":
            return root, "param_groups", path[at + 1 :]
        if step == "state" and len(path) - at == 3:
            return root, "state", path[at + 1 :]
        if is_extra_state(str(step)):
            return root, "extra_state", path[at:]
    return ".".join(map(str, path[:-1])), "tensor", path[-1:]


def _add_state(optimizer: StoredOptimizer, place: str, path: tuple[Any, ...], values: Mapping[str, Any]) -> None:
    name, key = clean(str(path[0])), str(path[1])
    if place in values:
        optimizer.shared.setdefault(name, {})[key] = [(*EVERYWHERE, values[place])]
    else:
        optimizer.tensors.setdefault(name, {})[key] = place


def _values(stored: Stored, trusted: bool) -> dict[str, Any]:
    """By name, what is not tensors; each was pickled by itself."""
    folder, index = stored.folder, stored.reader.index
    found: dict[str, Any] = {}
    by_file: dict[str, list[tuple[str, Any]]] = {}
    for item, place in index.storage_data.items():
        if isinstance(index.state_dict_metadata.get(item.fqn), BytesStorageMetadata):
            by_file.setdefault(place.relative_path, []).append((item.fqn, place))
    for path, places in by_file.items():
        with folder.open(path) as file:
            for name, place in places:
                content = io.BytesIO(folder.read_part(file, place, name))
                found[name] = load_plain(content, f"'{name}' of {folder.name}", trusted)
    return found


def _of_torch_directories(folder: Folder, below: list[str], trusted: bool) -> Stored:
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
    return _of_torch(folder, Metadata(entries, planner_data=paths, storage_data=places), trusted)


# -- files and directories of files ----------------------------------------------------------------------------------


class _Assembly:
    """A checkpoint that is put together from state dicts whose tensors are at hand, or are read when they are indexed."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._tensors: dict[str, LazyTensor] = {}
        self._models: dict[str, dict[str, str]] = {}
        self._values: dict[str, dict[str, Any]] = {}
        self._optimizers: dict[str, StoredOptimizer] = {}
        self.extra: dict[str, Any] = {}

    def stored(self) -> Stored:
        """The checkpoint."""
        reader = TensorReader(self._tensors)
        return Stored(self._folder, reader, self._models, self._optimizers, self.extra, values=self._values)

    def add_model(self, key: str, state: Mapping[str, Any]) -> None:
        """Adds a model's state dict."""
        tensors = {name: value for name, value in state.items() if _is_tensor(value) and not is_extra_state(name)}
        self._models[key] = {clean(name): self._keep(f"{key}.{name}", value) for name, value in tensors.items()}
        self._values[key] = {clean(name): value for name, value in state.items() if name not in tensors}

    def add_optimizer(self, key: str, state: Mapping[str, Any]) -> None:
        """Adds an optimizer's state dict, by number or by name."""
        groups = state.get("param_groups")
        found = StoredOptimizer(param_groups=None if groups is None else list(groups))
        ids = list(state["state"]) if groups is None else [param for group in groups for param in group["params"]]
        found.positional = all(isinstance(param, int) for param in ids)
        for number, param in enumerate(ids):
            name = str(number) if found.positional else clean(str(param))
            for entry, value in state["state"].get(param, {}).items():
                if _is_tensor(value) and entry != "step":
                    place = self._keep(f"{key}.state.{name}.{entry}", value)
                    found.tensors.setdefault(name, {})[entry] = place
                else:
                    found.shared.setdefault(name, {})[entry] = [(*EVERYWHERE, value)]
        self._optimizers[key] = found

    def add_tree(self, tree: Any) -> None:
        """Adds a state dict, or a dict that holds some (Lightning's, or the usual {"model": ..., "optimizer": ...})."""
        if not isinstance(tree, Mapping):
            raise CheckpointError(
                f"{self._folder.name} holds a {type(tree).__name__}; expected a state dict or a dict of some."
            )
        for key, value in ({_MODEL: tree} if _is_model(tree) else tree).items():
            if _is_model(value):
                self.add_model(_MODEL if key == "state_dict" else str(key), value)
            elif key == "optimizer_states" and isinstance(value, list):
                for number, state in enumerate(value):
                    self.add_optimizer(f"{_OPTIMIZER}_{number}", state)
            elif isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys():
                self.add_optimizer(str(key), value)
            else:
                self.extra[str(key)] = value

    def _keep(self, place: str, value: Tensor | LazyTensor) -> str:
        self._tensors[place] = LazyTensor.of(value) if isinstance(value, Tensor) else value
        return place


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (Tensor, LazyTensor))


def _is_model(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(
        isinstance(k, str) and (isinstance(v, Tensor) or is_extra_state(k)) for k, v in value.items()
    )  # fmt: skip


def _of_file(folder: Folder, trusted: bool) -> Stored:
    found = _Assembly(folder)
    if folder.path.endswith(".safetensors"):
        found.add_model(_MODEL, _safetensors(folder, [folder.path]))
    elif folder.is_local:
        found.add_tree(load_mapped(folder.path, trusted))
    else:
        with folder.fs.open(folder.path, "rb") as file:
            found.add_tree(load_plain(io.BytesIO(file.read()), folder.name, trusted))
    return found.stored()


def _of_deepspeed(folder: Folder, trusted: bool) -> Stored:
    state = deepspeed.read(folder, trusted)
    found = _Assembly(folder)
    found.add_model(_MODEL, state.model)
    if state.optimizer:
        found.add_optimizer(_OPTIMIZER, state.optimizer)
    found.extra = state.extra
    return found.stored()


def _of_hugging_face(folder: Folder, trusted: bool) -> Stored:
    """A directory of a model or trainer: weights in one or several files, optimizer and scheduler beside them."""
    names = folder.names()
    weights = [n for n in names if n.endswith((".safetensors.index.json", ".bin.index.json"))]
    files = sorted(
        {file for n in weights for file in json.loads(folder.read(n))["weight_map"].values()} or _WEIGHTS & {*names}
    )
    if not files:
        raise CheckpointError(
            f"{folder.name} is no checkpoint: it has neither a manifest (a save that was interrupted leaves none) nor "
            f"torch's index nor weights. It holds {sorted(names) or 'nothing'}."
        )
    found = _Assembly(folder)
    if all(file.endswith(".safetensors") for file in files):
        found.add_model(_MODEL, _safetensors(folder, [folder / file for file in files]))
    else:
        found.add_tree({k: v for file in files for k, v in load_mapped(folder / file, trusted).items()})
    for name in ("optimizer.pt", "optimizer.bin"):
        if name in names:
            found.add_optimizer(_OPTIMIZER, load_mapped(folder / name, trusted))
    return found.stored()


def _safetensors(folder: Folder, files: list[str]) -> dict[str, LazyTensor]:
    if not folder.is_local:
        raise CheckpointError(f"{folder.name}: safetensors files are read from local paths only; copy it first.")
    found: dict[str, LazyTensor] = {}
    for path in files:
        file = SafetensorsFile(path)
        for key in file.keys():
            part = file.slice(key)
            found[key] = LazyTensor.whole(part, part.get_shape(), SAFETENSORS_DTYPES[part.get_dtype()])
        found.update({name: found[kept] for name, kept in file.tied().items()})
    return found


SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
