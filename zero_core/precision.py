"""Which dtype a parameter has where: in compute, as a master, in the step, on the wire. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from zero_core.config import MixedPrecision


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of parameters that share them.

    Attributes:
        compute: of the weights in forward and backward.
        master: of this rank's part that outlives a step.
        step: of this rank's part while the optimizer steps, of its gradient and of its optimizer state.
        wire: of gradients on their way to other ranks.
    """

    compute: torch.dtype
    master: torch.dtype
    step: torch.dtype
    wire: torch.dtype

    @property
    def rounds_stochastically(self) -> bool:
        """Whether a step's result is rounded to the master's dtype up or down by chance."""
        return self.step != self.master


def dtypes_of(given: torch.dtype, policy: MixedPrecision | None, uniform: bool) -> Dtypes:
    """The dtypes of trainable parameters.

    Args:
        given: dtype in the user's model.
        policy: the precision policy; `None` for the model's own dtypes.
        uniform: whether all floating-point parameters of the model have the same dtype.
    """
    if policy is None or not given.is_floating_point:
        return Dtypes(given, given, given, given)
    compute = policy.param if uniform else given
    master = policy.master_dtype if compute == policy.param else max(compute, policy.master_dtype, key=_digits)
    step = torch.float32 if policy.rounding == "stochastic" and master == torch.bfloat16 else master
    return Dtypes(compute, master, step, policy.reduce or compute)


def is_uniform(dtypes: Iterable[torch.dtype]) -> bool:
    """Whether the floating-point ones among `dtypes` are all the same."""
    return len({dtype for dtype in dtypes if dtype.is_floating_point}) < 2


def is_half(dtype: torch.dtype) -> bool:
    """Whether `dtype` is floating-point with fewer digits than fp32."""
    return dtype.is_floating_point and dtype.itemsize < 4


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that values of `dtype` are summed in: fp32 for half precision, which loses digits at each addition."""
    return torch.float32 if is_half(dtype) else dtype


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """fp32 `values` as bf16, each rounded up or down so that its expected value stays.

    bf16 is fp32 without its last 16 bits, so adding 16 random bits before dropping them does it; what is not finite
    stays what it is.
    """
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    noisy = ((values.view(torch.int32) + noise) & -65536).view(torch.float32)
    return torch.where(torch.isfinite(values), noisy, values).to(torch.bfloat16)


def _digits(dtype: torch.dtype) -> float:
    return -torch.finfo(dtype).eps
