"""Lightning modules over the tiny models, and how to run a Trainer inside a group of ranks that exists already."""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.helpers import models
from tests.helpers.twin import decay_groups

GLOBAL_BATCH = 12


class Rows(Dataset[Any]):
    """The rows of several steps' batches, in order."""

    def __init__(self, family: str, steps: int) -> None:
        whole = [models.batch(family, step, GLOBAL_BATCH) for step in range(steps)]
        self.data = {key: torch.cat([data[key] for data in whole]) for key in whole[0]}

    def __len__(self) -> int:
        return len(next(iter(self.data.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[index] for key, value in self.data.items()}


def loader(family: str, steps: int, micro_batches: int = 1) -> DataLoader[Any]:
    """Without shuffling, ranks together see the same batches as one process, whatever their number."""
    rows, world_size = Rows(family, steps), dist.get_world_size()
    sampler = DistributedSampler(rows, shuffle=False)
    return DataLoader(rows, batch_size=GLOBAL_BATCH // world_size // micro_batches, sampler=sampler)


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(decay_groups(model), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(decay_groups(model), lr=1e-3, foreach=True)


class Module(pl.LightningModule):
    """A tiny model with the usual steps; keeps the mean loss of each training step."""

    def __init__(self, family: str = "llama", optimizer: str = "sgd", seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = models.build(family, seed)
        self.losses: list[float] = []

    def forward(self, **data: Tensor) -> Tensor:
        return models.loss(self.model, data)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self(**batch)
        mean = self.all_gather(loss.detach()).mean()
        self.losses.append(mean.item())
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("val_loss", self(**batch), sync_dist=True)

    def test_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("test_loss", self(**batch), sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self(**batch)

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.hparams["optimizer"], self.model)

    def whole_state(self) -> dict[str, Tensor]:
        """The weights once the module is plain again."""
        return {name: value.detach().clone() for name, value in self.state_dict().items()}


def trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    """A quiet Trainer over the ranks of this group."""
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    world_size = dist.get_world_size()
    # What torchrun sets: the ranks exist, Lightning launches nothing.
    os.environ.update(TORCHELASTIC_RUN_ID="tests", GROUP_RANK="0", LOCAL_WORLD_SIZE=str(world_size))
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "devices": world_size, "strategy": strategy, "max_epochs": 1, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "num_sanity_val_steps": 0, "use_distributed_sampler": False,
    }  # fmt: skip
    return pl.Trainer(**{**defaults, **settings})
