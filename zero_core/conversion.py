"""A checkpoint of any format written as one of our own, without the code of the run that saved it."""

from __future__ import annotations

import dataclasses
import math
import os
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from zero_core.checkpoint import Path, Snapshot, check_plain, finish, nested
from zero_core.errors import CheckpointError
from zero_core.manifest import ModelRecord, OptimizerRecord
from zero_core.shard_tensor import Segment, ShardTensor
from zero_core.sharded_state import EVERYWHERE, ModelState, OptimizerState, clean
from zero_core.storage import Folder, Progress, Staging, Writer
from zero_core.stored import Stored, StoredOptimizer, open_checkpoint


def convert(
    path: Path, out: Path, *, weights_only: bool = False, trusted: bool = False, progress: Progress | None = None
) -> list[str]:
    """Writes a checkpoint of any format as a directory of our own. One process; needs no process group.

    One tensor at a time is in memory. Optimizer state comes along; where parameters are numbered instead of named, if
    their numbers can only mean the model's tensors in order. States of random number generators do not come along, unless
    one rank saved them.

    Args:
        path: the checkpoint; local or an fsspec URL, like `out`.
        out: the directory.
        weights_only: leave the optimizers out.
        trusted: open pickles that could run code; see `load_checkpoint`.
        progress: called with a tensor's name, bytes read so far and bytes in all.

    Returns:
        keys of `extra` that are left out, because they are more than plain values and only a pickle could keep them.

    Raises:
        CheckpointError: it is damaged, or it cannot be told which parameter an optimizer's state belongs to.
    """
    stored = open_checkpoint(os.fspath(path), trusted=trusted)
    optimizers = {} if weights_only else {key: named(stored, key) for key in stored.optimizers}
    extra = {key: value for key, value in stored.extra.items() if _is_plain(value)}
    source = _Source(stored, progress)
    snapshot = Snapshot(
        {_key(key): _model_state(source, key) for key in stored.models},
        {_key(key): _optimizer_state(source, found) for key, (found, _) in optimizers.items()},
        _records(stored, optimizers),
        extra,
        {},
    )
    rng = stored.rng if len(stored.rng) == 1 else []
    _write(Staging(Folder(out), uuid.uuid4().hex[:8]), snapshot, rng)
    return [key for key in stored.extra if key not in extra]


def _is_plain(value: Any) -> bool:
    try:
        check_plain({"value": value})
    except ValueError:
        return False
    return True


def named(stored: Stored, key: str) -> tuple[StoredOptimizer, str]:
    """An optimizer's state by parameters' names, and values for a whole parameter at hand; the key of its model.

    Raises:
        CheckpointError: parameters are numbered, and which is which cannot be told.
    """
    found = stored.optimizers[key]
    problem = ""
    for model in [stored.manifest.optimizers[key].model] if stored.manifest else stored.models:
        names, problem = _names(stored, model, found)
        if not problem:
            return _with_names(stored, model, found, names), model
    raise CheckpointError(
        f"the optimizer '{key}' of {stored.folder.name} cannot be matched with a model: {problem or 'there is none'}. Only "
        "the run's own code can tell: load it there with load_checkpoint(path, engine, optimizer), or leave optimizers out."
    )


def _names(stored: Stored, model: str, found: StoredOptimizer) -> tuple[dict[str, str], str]:
    """The name of each parameter of an optimizer, or why it cannot be told."""
    tensors, tied, groups = stored.models[model], stored.tied(model), found.param_groups or []
    count = sum(len(group["params"]) for group in groups)
    if not found.positional:
        names = list({**found.tensors, **found.shared})
    elif all("param_names" in group for group in groups):  # an optimizer made of model.named_parameters()
        names = [clean(str(name)) for group in groups for name in group["param_names"]]
    elif len(groups) > 1:
        return {}, f"it numbers its parameters, through {len(groups)} groups"
    else:
        names = [name for name in tensors if name not in tied]
        if count != len(names):
            return {}, f"it numbers its parameters, {count} of them, and '{model}' has {len(names)} tensors"
    for name in names:
        if name not in tensors:
            return {}, f"its parameter '{name}' is none of '{model}'"
    if not found.positional:
        return {name: name for name in names}, ""
    at = {str(number): name for number, name in enumerate(names)}
    for number, entries in found.tensors.items():
        for entry, place in entries.items():
            shape, expected = stored.entry(place).size, stored.entry(tensors[at[number]]).size
            if shape != expected and shape.numel() != 1:
                return {}, (
                    f"it numbers its parameters, and the state '{entry}' of number {number} has shape {tuple(shape)}, but "
                    f"'{at[number]}' of '{model}' has {tuple(expected)}"
                )
    return at, ""


def _with_names(stored: Stored, model: str, found: StoredOptimizer, names: Mapping[str, str]) -> StoredOptimizer:
    tensors: dict[str, dict[str, str]] = {}
    shared = {names[given]: dict(entries) for given, entries in found.shared.items()}
    whole: dict[tuple[str, str], str] = {}
    for given, entries in found.tensors.items():
        shape = stored.entry(stored.models[model][names[given]]).size
        for entry, place in entries.items():
            size = stored.entry(place).size
            if entry == "step" or (size != shape and size.numel() == 1):
                whole[names[given], entry] = place
            else:
                tensors.setdefault(names[given], {})[entry] = place
    values = stored.read(whole.values())
    for (name, entry), place in whole.items():
        shared.setdefault(name, {})[entry] = [(*EVERYWHERE, values[place].reshape(()))]
    groups = found.param_groups
    if groups is not None and found.positional:
        numbers = iter(names.values())
        groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]
    return dataclasses.replace(found, tensors=tensors, param_groups=groups, shared=shared, positional=False)


# -- what is read ----------------------------------------------------------------------------------------------------


class _Source:
    """Reads tensors of an opened checkpoint; keeps the last one.

    Args:
        stored: the checkpoint.
        progress: told of every tensor that is read.
    """

    def __init__(self, stored: Stored, progress: Progress | None) -> None:
        self.stored = stored
        self._progress = progress
        self._done, self._total = 0, 0
        self._last: dict[str, Tensor] = {}

    def tensor(self, place: str) -> ShardTensor:
        """Stands for a tensor until it is written."""
        entry = self.stored.entry(place)
        self._total += entry.size.numel() * entry.properties.dtype.itemsize
        return _Unread.of(self, place, entry.size, entry.properties.dtype)

    def read(self, place: str) -> Tensor:
        """Reads a whole tensor, unless it is the one read last."""
        if place not in self._last:
            self._last.clear()  # before there is another one
            self._last = self.stored.read([place])
            self._done += self._last[place].nbytes
            if self._progress is not None:
                self._progress(place, self._done, self._total)
        return self._last[place]


class _Unread(ShardTensor):
    """A tensor of another checkpoint, which is read when it is written."""

    _source: _Source
    _place: str

    @classmethod
    def of(cls, source: _Source, place: str, shape: torch.Size, dtype: torch.dtype) -> _Unread:
        stride = torch.empty(shape, device="meta").stride()
        self = cls(shape, stride, [Segment(0, torch.empty(math.prod(shape), dtype=dtype, device="meta"))])
        self._source, self._place = source, place
        return self

    def _run(self, start: int, stop: int) -> Tensor:
        return self._source.read(self._place).reshape(-1)[start:stop]


def _model_state(source: _Source, key: str) -> ModelState:
    stored = source.stored
    tied, names = stored.tied(key), stored.models[key]
    return ModelState(
        {name: source.tensor(place) for name, place in names.items() if name not in tied},
        {name: tuple(stored.entry(place).size) for name, place in names.items()},
        tied,
        stored.values.get(key, {}),
    )


def _optimizer_state(source: _Source, found: StoredOptimizer) -> OptimizerState:
    tensors = {
        name: {entry: source.tensor(place) for entry, place in entries.items()}
        for name, entries in found.tensors.items()
    }
    groups = found.settings if found.param_groups is None else found.param_groups
    return OptimizerState(tensors, found.shared, groups)


def _key(key: str) -> str:
    """A key as one of our own: dots separate it from names."""
    return key.replace(".", "_")


def _records(
    stored: Stored, optimizers: Mapping[str, tuple[StoredOptimizer, str]]
) -> tuple[dict[str, ModelRecord], dict[str, OptimizerRecord]]:
    given = stored.manifest
    models = {_key(key): ModelRecord(0, None, stored.tied(key)) for key in stored.models}
    kinds = {_key(key): OptimizerRecord("unknown", _key(model)) for key, (_, model) in optimizers.items()}
    if given is not None:
        models = {key: dataclasses.replace(record, tied=models[key].tied) for key, record in given.models.items()}
        kinds = {key: record for key, record in given.optimizers.items() if key in optimizers}
    return models, kinds


# -- what is written -------------------------------------------------------------------------------------------------


def _write(staging: Staging, snapshot: Snapshot, rng: list[Any]) -> None:
    """A save by one process: what `torch.distributed.checkpoint.save` does with planner and writer."""
    shared: dict[str, Any] = {key: state.shared for key, state in snapshot.optimizers.items()}
    tied = {f"{k}.{name}": f"{k}.{kept}" for k, s in snapshot.models.items() for name, kept in s.tied.items()}
    planner, writer = DefaultSavePlanner(), Writer(staging.folder, staging.save_id, tied)
    try:
        staging.prepare()
        planner.set_up_planner(nested(snapshot, shared, rank=0), is_coordinator=True)
        plans, index = planner.create_global_plan([planner.create_local_plan()])
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        writer.finish(index, [writer.write_data(plan, planner).wait()])
        for name, record in writer.records.items():
            staging.folder.check(name, record)
        files = dict(writer.records)
        staging.publish(finish(staging.folder, staging.save_id, snapshot, writer, shared, rng, files, world_size=1))
    except BaseException:
        staging.discard()
        raise
