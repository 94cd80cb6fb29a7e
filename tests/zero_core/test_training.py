"""Steps, accumulation, clipping, several optimizers: the arithmetic of a training loop is that of plain torch."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.cases import Cases, check
from tests.helpers.twin import Pair, distance, random_batch
from zero_core import PartitionedParameterError, UnsupportedOptimizerError, ZeroConfig, shard

cases = Cases(__name__)
outcomes = cases.fixture(3)
SMALL = {"unit_numel": 1}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 3))


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def sent(pair: Pair) -> dict[str, tuple[int, int]]:
    return {s.kind: (s.calls, s.bytes) for s in pair.engine.report().sent}


@cases
def micro_batches_add_up_to_one_big_batch(stage: int) -> None:
    """With and without `no_sync`: N micro-batches are one big batch."""
    for quiet in (False, True):
        for local in (None, True, False):
            pair = Pair(net(), stage, local_accumulation=local, **SMALL)
            for step in range(3):
                x = random_batch(24, 5, seed=step)
                squared(pair.plain, x).backward()
                mine = x.chunk(dist.get_world_size())[dist.get_rank()].chunk(4)
                for i, part in enumerate(mine):
                    if quiet and i < 3:
                        with pair.engine.no_sync():
                            (squared(pair.model, part) / 4).backward()
                    else:
                        (squared(pair.model, part) / 4).backward()
                pair.check_gradients()
                pair.step()
                pair.check_weights(1e-6)


@cases
def no_sync_sends_nothing_at_stage_1_and_keeps_shards_at_2_and_3(stage: int) -> None:
    pair = Pair(net(), stage)  # one unit
    mine = random_batch(6, 5).chunk(dist.get_world_size())[dist.get_rank()]
    for _ in range(2):  # the first step also agrees on an order
        for _ in range(3):
            with pair.engine.no_sync():
                squared(pair.model, mine).backward()
        held = {h.kind: h.bytes for h in pair.engine.report().held}["gradients"]
        squared(pair.model, mine).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    numel = sum(p.numel() for p in pair.plain.parameters())
    shard_bytes = -(-numel // (16 * dist.get_world_size())) * 16 * 4
    calls, nbytes = sent(pair)["reduce"]
    total = torch.tensor(nbytes)
    dist.all_reduce(total)
    assert calls == (1 if stage == 1 else 4)
    assert total.item() == calls * 4 * numel * (dist.get_world_size() - 1)
    # Weights are gathered for every backward at stage 3 (one unit: the forward's gather serves the backward too).
    assert sent(pair)["gather"][0] == (4 if stage == 3 else 1)
    assert held == (4 * numel if stage == 1 else shard_bytes)


@cases
def a_step_after_no_sync_alone_loses_no_gradient(stage: int) -> None:
    pair = Pair(net(), stage)
    x = random_batch(6, 5)
    with pair.engine.no_sync():
        pair.backward(squared, x)
    pair.step()
    pair.check_weights()


@cases
def several_backwards_before_a_step_add_up(stage: int) -> None:
    pair = Pair(net(), stage, **SMALL)
    for step in range(3):
        x, y = random_batch(6, 5, seed=step), random_batch(6, 5, seed=10 + step)
        pair.backward(squared, x)
        pair.backward(squared, y)
        pair.check_gradients()
        pair.step()
        pair.check_weights()


@cases
def gradients_are_zeroed_by_the_optimizer_or_the_model(stage: int) -> None:
    for set_to_none in (True, False):
        for zero in ("optimizer", "model"):
            pair = Pair(net(), stage, **SMALL)
            for step in range(3):
                pair.backward(squared, random_batch(6, 5, seed=step))
                pair.check_gradients()
                pair.optimizer.step()
                pair.plain_optimizer.step()
                pair.plain.zero_grad()
                if zero == "optimizer":
                    pair.optimizer.zero_grad(set_to_none=set_to_none)
                else:
                    pair.model.zero_grad()
            pair.check_weights()


@cases
def gradients_not_zeroed_go_on_adding_up(stage: int) -> None:
    pair = Pair(net(), stage, **SMALL)
    for step in range(3):
        pair.backward(squared, random_batch(6, 5, seed=step))
        pair.check_gradients()
        pair.optimizer.step()
        pair.plain_optimizer.step()
        pair.check_weights()


@cases
def clipping_by_global_norm_is_that_of_plain_torch(stage: int) -> None:
    for norm_type in (1.0, 2.0, 3.5, float("inf")):
        model = net()
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        model[4].bias.requires_grad_(False)
        pair = Pair(model, stage, **SMALL)
        for step in range(2):
            pair.backward(squared, random_batch(6, 5, seed=step))
            expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05, norm_type)
            norm = pair.engine.clip_grad_norm_(0.05, norm_type)
            assert torch.allclose(norm, expected, rtol=1e-6), (norm_type, norm, expected)
            norms = [torch.zeros(()) for _ in range(dist.get_world_size())]
            dist.all_gather(norms, norm)
            assert all(torch.equal(norm, other) for other in norms)  # the same bits, not only about the same
            pair.check_gradients()
            pair.step()
            pair.check_weights()


@cases
def clipping_by_value_is_that_of_plain_torch(stage: int) -> None:
    pair = Pair(net(), stage, **SMALL)
    pair.backward(squared, random_batch(6, 5))
    nn.utils.clip_grad_value_(pair.plain.parameters(), 0.003)
    pair.engine.clip_grad_value_(0.003)
    pair.check_gradients()


@cases
def nothing_is_clipped_unless_asked(stage: int) -> None:
    pair = Pair(net(), stage)
    pair.train(lambda m, x: squared(m, x) * 1000, random_batch(6, 5) * 0.01)


@cases
def a_norm_that_is_not_finite_is_an_error_where_asked(stage: int) -> None:
    pair = Pair(net(), stage)
    (squared(pair.model, random_batch(6, 5)) * float("inf")).backward()
    try:
        pair.engine.clip_grad_norm_(1.0, error_if_nonfinite=True)
        raise AssertionError("should have raised")
    except RuntimeError as error:
        assert "nan" in str(error) or "inf" in str(error)


@cases
def reading_p_grad_names_the_call_that_gives_it(stage: int) -> None:
    pair = Pair(net(), stage, **SMALL)
    pair.backward(squared, random_batch(6, 5))
    weight = pair.model[0].weight
    assert weight.grad is not None and weight.grad.shape == weight.shape  # loggers see that there is one
    for read in (lambda: weight.grad.norm(), lambda: nn.utils.clip_grad_norm_(pair.model.parameters(), 1.0)):
        try:
            read()
            raise AssertionError("read a gradient that is not here")
        except PartitionedParameterError as error:
            assert error.parameter == "0.weight" and "full_grad" in str(error) and "clip_grad_norm_" in str(error)
    assert distance([pair.engine.full_grad(weight)], [pair.plain[0].weight.grad]) < 1e-6


@cases
def several_optimizers_for_one_model(stage: int) -> None:
    pair = Pair(net(), stage, lambda m: torch.optim.SGD(m[0].parameters(), lr=0.02), **SMALL)
    second = [torch.optim.AdamW(m[2:].parameters(), lr=0.01, foreach=False) for m in (pair.plain, pair.model)]
    pair.engine.bind(second[1])
    for step in range(3):
        pair.backward(squared, random_batch(6, 5, seed=step))
        for optimizer in second:
            optimizer.step()
            optimizer.zero_grad()
        pair.step()
        pair.check_weights()


@cases
def two_models_with_engines_of_their_own(stage: int) -> None:
    """A GAN: each step backpropagates through both nets and steps one."""
    nets = [net(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))]
    g, d = (Pair(n, stage, lambda m: torch.optim.Adam(m.parameters(), lr=0.01, foreach=False), **SMALL) for n in nets)

    def play(gen: nn.Module, disc: nn.Module, g_opt: Any, d_opt: Any, x: Tensor, real: Tensor) -> None:
        fake = gen(x)
        (disc(real).sigmoid().mean() - disc(fake.detach()).sigmoid().mean()).neg().backward()
        d_opt.step()
        d_opt.zero_grad()
        disc(gen(x)).sigmoid().mean().neg().backward()
        g_opt.step()
        for optimizer in (g_opt, d_opt):
            optimizer.zero_grad()

    for step in range(3):
        x, real = random_batch(6, 5, seed=step), random_batch(6, 3, seed=50 + step)
        cut = [t.chunk(dist.get_world_size())[dist.get_rank()] for t in (x, real)]
        play(g.plain, d.plain, g.plain_optimizer, d.plain_optimizer, x, real)
        play(g.model, d.model, g.optimizer, d.optimizer, *cut)
        g.check_weights()
        d.check_weights()


@cases
def any_elementwise_optimizer(stage: int) -> None:
    class Custom(torch.optim.AdamW):
        """A user's subclass."""

    o = torch.optim
    for make in (
        lambda m: o.Adam(m.parameters(), lr=0.01, amsgrad=True),
        lambda m: Custom(m.parameters(), lr=0.01),
        lambda m: o.NAdam(m.parameters(), lr=0.01),
        lambda m: o.RAdam(m.parameters(), lr=0.01),
        lambda m: o.Adagrad(m.parameters(), lr=0.01),
        lambda m: o.Adadelta(m.parameters(), lr=0.1),
        lambda m: o.Adamax(m.parameters(), lr=0.01),
        lambda m: o.ASGD(m.parameters(), lr=0.01),
        lambda m: o.Rprop(m.parameters(), lr=0.01),
        lambda m: o.SGD(m.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    ):
        pair = Pair(net(), stage, make, **SMALL)
        for step in range(2):
            pair.backward(squared, random_batch(6, 5, seed=step))
            pair.step()
        # Sign-like first steps turn a vanishing gradient's rounding into a whole step, so the bound is a fraction of one.
        pair.check_weights(2e-3)


@cases
def optimizers_that_need_whole_matrices_are_refused_by_name(stage: int) -> None:
    class Lamb(torch.optim.SGD):
        pass

    model = net()
    engine = shard(model, ZeroConfig(stage=stage))
    for optimizer in (
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2]),
        torch.optim.Adafactor(model.parameters()),
        torch.optim.LBFGS(model.parameters()),
        Lamb(model.parameters(), lr=0.1),
    ):
        before = copy.copy(optimizer.param_groups[0]["params"])
        try:
            engine.bind(optimizer)
            raise AssertionError("should have refused")
        except UnsupportedOptimizerError as error:
            assert type(optimizer).__name__ in str(error) and "element-wise" in str(error)
        assert optimizer.param_groups[0]["params"] == before  # untouched


@cases
def state_an_optimizer_already_has_is_sliced_along(stage: int) -> None:
    def warm_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        squared(model, random_batch(6, 5)).backward()
        optimizer.step()
        optimizer.zero_grad()

    pair = Pair(net(), stage, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False), warm_up, **SMALL)
    pair.train(squared, *[random_batch(6, 5, seed=i) for i in range(3)])
    own = pair.engine.full_optimizer_state_dict(pair.optimizer)
    assert dist.get_rank() != 0 or all(state["step"].item() == 4 for state in own["state"].values())


@cases
def schedulers_and_groups_stay(stage: int) -> None:
    def groups(m: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in m.parameters() if p.dim() == 2]
        vectors = [p for p in m.parameters() if p.dim() == 1]
        return torch.optim.AdamW(
            [{"params": vectors, "weight_decay": 0.0, "lr": 0.003}, {"params": matrices}], lr=0.01, foreach=False
        )

    pair = Pair(net(), stage, groups, **SMALL)
    calls = []
    pair.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, 0.02, 5) for o in (pair.plain_optimizer, pair.optimizer)]
    for step in range(4):
        pair.backward(squared, random_batch(6, 5, seed=step))
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
        pair.check_weights()
    assert len(calls) == 4


@cases
def a_closure_runs_forward_and_backward_inside_the_step(stage: int) -> None:
    pair = Pair(net(), stage, **SMALL)
    for step in range(3):
        x = random_batch(6, 5, seed=step)
        mine = x.chunk(dist.get_world_size())[dist.get_rank()]
        for model, optimizer, data in ((pair.plain, pair.plain_optimizer, x), (pair.model, pair.optimizer, mine)):

            def closure(model: nn.Module = model, optimizer: Any = optimizer, data: Tensor = data) -> Tensor:
                optimizer.zero_grad()
                loss = squared(model, data)
                loss.backward()
                return loss

            optimizer.step(closure)
        pair.check_weights()


@cases
def the_fused_step_is_chosen_where_the_user_left_it_open(stage: int) -> None:
    model = net()
    engine = shard(model, ZeroConfig(stage=stage))
    chosen = engine.bind(torch.optim.AdamW(model.parameters()))
    assert chosen.param_groups[0]["fused"] is True
    model = net()
    engine = shard(model, ZeroConfig(stage=stage))
    asked = engine.bind(torch.optim.AdamW(model.parameters(), foreach=True))
    assert asked.param_groups[0]["fused"] is None


@cases
def nobody_has_to_keep_the_engine(stage: int) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shard(model, ZeroConfig(stage=stage, **SMALL)).bind(optimizer)
    losses = []
    for _ in range(3):
        gc.collect()
        loss = squared(model, random_batch(6, 5))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


@cases
def odd_hidden_sizes(stage: int) -> None:
    for hidden in (1, 2, 3, 5, 35, 36):
        model = nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        Pair(model, stage, **SMALL).train(squared, *[random_batch(6, 5, seed=i) for i in range(2)])


@cases
def batch_statistics_follow_rank_0(stage: int) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x))

    with torch.random.fork_rng():
        torch.manual_seed(100 + dist.get_rank())  # ranks start different, as without a seed
        model = Normed()
        model.norm.running_mean += dist.get_rank()
    engine = shard(model, ZeroConfig(stage=stage))
    ddp = nn.parallel.DistributedDataParallel(copy_of(engine))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (ddp, model)]
    engine.bind(optimizers[1])
    for step in range(3):
        x = random_batch(12, 5, seed=step).chunk(dist.get_world_size())[dist.get_rank()]
        for m, optimizer in zip((ddp, model), optimizers, strict=True):
            squared(m, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval(), ddp.eval()
    x = random_batch(2, 5, seed=9)
    assert torch.allclose(model(x), ddp(x), atol=1e-6)
    mean = [torch.zeros(4) for _ in range(dist.get_world_size())]
    dist.all_gather(mean, model.norm.running_mean)
    assert all(torch.equal(mean[0], other) for other in mean)


def copy_of(engine: Any) -> nn.Module:
    with engine.full_params():
        return copy.deepcopy(engine.model)


@cases.parametrize()
def test_training_is_that_of_plain_torch(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)
