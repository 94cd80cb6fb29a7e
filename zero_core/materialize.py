"""Parameters and buffers that are elsewhere (on the meta device, in host memory): brought in a unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zero_core.deferred import source_of
from zero_core.units import UnitSpec

Initialiser = Callable[[nn.Module], object]


def materialize(model: nn.Module, spec: UnitSpec, device: torch.device) -> None:
    """Brings one unit's parameters to `device`; those on the meta device are initialised by their modules.

    Deferred ones stay deferred. Parameters keep their identity, so ties and optimizers built before stay right.

    Raises:
        RuntimeError: a module with parameters on the meta device has no way to initialise itself.
    """
    fresh = {id(param) for _, param in spec.params if param.is_meta}
    for _, param in spec.params:
        if source_of(param) is not None:
            continue  # read where it is needed
        if param.is_meta:
            _swap(param, torch.empty_like(param, device=device))
        elif param.device != device:
            _swap(param, param.detach().to(device))
    if fresh:
        _initialise(model, device, fresh)


def materialize_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Brings all buffers to `device`; those on the meta device are initialised by their modules.

    Args:
        model: any module.
        device: where to.
        dtype: of floating-point buffers; `None` leaves them as they are.

    Raises:
        RuntimeError: a module with buffers on the meta device has no way to initialise itself.
    """
    if any(buffer.is_meta for buffer in model.buffers()):
        _initialise(model, device, set())
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device, dtype if buffer.is_floating_point() else None)


def _initialise(model: nn.Module, device: torch.device, fresh: set[int]) -> None:
    """Runs the initialisers that concern `fresh` parameters (without any: buffers on the meta device)."""
    modules = dict(model.named_modules())
    for path, module in reversed(modules.items()):  # children first: a parent may initialise a child's weight again
        own = [name for name, p in module._parameters.items() if id(p) in fresh]
        # Buffers follow their module's parameters, and by themselves where it has none.
        empty = [
            name for name, b in module._buffers.items() if b is not None and b.is_meta and bool(own) == bool(fresh)
        ]
        init_weights = _transformers_initialiser(modules, path)
        if not own and not empty and (init_weights is None or not any(id(p) in fresh for p in module.parameters())):
            continue
        for name in empty:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        initialise = init_weights or _reset_of(module, path, [*own, *empty][0])
        with torch.no_grad(), _others_set_aside(module, fresh):
            initialise(module)


def _transformers_initialiser(modules: dict[str, nn.Module], path: str) -> Initialiser | None:
    """The `_init_weights` of the nearest enclosing transformers model."""
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        enclosing = modules.get(".".join(parts[:length]))
        init_weights: Initialiser | None = getattr(enclosing, "_init_weights", None)
        if init_weights is not None:
            return init_weights
    return None


def _reset_of(module: nn.Module, path: str, what: str) -> Initialiser:
    reset: Initialiser | None = getattr(type(module), "reset_parameters", None) or getattr(
        type(module), "_reset_parameters", None
    )
    if reset is None:
        raise RuntimeError(
            f"'{path}.{what}' is on the meta device and {type(module).__name__} has no reset_parameters() to fill it "
            "with. Add one, or build the model on a real device, or give it memory first: model.to_empty(device=...) "
            "and load a state dict."
        )
    return reset


@contextmanager
def _others_set_aside(module: nn.Module, fresh: set[int]) -> Iterator[None]:
    """Other units' parameters, made earlier or later, must not be written: lends their modules stand-ins on meta."""
    lent: list[tuple[nn.Module, str, nn.Parameter]] = []
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None and id(param) not in fresh:
                lent.append((owner, name, param))
                owner._parameters[name] = nn.Parameter(
                    torch.empty(param.shape, dtype=param.dtype, device="meta"), requires_grad=param.requires_grad
                )
    try:
        yield
    finally:
        for owner, name, param in lent:
            owner._parameters[name] = param


def _swap(param: nn.Parameter, values: Tensor) -> None:
    filled = nn.Parameter(values, requires_grad=param.requires_grad)
    torch.utils.swap_tensors(param, filled)
