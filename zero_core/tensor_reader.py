"""Reads tensors that are indexed where they lie: memory-mapped ones, or slices of a safetensors file."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from zero_core.layout import rectangles
from zero_core.storage import IndexedReader


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor.

    Attributes:
        offsets: its first index in each dimension.
        sizes: its number of indices in each dimension.
        source: what indexing reads.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    source: Any


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when it is asked for, and only the part that is.

    Attributes:
        shape: of the whole.
        dtype: of its elements.
        chunks: what it consists of.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @classmethod
    def whole(cls, source: Any, shape: Sequence[int], dtype: torch.dtype) -> LazyTensor:
        """One that lies in one place."""
        return cls(tuple(shape), dtype, (Chunk((0,) * len(shape), tuple(shape), source),))

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """A tensor, which may be memory-mapped."""
        return cls.whole(tensor, tensor.shape, tensor.dtype)

    @classmethod
    def of_runs(cls, shape: Sequence[int], runs: Sequence[Tensor]) -> LazyTensor:
        """One whose elements lie in several places, in C order.

        Args:
            shape: of the whole.
            runs: 1-D, at least one, together all elements.
        """
        outer_to_inner = range(len(shape), 0, -1)
        chunks, at = [], 0
        for run in runs:
            for part in rectangles(shape, outer_to_inner, at, at + run.numel(), max(1, run.numel())):
                values = part.view(run[part.start - at : part.start - at + part.numel])
                chunks.append(Chunk(part.offsets, part.sizes, values))
            at += run.numel()
        return cls(tuple(shape), runs[0].dtype, tuple(chunks))


class TensorReader(IndexedReader):
    """Reads lazy tensors.

    Args:
        tensors: by name.
    """

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        super().__init__(
            Metadata(
                {
                    name: TensorStorageMetadata(
                        TensorProperties(dtype=tensor.dtype),
                        torch.Size(tensor.shape),
                        [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks],
                    )
                    for name, tensor in tensors.items()
                }
            )
        )
        self._tensors = tensors
        self._chunks = {(name, c.offsets): c.source for name, tensor in tensors.items() for c in tensor.chunks}

    def places(self) -> dict[str, Hashable]:
        """By name, the memory that holds it, or what reads it when it is indexed."""
        return {name: _place(tensor) for name, tensor in self._tensors.items()}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan names, and no more."""
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._part(item).reshape(target.shape))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _part(self, item: ReadItem) -> Tensor:
        source = self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
        region = tuple(slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True))
        return torch.as_tensor(source[region if region else ...])


def _place(tensor: LazyTensor) -> Hashable:
    def place(source: Any) -> Hashable:
        in_memory = isinstance(source, Tensor) and source.numel()
        return (source.data_ptr(), source.stride()) if in_memory else id(source)

    return tensor.shape, tensor.dtype, tuple(place(chunk.source) for chunk in tensor.chunks)
