"""Accelerators inside a group of ranks that exists already, and the loop that scripts write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader

from accelerate_zero import Accelerator, ZeroPlugin
from tests.helpers import models
from tests.helpers.lightning import GLOBAL_BATCH, Rows


def accelerator(stage: int, plugin: dict[str, Any] | None = None, **settings: Any) -> Accelerator:
    """A new Accelerator; Accelerate itself keeps one state a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.update(LOCAL_WORLD_SIZE=str(dist.get_world_size()), OMP_NUM_THREADS="1")
    return Accelerator(zero_plugin=ZeroPlugin(stage=stage, unit_numel=3000, **(plugin or {})), **settings)


def loader(family: str, steps: int, micro_batches: int = 1) -> DataLoader[Any]:
    """Accelerate deals batches out in turn: ranks together see the whole batches of `models.batch`."""
    return DataLoader(Rows(family, steps), batch_size=GLOBAL_BATCH // dist.get_world_size() // micro_batches)


def steps(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    scheduler: Any = None,
    clip: Callable[[], Any] | None = None,
    after: Callable[[], Any] | None = None,
) -> Iterator[float]:
    """The usual loop; yields each step's mean loss over ranks."""
    for batch in loader:
        with accelerator.accumulate(model):
            loss = models.loss(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip is not None:
                clip()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if after is not None:
                after()
            optimizer.zero_grad()
        yield accelerator.gather(loss.detach().reshape(1)).mean().item()
