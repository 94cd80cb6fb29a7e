"""This rank's part of a partition: its memory, the slices an optimizer sees of it, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero_core.layout import FlatLayout, Piece
from zero_core.messages import flat_view
from zero_core.offload import CopyStream, Placement
from zero_core.precision import Dtypes, round_stochastically
from zero_core.shard_tensor import Segment

# An optimizer without a fused step makes several passes over each tensor; slices of this size stay in a CPU's cache.
_CPU_SLICE_NUMEL = 256 * 1024

# Elements that are looked at together where a copy of all of them would show in the memory.
_COMPARED_NUMEL = 4096


@dataclass(frozen=True)
class Slice:
    """A part of a parameter that this rank owns, as the optimizer sees it.

    Attributes:
        piece: which elements.
        param: 1-D leaf tensor, a view of the master shard. Its `.grad` may have another dtype, that of the step.
    """

    piece: Piece
    param: nn.Parameter


class Master:
    """The elements that this rank steps.

    Args:
        own: their first values, 1-D with padding, on the model's device, in the master's dtype.
        layout: the partition's.
        rank: this rank.
        dtypes: of master and step, for when the parameters are trained; frozen ones may have fewer digits.
        placement: memory to copy them into; `None` keeps `own` itself, which then is a part of the weights.
        copies: how memory gets from the device to the placement's.
    """

    def __init__(
        self,
        own: Tensor,
        layout: FlatLayout,
        rank: int,
        dtypes: Dtypes,
        placement: Placement | None,
        copies: CopyStream,
    ) -> None:
        self._layout = layout
        self._pieces = layout.pieces(rank)
        self._dtypes = dtypes
        self._placement = placement
        self._copies = copies
        self.tensor = own if placement is None else placement.empty(own.numel(), own.dtype).copy_(own)
        self.slices: list[list[Slice]] = [[] for _ in layout.params]
        for piece in self.cut(self._pieces):
            part = self._part(piece, self.tensor)
            differentiable = part.is_floating_point() or part.is_complex()
            self.slices[piece.index].append(Slice(piece, nn.Parameter(part, requires_grad=differentiable)))
        self._states: dict[str, Tensor] = {}
        # Gradient shards on their way from the device, each with what is trained.
        self._arriving: list[tuple[Tensor, Sequence[bool]]] = []

    def cut(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Any rank's runs of parameters, in slices."""
        limit = _CPU_SLICE_NUMEL if self.tensor.device.type == "cpu" else 2**62
        for piece in pieces:
            for start in range(piece.start, max(piece.stop, 1), limit):
                stop = min(start + limit, piece.stop)
                yield Piece(piece.index, start, stop, piece.shard_offset + start - piece.start)

    def _part(self, piece: Piece, shard: Tensor) -> Tensor:
        return shard[piece.shard_offset : piece.shard_offset + piece.numel]

    @property
    def in_place(self) -> bool:
        """Whether the master is a part of the weights rather than a tensor of its own."""
        return self._placement is None

    @property
    def place(self) -> str:
        """Kind of memory: "device", "host" or "disk"."""
        return "device" if self._placement is None else self._placement.name

    @property
    def step_dtype(self) -> torch.dtype:
        """Dtype of the slices' gradients, and of the slices themselves while the optimizer steps."""
        return self._dtypes.step if self.tensor.dtype == self._dtypes.master else self.tensor.dtype

    def promote(self, placement: Placement) -> None:
        """Gives parameters that were frozen the digits of trainable ones."""
        if self.tensor.dtype == self._dtypes.master:
            return
        with torch.inference_mode(False), torch.no_grad():
            wider = placement.empty(self.tensor.numel(), self._dtypes.master).copy_(self.tensor)
            self.tensor, self._placement = wider, placement
            for item in self._all():
                item.param.data = self._part(item.piece, wider)

    def load(self, index: int, source: Tensor) -> None:
        """Takes this rank's part of parameter `index` from the whole `source` (logical shape, any device)."""
        layout = self._layout.params[index]
        with torch.no_grad():
            flat = flat_view(source.detach().expand(layout.shape), layout.stride)
            for item in self.slices[index]:
                item.param.copy_(flat[item.piece.start : item.piece.stop])

    def take_over(self, written: Tensor) -> None:
        """Takes over the elements of `written`, in the compute dtype, that are not what the master rounds to.

        No version counter tells what a user wrote: writes through `param.data` leave it alone. Elements nobody wrote
        keep the digits that only the master has.
        """
        with torch.no_grad():
            # A part at a time, which costs no memory to speak of.
            for own, seen in zip(self.tensor.split(_COMPARED_NUMEL), written.split(_COMPARED_NUMEL), strict=True):
                if not torch.equal(seen, own.to(seen.device, seen.dtype)):
                    here = own.to(seen.device)
                    own.copy_(torch.where(seen == here.to(seen.dtype), here, seen.to(own.dtype)))

    # -- gradients -------------------------------------------------------------------------------------------------

    def add_gradient(self, shard: Tensor, wanted: Sequence[bool], contributed: Sequence[bool]) -> list[Slice]:
        """Adds an averaged gradient to the slices' `.grad`.

        Args:
            shard: 1-D, on the model's device, in the step's dtype; the master's from now on.
            wanted: per parameter, whether it is trained.
            contributed: per parameter, whether this rank had a gradient.

        Returns:
            the slices that had no gradient before and none from this rank: should no rank have had one, theirs is
            `None`, not zero.
        """
        doubtful = [
            item
            for item in self._all()
            if wanted[item.piece.index] and not contributed[item.piece.index] and item.param.grad is None
        ]
        if shard.device == self.tensor.device:
            self._add(shard, wanted)
            return doubtful
        if self._placement is None:
            raise AssertionError("a master in place is where the weights are")
        host = torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=True)
        self._copies.to_host(shard, host)
        self._arriving.append((host, wanted))
        return doubtful

    def settle(self) -> None:
        """At the end of backward: adds what was on its way from the device."""
        if self._arriving:
            self._copies.synchronize()
        for host, wanted in self._arriving:
            self._add(host, wanted)
        self._arriving = []

    def _add(self, shard: Tensor, wanted: Sequence[bool]) -> None:
        for item in self._all():
            part = self._part(item.piece, shard)
            if not wanted[item.piece.index]:
                continue
            if item.param.grad is not None:
                item.param.grad.add_(part)
                continue
            if part.dtype != item.param.dtype:
                item.param.grad_dtype = part.dtype
            item.param.grad = part

    def gradient(self, index: int) -> Tensor | None:
        """This rank's elements of the averaged gradient of parameter `index`, 1-D; `None` where it has none."""
        grads = [item.param.grad for item in self.slices[index] if item.param.grad is not None]
        return torch.cat(grads) if grads else None

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the gradient shard held now."""
        held = any(item.param.grad is not None for item in self._all())
        return self.tensor.numel() * self.step_dtype.itemsize if held else 0

    # -- step ------------------------------------------------------------------------------------------------------

    def widen(self) -> None:
        """Before a step: the slices get the step's dtype, where that is not the master's."""
        if self._dtypes.rounds_stochastically:
            for item in self._all():
                item.param.data = item.param.data.to(self.step_dtype)

    def narrow(self, generator: torch.Generator) -> None:
        """After a step: undoes `widen`, rounding the slices into the master up or down by chance."""
        for item in self._all():
            part = self._part(item.piece, self.tensor)
            if item.param.dtype != part.dtype:
                part.copy_(round_stochastically(item.param.data, generator))
                item.param.data = part

    def reserve(self, keys: Sequence[str]) -> None:
        """Makes room on disk for an optimizer's state before there is any, so that a full disk shows at once.

        Raises:
            RuntimeError: there is no room.
        """
        if self._placement is not None and self._placement.scarce:
            for key in keys:
                if key not in self._states:
                    self._states[key] = self._placement.empty(self.tensor.numel(), self.step_dtype)

    def keep_state(self, item: Slice, state: dict[str, object]) -> None:
        """After a step: moves a slice's optimizer state into files where that is its place."""
        if self._placement is None or not self._placement.scarce:
            return
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == item.param.shape and value.dim():
                self.reserve([key])
                target = self._part(item.piece, self._states[key])
                if target.data_ptr() != value.data_ptr():
                    state[key] = target.copy_(value)

    def segments(self, index: int, shard: Tensor) -> list[Segment]:
        """The run of parameter `index` in a 1-D tensor laid out like the master; none where this rank has no part."""
        return [Segment(piece.start, self._part(piece, shard)) for piece in self._pieces if piece.index == index]

    def state_segments(self, index: int, key: str, dtype: torch.dtype) -> list[Segment]:
        """Memory, where state has its place, for the run of parameter `index` in the state `key`."""
        if self._placement is not None and self._placement.scarce and dtype == self.step_dtype:
            self.reserve([key])
            return self.segments(index, self._states[key])
        return [
            Segment(piece.start, torch.empty(piece.numel, dtype=dtype, device=self.tensor.device))
            for piece in self._pieces
            if piece.index == index
        ]

    def evict(self) -> None:
        """Lets go of main memory that is not needed until the next use."""
        if self._placement is not None:
            for tensor in (self.tensor, *self._states.values()):
                self._placement.evict(tensor)

    def _all(self) -> Iterator[Slice]:
        return (item for items in self.slices for item in items)
