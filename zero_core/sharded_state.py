"""What a checkpoint holds of a model and its optimizers, by name; each rank has its part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zero_core.master import Slice
from zero_core.optimizer import BoundOptimizer, is_elementwise
from zero_core.runtime import Runtime
from zero_core.shard_tensor import Segment, ShardTensor

# What wrappers put into names; no checkpoint has it.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def clean(name: str) -> str:
    """A fully qualified name without what `torch.compile` and checkpoint wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass
class ModelState:
    """A model's state.

    Attributes:
        tensors: by name: of parameters this rank's part, buffers whole.
        names: the names of all tensors, of which this rank has a part or not, with their shapes.
        tied: further names of tensors, each with the one it is kept under.
        values: what a module keeps beside tensors (`get_extra_state`), by name.
    """

    tensors: dict[str, ShardTensor | Tensor] = field(default_factory=dict)
    names: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> ModelState:
        """The same in host memory of its own."""
        return dataclasses.replace(self, tensors=_copies(self.tensors))


@dataclass
class OptimizerState:
    """An optimizer's state.

    Attributes:
        tensors: by parameter's name and key, this rank's part of what has a value per element.
        shared: the same for what has one value for a whole slice (a step count): (start, stop, value) of this rank's.
        param_groups: hyper-parameters, with names in place of parameters; `None` where what is converted has none.
    """

    tensors: dict[str, dict[str, ShardTensor]]
    shared: dict[str, dict[str, list[tuple[int, int, Any]]]]
    param_groups: list[dict[str, Any]] | None

    def copy(self) -> OptimizerState:
        """The same in host memory of its own."""
        return dataclasses.replace(self, tensors={name: _copies(entries) for name, entries in self.tensors.items()})


def model_state(model: nn.Module, runtime: Runtime) -> ModelState:
    """A sharded model's state. Sends nothing.

    Names are those of `model.state_dict()`, so hooks that rename or drop keys have their say.
    """
    runtime.keep_changes()
    found, first = ModelState(), dict[int, str]()
    with torch.no_grad():
        state = model.state_dict(keep_vars=True)
    for key, value in state.items():
        name = clean(key)
        if not isinstance(value, Tensor):
            found.values[name] = value
            continue
        found.names[name] = tuple(value.shape)
        if id(value) in first:
            found.tied[name] = first[id(value)]
            continue
        first[id(value)] = name
        if not runtime.knows(value):
            found.tensors[name] = value.detach()
            continue
        _, partition, index = runtime.locate(value)  # type: ignore[arg-type]
        segments = partition.own_segments(index)
        if segments:
            layout = partition.layout.params[index]
            found.tensors[name] = ShardTensor(layout.shape, layout.stride, segments)
    return found


def optimizer_state(bound: BoundOptimizer, runtime: Runtime) -> OptimizerState:
    """A bound optimizer's state. Sends nothing."""
    tensors: dict[str, dict[str, ShardTensor]] = {}
    shared: dict[str, dict[str, list[tuple[int, int, Any]]]] = {}
    for param in bound.params:
        _, partition, index = runtime.locate(param)
        layout, name = partition.layout.params[index], clean(runtime.fqn(param))
        columns: dict[str, list[Segment]] = {}
        for item in partition.slices[index]:
            for key, value in bound.optimizer.state.get(item.param, {}).items():
                if is_elementwise(key, value, tuple(item.param.shape)):
                    columns.setdefault(key, []).append(Segment(item.piece.start, value.detach()))
                else:
                    plain = value.detach().cpu().clone() if isinstance(value, Tensor) else value
                    _append(shared.setdefault(name, {}).setdefault(key, []), item, plain)
        if columns:
            tensors[name] = {key: ShardTensor(layout.shape, layout.stride, parts) for key, parts in columns.items()}
    return OptimizerState(tensors, shared, named_groups(bound, runtime))


def _append(runs: list[tuple[int, int, Any]], item: Slice, value: Any) -> None:
    if runs and same(runs[-1][2], value) and runs[-1][1] == item.piece.start:
        runs[-1] = (runs[-1][0], item.piece.stop, value)
    else:
        runs.append((item.piece.start, item.piece.stop, value))


def same(a: Any, b: Any) -> bool:
    """Whether two values of optimizer state are equal."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def named_groups(bound: BoundOptimizer, runtime: Runtime) -> list[dict[str, Any]]:
    """The optimizer's groups with names in place of parameters."""
    return [
        {**{key: value for key, value in group.items() if key != "params"},
         "params": [clean(runtime.fqn(param)) for param in params]}
        for group, params in zip(bound.optimizer.param_groups, bound.groups, strict=True)
    ]  # fmt: skip


class OptimizerLoad:
    """Room for an optimizer's state, to be filled by name and then handed over to the optimizer.

    Args:
        bound: the optimizer.
        runtime: knows where each parameter lives.
    """

    def __init__(self, bound: BoundOptimizer, runtime: Runtime) -> None:
        self._bound = bound
        self._runtime = runtime
        self._rooms: dict[str, dict[str, list[Segment]]] = {}
        self._where = {clean(runtime.fqn(param)): runtime.locate(param)[1:] for param in bound.params}

    def names(self) -> list[str]:
        """Names of the optimizer's parameters, in the order of its groups."""
        return list(self._where)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters' shapes by name."""
        return {name: partition.layout.params[index].shape for name, (partition, index) in self._where.items()}

    def room(self, name: str, key: str, dtype: torch.dtype) -> ShardTensor | None:
        """Memory for this rank's part of a state with a value per element; `None` where it has no part."""
        partition, index = self._where[name]
        if dtype.is_floating_point:
            dtype = partition.master.step_dtype
        segments = partition.master.state_segments(index, key, dtype)
        if not segments:
            return None
        self._rooms.setdefault(name, {})[key] = segments
        layout = partition.layout.params[index]
        return ShardTensor(layout.shape, layout.stride, segments)

    def finish(
        self, shared: Mapping[str, Mapping[str, list[tuple[int, int, Any]]]], groups: list[dict[str, Any]]
    ) -> None:
        """Gives the optimizer what was filled in, and the rest of its state.

        Args:
            shared: see `OptimizerState`, of all ranks.
            groups: hyper-parameters of each group.
        """
        local: dict[int, dict[str, Any]] = {}
        numbers: list[list[int]] = []
        exact: list[tuple[Slice, dict[str, Tensor]]] = []
        position = 0
        for params in self._bound.groups:
            numbers.append([])
            for param in params:
                name = clean(self._runtime.fqn(param))
                partition, index = self._where[name]
                for item in partition.slices[index]:
                    parts = {key: _cut(segments, item) for key, segments in self._rooms.get(name, {}).items()}
                    whole = {key: _value_at(name, key, runs, item) for key, runs in shared.get(name, {}).items()}
                    if parts or whole:
                        local[position] = {**whole, **parts}
                        exact.append((item, parts))
                    numbers[-1].append(position)
                    position += 1
        optimizer = self._bound.optimizer
        # How to step is this run's decision, not the checkpoint's.
        choices = [{k: group[k] for k in ("fused", "foreach") if k in group} for group in optimizer.param_groups]
        loaded = [
            {**{k: v for k, v in group.items() if k != "params"}, **choice, "params": own}
            for group, choice, own in zip(groups, choices, numbers, strict=True)
        ]
        optimizer.load_state_dict({"state": local, "param_groups": loaded})
        for item, parts in exact:  # torch casts to the parameter's dtype, integers too
            optimizer.state[item.param].update(parts)


def _cut(segments: Iterable[Segment], item: Slice) -> Tensor:
    for s in segments:
        if s.start <= item.piece.start and item.piece.stop <= s.stop:
            return s.values[item.piece.start - s.start : item.piece.stop - s.start]
    raise AssertionError("room is made for whole pieces")


def _value_at(name: str, key: str, runs: list[tuple[int, int, Any]], item: Slice) -> Any:
    covering = [value for start, stop, value in runs if start < item.piece.stop and item.piece.start < stop]
    covering = covering or [runs[0][2]]
    if not all(same(value, covering[0]) for value in covering):
        raise ValueError(
            f"the state '{key}' of '{name}' has one value for each slice of the run that saved it, and this run cuts other "
            "slices. Load it with the same number of ranks, or leave the optimizer out: load_checkpoint(path, engine)."
        )
    return covering[0].clone() if isinstance(covering[0], Tensor) else covering[0]


def _copies(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: t.copy() if isinstance(t, ShardTensor) else t.detach().to("cpu", copy=True) for name, t in tensors.items()
    }
