"""Precision plugin of the strategy: clipping by the norm over all ranks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from zero_core import ZeroEngine


class ZeroPrecision(Precision):
    """Full precision, with clipping delegated to the engine: Lightning's own plugin would use each rank's local norm."""

    def __init__(self) -> None:
        super().__init__()
        self._engine: ZeroEngine | None = None

    def attach(self, engine: ZeroEngine | None) -> None:
        """Called by the strategy once the model is sharded (`None` when it no longer is)."""
        self._engine = engine

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clips the gradient of the optimizer's parameters by its global norm. All ranks."""
        self._attached().clip_grad_norm_(clip_val, params=_unwrap(optimizer))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamps the elements of the gradient of the optimizer's parameters. All ranks."""
        self._attached().clip_grad_value_(clip_val, params=_unwrap(optimizer))

    def _attached(self) -> ZeroEngine:
        if self._engine is None:
            raise RuntimeError("ZeroPrecision works only inside a ZeroStrategy, after the model was set up.")
        return self._engine


def _unwrap(optimizer: Any) -> Optimizer:
    """The torch optimizer inside a `LightningOptimizer`."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
