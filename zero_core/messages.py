"""How gradients become messages, and messages sums: what is exchanged point to point. Pure, no process group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_core.layout import FlatLayout, Piece

# Smaller messages cost more system calls (256 KiB: a tenth of a step); from 32 MiB on their buffers pay page faults.
MESSAGE_BYTES = 16 * 2**20
_CONVERTED_NUMEL = 64 * 1024  # what fits a CPU's cache beside its source
# Vectors this small cost more as a message of their own than as a copy into a shared one.
_PACKED_BYTES = 64 * 2**10


@dataclass(frozen=True)
class Message:
    """A run of a shard that travels as one message: one part of a large parameter, or several small ones."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


@functools.lru_cache(maxsize=4096)
def plan(layout: FlatLayout, rank: int) -> tuple[Message, ...]:
    """How `rank`'s shard is cut into messages: the sender and the receiver derive the same cut from the layout."""
    largest = max(1, MESSAGE_BYTES // layout.dtype.itemsize)
    packed = _PACKED_BYTES // layout.dtype.itemsize
    messages: list[Message] = []
    small: list[Piece] = []

    def flush() -> None:
        if small:
            messages.append(Message(small[0].shard_offset, small[-1].shard_offset + small[-1].numel, tuple(small)))
            small.clear()

    for piece in layout.pieces(rank):
        if not piece.numel:
            continue
        if piece.numel <= packed:
            if small and sum(p.numel for p in small) + piece.numel > largest:
                flush()
            small.append(piece)
            continue
        flush()
        for start in range(piece.start, piece.stop, largest):
            stop = min(piece.stop, start + largest)
            offset = piece.shard_offset + start - piece.start
            messages.append(Message(offset, offset + stop - start, (Piece(piece.index, start, stop, offset),)))
    flush()
    return tuple(messages)


def outgoing(message: Message, flats: list[Tensor | None], like: Tensor, dtype: torch.dtype) -> Tensor:
    """A message's elements of the flat gradients, in `dtype`; `like` says where. A view where one piece allows it."""
    parts = []
    for piece in message.pieces:
        flat = flats[piece.index]
        if flat is None:
            parts.append(like.new_zeros(piece.numel, dtype=dtype))
        else:
            parts.append(flat[piece.start : piece.stop].to(dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def add_own(target: Tensor, pieces: Iterable[Piece], flats: list[Tensor | None]) -> None:
    """Adds a rank's own pieces of the flat gradients to `target`, its shard."""
    for piece in pieces:
        flat = flats[piece.index]
        if flat is not None:
            _add(target[piece.shard_offset : piece.shard_offset + piece.numel], flat[piece.start : piece.stop])


def _add(target: Tensor, source: Tensor) -> None:
    """`target.add_(source)`; where dtypes differ in pieces converted in cache, which on a CPU is twice as fast."""
    if target.dtype == source.dtype or target.device.type != "cpu":
        target.add_(source)
        return
    scratch = target.new_empty(min(target.numel(), _CONVERTED_NUMEL))
    for into, part in zip(target.split(_CONVERTED_NUMEL), source.split(_CONVERTED_NUMEL), strict=True):
        into.add_(scratch[: part.numel()].copy_(part))


def sum_in_rank_order(out: Tensor, received: dict[int, Tensor], rank: int, add_own: Callable[[Tensor], None]) -> None:
    """Sums all ranks' shards into `out` in rank order, so that the bits are the same in every run.

    Args:
        out: 1-D, in the dtype to sum in; may be the lowest peer's entry of `received`.
        received: the peers' shards by rank.
        rank: this rank.
        add_own: adds this rank's shard to its argument.
    """
    if not received:
        out.zero_()
        add_own(out)
        return
    order = sorted([*received, rank])
    lowest_peer = min(received)
    if received[lowest_peer] is not out:
        out.copy_(received[lowest_peer])
    for source in order:
        if source == rank:
            add_own(out)
        elif source != lowest_peer:
            _add(out, received[source])


def flat_view(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """`tensor`'s elements as 1-D, in the memory order that `stride` describes; a view where memory allows."""
    tensor = (tensor.to_dense() if tensor.is_sparse else tensor).resolve_conj().resolve_neg()
    if tensor.numel() and tensor.stride() != stride:
        dense = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor = dense.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def fill(packed: Tensor, layout: FlatLayout, flats: list[Tensor | None]) -> None:
    """Copies flat gradients into a whole buffer; missing ones are zeros."""
    targets = packed[: layout.numel].split([p.numel for p in layout.params])
    given = [(target, flat) for target, flat in zip(targets, flats, strict=True) if flat is not None]
    if given:
        torch._foreach_copy_([t for t, _ in given], [f for _, f in given])
    for target, flat in zip(targets, flats, strict=True):
        if flat is None:
            target.zero_()
