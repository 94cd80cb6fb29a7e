"""Precision plugin of the strategy: dtypes, loss scale, clipping by the norm over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.plugins.precision import MixedPrecision as AmpPrecision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer

from zero_core import MixedPrecision, ZeroEngine, ZeroGradScaler


class ZeroPrecision(Precision):
    """What `Trainer(precision=...)` means under ZeRO. `plugins=ZeroPrecision("16-mixed")` gives fp16 on a CPU too.

    Args:
        precision: "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true" or "64-true".
        policy: the policy in detail; `None` for the one of that name.
        init_scale: first loss scale of fp16 with fp32 masters.
        growth_interval: steps without a skip after which the loss scale doubles.

    Raises:
        ValueError: another name.
    """

    def __init__(
        self,
        precision: str = "32-true",
        policy: MixedPrecision | None = None,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
    ) -> None:
        super().__init__()
        self.policy = policy or MixedPrecision.named(precision)
        self.precision = _name(self.policy) if policy else precision  # type: ignore[assignment]
        self._scale_settings = {"init_scale": init_scale, "growth_interval": growth_interval}
        self._engine: ZeroEngine | None = None
        self.scaler: ZeroGradScaler | None = None

    @classmethod
    def replacing(cls, plugin: Precision) -> ZeroPrecision:
        """The counterpart of the plugin that Lightning made of `Trainer(precision=...)`.

        Raises:
            ValueError: it has none.
        """
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) in (Precision, AmpPrecision, HalfPrecision, DoublePrecision):
            return cls(plugin.precision)
        raise ValueError(
            f"ZeroStrategy has no counterpart of {type(plugin).__name__}. Expected precision='32-true', 'bf16-mixed', "
            "'16-mixed', 'bf16-true', '16-true' or '64-true', or plugins=lightning_zero.ZeroPrecision(...)."
        )

    def attach(self, engine: ZeroEngine | None) -> None:
        """Called by the strategy once the model is sharded (`None` when it no longer is)."""
        self._engine = engine
        if engine is None or self.policy is None:
            self.scaler = None
        elif self.policy.param == torch.float16 and self.policy.autocasts:
            self.scaler = ZeroGradScaler(engine.device.type, **self._scale_settings)  # type: ignore[arg-type]

    # -- dtypes: the engine casts weights and runs autocast; without autocast inputs are cast here -------------------

    @property
    def _true_dtype(self) -> torch.dtype | None:
        return None if self.policy is None or self.policy.autocasts else self.policy.param

    def convert_input(self, data: Any) -> Any:
        """Casts floating-point inputs to the weights' dtype in a `*-true` precision."""
        dtype = self._true_dtype
        if dtype is None:
            return data
        return apply_to_collection(data, Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """New tensors have the weights' dtype in a `*-true` precision."""
        return nullcontext() if self._true_dtype is None else _default_dtype(self._true_dtype)

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Modules are built in the weights' dtype in a `*-true` precision."""
        return self.tensor_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        """New tensors have the weights' dtype in a `*-true` precision."""
        return self.tensor_init_context()

    # -- steps -----------------------------------------------------------------------------------------------------

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Scales the loss of fp16."""
        return super().pre_backward(tensor if self.scaler is None else self.scaler.scale(tensor), module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Steps; under a loss scale clipping sees unscaled gradients, and all ranks skip together. All ranks."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        closure_result = closure()
        if closure_result is None and model.automatic_optimization:  # no backward happened
            self._after_closure(model, optimizer)
            return None
        self.scaler.unscale_(_unwrap(optimizer))
        self._after_closure(model, optimizer)
        result = self.scaler.step(_unwrap(optimizer), **kwargs)
        self.scaler.update()
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clips the gradient of the optimizer's parameters by its global norm. All ranks."""
        self._attached().clip_grad_norm_(clip_val, params=_unwrap(optimizer))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamps the elements of the gradient of the optimizer's parameters. All ranks."""
        self._attached().clip_grad_value_(clip_val, params=_unwrap(optimizer))

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, where there is one."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the loss scale."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)

    def _attached(self) -> ZeroEngine:
        if self._engine is None:
            raise RuntimeError("ZeroPrecision works only inside a ZeroStrategy, after the model was set up.")
        return self._engine


def _name(policy: MixedPrecision | None) -> str:
    if policy is None:
        return "32-true"
    digits = {torch.bfloat16: "bf16", torch.float16: "16", torch.float64: "64"}.get(policy.param, "32")
    return f"{digits}-{'mixed' if policy.autocasts else 'true'}"


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _unwrap(optimizer: Any) -> Optimizer:
    """The torch optimizer inside a `LightningOptimizer`."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
