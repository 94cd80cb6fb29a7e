"""A LightningCLI program, as a user writes one: `python cli.py fit --config run.yaml`."""

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero  # noqa: F401


class Net(pl.LightningModule):
    def __init__(self, width: int = 7, fail_on_rank: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))
        self.fail_on_rank = fail_on_rank

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if index == 1 and self.global_rank == self.fail_on_rank:
            raise KeyError("a bad sample on one rank")
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        rows = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(rows), batch_size=4)

    def on_train_end(self) -> None:
        engine = self.trainer.strategy.engine
        state = engine.full_state_dict(all_ranks=True)
        total = sum(value.abs().sum() for value in state.values())
        text = f"rank={engine.rank}/{engine.world_size} stage={engine.config.zero_stage.value} weights={total:.6f}\n"
        with open(os.environ["RESULT"], "a") as file:
            file.write(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    LightningCLI(Net, seed_everything_default=0, save_config_callback=None)
