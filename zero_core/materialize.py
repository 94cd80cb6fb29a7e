"""Parameters and buffers that are elsewhere (on the meta device, in host memory): brought in a unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zero_core.units import UnitSpec


def materialize(model: nn.Module, spec: UnitSpec | None, device: torch.device) -> None:
    """Brings one unit's parameters, or (`None`) all buffers, to `device`; what is on the meta device is initialised.

    Parameters keep their identity, so ties and optimizers built before stay right.

    Raises:
        RuntimeError: a module with parameters on the meta device has no way to initialise itself.
    """
    wanted = None if spec is None else {id(param) for _, param in spec.params}
    for _, param in spec.params if spec is not None else ():
        if not param.is_meta and param.device != device:
            _swap(param, param.detach().to(device))
    for path, module, initialise in _modules_to_fill(model, wanted):
        params = [p for p in module._parameters.values() if p is not None and p.is_meta and id(p) in (wanted or ())]
        buffers = [name for name, b in module._buffers.items() if b is not None and b.is_meta]
        if initialise is None:
            what = next((n for n, p in module._parameters.items() if p is not None and p.is_meta), None) or buffers[0]
            raise RuntimeError(
                f"'{path}.{what}' is on the meta device and {type(module).__name__} has no reset_parameters() to fill it "
                "with. Add one, or build the model on a real device, or give it memory first: model.to_empty(device=...) "
                "and load a state dict."
            )
        for param in params:
            _swap(param, torch.empty_like(param, device=device))
        for name in buffers:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)  # type: ignore[arg-type]
        with torch.no_grad(), _foreign_set_aside(module, {id(param) for param in params}):
            initialise()
    if spec is None:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)


def _modules_to_fill(
    model: nn.Module, wanted: set[int] | None
) -> Iterator[tuple[str, nn.Module, Callable[[], object] | None]]:
    paths = dict(model.named_modules())
    for path, module in paths.items():
        params = [p for p in module._parameters.values() if p is not None and p.is_meta]
        if wanted is None:
            if any(b is not None and b.is_meta for b in module._buffers.values()):
                yield path, module, _initialiser(paths, path)
        elif any(id(p) in wanted for p in params):
            yield path, module, _initialiser(paths, path)


def _initialiser(modules: dict[str, nn.Module], path: str) -> Callable[[], object] | None:
    """The module's `reset_parameters`, or the nearest enclosing transformers model's `_init_weights` for it."""
    module = modules[path]
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        enclosing = modules.get(".".join(parts[:length]))
        init_weights = getattr(enclosing, "_init_weights", None)
        if callable(init_weights):
            return lambda: init_weights(module)
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


@contextmanager
def _foreign_set_aside(module: nn.Module, own: set[int]) -> Iterator[None]:
    """A tied parameter that another unit made (and resharded) must not be written again: lends the module a stand-in."""
    foreign = {name: p for name, p in module._parameters.items() if p is not None and id(p) not in own}
    for name, param in foreign.items():
        device = "cpu" if param.is_meta else param.device
        module._parameters[name] = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device=device))
    try:
        yield
    finally:
        module._parameters.update(foreign)


def _swap(param: nn.Parameter, values: Tensor) -> None:
    filled = nn.Parameter(values, requires_grad=param.requires_grad)
    torch.utils.swap_tensors(param, filled)
