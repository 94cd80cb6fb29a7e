"""`Trainer(strategy="zero3")` is the plain Trainer: the same losses and weights, hooks, loops and files."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import lightning_zero
from tests.helpers import models
from tests.helpers.cases import Cases, check, folder
from tests.helpers.lightning import Module, loader, make_optimizer, trainer
from tests.helpers.twin import HalfTwin, largest_difference, mean_over_ranks
from zero_core import MixedPrecision, Offload, PartitionedParameterError, ZeroStage, deferred

cases = Cases(__name__)
outcomes = cases.fixture(2, timeout=280)

STEPS = 5


def plain(family: str, optimizer: str, steps: int, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The oracle, in this process: Lightning's own order of calls, on whole batches."""
    return _plain(family, optimizer, steps, tuple(sorted(options.items())))


@cache
def _plain(family: str, optimizer: str, steps: int, options: tuple[tuple[str, Any], ...]) -> Any:
    chosen = dict(options)
    model = models.build(family)
    own = make_optimizer(optimizer, model)
    losses = []
    for step in range(steps):
        loss = models.loss(model, models.batch(family, step % chosen.get("epoch", steps)))
        own.zero_grad()
        loss.backward()
        if "norm" in chosen:
            nn.utils.clip_grad_norm_(model.parameters(), chosen["norm"])
        if "value" in chosen:
            nn.utils.clip_grad_value_(model.parameters(), chosen["value"])
        own.step()
        losses.append(loss.item())
    return losses, {f"model.{name}": value.clone() for name, value in model.state_dict().items()}


def check_run(module: Module, expected: tuple[list[float], dict[str, Tensor]], weights: float = 1e-5) -> None:
    losses, state = expected
    assert len(module.losses) == len(losses)
    assert all(abs(a - b) < 2e-6 * abs(b) for a, b in zip(module.losses, losses, strict=True)), (module.losses, losses)
    check_weights(module, state, weights)


def check_weights(module: nn.Module, state: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    own = module.state_dict()  # after a run the module is plain again
    assert own.keys() == state.keys()
    error = largest_difference((v.float() for v in own.values()), (state[name].float() for name in own))
    assert error < tolerance, error


@cases
def every_family_trains_as_one_process_does(stage: int) -> None:
    for family in models.FAMILIES:
        module = Module(family)
        trainer(f"zero{stage}").fit(module, loader(family, STEPS))
        check_run(module, plain(family, "sgd", STEPS))


@cases.at(1, 3)
def adam_with_clipping_by_global_norm(stage: int) -> None:
    module = Module("llama", "adamw")
    trainer(f"zero{stage}", gradient_clip_val=0.1).fit(module, loader("llama", STEPS))
    check_run(module, plain("llama", "adamw", STEPS, norm=0.1), weights=5e-5)


@cases.at(1, 3)
def clipping_by_norm_and_by_value(stage: int) -> None:
    for algorithm, option in (("norm", {"norm": 0.05}), ("value", {"value": 0.002})):
        module = Module()
        limit = next(iter(option.values()))
        run = trainer(f"zero{stage}", gradient_clip_val=limit, gradient_clip_algorithm=algorithm)
        run.fit(module, loader("llama", STEPS))
        check_run(module, plain("llama", "sgd", STEPS, **option))


@cases.at(1, 3)
def a_users_own_clipping_hook(stage: int) -> None:
    class Own(Module):
        norms: list[float]

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            norm = self.trainer.strategy.engine.clip_grad_norm_(0.05)
            self.norms = [*getattr(self, "norms", []), norm.item()]

    module = Own()
    trainer(f"zero{stage}").fit(module, loader("llama", STEPS))
    assert len(module.norms) == STEPS and min(module.norms) > 0.05
    check_run(module, plain("llama", "sgd", STEPS, norm=0.05))


@cases
def accumulated_batches_are_one_big_batch(stage: int) -> None:
    for local in (None, True):
        module = Module()
        strategy = lightning_zero.ZeroStrategy(stage=stage, local_accumulation=local)
        trainer(strategy, accumulate_grad_batches=2).fit(module, loader("llama", STEPS, micro_batches=2))
        assert len(module.losses) == 2 * STEPS
        check_weights(module, plain("llama", "sgd", STEPS)[1])


@cases.at(1, 3)
def schedulers_of_every_interval(stage: int) -> None:
    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            one = torch.optim.lr_scheduler
            config: dict[str, Any]
            if self.kind == "step":
                config = {"scheduler": one.LambdaLR(optimizer, lambda s: 1 / (1 + s)), "interval": "step"}
            elif self.kind == "epoch":
                config = {"scheduler": one.StepLR(optimizer, 1, 0.5), "interval": "epoch"}
            else:
                config = {
                    "scheduler": one.ReduceLROnPlateau(
                        optimizer, patience=0, threshold=10.0, threshold_mode="abs", cooldown=0
                    ),
                    "monitor": "val_loss",
                }
            return {"optimizer": optimizer, "lr_scheduler": config}

        def on_train_batch_end(self, *_: Any) -> None:
            self.rates = [*getattr(self, "rates", []), self.optimizers().param_groups[0]["lr"]]

    for kind in ("step", "epoch", "plateau"):
        rates = []
        for strategy in ("ddp", f"zero{stage}"):
            module = Scheduled()
            module.kind = kind
            trainer(strategy, max_epochs=3).fit(module, loader("llama", 2), loader("llama", 1))
            rates.append(module.rates)
        assert rates[0] == rates[1] and len(rates[0]) == 6, (kind, rates)
        assert len(set(rates[0])) > 1, kind


@cases.at(1, 3)
def fit_validate_test_and_predict_in_any_order(stage: int) -> None:
    module = Module()
    run = trainer(f"zero{stage}")
    before = run.validate(module, loader("llama", 1), verbose=False)[0]["val_loss"]
    assert abs(before - plain("llama", "sgd", 1)[0][0]) < 1e-5
    run.fit(module, loader("llama", STEPS), loader("llama", 1))
    check_run(module, plain("llama", "sgd", STEPS))
    tested = run.test(module, loader("llama", 1), verbose=False)[0]["test_loss"]
    outputs = run.predict(module, loader("llama", 1))
    assert abs(mean_over_ranks(outputs[0]).item() - tested) < 1e-5
    module.losses.clear()
    run.fit_loop.max_epochs = 2
    run.fit(module, loader("llama", 2))
    assert len(module.losses) == 2 and module.losses[0] < before


@cases.at(1, 3)
def validation_alone_makes_no_optimizer(stage: int) -> None:
    class Watch(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
            held = {h.kind: h.bytes for h in trainer.strategy.engine.report().held}
            assert held["optimizer"] == held["gradients"] == 0

    module = Module()
    trainer(f"zero{stage}", callbacks=[Watch()]).validate(module, loader("llama", 1), verbose=False)


@cases.at(1, 3)
def checkpoints_are_plain_and_resume(stage: int) -> None:
    path = folder()
    saver = ModelCheckpoint(path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    module = Module("llama", "adamw")
    whole = lightning_zero.ZeroStrategy(stage, save_format="full")
    run = trainer(whole, callbacks=[saver], enable_checkpointing=True, max_epochs=2)
    run.fit(module, loader("llama", 2))
    expected = plain("llama", "adamw", 4, epoch=2)
    check_weights(module, expected[1], 5e-5)
    saved = Path(path) / "step=2.ckpt"
    assert saved.exists()
    file = torch.load(saved, weights_only=False)
    check_plain_state(file, expected=plain("llama", "adamw", 2))
    # Plain Lightning's own way back, and a plain optimizer.
    again = Module.load_from_checkpoint(saved, map_location="cpu", weights_only=False)
    check_weights(again, plain("llama", "adamw", 2)[1], 5e-5)
    make_optimizer("adamw", again.model).load_state_dict(file["optimizer_states"][0])
    # Ours: the rest of the run gives the same weights, at every stage.
    for other in (1, 2, 3):
        resumed = Module("llama", "adamw", seed=1)
        rest = trainer(f"zero{other}", max_epochs=2)
        rest.fit(resumed, loader("llama", 2), ckpt_path=saved, weights_only=False)
        assert rest.global_step == 4 and len(resumed.losses) == 2
        check_weights(resumed, expected[1], 5e-5)


def check_plain_state(file: dict[str, Any], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    assert file["state_dict"].keys() == expected[1].keys()
    assert largest_difference(file["state_dict"].values(), expected[1].values()) < 5e-5
    state = file["optimizer_states"][0]
    ids = [i for group in state["param_groups"] for i in group["params"]]
    assert sorted(state["state"]) == ids and [g["weight_decay"] for g in state["param_groups"]] == [0.1, 0.0]
    assert all(entry["step"].item() == 2 for entry in state["state"].values())


@cases.at(1, 3)
def a_checkpoint_of_ddp_resumes_here_and_the_other_way(stage: int) -> None:
    for first, second in (("ddp", f"zero{stage}"), (f"zero{stage}", "ddp")):
        path = folder()
        saver = ModelCheckpoint(path, filename="{epoch}", save_top_k=-1)
        whole = first if first == "ddp" else lightning_zero.ZeroStrategy(stage, save_format="full")
        start = trainer(whole, callbacks=[saver], enable_checkpointing=True)
        start.fit(Module("llama", "adamw"), loader("llama", 2))
        resumed = Module("llama", "adamw", seed=1)
        rest = trainer(second, max_epochs=2)
        rest.fit(resumed, loader("llama", 2), ckpt_path=f"{path}/epoch=0.ckpt", weights_only=False)
        assert rest.global_step == 4
        check_weights(resumed, plain("llama", "adamw", 4, epoch=2)[1], 5e-5)


@cases.at(1, 3)
def save_checkpoint_and_weights_only(stage: int) -> None:
    path = folder()
    module = Module()

    class Save(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(f"{path}/all.ckpt")
            trainer.save_checkpoint(f"{path}/weights.ckpt", weights_only=True)

    whole = lightning_zero.ZeroStrategy(stage, save_format="full")
    trainer(whole, callbacks=[Save()]).fit(module, loader("llama", 2))
    everything, weights = (torch.load(f"{path}/{n}.ckpt", weights_only=False) for n in ("all", "weights"))
    assert "optimizer_states" in everything and "optimizer_states" not in weights
    check_weights(module, weights["state_dict"])


@cases.at(1, 3)
def configure_model_builds_on_meta(stage: int) -> None:
    class Late(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = None

        def configure_model(self) -> None:
            if self.model is None:
                self.model = models.llama()
                assert all(p.is_meta for p in self.model.parameters())

    module = Late()
    trainer(f"zero{stage}").fit(module, loader("llama", 3))
    assert len(module.losses) == 3 and all(0 < loss < 10 for loss in module.losses)
    assert not any(p.is_meta for p in module.parameters())


@cases.at(1, 3)
def configure_model_loads_pretrained_weights_where_they_are_needed(stage: int) -> None:
    path = folder()
    if dist.get_rank() == 0:
        models.build("llama").save_pretrained(path)
    dist.barrier()

    class Pretrained(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = None

        def configure_model(self) -> None:
            if self.model is None:
                self.model = LlamaForCausalLM.from_pretrained(path)
                assert all(deferred.source_of(p) is not None for p in self.model.parameters())
                self.model.train()

    module = Pretrained()
    trainer(f"zero{stage}").fit(module, loader("llama", STEPS))
    check_run(module, plain("llama", "sgd", STEPS))


class Gan(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: dict[str, Tensor], index: int) -> None:
        x = batch["input"]
        first, second = self.optimizers()
        self.toggle_optimizer(second)
        loss = self.critic(self.generator(x)).sigmoid().mean() - self.critic(x).sigmoid().mean()
        second.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(second, gradient_clip_val=0.01)
        second.step()
        self.untoggle_optimizer(second)
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(self.critic(self.generator(x)).sigmoid().mean().neg())
        first.step()
        self.untoggle_optimizer(first)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.generator.parameters(), lr=0.5), torch.optim.SGD(self.critic.parameters(), lr=0.5)]


def plain_gan(steps: int) -> dict[str, Tensor]:
    gan = Gan()
    first, second = gan.configure_optimizers()
    for step in range(steps):
        x = models.batch("mlp", step)["input"]
        gan.zero_grad()
        (gan.critic(gan.generator(x).detach()).sigmoid().mean() - gan.critic(x).sigmoid().mean()).backward()
        nn.utils.clip_grad_norm_(gan.critic.parameters(), 0.01)
        second.step()
        gan.zero_grad()
        gan.critic(gan.generator(x)).sigmoid().mean().neg().backward()
        first.step()
    return {name: value.clone() for name, value in gan.state_dict().items()}


@cases.at(1, 3)
def manual_optimization_of_a_gan(stage: int) -> None:
    gan = Gan()
    trainer(f"zero{stage}").fit(gan, loader("mlp", 4))
    check_weights(gan, plain_gan(4))


@cases.at(1, 3)
def gradients_and_weights_are_there_for_hooks(stage: int) -> None:
    class Look(pl.Callback):
        seen = 0

        def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            weight = module.model.lm_head.weight
            grad = trainer.strategy.engine.full_grad(weight)
            assert grad is not None and grad.shape == weight.shape and grad.norm() > 0
            try:
                weight.grad.norm()
                raise AssertionError("read a gradient that is not here")
            except PartitionedParameterError as error:
                assert error.parameter == "model.lm_head.weight"
            self.seen += 1

        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            with trainer.strategy.engine.full_params():
                assert torch.isfinite(module.model.lm_head.weight).all()

        def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            with torch.no_grad():
                assert module(**models.batch("llama", 0)).isfinite()

    look = Look()
    module = Module()
    trainer(f"zero{stage}", callbacks=[look]).fit(module, loader("llama", STEPS))
    assert look.seen == STEPS
    check_run(module, plain("llama", "sgd", STEPS))


@cases.at(1, 3)
def summary_loggers_and_early_stopping(stage: int) -> None:
    path = folder()
    module = Module()
    counts = []

    class Count(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            counts.append(ModelSummary(module).total_parameters)

    stop = EarlyStopping("val_loss", min_delta=100.0, patience=1)
    run = trainer(
        f"zero{stage}", logger=CSVLogger(path), callbacks=[Count(), stop], max_epochs=5, log_every_n_steps=1,
        enable_model_summary=True, enable_progress_bar=True,
    )  # fmt: skip
    run.fit(module, loader("llama", 2), loader("llama", 1))
    assert counts == [sum(p.numel() for p in models.build("llama").parameters())]
    assert run.current_epoch < 5 and len(module.losses) == 4
    assert abs(float(run.callback_metrics["train_loss_epoch"]) - sum(module.losses[2:]) / 2) < 1e-4
    if dist.get_rank() == 0:
        assert (Path(run.logger.log_dir) / "metrics.csv").read_text().count("\n") > 3


@cases.at(1, 3)
def gradual_unfreezing(stage: int) -> None:
    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, module: pl.LightningModule) -> None:
            self.freeze(module.model.model.layers)

        def finetune_function(self, module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.model.model.layers, optimizer, lr=0.05)

    class Partly(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.05)

    module = Partly()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    snapshots = []

    class Snapshot(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            snapshots.append(trainer.strategy.engine.full_state_dict(all_ranks=True))

    trainer(f"zero{stage}", callbacks=[Unfreeze(), Snapshot()], max_epochs=2).fit(module, loader("llama", 2))
    for name, value in before.items():
        frozen = ".layers." in name
        assert torch.equal(snapshots[0][name], value) == frozen, name
        assert not torch.equal(snapshots[1][name], value), name


@cases.at(1, 3)
def metrics_that_live_on_the_module(stage: int) -> None:
    from torchmetrics import MeanMetric

    class Measured(Module):
        def __init__(self) -> None:
            super().__init__()
            self.metric = MeanMetric()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss = super().training_step(batch, index)
            self.metric(loss)
            self.log("metric", self.metric, on_step=False, on_epoch=True)
            return loss

    module = Measured()
    run = trainer(f"zero{stage}")
    run.fit(module, loader("llama", 3))
    assert abs(float(run.callback_metrics["metric"]) - sum(module.losses) / 3) < 1e-5


@cases.at(1, 3)
def the_strategy_as_an_instance(stage: int) -> None:
    module = Module()
    strategy = lightning_zero.ZeroStrategy(stage=ZeroStage(stage), unit_classes=("LlamaMLP",), prefetch_bytes=0)
    trainer(strategy, accelerator=CPUAccelerator()).fit(module, loader("llama", STEPS))
    check_run(module, plain("llama", "sgd", STEPS))


@cases.at(1, 3)
def an_exception_leaves_the_module_recoverable(stage: int) -> None:
    class Fails(Module):
        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            if index == 2:
                raise KeyError("bad sample")
            return super().training_step(batch, index)

    module = Fails()
    try:
        trainer(f"zero{stage}").fit(module, loader("llama", STEPS))
        raise AssertionError("should have raised")
    except KeyError:
        pass


def half_twin(dtype: torch.dtype, steps: int) -> HalfTwin:
    """What the Trainer should arrive at, by one process with fp32 masters."""
    twin = HalfTwin(models.build("llama"), lambda model: make_optimizer("adamw", model), dtype)
    for step in range(steps):
        # A DistributedSampler deals rows out in turn.
        rows = models.batch("llama", step)
        twin.backward(rows, dist.get_world_size(), part=lambda data, rank, n: {k: v[rank::n] for k, v in data.items()})
        twin.step()
    return twin


@cases.at(1, 3)
def bf16_mixed_trains_as_one_process_with_fp32_masters(stage: int) -> None:
    expected = half_twin(torch.bfloat16, STEPS).masters.state_dict()
    by_trainer = trainer(f"zero{stage}", precision="bf16-mixed")
    by_strategy = trainer(lightning_zero.ZeroStrategy(stage=stage, precision="bf16-mixed"))
    by_both = trainer(lightning_zero.ZeroStrategy(stage=stage), precision="bf16-mixed")
    for run in (by_trainer, by_strategy, by_both):
        assert run.precision == "bf16-mixed"
        module = Module("llama", "adamw")
        run.fit(module, loader("llama", STEPS))
        for name, value in module.model.state_dict().items():
            assert value.dtype == torch.float32 and torch.equal(value, expected[name]), name


@cases.at(1, 3)
def fp16_with_a_loss_scale_that_checkpoints_keep(stage: int) -> None:
    class Watch(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            assert next(self.parameters()).dtype == torch.float16
            self.scales = [*getattr(self, "scales", []), self.trainer.precision_plugin.scaler.get_scale()]

    def run(first_scale: float, **settings: Any) -> pl.Trainer:
        plugin = lightning_zero.ZeroPrecision("16-mixed", init_scale=first_scale, growth_interval=2)
        return trainer(f"zero{stage}", plugins=plugin, max_epochs=2, gradient_clip_val=0.5, **settings)

    path = folder()
    saver = ModelCheckpoint(path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    module = Watch("llama", "adamw")
    run(2.0**8, callbacks=[saver], enable_checkpointing=True).fit(module, loader("llama", 2))
    assert module.scales == [2.0**8, 2.0**9, 2.0**9, 2.0**10]
    resumed = Watch("llama", "adamw", seed=1)
    run(2.0).fit(resumed, loader("llama", 2), ckpt_path=f"{path}/step=2.ckpt", weights_only=False)
    assert resumed.scales == [2.0**9, 2.0**10]  # not from 2.0 on: the checkpoint's scale counts
    for name, value in module.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


@cases.at(2, 3)
def offloaded_shards_train_the_same(stage: int) -> None:
    expected = plain("llama", "adamw", STEPS, norm=0.1)
    with_name = trainer(f"zero{stage}_offload", gradient_clip_val=0.1)
    with_option = trainer(lightning_zero.ZeroStrategy(stage=stage, offload="optimizer"), gradient_clip_val=0.1)
    with tempfile.TemporaryDirectory() as directory:
        disk = Offload(optimizer="disk", params="disk" if stage == 3 else "device", directory=directory)
        on_disk = trainer(lightning_zero.ZeroStrategy(stage=stage, offload=disk), gradient_clip_val=0.1)
        for run in (with_name, with_option, on_disk):
            module = Module("llama", "adamw")
            run.fit(module, loader("llama", STEPS))
            check_run(module, expected, weights=5e-5)


@cases.at(1, 3)
def pure_half_and_double_cast_inputs(stage: int) -> None:
    class Float(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = models.build("mlp")

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            self.seen = {batch["input"].dtype, self.net[0].weight.dtype, torch.ones(1).dtype}
            return models.loss(self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for precision, dtype in (("bf16-true", torch.bfloat16), ("16-true", torch.float16), ("64-true", torch.float64)):
        module = Float()
        before = [param.detach().clone() for param in module.parameters()]
        trainer(f"zero{stage}", precision=precision).fit(module, loader("mlp", 2))
        assert module.seen == {dtype}
        assert torch.get_default_dtype() == torch.float32
        assert largest_difference((p.float() for p in module.parameters()), before) > 0


@cases.at(1, 3)
def a_run_that_only_skips_ends_with_the_reason(stage: int) -> None:
    class Overflows(Module):
        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self(**batch) * (float("inf") if dist.get_rank() == 1 else 1.0)

    policy = MixedPrecision(param=torch.float16, max_skips=3)
    run = trainer(f"zero{stage}", plugins=lightning_zero.ZeroPrecision("16-mixed", policy=policy))
    with pytest.raises(RuntimeError, match=r"3 steps in a row were skipped.*loss scale 16384"):
        run.fit(Overflows(), loader("llama", STEPS))


@cases.at(1, 3)
def a_skipped_step_moves_the_counters_that_lightnings_own_amp_moves(stage: int) -> None:
    """`global_step` and schedulers count attempts, the optimizer what it did, the report what was skipped."""

    class Overflows(Module):
        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self(**batch) * (float("inf") if dist.get_rank() == 1 and index == 1 else 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return [optimizer], [{"scheduler": self.scheduler, "interval": "step"}]

        def on_train_end(self) -> None:
            self.skipped = self.trainer.strategy.engine.report().skipped

    module = Overflows("llama", "adamw")
    run = trainer(f"zero{stage}", plugins=lightning_zero.ZeroPrecision("16-mixed"))
    run.fit(module, loader("llama", 3))
    assert (run.global_step, module.scheduler.last_epoch, module.skipped) == (3, 3, 1)
    assert {int(entry["step"]) for entry in run.optimizers[0].state.values()} == {2}


@cases.parametrize()
def test_the_trainer_works_as_ever(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)


def test_names_are_registered() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    assert {"zero1", "zero2", "zero3"} <= set(StrategyRegistry.available_strategies())
    assert "parameters" in StrategyRegistry["zero3"]["description"]


def test_two_precisions_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="Give one of them"):
        pl.Trainer(
            accelerator="cpu", devices=2, strategy=lightning_zero.ZeroStrategy(precision="bf16-true"),
            precision="bf16-mixed", logger=False,
        )  # fmt: skip


def test_a_precision_plugin_without_a_counterpart_is_refused() -> None:
    class Other(Precision):
        pass

    with pytest.raises(ValueError, match=r"Other.*ZeroPrecision"):
        pl.Trainer(accelerator="cpu", devices=2, strategy="zero3", plugins=Other(), logger=False)


def test_the_environment_is_as_it_was() -> None:
    assert "TORCHELASTIC_RUN_ID" not in os.environ
