"""`Trainer(strategy="zero1" | "zero2" | "zero3")`: translates Lightning's calls into the engine's."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from lightning_zero import checkpoint as sharded
from lightning_zero.precision import ZeroPrecision
from zero_core import (
    MixedPrecision,
    Offload,
    ZeroConfig,
    ZeroEngine,
    ZeroStage,
    async_save_checkpoint,
    deferred_loading,
    engine_of,
    load_checkpoint,
    save_checkpoint,
    shard,
)
from zero_core.collectives import destroy_process_groups_at_exit, raising_together
from zero_core.sharded_state import ModelState, OptimizerState


class ZeroStrategy(DDPStrategy):
    """ZeRO in Lightning. Ranks, launching and metric reduction are DDP's; model and optimizers are the engine's.

    Works on CPU (gloo) and CUDA (NCCL), launched by Lightning or torchrun, on one or several nodes. `engine` is there from
    set-up to teardown, for `full_params`, `full_grad` and `report`.

    Args:
        stage: 1, 2 or 3.
        unit_classes: see `zero_core.ZeroConfig`; likewise the next three.
        unit_numel: elements from which a leaf is a unit.
        prefetch_bytes: bytes gathered ahead.
        local_accumulation: where gradients wait under `accumulate_grad_batches`.
        precision: a `zero_core.MixedPrecision` or its name, instead of `Trainer(precision=...)`.
        offload: "optimizer", "all" (stage 3: the weights' shards too), or a `zero_core.Offload`.
        save_format: "sharded": checkpoints are directories into which each rank writes its part; they load at any number
            of ranks and stage. "full": one plain Lightning file, for which rank 0 gathers everything. Both are read.
        accelerator: this and the following are Lightning's own (see `DDPStrategy`).
        parallel_devices: devices of this node's processes.
        cluster_environment: how ranks find each other.
        checkpoint_io: how checkpoint files are written and read.
        precision_plugin: a `ZeroPrecision`; the Trainer makes one of `precision=...`.
        process_group_backend: torch.distributed backend; `None` for gloo on CPU and NCCL on CUDA.
        timeout: of collectives.
        start_method: how Lightning starts the other processes of a node.

    Raises:
        ValueError: a setting is out of range.
    """

    strategy_name = "zero"

    def __init__(
        self,
        stage: Literal[1, 2, 3] | ZeroStage = 3,
        unit_classes: tuple[type[torch.nn.Module] | str, ...] = (),
        unit_numel: int = ZeroConfig.unit_numel,
        prefetch_bytes: int | None = None,
        local_accumulation: bool | None = None,
        precision: MixedPrecision | str | None = None,
        offload: Offload | str | None = None,
        save_format: Literal["sharded", "full"] = "sharded",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        if save_format not in ("sharded", "full"):
            raise ValueError(f"expected save_format='sharded' or 'full', got {save_format!r}.")
        self.save_format = save_format
        self.config = ZeroConfig(
            stage=stage,
            unit_classes=unit_classes,
            unit_numel=unit_numel,
            prefetch_bytes=prefetch_bytes,
            local_accumulation=local_accumulation,
            precision=precision,
            offload=offload,
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._engine: ZeroEngine | None = None
        self._closed: ZeroEngine | None = None  # after a run, for a checkpoint of how it ended
        self._ended: dict[str, OptimizerState] = {}  # of its optimizers
        self._failed = False
        self._opened: sharded.Opened | None = None  # from `load_checkpoint` until its state is handed out
        self._save: Future[None] | None = None  # the latest one that goes on beside training
        self._superseded: list[str | Path] = []  # to be removed when that one is complete

    # -- what Lightning sets ---------------------------------------------------------------------------------------

    @property
    def engine(self) -> ZeroEngine:
        """The engine of the model in training.

        Raises:
            RuntimeError: before set-up or after teardown.
        """
        if self._engine is None:
            raise RuntimeError("the strategy has an engine only while the Trainer runs (from setup to teardown).")
        return self._engine

    @property
    def precision_plugin(self) -> Precision:
        """The precision plugin: Lightning's own are replaced, since they would clip by local norms."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None
        if plugin is None:  # under construction: a plugin of the strategy's would keep the Trainer from making one
            return
        own = ZeroPrecision.replacing(plugin)
        policy = self.config.mixed_precision
        if policy is not None and own.policy not in (None, policy):
            raise ValueError(
                f"the strategy says precision={policy} and the Trainer precision={own.precision!r}. Give one of them."
            )
        self._precision_plugin = own if own.policy == policy or policy is None else ZeroPrecision(policy=policy)

    # -- set-up and teardown ---------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Joins the process group."""
        super().setup_environment()
        destroy_process_groups_at_exit()

    def setup(self, trainer: pl.Trainer) -> None:
        """Shards the module, then builds and binds its optimizers (when fitting). All ranks."""
        if self.accelerator is None or self.model is None or self.lightning_module is None:
            raise AssertionError("Lightning calls setup after connect")
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._closed, self._ended = None, {} if fitting else self._ended
        if fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        self._failed = False
        plugin = self.precision_plugin
        if not isinstance(plugin, ZeroPrecision):
            raise AssertionError("the setter takes no other")
        config = dataclasses.replace(self.config, precision=plugin.policy)
        self._engine = shard(self.model, config, device=self.root_device)
        self.lightning_module.to(self.root_device)  # the rest: metrics, and the module's idea of its device
        if fitting:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                self._engine.bind(optimizer)
        self.setup_precision_plugin()
        plugin.attach(self._engine)

    def on_exception(self, exception: BaseException) -> None:
        """Remembers that ranks may be at different places, so that teardown sends nothing."""
        self._failed = True

    def teardown(self) -> None:
        """Leaves a plain, whole module behind, as DDP does, where the host's memory allows."""
        engine, self._engine = self._engine, None
        if isinstance(self.precision_plugin, ZeroPrecision):
            self.precision_plugin.attach(None)
        if engine is None or self._failed:
            self._teardown_rest(move_module=False)
            return
        self._finish_save()
        self._keep_for_checkpoints(engine)
        whole = not self.config.zero_stage.shards_parameters or self._all_ranks_have_room(engine)
        if whole:
            engine.close()
        else:
            rank_zero_info(
                "The module stays sharded: this host's memory does not hold it whole once per process. Use "
                "`ZeroEngine.full_state_dict` while the Trainer runs, or a checkpoint."
            )
        self._teardown_rest(move_module=whole)

    def _keep_for_checkpoints(self, engine: ZeroEngine) -> None:
        """Keeps what `Trainer.save_checkpoint` writes after the run; optimizers keep these tensors anyway."""
        self._closed = engine
        fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        for key, optimizer in self._optimizers_by_key().items() if fitting else ():
            state = engine.optimizer_state(optimizer)
            # Lightning moves the optimizer's own off the device.
            self._ended[key] = state if self.root_device.type == "cpu" else state.copy()

    def _teardown_rest(self, move_module: bool) -> None:
        if self.lightning_module is not None and self.lightning_module._trainer is not None and self._layer_sync:
            if self.model is not None and self.lightning_module._trainer.state.fn == TrainerFn.FITTING:
                self.model = self._layer_sync.revert(self.model)
        if move_module:
            Strategy.teardown(self)
            return
        _optimizers_to_device(self.optimizers, torch.device("cpu"))
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _all_ranks_have_room(self, engine: ZeroEngine) -> bool:
        needed = sum(p.numel() * p.element_size() for p in engine.model.parameters()) * self.num_processes
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return self.reduce_boolean_decision(needed < free / 2)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """`configure_model` builds on the meta device; set-up creates the weights a unit at a time.

        What it loads with transformers' `from_pretrained` stays in its files until then, and each rank reads its part.
        """
        with torch.device("meta"), deferred_loading():
            yield

    # -- steps -----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's `training_step`; parameters it reads directly are gathered."""
        with self.precision_plugin.train_step_context():
            return self.engine.run(self._module.training_step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's `validation_step`."""
        with self.precision_plugin.val_step_context():
            return self.engine.run(self._module.validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's `test_step`."""
        with self.precision_plugin.test_step_context():
            return self.engine.run(self._module.test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's `predict_step`."""
        with self.precision_plugin.predict_step_context():
            return self.engine.run(self._module.predict_step, *args, **kwargs)

    def block_backward_sync(self) -> Any:
        """Lightning's context around micro-batches that end no step."""
        return self.engine.no_sync()

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Nothing to prepare: DDP's own would look for its wrapper."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Nothing to finish."""

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights and optimizer state are loaded into shards, so after set-up."""
        return True

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes whole files and removes checkpoints."""
        if self._checkpoint_io is None:
            self._checkpoint_io = sharded.CheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO) and self._checkpoint_io.checkpoint_io is None:
            self._checkpoint_io.checkpoint_io = sharded.CheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state; for `save_format="full"` all of it on rank 0, `{}` elsewhere. All ranks."""
        if self._is_plain_again:
            return sharded.plain_state(self._module) if self.save_format == "sharded" or self.is_global_zero else {}
        if self.save_format == "sharded":
            return sharded.to_dict(self._latest.model_state())
        return self._latest.full_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole optimizer state in plain torch's layout, on rank 0. All ranks. Sharded saves take it later."""
        if self.save_format == "sharded":
            return {}
        if self._is_plain_again:
            rank_zero_warn("The run is over, and a whole checkpoint of it has no optimizer state: save before it ends.")
            return {}
        return self._latest.full_optimizer_state_dict(getattr(optimizer, "optimizer", optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint that appears when it is complete. All ranks.

        With `plugins=AsyncCheckpointIO()` the files are written beside training.

        Raises:
            ValueError: a callback, the module or a scheduler keeps a value that is not plain (sharded format).
            Exception: writing failed; on all ranks. Of a save beside training: at the next one, or at the end.
        """
        if self.save_format == "full":
            with raising_together():
                super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        with raising_together():
            rest = sharded.rest_of(checkpoint)
        optimizers = self._optimizers_by_key() if "optimizer_states" in checkpoint else {}
        engine = self._latest
        model = sharded.from_dict(checkpoint["state_dict"])
        states: dict[str, ModelState | OptimizerState] = {"model": model, **self._ended}
        if isinstance(self.checkpoint_io, AsyncCheckpointIO):
            self._finish_save()
            self._save = async_save_checkpoint(filepath, engine, optimizers, rest, states=states)
        else:
            save_checkpoint(filepath, engine, optimizers, rest, states=states)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint; where a save is on its way beside training, once that one is complete. All ranks."""
        if self._save is not None:
            self._superseded.append(filepath)
        elif self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    def _finish_save(self) -> None:
        """Waits for a save beside training; what it supersedes is kept until it is complete."""
        save, self._save = self._save, None
        superseded, self._superseded = self._superseded, []
        if save is not None:
            save.result()
        for path in superseded:
            self.remove_checkpoint(path)

    def _optimizers_by_key(self) -> dict[str, Optimizer]:
        return {f"optimizer_{n}" if n else "optimizer": optimizer for n, optimizer in enumerate(self.optimizers)}

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Opens a directory of any number of ranks and stage, or a file of Lightning's. All ranks."""
        self._finish_save()
        if not sharded.is_directory(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        with raising_together():
            self._opened = sharded.Opened.at(checkpoint_path)
        return self._opened.as_lightning()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the weights, and from a directory the optimizers' state with them; each rank its part. All ranks."""
        opened, self._opened = self._opened, None
        if opened is None:
            self.engine.load_full_state_dict(checkpoint["state_dict"], strict=strict)
            return
        stored, own = opened.named(checkpoint["state_dict"])
        resuming = self._module.trainer.state.fn == TrainerFn.FITTING and "optimizer_states" in checkpoint
        optimizers = dict(zip(stored.optimizers, self.optimizers, strict=True)) if resuming else {}
        load_checkpoint(stored, self.engine, optimizers, strict=strict and not own)
        if own:
            self.engine.load_full_state_dict(own, strict=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads whole optimizer states of a file, from any world size or a plain run; each rank keeps its part."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if state:  # a directory's came with the weights
                self.engine.load_full_optimizer_state_dict(optimizer, state)

    @property
    def _latest(self) -> ZeroEngine:
        """The engine of the run, also when that is over."""
        return self.engine if self._closed is None else self._closed

    @property
    def _is_plain_again(self) -> bool:
        return self._closed is not None and engine_of(self._module) is None

    @property
    def _module(self) -> pl.LightningModule:
        if self.lightning_module is None:
            raise AssertionError("Lightning connects the module before it runs")
        return self.lightning_module

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers `zero1`, `zero2` and `zero3`, and `zero2_offload` and `zero3_offload` with shards in host memory."""
        for stage in ZeroStage:
            description = f"ZeRO stage {stage.value}: partitions {_PARTITIONED[stage]}"
            strategy_registry.register(f"zero{stage.value}", cls, description=description, stage=stage.value)
        for stage, offload in ((ZeroStage.GRADIENTS, "optimizer"), (ZeroStage.PARAMETERS, "all")):
            description = f"ZeRO stage {stage.value}: partitions {_PARTITIONED[stage]}, in host memory"
            name = f"zero{stage.value}_offload"
            strategy_registry.register(name, cls, description=description, stage=stage.value, offload=offload)


_PARTITIONED = {
    ZeroStage.OPTIMIZER_STATE: "optimizer state",
    ZeroStage.GRADIENTS: "optimizer state and gradients",
    ZeroStage.PARAMETERS: "optimizer state, gradients and parameters",
}

if "zero3" not in StrategyRegistry:
    ZeroStrategy.register_strategies(StrategyRegistry)
