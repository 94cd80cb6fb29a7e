"""The transformers Trainer over the tiny models, inside a group of ranks that exists already."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

from accelerate_zero import ZeroPlugin, ZeroTrainerMixin
from tests.helpers import models


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """As a user writes it."""


class ZeroSeq2SeqTrainer(ZeroTrainerMixin, Seq2SeqTrainer):
    """As a user writes it."""


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of token ids that are their own labels."""

    def __init__(self, rows: int, length: int = 9, seed: int = 0) -> None:
        self.ids = models.random_tokens(rows, length, seed=seed)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def arguments(folder: str, kind: type[TrainingArguments] = TrainingArguments, **settings: Any) -> Any:
    """Quiet ones: four steps of eight rows, each step's loss logged."""
    os.environ.update(LOCAL_WORLD_SIZE=str(dist.get_world_size()), OMP_NUM_THREADS="1")
    defaults: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "report_to": "none", "max_steps": 4, "logging_steps": 1,
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-3, "disable_tqdm": True,
        "save_strategy": "no", "seed": 0, "dataloader_pin_memory": False,
    }  # fmt: skip
    return kind(**{**defaults, **settings})


def trainer(stage: int, folder: str, family: str = "llama", seed: int = 0, model: Any = None, **settings: Any) -> Any:
    """A Trainer at a stage; stage 0 is transformers' own, with DDP."""
    model = models.build(family, seed) if model is None else model
    common = {"train_dataset": Rows(64), "eval_dataset": Rows(10, seed=1)}
    if stage == 0:
        return Trainer(model=model, args=arguments(folder, **settings), **common)
    plugin = ZeroPlugin(stage=stage, unit_numel=3000)
    return ZeroTrainer(model=model, args=arguments(folder, **settings), zero_plugin=plugin, **common)


def losses(run: Any) -> list[float]:
    """The losses a Trainer logged."""
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]
