"""Parameters whose values are still in a file: placeholders until an engine reads its part, or somebody touches them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zero_core import placeholder


class Source(Protocol):
    """Where a tensor's values are."""

    def read(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` in C order, 1-D, on the CPU, in the dtype they are stored in."""


class SafetensorsFile:
    """An open safetensors file; memory-mapped, so that what is read is what is asked for.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self._file = safe_open(path, framework="pt", device="cpu")

    def keys(self) -> list[str]:
        """The names in it."""
        return list(self._file.keys())  # type: ignore[no-untyped-call]

    def tied(self) -> dict[str, str]:
        """Further names of tensors, each with the one in the file, as `safetensors.torch.save_model` notes them."""
        notes: dict[str, str] = self._file.metadata() or {}  # type: ignore[no-untyped-call]
        names = set(self.keys())
        return {name: kept for name, kept in notes.items() if kept in names and name not in names}

    def slice(self, key: str) -> Any:
        """A tensor that is read when it is indexed."""
        return self._file.get_slice(key)  # type: ignore[no-untyped-call]


class StoredTensor:
    """A tensor of a safetensors file, or any other that is indexed like one.

    Args:
        stored: what indexing reads.
        shape: its shape.
    """

    def __init__(self, stored: Any, shape: Sequence[int]) -> None:
        self._stored = stored
        self._shape = tuple(shape)

    def read(self, start: int, stop: int) -> Tensor:
        """Reads the rows that hold these elements, and no others."""
        if not self._shape:
            return torch.as_tensor(self._stored[...]).reshape(1)[start:stop]
        row = math.prod(self._shape[1:])
        if start == stop or row == 0:
            return torch.empty(0)
        first = start // row
        rows: Tensor = self._stored[first : -(-stop // row)]
        return rows.reshape(-1)[start - first * row : stop - first * row]


class _Deferred:
    """Answers for a placeholder (`placeholder.Owner`): the values are read at the first touch."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def on_touch(self, param: nn.Parameter, func: Callable[..., Any]) -> None:
        del func  # any will do
        numel, shape = param.numel(), param.shape
        values = self.source.read(0, numel).to(param.dtype).reshape(shape)
        take(param)
        param.data = values

    def on_copy(self, param: nn.Parameter, source: Tensor) -> bool:
        return False

    def zero_gradient(self, param: nn.Parameter) -> None:
        raise AssertionError("a deferred parameter has no gradient")

    def gradient_error(self, param: nn.Parameter) -> Exception:
        return AssertionError("a deferred parameter has no gradient")


_deferred: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> _Deferred, for as long as the parameter lives


def defer(param: nn.Parameter, source: Source) -> None:
    """Makes `param` (on the meta device, say) a placeholder in host memory whose values `source` has.

    Shape, dtype and `requires_grad` stay. `shard` reads this rank's part; anything else that asks for values reads them all.
    """
    values = placeholder.placeholder_values(param, device=torch.device("cpu"))
    torch.utils.swap_tensors(param, nn.Parameter(values, requires_grad=param.requires_grad))
    owner = _Deferred(source)
    _deferred[param] = owner
    placeholder.register(param, owner)
    param.__class__ = placeholder.PartitionedParameter


def source_of(param: nn.Parameter) -> Source | None:
    """Where the values of a deferred parameter are; `None` for others."""
    owner: _Deferred | None = _deferred.get(param)
    return None if owner is None else owner.source


def take(param: nn.Parameter) -> Source | None:
    """Ends the deferral, for who gives the parameter its values; returns where they are, `None` if it was not deferred."""
    source = source_of(param)
    if source is not None:
        _deferred.pop(param)
        placeholder.forget(param)
        param.__class__ = nn.Parameter
    return source
