"""Fine-tune the real all-MiniLM-L6-v2 into a BBC news topic classifier with plain Lightning and ZeRO.

    python examples/finetune_minilm.py --strategy zero3 --devices 2

Data order depends on the seed alone, so `ddp`, `zero1`, `zero2` and `zero3` go through the same losses and differ only in
bytes held, bytes sent and time. So do the same job in a plain loop, with Accelerate and with transformers' Trainer
(`finetune_torch.py`, `finetune_accelerate.py`, `finetune_transformers.py`).
"""

import argparse
import json
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import news
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_zero  # noqa: F401  (registers zero1, zero2 and zero3 with Lightning)


class TopicClassifier(L.LightningModule):
    """MiniLM with a new classification head: a LightningModule like any other, without a word about ZeRO.

    Args:
        topics: Their number.
        steps: Training steps, for the learning-rate schedule.
    """

    def __init__(self, topics: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.model = news.build_model(topics)
        self.model.train()  # from_pretrained leaves it in eval mode, and Lightning keeps the mode it finds

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Returns the mean cross-entropy of this rank's rows, a float32 scalar."""
        input_ids, attention_mask, labels = batch
        loss: Tensor = self.model(input_ids, attention_mask, labels=labels).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Adds to the accuracy over all ranks' articles."""
        input_ids, attention_mask, labels = batch
        hits = self.model(input_ids, attention_mask).logits.argmax(-1) == labels
        self.log("accuracy", hits.float().mean(), batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Returns AdamW with a linear warm-up and decay."""
        optimizer, schedule = news.build_optimizer(self.model, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Articles(L.LightningDataModule):
    """Deals the articles out to the ranks in turn: a step's are the same for any number of ranks.

    Lightning's own sampler would shuffle them a second time, in an order of its own.

    Args:
        train: Training set, shuffled already.
        held_out: Held-out set.
    """

    def __init__(self, train: TensorDataset, held_out: TensorDataset) -> None:
        super().__init__()
        self.train, self.held_out = train, held_out

    def _loader(self, data: TensorDataset) -> DataLoader[Any]:
        ranks = self.trainer.world_size
        sampler = DistributedSampler(data, ranks, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, news.GLOBAL_BATCH // ranks, sampler=sampler)

    def train_dataloader(self) -> DataLoader[Any]:
        """Returns this rank's batches."""
        return self._loader(self.train)

    def val_dataloader(self) -> DataLoader[Any]:
        """Returns this rank's batches."""
        return self._loader(self.held_out)


Bytes = tuple[str, int, int]  # a row of the table: its name, the bytes counted, the bytes by the formula


def count_bytes(trainer: L.Trainer, module: L.LightningModule) -> tuple[list[Bytes], list[Bytes]]:
    """Returns what this rank holds and what it sent in the last step; for plain DDP only what it holds."""
    engine = getattr(trainer.strategy, "engine", None)
    if engine is not None:
        report = engine.report()
        held = [(row.kind, row.bytes, row.formula) for row in report.held]
        return held, [(f"{row.kind}, {row.calls} calls", row.bytes, row.formula) for row in report.sent]
    weights = list(module.parameters())
    gradients = [p.grad for p in weights if p.grad is not None]
    moments = [t for state in trainer.optimizers[0].state.values() for t in state.values() if t.ndim]
    numel = sum(p.numel() for p in weights)
    kinds = ("parameters", weights, 4), ("gradients", gradients, 4), ("optimizer", moments, 8)
    return [(kind, sum(t.nbytes for t in tensors), size * numel) for kind, tensors, size in kinds], []


class Observer(Callback):
    """Collects each step's loss and seconds and, after the last step, the bytes held and sent."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.held: list[Bytes] = []
        self.sent: list[Bytes] = []

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Starts the clock."""
        self.clock = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes the step; fetching the loss also makes the clock wait for a GPU."""
        self.losses.append(float(outputs["loss"]))
        now = time.perf_counter()
        self.seconds.append(now - self.clock)
        self.clock = now
        if trainer.is_last_batch:  # now, since validation sends bytes too
            self.held, self.sent = count_bytes(trainer, module)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Averages the losses over all ranks, each of which must call this; their shares are equal."""
        local = torch.tensor(self.losses, device=module.device)
        self.losses = trainer.strategy.reduce(local, reduce_op="mean").tolist()


def print_table(args: argparse.Namespace, numel: int, accuracy: float, step_seconds: float, observer: Observer) -> None:
    """Prints what this rank measured beside the paper's formulas."""
    run = f"{args.strategy} on {args.devices} rank(s), {args.steps} steps of {news.GLOBAL_BATCH} articles"
    table = Table(title=run)
    for heading in ("", "measured", "formula"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("held-out accuracy", f"{accuracy:.4f}")
    table.add_row("final loss", f"{observer.losses[-1]:.4f}")
    table.add_row("step time, median", f"{1e3 * step_seconds:.0f} ms")
    for verb, rows in (("held by this rank", observer.held), ("sent in a step", observer.sent)):
        table.add_section()
        for kind, measured, formula in rows:
            table.add_row(f"{verb}: {kind}", f"{measured / 2**20:.2f} MiB", f"{formula / 2**20:.2f} MiB")
    console = Console()
    console.print(table)
    console.print(
        f"Formulas: Rajbhandari et al. (2020), Ψ = {numel:,} weights, N = {args.devices} ranks;\n"
        "in fp32 4Ψ parameters, 4Ψ gradients, 8Ψ moments, each / N where partitioned."
    )


def main() -> None:
    """Trains, validates and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="zero3", help="zero1, zero2, zero3 or ddp (default: zero3)")
    parser.add_argument("--devices", type=int, default=2, choices=(1, 2, 4, 8, 16), help="ranks (default: 2)")
    parser.add_argument("--steps", type=int, default=80, help="training steps (default: 80)")
    parser.add_argument("--held-out", type=int, default=25, help="batches of 16 to measure accuracy on (default: 25)")
    parser.add_argument("--seed", type=int, default=0, help="of split, order and new head (default: 0)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()

    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the rows are tensors in memory
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # between Lightning and torch
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.devices))  # ranks share one machine's cores
    L.seed_everything(args.seed)  # the head must start equal on all ranks

    train, held_out, topics = news.load_articles(args.steps, args.seed, args.held_out)
    module = TopicClassifier(topics, args.steps)
    numel = sum(p.numel() for p in module.parameters())
    observer = Observer()
    trainer = L.Trainer(
        strategy=args.strategy,
        devices=args.devices,
        accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu",
        precision="32-true",
        max_epochs=1,
        gradient_clip_val=news.CLIP,
        callbacks=[observer, RichProgressBar()],
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Articles(train, held_out))

    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["accuracy"])
        step_seconds = statistics.median(observer.seconds)
        print_table(args, numel, accuracy, step_seconds, observer)
        if args.json:
            numbers = {"accuracy": accuracy, "losses": observer.losses, "step_seconds": step_seconds}
            args.json.write_text(json.dumps(numbers | {"held": observer.held, "sent": observer.sent}))


if __name__ == "__main__":
    main()
