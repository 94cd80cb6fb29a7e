"""ZeRO in scripts that do not know of it: the only module that changes other libraries' names, and changes them back.

While active, `accelerate.Accelerator` is ours, wherever it was imported, and the methods of transformers' `Trainer` that
differ for sharded models are surrounded by the functions of `accelerate_zero.trainer`. transformers is changed only once
the script has imported it. docs/launch.md says the same to users.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import accelerate
from torch import nn

from accelerate_zero import trainer
from accelerate_zero.accelerator import Accelerator
from accelerate_zero.plugin import VARIABLE_PREFIX
from zero_core import engine_of

_STOCK = accelerate.Accelerator
# What the mixin overrides: each has a function of its name around Trainer's own.
_AROUND_TRAINER = tuple(name for name in vars(trainer.ZeroTrainerMixin) if not name.startswith("__"))
# What was there before, to put back: (object, name, value).
_changed: list[tuple[Any, str, Any]] = []


class _ActiveAccelerator(Accelerator):
    __doc__ = Accelerator.__doc__

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _change_transformers()
        super().__init__(*args, **kwargs)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Shards a model."""
        _change_transformers()
        return super().prepare_model(model, *args, **kwargs)


_ActiveAccelerator.__name__ = _ActiveAccelerator.__qualname__ = "Accelerator"


def activate() -> None:
    """Makes scripts' `accelerate.Accelerator` and transformers' `Trainer` train sharded models.

    The settings are those of `ACCELERATE_ZERO_*`. `accelerate-zero launch` calls this before the script starts, and so does
    `import accelerate_zero` where one of the variables is set. A second call changes nothing.
    """
    if _changed:
        return
    for name, module in list(sys.modules.items()):
        if vars(module).get("Accelerator") is _STOCK and not name.startswith("accelerate_zero"):
            _change(module, "Accelerator", _ActiveAccelerator)
    _change_transformers()


def deactivate() -> None:
    """Undoes `activate`. Objects made meanwhile stay what they are."""
    while _changed:
        owner, name, value = _changed.pop()
        setattr(owner, name, value)


def activate_if_configured() -> None:
    """Activates where a variable asks for ZeRO."""
    if any(name.startswith(VARIABLE_PREFIX) for name in os.environ):
        activate()


def _change_transformers() -> None:
    modules = sys.modules
    if "transformers.trainer" in modules:
        module = modules["transformers.trainer"]
        if module.Accelerator is _STOCK:
            _change(module, "Accelerator", _ActiveAccelerator)
        for name in _AROUND_TRAINER:
            _surround(module.Trainer, name, getattr(trainer, name))
    if "transformers.trainer_seq2seq" in modules:
        _surround(modules["transformers.trainer_seq2seq"].Seq2SeqTrainer, "prediction_step", trainer.prediction_step)
    if "transformers.generation.utils" in modules:
        _surround(modules["transformers.generation.utils"].GenerationMixin, "generate", _generate)


def _surround(owner: type, name: str, around: Callable[..., Any]) -> None:
    stock = owner.__dict__[name]
    if any(changed is owner and attribute == name for changed, attribute, _ in _changed):
        return

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(stock, self), self, *args, **kwargs)

    _change(owner, name, method)


def _generate(stock: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """At stage 3 a rank whose sequences are finished goes on gathering for the others."""
    engine = engine_of(model)
    if engine is not None and engine.config.zero_stage.shards_parameters:
        kwargs.setdefault("synced_gpus", True)
    return stock(*args, **kwargs)


def _change(owner: Any, name: str, value: Any) -> None:
    _changed.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)
