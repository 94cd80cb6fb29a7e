"""Every combination of stage, precision, offload, accumulation and clipping is the twin's.

The twin is one process that does the same by hand (`HalfTwin`): each rank's micro-batches one after the other, under
autocast on half weights, added up in fp32 in rank order, stepped on fp32 masters. It gives the same bits every time, so
its spread from run to run is zero and so is the tolerance: gradients and weights are compared bit by bit. Two things are
taken from the engine once they have been checked:

- A norm is added up shard by shard, 1e-6 from the twin's; the twin clips by the engine's.
- Gradients that wait whole inside `no_sync` (stage 1) travel once, as each rank's sum in the compute dtype, and the owner of
  an element adds its own sum with all digits. Each element is what one of the ranks would arrive at as its owner.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers import models
from tests.helpers.cases import Cases, check
from tests.helpers.twin import OPTIMIZERS, HalfTwin, fingerprint, full_grads
from tests.zero_core.test_offload import placements
from zero_core import MixedPrecision, ZeroConfig, ZeroGradScaler, shard

cases = Cases(__name__)
outcomes = cases.fixture(2)

STEPS = 2
SCALE = 2.0**8
PRECISIONS = {None: torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
# A step's backwards: one; two of which the first is inside `no_sync`; two that both end up in shards.
ACCUMULATIONS = {"one": 1, "no_sync": 2, "two": 2}
CLIPPINGS = (None, "norm", "value")


def micro_batches(step: int, accumulation: str) -> list[Any]:
    return [models.batch("mlp", 2 * step + i) for i in range(ACCUMULATIONS[accumulation])]


@dataclass
class Outcome:
    """Bits of the weights at the end; gradients before clipping and their norms after clipping by value, by step."""

    bits: str
    state: dict[str, Tensor]
    norms: list[float] = field(default_factory=list)
    gradients: list[list[Tensor]] = field(default_factory=list)


def train(stage: int, precision: str | None, accumulation: str, clipping: str | None, offload: Any) -> Outcome:
    model = models.build("mlp")
    engine = shard(model, ZeroConfig(stage=stage, unit_numel=20, precision=precision, offload=offload))
    optimizer = engine.bind(OPTIMIZERS["adamw"](model))
    scaler = ZeroGradScaler("cpu", init_scale=SCALE, enabled=precision == "16-mixed")
    outcome = Outcome("", {})
    for step in range(STEPS):
        data = [models.part(b, dist.get_rank(), dist.get_world_size()) for b in micro_batches(step, accumulation)]
        for micro in data[:-1]:
            with engine.no_sync() if accumulation == "no_sync" else torch.enable_grad():
                scaler.scale(models.loss(model, micro) / len(data)).backward()
        scaler.scale(models.loss(model, data[-1]) / len(data)).backward()
        scaler.unscale_(optimizer)
        outcome.gradients.append(full_grads(engine))
        if clipping == "value":
            engine.clip_grad_value_(0.01)
        outcome.norms.append(engine.clip_grad_norm_(0.1 if clipping == "norm" else float("inf")).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert engine.report().skipped == 0
    outcome.bits, outcome.state = fingerprint(engine), engine.full_state_dict(all_ranks=True)
    return outcome


def check_by_hand(
    own: Outcome, precision: str | None, accumulation: str, clipping: str | None, waits_whole: bool
) -> None:
    """Does what the engine did, looking at each step whether it arrives at the same."""
    twin = HalfTwin(models.build("mlp"), OPTIMIZERS["adamw"], PRECISIONS[precision])
    scale = SCALE if precision == "16-mixed" else 1.0
    for step, (gradients, norm) in enumerate(zip(own.gradients, own.norms, strict=True)):
        data = micro_batches(step, accumulation)
        for micro in data:
            twin.backward(micro, dist.get_world_size(), scale=scale / len(data), wait=waits_whole)
        params = list(twin.masters.parameters())
        for i, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
            possible = twin.sums_by_owner(i) if waits_whole else [param.grad]
            found = torch.stack([gradient == grad / scale for grad in possible])
            assert found.any(dim=0).all()
            param.grad = gradient
        if clipping == "value":
            nn.utils.clip_grad_value_(params, 0.01)
        assert norm == pytest.approx(nn.utils.get_total_norm([p.grad for p in params]).item(), rel=1e-6)
        if clipping == "norm":
            nn.utils.clip_grads_with_norm_(params, 0.1, torch.tensor(norm))
        twin.step()
    for (name, expected), value in zip(twin.masters.named_parameters(), own.state.values(), strict=True):
        assert torch.equal(value, expected), name


@cases
def every_combination_is_the_twins(stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for settings in product(PRECISIONS, ACCUMULATIONS, CLIPPINGS):
            own = train(stage, *settings, None)
            try:
                check_by_hand(own, *settings, waits_whole=stage == 1 and settings[1] == "no_sync")
            except AssertionError as error:
                raise AssertionError(settings) from error
            for offload in placements(stage, folder):
                other = train(stage, *settings, offload)
                assert (other.bits, other.norms) == (own.bits, own.norms), (settings, offload)


@cases
def micro_batches_are_one_big_batch_in_every_precision(stage: int) -> None:
    """fp32 within 1e-6 of the gradient's size; half within its rounding (2^-8, 2^-11) of a part and of what it came from."""
    for precision, tolerance in ((None, 1e-6), ("bf16-mixed", 2**-7), ("16-mixed", 2**-10)):
        for offload in (None, "optimizer"):
            gradients = []
            for parts in (1, 3):
                model = models.build("mlp")
                engine = shard(model, ZeroConfig(stage=stage, precision=precision, offload=offload))
                engine.bind(torch.optim.SGD(model.parameters(), lr=0.1))
                mine = models.part(models.batch("mlp", 0), dist.get_rank(), dist.get_world_size())
                for part in range(parts):
                    micro = models.part(mine, part, parts)
                    with engine.no_sync() if part < parts - 1 else torch.enable_grad():
                        (models.loss(model, micro) / parts).backward()
                gradients.append(full_grads(engine))
            for whole, added in zip(*gradients, strict=True):
                assert (whole - added).norm() <= tolerance * whole.norm(), (precision, offload)


@cases
def a_loss_weighted_by_tokens_counts_each_token_once(stage: int) -> None:
    """Micro-batches and ranks of different lengths: the sum of token losses over the number of tokens of all."""
    lengths = [[3, 8], [5, 1], [2, 7]]  # tokens of each micro-batch, by rank
    counts = lengths[: dist.get_world_size()]
    rows = [
        [models.random_tokens(1, n, seed=10 * rank + i) for i, n in enumerate(row)] for rank, row in enumerate(counts)
    ]
    tokens = sum(n for row in counts for n in row)

    def summed(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids).logits.float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")

    plain = models.build("llama")
    sum(summed(plain, ids) for row in rows for ids in row).div(tokens).backward()
    for precision, tolerance in ((None, 1e-6), ("bf16-mixed", 2**-6)):
        model = models.build("llama")
        engine = shard(model, ZeroConfig(stage=stage, precision=precision))
        engine.bind(torch.optim.SGD(model.parameters(), lr=0.1))
        mine = rows[dist.get_rank()]
        for i, ids in enumerate(mine):
            with engine.no_sync() if i < len(mine) - 1 else torch.enable_grad():
                # Averaged over ranks, so times their number.
                (summed(model, ids) * dist.get_world_size() / tokens).backward()
        own = torch.cat([engine.full_grad(p).flatten() for p in model.parameters()])
        expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
        assert (own - expected).norm() <= tolerance * expected.norm(), precision


@cases
def gradients_travel_in_the_dtype_of_the_policy(stage: int) -> None:
    """256 + 1 has no bf16: with an fp32 wire what waited whole arrives with all digits, for twice the bytes."""
    sent = {}
    for wire in (None, torch.float32):
        model = nn.Linear(8, 8, bias=False)
        policy = MixedPrecision(reduce=wire)
        engine = shard(model, ZeroConfig(stage=stage, precision=policy, local_accumulation=True))
        optimizer = engine.bind(torch.optim.SGD(model.parameters(), lr=0.1))
        with engine.no_sync():
            model(torch.full((1, 8), 256.0)).float().sum().backward()
        model(torch.ones(1, 8)).float().sum().backward()
        grad = engine.full_grad(model.weight)
        # The owner's own 257 and another's 256, or 257 twice.
        assert torch.equal(grad, torch.full((8, 8), 257.0 if wire else 256.5))
        optimizer.step()
        sent[wire] = next(line.bytes for line in engine.report().sent if line.kind == "reduce")
    assert sent[torch.float32] == 2 * sent[None] > 0


@cases.parametrize()
def test_every_combination_is_one_process(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)
