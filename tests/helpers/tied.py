"""A small model with what imports get wrong: a tied head, a frozen layer, a buffer, odd sizes, two parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 11


class Tied(nn.Module):
    """117 trained elements, which no number of ranks divides."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 5)
        self.body = nn.Linear(5, 7)
        self.base = nn.Linear(7, 5).requires_grad_(False)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5, 0.5, 1.0, 1.0, 2.0]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.base(torch.tanh(self.body(x))) * self.scale.to(x.dtype)
        return self.head(self.norm(x))


def build(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Decay on matrices alone."""
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    matrices = [param for name, param in trained if not name.endswith("bias") and "norm" not in name]
    vectors = [param for name, param in trained if name.endswith("bias") or "norm" in name]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def batch(step: int, rank: int = 0, world_size: int = 1) -> Tensor:
    """A rank's rows of a step's twelve."""
    rows = torch.randint(0, VOCAB, (12, 6), generator=torch.Generator().manual_seed(step))
    return rows.chunk(world_size)[rank]


def loss(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
