"""Whole state by name goes to and from plain torch, any stage, any world size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers import models
from tests.helpers.allocations import PeakBytes
from tests.helpers.cases import Cases, check
from tests.helpers.ranks import run_ranks
from tests.helpers.twin import OPTIMIZERS, Pair, decay_groups, random_batch
from zero_core import ZeroConfig, shard

cases = Cases(__name__)
outcomes = cases.fixture(3)


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def train(pair: Pair, *steps: int) -> None:
    for step in steps:
        pair.backward(models.loss, models.batch("llama", step))
        pair.step()


def broadcast(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


@cases
def a_plain_run_goes_on_from_a_sharded_one(stage: int) -> None:
    pair = Pair(models.build("llama"), stage, OPTIMIZERS["adamw"])
    train(pair, 0, 1)
    weights, states = pair.engine.full_state_dict(), pair.engine.full_optimizer_state_dict(pair.optimizer)
    weights, states = broadcast(weights), broadcast(states)
    fresh = models.build("llama", seed=1)
    optimizer = OPTIMIZERS["adamw"](fresh)
    fresh.load_state_dict(weights)
    optimizer.load_state_dict(states)
    pair.plain, pair.plain_optimizer = fresh, optimizer
    train(pair, 2, 3)
    pair.check_weights()


@cases.at(1, 3)
def a_sharded_run_goes_on_from_a_plain_one(stage: int) -> None:
    for other in (1, 2, 3):
        source = Pair(models.build("llama"), other, OPTIMIZERS["adamw"])
        train(source, 0, 1)
        target = Pair(models.build("llama", seed=1), stage, OPTIMIZERS["adamw"])
        result = target.engine.load_full_state_dict(source.plain.state_dict())
        assert not result.missing_keys and not result.unexpected_keys
        target.engine.load_full_optimizer_state_dict(target.optimizer, source.plain_optimizer.state_dict())
        target.plain, target.plain_optimizer = source.plain, source.plain_optimizer
        target.check_weights(1e-12)
        train(target, 2, 3)
        target.check_weights()


@cases.at(1, 3)
def names_and_values_are_those_of_the_plain_model(stage: int) -> None:
    for family in models.FAMILIES:
        model = models.build(family)
        plain = model.state_dict()
        expected = {name: value.clone() for name, value in plain.items()}
        engine = shard(model, ZeroConfig(stage=stage, unit_numel=3000))
        state = engine.full_state_dict(all_ranks=True)
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        assert type(state) is type(plain)
        if dist.get_rank() != 0:
            assert engine.full_state_dict() == {}
        else:
            engine.full_state_dict()


@cases.at(1, 3)
def strict_loading_lists_what_is_missing(stage: int) -> None:
    pair = Pair(models.build("llama"), stage)
    state = pair.plain.state_dict()
    del state["lm_head.weight"]
    state["extra"] = torch.zeros(1)
    try:
        pair.engine.load_full_state_dict(state)
        raise AssertionError("should have raised")
    except RuntimeError as error:
        assert "lm_head.weight" in str(error) and "extra" in str(error)
    result = pair.engine.load_full_state_dict(state, strict=False)
    assert result.missing_keys == ["lm_head.weight"] and result.unexpected_keys == ["extra"]
    state["lm_head.weight"] = torch.zeros(2, 2)
    try:
        pair.engine.load_full_state_dict(state, strict=False)
        raise AssertionError("should have raised")
    except RuntimeError as error:
        assert "lm_head.weight" in str(error) and "[2, 2]" in str(error)


@cases.at(1, 3)
def optimizer_state_of_other_groups_is_refused(stage: int) -> None:
    pair = Pair(models.build("llama"), stage, OPTIMIZERS["adamw"])
    train(pair, 0)
    plain = torch.optim.AdamW(pair.plain.parameters())
    try:
        pair.engine.load_full_optimizer_state_dict(pair.optimizer, plain.state_dict())
        raise AssertionError("should have raised")
    except ValueError as error:
        assert "groups" in str(error) and "full_optimizer_state_dict" in str(error)


@cases.at(1, 3)
def hyper_parameters_come_along_and_the_implementation_stays(stage: int) -> None:
    pair = Pair(models.build("llama"), stage, lambda m: torch.optim.AdamW(decay_groups(m), lr=1e-3))
    train(pair, 0)
    pair.optimizer.param_groups[0]["lr"] = 0.5
    state = broadcast(pair.engine.full_optimizer_state_dict(pair.optimizer))
    assert [g["lr"] for g in state["param_groups"]] == [0.5, 1e-3]
    other = Pair(models.build("llama"), stage, lambda m: torch.optim.AdamW(decay_groups(m), lr=1e-3))
    other.engine.load_full_optimizer_state_dict(other.optimizer, state)
    assert other.optimizer.param_groups[0]["lr"] == 0.5 and other.optimizer.param_groups[0]["fused"] is True
    train(other, 1)


@cases.at(1, 3)
def compiled_submodules_keep_clean_loading(stage: int) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    pair = Pair(model, stage)
    model[0] = torch.compile(model[0], backend="eager")
    pair.backward(squared, random_batch(6, 5))
    pair.step()
    state = pair.engine.full_state_dict(all_ranks=True)
    assert set(state) == set(model.state_dict(keep_vars=True))
    pair.engine.load_full_state_dict(state)


@cases.at(1, 3)
def whole_state_costs_nothing_but_itself_on_rank_0(stage: int) -> None:
    for precision in (None, "bf16-mixed"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        engine = shard(model, ZeroConfig(stage=stage, unit_numel=1000, precision=precision))
        optimizer = engine.bind(torch.optim.AdamW(model.parameters()))
        squared(model, torch.ones(2, 256)).backward()
        optimizer.step()
        optimizer.zero_grad()
        slack = 32 * 1024  # which states there are, and step counts, travel as objects
        with PeakBytes() as weights:
            state = engine.full_state_dict()
        with PeakBytes() as moments:
            states = engine.full_optimizer_state_dict(optimizer)
        nbytes = 4 * sum(p.numel() for p in model.parameters())
        if dist.get_rank() == 0:
            assert sum(value.nbytes for value in state.values()) == nbytes
            assert nbytes <= weights.peak <= nbytes + slack
            assert sum(value.nbytes for entries in states["state"].values() for value in entries.values()) >= 2 * nbytes
            assert 2 * nbytes <= moments.peak <= 2 * nbytes + slack
        else:
            assert weights.peak <= slack and moments.peak <= slack


@cases.parametrize()
def test_whole_state_is_that_of_plain_torch(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)


def save(path: str, stage: int) -> None:
    pair = Pair(models.build("llama"), stage, OPTIMIZERS["adamw"])
    train(pair, 0, 1)
    state = {"model": pair.engine.full_state_dict(), "optimizer": pair.engine.full_optimizer_state_dict(pair.optimizer)}
    if dist.get_rank() == 0:
        state |= {"plain": pair.plain.state_dict(), "plain_optimizer": pair.plain_optimizer.state_dict()}
        torch.save(state, path)


def resume(path: str, stage: int) -> None:
    state = torch.load(path, weights_only=True, mmap=True)
    pair = Pair(models.build("llama", seed=1), stage, OPTIMIZERS["adamw"])
    pair.engine.load_full_state_dict(state["model"])
    pair.engine.load_full_optimizer_state_dict(pair.optimizer, state["optimizer"])
    pair.plain.load_state_dict(state["plain"])
    pair.plain_optimizer.load_state_dict(state["plain_optimizer"])
    train(pair, 2, 3)
    pair.check_weights()


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 3), (3, 2), (2, 1), (1, 2)])
def test_a_run_goes_on_at_another_world_size_and_stage(tmp_path: Path, saved_on: int, loaded_on: int) -> None:
    path = str(tmp_path / "state.pt")
    run_ranks(saved_on, save, path, 3 if saved_on > 1 else 1)
    run_ranks(loaded_on, resume, path, 2 if loaded_on > 2 else 3)
