"""What a checkpoint holds of a model and its optimizers, by name; each rank has its part."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from zero_core.master import Slice
from zero_core.optimizer import BoundOptimizer, is_elementwise
from zero_core.runtime import Runtime
from zero_core.shard_tensor import Segment, ShardTensor

# What wrappers put into names; no checkpoint has it.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

# Start and stop of a value that holds for a whole parameter, of any size.
EVERYWHERE = (0, 2**62)


def clean(name: str) -> str:
    """A fully qualified name without what `torch.compile` and checkpoint wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def is_extra_state(name: str) -> bool:
    """Whether a name in a state dict is that of a module's `get_extra_state()`, which may be a tensor or hold some."""
    return name.rpartition(".")[2] == "_extra_state"


@dataclass
class ModelState:
    """A model's state.

    Attributes:
        tensors: by name: of parameters this rank's part, buffers whole.
        names: the names of all tensors, of which this rank has a part or not, with their shapes.
        tied: further names of tensors, each with the one it is kept under.
        values: what modules keep beside parameters and buffers (`get_extra_state`), by name.
    """

    tensors: dict[str, ShardTensor | Tensor] = field(default_factory=dict)
    names: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> ModelState:
        """The same in host memory of its own."""
        return dataclasses.replace(self, tensors=_copies(self.tensors), values=copy.deepcopy(self.values))


@dataclass
class OptimizerState:
    """An optimizer's state.

    Attributes:
        tensors: by parameter's name and key, this rank's part of what has a value per element.
        shared: the same for what has one value for a whole slice (a step count): (start, stop, value) of this rank's.
        param_groups: hyper-parameters, with names in place of parameters. What was converted may have them by parameter's
            name, or not at all.
        rounding: see `BoundOptimizer.rounding`.
    """

    tensors: dict[str, dict[str, ShardTensor]]
    shared: dict[str, dict[str, list[tuple[int, int, Any]]]]
    param_groups: list[dict[str, Any]] | dict[str, dict[str, Any]] | None
    rounding: Mapping[str, Tensor] = field(default_factory=dict)

    def copy(self) -> OptimizerState:
        """The same in host memory of its own."""
        tensors = {name: _copies(entries) for name, entries in self.tensors.items()}
        return dataclasses.replace(self, tensors=tensors, param_groups=copy.deepcopy(self.param_groups))


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
        if not isinstance(value, Tensor) or is_extra_state(name):
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
    whole = _keys_of_whole_slices(bound)
    for param in bound.params:
        _, partition, index = runtime.locate(param)
        layout, name = partition.layout.params[index], clean(runtime.fqn(param))
        columns: dict[str, list[Segment]] = {}
        for item in partition.slices[index]:
            for key, value in bound.optimizer.state.get(item.param, {}).items():
                if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter):
                    raise ValueError(
                        f"the state '{key}' of '{name}' is a {type(value).__name__}, and only plain tensors can be cut and "
                        "put together again. Save the weights alone, save_checkpoint(path, engine), or use an optimizer "
                        "whose state is plain tensors."
                    )
                if key not in whole and is_elementwise(key, value, tuple(item.param.shape)):
                    columns.setdefault(key, []).append(Segment(item.piece.start, value.detach()))
                else:
                    plain = value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
                    _append(shared.setdefault(name, {}).setdefault(key, []), item, plain)
        if columns:
            tensors[name] = {key: ShardTensor(layout.shape, layout.stride, parts) for key, parts in columns.items()}
    return OptimizerState(tensors, shared, named_groups(bound, runtime), bound.rounding)


def _keys_of_whole_slices(bound: BoundOptimizer) -> set[str]:
    """Keys of state that is not per element; a scale of shape (1,) looks so where a slice has one element."""
    return {
        key
        for _, item in bound.slices()
        for key, value in bound.optimizer.state.get(item.param, {}).items()
        if isinstance(value, Tensor) and not is_elementwise(key, value, tuple(item.param.shape))
    }


def _append(runs: list[tuple[int, int, Any]], item: Slice, value: Any) -> None:
    if runs and same(runs[-1][2], value) and runs[-1][1] == item.piece.start:
        runs[-1] = (runs[-1][0], item.piece.stop, value)
    else:
        runs.append((item.piece.start, item.piece.stop, value))


def same(a: Any, b: Any) -> bool:
    """Whether two values of optimizer state are equal; they may hold tensors."""
    (ours, our_tree), (others, other_tree) = tree_flatten(a), tree_flatten(b)
    return bool(our_tree == other_tree) and all(
        x.dtype == y.dtype and torch.equal(x, y)
        if isinstance(x, Tensor) and isinstance(y, Tensor)
        else x is y or x == y
        for x, y in zip(ours, others, strict=True)
    )


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
        self._shared: dict[str, dict[str, list[Any]]] = {}  # a value for each of this rank's slices
        self._where = {clean(runtime.fqn(param)): runtime.locate(param)[1:] for param in bound.params}

    def groups(self) -> list[list[str]]:
        """Names of the optimizer's parameters, by group."""
        return [[clean(self._runtime.fqn(param)) for param in params] for params in self._bound.groups]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters' shapes by name."""
        return {name: partition.layout.params[index].shape for name, (partition, index) in self._where.items()}

    def share(self, name: str, key: str, runs: list[tuple[int, int, Any]]) -> bool:
        """Takes a state with one value for a whole slice; see `OptimizerState`, of all ranks.

        Returns:
            whether this run's slices have one value each, too.
        """
        values = [_values_at(runs, item) for item in self._slices(name)]
        self._shared.setdefault(name, {})[key] = [found[0] for found in values]
        return all(same(value, found[0]) for found in values for value in found)

    def room(self, name: str, key: str, dtype: torch.dtype | None) -> ShardTensor | None:
        """Memory for this rank's part of a state with a value per element; `None` where it has no part.

        Args:
            name: the parameter's.
            key: the state's.
            dtype: `None` for the parameter's own while it is stepped.
        """
        partition, index = self._where[name]
        dtype = dtype or partition.master.step_dtype
        segments = self._held(name, key, dtype) or partition.master.state_segments(index, key, dtype)
        if not segments:
            return None
        self._rooms.setdefault(name, {})[key] = segments
        layout = partition.layout.params[index]
        return ShardTensor(layout.shape, layout.stride, segments, apart=True)

    def _held(self, name: str, key: str, dtype: torch.dtype) -> list[Segment]:
        """The state as it is now, to be overwritten: a second one beside it might not fit."""
        found = [(item, self._bound.optimizer.state.get(item.param, {}).get(key)) for item in self._slices(name)]
        fits = [isinstance(v, Tensor) and v.dtype == dtype and v.shape == item.param.shape for item, v in found]
        return [Segment(item.piece.start, value) for item, value in found] if all(fits) else []

    def finish(self, groups: list[dict[str, Any]], rounding: Mapping[str, Tensor]) -> None:
        """Gives the optimizer what was filled in, and the rest of its state.

        Args:
            groups: hyper-parameters of each group.
            rounding: see `BoundOptimizer.rounding`.
        """
        state: dict[int, dict[str, Any]] = {}
        items: list[Slice] = []
        numbers: list[list[int]] = []
        for names in self.groups():
            numbers.append([])
            for name in names:
                for position, item in enumerate(self._slices(name)):
                    own = {key: copy.deepcopy(values[position]) for key, values in self._shared.get(name, {}).items()}
                    own |= {key: _cut(segments, item) for key, segments in self._rooms.get(name, {}).items()}
                    if own:
                        state[len(items)] = own
                    numbers[-1].append(len(items))
                    items.append(item)
        optimizer = self._bound.optimizer
        # How to step is this run's decision, not the checkpoint's.
        choices = [{k: group[k] for k in ("fused", "foreach") if k in group} for group in optimizer.param_groups]
        loaded = [
            {**group, **choice, "params": own} for group, choice, own in zip(groups, choices, numbers, strict=True)
        ]
        optimizer.load_state_dict({"state": state, "param_groups": loaded})
        self._bound.rounding = rounding
        # Of all but the step count torch makes the parameter's dtype, of integers too, and of text nonsense.
        for number, own in state.items():
            param = items[number].param
            exact = {k: v.to(param.device) if isinstance(v, Tensor) else v for k, v in own.items() if k != "step"}
            optimizer.state[param].update(exact)

    def _slices(self, name: str) -> list[Slice]:
        partition, index = self._where[name]
        return partition.slices[index]


def _cut(segments: Iterable[Segment], item: Slice) -> Tensor:
    for s in segments:
        if s.start <= item.piece.start and item.piece.stop <= s.stop:
            return s.values[item.piece.start - s.start : item.piece.stop - s.start]
    raise AssertionError("room is made for whole pieces")


def _values_at(runs: list[tuple[int, int, Any]], item: Slice) -> list[Any]:
    covering = [value for start, stop, value in runs if start < item.piece.stop and item.piece.start < stop]
    return covering or [runs[0][2]]


def _copies(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: t.copy() if isinstance(t, ShardTensor) else t.detach().to("cpu", copy=True) for name, t in tensors.items()
    }
