"""Saving and loading: every rank its part, under names and logical shapes, all or nothing."""

from __future__ import annotations

import io
import os
import random
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from zero_core.collectives import raising_together
from zero_core.engine import ZeroEngine, engine_of
from zero_core.errors import CheckpointError
from zero_core.manifest import FileRecord, Manifest, ModelRecord, OptimizerRecord, index_to_json
from zero_core.sharded_state import ModelState, OptimizerLoad, OptimizerState, clean, same
from zero_core.storage import Folder, Staging, Writer
from zero_core.stored import Stored, StoredOptimizer, local_planner, open_checkpoint

Engines = ZeroEngine | Mapping[str, ZeroEngine]
Optimizers = Optimizer | Mapping[str, Optimizer] | None
Path = str | os.PathLike[str]
T = TypeVar("T")

# One save after the other, each on its way while training goes on.
_in_background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zero-checkpoint")


@dataclass
class Loaded:
    """What `load_checkpoint` found.

    Attributes:
        extra: what the run that saved gave as `extra`.
        missing: names of the model's tensors that the checkpoint does not have; they keep their values.
        unexpected: names that the model does not have.
        optimizers: keys of the optimizers whose state was loaded.
    """

    extra: dict[str, Any]
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Snapshot:
    """All that a save writes; this rank's part."""

    models: dict[str, ModelState]
    optimizers: dict[str, OptimizerState]
    records: tuple[dict[str, ModelRecord], dict[str, OptimizerRecord]]
    extra: dict[str, Any]
    rng: dict[str, Any]
    group: dist.ProcessGroup | None = None

    def copy(self) -> Snapshot:
        """The same in host memory of its own."""
        return replace(
            self,
            models={key: state.copy() for key, state in self.models.items()},
            optimizers={key: state.copy() for key, state in self.optimizers.items()},
        )


def save_checkpoint(
    path: Path, engines: Engines, optimizers: Optimizers = None, extra: Mapping[str, Any] | None = None
) -> None:
    """Saves models, optimizers and everything else into one directory. All ranks.

    The directory appears when it is complete: a save that fails or is killed leaves a checkpoint that was there before as
    it was, and never half a one. It loads at any number of ranks and stage, with `load_checkpoint`, or with
    `torch.distributed.checkpoint.load` in plain PyTorch, DDP and FSDP2. Each rank writes its part, a chunk at a time.

    Args:
        path: the directory, on a file system that all ranks see, or an fsspec URL. One that exists is replaced.
        engines: an engine (kept under the key "model"), or several by key.
        optimizers: a bound optimizer (kept under "optimizer"), or several by key; `None` for weights only.
        extra: plain values (numbers, text, tensors, lists and dicts of them), and objects with a `state_dict()`
            (schedulers, scalers), of which that is kept. Rank 0's is saved. Random number generators are saved by
            themselves, each rank's own.

    Raises:
        ValueError: a value of `extra` is not plain.
        Exception: writing failed; on all ranks.
    """
    snapshot = _snapshot("save_checkpoint()", engines, optimizers, extra)
    _write(os.fspath(path), snapshot)


def async_save_checkpoint(
    path: Path, engines: Engines, optimizers: Optimizers = None, extra: Mapping[str, Any] | None = None
) -> Future[None]:
    """`save_checkpoint` that returns when this rank's part is copied into host memory; the rest goes on beside training.

    All ranks. Saves are finished in the order they were started, at the latest when the process ends. Needs room for a
    copy of this rank's shards.

    Returns:
        a future; `result()` waits for the end and raises what failed.
    """
    snapshot = _snapshot("async_save_checkpoint()", engines, optimizers, extra).copy()
    return _in_background.submit(_write, os.fspath(path), snapshot)


def load_checkpoint(
    path: Path,
    engines: Engines,
    optimizers: Optimizers = None,
    extra: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
) -> Loaded:
    """Loads a checkpoint into sharded models and their optimizers; each rank reads its part. All ranks.

    Takes our own directories and foreign ones, from any number of ranks (see `open_checkpoint`): DCP directories (FSDP2,
    plain PyTorch, Lightning's and Accelerate's FSDP), one-file torch and safetensors checkpoints, Hugging Face ones.

    Args:
        path: the checkpoint.
        engines: an engine, or several by key.
        optimizers: bound optimizers likewise; `None` leaves them alone.
        extra: objects with a `load_state_dict()`, by the key they were saved under, to restore.
        strict: refuse what does not fit exactly. Frozen parameters may be missing all together all the same, as
            they are in a checkpoint of adapters.
        rename: beginnings of stored names, each with what to put in its place. What compilers and wrappers put in front
            is left out anyway, and so is a single prefix by which all names differ.

    Returns:
        what was found beside; random number generators go on where they were if `optimizers` are given and the number of
        ranks is the same.

    Raises:
        CheckpointError: it is damaged, or names or shapes do not fit; lists all that do not. On all ranks.
        ValueError: it has other models or optimizers than asked for, or an optimizer's groups differ.
    """
    models, bound = _by_key(engines, "model"), _by_key(optimizers or {}, "optimizer")
    first = _meet("load_checkpoint()", models)
    group = first.checkpoint_group
    with raising_together(group):
        stored = open_checkpoint(os.fspath(path))
        loaded, targets = _plan_models(stored, models, strict, rename or {})
        rooms = {key: OptimizerRoom(stored, found, optimizer) for key, optimizer, found in _paired(stored, bound)}
        for room in rooms.values():
            targets.update(room.targets)
    with ExitStack() as stack:
        for engine in models.values():
            stack.enter_context(engine.overwriting())
        _read(stored, targets, group)
    with raising_together(group):
        for key, room in rooms.items():
            room.finish()
            loaded.optimizers.append(key)
        for key, item in (extra or {}).items():
            if key not in stored.extra:
                raise CheckpointError(f"{path} has no extra '{key}'; it has {sorted(stored.extra) or 'none'}.")
            item.load_state_dict(stored.extra[key])
    if bound and len(stored.rng) == first.world_size:
        set_random_state(stored.rng[first.rank])
    return loaded


def verify_checkpoint(path: Path) -> Manifest:
    """Reads every file of a checkpoint and compares it with the manifest. One process is enough; needs no process group.

    Raises:
        CheckpointError: a file is missing, truncated or changed; names it.
    """
    folder = Folder(path)
    manifest = folder.manifest() if folder.exists() else None
    if manifest is None:
        raise CheckpointError(f"{folder.name} is no checkpoint of zero-redundancy: it has no manifest.")
    for name, record in manifest.files.items():
        folder.check(name, record)
    return manifest


# -- saving ----------------------------------------------------------------------------------------------------------


def _snapshot(call: str, engines: Engines, optimizers: Optimizers, extra: Mapping[str, Any] | None) -> Snapshot:
    models, bound = _by_key(engines, "model"), _by_key(optimizers or {}, "optimizer")
    first = _meet(call, models)
    with raising_together(first.checkpoint_group):
        states = {key: engine.model_state() for key, engine in models.items()}
        owners = {key: _engine_of(key, optimizer, models) for key, optimizer in bound.items()}
        optimizer_states = {key: owners[key][1].optimizer_state(optimizer) for key, optimizer in bound.items()}
        records = (
            {
                key: ModelRecord(engine.config.zero_stage.value, _precision(engine), states[key].tied)
                for key, engine in models.items()
            },
            {key: OptimizerRecord(type(optimizer).__name__, owners[key][0]) for key, optimizer in bound.items()},
        )
        plain = {
            key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in (extra or {}).items()
        }
        check_plain(plain)
    return Snapshot(states, optimizer_states, records, plain, random_state(), first.checkpoint_group)


def _write(path: str, snapshot: Snapshot) -> None:
    group = snapshot.group
    first = dist.get_rank(group) == 0
    identity = [uuid.uuid4().hex[:8]]
    dist.broadcast_object_list(identity, group_src=0, group=group)
    staging = Staging(Folder(path), identity[0])
    try:
        with raising_together(group):
            if first:
                staging.prepare()
        _write_aside(staging, snapshot)
    except BaseException:
        if first:
            staging.discard()
        raise


def _write_aside(staging: Staging, snapshot: Snapshot) -> None:
    group, folder = snapshot.group, staging.folder
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    with raising_together(group):
        if folder.is_local and not folder.exists():
            raise CheckpointError(
                f"rank {rank} does not see {folder.path}, which rank 0 made: checkpoints need a directory that all ranks "
                "see, or an fsspec URL."
            )
    shared, rng = _gather(group, ({k: s.shared for k, s in snapshot.optimizers.items()}, snapshot.rng))
    merged = {key: _merge([part[key] for part in shared]) for key in snapshot.optimizers}
    tied = {f"{k}.{name}": f"{k}.{kept}" for k, s in snapshot.models.items() for name, kept in s.tied.items()}
    writer = Writer(folder, staging.save_id, tied)
    _raising_own(
        lambda: dcp_save(
            nested(snapshot, merged, rank),
            storage_writer=writer,
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            process_group=group,
        ),
        rank,
    )
    with raising_together(group):  # what is on the disk is what was meant to be there
        for name, record in writer.records.items():
            folder.check(name, record)
    (records,) = _gather(group, (writer.records,))
    with raising_together(group):
        if rank == 0:
            files = {name: record for of_rank in records for name, record in of_rank.items()}
            staging.publish(finish(folder, staging.save_id, snapshot, writer, merged, rng, files, world_size))


def finish(
    folder: Folder,
    save_id: str,
    snapshot: Snapshot,
    writer: Writer,
    shared: dict[str, Any],
    rng: list[Any],
    files: dict[str, FileRecord],
    world_size: int,
) -> Manifest:
    """Writes what is not tensors."""
    index, extra = f"{save_id}-index.json", f"{save_id}-extra.pt"
    files[index] = folder.write(index, index_to_json(writer.index).encode())
    rest = io.BytesIO()
    groups = {key: state.param_groups for key, state in snapshot.optimizers.items()}
    values = {key: state.values for key, state in snapshot.models.items()}
    torch.save({"extra": snapshot.extra, "rng": rng, "param_groups": groups, "shared": shared, "values": values}, rest)
    files[extra] = folder.write(extra, rest.getvalue())
    writer.write_torch_index()
    models, optimizers = snapshot.records
    return Manifest(world_size, models, optimizers, files, index, extra, _versions())


def nested(snapshot: Snapshot, shared: dict[str, Any], rank: int) -> dict[str, Any]:
    """What this rank writes, nested as torch's own `get_model_state_dict` and `get_optimizer_state_dict` are."""
    tree: dict[str, Any] = {}
    for key, model in snapshot.models.items():
        whole = {} if rank else model.values
        tree[key] = {n: t for n, t in model.tensors.items() if rank == 0 or type(t) is not Tensor} | whole
    for key, optimizer in snapshot.optimizers.items():
        state: dict[str, dict[str, Any]] = {name: dict(entries) for name, entries in optimizer.tensors.items()}
        tree[key] = {"state": state}
        if rank == 0:
            for name, entries in shared[key].items():
                state.setdefault(name, {}).update({entry: runs[0][2] for entry, runs in entries.items()})
            tree[key]["param_groups"] = optimizer.param_groups
    return tree


def _merge(parts: list[dict[str, dict[str, list[Any]]]]) -> dict[str, dict[str, list[Any]]]:
    """All ranks' values of whole slices; one for a whole parameter where they are the same."""
    merged: dict[str, dict[str, list[Any]]] = {}
    for part in parts:
        for name, entries in part.items():
            for key, runs in entries.items():
                merged.setdefault(name, {}).setdefault(key, []).extend(runs)
    for entries in merged.values():
        for key, runs in entries.items():
            if all(same(run[2], runs[0][2]) for run in runs):
                entries[key] = [(0, 2**62, runs[0][2])]
    return merged


def check_plain(extra: dict[str, Any]) -> None:
    """Raises a ValueError that names the value which only a pickle could keep."""
    for key, value in extra.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:
            raise ValueError(
                f"extra['{key}'] (a {type(value).__name__}) holds more than plain values, so only a pickle could keep it: "
                f"{str(error).splitlines()[0]} Pass numbers, text, tensors, and lists and dicts of them."
            ) from error


def _precision(engine: ZeroEngine) -> str | None:
    return None if engine.config.precision is None else str(engine.config.precision)


def _versions() -> dict[str, str]:
    return {"zero-redundancy": version("zero-redundancy"), "torch": str(torch.__version__)}


# -- loading ---------------------------------------------------------------------------------------------------------


class OptimizerRoom:
    """One optimizer's part of a load.

    Args:
        stored: the checkpoint.
        found: the optimizer in it.
        optimizer: the one to load.

    Raises:
        ValueError: the groups do not fit.
        CheckpointError: a state has another shape than its parameter.
    """

    def __init__(self, stored: Stored, found: StoredOptimizer, optimizer: Optimizer) -> None:
        engine = engine_of(optimizer)
        if engine is None:
            raise ValueError(f"this {type(optimizer).__name__} is not bound to an engine; call engine.bind(optimizer).")
        self._load: OptimizerLoad = engine.optimizer_load(optimizer)
        names = self._load.names()
        at = {str(number): name for number, name in enumerate(names)} if found.positional else {n: n for n in names}
        self._groups = _fitting_groups(found, optimizer, self._load)
        self.targets: dict[str, Any] = {}
        shapes, whole = self._load.shapes(), dict[tuple[str, str], str]()
        self._shared = {at[name]: dict(entries) for name, entries in found.shared.items() if name in at}
        for given, entries in found.tensors.items():
            if given not in at:
                continue
            name = at[given]
            for key, place in entries.items():
                entry = stored.entry(place)
                if key == "step" or (tuple(entry.size) != shapes[name] and entry.size.numel() == 1):
                    whole[name, key] = place
                    continue
                if tuple(entry.size) != shapes[name]:
                    raise CheckpointError(
                        f"the state '{key}' of '{name}' has shape {tuple(entry.size)} in {stored.folder.name}, and the "
                        f"parameter {shapes[name]}."
                    )
                room = self._load.room(name, key, entry.properties.dtype)
                if room is not None:
                    self.targets[place] = room
        values = stored.read(whole.values())
        for (name, key), place in whole.items():
            self._shared.setdefault(name, {})[key] = [(0, 2**62, values[place])]

    def finish(self) -> None:
        """Hands over what was read."""
        self._load.finish(self._shared, self._groups)


def _fitting_groups(found: StoredOptimizer, optimizer: Optimizer, load: OptimizerLoad) -> list[dict[str, Any]]:
    if found.param_groups is None:
        return [dict(group) for group in optimizer.param_groups]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    given = [len(group["params"]) for group in found.param_groups]
    names = [clean(str(name)) for group in found.param_groups for name in group["params"]]
    if sizes != given or (not found.positional and sorted(names) != sorted(load.names())):
        raise ValueError(
            f"the checkpoint's optimizer has groups of {given} parameters, and this {type(optimizer).__name__} of {sizes}"
            f"{', by other names' if sizes == given else ''}. Make the same groups as the run that saved it, or load the "
            "weights alone: load_checkpoint(path, engine)."
        )
    return found.param_groups


def _plan_models(
    stored: Stored, models: dict[str, ZeroEngine], strict: bool, rename: Mapping[str, str]
) -> tuple[Loaded, dict[str, Any]]:
    loaded, targets = Loaded(stored.extra), dict[str, Any]()
    problems: list[str] = []
    for key, engine, names in matching(stored.models, models, "model"):
        state = engine.model_state()
        names = renamed(names, state.names, rename)
        shown = f"{key}." if len(models) > 1 else ""
        missing = [n for n in state.names if n not in names and state.tied.get(n, n) not in names]
        kept = {kept: n for n, kept in state.tied.items() if n in names}
        missing = [name for name in missing if name not in kept]
        loaded.missing += [shown + name for name in missing]
        loaded.unexpected += [shown + name for name in names if name not in state.names]
        for name, tensor in state.tensors.items():
            place = names.get(name) or names.get(kept.get(name, ""))
            if place is not None and stored.entry(place).size == tensor.shape:
                targets[place] = tensor
        problems += [
            f"'{shown}{name}' has shape {tuple(stored.entry(place).size)} there and {state.names[name]} here"
            for name, place in names.items()
            if name in state.names and tuple(stored.entry(place).size) != state.names[name]
        ]
        frozen = {clean(n) for n, p in engine.model.named_parameters() if not p.requires_grad}
        if strict and missing and set(missing) != frozen:
            problems.append(f"missing there: {', '.join(shown + name for name in missing)}")
        if strict and (extra := [n for n in names if n not in state.names]):
            problems.append(f"not in the model: {', '.join(shown + name for name in extra)}")
    if problems:
        raise CheckpointError(
            f"{stored.folder.name} does not fit the model. "
            + "; ".join(problems)
            + (". Pass strict=False to load what fits, or rename={'stored prefix': 'model prefix'}." if strict else ".")
        )
    return loaded, targets


def renamed(names: dict[str, str], wanted: Mapping[str, Any], rename: Mapping[str, str]) -> dict[str, str]:
    """Stored names as the model's: by the user's prefixes, or by the one prefix that makes them all fit."""
    for old, new in rename.items():
        names = {new + n.removeprefix(old) if n.startswith(old) else n: place for n, place in names.items()}
    if rename or not wanted or not names or any(name in wanted for name in names):
        return names
    a_stored, a_wanted = next(iter(names)), next(iter(wanted))
    for name in names:
        prefix = name[: -len(a_wanted)] if name.endswith(f".{a_wanted}") else ""
        if prefix and all(f"{prefix}{w}" in names for w in wanted):
            return {n.removeprefix(prefix): place for n, place in names.items()}
    for name in wanted:
        prefix = name[: -len(a_stored)] if name.endswith(f".{a_stored}") else ""
        if prefix and all(f"{prefix}{n}" in wanted for n in names):
            return {prefix + n: place for n, place in names.items()}
    return names


def _paired(stored: Stored, optimizers: Mapping[str, Optimizer]) -> list[tuple[str, Optimizer, StoredOptimizer]]:
    if optimizers and not stored.optimizers:
        raise CheckpointError(
            f"{stored.folder.name} has weights only, and no optimizer's state. Load it without the optimizer, which then "
            "starts afresh: load_checkpoint(path, engine)."
        )
    return list(matching(stored.optimizers, optimizers, "optimizer"))


def matching(stored: Mapping[str, T], wanted: Mapping[str, Any], what: str) -> list[tuple[str, Any, T]]:
    """Pairs by key, or by order where the hosts name them differently and there are equally many."""
    if all(key in stored for key in wanted):
        return [(key, item, stored[key]) for key, item in wanted.items()]
    if len(stored) != len(wanted):
        raise ValueError(
            f"the checkpoint has the {what}s {sorted(stored)}, and asked for are {sorted(wanted)}. Pass a dict with them."
        )
    return [(key, item, found) for (key, item), found in zip(wanted.items(), stored.values(), strict=True)]


def _read(stored: Stored, targets: dict[str, Any], group: dist.ProcessGroup) -> None:
    _raising_own(
        lambda: dcp_load(targets, storage_reader=stored.reader, planner=local_planner(), process_group=group),
        dist.get_rank(group),
    )


# -- both ------------------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """The state of this process's random number generators, as plain values."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    try:
        import numpy as np
    except ImportError:
        return state
    kind, keys, *rest = np.random.get_state()
    state["numpy"] = (str(kind), torch.from_numpy(np.asarray(keys).astype("int64")), *rest)
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores what `random_state` returned."""
    numbers, words, gauss = state["python"]
    random.setstate((numbers, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy as np

        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))


def _by_key(items: Any, single: str) -> dict[str, Any]:
    if not isinstance(items, Mapping):
        return {single: items}
    for key in items:
        if not key or "." in key:
            raise ValueError(f"expected keys without dots, which separate them from names, got {key!r}.")
    return dict(items)


def _meet(call: str, models: Mapping[str, ZeroEngine]) -> ZeroEngine:
    """Finds out in seconds when a rank makes a call alone."""
    first = next(iter(models.values()), None)
    if first is None:
        raise ValueError(f"{call} needs an engine.")
    first.meet(call)
    return first


def _engine_of(key: str, optimizer: Optimizer, models: Mapping[str, ZeroEngine]) -> tuple[str, ZeroEngine]:
    engine = engine_of(optimizer)
    for name, candidate in models.items():
        if candidate is engine:
            return name, candidate
    raise ValueError(
        f"'{key}' ({type(optimizer).__name__}) steps parameters of none of the engines given; pass its engine."
    )


def _gather(group: dist.ProcessGroup | None, values: tuple[Any, ...]) -> list[list[Any]]:
    """For each value, every rank's, in rank order."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, values, group=group)
    return [list(column) for column in zip(*found, strict=True)]


def _raising_own(call: Callable[[], Any], rank: int) -> None:
    """Calls one of DCP's functions, whose errors come as a bundle; raises like `raising_together`."""
    try:
        call()
    except CheckpointException as bundle:
        failures = {at: failure[0] for at, failure in bundle.failures.items()}
        if rank in failures:
            raise failures[rank] from None
        at, error = next(iter(failures.items()))
        raise RuntimeError(f"rank {at} failed: {type(error).__name__}: {error}") from None
