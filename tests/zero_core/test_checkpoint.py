"""A checkpoint loads at any number of ranks, stage and precision, and a run goes on as if it had never stopped."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers import models
from tests.helpers.ranks import run_ranks
from tests.helpers.twin import OPTIMIZERS
from zero_core import ZeroConfig, ZeroEngine, load_checkpoint, save_checkpoint, shard, verify_checkpoint

PRECISIONS = ("none", "bf16-mixed")
STAGES = (1, 2, 3)
FAMILY = "gpt2"  # a tied head, and matrices that are stored transposed


def build(stage: int, precision: str, seed: int = 0) -> tuple[nn.Module, ZeroEngine, torch.optim.Optimizer]:
    model = models.build(FAMILY, seed)
    config = ZeroConfig(stage=stage, unit_numel=3000, precision=None if precision == "none" else precision)
    engine = shard(model, config)
    return model, engine, engine.bind(OPTIMIZERS["adamw"](model))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = models.loss(model, models.part(models.batch(FAMILY, step), dist.get_rank(), dist.get_world_size()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def whole(engine: ZeroEngine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All of a run's state, on rank 0."""
    return {"model": engine.full_state_dict(), "optimizer": engine.full_optimizer_state_dict(optimizer)}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def save_all(root: str) -> None:
    """Trains two steps and saves, then trains three more; keeps what a resumed run must arrive at."""
    for stage, precision in itertools.product(STAGES, PRECISIONS):
        model, engine, optimizer = build(stage, precision)
        train(model, optimizer, range(2))
        place = f"{root}/{dist.get_world_size()}-{stage}-{precision}"
        save_checkpoint(place, engine, optimizer, {"step": 2})
        saved = whole(engine, optimizer)
        losses = train(model, optimizer, range(2, 5))
        after = whole(engine, optimizer)
        if dist.get_rank() == 0:
            torch.save({"saved": saved, "losses": losses, "after": after}, f"{place}.pt")


def resume_all(root: str) -> list[str]:
    """Resumes every checkpoint at another stage; returns what went wrong."""
    failures = []
    for world_size, stage, precision in itertools.product((1, 2, 3), STAGES, PRECISIONS):
        place = f"{root}/{world_size}-{stage}-{precision}"
        expected = torch.load(f"{place}.pt", weights_only=True)
        other = stage % 3 + 1
        model, engine, optimizer = build(other, precision, seed=1)
        found = load_checkpoint(place, engine, optimizer)
        loaded = whole(engine, optimizer)
        losses = train(model, optimizer, range(2, 5))
        after = whole(engine, optimizer)
        case = f"{precision}: stage {stage} on {world_size} ranks to stage {other} on {dist.get_world_size()}"
        if found.extra != {"step": 2}:
            failures.append(f"{case}: extra {found.extra}")
        if dist.get_rank():
            continue
        if not equal(loaded, expected["saved"]):
            failures.append(f"{case}: what was loaded is not what was saved")
        # fp32: the order in which micro-batches of other sizes are summed. bf16 rounds their gradients differently.
        bound = 1e-6 if precision == "none" else 5e-3
        error = max(abs(a - b) for a, b in zip(losses, expected["losses"], strict=True))
        drift = max(float((after["model"][k] - v).abs().max()) for k, v in expected["after"]["model"].items())
        if error > max(bound, 1e-6) or drift > (2e-6 if precision == "none" else 5e-3):
            failures.append(f"{case}: losses differ by {error:.2g}, weights by {drift:.2g}")
    return failures


def test_a_run_goes_on_at_any_world_size_stage_and_precision(tmp_path: Path) -> None:
    for world_size in (1, 2, 3):
        run_ranks(world_size, save_all, str(tmp_path))
    for place in tmp_path.glob("*-none"):
        verify_checkpoint(place)
    for world_size in (3, 1, 2):
        assert run_ranks(world_size, resume_all, str(tmp_path)) == [[]] * world_size
