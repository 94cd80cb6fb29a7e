"""Model and optimizer state by name, whole: what plain torch saves and loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_core.collectives import Collectives
from zero_core.master import Slice
from zero_core.optimizer import BoundOptimizer, is_elementwise, slice_state
from zero_core.runtime import Runtime
from zero_core.unit import Partition


def full_model_state(model: nn.Module, runtime: Runtime, collectives: Collectives, all_ranks: bool) -> dict[str, Any]:
    """`model.state_dict()` as an unsharded model would give it, on the CPU; see `ZeroEngine.full_state_dict`."""
    runtime.keep_changes()
    values: dict[int, Tensor] = {}
    for partition in runtime.partitions():
        partition.finish_gather()
        for index, param in enumerate(partition.params):
            if partition.master.in_place:  # every rank has it whole already
                whole = _empty(partition, index, partition.layout.dtype) if all_ranks or collectives.rank == 0 else None
                if whole is not None:
                    whole.copy_(partition.buffer.views[index])
            else:
                parts = [item.param.detach() for item in partition.slices[index]]
                whole = _collect(partition, index, parts, partition.master.tensor.dtype, collectives, all_ranks)
            if whole is not None:
                values[id(param)] = whole
    if not all_ranks and collectives.rank != 0:
        return {}
    # The model's own call, so that hooks that rename or drop keys have their say; it sees placeholders.
    with torch.no_grad():
        state = model.state_dict(keep_vars=True)
    for key, value in state.items():
        if id(value) in values:
            state[key] = values[id(value)]
        elif isinstance(value, Tensor):
            state[key] = value.detach().cpu().clone()
    return state


def _empty(partition: Partition, index: int, dtype: torch.dtype) -> Tensor:
    layout = partition.layout.params[index]
    return torch.empty_strided(layout.shape, layout.stride, dtype=dtype)


def _collect(
    partition: Partition,
    index: int,
    parts: list[Tensor],
    dtype: torch.dtype,
    collectives: Collectives,
    all_ranks: bool = False,
) -> Tensor | None:
    """A whole tensor of parameter `index`'s shape on rank 0 (or all ranks), into which each rank's parts go directly."""
    whole = _empty(partition, index, dtype) if all_ranks or collectives.rank == 0 else None
    flat = None if whole is None else whole.as_strided((whole.numel(),), (1,))
    runs = [partition.runs(index, rank) for rank in range(collectives.world_size)]
    collectives.collect(parts, runs, flat, all_ranks)
    return whole


def load_full_model_state(model: nn.Module, runtime: Runtime, state: Mapping[str, Any], strict: bool) -> Any:
    """`model.load_state_dict` in which each rank keeps its part; see `ZeroEngine.load_full_state_dict`."""
    with runtime.loading():
        result = model.load_state_dict(state, strict=strict)
    runtime.reshard()
    return result


def full_optimizer_state(bound: BoundOptimizer, runtime: Runtime, collectives: Collectives) -> dict[str, Any]:
    """`optimizer.state_dict()` as an unsharded optimizer would give it, on rank 0; `{}` on the others."""
    positions = {id(param): at for at, param in enumerate(bound.params)}
    merged = _merge_schemas(collectives.gather_objects(_schema(bound, positions)))
    state: dict[int, dict[str, Any]] = {at: dict(merged[at]) for at in sorted(merged)}
    for at, param in enumerate(bound.params):
        _, partition, index = runtime.locate(param)
        for key, dtype in merged.get(at, {}).items():
            if isinstance(dtype, torch.dtype):
                parts = [_part(bound, item, key, dtype) for item in partition.slices[index]]
                state[at][key] = _collect(partition, index, parts, dtype, collectives)
    if collectives.rank != 0:
        return {}
    return {"state": state, "param_groups": _plain_groups(bound)}


def _part(bound: BoundOptimizer, item: Slice, key: str, dtype: torch.dtype) -> Tensor:
    """A slice's values of one state; zeros where this rank has not stepped it."""
    value = bound.optimizer.state.get(item.param, {}).get(key)
    if isinstance(value, Tensor) and value.dtype == dtype and value.shape == item.param.shape:
        return value.detach()
    return torch.zeros(item.piece.numel, dtype=dtype)


def load_full_optimizer_state(bound: BoundOptimizer, runtime: Runtime, state_dict: Mapping[str, Any]) -> None:
    """Loads what `full_optimizer_state` or a plain optimizer's `state_dict` gave; each rank keeps its part.

    Raises:
        ValueError: the groups have other sizes than this optimizer's.
    """
    sizes = [len(group) for group in bound.groups]
    given = [len(group["params"]) for group in state_dict["param_groups"]]
    if sizes != given:
        raise ValueError(
            f"the optimizer state has groups of {given} parameters, but {type(bound.optimizer).__name__} has {sizes}. "
            "Expected what engine.full_optimizer_state_dict or an unsharded optimizer's state_dict returned, for the same "
            "parameter groups."
        )
    ids = [at for group in state_dict["param_groups"] for at in group["params"]]
    local: dict[int, dict[str, Any]] = {}
    groups, number = [], 0
    params = iter(zip(ids, bound.params, strict=True))
    for given_group, own in zip(state_dict["param_groups"], bound.groups, strict=True):
        numbers = []
        for _ in own:
            at, param = next(params)
            _, partition, index = runtime.locate(param)
            layout = partition.layout.params[index]
            for item in partition.slices[index]:
                if at in state_dict["state"]:
                    local[number] = slice_state(state_dict["state"][at], item, layout.shape, layout.stride)
                numbers.append(number)
                number += 1
        groups.append({**given_group, "params": numbers})
    chosen = [
        {key: group[key] for key in ("fused", "foreach") if key in group} for group in bound.optimizer.param_groups
    ]
    for group, choice in zip(groups, chosen, strict=True):
        group.update(choice)  # how to step is this run's decision, not the checkpoint's
    bound.optimizer.load_state_dict({"state": local, "param_groups": groups})


def _schema(bound: BoundOptimizer, positions: dict[int, int]) -> dict[int, dict[str, Any]]:
    """Per parameter position: the dtype of each state with a value per element, the value of each other."""
    schema: dict[int, dict[str, Any]] = {}
    for param, item in bound.slices():
        entries = bound.optimizer.state.get(item.param, {})
        if entries:
            schema[positions[id(param)]] = {
                key: value.dtype
                if is_elementwise(key, value, tuple(item.param.shape))
                else value.detach().cpu().clone()
                if isinstance(value, Tensor)
                else value
                for key, value in entries.items()
            }
    return schema


def _merge_schemas(schemas: list[dict[int, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    merged: dict[int, dict[str, Any]] = {}
    for schema in reversed(schemas):
        merged.update(schema)
    return merged


def _plain_groups(bound: BoundOptimizer) -> list[dict[str, Any]]:
    groups, first = [], 0
    for group, params in zip(bound.optimizer.param_groups, bound.groups, strict=True):
        plain = {key: value for key, value in group.items() if key != "params"}
        groups.append({**plain, "params": list(range(first, first + len(params)))})
        first += len(params)
    return groups
