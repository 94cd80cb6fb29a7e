"""Checkpoints that the real DeepSpeed wrote load with weights, moments and settings; pickles cannot run code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import tied
from tests.helpers.cases import Cases, check, folder
from tests.helpers.twin import largest_difference
from zero_core import CheckpointError, ZeroConfig, ZeroEngine, load_checkpoint, shard

cases = Cases(__name__)
outcomes = cases.fixture(2)

DATA = Path(__file__).parent.parent / "data" / "deepspeed"


def plain(steps: int) -> tuple[tied.Tied, torch.optim.Optimizer]:
    """The oracle: the same steps in one process, on whole batches."""
    model = tied.build()
    optimizer = tied.adamw(model)
    for step in range(steps):
        ids = tied.batch(step)
        tied.loss(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@cases
def weights_and_moments_of_every_stage_load_and_training_goes_on(stage: int) -> None:
    for source in ("stage1", "stage2", "stage3", "elastic"):
        model = tied.build(seed=1)
        engine = shard(model, ZeroConfig(stage=stage))
        optimizer = engine.bind(tied.adamw(model))
        found = load_checkpoint(DATA / source, engine, optimizer)
        assert found.extra["epoch"] == 3 and not found.missing and not found.unexpected
        expected, expected_optimizer = plain(2)
        own, other = engine.full_state_dict(all_ranks=True), expected.state_dict()
        # Sums over ranks have another order, and Adam divides by small numbers.
        assert own.keys() == other.keys()
        assert largest_difference(own.values(), other.values()) < 1e-5
        states = engine.full_optimizer_state_dict(optimizer)
        for number, entries in states.get("state", {}).items():
            assert entries["step"].item() == 2
            for key in ("exp_avg", "exp_avg_sq"):
                theirs = expected_optimizer.state_dict()["state"][number][key]
                assert largest_difference([entries[key]], [theirs]) < 1e-6
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        ids = tied.batch(2, rank, world_size)
        tied.loss(model(ids), ids).backward()
        optimizer.step()
        end = engine.full_state_dict(all_ranks=True)
        assert largest_difference(end.values(), plain(3)[0].state_dict().values()) < 1e-5


@cases
def masters_and_moments_of_half_precision_load(stage: int) -> None:
    """In bf16 no run repeats the bits: masters are those of DeepSpeed's own script, moments near the plain ones."""
    expected, expected_optimizer = plain(2)
    for source in ("bf16", "bf16_stage1", "sub_groups"):
        engine = shard(tied.build(seed=1), ZeroConfig(stage=stage, precision="bf16-mixed"))
        optimizer = engine.bind(tied.adamw(engine.model))
        load_checkpoint(DATA / source, engine, optimizer)
        own, other = engine.full_state_dict(all_ranks=True), expected.state_dict()
        assert largest_difference(own.values(), other.values()) < 0.021, source  # two steps of the learning rate
        if source != "bf16_stage1":  # which that script does not read
            masters = torch.load(DATA / source / "fp32.pt", weights_only=True)
            assert all(torch.equal(own[name], value) for name, value in masters.items()), source
        states = engine.full_optimizer_state_dict(optimizer)
        for number, entries in states.get("state", {}).items():
            assert entries["step"].item() == 2
            for key in ("exp_avg", "exp_avg_sq"):
                theirs = expected_optimizer.state_dict()["state"][number][key]
                assert (entries[key] - theirs).abs().max() < 0.03 * theirs.abs().max(), (source, number, key)


class Foreign:
    """What no checkpoint needs."""


def assert_opens_when_trusted(path: str, engine: ZeroEngine) -> None:
    with pytest.raises(CheckpointError, match=r"test_imports\.Foreign"):
        load_checkpoint(path, engine)
    assert isinstance(load_checkpoint(path, engine, trusted=True).extra["note"], Foreign)


@cases.at(2)
def what_is_more_than_plain_is_refused_by_name_and_opens_when_trusted(stage: int) -> None:
    model = tied.build(seed=1)
    engine = shard(model, ZeroConfig(stage=stage))
    path = f"{folder()}/model{torch.distributed.get_rank()}.pt"  # one for each rank
    torch.save({"model": plain(1)[0].state_dict(), "note": Foreign()}, path)
    assert_opens_when_trusted(path, engine)


@cases.at(1)
def a_deepspeed_file_that_could_run_code_is_refused_by_name(stage: int) -> None:
    engine = shard(tied.build(seed=1), ZeroConfig(stage=stage))
    path = f"{folder()}/{torch.distributed.get_rank()}"
    shutil.copytree(DATA / "stage2", path)
    file = next(Path(path).glob("*/mp_rank_00_model_states.pt"))
    torch.save({**torch.load(file, weights_only=False), "note": Foreign()}, file)
    assert_opens_when_trusted(path, engine)


@cases.at(3)
def a_rank_whose_file_is_missing_is_an_error(stage: int) -> None:
    engine = shard(tied.build(seed=1), ZeroConfig(stage=stage))
    path = f"{folder()}/{torch.distributed.get_rank()}"
    shutil.copytree(DATA / "stage3", path)
    next(Path(path).glob("*/*rank_1*optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match="is incomplete: it was saved by 2 ranks"):
        load_checkpoint(path, engine)


@cases.parametrize()
def test_foreign_checkpoints(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)
