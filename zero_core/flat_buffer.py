"""One piece of memory with views of it, taken and given back as a unit's weights come and go."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_core.layout import FlatLayout


class BufferPool:
    """Memory that gathered weights take turns in.

    A CPU hands freed pages back to the system and pays for a fault on each when they come again, which at stage 3 costs
    as much as the copying. Equal units (a model's blocks) take turns in the same few buffers instead. On CUDA torch's own
    allocator does that.
    """

    def __init__(self) -> None:
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._live: dict[int, FlatBuffer] = {}

    def take(self, buffer: FlatBuffer, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D tensor with undefined contents, `buffer`'s until given back."""
        spare = self._spare.get((numel, dtype))
        if spare:
            tensor = spare.pop()
        else:
            self.clear()  # of another size: held on to, it would raise the peak
            # Inference tensors could never be saved for backward, so leave a surrounding inference_mode first.
            with torch.inference_mode(False):
                tensor = torch.empty(numel, dtype=dtype, device=device)
        self._live[tensor.untyped_storage()._cdata] = buffer
        return tensor

    def give(self, tensor: Tensor) -> None:
        """Takes memory back. What somebody still holds a view of is left to them and never written again."""
        storage = tensor.untyped_storage()
        del self._live[storage._cdata]
        # One reference is `tensor`'s, one `storage`'s. numpy and DLPack count as well, through the tensor they hold.
        if tensor.device.type == "cpu" and torch._C._storage_Use_Count(storage._cdata) <= 2:
            self._spare.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)

    def owner(self, tensor: Tensor) -> FlatBuffer | None:
        """The buffer that `tensor` is a view of, if it is one of a live buffer."""
        return self._live.get(tensor.untyped_storage()._cdata)

    def clear(self) -> None:
        """Returns spare memory to the system."""
        self._spare.clear()

    @property
    def spare_nbytes(self) -> int:
        """Bytes kept for the next `take`."""
        return sum(t.numel() * t.element_size() for tensors in self._spare.values() for t in tensors)


class FlatBuffer:
    """The whole (all ranks') elements of a `FlatLayout`, while they are here.

    Args:
        layout: what lies where.
        device: where.
        pool: where the memory comes from.
    """

    def __init__(self, layout: FlatLayout, device: torch.device, pool: BufferPool) -> None:
        self.layout = layout
        self.device = device
        self.views: list[Tensor] = []
        self._pool = pool
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """All elements, 1-D, padding included."""
        if self._tensor is None:
            raise AssertionError("the buffer was read while it has no memory")
        return self._tensor

    def view(self, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
        """A view; `offset` counts elements from the start of the buffer."""
        return self.tensor.as_strided(size, stride, self.tensor.storage_offset() + offset)

    def shard(self, rank: int) -> Tensor:
        """The 1-D view of `rank`'s elements, padding included."""
        start = rank * self.layout.shard_numel
        return self.tensor[start : start + self.layout.shard_numel]

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return 0 if self._tensor is None else self._tensor.numel() * self._tensor.element_size()

    def allocate(self) -> None:
        """Takes memory; the contents are undefined until filled."""
        if self._tensor is None:
            layout = self.layout
            self._tensor = self._pool.take(self, layout.padded_numel, layout.dtype, self.device)
            with torch.inference_mode(False):
                self.views = [self.view(p.shape, p.stride, p.offset) for p in layout.params]

    def free(self) -> None:
        """Gives the memory back. Parameters must point elsewhere by now; other views keep what they see."""
        if self._tensor is not None:
            tensor, self._tensor, self.views = self._tensor, None, []
            self._pool.give(tensor)
