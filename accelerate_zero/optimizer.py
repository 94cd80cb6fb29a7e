"""The optimizer that `Accelerator.prepare` returns: Accelerate's wrapper around one that the engine bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from zero_core import ZeroEngine, ZeroGradScaler, engine_of


class ZeroOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Steps at the end of accumulation, all ranks together, and knows whether the step was skipped.

    Args:
        optimizer: the user's.
        scaler: the loss scale of fp16.
    """

    def __init__(self, optimizer: Optimizer, scaler: ZeroGradScaler | None) -> None:
        # Accelerate's own handling of placement and loss scale is left out: both are the engine's.
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.scaler = scaler

    @property
    def engine(self) -> ZeroEngine:
        """The engine of its model.

        Raises:
            RuntimeError: the model is not prepared.
        """
        engine = engine_of(self.optimizer)
        if engine is None:
            raise RuntimeError(
                f"this {type(self.optimizer).__name__} was prepared, but the model whose parameters it has was not: pass "
                "the model to accelerator.prepare(), too."
            )
        return engine

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Steps, unless more micro-batches are to come. All ranks."""
        if not self.gradient_state.sync_gradients:
            return
        skipped = self.engine.skipped_steps
        arguments = () if closure is None else (closure,)
        if self.scaler is None:
            self.optimizer.step(*arguments)
        else:
            self.scaler.step(self.optimizer, *arguments)
            self.scaler.update()
        self._is_overflow = self.engine.skipped_steps > skipped

    def state_dict(self) -> dict[str, Any]:
        """The whole state in plain torch's layout on the main process; empty on the others. All ranks."""
        return self.engine.full_optimizer_state_dict(self.optimizer)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a whole state, of any number of ranks or none; each rank keeps its part. All ranks, the same state."""
        self.engine.load_full_optimizer_state_dict(self.optimizer, state_dict)
