"""This rank's part of a tensor, as `torch.distributed.checkpoint` asks for it: rectangles of the logical shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from zero_core.layout import Rectangle, rectangles

# What is written and read in one go: large enough that the file system and not Python sets the pace, small enough that a
# rank which needs a part of it, or copies it before it is written, has room.
CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Segment:
    """A run of a tensor's elements, in memory order.

    Attributes:
        start: number of its first element.
        values: 1-D, any device.
    """

    start: int
    values: Tensor

    @property
    def stop(self) -> int:
        """End (exclusive)."""
        return self.start + self.values.numel()


class ShardTensor(torch.Tensor):
    """Stands for a whole tensor of which this rank holds a run; has its shape and dtype, but no memory.

    Args:
        shape: the whole tensor's.
        stride: its strides in the flat buffer.
        segments: what this rank holds of it, back to back in order of `start`.
        apart: whether no part handed out reaches over two segments, as is needed to write into them.
    """

    _stride: tuple[int, ...]
    _segments: tuple[Segment, ...]
    _rectangles: tuple[Rectangle, ...]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], stride: Sequence[int], segments: Sequence[Segment], *, apart: bool = False
    ) -> ShardTensor:
        """Makes a tensor of the whole shape without memory."""
        dtype = segments[0].values.dtype
        self: ShardTensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        self._stride = tuple(stride)
        self._segments = tuple(segments)
        limit = CHUNK_BYTES // dtype.itemsize
        runs = [(s.start, s.stop) for s in segments] if apart else [(segments[0].start, segments[-1].stop)]
        self._rectangles = tuple(r for start, stop in runs for r in rectangles(shape, stride, start, stop, limit))
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"a ShardTensor has no memory for {func} to work on")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return (
            f"ShardTensor(shape={tuple(self.shape)}, start={self._segments[0].start}, stop={self._segments[-1].stop})"
        )

    def copy(self) -> ShardTensor:
        """The same in host memory of its own."""
        copies = [
            Segment(s.start, torch.empty_like(s.values, device="cpu").copy_(s.values, non_blocking=False))
            for s in self._segments
        ]
        return ShardTensor(self.shape, self._stride, copies)

    def __create_write_items__(self, fqn: str, tensor: ShardTensor) -> list[WriteItem]:
        """One item a rectangle: torch.distributed.checkpoint's protocol, like the two below."""
        del tensor
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(r.offsets), torch.Size(r.sizes)) for r in self._rectangles]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """A rectangle's elements: a view where they lie in one segment, else a copy."""
        for rectangle in self._rectangles:
            if torch.Size(rectangle.offsets) == index.offset:
                return rectangle.view(self._run(rectangle.start, rectangle.start + rectangle.numel))
        raise AssertionError(f"{index} is not a part of {self!r}")

    def _run(self, start: int, stop: int) -> Tensor:
        parts = [
            s.values[max(start - s.start, 0) : stop - s.start]
            for s in self._segments
            if (s.start < stop and start < s.stop) or s.start == start == stop
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
