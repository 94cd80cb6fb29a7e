"""Bytes held and sent: what the layout predicts, what is there, and what the paper's formulas say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_core.collectives import Traffic
from zero_core.config import ZeroStage
from zero_core.unit import Partition, Unit


@dataclass(frozen=True)
class Held:
    """Bytes of one kind of model state on this rank.

    Attributes:
        kind: "parameters" (weights in their compute dtype, kept between steps), "masters" (this rank's part where it is
            kept with more digits), "gathered" (other ranks' parts, brought in for use), "gradients", "optimizer".
        bytes: held now.
        formula: the paper's bytes for this kind, stage and world size (section 5), for the model's dtypes; what is
            above it is padding, or the optimizer's step counts. "gathered" has no formula: 0 at rest.
        place: "device", "host" or "disk"; on a CPU "device" is what would be on one.
    """

    kind: str
    bytes: int
    formula: int
    place: str = "device"


@dataclass(frozen=True)
class Sent:
    """What this rank sent for one step.

    Attributes:
        kind: "gather" (weights), "reduce" (gradients), "control" (buffers, norms, flags).
        calls: collectives.
        bytes: payload bytes to other ranks.
        formula: the paper's bytes (section 7), for one backward per step; 0 for "control".
    """

    kind: str
    calls: int
    bytes: int
    formula: int


@dataclass(frozen=True)
class Report:
    """Bytes on one rank, beside the formulas. `print` it for a table.

    Attributes:
        stage: 1, 2 or 3.
        rank: this rank.
        world_size: number of ranks.
        steps: optimizer steps so far.
        skipped: steps left out because the gradient was not finite.
        held: by kind, now.
        sent: by kind, in the last step.
    """

    stage: int
    rank: int
    world_size: int
    steps: int
    skipped: int
    held: tuple[Held, ...]
    sent: tuple[Sent, ...]

    def __str__(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        lines = [f"ZeRO stage {self.stage}, rank {self.rank} of {self.world_size}, after {self.steps} step(s){skipped}"]
        lines.append(f"  {'held':<12}{'bytes':>16}{'formula':>16}")
        lines += [
            f"  {h.kind:<12}{h.bytes:>16,}{h.formula:>16,}{'' if h.place == 'device' else '  on ' + h.place}"
            for h in self.held
        ]
        lines.append(f"  {'sent a step':<12}{'bytes':>16}{'formula':>16}{'calls':>8}")
        lines += [f"  {s.kind:<12}{s.bytes:>16,}{s.formula:>16,}{s.calls:>8}" for s in self.sent]
        return "\n".join(lines)


def held(
    units: Sequence[Unit], stage: ZeroStage, world_size: int, spare: int, optimizer_state: Iterable[Tensor]
) -> tuple[Held, ...]:
    """Scans what this rank holds now; `spare` bytes are kept for the next gather."""
    partitions = [partition for unit in units for partition in unit.partitions]
    trainable = [p for p in partitions if p.is_trainable]
    place = partitions[0].master.place if partitions else "device"
    shares_weights = stage.shards_parameters
    own = [p for p in partitions if not p.master.in_place]
    # At stage 3 the weights are this rank's shards: a copy of their own beside masters elsewhere, else the masters
    # where these have the weights' dtype. With more digits masters are the only copy between uses.
    shards = [p for p in own if shares_weights and not p.shard_nbytes and p.master.tensor.dtype == p.layout.dtype]
    masters = [p for p in own if p not in shards]
    weights = [p for p in partitions if not shares_weights or p in shards or p.shard_nbytes]
    parameters = sum(p.master.tensor.nbytes for p in shards) + sum(p.shard_nbytes for p in partitions)
    buffers = sum(p.buffer.nbytes for p in partitions)
    part = 1 / world_size
    states = list(optimizer_state)
    # Adam keeps two moments an element; the formula follows whatever the bound optimizers keep.
    copies = _state_copies(states, sum(s.piece.numel for p in trainable for items in p.slices for s in items))
    whole_gradients = sum(p.whole_grad_nbytes for p in partitions)
    gradients = sum(p.master.gradient_nbytes for p in partitions)
    gradient_formula = _nbytes(trainable, "step", part if stage.shards_gradients else 1)
    lines = [
        Held(
            "parameters",
            parameters if shares_weights else buffers,
            _nbytes(weights, "compute", part if shares_weights else 1),
            place if shards else "device",
        ),
        Held(
            "masters",
            sum(p.master.tensor.nbytes for p in masters),
            round(sum(p.layout.numel * p.master.tensor.itemsize for p in masters) * part),
            place,
        ),
        Held("gathered", buffers + spare if shares_weights else 0, 0),
    ]
    if place == "device":
        lines.append(Held("gradients", whole_gradients + gradients, gradient_formula))
    else:  # on disk only what outlives a step
        lines += [Held("gradients", whole_gradients, 0), Held("gradients", gradients, gradient_formula, "host")]
    lines.append(Held("optimizer", sum(t.nbytes for t in states), copies * _nbytes(trainable, "step", part), place))
    return tuple(lines)


def sent(units: Sequence[Unit], stage: ZeroStage, world_size: int, traffic: Traffic) -> tuple[Sent, ...]:
    """Puts counted traffic beside the paper's volume: Ψ(N-1)/N a gather and a reduction, two gathers at stage 3."""
    partitions = [partition for unit in units for partition in unit.partitions]
    trainable = [p for p in partitions if p.is_trainable]
    share = (world_size - 1) / world_size
    gather = (
        2 * _nbytes(partitions, "compute", share) if stage.shards_parameters else _nbytes(trainable, "compute", share)
    )
    formulas = {"gather": gather, "reduce": _nbytes(trainable, "wire", share), "control": 0}
    return tuple(Sent(kind, traffic.calls[kind], traffic.bytes[kind], value) for kind, value in formulas.items())


def _nbytes(partitions: Sequence[Partition], use: str, factor: float) -> int:
    """Bytes of the parameters, padding not counted, in the dtype that they have in `use` (see `Dtypes`)."""
    itemsizes: list[int] = [getattr(p.dtypes, use).itemsize for p in partitions]
    return round(factor * sum(p.layout.numel * size for p, size in zip(partitions, itemsizes, strict=True)))


def _state_copies(states: Sequence[Tensor], partitions_numel: int) -> int:
    elements = sum(t.numel() for t in states if t.dim() > 0)
    return round(elements / partitions_numel) if partitions_numel else 0


def unique_tensors(values: Iterable[object]) -> list[Tensor]:
    """The tensors among `values`, each once."""
    return list({id(v): v for v in values if isinstance(v, torch.Tensor)}.values())
