"""How many bytes of tensors a piece of code holds at most, counted by torch itself; pages of files do not count."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """A context that counts the memory of tensors made inside.

    Attributes:
        peak: most bytes that were alive at once, what was alive before not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: set[int] = set()

    def alive(self) -> int:
        """Bytes made inside and alive now."""
        self._alive = {k: item for k, item in self._alive.items() if not item[0].expired()}
        return sum(nbytes for _, nbytes in self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if _has_memory(x)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if _has_memory(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._alive:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.alive())
        return result


def _has_memory(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type != "meta"
        and type(value) in (torch.Tensor, torch.nn.Parameter)
    )
