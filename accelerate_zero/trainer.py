"""The transformers `Trainer` on sharded models: what differs from its own steps, as functions around them.

Each function is named after the method it surrounds and takes Trainer's own as `stock`. `ZeroTrainerMixin` puts them in by
inheritance, `accelerate_zero.activate` around the methods of `Trainer` itself.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from accelerate_zero.accelerator import Accelerator
from accelerate_zero.optimizer import ZeroOptimizer
from accelerate_zero.plugin import ZeroPlugin
from accelerate_zero.staging import aside_of, keep_only, rotate, staging
from zero_core import deferred_loading, engine_of, load_checkpoint, save_checkpoint
from zero_core.checkpoint import random_state, set_random_state
from zero_core.collectives import raising_together
from zero_core.sharded_state import ModelState

Stock = Callable[..., Any]

# In a checkpoint. With this name Trainer by itself asks for optimizer.pt, and does not start afresh without a word.
_OPTIMIZER = "optimizer_zero"
_SCHEDULER = "scheduler.pt"


class ZeroTrainerMixin:
    """Makes a `Trainer` (or one derived from it, like TRL's `SFTTrainer`) train sharded models.

    `class MyTrainer(ZeroTrainerMixin, Trainer)`. Everything else stays: arguments, callbacks, checkpoints that
    `from_pretrained` reads, `resume_from_checkpoint` at any number of ranks.

    Args:
        *args: the Trainer's.
        zero_plugin: ZeRO's settings; `None` for what the variables `ACCELERATE_ZERO_*` say, or the defaults.
        **kwargs: the Trainer's.
    """

    def __init__(self, *args: Any, zero_plugin: ZeroPlugin | None = None, **kwargs: Any) -> None:
        self.zero_plugin = zero_plugin
        super().__init__(*args, **kwargs)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        return _build_accelerator_args(super()._build_accelerator_args, self, **kwargs)  # type: ignore[misc]

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator one of ours."""
        create_accelerator_and_postprocess(super().create_accelerator_and_postprocess, self)  # type: ignore[misc]

    def _move_model_to_device(self, *args: Any) -> None:
        _move_model_to_device(super()._move_model_to_device, self, *args)  # type: ignore[misc]

    def _get_output_dir(self, *args: Any, **kwargs: Any) -> str:
        return _get_output_dir(super()._get_output_dir, self, *args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        _save_checkpoint(super()._save_checkpoint, self, model, trial)  # type: ignore[misc]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        _push_from_checkpoint(super()._push_from_checkpoint, self, checkpoint_folder)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        _save(super()._save, self, output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        _save_optimizer_and_scheduler(super()._save_optimizer_and_scheduler, self, output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        _load_optimizer_and_scheduler(super()._load_optimizer_and_scheduler, self, checkpoint)  # type: ignore[misc]

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        _load_from_checkpoint(super()._load_from_checkpoint, self, *args, **kwargs)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        _load_best_model(super()._load_best_model, self)  # type: ignore[misc]

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates a batch; generation goes on until all ranks are done."""
        return prediction_step(super().prediction_step, self, *args, **kwargs)  # type: ignore[misc]


def _build_accelerator_args(stock: Stock, trainer: Any, **kwargs: Any) -> dict[str, Any]:
    trainer._accelerator_args = stock(**kwargs)
    return dict(trainer._accelerator_args)


def create_accelerator_and_postprocess(stock: Stock, trainer: Any) -> None:
    """Replaces the accelerator that the Trainer made by one of ours with the same arguments."""
    stock()
    if not isinstance(trainer.accelerator, Accelerator):
        plugin = getattr(trainer, "zero_plugin", None)
        trainer.accelerator = Accelerator(**trainer._accelerator_args, zero_plugin=plugin)
        trainer.gather_function = functools.partial(
            trainer.accelerator.gather_for_metrics, use_gather_object=trainer.args.eval_use_gather_object
        )


def _move_model_to_device(stock: Stock, trainer: Any, *args: Any) -> None:
    """Nothing: the engine brings the model to the device a unit at a time; whole it may not fit."""


def _get_output_dir(stock: Stock, trainer: Any, *args: Any, **kwargs: Any) -> str:
    return aside_of(trainer) or str(stock(*args, **kwargs))


def _save_checkpoint(stock: Stock, trainer: Any, model: Any, trial: Any) -> None:
    if engine_of(trainer.model) is None or aside_of(trainer) is not None:
        stock(model, trial)
        return
    args, state, run_dir = trainer.args, trainer.state, trainer._get_output_dir(trial)
    target = os.path.join(run_dir, f"checkpoint-{state.global_step}")
    with staging(trainer, run_dir, target):
        stock(model, trial)  # its rotation finds nothing to remove where it writes
    if args.push_to_hub:
        trainer._push_from_checkpoint(target)
    if args.should_save:
        rotate(run_dir, args.save_total_limit, state.best_model_checkpoint)


def _push_from_checkpoint(stock: Stock, trainer: Any, checkpoint_folder: str) -> None:
    if aside_of(trainer) is None:  # else it is not complete, and goes on its way later
        stock(checkpoint_folder)


def _save(stock: Stock, trainer: Any, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
    if state_dict is None and engine_of(trainer.model) is not None:
        state_dict = trainer.accelerator.get_state_dict(trainer.model)
    with raising_together():
        stock(output_dir, state_dict)


def _save_optimizer_and_scheduler(stock: Stock, trainer: Any, output_dir: str) -> None:
    optimizer = trainer.optimizer
    if not isinstance(optimizer, ZeroOptimizer):
        stock(output_dir)
        return
    # The weights are whole, in Hugging Face's files beside it.
    weightless = {"model": ModelState()}
    save_checkpoint(os.path.join(output_dir, _OPTIMIZER), optimizer.engine, optimizer.optimizer, states=weightless)
    with raising_together():
        if trainer.args.should_save:
            torch.save(trainer.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))


def _load_optimizer_and_scheduler(stock: Stock, trainer: Any, checkpoint: str | None) -> None:
    optimizer = trainer.optimizer
    if checkpoint is None or not isinstance(optimizer, ZeroOptimizer):
        stock(checkpoint)
    elif os.path.isdir(sharded := os.path.join(checkpoint, _OPTIMIZER)):
        # Trainer puts the generators where they were itself, and not before it has drawn the order of the rows.
        state = random_state()
        load_checkpoint(sharded, optimizer.engine, optimizer.optimizer, skip=["model"])
        set_random_state(state)
        with raising_together():
            trainer.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True))
    elif any(os.path.isfile(os.path.join(checkpoint, name)) for name in ("optimizer.pt", "optimizer.bin")):
        stock(checkpoint)
    elif trainer.is_world_process_zero():
        warnings.warn(
            f"{checkpoint} has the weights alone: the optimizer and the schedule of its learning rate start afresh. "
            "Checkpoints have both unless save_only_model=True.",
            stacklevel=2,
        )


def _load_from_checkpoint(stock: Stock, trainer: Any, *args: Any, **kwargs: Any) -> None:
    with _loading(trainer.model):
        stock(*args, **kwargs)


def _load_best_model(stock: Stock, trainer: Any) -> None:
    trainer.accelerator.wait_for_everyone()  # for the rank that wrote it
    with _loading(trainer.model):
        stock()
    if trainer.args.should_save and trainer.args.save_total_limit == 1:
        keep_only(trainer.state.best_model_checkpoint)  # as Trainer does next, in a way that can be interrupted


def prediction_step(stock: Stock, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Generation at stage 3: ranks whose sequences are finished go on gathering for the others."""
    engine = engine_of(trainer.model)
    if engine is None or not getattr(trainer.args, "predict_with_generate", False):
        return stock(*args, **kwargs)
    own = {"model", "inputs", "prediction_loss_only", "ignore_keys"}
    given = {key: kwargs.pop(key) for key in list(kwargs) if key not in own} or dict(
        getattr(trainer, "_gen_kwargs", {})
    )
    given.setdefault("synced_gpus", engine.config.zero_stage.shards_parameters)
    return stock(*args, **kwargs, **given)


@contextmanager
def sharded_init() -> Iterator[None]:
    """A context in which `from_pretrained` leaves the weights in their files; `prepare` then reads each rank's part.

    See `zero_core.deferred_loading`. No rank ever holds the whole model.
    """
    import transformers.modeling_utils  # noqa: F401 - for a script that has not yet

    with deferred_loading():
        yield


def _loading(model: Any) -> AbstractContextManager[None]:
    engine = engine_of(model)
    return nullcontext() if engine is None else engine.loading()
