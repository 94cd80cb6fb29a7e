"""The only file that sends: every collective of the engine, counted, with the algorithm chosen by backend.

NCCL (and what behaves like it) has good all-gathers and reduce-scatters, so those are used. gloo's reduce-scatter is
an all-reduce in disguise and its all-gather copies; here ranks exchange slices point to point instead, straight
from where they lie to where they belong, and sum them in rank order. That sends the optimal volume and gives the
same bits on every rank and in every run. Messages carry tags, so ranks that disagree on what comes next wait
rather than mix up two buffers of the same size.

A rank posts its sends before its receives. gloo writes to the socket within the call where the peer's receive stands
already, holding a lock for which gloo's own thread then spins on the same core; with sends first that thread writes.
"""

from __future__ import annotations

import atexit
import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from zero_core.layout import FlatLayout
from zero_core.messages import MESSAGE_BYTES, add_own, fill, flat_view, outgoing, plan, sum_in_rank_order
from zero_core.precision import accumulation_dtype
from zero_core.watchdog import Watchdog, saying_who_is_lost

_TOUCH_TAG = 2**31 - 1


@dataclass
class Traffic:
    """What one rank has sent.

    Attributes:
        calls: collectives started, by kind ("gather", "reduce", "control").
        bytes: payload bytes sent to other ranks, by kind.
    """

    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, kind: str, nbytes: int) -> None:
        """Counts one collective."""
        self.calls[kind] += 1
        self.bytes[kind] += nbytes

    def copy(self) -> Traffic:
        """The counts as they stand now."""
        return Traffic(defaultdict(int, self.calls), defaultdict(int, self.bytes))

    def since(self, earlier: Traffic) -> Traffic:
        """The counts added after `earlier` was copied."""
        return Traffic(
            defaultdict(int, {k: n - earlier.calls[k] for k, n in self.calls.items()}),
            defaultdict(int, {k: n - earlier.bytes[k] for k, n in self.bytes.items()}),
        )


class Work(Protocol):
    """What `torch.distributed` returns for an asynchronous operation."""

    def wait(self) -> Any:
        """Blocks (on CUDA: makes the current stream wait) until the operation is done."""


class Pending:
    """A started collective. `wait` may be called again; what it held is let go.

    Args:
        works: the transfers.
        finish: the local part, run once after them.
        keep: tensors that the transfers read or write and nobody else holds.
        operation: what they are part of, for the watchdog.
    """

    def __init__(
        self,
        works: Iterable[Work],
        finish: Callable[[], None] | None = None,
        keep: Iterable[Tensor] = (),
        operation: AbstractContextManager[None] | None = None,
    ) -> None:
        self._works = list(works)
        self._finish = finish
        self._keep = list(keep)
        self._operation = operation or nullcontext()

    def wait(self) -> None:
        """Waits for the transfers, then does the local part (the sum of received slices)."""
        works, finish = self._works, self._finish
        self._works, self._finish = [], None
        with self._operation:
            for work in works:
                work.wait()
        self._keep = []
        if finish is not None:
            finish()


class _Groups:
    """Process groups over the ranks of another one: one for each kind of traffic, whose order then is its own.

    All engines over those ranks share them, for as long as the other group lives: making them takes milliseconds, each has
    threads and sockets, and with NCCL device memory.
    """

    _made: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _Groups]]] = weakref.WeakKeyDictionary()

    def __init__(self, like: dist.ProcessGroup, device: torch.device) -> None:
        self._engines = 0
        ranks = dist.get_process_group_ranks(like)
        self._members, self._local = ranks, len(ranks) != dist.get_world_size()
        self.timeout: timedelta = like._get_backend(device).options._timeout
        self.gather, self.reduce, self.control = (_new_group(ranks, self.timeout, self._local) for _ in range(3))
        looked_after = len(ranks) > 1 and _backend_for(like, device) == "gloo"
        store = _store(f"zero_core/{like.group_name}/{device.type}") if looked_after else None
        others = [rank for rank in ranks if rank != dist.get_rank()]
        touch = functools.partial(_touch, self.control, others)
        self.watchdog = Watchdog(store, dist.get_rank(like), len(ranks), touch)

    @cached_property
    def checkpoint(self) -> dist.ProcessGroup:
        """The ranks on gloo, for checkpoints: they are written beside training, and their plans are objects on the CPU."""
        return _new_group(self._members, self.timeout, self._local, backend="gloo")

    @classmethod
    def over(cls, like: dist.ProcessGroup, device: torch.device) -> _Groups:
        """The groups over the ranks of `like`. All ranks."""
        made = cls._made.setdefault(like, {})
        if device.type not in made:
            made[device.type] = cls(like, device)
        return made[device.type]

    def next_first_tag(self) -> int:
        """A number for one more engine's first buffer, with room for 65,535 others before the next engine's."""
        self._engines += 1
        return (self._engines % 2**14) << 16  # a tag has 31 bits


class Collectives:
    """An engine's sends over one set of ranks.

    Args:
        process_group: the ranks that share the model; `None` for all.
        device: where the buffers live; the group's backend for that device decides the algorithm.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device) -> None:
        group = process_group or dist.group.WORLD
        if group is None:
            raise RuntimeError(
                "shard() needs torch.distributed: call torch.distributed.init_process_group('gloo') (CPU) or ('nccl') "
                "(CUDA) first, or start the script with torchrun and do so there."
            )
        self.device = device
        self.process_group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.backend = _backend_for(group, device)
        self.traffic = Traffic()
        self._ranks = dist.get_process_group_ranks(group)
        groups = _Groups.over(group, device)
        self._gather_group, self._reduce_group, self._control_group = groups.gather, groups.reduce, groups.control
        self._watchdog, self._timeout = groups.watchdog, groups.timeout
        self._groups = groups
        self.first_tag = groups.next_first_tag()

    @property
    def exchanges_slices(self) -> bool:
        """Whether ranks send slices point to point (gloo) instead of calling the backend's collectives."""
        return self.backend == "gloo"

    @property
    def checkpoint_group(self) -> dist.ProcessGroup:
        """The same ranks on gloo, made at the first use. All ranks."""
        return self._groups.checkpoint

    def all_gather(self, layout: FlatLayout, flat: Tensor, tag: int, label: str) -> Pending:
        """Fills `flat`: every rank's shard is already in its place on that rank and goes to all others.

        Args:
            layout: layout of the buffer.
            flat: 1-D, `layout.padded_numel` elements.
            tag: number of the buffer, from `first_tag` on, the same on all ranks.
            label: name for the profiler.
        """
        with record_function(f"zero_core::gather {label}"):
            if self.world_size == 1 or layout.numel == 0:
                return Pending(())
            shards = _as_bytes(flat).split(layout.shard_numel * flat.element_size())
            filled = [layout.filled_numel(rank) * flat.element_size() for rank in range(self.world_size)]
            if not self.exchanges_slices:
                self.traffic.add("gather", shards[self.rank].numel() * (self.world_size - 1))
                return Pending([_all_gather_single(_as_bytes(flat), shards[self.rank], self._gather_group)])
            self.traffic.add("gather", filled[self.rank] * (self.world_size - 1))
            own = shards[self.rank][: filled[self.rank]]
            operation = self._watchdog.post(f"the gather of the weights of '{label}' and what is beside them ({tag})")
            works = [work for peer in self._peers() for work in self._send(own, peer, tag)]
            works += [w for peer in self._peers() for w in self._receive(shards[peer][: filled[peer]], peer, tag)]
            return Pending(works, operation=operation)

    def _receive(self, data: Tensor, peer: int, tag: int) -> list[Work]:
        group = self._gather_group
        return [_irecv(part, self._ranks[peer], group, tag) for part in _messages(data)]

    def _send(self, data: Tensor, peer: int, tag: int) -> list[Work]:
        group = self._gather_group
        return [_isend(part, self._ranks[peer], group, tag) for part in _messages(data)]

    def reduce_scatter(
        self, layout: FlatLayout, grads: Sequence[Tensor | None], out: Tensor, wire: torch.dtype, tag: int, label: str
    ) -> Pending:
        """Averages gradients over ranks; each rank receives its own shard's elements.

        Args:
            layout: layout of the buffer the gradients belong to.
            grads: one gradient per `layout.params`, in the parameter's shape and memory order; `None` counts as
                zeros, so ranks that took different branches still agree. The gradients must not change until
                `wait` returns.
            out: 1-D, `layout.shard_numel` elements; written by `wait`. Half precision is summed in fp32 (on NCCL in
                the wire's dtype) and rounded to `out` once.
            wire: dtype in which gradients travel.
            tag: number of the buffer, from `first_tag` on, the same on all ranks.
            label: name for the profiler.
        """
        with record_function(f"zero_core::reduce {label}"):
            flats = [None if g is None else flat_view(g, p.stride) for g, p in zip(grads, layout.params, strict=True)]
            if self.exchanges_slices or self.world_size == 1:
                return self._exchange(layout, flats, out, wire, tag, label)
            packed = out.new_empty(layout.padded_numel, dtype=wire)
            packed[layout.numel :].zero_()
            fill(packed, layout, flats)
            # A sum of fp16 gradients that were scaled up to the top of the range would leave it.
            early = self.world_size if wire == torch.float16 else 1
            packed.div_(early)
            shard = out if out.dtype == wire else out.new_empty(out.shape, dtype=wire)
            self.traffic.add("reduce", shard.numel() * shard.element_size() * (self.world_size - 1))
            work = _reduce_scatter_single(_real(shard), _real(packed), self._reduce_group)

            def finish() -> None:
                if shard is not out:
                    out.copy_(shard)
                out.div_(self.world_size / early)

            return Pending([work], finish, keep=[packed])

    def _exchange(
        self, layout: FlatLayout, flats: list[Tensor | None], out: Tensor, wire: torch.dtype, tag: int, label: str
    ) -> Pending:
        """Slices go straight from the gradients to their owners, which sum them in rank order."""
        rank = self.rank
        operation = self._watchdog.post(f"the reduction of the gradients of '{label}' and what is beside them ({tag})")
        works: list[Work] = []
        sent: list[Tensor] = []
        for peer in self._peers():
            for message in plan(layout, peer):
                data = _as_bytes(outgoing(message, flats, out, wire))
                sent.append(data)
                works.append(_isend(data, self._ranks[peer], self._reduce_group, tag))
        received: dict[int, Tensor] = {}
        for peer in self._peers():
            # The lowest peer's slice lands in the result itself; a + b == b + a keeps rank order for the first two.
            first = not received and out.dtype == wire == accumulation_dtype(wire)
            received[peer] = out if first else out.new_empty(out.shape, dtype=wire)
            for message in plan(layout, rank):
                data = _as_bytes(received[peer][message.start : message.stop])
                works.append(_irecv(data, self._ranks[peer], self._reduce_group, tag))
        if self.world_size > 1:
            self.traffic.add("reduce", sum(data.numel() for data in sent))

        def finish() -> None:
            dtype = accumulation_dtype(out.dtype)
            total = out if out.dtype == dtype else out.new_empty(out.shape, dtype=dtype)
            sum_in_rank_order(total, received, rank, lambda target: add_own(target, layout.pieces(rank), flats))
            total[layout.filled_numel(rank) :].zero_()
            if self.world_size > 1:
                total.div_(self.world_size)
            if total is not out:
                out.copy_(total)

        return Pending(works, finish, keep=sent, operation=operation)

    def any_rank(self, flags: list[bool], call: str = "the end of a backward") -> Callable[[], list[bool]]:
        """Starts a logical "or" over ranks; call the result to wait for it.

        Args:
            flags: one flag per parameter, the same length on all ranks.
            call: what it is part of.
        """
        tensor = torch.tensor(flags, dtype=torch.uint8).to(self.device, non_blocking=True)
        if self.world_size == 1 or not flags:
            return lambda: flags
        self.traffic.add("control", tensor.numel())
        finish = self._control(call, dist.all_reduce, tensor, op=dist.ReduceOp.MAX, group=self._control_group)

        def result() -> list[bool]:
            finish()
            return [bool(x) for x in tensor.tolist()]

        return result

    def combine(self, value: Tensor) -> Tensor:
        """Every rank's 0-dim `value`, as a 1-D tensor in rank order: what sums over it is the same bits everywhere."""
        if self.world_size == 1:
            return value.reshape(1)
        self.traffic.add("control", value.element_size() * (self.world_size - 1))
        values = [torch.empty_like(value.reshape(1)) for _ in range(self.world_size)]
        self._control("a gradient norm", dist.all_gather, values, value.reshape(1), group=self._control_group)()
        return torch.cat(values)

    def sum(self, tensor: Tensor) -> None:
        """Adds up all ranks' `tensor`, in place."""
        if self.world_size > 1 and tensor.numel():
            self.traffic.add("control", tensor.numel() * tensor.element_size())
            self._control("a whole gradient", dist.all_reduce, _real(tensor), group=self._control_group)()

    def broadcast(self, tensors: Sequence[Tensor], src: int = 0) -> None:
        """Overwrites `tensors` with those of rank `src` (a rank of this group), in few large messages."""
        if self.world_size == 1 or not tensors:
            return
        with torch.no_grad():
            for batch in _by_dtype(tensors):
                packed = torch.cat([_as_bytes(t.contiguous()) for t in batch])
                self.traffic.add("control", packed.numel() if self.rank == src else 0)
                self._control(
                    "a broadcast from rank 0", dist.broadcast, packed, self._ranks[src], group=self._control_group
                )()
                sizes = [t.numel() * t.element_size() for t in batch]
                for tensor, data in zip(batch, packed.split(sizes), strict=True):
                    tensor.copy_(data.clone().view(tensor.dtype).view(tensor.shape) if data.numel() else tensor)

    def collect(
        self, parts: Sequence[Tensor], runs: Sequence[Sequence[tuple[int, int]]], out: Tensor | None, all_ranks: bool
    ) -> None:
        """Puts what the ranks hold of one tensor together, straight from where it lies.

        Args:
            parts: what this rank holds, 1-D, any device, in the order of its runs.
            runs: per rank, the (start, stop) of each of its parts.
            out: 1-D on the CPU, the whole tensor; on rank 0, or on all ranks.
            all_ranks: whether all ranks want it.
        """
        if out is not None:
            for part, (start, stop) in zip(parts, runs[self.rank], strict=True):
                out[start:stop].copy_(part)
        if self.world_size == 1:
            return
        group = self.checkpoint_group  # made on all ranks, also on one that has nothing to send
        operation = self._watchdog.post("the gathering of whole state")
        works, keep = list[Work](), list[Tensor]()
        for peer in self._peers() if all_ranks else [0]:
            for part in parts if peer != self.rank else ():
                keep.append(_as_bytes(part.to("cpu")))
                works += self._transfer(_isend, keep[-1], peer, group)
                self.traffic.add("control", keep[-1].numel())
        if out is not None:
            for sender in self._peers():
                for start, stop in runs[sender]:
                    works += self._transfer(_irecv, _as_bytes(out[start:stop]), sender, group)
        Pending(works, keep=keep, operation=operation).wait()

    def _transfer(self, transfer: Callable[..., Work], data: Tensor, peer: int, group: dist.ProcessGroup) -> list[Work]:
        return [transfer(part, self._ranks[peer], group, 0) for part in _messages(data)]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order, on all ranks. Not for the step's path."""
        values: list[Any] = [None] * self.world_size
        self.meet("an exchange of state")
        dist.all_gather_object(values, value, group=self._control_group)
        return values

    def meet(self, call: str) -> None:
        """Waits until all ranks are in `call`.

        Raises:
            RuntimeError: within seconds, where others wait for something else; says where each rank is.
        """
        if self.world_size > 1 and self.exchanges_slices:
            self._watchdog.meet(call, self._timeout)
        elif self.world_size > 1:
            dist.barrier(group=self._control_group)

    def _control(self, call: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], None]:
        """Starts a collective that belongs to `call`; call the result to wait for it."""
        operation = self._watchdog.post(call, interruptible=self.exchanges_slices)
        work = collective(*args, **kwargs, async_op=True)
        if not self.exchanges_slices:
            return lambda: work.wait()
        return lambda: operation.finish(work, self._timeout)

    def raising_together(self, may_fail: bool = True) -> AbstractContextManager[None]:
        """See the function of this name."""
        return raising_together(self._control_group, may_fail)

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]


@contextmanager
def raising_together(group: dist.ProcessGroup | None = None, may_fail: bool = True) -> Iterator[None]:
    """A context for work that may fail on one rank alone: then it raises on all. All ranks; it must send nothing itself.

    Args:
        group: the ranks; `None` for all.
        may_fail: whether it can fail at all; the same on all ranks. If not, nothing is sent.

    Raises:
        Exception: its own, on a rank that failed.
        RuntimeError: on the others; says which rank failed and why.
    """
    if not may_fail:
        yield
        return
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    failures: list[str | None] = [None] * dist.get_world_size(group)
    with saying_who_is_lost(dist.get_rank(group), "a call that all ranks make"):
        dist.all_gather_object(failures, None if own is None else f"{type(own).__name__}: {own}", group=group)
    if own is not None:
        raise own
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise RuntimeError(f"rank {rank} failed: {failure}")


@functools.cache
def destroy_process_groups_at_exit() -> None:
    """For hosts that leave torch's process groups to the end of the process.

    gloo's threads free the tensors of their last operation, for which they need the interpreter; one that is late finds
    it gone and aborts the process. A peer that died may keep a group from ending, so this does not wait for ever.
    """

    def destroy() -> None:
        if dist.is_initialized():
            thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
            thread.start()
            thread.join(timeout=5)

    atexit.register(destroy)


def _store(prefix: str) -> Any:
    """The ranks' store, over a connection of its own: a call that waits in it would hold up the other thread's."""
    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore(prefix, c10d._get_default_store().clone())


def _new_group(ranks: list[int], timeout: timedelta, local: bool, backend: str | None = None) -> dist.ProcessGroup:
    group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=local, backend=backend)
    if not isinstance(group, dist.ProcessGroup):
        raise AssertionError("this rank is not in the group it asked for")
    return group


def _messages(data: Tensor) -> tuple[Tensor, ...]:
    return data.split(MESSAGE_BYTES) if data.numel() else ()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    batches: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        batches[tensor.dtype].append(tensor)
    return list(batches.values())


def _backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    # A group may hold one backend per device type ("cpu:gloo,cuda:nccl"); get_backend names only the default one.
    try:
        return str(group._get_backend(device).name()).lower()
    except RuntimeError as error:
        raise ValueError(
            f"the process group has no backend for {device.type} tensors, where the model's parameters are. "
            f"Move the model to the right device first, or call init_process_group with a backend for {device.type} "
            "('gloo' for cpu, 'nccl' for cuda, 'cpu:gloo,cuda:nccl' for both)."
        ) from error


def _all_gather_single(out: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Work:
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: Work = call(out, shard, group=group, async_op=True)
    return work


def _reduce_scatter_single(out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> Work:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: Work = call(out, flat, op=dist.ReduceOp.SUM, group=group, async_op=True)
    return work


def _touch(group: dist.ProcessGroup, ranks: list[int]) -> None:
    """Raises where a rank is gone: gloo takes no message for it any more. Nobody receives these."""
    for rank in ranks:
        _isend(torch.zeros(1, dtype=torch.uint8), rank, group, _TOUCH_TAG)


def _irecv(data: Tensor, src: int, group: dist.ProcessGroup, tag: int) -> Work:
    work = dist.irecv(data, src, group=group, tag=tag)
    if work is None:
        raise AssertionError("irecv from a rank outside the group")
    return work


def _isend(data: Tensor, dst: int, group: dist.ProcessGroup, tag: int) -> Work:
    work = dist.isend(data, dst, group=group, tag=tag)
    if work is None:
        raise AssertionError("isend to a rank outside the group")
    return work
