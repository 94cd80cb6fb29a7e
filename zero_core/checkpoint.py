"""Saving and loading: every rank its part, under names and logical shapes, all or nothing."""

from __future__ import annotations

import io
import os
import random
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from zero_core.collectives import raising_together
from zero_core.engine import ZeroEngine
from zero_core.errors import CheckpointError
from zero_core.load_plan import LoadPlan, owner
from zero_core.manifest import FileRecord, Manifest, ModelRecord, OptimizerRecord, index_to_json
from zero_core.sharded_state import EVERYWHERE, ModelState, OptimizerState, same
from zero_core.storage import Folder, Progress, Staging, Writer
from zero_core.stored import Stored, local_planner, open_checkpoint
from zero_core.watchdog import saying_who_is_lost

Engines = ZeroEngine | Mapping[str, ZeroEngine]
Optimizers = Optimizer | Mapping[str, Optimizer] | None
Path = str | os.PathLike[str]

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
            extra=deepcopy(self.extra),
        )


def save_checkpoint(
    path: Path,
    engines: Engines,
    optimizers: Optimizers = None,
    extra: Mapping[str, Any] | None = None,
    *,
    states: Mapping[str, ModelState | OptimizerState] | None = None,
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
        states: of a model or optimizer by its key, what to write instead of its state (`ModelState()` for nothing of it).

    Raises:
        ValueError: a value of `extra` is not plain.
        Exception: writing failed; on all ranks.
    """
    snapshot = _snapshot("save_checkpoint()", engines, optimizers, extra, states)
    _wait_for_saves()
    _write(os.fspath(path), snapshot)


def async_save_checkpoint(
    path: Path,
    engines: Engines,
    optimizers: Optimizers = None,
    extra: Mapping[str, Any] | None = None,
    *,
    states: Mapping[str, ModelState | OptimizerState] | None = None,
) -> Future[None]:
    """`save_checkpoint` that returns when this rank's part is copied into host memory; the rest goes on beside training.

    All ranks. Saves are finished in the order they were started, at the latest when the process ends. Needs room for a
    copy of this rank's shards.

    Returns:
        a future; `result()` waits for the end and raises what failed.
    """
    snapshot = _snapshot("async_save_checkpoint()", engines, optimizers, extra, states, copies=True)
    return _in_background.submit(_write, os.fspath(path), snapshot)


def load_checkpoint(
    path: Path | Stored,
    engines: Engines,
    optimizers: Optimizers = None,
    extra: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
    skip: Collection[str] = (),
    trusted: bool = False,
) -> Loaded:
    """Loads a checkpoint into sharded models and their optimizers; each rank reads its part. All ranks.

    Takes our own directories and foreign ones, from any number of ranks (see `open_checkpoint`): DCP directories (FSDP2,
    plain PyTorch, Lightning's and Accelerate's FSDP), one-file torch and safetensors checkpoints, Hugging Face ones, and
    DeepSpeed's of ZeRO stage 1 to 3, each with the optimizer's state.

    Args:
        path: the checkpoint, or one that this rank has opened (`open_checkpoint`), where its content decides what to load.
        engines: an engine, or several by key.
        optimizers: bound optimizers likewise; `None` leaves them alone.
        extra: objects with a `load_state_dict()`, by the key they were saved under, to restore.
        strict: refuse what does not fit exactly. Frozen parameters may be missing all together all the same, as
            they are in a checkpoint of adapters.
        rename: beginnings of stored names, each with what to put in its place. What compilers and wrappers put in front
            is left out anyway, and so is a single prefix by which all names differ.
        skip: keys of models that keep their weights; of these the optimizer is loaded alone.
        trusted: open pickled files (of torch, DeepSpeed) that hold more than tensors and plain values all the same. That
            can run any code: say so only of files whose origin you know.

    Returns:
        what was found beside; random number generators go on where they were if `optimizers` are given and the number of
        ranks is the same.

    Raises:
        CheckpointError: it is damaged, or names, shapes or an optimizer's groups do not fit; lists all that do not. Or a
            file holds more than plain values; names what. On all ranks; where something does not fit, nothing was changed.
        ValueError: it has other models or optimizers than asked for.
    """
    models, bound, extra = _by_key(engines, "model"), _by_key(optimizers or {}, "optimizer"), extra or {}
    first = _meet("load_checkpoint()", models)
    _wait_for_saves()
    group = first.checkpoint_group
    with raising_together(group):
        stored = path if isinstance(path, Stored) else open_checkpoint(os.fspath(path), trusted=trusted)
        plan = LoadPlan(stored, models, bound, extra, strict, rename or {}, skip)
        targets = plan.targets()
    with ExitStack() as stack:
        for engine in [engine for key, engine in models.items() if key not in skip]:
            stack.enter_context(engine.overwriting())
        _read(stored, targets, group)
    rng = stored.rng[first.rank] if bound and len(stored.rng) == first.world_size else None
    with raising_together(group):
        plan.finish({} if rng is None else rng.get("rounding", {}))
        for key, item in extra.items():
            item.load_state_dict(stored.extra[key])
    if rng is not None:
        set_random_state(rng)
    return Loaded(stored.extra, plan.missing, plan.unexpected, list(plan.optimizers))


def verify_checkpoint(path: Path, *, progress: Progress | None = None) -> Manifest:
    """Reads every file of a checkpoint and compares it with the manifest. One process is enough; needs no process group.

    Args:
        path: the checkpoint.
        progress: called with a file's name, bytes read so far and bytes in all.

    Raises:
        CheckpointError: files are missing, truncated or changed; names all of them.
    """
    folder = Folder(path)
    manifest = folder.manifest() if folder.exists() else None
    if manifest is None:
        raise CheckpointError(f"{folder.name} is no checkpoint of zero-redundancy: it has no manifest.")
    done, total, problems = 0, sum(record.size for record in manifest.files.values()), list[str]()
    for name, record in manifest.files.items():
        tell = None if progress is None else partial(_tell, progress, name, done, total)
        try:
            folder.check(name, record, progress=tell)
        except CheckpointError as error:
            problems.append(str(error))
        done += record.size
    if problems:
        raise CheckpointError(" ".join(problems))
    return manifest


def _tell(progress: Progress, name: str, before: int, total: int, size: int) -> None:
    progress(name, before + size, total)


# -- saving ----------------------------------------------------------------------------------------------------------


def _snapshot(
    call: str,
    engines: Engines,
    optimizers: Optimizers,
    extra: Mapping[str, Any] | None,
    given: Mapping[str, Any] | None,
    copies: bool = False,
) -> Snapshot:
    models, bound = _by_key(engines, "model"), _by_key(optimizers or {}, "optimizer")
    first = _meet(call, models)
    group = first.checkpoint_group
    with first.raising_together():  # over another group than that of checkpoints, on which a save may be on its way
        if both := models.keys() & bound.keys():
            raise ValueError(
                f"a model and an optimizer have the same key: {', '.join(map(repr, sorted(both)))}. Give each its own."
            )
        given = given or {}
        states = {key: given[key] if key in given else engine.model_state() for key, engine in models.items()}
        owners = {
            key: next(iter(models)) if key in given and len(models) == 1 else owner(key, optimizer, models)
            for key, optimizer in bound.items()
        }
        optimizer_states = {
            key: given[key] if key in given else models[owners[key]].optimizer_state(optimizer)
            for key, optimizer in bound.items()
        }
        records = (
            {
                key: ModelRecord(engine.config.zero_stage.value, _precision(engine), states[key].tied)
                for key, engine in models.items()
            },
            {key: OptimizerRecord(type(optimizer).__name__, owners[key]) for key, optimizer in bound.items()},
        )
        plain = {
            key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in (extra or {}).items()
        }
        check_plain(plain)
        check_plain({name: value for state in states.values() for name, value in state.values.items()}, "model")
        check_plain({key: (state.shared, state.param_groups) for key, state in optimizer_states.items()}, "optimizers")
        rng = random_state() | {"rounding": {key: state.rounding for key, state in optimizer_states.items()}}
        snapshot = Snapshot(states, optimizer_states, records, plain, rng, group)
        return snapshot.copy() if copies else snapshot


def _wait_for_saves() -> None:
    """Waits for what is written in the background: the ranks must not mix up its messages with those of another call."""
    _in_background.submit(lambda: None).result()


def _write(path: str, snapshot: Snapshot) -> None:
    group = snapshot.group
    rank = dist.get_rank(group)
    staging: Staging | None = None
    with saying_who_is_lost(rank, f"the save of {path}"):
        save_id = [uuid.uuid4().hex[:8]]
        dist.broadcast_object_list(save_id, group_src=0, group=group)
        try:
            with raising_together(group):
                staging = Staging(Folder(path), save_id[0])
                if rank == 0:
                    staging.prepare()
            _write_aside(staging, snapshot)
        except BaseException:
            if rank == 0 and staging is not None:
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
                entries[key] = [(*EVERYWHERE, runs[0][2])]
    return merged


def check_plain(values: Mapping[str, Any], what: str = "extra") -> None:
    """Raises a ValueError that names the value which only a pickle could keep."""
    for key, value in values.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{what}['{key}'] (a {type(value).__name__}) holds more than plain values, so only a pickle could keep it: "
                f"{str(error).splitlines()[0]} Pass numbers, text, tensors, and lists and dicts of them."
            ) from error


def _precision(engine: ZeroEngine) -> str | None:
    return None if engine.config.precision is None else str(engine.config.precision)


def _versions() -> dict[str, str]:
    return {"zero-redundancy": version("zero-redundancy"), "torch": str(torch.__version__)}


# -- loading ---------------------------------------------------------------------------------------------------------


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


def _gather(group: dist.ProcessGroup | None, values: tuple[Any, ...]) -> list[list[Any]]:
    """For each value, every rank's, in rank order."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, values, group=group)
    return [list(column) for column in zip(*found, strict=True)]


def _raising_own(call: Callable[[], Any], rank: int) -> None:
    """Calls one of DCP's functions, whose errors come as a bundle; raises like `raising_together`."""
    try:
        with saying_who_is_lost(rank, "a checkpoint's reading or writing"):
            call()
    except CheckpointException as bundle:
        failures = {at: failure[0] for at, failure in bundle.failures.items()}
        if rank in failures:
            raise failures[rank] from None
        at, error = next(iter(failures.items()))
        raise RuntimeError(f"rank {at} failed: {type(error).__name__}: {error}") from None
