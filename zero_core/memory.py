"""Bytes held and sent: what the layout predicts, what is there, and what the paper's formulas say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_core.collectives import Traffic
from zero_core.config import ZeroStage
from zero_core.unit import Unit


@dataclass(frozen=True)
class Held:
    """Bytes of one kind of model state on this rank.

    Attributes:
        kind: "parameters" (kept between steps), "gathered" (other ranks' parts, brought in for use), "gradients",
            "optimizer".
        bytes: held now.
        formula: the paper's bytes for this kind, stage and world size (section 5), for the model's dtypes; what is
            above it is padding, or the optimizer's step counts. "gathered" has no formula: 0 at rest.
    """

    kind: str
    bytes: int
    formula: int


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
        held: by kind, now.
        sent: by kind, in the last step.
    """

    stage: int
    rank: int
    world_size: int
    steps: int
    held: tuple[Held, ...]
    sent: tuple[Sent, ...]

    def __str__(self) -> str:
        lines = [f"ZeRO stage {self.stage}, rank {self.rank} of {self.world_size}, after {self.steps} step(s)"]
        lines.append(f"  {'held':<12}{'bytes':>16}{'formula':>16}")
        lines += [f"  {h.kind:<12}{h.bytes:>16,}{h.formula:>16,}" for h in self.held]
        lines.append(f"  {'sent a step':<12}{'bytes':>16}{'formula':>16}{'calls':>8}")
        lines += [f"  {s.kind:<12}{s.bytes:>16,}{s.formula:>16,}{s.calls:>8}" for s in self.sent]
        return "\n".join(lines)


def held(
    units: Sequence[Unit], stage: ZeroStage, world_size: int, spare: int, optimizer_state: Iterable[Tensor]
) -> tuple[Held, ...]:
    """Scans what this rank holds now; `spare` bytes are kept for the next gather."""
    partitions = [partition for unit in units for partition in unit.partitions]
    whole, trainable = _weight_nbytes(units)
    buffers = sum(p.buffer.nbytes for p in partitions)
    masters = sum(p.master.numel() * p.master.element_size() for p in partitions)
    gradients = sum(p.grad_nbytes for p in partitions)
    states = list(optimizer_state)
    optimizer = sum(t.numel() * t.element_size() for t in states)
    # Adam keeps two moments an element; the formula follows whatever the bound optimizers keep.
    per_element = _state_copies(states, partitions_numel=sum(_own_numel(unit) for unit in units))
    parameters, gathered = (masters, buffers + spare) if stage.shards_parameters else (buffers, 0)
    return (
        Held("parameters", parameters, whole // world_size if stage.shards_parameters else whole),
        Held("gathered", gathered, 0),
        Held("gradients", gradients, trainable // world_size if stage.shards_gradients else trainable),
        Held("optimizer", optimizer, round(per_element * trainable / world_size)),
    )


def sent(units: Sequence[Unit], stage: ZeroStage, world_size: int, traffic: Traffic) -> tuple[Sent, ...]:
    """Puts counted traffic beside the paper's volume: Ψ(N-1)/N a gather and a reduction, two gathers at stage 3."""
    whole, trainable = _weight_nbytes(units)
    share = (world_size - 1) / world_size
    gathers = 2 * whole if stage.shards_parameters else trainable
    formulas = {"gather": round(gathers * share), "reduce": round(trainable * share), "control": 0}
    return tuple(Sent(kind, traffic.calls[kind], traffic.bytes[kind], value) for kind, value in formulas.items())


def _weight_nbytes(units: Sequence[Unit]) -> tuple[int, int]:
    """Bytes of all weights and of the trainable ones, padding not counted."""
    partitions = [partition for unit in units for partition in unit.partitions]
    whole = sum(p.layout.numel * p.layout.dtype.itemsize for p in partitions)
    return whole, sum(p.layout.numel * p.layout.dtype.itemsize for p in partitions if p.is_trainable)


def _own_numel(unit: Unit) -> int:
    return sum(s.piece.numel for p in unit.partitions if p.is_trainable for items in p.slices for s in items)


def _state_copies(states: Sequence[Tensor], partitions_numel: int) -> int:
    elements = sum(t.numel() for t in states if t.dim() > 0)
    return round(elements / partitions_numel) if partitions_numel else 0


def unique_tensors(values: Iterable[object]) -> list[Tensor]:
    """The tensors among `values`, each once."""
    return list({id(v): v for v in values if isinstance(v, torch.Tensor)}.values())
