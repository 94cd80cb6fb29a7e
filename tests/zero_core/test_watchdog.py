"""Ranks that wait for each other end within seconds, and say where each of them is."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers import models
from tests.helpers.ranks import run_ranks
from zero_core import ZeroConfig, save_checkpoint, shard, watchdog


def hurry() -> None:
    """The same, ten times as impatient."""
    watchdog._PATIENCE, watchdog._INTERVAL = 0.5, 0.1


def alone(world_size: int) -> tuple[str, float]:
    """Rank 0 asks for the whole state by itself; the others go on training."""
    hurry()
    model = models.mlp()
    engine = shard(model, ZeroConfig(stage=3))
    start = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            engine.full_state_dict()
        seconds = time.monotonic() - start
        model(torch.ones(2, 5)).sum().backward()  # nothing is lost: it can go on as the others did
        return str(caught.value), seconds
    model(torch.ones(2, 5)).sum().backward()
    return "", 0.0


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_call_that_one_rank_makes_alone_is_named(world_size: int) -> None:
    message, seconds = run_ranks(world_size, alone, world_size, timeout=60)[0]
    assert "rank 0 waits in engine.full_state_dict()" in message
    assert "rank 1 waits in the gather of the weights of '0.weight'" in message
    assert "only some ranks make" in message and seconds < 10


def saves_alone(folder: str) -> tuple[str, float]:
    """The usual mistake: `if rank == 0: save(...)`, and then all meet at a barrier."""
    hurry()
    model = models.mlp()
    engine = shard(model, ZeroConfig(stage=2))
    message, seconds = "", 0.0
    dist.barrier()
    if dist.get_rank() == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            save_checkpoint(f"{folder}/checkpoint", engine)
        message, seconds = str(caught.value), time.monotonic() - start
    dist.barrier()
    save_checkpoint(f"{folder}/checkpoint", engine)
    return message, seconds


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_save_on_one_rank_before_a_barrier_is_named(world_size: int, tmp_path: Path) -> None:
    message, seconds = run_ranks(world_size, saves_alone, str(tmp_path), timeout=60)[0]
    assert "rank 0 waits in save_checkpoint()" in message and seconds < 10
    assert all(f"rank {rank} waits in torch.distributed.barrier()" in message for rank in range(1, world_size))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def waits_long() -> None:
    """Barriers that last longer than the watchdog's patience, because a rank is busy, are nothing wrong."""
    hurry()
    engine = shard(models.mlp(), ZeroConfig(stage=3))
    for _ in range(2):
        if dist.get_rank() == 0:
            time.sleep(2)
        dist.barrier()
        engine.full_state_dict()


def test_a_long_wait_in_a_barrier_is_no_dead_end() -> None:
    run_ranks(2, waits_long, timeout=60)


class Forks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.left if dist.get_rank() == 0 else self.right)(x)


def fork(stage: int, folder: str) -> None:
    hurry()
    sys.stderr = open(f"{folder}/rank{dist.get_rank()}", "w")
    model = Forks()
    shard(model, ZeroConfig(stage=stage, unit_numel=1, prefetch_bytes=0))
    model(torch.ones(2, 5)).sum().backward()


def test_ways_through_the_model_that_part_end_with_both_modules_named(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank \d died"):
        run_ranks(2, fork, 3, str(tmp_path), timeout=60)
    assert time.monotonic() - start < 30
    said = "".join(file.read_text() for file in tmp_path.iterdir())
    assert "rank 0 waits in the gather of the weights of 'left.weight'" in said
    assert "rank 1 waits in the gather of the weights of 'right.weight'" in said
    assert "in forward" in said  # where in the script


def lost() -> str:
    model = models.mlp()
    engine = shard(model, ZeroConfig(stage=3))
    if dist.get_rank() == 1:
        os._exit(1)
    with pytest.raises(RuntimeError) as caught:
        for _ in range(3):
            model(torch.ones(2, 5)).sum().backward()
            engine.clip_grad_norm_(1.0)
    raise KeyError(str(caught.value))


def test_a_rank_that_is_gone_is_said_to_be_gone() -> None:
    with pytest.raises(
        AssertionError, match="rank 0 lost another rank while it waited in the gather of the weights of"
    ):
        run_ranks(2, lost, timeout=60)


def slow() -> float:
    """A rank that takes its time is waited for."""
    hurry()
    model = models.mlp()
    engine = shard(model, ZeroConfig(stage=3))
    if dist.get_rank() == 1:
        time.sleep(2)
    model(torch.ones(2, 5)).sum().backward()
    return float(engine.clip_grad_norm_(1.0))


def test_a_slow_rank_is_no_dead_end() -> None:
    norms = run_ranks(2, slow, timeout=60)
    assert norms[0] == norms[1] > 0
