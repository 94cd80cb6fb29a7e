"""Shards in host memory or in files: the same bits, and less on the device."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers import models
from tests.helpers.cases import Cases, check
from tests.helpers.twin import OPTIMIZERS, fingerprint
from zero_core import MixedPrecision, Offload, ZeroConfig, ZeroEngine, ZeroGradScaler, shard

cases = Cases(__name__)
outcomes = cases.fixture(2, 3)


def placements(stage: int, folder: str) -> list[Offload | str]:
    """Every placement that a stage allows."""
    found: list[Offload | str] = ["optimizer", Offload(optimizer="disk", directory=folder)]
    if stage == 3:
        found += ["all", Offload(optimizer="disk", params="disk", directory=folder)]
    return found


def own_part(step: int) -> Any:
    return models.part(models.batch("llama", step), dist.get_rank(), dist.get_world_size())


def train(stage: int, optimizer: str = "adamw", **config: Any) -> ZeroEngine:
    """Three steps of two micro-batches each, clipped."""
    model = models.build("llama")
    engine = shard(model, ZeroConfig(stage=stage, unit_numel=3000, **config))
    own = engine.bind(OPTIMIZERS[optimizer](model))
    scaler = ZeroGradScaler("cpu", init_scale=2.0**8, enabled=config.get("precision") == "16-mixed")
    for step in range(3):
        with engine.no_sync():
            scaler.scale(models.loss(model, own_part(2 * step))).backward()
        scaler.scale(models.loss(model, own_part(2 * step + 1))).backward()
        scaler.unscale_(own)
        engine.clip_grad_norm_(0.5)
        scaler.step(own)
        scaler.update()
        own.zero_grad()
    return engine


@cases
def training_has_the_same_bits_wherever_the_shards_live(stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pure = MixedPrecision(master=None, rounding="stochastic")
        for precision in (None, "16-mixed", pure) if dist.get_world_size() == 2 else ("bf16-mixed",):
            expected = fingerprint(train(stage, precision=precision))
            for offload in placements(stage, folder):
                engine = train(stage, precision=precision, offload=offload)
                assert fingerprint(engine) == expected, (precision, offload)
        assert os.listdir(folder) == []


@cases
def the_device_holds_what_the_formula_leaves_it(stage: int) -> None:
    """bf16: stages 1 and 2 hold 2Ψ, stage 3 its shard of 2Ψ/N or, with everything elsewhere, nothing between uses."""
    world = dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        for offload in placements(stage, folder):
            engine = train(stage, precision="bf16-mixed", offload=offload)
            with torch.no_grad():
                engine.run(lambda engine=engine: [param.sum() for param in engine.model.parameters()])
            padded = sum(p.layout.padded_numel for unit in engine._units for p in unit.partitions)
            held = engine.report().held
            device = sum(line.bytes for line in held if line.place == "device")
            everything = offload == "all" or (isinstance(offload, Offload) and offload.params == "disk")
            assert device == (2 * padded if stage < 3 else 0 if everything else 2 * padded // world)
            elsewhere = {line.kind: line.bytes for line in held if line.place != "device"}
            assert elsewhere["masters"] == 4 * padded // world
            place = "disk" if isinstance(offload, Offload) else "host"
            assert {line.place for line in held if line.kind in ("masters", "optimizer")} == {place}


@cases
def the_peak_on_the_device_is_two_units_more(stage: int) -> None:
    """Looked at whenever a module or a gradient is done. At stage 3 with everything elsewhere nothing else is there."""
    model = models.build("llama")
    engine = shard(model, ZeroConfig(stage=stage, unit_numel=3000, offload="optimizer" if stage < 3 else "all"))
    optimizer = engine.bind(torch.optim.AdamW(model.parameters(), lr=1e-3))
    peaks: list[int] = []

    def look(*_: Any) -> None:
        peaks.append(sum(line.bytes for line in engine.report().held if line.place == "device"))

    for module in model.modules():
        module.register_forward_hook(look)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    for step in range(3):
        peaks.clear()
        models.loss(model, own_part(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    padded = [sum(p.layout.padded_numel for p in unit.partitions) for unit in engine._units]
    two_units = 4 * (2 * max(padded) + min(padded))
    rest = 4 * sum(padded) if stage < 3 else 0
    weights = two_units if stage == 3 else 0
    # An averaged gradient arrives on the device before it leaves for the host: the shard of the unit in flight.
    arriving = 4 * max(padded) // dist.get_world_size()
    assert rest < max(peaks) <= rest + weights + two_units + arriving, (max(peaks), rest, weights, two_units)


@cases
def state_goes_to_and_comes_from_plain_torch(stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for offload in placements(stage, folder):
            engine = train(stage, offload=offload)
            optimizer = next(iter(engine._bound.values())).optimizer
            weights = engine.full_state_dict(all_ranks=True)
            saved = [engine.full_optimizer_state_dict(optimizer)]
            dist.broadcast_object_list(saved)
            plain = models.build("llama", seed=3)
            plain.load_state_dict(weights)
            expected = OPTIMIZERS["adamw"](plain)
            expected.load_state_dict(saved[0])
            model = models.build("llama", seed=4)
            again = shard(model, ZeroConfig(stage=stage, unit_numel=3000, offload=offload))
            own = again.bind(OPTIMIZERS["adamw"](model))
            again.load_full_state_dict(weights)
            again.load_full_optimizer_state_dict(own, saved[0])
            for step in range(2):
                models.loss(model, own_part(step)).backward()
                own.step()
                own.zero_grad()
                models.loss(plain, models.batch("llama", step)).backward()
                expected.step()
                expected.zero_grad()
            after = again.full_state_dict(all_ranks=True)
            # Adam amplifies rounding where gradients vanish, by up to its step of 1e-3 either way.
            assert all((after[k] - v).abs().max() < 4e-3 for k, v in plain.named_parameters())
            resumed = again.full_optimizer_state_dict(own)
            if dist.get_rank() == 0:
                assert all(int(entries["step"]) == 5 for entries in resumed["state"].values())


@cases
def weights_changed_by_hand_reach_the_shards(stage: int) -> None:
    for offload in ("optimizer", "all") if stage == 3 else ("optimizer",):
        model = models.mlp()
        engine = shard(model, ZeroConfig(stage=stage, offload=offload))
        with engine.full_params(writeback=True), torch.no_grad():
            model[0].weight.fill_(0.25)
        assert torch.equal(engine.full_state_dict(all_ranks=True)["0.weight"], torch.full((7, 5), 0.25))
        with engine.full_params():
            assert torch.equal(model[0].weight, torch.full((7, 5), 0.25))


@cases
def frozen_weights_are_offloaded_too(stage: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    engine = shard(model, ZeroConfig(stage=stage, unit_numel=10, offload="optimizer" if stage < 3 else "all"))
    optimizer = engine.bind(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    before = engine.full_state_dict(all_ranks=True)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    after = engine.full_state_dict(all_ranks=True)
    assert torch.equal(before["0.weight"], after["0.weight"]) and not torch.equal(before["1.weight"], after["1.weight"])


@cases
def a_full_disk_is_an_error_before_training(stage: int) -> None:
    """The system refuses files above a limit, as it does when the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with tempfile.TemporaryDirectory() as folder:
        config = ZeroConfig(stage=stage, offload=Offload(optimizer="disk", directory=folder))
        model = nn.Linear(1000, 1000)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
            with pytest.raises(RuntimeError, match=r"no room for [\d,]+ bytes in Offload.directory"):
                shard(model, config)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        model = nn.Linear(1000, 1000)
        engine = shard(model, config)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
            with pytest.raises(RuntimeError, match="no room"):
                engine.bind(torch.optim.AdamW(model.parameters()))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert os.listdir(folder) == []


def test_placements_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for settings, message in (
        ({"optimizer": "gpu"}, "device"),
        ({"optimizer": "device", "params": "cpu"}, "same as Offload.optimizer"),
        ({"optimizer": "disk"}, "directory"),
        ({"optimizer": "cpu", "directory": "/tmp"}, "directory"),
    ):
        with pytest.raises(ValueError, match=message):
            Offload(**settings)
    with pytest.raises(ValueError, match="offload must be"):
        ZeroConfig(offload="params")
    with pytest.raises(ValueError, match="stage=3"):
        ZeroConfig(stage=2, offload="all")


@cases.at(3)
def a_missing_directory_is_named(stage: int) -> None:
    with pytest.raises(ValueError, match=r"not a directory: '/nowhere/at/all'"):
        shard(models.mlp(), ZeroConfig(offload=Offload(optimizer="disk", directory="/nowhere/at/all")))


@cases.parametrize()
def test_offloaded_training_is_the_same(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)
