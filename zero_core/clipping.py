"""Clipping by the norm over all ranks' shards, and by value."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zero_core.collectives import Collectives


def global_norm(grads: Sequence[Tensor], norm_type: float, collectives: Collectives) -> Tensor:
    """The norm of the whole gradient, from each rank's shards of it. All ranks must call.

    A shared parameter counts once and padding not at all, since both hold for shards. The partial norms are combined in
    rank order, so the result has the same bits on every rank.

    Args:
        grads: this rank's shards, any shapes.
        norm_type: order of the norm; `inf` for the largest magnitude.
        collectives: the ranks.

    Returns:
        0-dim fp32 (fp64 for fp64 gradients) tensor on the gradients' device.
    """
    dtype = torch.float64 if any(g.dtype in (torch.float64, torch.complex128) for g in grads) else torch.float32
    if grads:
        local = torch.nn.utils.get_total_norm(grads, norm_type).to(dtype).to(collectives.device)
    else:
        local = torch.zeros((), dtype=dtype, device=collectives.device)
    parts = collectives.combine(local)
    if math.isinf(norm_type):
        return parts.max() if norm_type > 0 else parts.min()
    return parts.pow(norm_type).sum().pow(1.0 / norm_type)


def clip_by_norm(params: Sequence[nn.Parameter], max_norm: float, total_norm: Tensor) -> None:
    """Scales the gradients of `params` so that a gradient of norm `total_norm` has at most `max_norm`."""
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total_norm)


def clip_by_value(params: Sequence[nn.Parameter], clip_value: float) -> None:
    """Clamps every element of the gradients of `params` to ±`clip_value`."""
    torch.nn.utils.clip_grad_value_(params, clip_value)
