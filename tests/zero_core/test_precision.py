"""Half precision with fp32 masters computes what one process computes that does the same by hand.

The twin holds half weights and fp32 masters, runs each rank's part of the batch under autocast, adds the parts' half
gradients up in fp32 in rank order, steps on the masters and rounds them into the weights. The engine gives the same bits;
only clipping may differ, by the rounding of a norm that is added up shard by shard (1e-6).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers import models
from tests.helpers.cases import Cases, check
from tests.helpers.twin import OPTIMIZERS, HalfTwin, full_grads
from zero_core import MixedPrecision, ZeroConfig, ZeroEngine, ZeroGradScaler, shard

cases = Cases(__name__)
outcomes = cases.fixture(3)

STEPS = 4


def make(
    stage: int, policy: MixedPrecision | str, family: str = "llama", optimizer: str = "adamw", **config: Any
) -> Any:
    model = models.build(family)
    param = policy.param if isinstance(policy, MixedPrecision) else MixedPrecision.named(policy).param
    twin = HalfTwin(model, OPTIMIZERS[optimizer], param)
    engine = shard(model, ZeroConfig(stage=stage, unit_numel=3000, precision=policy, **config))
    return twin, model, engine, engine.bind(OPTIMIZERS[optimizer](model))


def own_part(data: dict[str, Tensor]) -> dict[str, Tensor]:
    return models.part(data, dist.get_rank(), dist.get_world_size())


def check_weights(twin: HalfTwin, engine: ZeroEngine, tolerance: float = 0.0) -> None:
    own = engine.full_state_dict(all_ranks=True)
    for name, expected in twin.masters.named_parameters():
        assert own[name].dtype == torch.float32
        error = (own[name] - expected).abs().max().item()
        assert error <= tolerance, f"{name} is off by {error:.1e}"
    with engine.full_params():
        for (name, param), expected in zip(engine.model.named_parameters(), twin.model.parameters(), strict=True):
            assert param.dtype == twin.dtype
            if not tolerance:
                assert torch.equal(param, expected), name


@cache
def by_hand(family: str) -> tuple[HalfTwin, list[tuple[float, list[Tensor]]]]:
    """The twin at the end, and its loss and gradients of each step; the same for every stage."""
    twin, steps = HalfTwin(models.build(family), OPTIMIZERS["adamw"], torch.bfloat16), []
    for step in range(STEPS):
        loss = twin.backward(models.batch(family, step), dist.get_world_size())
        steps.append((loss, [master.grad.clone() for master in twin.masters.parameters()]))
        twin.step()
    return twin, steps


@cases
def every_family_in_bf16_has_the_twins_bits(stage: int) -> None:
    for family in models.FAMILIES:
        twin, steps = by_hand(family)
        model = models.build(family)
        engine = shard(model, ZeroConfig(stage=stage, unit_numel=3000, precision="bf16-mixed"))
        optimizer = engine.bind(OPTIMIZERS["adamw"](model))
        for step, (expected, grads) in enumerate(steps):
            loss = models.loss(model, own_part(models.batch(family, step)))
            loss.backward()
            total = loss.detach().float().clone()
            dist.all_reduce(total)
            assert total.item() / dist.get_world_size() == pytest.approx(expected, rel=1e-6)
            assert all(torch.equal(own, grad) for own, grad in zip(full_grads(engine), grads, strict=True))
            optimizer.step()
            optimizer.zero_grad()
        check_weights(twin, engine)
        state = engine.full_optimizer_state_dict(optimizer)
        if dist.get_rank() == 0:
            for index, entries in twin.optimizer.state_dict()["state"].items():
                for key, value in entries.items():
                    assert torch.equal(state["state"][index][key], value), (family, index, key)


@cases
def fp16_with_a_loss_scale_accumulation_and_clipping(stage: int) -> None:
    for local in (False, True):
        twin, model, engine, optimizer = make(stage, "16-mixed", local_accumulation=local)
        scaler = ZeroGradScaler("cpu", init_scale=2.0**10)
        world = dist.get_world_size()
        for step in range(STEPS):
            for micro in range(2):
                data = models.batch("llama", 2 * step + micro)
                if micro == 0:
                    with engine.no_sync():
                        scaler.scale(models.loss(model, own_part(data)) / 2).backward()
                else:
                    scaler.scale(models.loss(model, own_part(data)) / 2).backward()
                twin.backward(data, world, scale=2.0**10 / 2)
            scaler.unscale_(optimizer)
            norm = engine.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            for master in twin.masters.parameters():
                master.grad /= 2.0**10
            expected = torch.nn.utils.get_total_norm([p.grad for p in twin.masters.parameters()])
            # Gradients that waited whole travel in fp16 once, not twice: a rounding (2^-11) less.
            assert norm.item() == pytest.approx(expected.item(), rel=1e-3 if local else 1e-6)
            torch.nn.utils.clip_grads_with_norm_(twin.masters.parameters(), 0.5, norm)
            twin.step()
        # Adam moves every weight by up to 1e-3 a step, also one whose gradient is but rounding: then either way.
        check_weights(twin, engine, 2e-3 * STEPS if local else 0.0)
        assert engine.report().skipped == 0


@cases.at(1, 3)
def bytes_held_and_sent_are_the_formula(stage: int) -> None:
    """A model of Ψ parameters in bf16: 2Ψ + 12Ψ/N at stages 1 and 2, 12Ψ/N at stage 3; half the bytes of fp32 are sent."""
    world, model = dist.get_world_size(), models.build("llama").to(torch.bfloat16)
    engine = shard(model, ZeroConfig(stage=stage, unit_numel=3000, precision="bf16-mixed"))
    optimizer = engine.bind(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in range(3):
        models.loss(model, own_part(models.batch("llama", step))).backward()
        layouts = [p.layout for unit in engine._units for p in unit.partitions]
        held = {line.kind: line for line in engine.report().held}
        # A unit smaller than 64 bytes a rank may leave the last rank nothing but padding.
        assert held["gradients"].bytes == 4 * sum(
            layout.shard_numel for layout in layouts if layout.pieces(dist.get_rank())
        )
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():  # a post-step gather is over once the weights are used
        engine.run(lambda: [param.sum() for param in model.parameters()])
    padded = sum(layout.padded_numel for layout in layouts)
    numel = sum(p.numel() for p in model.parameters())
    report = engine.report()
    held = {line.kind: line for line in report.held}
    assert held["parameters"].bytes == (0 if stage == 3 else 2 * padded)
    assert held["parameters"].formula == (0 if stage == 3 else 2 * numel)
    assert held["masters"].bytes == 4 * padded // world and held["masters"].formula == round(4 * numel / world)
    assert held["gathered"].bytes == held["gradients"].bytes == 0
    state = torch.tensor(held["optimizer"].bytes - 4 * len(optimizer.state))
    dist.all_reduce(state)
    assert state.item() == 8 * numel
    sent = {line.kind: line for line in report.sent}
    reduced = torch.tensor(sent["reduce"].bytes)
    dist.all_reduce(reduced)
    assert reduced.item() == 2 * numel * (world - 1)
    if stage < 3:
        gathered = torch.tensor(sent["gather"].bytes)
        dist.all_reduce(gathered)
        assert gathered.item() == 2 * numel * (world - 1)


@cases.at(1, 3)
def an_overflow_on_one_rank_is_skipped_by_all(stage: int) -> None:
    model = models.mlp()
    engine = shard(model, ZeroConfig(stage=stage, precision="16-mixed"))
    optimizer = engine.bind(torch.optim.AdamW(model.parameters(), lr=0.1))
    scaler = ZeroGradScaler("cpu", init_scale=2.0**8)
    before = engine.full_state_dict(all_ranks=True)
    for step in range(3):
        data = torch.ones(4, 5) * (float("inf") if dist.get_rank() == 1 and step < 2 else 1.0)
        scaler.scale(model(data).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = all(torch.equal(before[k], v) for k, v in engine.full_state_dict(all_ranks=True).items())
        assert same == (step < 2)
        assert scaler.get_scale() == 2.0**8 / 2 ** min(step + 1, 2)
    assert engine.report().skipped == 2
    assert {int(entry["step"]) for entry in optimizer.state.values()} == {1}


def step_with_nan(model: nn.Module, optimizer: torch.optim.Optimizer, bad: bool) -> None:
    """A step in which rank 0 may have a NaN in its data."""
    data = torch.ones(4, 5)
    data[0, 0] = float("nan") if bad and dist.get_rank() == 0 else 1.0
    model(data).float().sum().backward()
    try:
        optimizer.step()
    finally:
        optimizer.zero_grad()


@cases.at(1, 3)
def a_nan_in_bf16_raises_on_all_ranks_or_skips(stage: int) -> None:
    for word in ("raise", "skip"):
        model = models.mlp()
        policy = MixedPrecision(nonfinite=word, max_skips=3)
        engine = shard(model, ZeroConfig(stage=stage, precision=policy))
        optimizer = engine.bind(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        before = engine.full_state_dict(all_ranks=True)

        if word == "raise":
            with pytest.raises(RuntimeError, match=r"not finite: parameter '0\.weight' \(the part held by rank 0\)"):
                step_with_nan(model, optimizer, bad=True)
        else:
            step_with_nan(model, optimizer, bad=True)
            step_with_nan(model, optimizer, bad=True)
            assert engine.report().skipped == 2
        assert all(torch.equal(before[k], v) for k, v in engine.full_state_dict(all_ranks=True).items())
        step_with_nan(model, optimizer, bad=False)
        assert not all(torch.equal(before[k], v) for k, v in engine.full_state_dict(all_ranks=True).items())
        if word == "skip":
            step_with_nan(model, optimizer, bad=True)
            step_with_nan(model, optimizer, bad=True)
            with pytest.raises(RuntimeError, match="3 steps in a row were skipped"):
                step_with_nan(model, optimizer, bad=True)


@cases.at(1, 3)
def pure_bf16_learns_where_updates_would_vanish(stage: int) -> None:
    """At 1.0 the next bf16 number is 1/128 away: an update of 1e-4 vanishes, unless it is rounded up now and then."""
    for rounding, learns in (("nearest", False), ("stochastic", True)):
        model = nn.Linear(64, 64, bias=False)
        nn.init.ones_(model.weight)
        engine = shard(model, ZeroConfig(stage=stage, precision=MixedPrecision(master=None, rounding=rounding)))
        optimizer = engine.bind(torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0))
        for _ in range(100):
            model(torch.ones(2, 64)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = engine.full_state_dict(all_ranks=True)["weight"]
        assert weights.dtype == torch.bfloat16
        moved = 1 - weights.float().mean().item()
        # 100 steps of 1e-4; the mean of 4096 weights that moved by whole 1/256s strays by a few 1e-4.
        assert moved == pytest.approx(0.01, abs=2e-3) if learns else moved == 0


@cases.at(1, 3)
def pure_half_is_warned_about_and_still_guarded(stage: int) -> None:
    model = models.mlp().bfloat16()
    engine = shard(model, ZeroConfig(stage=stage))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = engine.bind(torch.optim.SGD(model.parameters(), lr=0.1))
    assert any("bf16-mixed" in str(w.message) for w in caught) == (dist.get_rank() == 0)
    model(torch.full((4, 5), float("nan"), dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()


@cases
def micro_batches_that_wait_whole_add_up_in_fp32(stage: int) -> None:
    """256 + 1 is 256 in bf16: of 9 such gradients, 8 would be lost."""
    model = nn.Linear(8, 8, bias=False)
    engine = shard(model, ZeroConfig(stage=stage, precision="bf16-mixed", local_accumulation=True))
    engine.bind(torch.optim.SGD(model.parameters(), lr=0.1))
    for value in [256.0, *[1.0] * 8]:
        with engine.no_sync():
            model(torch.full((1, 8), value)).float().sum().backward()
    grad = engine.full_grad(model.weight)
    assert grad.dtype == torch.float32 and torch.equal(grad, torch.full((8, 8), 264.0))


@cases.at(1, 3)
def pure_half_and_double_are_the_plain_run_in_that_dtype(stage: int) -> None:
    for name, dtype in (("bf16-true", torch.bfloat16), ("64-true", torch.float64)):
        model = models.build("mlp")
        twin = HalfTwin(model, OPTIMIZERS["adamw"], dtype, dtype)
        engine = shard(model, ZeroConfig(stage=stage, precision=name))
        optimizer = engine.bind(OPTIMIZERS["adamw"](model))
        for step in range(STEPS):
            data = models.batch("mlp", step)
            mine = own_part(data)  # inputs of the model are cast, what the loss compares with is the caller's
            nn.functional.mse_loss(model(mine["input"]), mine["target"].to(dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
            twin.backward(data, dist.get_world_size())
            twin.step()
        own = engine.full_state_dict(all_ranks=True)
        for key, expected in twin.masters.named_parameters():
            assert own[key].dtype == dtype and torch.equal(own[key], expected), key


@cases.at(1, 3)
def writes_to_whole_weights_reach_the_masters(stage: int) -> None:
    twin, model, engine, _ = make(stage, "bf16-mixed", "mlp")
    with engine.full_params(writeback=True), torch.no_grad():
        model[0].weight.data[0].fill_(0.5)
        model[2].bias.mul_(2)
    with torch.no_grad():
        twin.masters[0].weight[0].fill_(0.5)
    own = engine.full_state_dict(all_ranks=True)
    assert torch.equal(own["0.weight"], twin.masters[0].weight)  # unwritten elements keep fp32 digits
    assert torch.equal(own["2.bias"], twin.masters[2].bias.bfloat16().float() * 2)


@cases.at(1, 3)
def weights_that_are_loaded_reach_masters_and_compute(stage: int) -> None:
    twin, model, engine, optimizer = make(stage, "bf16-mixed")
    other = models.build("llama", seed=5)
    engine.load_full_state_dict(other.state_dict())
    twin = HalfTwin(other, OPTIMIZERS["adamw"], torch.bfloat16)
    twin.step()
    check_weights(twin, engine)
    models.loss(model, own_part(models.batch("llama", 0))).backward()
    twin.backward(models.batch("llama", 0), dist.get_world_size())
    optimizer.step()
    optimizer.zero_grad()
    twin.step()
    check_weights(twin, engine)


@cases.at(1, 3)
def closing_leaves_the_fp32_model_behind(stage: int) -> None:
    twin, model, engine, optimizer = make(stage, "bf16-mixed", "mlp")
    data = models.batch("mlp", 0)
    models.loss(model, own_part(data)).backward()
    optimizer.step()
    twin.backward(data, dist.get_world_size())
    twin.step()
    engine.close()
    for own, expected in zip(model.parameters(), twin.masters.parameters(), strict=True):
        assert own.dtype == torch.float32 and torch.equal(own, expected)


@cases.at(1, 3)
def a_model_in_several_dtypes_stays_what_it_is(stage: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4), nn.Linear(4, 2).bfloat16())
    dtypes = [p.dtype for p in model.parameters()]
    engine = shard(model, ZeroConfig(stage=stage, precision="bf16-mixed"))
    assert [p.dtype for p in model.parameters()] == dtypes
    assert all(v.dtype == torch.float32 for v in engine.full_state_dict(all_ranks=True).values())
    model(torch.ones(2, 4)).float().sum().backward()
    assert engine.full_grad(model[0].weight).dtype == torch.float32


class Adapted(nn.Module):
    """A frozen bf16 layer with trainable fp32 adapters beside it, as LoRA on a half-precision base."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 8).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


@cases.at(1, 3)
def adapters_in_fp32_on_a_frozen_bf16_base_train_as_one_process(stage: int) -> None:
    for unit_numel in (1, 1000):  # units of their own, and one unit of both dtypes
        plain, model = Adapted(), Adapted()
        engine = shard(model, ZeroConfig(stage=stage, unit_numel=unit_numel))
        optimizer = engine.bind(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
        expected = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
        for step in range(STEPS):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
            for net, own, data in (
                (plain, expected, x),
                (model, optimizer, x.chunk(dist.get_world_size())[dist.get_rank()]),
            ):
                net(data).square().mean().backward()
                own.step()
                own.zero_grad()
        state = engine.full_state_dict(all_ranks=True)
        assert state["base.weight"].dtype == torch.bfloat16 and torch.equal(state["base.weight"], plain.base.weight)
        assert all((state[name] - value).abs().max() < 1e-5 for name, value in plain.named_parameters())


@cases.at(1, 3)
def buffers_keep_their_dtype_unless_asked(stage: int) -> None:
    for dtype, expected in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        shard(model, ZeroConfig(stage=stage, precision=MixedPrecision(buffers=dtype)))
        assert model[1].running_mean.dtype == expected and model[1].num_batches_tracked.dtype == torch.int64


@cases.at(1, 3)
def outputs_are_cast_when_asked(stage: int) -> None:
    model = nn.Linear(4, 4)
    shard(model, ZeroConfig(stage=stage, precision=MixedPrecision(output=torch.float32)))
    assert model(torch.ones(2, 4)).dtype == torch.float32


@cases.at(1, 3)
def frozen_weights_keep_no_second_copy_until_they_are_trained(stage: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    model[0].requires_grad_(False)
    engine = shard(model, ZeroConfig(stage=stage, unit_numel=10, precision="bf16-mixed"))
    masters = [p.master.tensor.dtype for unit in engine._units for p in unit.partitions]
    assert sorted(masters, key=str) == [torch.bfloat16, torch.float32]
    optimizer = engine.bind(torch.optim.AdamW(model.parameters(), lr=1e-2))
    before = engine.full_state_dict(all_ranks=True)
    for step in range(2):
        model[0].requires_grad_(step == 1)
        model(torch.ones(2, 8)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        own = engine.full_state_dict(all_ranks=True)
        assert torch.equal(own["0.weight"].float(), before["0.weight"].float()) == (step == 0)
    assert own["0.weight"].dtype == torch.float32


def test_policies_that_contradict_themselves_are_refused() -> None:
    wrong: Sequence[tuple[dict[str, Any], str]] = (
        ({"param": torch.int8}, "floating-point"),
        ({"param": torch.float32, "master": torch.bfloat16}, "fewer digits"),
        ({"rounding": "up"}, "nearest"),
        ({"rounding": "stochastic"}, "pure bf16"),
        ({"nonfinite": "ignore"}, "raise"),
        ({"max_skips": 0}, "at least 1"),
    )
    for settings, message in wrong:
        with pytest.raises(ValueError, match=message):
            MixedPrecision(**settings)
    with pytest.raises(ValueError, match="32-true"):
        ZeroConfig(precision="fp8")


@cases.parametrize()
def test_half_precision_is_the_twins(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)
