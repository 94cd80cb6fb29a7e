"""One unit: the parameters gathered and reduced together, its states and the moves between them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from zero_core.collectives import Collectives, Pending
from zero_core.config import ZeroStage
from zero_core.deferred import Source, take
from zero_core.flat_buffer import BufferPool, FlatBuffer
from zero_core.layout import FlatLayout, flat_layout
from zero_core.master import Master, Slice
from zero_core.messages import flat_view
from zero_core.offload import ShardMemory
from zero_core.placeholder import PartitionedGradient, PartitionedParameter, placeholder_values
from zero_core.precision import Dtypes
from zero_core.shard_tensor import Segment
from zero_core.units import UnitSpec


class UnitState(enum.Enum):
    """Where a unit's whole weights are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Partition:
    """The parameters of one unit that share dtype and `requires_grad`: a flat buffer and this rank's part of it.

    Args:
        named_params: (fully qualified name, parameter) pairs; their values move into the buffer.
        collectives: the engine's sends.
        stage: what is partitioned.
        tag: number of the buffer among the engine's, the same on every rank.
        pool: memory for the whole weights.
        dtypes: of compute, masters, step and wire, for when the parameters are trained; frozen ones have no more
            digits than they were given.
        memory: where masters and shards live.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, nn.Parameter]],
        collectives: Collectives,
        stage: ZeroStage,
        tag: int,
        pool: BufferPool,
        dtypes: Dtypes,
        memory: ShardMemory,
    ) -> None:
        self.layout: FlatLayout = flat_layout(named_params, collectives.world_size, dtypes.compute)
        self.dtypes = dtypes
        self._memory = memory
        by_name = dict(named_params)
        self.params: list[nn.Parameter] = [by_name[p.fqn] for p in self.layout.params]
        self.tag = tag
        self._stage = stage
        self._collectives = collectives
        sources = [take(param) for param in self.params]
        self._classes = [type(param) for param in self.params]
        self._given = self.params[0].dtype
        with torch.inference_mode(False), torch.no_grad():
            self.buffer = FlatBuffer(self.layout, collectives.device, pool)
            master_dtype = dtypes.master if self.is_trainable else self._given
            self._placeholders = [placeholder_values(p, dtypes.compute, collectives.device) for p in self.params]
            self.starts_whole = not (any(sources) and stage.shards_parameters)
            # At stages 1 and 2 the weights' own slice is the master, unless that has more digits or lives elsewhere.
            in_place = (
                not stage.shards_parameters and master_dtype == dtypes.compute and memory.masters.name == "device"
            )
            if any(sources):
                own = self._read_own(sources, master_dtype, in_place)
            else:
                own = self._own_of_whole(master_dtype)
            with collectives.raising_together(may_fail=memory.masters.scarce):
                self.master = Master(
                    own, self.layout, collectives.rank, dtypes, None if in_place else memory.masters, memory.copies
                )
            # Gathered from, where masters live elsewhere but the weights' shards stay on the device.
            self._shard = own.to(dtypes.compute, copy=True) if memory.keeps_shards and stage.shards_parameters else None
        # One entry a parameter; a gradient waits here from its arrival until its reduction is finished.
        self.grads: list[Tensor | None] = [None] * len(self.params)
        self._reducing: tuple[Pending, Tensor, list[Tensor | None]] | None = None
        self._gathering: Pending | None = None
        if not self.starts_whole:
            self.show_placeholders()
            return
        if any(sources):
            self.start_gather()
            self.finish_gather()
        self.show_views()

    def _own_of_whole(self, dtype: torch.dtype) -> Tensor:
        """This rank's shard of the parameters' values, which all are in memory; the buffer holds the whole."""
        self.buffer.allocate()
        whole = self._whole_values(dtype)
        # One rank's values for all, as DDP does: seeds may differ between ranks.
        self._collectives.broadcast([whole])
        if whole is not self.buffer.tensor:
            self.buffer.tensor.copy_(whole)
        return whole[self._collectives.rank * self.layout.shard_numel :][: self.layout.shard_numel]

    def _read_own(self, sources: Sequence[Source | None], dtype: torch.dtype, in_place: bool) -> Tensor:
        """This rank's shard of values some of which are in files: nothing else is read."""
        self._collectives.broadcast([p.data for p, source in zip(self.params, sources, strict=True) if source is None])
        if in_place:
            self.buffer.allocate()
            own = self.buffer.shard(self._collectives.rank)
        else:
            own = torch.empty(self.layout.shard_numel, dtype=dtype, device=self.buffer.device)
        own.zero_()
        for piece in self.layout.pieces(self._collectives.rank):
            source, param = sources[piece.index], self.params[piece.index]
            if source is None:
                values = flat_view(param.detach(), self.layout.params[piece.index].stride)[piece.start : piece.stop]
            else:
                values = source.read(piece.start, piece.stop)
            own[piece.shard_offset : piece.shard_offset + piece.numel].copy_(values)
        return own

    def _whole_values(self, dtype: torch.dtype) -> Tensor:
        """The parameters' values, padded, as 1-D `dtype`; in the buffer where that is its dtype."""
        whole = self.buffer.tensor
        if dtype != whole.dtype:
            whole = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.buffer.device)
        whole[self.layout.numel :].zero_()
        for param, p in zip(self.params, self.layout.params, strict=True):
            whole.as_strided(p.shape, p.stride, p.offset + whole.storage_offset()).copy_(param.detach())
        return whole

    def promote(self) -> None:
        """Gives a partition that was frozen the masters of a trainable one."""
        self.master.promote(self._memory.masters)

    @property
    def slices(self) -> list[list[Slice]]:
        """Per parameter, this rank's slices of it."""
        return self.master.slices

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter wants a gradient now; flags may change between steps."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(param.requires_grad for param in self.params)

    def start_gather(self) -> None:
        """Starts filling the buffer from all ranks' masters."""
        with torch.no_grad():
            self.buffer.allocate()
            with self._memory.copies.copying():
                if not self.master.in_place:
                    source = self.master.tensor if self._shard is None else self._shard
                    self.buffer.shard(self._collectives.rank).copy_(source, non_blocking=True)
                self._gathering = self._collectives.all_gather(
                    self.layout, self.buffer.tensor, self.tag, self.layout.params[0].fqn
                )
            self.master.evict()

    def finish_gather(self) -> None:
        """Waits for `start_gather`."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self._memory.copies.join()  # a single rank sends nothing that would have waited for them

    def show_views(self) -> None:
        """Points the parameters at the buffer."""
        for param, view, cls in zip(self.params, self.buffer.views, self._classes, strict=True):
            param.__class__ = cls
            param.data = view

    def show_placeholders(self) -> None:
        """Points the parameters at placeholders."""
        for param, values in zip(self.params, self._placeholders, strict=True):
            param.data = values
        self.guard()

    def guard(self) -> None:
        """Makes every touch of a value go through the owner first."""
        for param in self.params:
            param.__class__ = PartitionedParameter

    def keep_changes(self) -> None:
        """Takes what a user wrote into whole weights over into this rank's master, or the next gather would undo it."""
        if not self.master.in_place:
            self.master.take_over(self.buffer.shard(self._collectives.rank))

    def refresh_shard(self) -> None:
        """After a step at stage 3: brings the weights' shard up to date with the master, where both are kept."""
        if self._shard is not None:
            with torch.no_grad(), self._memory.copies.copying():
                self._shard.copy_(self.master.tensor, non_blocking=True)
        self.master.evict()

    def own_segments(self, index: int) -> list[Segment]:
        """What this rank's master holds of parameter `index`."""
        return self.master.segments(index, self.master.tensor)

    def runs(self, index: int, rank: int) -> list[tuple[int, int]]:
        """(start, stop) of each slice of parameter `index` that `rank` has; all ranks cut alike."""
        pieces = self.master.cut(piece for piece in self.layout.pieces(rank) if piece.index == index)
        return [(piece.start, piece.stop) for piece in pieces]

    def restore(self) -> None:
        """Leaves the parameters whole, with all digits, in the dtype they came in. All ranks."""
        whole = self.gather_masters().to(self._given)
        for param, p, cls in zip(self.params, self.layout.params, self._classes, strict=True):
            param.__class__ = cls
            param.data = whole.as_strided(p.shape, p.stride, whole.storage_offset() + p.offset)

    def gather_masters(self) -> Tensor:
        """All ranks' masters, 1-D with padding; read it only. All ranks."""
        self.finish_gather()
        if self.master.in_place:
            return self.buffer.tensor
        with torch.no_grad():
            own = self.master.tensor
            whole = torch.empty(self.layout.padded_numel, dtype=own.dtype, device=self.buffer.device)
            start = self._collectives.rank * self.layout.shard_numel
            whole[start : start + self.layout.shard_numel] = own
            self._collectives.all_gather(self.layout, whole, self.tag, self.layout.params[0].fqn).wait()
        return whole

    def start_reduce(self) -> None:
        """Starts averaging what waits in `grads`; missing ones count as zeros."""
        grads, self.grads = self.grads, [None] * len(self.params)
        with torch.no_grad():
            shard = torch.empty(self.layout.shard_numel, dtype=self.master.step_dtype, device=self.buffer.device)
            pending = self._collectives.reduce_scatter(
                self.layout, grads, shard, self.dtypes.wire, self.tag, self.layout.params[0].fqn
            )
        self._reducing = (pending, shard, grads)

    def finish_reduce(self) -> list[Slice]:
        """Adds the averaged gradient to the slices' `.grad`; see `Master.add_gradient`."""
        if self._reducing is None:
            return []
        (pending, shard, grads), self._reducing = self._reducing, None
        with torch.no_grad():
            pending.wait()
            with torch._C.DisableTorchFunctionSubclass():
                wanted = [param.requires_grad for param in self.params]
            return self.master.add_gradient(shard, wanted, [grad is not None for grad in grads])

    def whole(self, index: int, part: Tensor | None) -> Tensor:
        """The tensor of parameter `index`'s shape that all ranks' 1-D parts make up. All ranks."""
        layout = self.layout.params[index]
        with torch.no_grad():
            whole = torch.zeros(layout.numel, dtype=self.master.step_dtype, device=self.buffer.device)
            if part is not None:
                start = self.master.slices[index][0].piece.start
                whole[start : start + part.numel()] = part
            self._collectives.sum(whole)  # the parts do not overlap, so the sum is exact
        return whole.as_strided(layout.shape, layout.stride)

    def forget_grads(self) -> None:
        """Drops what a failed backward left behind."""
        if self._reducing is not None:
            self._reducing[0].wait()
        self._reducing = None
        self.grads = [None] * len(self.params)
        self.master.settle()

    @property
    def shard_nbytes(self) -> int:
        """Bytes of the weights' shard that is kept beside a master elsewhere."""
        return 0 if self._shard is None else self._shard.nbytes

    @property
    def whole_grad_nbytes(self) -> int:
        """Bytes of gradients on the device that wait or are in flight."""
        return sum({g.untyped_storage().data_ptr(): g.nbytes for g in self._whole_grads()}.values())

    def _whole_grads(self) -> Iterator[Tensor]:
        with torch._C.DisableTorchFunctionSubclass():
            local = [p.grad for p in self.params if p.grad is not None and not isinstance(p.grad, PartitionedGradient)]
        yield from local
        in_flight = self._reducing[2] if self._reducing is not None else []
        yield from (grad for grad in [*self.grads, *in_flight] if grad is not None)
        if self._reducing is not None:
            yield self._reducing[1]


class Unit:
    """Parameters gathered and reduced together.

    At stages 1 and 2 a unit is `GATHERED`, but for `GATHERING` between a step and the next use. At stage 3 it goes
    `SHARDED` -> `GATHERING` -> `GATHERED` -> `SHARDED` around each use.

    Args:
        spec: what the unit owns.
        index: number of the unit, the same on every rank.
        first_tag: number of its first buffer; the others follow.
        collectives: the engine's sends.
        stage: what is partitioned.
        pool: memory for the whole weights.
        dtypes: the dtypes of parameters that the user's model has in a given one.
        memory: where masters and shards live.
    """

    def __init__(
        self,
        spec: UnitSpec,
        index: int,
        first_tag: int,
        collectives: Collectives,
        stage: ZeroStage,
        pool: BufferPool,
        dtypes: Callable[[torch.dtype], Dtypes],
        memory: ShardMemory,
    ) -> None:
        self.name = spec.name
        self.index = index
        self.modules = list(spec.modules)
        self._stage = stage
        groups: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
        for fqn, param in spec.params:
            groups.setdefault((param.dtype, param.requires_grad), []).append((fqn, param))
        self.partitions = [
            Partition(named, collectives, stage, first_tag + i, pool, dtypes(dtype), memory)
            for i, ((dtype, _), named) in enumerate(groups.items())
        ]
        self.state = UnitState.GATHERED
        if not all(partition.starts_whole for partition in self.partitions):
            self.state = UnitState.SHARDED
            for partition in self.partitions:
                if partition.starts_whole:
                    partition.show_placeholders()
                    partition.buffer.free()

    @property
    def params(self) -> list[nn.Parameter]:
        """All parameters of the unit."""
        return [param for partition in self.partitions for param in partition.params]

    @property
    def numel(self) -> int:
        """Elements, padding not counted."""
        return sum(partition.layout.numel for partition in self.partitions)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weights, padding included."""
        return sum(p.layout.padded_numel * p.layout.dtype.itemsize for p in self.partitions)

    def start_gather(self) -> None:
        """Starts making the weights whole; a no-op unless they are sharded."""
        if self.state is UnitState.SHARDED:
            for partition in self.partitions:
                partition.start_gather()
            self.state = UnitState.GATHERING

    def refresh(self) -> None:
        """Brings gathered weights up to date with the masters, in place (stage 3, in the middle of their use)."""
        for partition in self.partitions:
            partition.start_gather()
            partition.finish_gather()

    def publish(self) -> None:
        """Starts sending this rank's stepped slice to all others (stages 1 and 2); a touch waits for theirs."""
        self.gather()
        for partition in self.partitions:
            partition.start_gather()
            partition.guard()
        self.state = UnitState.GATHERING

    def gather(self) -> None:
        """Makes the weights whole, waiting for what was started."""
        if self.state is UnitState.GATHERED:
            return
        self.start_gather()
        for partition in self.partitions:
            partition.finish_gather()
            partition.show_views()
        self.state = UnitState.GATHERED

    def reshard(self) -> None:
        """Frees the other ranks' parts (stage 3)."""
        if not self._stage.shards_parameters or self.state is UnitState.SHARDED:
            return
        for partition in self.partitions:
            partition.finish_gather()  # never free what a transfer still writes to
            if self.state is UnitState.GATHERED:
                partition.show_placeholders()
            partition.buffer.free()
        self.state = UnitState.SHARDED

    def start_reduce(self) -> None:
        """Starts averaging the gradients that arrived."""
        for partition in self.partitions:
            if partition.is_trainable:
                partition.start_reduce()

    def finish_reduce(self) -> list[Slice]:
        """Waits for `start_reduce`; see `Partition.finish_reduce`."""
        return [item for partition in self.partitions for item in partition.finish_reduce()]
