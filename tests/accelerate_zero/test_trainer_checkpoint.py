"""Trainer's checkpoints: they appear whole or not at all, the optimizer sharded, and resume anywhere."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from accelerate_zero import staging
from tests.helpers import models
from tests.helpers.cases import Cases, check, folder
from tests.helpers.ranks import run_ranks
from tests.helpers.training import losses, trainer
from zero_core import consolidate, engine_of, verify_checkpoint

cases = Cases(__name__)
outcomes = cases.fixture(2, timeout=200)

EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}
BEST = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}


def weights(run: Any) -> dict[str, torch.Tensor]:
    engine = engine_of(run.model)
    state = run.model.state_dict() if engine is None else engine.full_state_dict(all_ranks=True)
    return {name: value.clone() for name, value in state.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-6) -> bool:
    return one.keys() == other.keys() and all((one[k] - v).abs().max() <= tolerance for k, v in other.items())


def names(path: str) -> list[str]:
    """What lies in a run's directory, seen by all ranks alike."""
    dist.barrier()
    found = sorted(entry.name for entry in Path(path).iterdir())
    dist.barrier()
    return found


def fail_on_last_rank(*args: Any) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise OSError(28, "No space left on device")


@cases
def a_resumed_run_is_the_uninterrupted_one(stage: int) -> None:
    path = folder()
    whole = trainer(stage, path, lr_scheduler_type="linear", **EVERY_STEP)
    whole.train()
    for other in (stage, stage % 3 + 1):
        rest = trainer(other, folder(), seed=5, lr_scheduler_type="linear", **EVERY_STEP)
        rest.train(resume_from_checkpoint=f"{path}/checkpoint-2")
        assert same(weights(rest), weights(whole))
        assert losses(rest) == pytest.approx(losses(whole), rel=1e-6)


@cases.at(2)
def training_in_half_precision_resumes_with_its_masters(stage: int) -> None:
    path = folder()
    whole = trainer(stage, path, bf16=True, **EVERY_STEP)
    whole.train()
    rest = trainer(stage, folder(), seed=5, bf16=True, **EVERY_STEP)
    rest.train(resume_from_checkpoint=f"{path}/checkpoint-2")
    assert same(weights(rest), weights(whole))


@cases.at(3)
def the_order_of_rows_and_random_numbers_go_on_where_they_were(stage: int) -> None:
    """Also in the second epoch, with dropout's random numbers drawn in between."""
    path, runs = folder(), []
    for start in (None, f"{path}/checkpoint-10"):
        model = dropping()
        run = trainer(stage, path, model=model, max_steps=11, save_strategy="steps", save_steps=5)
        run.train(resume_from_checkpoint=start)
        runs.append(weights(run))
    assert same(*runs)


def dropping() -> Any:
    torch.manual_seed(0)
    config = models.build("llama").config
    config.attention_dropout = 0.3
    return LlamaForCausalLM(config)


@cases.at(1, 3)
def rotation_keeps_the_best_and_the_last(stage: int) -> None:
    path = folder()
    run = trainer(stage, path, save_total_limit=2, learning_rate=0.1, **EVERY_STEP, **BEST)
    run.train()
    best = f"checkpoint-{run.state.best_global_step}"
    assert run.state.best_model_checkpoint == f"{path}/{best}"
    assert names(path) == sorted({best, "checkpoint-3" if best == "checkpoint-4" else "checkpoint-4"})
    read = LlamaForCausalLM.from_pretrained(f"{path}/{best}").state_dict()
    assert same(weights(run), dict(read), 0.0)
    state = json.loads(Path(path, "checkpoint-4", "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == f"{path}/{best}"
    verify_checkpoint(f"{path}/checkpoint-4/optimizer_zero")
    path = folder()
    run = trainer(stage, path, save_total_limit=1, learning_rate=0.1, **EVERY_STEP, **BEST)
    with mock.patch.object(staging, "remove", wraps=staging.remove) as removing:
        run.train()
    assert run.state.best_global_step == 1 and names(path) == ["checkpoint-1"]
    removed = [Path(call.args[0]).name for call in removing.call_args_list]
    assert removed == (["checkpoint-2", "checkpoint-3", "checkpoint-4"] if dist.get_rank() == 0 else [])


@cases.at(1, 3)
def a_save_that_fails_on_one_rank_raises_on_all_and_leaves_nothing(stage: int) -> None:
    """Wherever it fails; the checkpoint before stays the newest, and a later save has its place free."""
    for step in ("_save_rng_state", "_save_scaler"):
        path = folder()
        run = trainer(stage, path, max_steps=2, **EVERY_STEP)
        run.add_callback(failing_after_the_first(run, step))
        with pytest.raises((OSError, RuntimeError), match="No space left"):
            run.train()
        assert names(path) == ["checkpoint-1"] and run.state.best_model_checkpoint is None
        assert Path(str(get_last_checkpoint(path))).name == "checkpoint-1"
    rest = trainer(stage, path, seed=5, max_steps=2, **EVERY_STEP)
    rest.train(resume_from_checkpoint=True)
    assert names(path) == ["checkpoint-1", "checkpoint-2"]


def failing_after_the_first(run: Any, step: str) -> TrainerCallback:
    class Failing(TrainerCallback):
        def on_save(self, *args: Any, **kwargs: Any) -> None:
            setattr(run, step, fail_on_last_rank)

    return Failing()


@cases.at(2)
def what_a_killed_save_left_is_no_checkpoint_and_goes_with_the_next(stage: int) -> None:
    path = folder()
    run = trainer(stage, path, max_steps=2, **EVERY_STEP)
    run.train()
    if dist.get_rank() == 0:
        Path(path, ".checkpoint-2.partial").mkdir()
        shutil.move(f"{path}/checkpoint-2", f"{path}/.checkpoint-2.partial/checkpoint-2")
        Path(path, ".checkpoint-2.partial", "checkpoint-2", "trainer_state.json").unlink()
    assert names(path) == [".checkpoint-2.partial", "checkpoint-1"]
    assert Path(str(get_last_checkpoint(path))).name == "checkpoint-1"
    rest = trainer(stage, path, seed=5, max_steps=2, **EVERY_STEP)
    rest.train(resume_from_checkpoint=True)
    assert same(weights(rest), weights(run))
    assert names(path) == ["checkpoint-1", "checkpoint-2"]


@cases.at(3)
def weights_alone_start_the_optimizer_afresh_and_say_so(stage: int) -> None:
    path = folder()
    run = trainer(stage, path, max_steps=2, save_only_model=True, **EVERY_STEP)
    run.train()
    names(path)
    rest, found = trainer(stage, folder(), seed=5, max_steps=3), list[dict[str, torch.Tensor]]()

    class AtTheStart(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            assert not rest.optimizer.optimizer.state
            found.append(weights(rest))

    rest.add_callback(AtTheStart())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rest.train(resume_from_checkpoint=f"{path}/checkpoint-2")
    told = [str(warning.message) for warning in caught if "has the weights alone" in str(warning.message)]
    assert len(told) == (dist.get_rank() == 0)
    assert same(found[0], weights(run), 0.0)
    assert rest.state.global_step == 3


@cases.at(2)
def a_checkpoint_is_pushed_when_it_is_complete_and_before_it_rotates(stage: int) -> None:
    path, pushed = folder(), []

    run = trainer(stage, path, max_steps=2, save_total_limit=1, **EVERY_STEP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_push_from_checkpoint", lambda self, where: pushed.append((where, names(path))))
        patch.setattr(Trainer, "_finish_current_push", lambda self: None)
        run.args.push_to_hub = True
        run.train()
    assert pushed == [
        (f"{path}/checkpoint-1", ["checkpoint-1"]),
        (f"{path}/checkpoint-2", ["checkpoint-1", "checkpoint-2"]),
    ]
    assert names(path) == ["checkpoint-2"]


@cases.parametrize()
def test_checkpoints_of_the_trainer(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)


def part(path: str, stage: int, batch: int, resumes: bool) -> dict[str, Any]:
    run = trainer(stage, path, seed=5 if resumes else 0, per_device_train_batch_size=batch, **EVERY_STEP)
    run.train(resume_from_checkpoint=f"{path}/checkpoint-2" if resumes else None)
    return {name: value.tolist() for name, value in weights(run).items()}  # a tensor would end with its process


def tensors(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole = tensors(run_ranks(2, part, str(tmp_path), 3, 4, False)[0])
    for later in (3, 4):  # saved again on one rank
        shutil.rmtree(tmp_path / f"checkpoint-{later}")
    rest = tensors(run_ranks(1, part, str(tmp_path), 1, 8, True)[0])
    assert same(rest, whole, 5e-5)  # Adam amplifies the rounding of another order of sums
    verify_checkpoint(tmp_path / "checkpoint-4" / "optimizer_zero")
    # And transformers' own Trainer, with DDP, once the optimizer's state is one of its files.
    middle = tmp_path / "checkpoint-2"
    consolidate(middle / "optimizer_zero", middle / "optimizer.pt", optimizer="optimizer")
    plain = tensors(run_ranks(2, part, str(tmp_path), 0, 4, True)[0])
    assert same(plain, whole, 5e-5)
