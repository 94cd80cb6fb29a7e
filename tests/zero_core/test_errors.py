"""Bad input gets an error that says what was expected, what came and the call that repairs it; or it works."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers import models
from tests.helpers.cases import Cases, check
from tests.helpers.ranks import run_ranks
from zero_core import ZeroConfig, ZeroStage, shard

cases = Cases(__name__)
outcomes = cases.fixture(2, 3)


@pytest.mark.parametrize("stage", [0, 4, -1, "3", True, None, 2.5])
def test_a_stage_that_does_not_exist_is_refused(stage: Any) -> None:
    with pytest.raises(ValueError, match=r"1 \(optimizer state\), 2 .* or 3"):
        ZeroConfig(stage=stage)


def test_a_stage_may_be_given_as_number_or_enumeration() -> None:
    assert ZeroConfig(stage=2).zero_stage is ZeroConfig(stage=ZeroStage.GRADIENTS).zero_stage


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit_numel": 0}, "unit_numel must be at least 1"),
        ({"prefetch_bytes": -1}, "prefetch_bytes must be None"),
        ({"unit_classes": 3}, "unit_classes must be module classes or their names"),
        ({"unit_classes": (int,)}, "unit_classes must be module classes or their names"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZeroConfig(**settings)


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="unknown"):
        ZeroConfig(unknown=1)  # type: ignore[call-arg]


def test_without_a_process_group_the_error_says_how_to_make_one() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        shard(nn.Linear(2, 2))


def raises(kind: type[Exception], *words: str) -> Any:
    return pytest.raises(kind, match=".*".join(words))


@cases
def a_unit_class_that_matches_nothing(stage: int) -> None:
    for item in ("NoSuchBlock", nn.LSTM):
        with raises(ValueError, "NoSuchBlock|LSTM", "no such submodule", "LlamaDecoderLayer"):
            shard(models.build("llama"), ZeroConfig(stage=stage, unit_classes=item))


@cases
def unit_classes_by_name_or_type(stage: int) -> None:
    for item in ("LlamaMLP", nn.Linear):
        engine = shard(models.build("llama"), ZeroConfig(stage=stage, unit_classes=(item,)))
        assert "mlp" in repr(engine)


@cases
def models_wrapped_or_sharded_already(stage: int) -> None:
    with raises(ValueError, "DistributedDataParallel", r"model\.module"):
        shard(DistributedDataParallel(nn.Linear(2, 2)), ZeroConfig(stage=stage))
    model = nn.Linear(2, 2)
    shard(model, ZeroConfig(stage=stage))
    with raises(RuntimeError, "weight", "already", "close"):
        shard(model, ZeroConfig(stage=stage))
    with raises(RuntimeError, "0.weight", "already"):
        shard(nn.Sequential(model), ZeroConfig(stage=stage))
    with raises(ValueError, r"torch\.nn\.Module", "list"):
        shard([model], ZeroConfig(stage=stage))  # type: ignore[arg-type]


@cases
def optimizers_bound_wrongly(stage: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    engine = shard(model, ZeroConfig(stage=stage))
    stranger = nn.Linear(3, 3)
    foreign = torch.optim.SGD([{"params": model.parameters()}, {"params": stranger.parameters()}], lr=0.1)
    with raises(ValueError, "parameter 0 of group 1", r"\(3, 3\)", "ModuleList"):
        engine.bind(foreign)
    assert foreign.param_groups[0]["params"][0] is model[0].weight  # untouched
    optimizer = engine.bind(torch.optim.SGD(model.parameters(), lr=0.1))
    with raises(RuntimeError, "bound already"):
        engine.bind(optimizer)
    with raises(RuntimeError, "not bound", r"engine\.bind"):
        engine.full_optimizer_state_dict(torch.optim.SGD(model.parameters(), lr=0.1))
    with raises(ValueError, "parameter of the sharded model", "slices"):
        engine.full_grad(optimizer.param_groups[0]["params"][0] if len(optimizer.state) else stranger.weight)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    model(torch.ones(2, 3)).sum().backward()
    with raises(ValueError, "group 1", "ModuleList"):
        optimizer.step()


@cases.parametrize()
def test_bad_input_is_told_what_to_do(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)


def die(how: str) -> None:
    engine = shard(models.build("mlp"), ZeroConfig(stage=3))
    if dist.get_rank() == 1:
        if how == "raise":
            raise KeyError("rank 1 stumbles")
        os._exit(3)
    models.loss(engine.model, models.batch("mlp", 0)).backward()


@pytest.mark.parametrize(("how", "shown"), [("raise", "rank 1 stumbles"), ("exit", "ended without a word")])
def test_a_rank_that_fails_ends_the_others_in_seconds_and_is_shown(how: str, shown: str) -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match=shown):
        run_ranks(2, die, how, timeout=100)
    assert time.monotonic() - start < 60
