"""Two checkpoints of any format beside each other, a tensor at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_core.checkpoint import Path
from zero_core.conversion import named
from zero_core.errors import CheckpointError
from zero_core.load_plan import prefix
from zero_core.sharded_state import same
from zero_core.storage import Progress
from zero_core.stored import Stored, StoredOptimizer, open_checkpoint

_RUN = 2**20  # elements that are compared in one go: what is computed on the way is small beside a large tensor


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same in both.

    Attributes:
        name: of the tensor.
        kind: "only in a", "only in b", "shape", "dtype" or "values".
        a: shape and dtype in the first; `None` where it is missing.
        b: in the second.
        elements: how many differ; `None` where there is nothing to compare, like the next two.
        absolute: the largest difference.
        relative: the largest difference in relation to the larger of both values.
    """

    name: str
    kind: str
    a: str | None = None
    b: str | None = None
    elements: int | None = None
    absolute: float | None = None
    relative: float | None = None


@dataclass
class Comparison:
    """What `compare` found.

    Attributes:
        equal: number of tensors that are the same.
        differences: those that are not.
        notes: what was not compared, and why.
    """

    equal: int = 0
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Item:
    """A tensor or value that is not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None for a value for a whole parameter, which formats keep in dtypes of their own
    read: Callable[[], Any]

    def __str__(self) -> str:
        return f"{list(self.shape)} {'' if self.dtype is None else str(self.dtype).removeprefix('torch.')}".strip()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * (self.dtype.itemsize if self.dtype else 8)


Items = dict[str, _Item]


def compare(
    a: Path,
    b: Path,
    *,
    weights_only: bool = False,
    tolerance: float = 0.0,
    trusted: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Compares weights and optimizer state of two checkpoints of any format. One process; needs no process group.

    Models and optimizers are paired by key, or in order where the keys differ; a prefix before all names of one of them
    does not count, and of tied names one is enough. Two tensors are in memory at a time.

    Args:
        a: one checkpoint; local or an fsspec URL.
        b: the other.
        weights_only: leave optimizers alone.
        tolerance: the largest difference between values that count as equal.
        trusted: open pickles that could run code; see `load_checkpoint`.
        progress: called with a tensor's name, bytes compared so far and bytes in all.

    Raises:
        CheckpointError: one is damaged or missing.
    """
    first, second = (open_checkpoint(os.fspath(path), trusted=trusted) for path in (a, b))
    found = Comparison()
    pairs = _model_pairs(first, second)
    if not weights_only:
        pairs.update(_optimizer_pairs(first, second, found.notes))
    done, total = 0, sum(one.nbytes for one, _ in pairs.values() if one)
    for name, (one, other) in pairs.items():
        difference = _difference(name, one, other, tolerance)
        if difference is None:
            found.equal += 1
        else:
            found.differences.append(difference)
        done += one.nbytes if one else 0
        if progress is not None:
            progress(name, done, total)
    return found


Pairs = dict[str, tuple[_Item | None, _Item | None]]


def _model_pairs(a: Stored, b: Stored) -> Pairs:
    pairs: Pairs = {}
    for key_a, key_b in _keys(a.models, b.models):
        ours, theirs = (_tensors(s, s.models[k]) if k else {} for s, k in ((a, key_a), (b, key_b)))
        names = _names(theirs, ours)
        tied = {names[name]: names[kept] for name, kept in (b.tied(key_b) if key_b else {}).items()}
        tied.update(a.tied(key_a) if key_a else {})
        shown = f"{key_a or key_b}." if max(len(a.models), len(b.models)) > 1 else ""
        found = _pairs(ours, {names[name]: item for name, item in theirs.items()}, tied)
        pairs.update({shown + name: pair for name, pair in found.items()})
    return pairs


def _optimizer_pairs(a: Stored, b: Stored, notes: list[str]) -> Pairs:
    if not a.optimizers or not b.optimizers:
        lacking = [stored.folder.name for stored in (a, b) if not stored.optimizers]
        notes.extend(f"{name} has no optimizer state: weights alone are compared." for name in lacking[:1])
        return {}
    pairs: Pairs = {}
    for key_a, key_b in _keys(a.optimizers, b.optimizers):
        found = [s.optimizers[k] for s, k in ((a, key_a), (b, key_b)) if k]
        numbered = all(optimizer.positional for optimizer in found)  # then numbers will do
        try:
            ours, theirs = (
                _state(s, s.optimizers[k] if numbered else named(s, k)[0]) if k else {}
                for s, k in ((a, key_a), (b, key_b))
            )
        except CheckpointError as error:
            notes.append(f"not compared: {error}")
            continue
        names = _names(theirs, ours)
        by_name = _pairs(ours, {names[name]: item for name, item in theirs.items()}, {})
        pairs.update({f"{key_a or key_b}.state.{name}": pair for name, pair in by_name.items()})
    return pairs


def _keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str | None, str | None]]:
    """Keys of what belongs together: the same, or in order where they differ and there are equally many."""
    if len(a) == len(b) and a.keys() != b.keys():
        return list(zip(a, b, strict=True))
    return [(key if key in a else None, key if key in b else None) for key in {**a, **b}]


def _names(given: Items, wanted: Items) -> dict[str, str]:
    """The given names, with the prefix taken off or put before that makes them fit the wanted ones."""
    [(old, new)] = prefix(given, wanted).items() or [("", "")]
    return {name: new + name.removeprefix(old) for name in given}


def _pairs(ours: Items, theirs: Items, tied: Mapping[str, str]) -> Pairs:
    """By name; a name that only one of them has is left out where the other has the tensor by a tied name."""
    by_us, by_them = ({tied.get(name, name) for name in items} for items in (ours, theirs))
    return {
        name: (ours.get(name), theirs.get(name))
        for name in {**ours, **theirs}
        if (name in ours and name in theirs) or tied.get(name, name) not in by_us & by_them
    }


def _tensors(stored: Stored, names: Mapping[str, str]) -> Items:
    return {name: _tensor(stored, place) for name, place in names.items()}


def _tensor(stored: Stored, place: str) -> _Item:
    entry = stored.entry(place)
    return _Item(tuple(entry.size), entry.properties.dtype, lambda: stored.read([place])[place])


def _state(stored: Stored, found: StoredOptimizer) -> Items:
    items = {
        f"{name}.{entry}": _tensor(stored, place)
        for name, entries in found.tensors.items()
        for entry, place in entries.items()
    }
    for name, entries in found.shared.items():
        items.update({f"{name}.{entry}": _value([run[2] for run in runs]) for entry, runs in entries.items()})
    return items


def _value(values: list[Any]) -> _Item:
    if all(isinstance(value, int | float | Tensor) for value in values):
        stacked = torch.stack([torch.as_tensor(value) for value in values]).squeeze(0)
        return _Item(tuple(stacked.shape), None, lambda: stacked)
    return _Item((), None, lambda: values)


def _difference(name: str, a: _Item | None, b: _Item | None, tolerance: float) -> Difference | None:
    if a is None or b is None:
        return Difference(name, "only in b" if a is None else "only in a", str(a) if a else None, str(b) if b else None)
    if a.shape != b.shape:
        return Difference(name, "shape", str(a), str(b))
    one, other = a.read(), b.read()
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return None if same(one, other) else Difference(name, "values", str(one), str(other))
    elements, absolute, relative = deviation(one, other)
    if a.dtype and b.dtype and a.dtype != b.dtype:
        return Difference(name, "dtype", str(a), str(b), elements, absolute, relative)
    return None if absolute <= tolerance else Difference(name, "values", str(a), str(b), elements, absolute, relative)


def deviation(a: Tensor, b: Tensor) -> tuple[int, float, float]:
    """How many elements differ, and by how much at most: absolutely, and in relation to the larger of both values.

    NaN equals NaN, and is infinitely far from everything else.
    """
    elements, absolute, relative = 0, 0.0, 0.0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    for x, y in zip(a.reshape(-1).split(_RUN), b.reshape(-1).split(_RUN), strict=True):
        x, y = x.to(wide), y.to(wide)
        differs = (x != y) & ~(x.isnan() & y.isnan())
        if differs.any():
            x, y = x[differs], y[differs]
            gap = (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            ratio = (gap / torch.maximum(x.abs(), y.abs())).nan_to_num(nan=math.inf, posinf=math.inf)
            elements += gap.numel()
            absolute, relative = max(absolute, gap.max().item()), max(relative, ratio.max().item())
    return elements, absolute, relative
