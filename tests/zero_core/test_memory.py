"""Bytes held and sent are the formulas', to the byte, plus padding that the layout states."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers import models
from tests.helpers.cases import Cases, check
from tests.helpers.twin import Pair
from zero_core import Report

cases = Cases(__name__)
outcomes = cases.fixture(2, 3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def held(report: Report) -> dict[str, int]:
    return {h.kind: h.bytes for h in report.held}


def sent(report: Report) -> dict[str, int]:
    return {s.kind: s.bytes for s in report.sent}


def over_ranks(value: int) -> int:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return int(total)


def step(pair: Pair, number: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    models.loss(pair.model, models.part(models.batch("llama", number), rank, world)).backward()
    pair.optimizer.step()
    pair.optimizer.zero_grad()


def padded_numel(numel: int, world: int) -> int:
    """A rank's part starts on a 64-byte line: 16 fp32 elements."""
    return -(-numel // (16 * world)) * 16 * world


def unit_numels(pair: Pair) -> list[int]:
    return [unit.numel for unit in pair.engine._units]


@cases
def bytes_at_rest_are_the_formula_plus_padding(stage: int) -> None:
    """Fp32: 4Ψ or 4Ψ/N of weights, nothing gathered, no gradients, 8Ψ/N of Adam's moments."""
    pair = Pair(models.build("llama"), stage, adamw)
    world = dist.get_world_size()
    for number in range(2):
        step(pair, number)
        pair.engine.report()
        with torch.no_grad():  # a post-step gather is over once the weights are used
            pair.model(models.batch("llama", 0)["input_ids"][:1])
    padded = sum(padded_numel(n, world) for n in unit_numels(pair))
    own = held(pair.engine.report())
    numel = sum(p.numel() for p in pair.model.parameters())
    assert own["parameters"] == (4 * padded // world if stage == 3 else 4 * padded)
    assert own["gathered"] == 0 and own["gradients"] == 0
    counts = 4 * len(pair.optimizer.state)  # one fp32 step count a slice
    assert over_ranks(own["optimizer"] - counts) == 8 * numel
    assert own["optimizer"] - counts <= 8 * padded // world
    for line in pair.engine.report().held:
        if line.kind == "parameters":
            assert line.formula == (round(4 * numel / world) if stage == 3 else 4 * numel)


@cases
def gradients_live_as_shards_between_backward_and_step(stage: int) -> None:
    """Stage 1 too: its whole gradients live only while micro-batches wait, so it holds less than the paper's 4Ψ."""
    pair = Pair(models.build("llama"), stage, adamw)
    rank, world = dist.get_rank(), dist.get_world_size()
    models.loss(pair.model, models.part(models.batch("llama", 0), rank, world)).backward()
    padded = sum(padded_numel(n, world) for n in unit_numels(pair))
    assert held(pair.engine.report())["gradients"] == 4 * padded // world
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    assert held(pair.engine.report())["gradients"] == 0


@cases
def the_peak_within_a_step_is_bounded_by_two_units(stage: int) -> None:
    """Looked at whenever a module or a gradient is done: at rest + weights and gradients of two units.

    The model's own unit (here its last norm) is whole throughout a pass, so it comes on top; it is small by design.
    """
    pair = Pair(models.build("llama"), stage, adamw, unit_numel=3000)
    peaks: list[int] = []

    def look(*_: Any) -> None:
        peaks.append(sum(held(pair.engine.report()).values()))

    for module in pair.model.modules():
        module.register_forward_hook(look)
    for param in pair.model.parameters():
        param.register_post_accumulate_grad_hook(look)
        param.register_hook(look)
    for number in range(3):
        peaks.clear()
        step(pair, number)
    world = dist.get_world_size()
    numels = unit_numels(pair)
    padded = sum(padded_numel(n, world) for n in numels)
    largest = max(padded_numel(n, world) for n in numels)
    own = min(padded_numel(n, world) for n in numels)
    optimizer = held(pair.engine.report())["optimizer"]
    rest = (4 * padded // world if stage == 3 else 4 * padded) + 4 * padded // world + optimizer
    weights = 4 * (2 * largest + own) if stage == 3 else 0
    gradients = 4 * (2 * largest + own)
    assert rest < max(peaks) <= rest + weights + gradients, (max(peaks), rest, largest)


@cases
def bytes_sent_are_the_formula(stage: int) -> None:
    """All ranks together, to the byte: 2Ψ(N-1) at stages 1 and 2; at stage 3 3Ψ(N-1) less what needs no second gather.

    In backward the last two units are still there, and an embedding's weight is not read at all.
    """
    pair = Pair(models.build("llama"), stage, adamw, unit_numel=3000)  # embedding and head are units of their own
    for number in range(3):
        step(pair, number)
    own = sent(pair.engine.report())
    numel, world = sum(p.numel() for p in pair.model.parameters()), dist.get_world_size()
    assert over_ranks(own["reduce"]) == 4 * numel * (world - 1)
    model = pair.plain.model
    spared = [pair.plain.lm_head, model.layers[-1], model.embed_tokens]
    again = numel - sum(p.numel() for module in spared for p in module.parameters())
    gathered = numel + again if stage == 3 else numel
    assert over_ranks(own["gather"]) == 4 * gathered * (world - 1)
    shares = {line.kind: line.formula for line in pair.engine.report().sent}
    assert shares["reduce"] == round(4 * numel * (world - 1) / world)
    assert over_ranks(own["gather"]) <= world * shares["gather"] + world


@cases
def a_shared_layer_is_gathered_once_a_pass(stage: int) -> None:
    pair = Pair(models.build("albert"), stage, adamw)
    rank, world = dist.get_rank(), dist.get_world_size()
    for number in range(3):
        models.loss(pair.model, models.part(models.batch("albert", number), rank, world)).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    numel = sum(p.numel() for p in pair.model.parameters())
    assert over_ranks(sent(pair.engine.report())["gather"]) <= (2 if stage == 3 else 1) * 4 * numel * (world - 1)


@cases
def evaluation_needs_no_gradients_and_no_optimizer_state(stage: int) -> None:
    pair = Pair(models.build("llama"), stage, adamw)
    with torch.no_grad():
        pair.model(models.batch("llama", 0)["input_ids"])
    own = held(pair.engine.report())
    assert own["gathered"] == own["gradients"] == own["optimizer"] == 0


@cases
def nothing_is_kept_alive_once_the_model_is_gone(stage: int) -> None:
    import gc
    import weakref

    pair = Pair(models.build("llama"), stage, adamw)
    step(pair, 0)
    engine, model = weakref.ref(pair.engine), weakref.ref(pair.model)
    buffers = [weakref.ref(part.buffer) for unit in pair.engine._units for part in unit.partitions]
    del pair
    gc.collect()
    assert engine() is None and model() is None and all(buffer() is None for buffer in buffers)


@cases
def the_report_and_the_engine_print_as_tables(stage: int) -> None:
    pair = Pair(models.build("llama"), stage, adamw)
    step(pair, 0)
    table = repr(pair.engine)
    assert f"stage={stage}" in table and "model.layers.1" in table and "LlamaDecoderLayer" in table
    text = str(pair.engine.report())
    assert "parameters" in text and "reduce" in text and f"stage {stage}" in text


@cases.parametrize()
def test_bytes_are_the_formulas(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)
