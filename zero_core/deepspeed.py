"""DeepSpeed's ZeRO checkpoints: where in the ranks' flat partitions each parameter lies, with its optimizer state."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from zero_core.errors import CheckpointError
from zero_core.pickled import load_mapped
from zero_core.storage import Folder
from zero_core.tensor_reader import LazyTensor

_MODEL_FILE = re.compile(r"(zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_?optim_states\.pt")

# Classes that the files name beside tensors and plain values. What they keep is not needed, and what stands in for them
# does nothing: DeepSpeed need not be installed, and no code of the file's choice runs.
_STAND_INS = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": SimpleNamespace,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": SimpleNamespace,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.utils.tensor_fragment.fragment_address": SimpleNamespace,
}

# What a model file keeps for DeepSpeed's own use; all else is the run's.
_OWN = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
        "shared_params", "checkpoint_parallel_dimensions",
    }
)  # fmt: skip

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class DeepSpeedState:
    """What a checkpoint holds, as one file of torch's would.

    Attributes:
        model: by name: what ZeRO trains in the partitions' digits (fp32), the rest in the model's own.
        optimizer: `state` by name and `param_groups` with names, as torch's `get_optimizer_state_dict` nests them. The
            groups are missing where DeepSpeed's elastic format left them out.
        extra: client state, the scheduler's, counters.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any]
    extra: dict[str, Any]


def find(folder: Folder) -> Folder | None:
    """The folder with a DeepSpeed checkpoint's files: this one, or the one that its file `latest` names; else `None`."""
    if any(map(_is_part, folder.names())):
        return folder
    tag = folder.read("latest").decode(errors="replace").strip() if folder.exists("latest") else ""
    below = Folder(f"{folder.name.rstrip('/')}/{tag}")
    return below if tag and below.fs.isdir(below.path) and any(map(_is_part, below.names())) else None


def _is_part(name: str) -> bool:
    return name.endswith(("model_states.pt", "optim_states.pt"))


def read(folder: Folder, trusted: bool = False) -> DeepSpeedState:
    """Opens a checkpoint of stage 0 to 3. Tensors are lazy: they are read when they are indexed.

    Args:
        folder: the one with the files.
        trusted: whether they may run code.

    Raises:
        CheckpointError: it is incomplete, damaged or of a kind that is not understood; says which.
    """
    if not folder.is_local:
        raise CheckpointError(
            f"{folder.name}: DeepSpeed's files are read from local paths only; copy the folder first."
        )
    model_files, optimizer_files = _files(folder)
    load = partial(load_mapped, trusted=trusted, stand_ins=_STAND_INS)
    model = load(folder / model_files[0])
    extra = {key: value for key, value in model.items() if key not in _OWN and value is not None}
    if model.get("param_shapes") is None:  # without ZeRO every rank has all of it
        plain = model.get("optimizer") or {}
        return DeepSpeedState(dict(model["module"]), dict(plain) if "state" in plain else {}, extra)
    zero = _Zero(folder, model["param_shapes"], [load(folder / name) for name in optimizer_files])
    if zero.by_param:
        rest = {n: v for n, v in model["module"].items() if n in model["buffer_names"] or not isinstance(v, Tensor)}
        if shapes := model.get("frozen_param_shapes"):
            _check_ranks(folder, "model", len(model_files), zero.world_size)
            rest |= _frozen(shapes, [model, *(load(folder / name) for name in model_files[1:])])
    else:
        rest = dict(model["module"])
    weights = rest | zero.weights()
    tied = {name: weights[kept] for name, kept in (model.get("shared_params") or {}).items() if kept in weights}
    return DeepSpeedState(weights | tied, zero.optimizer(), extra)


# -- files -----------------------------------------------------------------------------------------------------------


def _files(folder: Folder) -> tuple[list[str], list[str]]:
    """Names of the model's files and the optimizer's, in rank order."""
    of_model: dict[int, str] = {}
    of_optimizer: dict[int, str] = {}
    names = folder.names()
    for name in filter(_is_part, names):
        model, optimizer = _MODEL_FILE.fullmatch(name), _OPTIMIZER_FILE.fullmatch(name)
        match = model or optimizer
        if match is None:
            raise _unsupported(folder, f"has '{name}', of pipeline stages or experts")
        if int(match["part"]):
            raise _unsupported(folder, f"has '{name}', of model parallelism")
        other = (of_model if model else of_optimizer).setdefault(int(match["rank"] or 0), name)
        if other != name:
            raise CheckpointError(f"{folder.name} has both '{other}' and '{name}', of two runs: remove those of one.")
    models, optimizers = ([files[rank] for rank in sorted(files)] for files in (of_model, of_optimizer))
    if "zero" in names and not optimizers:
        raise _unsupported(folder, "is a universal checkpoint")
    if not models:
        raise CheckpointError(f"{folder.name} is incomplete: it has {optimizers[0]}, but no *_model_states.pt.")
    return models, optimizers


def _check_ranks(folder: Folder, what: str, found: int, expected: int) -> None:
    if found != expected:
        raise CheckpointError(
            f"{folder.name} is incomplete: it was saved by {expected} ranks, each with a *_{what}_states.pt, and has "
            f"{found}."
        )


def _unsupported(folder: Folder, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder.name} {what}, which is not understood: DeepSpeed's checkpoints are read where ZeRO and data parallelism "
        "alone divided the model."
    )


# -- partitions ------------------------------------------------------------------------------------------------------


class _Zero:
    """The ranks' partitions of masters and optimizer state.

    Stages 1 and 2 put the parameters of a group end to end and cut the whole into one part for each rank. Stage 3 cuts each
    parameter by itself, the last part padded, and each rank puts its parts of a (sub)group end to end.
    """

    def __init__(self, folder: Folder, shapes: Sequence[Shapes], files: Sequence[Mapping[str, Any]]) -> None:
        if not files:
            raise CheckpointError(f"{folder.name} is incomplete: the ranks' *_optim_states.pt are missing.")
        self._folder = folder
        self._shapes = shapes
        states = [file["optimizer_state_dict"] for file in files]
        first = states[0]
        self.by_param = "fp32_flat_groups" in first
        flats, base = (
            ("fp32_flat_groups", "optimizer_state_dict")
            if self.by_param
            else ("single_partition_of_fp32_groups", "base_optimizer_state")
        )
        if flats not in first:
            raise _unsupported(folder, f"has partitions with {sorted(first)}")
        counts = first["partition_count"]
        counts = {*counts} if isinstance(counts, list) else {counts}
        if len(counts) > 1 or "ds_zero_partition_groups" in first:
            raise _unsupported(folder, "divides groups over different numbers of ranks: experts")
        (self.world_size,) = counts
        _check_ranks(folder, "optim", len(files), self.world_size)
        self._flats: list[list[Tensor]] = [state[flats] for state in states]
        self._bases: list[Any] = [state[base] for state in states]
        self._paddings = first.get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
        self._step = first.get("base_optimizer_state_step")
        if any(len(flat) != len(shapes) for flat in self._flats):
            raise CheckpointError(
                f"{folder.name} is damaged: its model file has {len(shapes)} groups of parameters, and its partitions "
                f"{sorted({len(flat) for flat in self._flats})}."
            )

    def weights(self) -> dict[str, LazyTensor]:
        """The masters of trained parameters by name."""
        found: dict[str, LazyTensor] = {}
        for group in range(len(self._shapes)):
            found |= self._named(group, [flats[group] for flats in self._flats])
        return found

    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state; see `DeepSpeedState`."""
        state: dict[str, dict[str, Any]] = {}
        for group, shapes in enumerate(self._shapes):
            for name in shapes:
                state[name] = {}
            for key, first in self._state(0, group).items():
                parts = self._elementwise(group, key)
                if parts is not None:
                    for name, value in self._named(group, parts).items():
                        state[name][key] = value
                elif not isinstance(first, Tensor) or first.numel() == 1:
                    for name in shapes:
                        state[name][key] = first
                # What is left belongs to a rank (the errors that 1-bit Adam feeds back) and starts afresh.
        found: dict[str, Any] = {"state": state}
        if not isinstance(self._bases[0], list):
            found["param_groups"] = [self._param_group(group) for group in self._bases[0]["param_groups"]]
        return found

    def _state(self, rank: int, group: int) -> Mapping[str, Any]:
        """A rank's state of a group, which the optimizer takes for one parameter."""
        base = self._bases[rank]
        if isinstance(base, list):
            found, step = base[group], self._step
        else:
            found = base["state"].get(group, {})
            step = next((g.get("step") for g in base["param_groups"] if group in g["params"]), None)
        return found if step is None or not found else {"step": step, **found}

    def _param_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        if group.get("moe"):
            raise _unsupported(self._folder, "has experts")
        settings = {key: value for key, value in group.items() if key not in ("params", "step")}
        return {**settings, "params": [name for number in group["params"] for name in self._shapes[number]]}

    def _elementwise(self, group: int, key: str) -> list[Tensor] | None:
        """The ranks' parts of a state that has a value for each element; `None` where it has not."""
        found = []
        for rank, flats in enumerate(self._flats):
            value = self._state(rank, group).get(key)
            if not isinstance(value, Tensor) or value.dim() != 1 or value.numel() < flats[group].numel():
                return None
            found.append(value)
        return found

    def _named(self, group: int, flats: Sequence[Tensor]) -> dict[str, LazyTensor]:
        """The parameters of a group whose ranks' parts are `flats`."""
        shapes, total = self._shapes[group], sum(flat.numel() for flat in flats)
        if self.by_param:
            sizes = {name: -(-math.prod(shape) // self.world_size) for name, shape in shapes.items()}
            needed, spare = self.world_size * sum(sizes.values()), 1
        else:
            sizes = {name: math.prod(s) + p for (name, s), p in zip(shapes.items(), self._paddings[group], strict=True)}
            needed, spare = sum(sizes.values()), 2 * self.world_size  # the end is padded for alignment
        if not needed <= total < needed + spare:
            raise CheckpointError(
                f"{self._folder.name} is damaged: the parameters of group {group} ({next(iter(shapes), '')}, ...) need "
                f"{needed} elements, and its partitions have {total}."
            )
        found, at = {}, 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            if self.by_param:
                parts = _first([flat[at : at + sizes[name]] for flat in flats], numel)
            else:
                parts = _span(flats, at, at + numel)
            found[name] = LazyTensor.of_runs(shape, parts)
            at += sizes[name]
        return found


def _frozen(shapes: Shapes, models: Sequence[Mapping[str, Any]]) -> dict[str, LazyTensor]:
    """Frozen parameters at stage 3, each cut by itself like the others."""
    fragments = [model["frozen_param_fragments"] for model in models]
    return {
        name: LazyTensor.of_runs(shape, _first([of_rank[name] for of_rank in fragments], math.prod(shape)))
        for name, shape in shapes.items()
    }


def _first(parts: Sequence[Tensor], numel: int) -> list[Tensor]:
    """The first `numel` elements of parts that lie end to end."""
    return _span(parts, 0, numel)


def _span(parts: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Elements `start` to `stop` of parts that lie end to end, as views; at least one, which may be empty."""
    found, at = [], 0
    for part in parts:
        cut = part[max(start - at, 0) : max(stop - at, 0)]
        if cut.numel():
            found.append(cut)
        at += part.numel()
    return found or [parts[0][:0]]
