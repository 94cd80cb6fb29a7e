"""Loss scaling for fp16: torch's sharded scaler, over gradients that live in shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from zero_core.engine import ZeroEngine, engine_of


class ZeroGradScaler(ShardedGradScaler):
    """`torch.amp.GradScaler` for bound optimizers: ranks skip a step together, and it is said aloud.

    Use it as torch's own: `scaler.scale(loss).backward()`, `scaler.unscale_(optimizer)` before clipping,
    `scaler.step(optimizer)`, `scaler.update()`. All ranks call each. It serves the optimizers of any number of engines.

    Args:
        device: type of the device where losses are.
        init_scale: first loss scale.
        growth_factor: what the scale is multiplied by after `growth_interval` steps without a skip.
        backoff_factor: what it is multiplied by after a skipped step.
        growth_interval: see `growth_factor`.
        enabled: whether to scale at all.
        process_group: the engines' ranks; `None` for all.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device=device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            process_group=process_group or dist.group.WORLD,
        )

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradient shards by the loss scale and looks, with all ranks, for what is not finite.

        Raises:
            RuntimeError: called twice between two updates, or the optimizer is not bound.
        """
        if self._enabled:
            with _engine_of(optimizer).showing_slices(optimizer):
                super().unscale_(optimizer)

    def scale(self, outputs: Any) -> Any:
        """The loss (or losses) times the scale; half-precision ones in fp32, where the product has room."""
        return super().scale(tree_map_only(torch.Tensor, _in_fp32, outputs))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps unless some rank found a gradient that is not finite.

        Returns:
            what `optimizer.step` returns, `None` for a skipped step.

        Raises:
            RuntimeError: called twice between two updates, or too many steps in a row were skipped
                (`MixedPrecision.max_skips`).
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        # Unscaled here even for a fused optimizer, which would have only this rank's gradients looked at.
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        state["stage"] = OptState.STEPPED
        if any(bool(found) for found in state["found_inf_per_device"].values()):
            _engine_of(optimizer).skip_step(optimizer, f"; loss scale {self.get_scale():g}")
            return None
        with _engine_of(optimizer).gradients_are_finite():
            result: float | None = optimizer.step(*args, **kwargs)
        return result


def _engine_of(optimizer: Optimizer) -> ZeroEngine:
    engine = engine_of(optimizer)
    if engine is None:
        raise RuntimeError(f"this {type(optimizer).__name__} is not bound to an engine; call engine.bind(optimizer).")
    return engine


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor
