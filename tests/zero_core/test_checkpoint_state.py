"""Every kind of state comes back, whatever it is called; what does not fit is said at once and changes nothing."""

from __future__ import annotations

import functools
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.helpers.allocations import PeakBytes
from tests.helpers.cases import Cases, check, folder
from tests.helpers.twin import OPTIMIZERS, decay_groups, random_batch
from zero_core import (
    CheckpointError,
    MixedPrecision,
    Offload,
    ZeroConfig,
    ZeroGradScaler,
    load_checkpoint,
    save_checkpoint,
    shard,
    shard_tensor,
    storage,
)

cases = Cases(__name__)
outcomes = cases.fixture(4)

Make = Callable[[nn.Module], Optimizer]


@functools.cache
def first_ranks(count: int) -> dist.ProcessGroup | None:
    """The group of the first ranks; `None` on the others. All ranks."""
    group = dist.new_group(list(range(count)))
    return group if dist.get_rank() < count else None


class Run:
    """A sharded model in training, over the first `ranks` ranks, which share a batch."""

    def __init__(
        self, model: nn.Module, stage: int, make: Make = OPTIMIZERS["adamw"], ranks: int = 4, **config: Any
    ) -> None:
        self.model = model
        self.group = first_ranks(ranks)
        self.engine: Any = None
        if self.group is None:
            return
        with warnings.catch_warnings(action="ignore"):  # pure half loses small updates; here that is all right
            self.engine = shard(model, ZeroConfig(stage=stage, unit_numel=20, **config), process_group=self.group)
            self.optimizer: Any = self.engine.bind(make(model))

    def step(self, *numbers: int) -> list[float]:
        losses = []
        for number in numbers:
            batch = random_batch(12, 5, seed=number).chunk(dist.get_world_size(self.group))
            loss = self.model(batch[dist.get_rank(self.group)]).abs().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach().float())
        if losses:
            total = torch.stack(losses)
            dist.all_reduce(total, group=self.group)
            return (total / dist.get_world_size(self.group)).tolist()
        return []

    def state(self) -> dict[str, Any]:
        """All of it, whole, on rank 0."""
        return {
            "model": dict(self.engine.full_state_dict()),
            "optimizer": self.engine.full_optimizer_state_dict(self.optimizer),
        }

    def save(self, extra: dict[str, Any] | None = None, steps: int = 2) -> tuple[str, dict[str, Any]]:
        """Trains some steps and saves; where to, and all state as it was, on all of the four ranks. All ranks."""
        place = f"{folder()}/checkpoint"
        state = [{}]
        if self.engine is not None:
            self.step(*range(steps))
            save_checkpoint(place, self.engine, self.optimizer, extra)
            state = [self.state()]
        dist.broadcast_object_list(state)
        return place, state[0]

    def load(self, place: str, **settings: Any) -> Any:
        return load_checkpoint(place, self.engine, self.optimizer, **settings)


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """Where two nested values differ; on rank 0, which has them."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [at]
    if isinstance(a, dict) and isinstance(b, dict):
        found = [f"{at}.{key} (only one has it)" for key in a.keys() ^ b.keys()]
        return found + [d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{at}.{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{at}.{i}")]
    return [] if type(a) is type(b) and a == b else [f"{at}: {a!r} and {b!r}"]


def check_loaded(run: Run, expected: dict[str, Any]) -> None:
    found = run.state()
    if dist.get_rank() == 0:
        apart = differences(found, expected)
        assert not apart, f"not as it was: {apart}"


@contextmanager
def refused(run: Run, kind: type[Exception], *words: str) -> Iterator[None]:
    """Inside something raises an error that holds these words, or on another rank does; and the run is as before."""
    before = run.state()
    with pytest.raises((kind, RuntimeError)) as caught:
        yield
    assert isinstance(caught.value, kind) or "failed: " + kind.__name__ in str(caught.value), caught.value
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    check_loaded(run, before)


# -- kinds of tensors ------------------------------------------------------------------------------------------------


class Counted(nn.Module):
    """Keeps something that is not a tensor, and something that is, beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))
        self.calls = 0
        self.seen = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen + 1
        return x @ self.weight

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.seen = state["calls"], state["seen"]


class CountedByTensor(Counted):
    def get_extra_state(self) -> Any:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Any) -> None:
        self.calls = int(state)


class Zoo(nn.Module):
    """Parameters and buffers of every kind."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.tensor(1.5 + seed))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.complex = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.bits = nn.Parameter(torch.arange(7 * (seed + 1))[-7:], requires_grad=False)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.encoder, self.decoder = nn.Linear(5, 5), nn.Linear(5, 5)
        self.decoder.weight = self.encoder.weight
        self.norm = nn.BatchNorm1d(5)
        self.counted, self.by_tensor = Counted(), CountedByTensor()
        self.register_buffer("mask", torch.arange(5) % 2 == seed)
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("shared", self.mask)
        self.register_buffer("derived", torch.full((2,), float(seed)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.decoder(self.frozen(self.encoder(x)))) * self.mask
        h = self.by_tensor(self.counted(h)) * self.scale
        image = (h @ self.transposed).view(-1, 3, 1, 1).expand(-1, 3, 4, 4)
        pixels = self.conv(image.contiguous(memory_format=torch.channels_last)).mean(dim=(2, 3))
        return pixels.sum(dim=1) + (h.to(torch.complex64) @ (self.complex * self.phase)).sum(dim=1) + self.empty.sum()


def adam_in_order(model: nn.Module) -> Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01, amsgrad=True)


@cases
def tensors_of_every_kind_come_back(stage: int) -> None:
    """Saved on two ranks, loaded on four, at another stage, and by plain torch."""
    source = Run(Zoo(), stage, adam_in_order, ranks=2)
    place, saved = source.save()
    run = Run(Zoo(seed=1), stage % 3 + 1, adam_in_order)
    found = run.load(place)
    assert not found.missing and not found.unexpected
    check_loaded(run, saved)
    model = run.model
    assert model.counted.calls == model.by_tensor.calls == 2 and model.counted.seen.tolist() == [2, 2]
    assert model.derived.tolist() == [1, 1] and model.mask is model.shared and model.mask.tolist()[0] is True
    if dist.get_rank() == 0:
        plain = Zoo(seed=1)
        weights = plain.state_dict()
        dcp.load({"model": weights}, checkpoint_id=place, no_dist=True)
        plain.load_state_dict(weights)
        assert differences(dict(plain.state_dict()), saved["model"]) == []
    run.step(2)


@cases.at(1, 3)
def both_names_of_a_tied_weight_are_there_and_one_is_enough(stage: int) -> None:
    source = Run(Zoo(), stage)
    place, saved = source.save()
    names = ("encoder.weight", "decoder.weight")
    if dist.get_rank() == 0:
        apart = {name: torch.zeros(5, 5) for name in names}
        dcp.load({"model": apart}, checkpoint_id=place, no_dist=True)
        assert all(torch.equal(value, saved["model"]["encoder.weight"]) for value in apart.values())
        for name in names:
            rest = {key: value for key, value in saved["model"].items() if key != name}
            torch.save(rest, f"{place}.without.{name}")
    dist.barrier()
    for name in names:
        run = Run(Zoo(seed=1), stage)
        assert not load_checkpoint(f"{place}.without.{name}", run.engine).missing
        check_loaded(run, {"model": saved["model"], "optimizer": run.state().get("optimizer")})


# -- optimizers ------------------------------------------------------------------------------------------------------


def net(seed: int = 0, width: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3), nn.ReLU(), nn.Linear(3, 1))


def frozen_net(seed: int = 0) -> nn.Module:
    model = net(seed)
    model[2].requires_grad_(False)
    return model


@cases.at(1, 3)
def groups_and_frozen_parameters_go_on_over_more_ranks(stage: int) -> None:
    source = Run(frozen_net(), stage, ranks=2)
    place, saved = source.save()
    run = Run(frozen_net(seed=1), stage)
    run.load(place)
    check_loaded(run, saved)
    expected = [source.step(2, 3) if source.engine else []]
    dist.broadcast_object_list(expected)
    # fp32: the sums of twice as many smaller micro-batches round differently.
    assert run.step(2, 3) == pytest.approx(expected[0], abs=1e-6)


KINDS: dict[str, Make] = {
    "adamw": lambda m: torch.optim.AdamW(decay_groups(m), lr=1e-2),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True, foreach=True),
    "sgd": lambda m: torch.optim.SGD(decay_groups(m), lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-3),  # keeps a product beside the step count
}
STOCHASTIC = MixedPrecision(master=None, rounding="stochastic")


@cases.at(1, 3)
def moments_and_step_counts_come_back_in_every_precision(stage: int) -> None:
    """At the same number of ranks the run goes on bit by bit; at another every value is the same."""
    for number, (kind, make) in enumerate(KINDS.items()):
        for precision in (None, "bf16-mixed", "bf16-true", "16-mixed", STOCHASTIC)[number % 2 :: 2]:
            source = Run(net(), stage, make, ranks=2, precision=precision)
            place, saved = source.save()
            again = Run(net(seed=1), stage, make, ranks=2, precision=precision)
            if again.engine is not None:
                again.load(place)
                check_loaded(again, saved)
                assert again.step(2, 3) == source.step(2, 3), (kind, precision)
            run = Run(net(seed=1), stage % 3 + 1, make, precision=precision)
            run.load(place)
            check_loaded(run, saved)
            run.step(2)


class Int8Momentum(Optimizer):
    """Keeps its momentum as bytes and a scale for each tensor it steps, and things that are not tensors."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(
                        bytes=torch.zeros_like(param, dtype=torch.int8), scale=torch.ones(1), calls=0, kind="q8"
                    )
                    state["count"] = torch.tensor(0)
                momentum = state["bytes"].float() * state["scale"] * 0.9 + param.grad
                state["scale"] = (
                    (momentum.abs().max() / 127).clamp(min=1e-12).reshape(1) if param.numel() else torch.ones(1)
                )
                state["bytes"].copy_((momentum / state["scale"]).round())
                state["calls"] += 1
                state["count"] += 1
                param.sub_(momentum, alpha=group["lr"])


def int8(model: nn.Module) -> Optimizer:
    return Int8Momentum(model.parameters())


@cases.at(1, 3)
def quantised_state_goes_on_bit_by_bit(stage: int) -> None:
    source = Run(net(width=33), stage, int8)
    place, saved = source.save()
    run = Run(net(seed=1, width=33), stage, int8)
    run.load(place)
    slices = [run.engine._binding(run.optimizer).slices() for run in (run, source)]
    for (_, given), (_, expected) in zip(*slices, strict=True):
        own, wanted = run.optimizer.state[given.param], source.optimizer.state[expected.param]
        assert differences(own, wanted) == [] and own["bytes"].dtype == torch.int8
    assert run.step(2, 3) == source.step(2, 3)
    other = Run(net(seed=1, width=33), stage, int8, ranks=2)
    if other.engine is not None:  # the scales belong to slices that two ranks do not have
        with refused(
            other, CheckpointError, "'scale' of '0.weight'", "same number of ranks", "load_checkpoint(path, engine)"
        ):
            other.load(place)
        load_checkpoint(place, other.engine)
        check_loaded(other, {"model": saved["model"], "optimizer": other.state().get("optimizer")})


class NarrowMomentum(torch.optim.SGD):
    """Keeps its momentum in half the digits of the parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[param]
            momentum = state.get("momentum", torch.zeros_like(param)).float() * 0.9 + param.grad
            state["momentum"] = momentum.bfloat16()
            param.sub_(momentum, alpha=0.01)


@cases.at(3)
def state_with_fewer_digits_than_its_parameter_keeps_them(stage: int) -> None:
    make = lambda m: NarrowMomentum(m.parameters(), lr=0.01)  # noqa: E731
    source = Run(net(), stage, make)
    place, saved = source.save()
    run = Run(net(seed=1), stage, make)
    run.load(place)
    check_loaded(run, saved)
    assert run.step(2) == source.step(2)


@cases.at(1, 3)
def the_loss_scale_the_schedule_and_the_optimizer_come_back_in_one_call(stage: int) -> None:
    def make(seed: int) -> tuple[Run, Any, Any]:
        run = Run(net(seed), stage, precision="16-mixed")
        scaler = ZeroGradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        return run, scaler, torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.1, total_steps=9)

    def train(run: Run, scaler: Any, schedule: Any, *steps: int) -> None:
        for step in steps:
            loss = run.model(random_batch(12, 5, seed=step).chunk(4)[dist.get_rank()]).square().mean()
            scaler.scale(loss).backward()
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            schedule.step()

    source, scaler, schedule = make(0)
    train(source, scaler, schedule, 0, 1, 2)
    place = f"{folder()}/checkpoint"
    save_checkpoint(place, source.engine, source.optimizer, {"scaler": scaler, "schedule": schedule, "epoch": 7})
    run, own_scaler, own_schedule = make(1)
    found = run.load(place, extra={"scaler": own_scaler, "schedule": own_schedule})
    assert found.extra["epoch"] == 7 and own_scaler.get_scale() == scaler.get_scale() == 2.0**11
    assert own_schedule.get_last_lr() == schedule.get_last_lr()
    train(source, scaler, schedule, 3, 4)
    train(run, own_scaler, own_schedule, 3, 4)
    check_loaded(run, source.state())
    assert own_scaler.state_dict() == scaler.state_dict()


@cases.at(1, 3)
def several_models_and_optimizers_are_kept_by_key(stage: int) -> None:
    def make(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        first, second = Run(net(seed), stage), Run(net(seed + 5, width=9), stage % 3 + 1)
        extra = second.engine.bind(torch.optim.SGD(list(second.model.parameters())[2:], lr=0.1, momentum=0.9))
        return {"first": first, "second": second}, {"a": first.optimizer, "b": second.optimizer, "c": extra}

    def whole(runs: dict[str, Any], optimizers: dict[str, Any]) -> dict[str, Any]:
        owners = {"a": runs["first"], "b": runs["second"], "c": runs["second"]}
        return {
            "models": {key: dict(run.engine.full_state_dict()) for key, run in runs.items()},
            "optimizers": {k: owners[k].engine.full_optimizer_state_dict(o) for k, o in optimizers.items()},
        }

    runs, optimizers = make(0)
    for number in range(2):
        for run in runs.values():
            run.model(random_batch(4, 5, seed=number)).square().mean().backward()
        for optimizer in optimizers.values():
            optimizer.step()
        for optimizer in optimizers.values():
            optimizer.zero_grad()
    place = f"{folder()}/checkpoint"
    save_checkpoint(place, {key: run.engine for key, run in runs.items()}, optimizers)
    expected = whole(runs, optimizers)
    other_runs, others = make(1)
    engines = {key: run.engine for key, run in other_runs.items()}
    found = load_checkpoint(place, engines, others)
    assert found.optimizers == ["a", "b", "c"]
    assert differences(whole(other_runs, others), expected) == []
    # And one of them alone.
    alone = Run(net(seed=1), stage)
    load_checkpoint(place, {"first": alone.engine}, {"a": alone.optimizer})
    check_loaded(alone, {"model": expected["models"].get("first"), "optimizer": expected["optimizers"]["a"]})
    with refused(alone, ValueError, "'first', 'second'", "'model'"):
        load_checkpoint(place, alone.engine)
    with refused(alone, ValueError, "'a'", "none of the engines"):
        load_checkpoint(place, {"second": other_runs["second"].engine}, {"a": alone.optimizer})
    with refused(alone, ValueError, "same key", "'net'"):
        save_checkpoint(place, {"net": alone.engine}, {"net": alone.optimizer})


@cases.at(1, 3)
def random_numbers_go_on_where_they_were(stage: int) -> None:
    def make(seed: int) -> Run:
        model = net(seed)
        model.insert(2, nn.Dropout(0.5))
        return Run(model, stage)

    source = make(0)
    torch.manual_seed(100 + dist.get_rank())
    place, _ = source.save()
    expected = source.step(2, 3)
    run = make(1)
    torch.manual_seed(5)
    run.load(place)
    assert run.step(2, 3) == expected


@cases.at(1, 3)
def shards_come_back_wherever_they_live(stage: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        on_disk = Offload(optimizer="disk", directory=place)
        everywhere: list[Any] = [None, "optimizer", on_disk]
        if stage == 3:
            everywhere += ["all", Offload(optimizer="disk", params="disk", directory=place)]
        for number, offload in enumerate(everywhere):
            precision = ("bf16-mixed", None)[number % 2]
            source = Run(net(), stage, ranks=2, offload=offload, precision=precision)
            saved_at, saved = source.save()
            run = Run(net(seed=1), stage, offload=everywhere[number - 1], precision=precision)
            run.step(5)  # there is state already, which is replaced
            run.load(saved_at)
            check_loaded(run, saved)
            run.step(2)


@cases.at(1, 3)
def a_chunk_is_in_memory_beside_the_shards(stage: int) -> None:
    chunk, width, layers = 2**18, 512, 8  # 8.4 MB of weights, 6.3 MB of shards a rank
    small = 2**20  # names, places, checksums, and what torch sends around as objects

    def run(seed: int) -> Run:
        torch.manual_seed(seed)
        layout = nn.Sequential(nn.Linear(5, width), *(nn.Linear(width, width) for _ in range(layers)))
        return Run(layout, stage)

    source = run(0)
    place, saved = source.save()
    again = run(1)
    again.step(0)
    with mock.patch.object(shard_tensor, "CHUNK_BYTES", chunk), mock.patch.object(storage, "_BLOCK_BYTES", chunk):
        for call in (lambda: save_checkpoint(place, source.engine, source.optimizer), lambda: again.load(place)):
            call()  # what the first call imports
            tracemalloc.start()
            try:
                with PeakBytes() as tensors:
                    call()
                python = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert tensors.peak <= 2 * chunk + small, tensors.peak
            assert python <= 2 * chunk + 2 * small, python
    # And no rank reads more than its part.
    with mock.patch.object(storage.Folder, "read_part", autospec=True, side_effect=storage.Folder.read_part) as reading:
        again.load(place)
    mine = 3 * 4 * sum(p.numel() for p in source.model.parameters()) / 4
    assert mine <= sum(call.args[2].length for call in reading.call_args_list) < 1.1 * mine
    check_loaded(again, saved)


# -- weights alone ---------------------------------------------------------------------------------------------------


@cases.at(1, 3)
def weights_alone_leave_the_optimizer_fresh(stage: int) -> None:
    source = Run(net(), stage, precision="bf16-mixed")
    source.step(0, 1)
    place = f"{folder()}/weights"
    save_checkpoint(place, source.engine)
    run = Run(net(seed=1), stage % 3 + 1, precision="bf16-mixed")
    with refused(run, CheckpointError, "weights only", "load_checkpoint(path, engine)"):
        run.load(place)
    found = load_checkpoint(place, run.engine)
    assert found.optimizers == [] and not run.optimizer.state
    check_loaded(run, {"model": source.state().get("model"), "optimizer": run.state().get("optimizer")})


@cases.at(1, 3)
def masters_are_derived_from_half_weights(stage: int) -> None:
    """A file of bf16 weights, as one downloads them: masters are their values in fp32, and train on."""
    half = {name: value.bfloat16() for name, value in net().state_dict().items()}
    place = f"{folder()}/half.pt"
    if dist.get_rank() == 0:
        torch.save(half, place)
    dist.barrier()
    for precision, digits in (("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16), (None, torch.float32)):
        run = Run(net(seed=1), stage, precision=precision)
        load_checkpoint(place, run.engine)
        state = run.engine.full_state_dict(all_ranks=True)
        assert all(torch.equal(state[name], value.to(digits)) for name, value in half.items())
        assert all(value.dtype == digits for value in state.values())
        with run.engine.full_params():
            assert all(torch.equal(p, half[name].to(p.dtype)) for name, p in run.model.named_parameters())
        run.step(0)


class Adapted(nn.Module):
    """A frozen base, its head tied, with batch statistics; and an adapter that is trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5)).requires_grad_(False)
        self.base[2].weight = self.base[0].weight
        self.adapter = nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x)


@cases.at(1, 3)
def adapters_alone_are_accepted_where_just_the_frozen_base_is_missing(stage: int) -> None:
    trained = {name: value for name, value in Adapted().state_dict().items() if name.startswith("adapter")}
    base = {name for name in Adapted().state_dict() if name.startswith("base")}
    place = folder()
    if dist.get_rank() == 0:
        torch.save(trained, f"{place}/adapter.pt")
        torch.save(trained | {"base.0.bias": torch.ones(5)}, f"{place}/more.pt")
        torch.save({k: v for k, v in trained.items() if k != "adapter.1.bias"}, f"{place}/less.pt")
    dist.barrier()
    run = Run(Adapted(seed=1), stage)
    before = run.engine.full_state_dict()
    with refused(run, CheckpointError, "adapter.1.bias", "base.0.weight", "base.2.weight", "base.1.running_mean"):
        load_checkpoint(f"{place}/less.pt", run.engine)
    with refused(run, CheckpointError, "base.0.weight", "base.2.bias"):
        load_checkpoint(f"{place}/more.pt", run.engine)
    found = load_checkpoint(f"{place}/adapter.pt", run.engine)
    assert set(found.missing) == base and not found.unexpected
    expected = {**before, **trained} if before else {}
    check_loaded(run, {"model": expected, "optimizer": run.state().get("optimizer")})


# -- names and errors ------------------------------------------------------------------------------------------------


class Compiled(nn.Module):
    """What torch.compile puts around a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x)


def part_compiled(seed: int = 0) -> nn.Module:
    model = net(seed)
    model[2] = Compiled(model[2])
    return model


class Wrapped(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.inner = net(seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@cases.at(1, 3)
def names_are_found_under_wrappers_and_prefixes(stage: int) -> None:
    """With the optimizer: from a compiled model to a plain one and back, and to one that is a part of another."""
    makers: dict[str, Callable[[int], nn.Module]] = {
        "plain": net, "compiled inside": part_compiled, "compiled": lambda seed: Compiled(net(seed)), "wrapped": Wrapped,
    }  # fmt: skip
    places = {}
    for name, make in makers.items():
        source = Run(make(0), stage, ranks=2)
        places[name], saved = source.save()
        names = [*saved["optimizer"]["state"]]
        assert len(names) == 6
    for name, place in places.items():
        if dist.get_rank() == 0:
            weights = {
                f"inner.{k}" if name == "wrapped" else k: torch.zeros_like(v) for k, v in net().state_dict().items()
            }
            dcp.load({"model": weights}, checkpoint_id=place, no_dist=True)  # clean names
        for other in ("plain",) if name != "plain" else makers:
            run = Run(makers[other](1), stage)
            found = run.load(place)
            assert not found.missing and not found.unexpected
            state = run.state()
            if dist.get_rank() == 0:
                assert differences(state["optimizer"]["state"], saved["optimizer"]["state"]) == [], (name, other)
                for given, expected in zip(state["model"].values(), saved["model"].values(), strict=True):
                    assert torch.equal(given, expected), (name, other)
    run = Run(Wrapped(1), stage)
    run.load(places["plain"], rename={"": "inner."})
    check_loaded(run, {"model": saved["model"], "optimizer": run.state().get("optimizer")})
    # A prefix of some names only is not guessed.
    with refused(run, CheckpointError, "inner.0.weight", "rename={"):
        run.load(places["plain"], rename={"0.": "other."})


@cases.at(1, 3)
def everything_that_does_not_fit_is_said_at_once_and_changes_nothing(stage: int) -> None:
    source = Run(net(), stage)
    place, saved = source.save(extra={"epoch": 1})
    larger = net(seed=1, width=8)
    del larger[4]
    larger.add_module("extra", nn.Linear(3, 1))
    run = Run(larger, stage, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    everything = ("'0.weight'", "(7, 5)", "(8, 5)", "'0.bias'", "'2.weight'", "4.weight", "4.bias", "extra.weight")
    with refused(run, CheckpointError, *everything, "strict=False", place):
        load_checkpoint(place, run.engine)
    with refused(run, CheckpointError, "'0.weight'", "'0.bias'", "'2.weight'"):  # shapes must fit all the same
        load_checkpoint(place, run.engine, strict=False)

    fitting = net(seed=1)
    del fitting[4]
    fitting.add_module("extra", nn.Linear(3, 1))
    run = Run(fitting, stage, lambda m: torch.optim.AdamW(list(m.parameters())[:4], lr=0.1))
    found = load_checkpoint(place, run.engine, strict=False)
    assert sorted(found.missing) == ["extra.bias", "extra.weight"]
    assert sorted(found.unexpected) == ["4.bias", "4.weight"] and found.extra == {"epoch": 1}
    state = run.engine.full_state_dict(all_ranks=True)
    assert all(torch.equal(state[name], saved["model"][name]) for name in ("0.weight", "0.bias", "2.weight", "2.bias"))

    run = Run(net(seed=1), stage)
    schedule = torch.optim.lr_scheduler.ConstantLR(run.optimizer)
    with refused(run, CheckpointError, "no extra 'schedule'", "epoch"):
        run.load(place, extra={"schedule": schedule})
    with refused(run, CheckpointError, "no checkpoint at", f"{place}.nowhere"):
        run.load(f"{place}.nowhere")
    others: dict[str, Make] = {
        "[3, 3]": lambda m: torch.optim.AdamW(m.parameters()),
        "by other names": lambda m: torch.optim.AdamW([{"params": list(m.parameters())[i::2]} for i in (1, 0)]),
    }
    for words, make in others.items():
        run = Run(net(seed=1), stage, make)
        with refused(run, CheckpointError, words, "load_checkpoint(path, engine)"):
            run.load(place)


class Unplain(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"function": Unplain}

    def set_extra_state(self, state: Any) -> None:
        pass


class SomeTensor(Tensor):
    """A kind of its own, like those that hide codes and scales."""


@cases.at(3)
def only_plain_values_are_saved(stage: int) -> None:
    run = Run(net(), stage)
    place = f"{folder()}/checkpoint"
    with refused(run, ValueError, "extra['model']", "plain values"):
        save_checkpoint(place, run.engine, run.optimizer, {"model": Run})
    odd = Run(nn.Sequential(Unplain(5, 3)), stage)
    with refused(odd, ValueError, "'0._extra_state'", "plain values"):
        save_checkpoint(place, odd.engine)
    run.optimizer.param_groups[0]["rule"] = Run
    with refused(odd, ValueError, "'optimizer'", "plain values"):
        save_checkpoint(place, run.engine, run.optimizer)
    with refused(odd, ValueError, "without dots", "a.b"):
        save_checkpoint(place, {"a.b": run.engine})
    momentum = Run(net(), stage, KINDS["sgd"])
    momentum.step(0)
    for state in momentum.optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].as_subclass(SomeTensor)
    with refused(odd, ValueError, "'momentum_buffer' of '0.weight' is a SomeTensor", "save_checkpoint(path, engine)"):
        save_checkpoint(place, momentum.engine, momentum.optimizer)


@cases.parametrize()
def test_state_of_every_kind_comes_back(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)
