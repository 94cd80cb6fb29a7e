"""Which elements of which parameter live on which rank: pure arithmetic, no process group, no tensor data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Every rank's part starts on a cache line (and on what vector loads and NCCL like).
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class ParamLayout:
    """Where one parameter lies in its flat buffer.

    Attributes:
        fqn: fully qualified name.
        shape: logical shape; `()` for a 0-dim parameter.
        stride: strides of the view in the flat buffer, in elements; they keep the parameter's memory format.
        offset: first element in the flat buffer.
        numel: number of elements.
    """

    fqn: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    numel: int


@dataclass(frozen=True)
class Piece:
    """A run of one parameter that lies in one rank's shard.

    Attributes:
        index: position of the parameter in `FlatLayout.params`.
        start: first element, counted in the parameter's own memory order.
        stop: end (exclusive), likewise.
        shard_offset: where the run starts in the rank's shard.
    """

    index: int
    start: int
    stop: int
    shard_offset: int

    @property
    def numel(self) -> int:
        """Elements of the run."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """One flat buffer: its parameters back to back, then padding, cut into `world_size` equal shards.

    Attributes:
        params: the parameters in buffer order.
        dtype: element type of the buffer.
        world_size: number of shards.
    """

    params: tuple[ParamLayout, ...]
    dtype: torch.dtype
    world_size: int

    @cached_property
    def numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(p.numel for p in self.params)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, padding included."""
        alignment = max(1, ALIGNMENT_BYTES // self.dtype.itemsize)
        return -(-self.numel // (self.world_size * alignment)) * alignment

    @property
    def padded_numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.shard_numel * self.world_size

    def filled_numel(self, rank: int) -> int:
        """Elements of `rank`'s shard that belong to parameters (the rest is padding)."""
        return min(max(self.numel - rank * self.shard_numel, 0), self.shard_numel)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The runs of parameters in `rank`'s shard, in buffer order; an empty parameter is an empty run of rank 0."""
        return self._pieces[rank]

    @cached_property
    def _pieces(self) -> tuple[tuple[Piece, ...], ...]:
        ranks: list[list[Piece]] = [[] for _ in range(self.world_size)]
        for index, param in enumerate(self.params):
            start = param.offset
            end = param.offset + param.numel
            if start == end:
                ranks[0].append(Piece(index, 0, 0, 0))
            while start < end:
                rank = start // self.shard_numel
                stop = min(end, (rank + 1) * self.shard_numel)
                piece = Piece(index, start - param.offset, stop - param.offset, start - rank * self.shard_numel)
                ranks[rank].append(piece)
                start = stop
        return tuple(tuple(pieces) for pieces in ranks)


def flat_layout(
    named_params: Sequence[tuple[str, Tensor]], world_size: int, dtype: torch.dtype | None = None
) -> FlatLayout:
    """Lays parameters of one dtype out in a flat buffer, matrices before vectors.

    The order keeps the usual decay / no-decay split contiguous and, since vectors are what has odd sizes,
    keeps the matrices aligned.

    Args:
        named_params: (fully qualified name, parameter) pairs; only shape, stride and dtype are read.
        world_size: number of ranks.
        dtype: element type of the buffer; `None` for the parameters' own.
    """
    ordered = sorted(named_params, key=lambda item: item[1].dim() < 2)  # stable: registration order within each
    layouts, offset = [], 0
    for fqn, param in ordered:
        layouts.append(ParamLayout(fqn, tuple(param.shape), dense_stride(param), offset, param.numel()))
        offset += param.numel()
    return FlatLayout(tuple(layouts), dtype or named_params[0][1].dtype, world_size)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of `tensor` where they are a permutation of a dense layout, else contiguous ones.

    `empty_like` applies exactly that rule, and autograd lays gradients out by it too, so a gradient's memory
    and its parameter's line up element by element.
    """
    return tuple(torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride())


@dataclass(frozen=True)
class Rectangle:
    """A part of a tensor that is a range of indices in each dimension, and a run in the tensor's memory.

    Attributes:
        offsets: first index in each dimension.
        sizes: number of indices in each dimension.
        start: first element, counted in the tensor's own memory order; the others follow it there.
        order: the dimensions from the outermost in memory to the innermost.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    order: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.sizes)

    def view(self, run: Tensor) -> Tensor:
        """The rectangle's `numel` elements, 1-D in memory order, as a tensor of its sizes."""
        outer_to_inner = run.view([self.sizes[dim] for dim in self.order])
        return outer_to_inner.permute([self.order.index(dim) for dim in range(len(self.order))])


def rectangles(shape: Sequence[int], stride: Sequence[int], start: int, stop: int, limit: int) -> tuple[Rectangle, ...]:
    """Cuts elements `start` to `stop` (in memory order) of a dense tensor into rectangles.

    In each dimension but the last a run has a ragged beginning and a ragged end, so n dimensions need 2n - 1 rectangles,
    and more only where they would be larger than `limit` elements.
    """
    order = tuple(sorted(range(len(shape)), key=lambda dim: -stride[dim]))
    if start == stop:
        return (Rectangle((0,) * len(shape), tuple(shape), 0, order),) if math.prod(shape) == 0 else ()
    found, position = [], start
    for offsets, sizes in _cut([shape[dim] for dim in order], start, stop, max(1, limit)):
        back = [order.index(dim) for dim in range(len(order))]
        found.append(Rectangle(tuple(offsets[i] for i in back), tuple(sizes[i] for i in back), position, order))
        position += math.prod(sizes)
    return tuple(found)


def _cut(shape: Sequence[int], start: int, stop: int, limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the rectangles of a run of a contiguous tensor, in order."""
    if not shape:
        yield (), ()
        return
    inner, row = shape[1:], math.prod(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        rows = min((stop - start) // row, max(1, limit // row))
        if within or rows == 0 or row > limit:
            end = min(stop - index * row, row)
            for offsets, sizes in _cut(inner, within, end, limit):
                yield (index, *offsets), (1, *sizes)
            start = index * row + end
        else:
            yield (index, *(0 for _ in inner)), (rows, *inner)
            start += rows * row
