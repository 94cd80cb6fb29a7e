"""Lightning's checkpoints are directories that load at any stage and number of ranks, with all of Lightning's own logic."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import lightning_zero
from tests.helpers import models
from tests.helpers.cases import Cases, check, folder
from tests.helpers.lightning import Module, loader, trainer
from tests.helpers.ranks import run_ranks
from tests.helpers.twin import largest_difference
from zero_core import (
    CheckpointError,
    ZeroConfig,
    checkpoint,
    load_checkpoint,
    save_checkpoint,
    shard,
    storage,
    verify_checkpoint,
)

cases = Cases(__name__)
outcomes = cases.fixture(2, timeout=280)

BATCHES, EPOCHS = 2, 2


def fit(strategy: Any, module: pl.LightningModule, ckpt_path: Any = None, **settings: Any) -> pl.Trainer:
    run = trainer(strategy, **{"max_epochs": EPOCHS, **settings})
    run.fit(module, loader("llama", BATCHES), ckpt_path=ckpt_path)
    return run


def saving(path: str, **settings: Any) -> dict[str, Any]:
    return {"callbacks": [ModelCheckpoint(path, **settings)], "enable_checkpointing": True}


def every_step(path: str) -> dict[str, Any]:
    return saving(path, every_n_train_steps=1, save_top_k=-1, filename="{step}")


def difference(module: pl.LightningModule, expected: dict[str, Tensor]) -> float:
    own = module.state_dict()
    assert own.keys() == expected.keys()
    return largest_difference(own.values(), (expected[name] for name in own))


@cases
def a_run_goes_on_from_a_directory_at_every_stage(stage: int) -> None:
    path = folder()
    first = Module("llama", "adamw")
    fit(f"zero{stage}", first, **every_step(path))
    place = f"{path}/step=2.ckpt"
    if dist.get_rank() == 0:
        assert verify_checkpoint(place).world_size == 2
    for other in {1, 3, stage}:
        resumed = Module("llama", "adamw", seed=1)
        run = fit(f"zero{other}", resumed, place)
        assert run.global_step == 4 and len(resumed.losses) == 2
        assert max(abs(a - b) for a, b in zip(resumed.losses, first.losses[2:], strict=True)) < 1e-5
        assert difference(resumed, first.state_dict()) < (
            1e-6 if other == stage else 5e-5
        )  # Adam divides by small numbers


@cases.at(1, 3)
def top_k_last_and_best_are_kept_and_found(stage: int) -> None:
    path = folder()

    class Falls(Module):
        def training_step(self, *args: Any) -> Tensor:
            self.log("score", -abs(self.trainer.global_step - 1.0))
            return super().training_step(*args)

    settings = saving(
        path, every_n_train_steps=1, save_top_k=1, save_last=True, monitor="score", mode="max", filename="{step}"
    )
    module = Falls("llama", "adamw")
    run = fit(f"zero{stage}", module, **settings)
    dist.barrier()
    assert sorted(os.listdir(path)) == ["last.ckpt", "step=2.ckpt"]
    assert run.checkpoint_callback.best_model_path == f"{path}/step=2.ckpt"
    for name in ("best", "last"):
        again = Falls("llama", "adamw", seed=1)
        rest = trainer(f"zero{stage}", max_epochs=3, **settings)
        rest.checkpoint_callback.best_model_path = run.checkpoint_callback.best_model_path
        rest.fit(again, loader("llama", BATCHES), ckpt_path=name)
        assert len(again.losses) == {"best": 4, "last": 2}[name]


@cases.at(2)
def last_may_be_a_link(stage: int) -> None:
    path = folder()
    settings = saving(
        path, every_n_train_steps=1, save_top_k=2, save_last="link", monitor="step", mode="max", filename="{step}"
    )
    module = Module("llama", "adamw")
    fit(f"zero{stage}", module, **settings)
    dist.barrier()
    assert sorted(os.listdir(path)) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    assert os.readlink(f"{path}/last.ckpt") == "step=4.ckpt"
    again = Module("llama", "adamw", seed=1)
    fit(f"zero{stage}", again, "last", max_epochs=EPOCHS + 1, **settings)
    assert len(again.losses) == BATCHES


@cases.at(1, 3)
def weights_alone_load_for_evaluation_and_elsewhere(stage: int) -> None:
    path = folder()
    module = Module("llama", "adamw")
    fit(f"zero{stage}", module, **saving(path, save_weights_only=True, filename="w", save_top_k=1))
    place, expected = f"{path}/w-v1.ckpt", module.state_dict()
    place = place if os.path.exists(place) else f"{path}/w.ckpt"
    for load in (Module.load_from_checkpoint, lambda p: lightning_zero.load_from_checkpoint(Module, p)):
        plain = load(place)
        assert difference(plain, expected) == 0 and plain.hparams["optimizer"] == "adamw"
    other = Module("llama", "adamw", seed=1)
    trainer(f"zero{4 - stage}").validate(other, loader("llama", 1), ckpt_path=place, verbose=False)
    assert difference(other, expected) == 0
    with pytest.raises(KeyError, match="contains only the model"):
        fit(f"zero{stage}", Module("llama", "adamw"), place)


@cases.at(1, 3)
def hooks_see_names_and_may_rename_and_drop(stage: int) -> None:
    class Renames(Module):
        def on_save_checkpoint(self, state: dict[str, Any]) -> None:
            weights = state["state_dict"]
            assert all(tuple(weights[n].shape) == tuple(s) for n, s in self.shapes().items())
            state["state_dict"] = {f"old.{name}": value for name, value in weights.items()}
            state["mine"] = {"words": ["a", "b"], "number": 3}

        def on_load_checkpoint(self, state: dict[str, Any]) -> None:
            state["state_dict"] = {n.removeprefix("old."): value for n, value in state["state_dict"].items()}
            self.found = state["mine"]

        def shapes(self) -> dict[str, Any]:
            return {f"model.{name}": value.shape for name, value in models.build("llama").state_dict().items()}

    path = folder()
    module = Renames("llama", "adamw")
    fit(f"zero{stage}", module, **every_step(path))
    resumed = Renames("llama", "adamw", seed=1)
    fit(f"zero{stage}", resumed, f"{path}/step=2.ckpt")
    assert resumed.found == {"words": ["a", "b"], "number": 3}
    assert difference(resumed, module.state_dict()) < 1e-6
    with pytest.raises(RuntimeError, match=r"old\.model"):  # the directory has the new names
        Module.load_from_checkpoint(f"{path}/step=2.ckpt")


@cases.at(1, 3)
def files_are_written_beside_training(stage: int) -> None:
    path = folder()
    module = Module("llama", "adamw")
    settings = saving(path, every_n_train_steps=1, save_top_k=1, filename="{step}")
    fit(f"zero{stage}", module, plugins=AsyncCheckpointIO(), **settings)
    dist.barrier()
    assert os.listdir(path) == ["step=4.ckpt"]
    assert difference(Module.load_from_checkpoint(f"{path}/step=4.ckpt"), module.state_dict()) == 0
    with (
        mock.patch.object(storage, "_write_item", side_effect=OSError(28, "No space left on device")),
        pytest.raises(CheckpointError, match="No space left"),
    ):
        fit(f"zero{stage}", Module("llama", "adamw"), plugins=AsyncCheckpointIO(), **settings)
    dist.barrier()
    assert os.listdir(path) == ["step=4.ckpt"]


@cases.at(1, 3)
def a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_last_one(stage: int) -> None:
    path = folder()
    write = checkpoint.dcp_save

    class Fills(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 2 and dist.get_rank() == 1:
                error = OSError(28, "No space left on device")
                patch = mock.patch.object(storage, "_write_item", side_effect=error)
                patch.start()
                self.patch = patch

    fills = Fills()
    settings = saving(path, every_n_train_steps=1, save_top_k=1, filename="{step}", save_last=True)
    settings["callbacks"].append(fills)
    with pytest.raises((CheckpointError, RuntimeError), match="No space left on device"):
        fit(f"zero{stage}", Module("llama", "adamw"), **settings)
    if hasattr(fills, "patch"):
        fills.patch.stop()
    dist.barrier()
    assert checkpoint.dcp_save is write and sorted(os.listdir(path)) == ["last.ckpt", "step=2.ckpt"]
    fit(f"zero{stage}", Module("llama", "adamw"), f"{path}/last.ckpt")


@cases.at(2)
def what_is_not_plain_is_named_or_left_out(stage: int) -> None:
    path = folder()

    class Keeps(pl.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"loss": Keeps}

    class Configured(Module):
        def __init__(self, kind: type, path: Path) -> None:
            super().__init__("llama", "adamw")
            self.save_hyperparameters()

    settings = every_step(path)
    settings["callbacks"].append(Keeps())
    with pytest.raises((ValueError, RuntimeError), match=r"callbacks\..*Keeps\.loss"):
        fit(f"zero{stage}", Module("llama", "adamw"), **settings)
    with mock.patch.object(lightning_zero.checkpoint, "rank_zero_warn") as warned:
        fit(f"zero{stage}", Configured(dict, Path("data")), **every_step(f"{path}/other"))
    assert "without the hyper-parameter 'kind'" in warned.call_args.args[0]
    again = Configured.load_from_checkpoint(f"{path}/other/step=2.ckpt", kind=list)
    assert again.hparams["path"] == "data" and again.hparams["kind"] is list


@cases.at(1, 3)
def directories_of_the_core_and_back(stage: int) -> None:
    path = folder()
    model = models.build("llama")
    engine = shard(model, ZeroConfig(stage=stage))
    optimizer = engine.bind(torch.optim.AdamW(model.parameters()))
    models.loss(model, models.batch("llama", 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    save_checkpoint(f"{path}/core", engine, optimizer)
    expected = engine.full_state_dict(all_ranks=True)

    class Plain(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0)

        def on_train_start(self) -> None:
            state = self.trainer.strategy.engine.optimizer_state(self.trainer.optimizers[0])
            assert all(run[2] == 1 for entries in state.shared.values() for run in entries["step"])
            whole = self.trainer.strategy.engine.full_state_dict(all_ranks=True)
            assert all(torch.equal(whole[f"model.{name}"], value) for name, value in expected.items())

    fit(f"zero{4 - stage}", Plain(seed=1), f"{path}/core", **every_step(path))
    found = load_checkpoint(f"{path}/step=1.ckpt", engine, optimizer)
    assert found.optimizers == ["optimizer"] and found.extra["global_step"] == 1


@cases.at(1, 3)
def a_run_that_is_over_is_saved_as_it_ended(stage: int) -> None:
    path = folder()
    first = Module("gpt2", "adamw")  # with a tied head
    run = trainer(f"zero{stage}", max_epochs=1)
    run.fit(first, loader("gpt2", BATCHES))
    run.save_checkpoint(f"{path}/end.ckpt")
    run.validate(first, loader("gpt2", 1), verbose=False)
    run.save_checkpoint(f"{path}/weights.ckpt", weights_only=True)
    expected = first.whole_state()
    assert difference(Module.load_from_checkpoint(f"{path}/weights.ckpt"), expected) == 0
    whole, resumed = Module("gpt2", "adamw"), Module("gpt2", "adamw", seed=1)
    for module, start in ((whole, None), (resumed, f"{path}/end.ckpt")):
        trainer(f"zero{stage}", max_epochs=2).fit(module, loader("gpt2", BATCHES), ckpt_path=start)
    assert resumed.losses == whole.losses[BATCHES:]
    full = trainer(lightning_zero.ZeroStrategy(stage=stage, save_format="full"))
    full.fit(module := Module("gpt2", "adamw"), loader("gpt2", BATCHES))
    with mock.patch.object(lightning_zero.strategy, "rank_zero_warn") as warned:
        full.save_checkpoint(f"{path}/full.ckpt")
    assert "has no optimizer state" in warned.call_args.args[0]
    dist.barrier()
    assert difference(module, torch.load(f"{path}/full.ckpt", weights_only=False)["state_dict"]) == 0
    # A module that is too large for all ranks to hold whole.
    with mock.patch.object(lightning_zero.ZeroStrategy, "_all_ranks_have_room", return_value=False):
        run = trainer(f"zero{stage}")
        run.fit(Module("gpt2", "adamw"), loader("gpt2", BATCHES))
        run.save_checkpoint(f"{path}/large.ckpt")
    assert difference(Module.load_from_checkpoint(f"{path}/large.ckpt"), expected) == 0


class CpuFSDP(FSDPStrategy):
    """Lightning's, but for the GPU that it wants."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(
            model, device_id=cpu, use_orig_params=True, sharding_strategy=self.sharding_strategy
        )


class OneGroup(Module):
    """Without groups by shape, of which FSDP's flat parameters have another one."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ByHand(OneGroup):
    """Sharded by FSDP2, as `ModelParallelStrategy` wants it."""

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


@cases.at(1, 3)
def runs_of_lightnings_sharded_strategies_go_on_here(stage: int) -> None:
    path = folder()
    strategies = {"fsdp": CpuFSDP(state_dict_type="sharded"), "fsdp2": ModelParallelStrategy(2, 1)}
    for name, strategy in strategies.items():
        source = ByHand("llama", "adamw")
        with mock.patch.object(_AcceleratorConnector, "_check_strategy_and_fallback"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of what FSDP uses
            fit(strategy, source, **every_step(f"{path}/{name}"))
        dist.barrier()
        place = f"{path}/{name}/step=2.ckpt"
        assert os.path.exists(f"{place}/meta.pt")
        resumed = OneGroup("llama", "adamw", seed=1)
        run = fit(f"zero{stage}", resumed, place)
        assert run.global_step == 4 and run.current_epoch == EPOCHS
        assert resumed.losses == pytest.approx(source.losses[2:], abs=1e-5)


@cases.parametrize()
def test_checkpoints_of_the_trainer(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)


def start(path: str) -> None:
    module = Module("llama", "adamw")
    fit("zero3", module, **every_step(path))
    if dist.get_rank() == 0:
        torch.save(module.state_dict(), f"{path}/end.pt")


def go_on(path: str) -> None:
    resumed = Module("llama", "adamw", seed=1)
    fit("zero2", resumed, f"{path}/step=2.ckpt")
    assert difference(resumed, torch.load(f"{path}/end.pt")) < 5e-5


def test_a_run_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(2, start, str(tmp_path))
    run_ranks(3, go_on, str(tmp_path))
