"""One storage with views of it: it is freed and filled again without the views noticing."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_core.layout import FlatLayout


class FlatBuffer:
    """The whole (all ranks') elements of a `FlatLayout`.

    Autograd saves views of this storage. They stay valid because the storage object stays: freeing sets its
    size to zero, allocating gives it its size back (D3 in docs/design.md). Pointing `param.data` elsewhere
    would not free anything while such a view lives.
    """

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._create()

    def _create(self) -> None:
        layout = self._layout
        # Inference tensors could never be saved for backward, so leave a surrounding inference_mode first.
        with torch.inference_mode(False):
            self.tensor = torch.empty(layout.padded_numel, dtype=layout.dtype, device=self._device)
            self.tensor[layout.numel :].zero_()
            self.views = [self.tensor.as_strided(p.shape, p.stride, p.offset) for p in layout.params]
        self._nbytes = self.tensor.untyped_storage().nbytes()

    def shard(self, rank: int) -> Tensor:
        """The 1-D view of `rank`'s elements, padding included."""
        start = rank * self._layout.shard_numel
        return self.tensor[start : start + self._layout.shard_numel]

    @property
    def is_allocated(self) -> bool:
        """Whether the storage has memory (an empty buffer always counts as allocated)."""
        return self.tensor.untyped_storage().nbytes() == self._nbytes

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self.tensor.untyped_storage().nbytes()

    def allocate(self) -> None:
        """Gives the storage its memory back; the contents are undefined until filled."""
        if not self.is_allocated:
            self.tensor.untyped_storage().resize_(self._nbytes)

    def free(self) -> None:
        """Releases the memory. Reading a view before the next `allocate` is an error of the caller."""
        if not self.tensor.untyped_storage().resizable():
            # Somebody holds the memory through numpy or DLPack and may keep it; go on with a storage of our own.
            self._create()
        self.tensor.untyped_storage().resize_(0)
