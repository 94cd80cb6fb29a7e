"""When gradients are ready, reduced and freed; how they add up over several backwards."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from zero_core.collectives import Collectives
from zero_core.config import ZeroConfig
from zero_core.master import Slice
from zero_core.placeholder import PartitionedGradient, placeholder_grad
from zero_core.precision import is_half
from zero_core.unit import Partition, Unit


class Reducer:
    """Turns the gradients of a backward into averaged shards, unit by unit, in an order all ranks share.

    A unit is reduced once all its trainable parameters reported. At the end of backward the others are reduced with
    zeros for what is missing, so ranks that took different branches still make the same calls. The order is reverse
    registration at first, then what rank 0 saw in its first backward.

    Args:
        units: the engine's units.
        collectives: the engine's sends.
        config: decides where gradients wait inside `no_sync`.
        on_backward_begin: called at the first event of a backward.
        on_unit_done: called when all trainable parameters of a unit reported in this backward.
        on_backward_end: called after the reductions of a backward, on every rank that took part.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        collectives: Collectives,
        config: ZeroConfig,
        on_backward_begin: Callable[[], None],
        on_unit_done: Callable[[Unit], None],
        on_backward_end: Callable[[], None],
    ) -> None:
        self._units = units
        self._collectives = collectives
        self._config = config
        self._on_backward_begin = on_backward_begin
        self._on_unit_done = on_unit_done
        self._on_backward_end = on_backward_end
        self._params: list[tuple[Unit, Partition, int]] = [
            (unit, partition, i)
            for unit in units
            for partition in unit.partitions
            for i in range(len(partition.params))
        ]
        self._first_position: dict[Partition, int] = {}
        for position, (_, partition, _index) in enumerate(self._params):
            self._first_position.setdefault(partition, position)
        self._order: list[Unit] = list(reversed(units))
        self._order_is_shared = False
        self._hooked: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._syncs = True
        self.has_local_grads = False
        self.in_backward = False
        # How often a parameter reports in one backward: once, but for reentrant checkpointing of shared layers.
        self._expected: Counter[int] = Counter()
        self._reset()
        self._hook_trainable()

    def _reset(self) -> None:
        self.in_backward = False
        self._reports: Counter[int] = Counter()
        self._waiting_for: dict[Unit, int] = {}
        self._ready: set[Unit] = set()
        self._launched: list[Unit] = []
        self._in_flight: Unit | None = None
        self._late: set[Unit] = set()
        self._placeholders: set[int] = set()
        self._doubtful: list[tuple[Partition, Slice]] = []

    def prepare(self) -> None:
        """Before a forward: forgets a failed backward, hooks parameters that now want gradients and have no hook yet."""
        self._recover()
        if torch.is_grad_enabled():
            self._hook_trainable()
            self.drop_zeroed()

    def _hook_trainable(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for position, (_, partition, index) in enumerate(self._params):
                param = partition.params[index]
                if param.requires_grad and position not in self._hooked:
                    self._hooked.add(position)
                    partition.promote()
                    # Weak, or parameter -> hook -> engine -> parameter would be a cycle through C++ that is never freed.
                    before, after = weakref.WeakMethod(self.begin_backward), weakref.WeakMethod(self._on_grad)
                    self._handles += [
                        param.register_hook(lambda grad, call=before: _call(call)),
                        param.register_post_accumulate_grad_hook(lambda p, call=after, at=position: _call(call, at)),
                    ]

    def remove_hooks(self) -> None:
        """Undoes the hooks on the parameters and takes the placeholders out of their `.grad`."""
        for handle in self._handles:
            handle.remove()
        with torch._C.DisableTorchFunctionSubclass():
            for _, partition, index in self._params:
                if isinstance(partition.params[index].grad, PartitionedGradient):
                    partition.params[index].grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside end no step: their gradients may wait whole on each rank, if the config says so."""
        before = self._syncs
        self._syncs = not self._config.accumulates_locally
        try:
            yield
        finally:
            self._syncs = before

    def begin_backward(self) -> None:
        """Gets ready for the first gradient of a backward; later calls within it are no-ops."""
        if self.in_backward or torch._C._current_graph_task_id() == -1:
            return
        self._reset()
        self.drop_zeroed()  # again: a retained graph comes here without a forward in between
        self.in_backward = True
        self._count_trainable()
        waits_whole = not self._syncs or self.has_local_grads
        with torch._C.DisableTorchFunctionSubclass():
            for position, (_, partition, index) in enumerate(self._params):
                param = partition.params[index]
                if isinstance(param.grad, PartitionedGradient):
                    param.grad = None  # autograd would add to it
                    self._placeholders.add(position)
                if waits_whole and param.grad is None and is_half(param.dtype):
                    param.grad_dtype = torch.float32  # micro-batches add up with all digits
        self._on_backward_begin()
        end = weakref.WeakMethod(self._end_backward)
        Variable._execution_engine.queue_callback(lambda: _call(end))

    def _count_trainable(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for position, (unit, partition, index) in enumerate(self._params):
                if partition.params[index].requires_grad:
                    self._waiting_for[unit] = self._waiting_for.get(unit, 0) + 1
                    self._expected.setdefault(position, 1)

    def drop_zeroed(self) -> None:
        """Frees the shards of gradients that were set to `None`: `zero_grad` sees the placeholders only."""
        if self.in_backward:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for _, partition, index in self._params:
                if partition.params[index].grad is None:
                    for item in partition.slices[index]:
                        item.param.grad = None

    def _on_grad(self, position: int) -> None:
        unit, partition, index = self._params[position]
        self.begin_backward()
        self._reports[position] += 1
        if self._reports[position] < self._expected[position]:
            return
        if self._syncs:
            self._collect(partition, index)
        else:
            self.has_local_grads = True
        if self._reports[position] > self._expected[position]:
            self._late.add(unit)
            return
        self._waiting_for[unit] -= 1
        if self._waiting_for[unit] == 0:
            self._ready.add(unit)
            if self._syncs:
                self._launch_ready()
            self._on_unit_done(unit)

    def _collect(self, partition: Partition, index: int) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            param = partition.params[index]
            grad, param.grad = param.grad, None
            if param.grad_dtype != param.dtype:
                param.grad_dtype = param.dtype
        earlier = partition.grads[index]
        partition.grads[index] = grad if grad is None or earlier is None else earlier + grad

    def _launch_ready(self) -> None:
        for unit in self._order[len(self._launched) :]:
            if unit not in self._ready:
                return
            self._launch(unit)

    def _launch(self, unit: Unit) -> None:
        self._launched.append(unit)
        if unit not in self._waiting_for:  # nothing trainable, on any rank
            return
        self._finish_in_flight()  # one unit in flight and one filling bound the gradients held
        unit.start_reduce()
        self._in_flight = unit

    def _finish_in_flight(self) -> None:
        unit, self._in_flight = self._in_flight, None
        if unit is not None:
            for partition in unit.partitions:
                self._doubtful += [(partition, item) for item in partition.finish_reduce()]

    def _end_backward(self) -> None:
        if not self.in_backward:
            return
        if self._reports and self._syncs:
            self._reduce_remaining()
        else:
            self._show_placeholders([False] * len(self._params))
        self._expected |= self._reports
        self._reset()
        self._on_backward_end()

    def _reduce_remaining(self) -> None:
        for unit in self._order[len(self._launched) :]:
            self._collect_local(unit)
            self._launch(unit)
        seen = list(self._launched)
        for unit in sorted(self._late, key=lambda late: late.index):
            self._launch(unit)
        self._finish_in_flight()
        for unit in self._waiting_for:
            for partition in unit.partitions:
                partition.master.settle()
        self.has_local_grads = False
        self._show_placeholders(self._used_anywhere())
        if not self._order_is_shared:
            self._share_order([unit for unit in seen if unit in self._ready])

    def _collect_local(self, unit: Unit) -> None:
        """Takes what earlier, unsynchronised backwards left in `.grad` of parameters that got nothing now."""
        for partition in unit.partitions:
            for index in range(len(partition.params)):
                if partition.grads[index] is None:
                    self._collect(partition, index)

    def _used_anywhere(self) -> list[bool]:
        """Per parameter, whether some rank had a gradient. Only a rank that missed one waits for the answer."""
        used = [bool(self._reports[position]) for position in range(len(self._params))]
        result = self._collectives.any_rank(used)
        return result() if self._doubtful or not all(used) else used

    def _show_placeholders(self, used: list[bool]) -> None:
        for partition, item in self._doubtful:
            if not used[self._first_position[partition] + item.piece.index]:
                item.param.grad = None  # unused on every rank: its momentum must not drift
        with torch._C.DisableTorchFunctionSubclass():
            for at, (_, partition, index) in enumerate(self._params):
                param = partition.params[index]
                has_shard = (
                    used[at]
                    or at in self._placeholders
                    or any(item.param.grad is not None for item in partition.slices[index])
                )
                if param.grad is None and has_shard:
                    param.grad = placeholder_grad(param)

    def _share_order(self, seen: list[Unit]) -> None:
        order = [unit.index for unit in seen] + [unit.index for unit in self._order if unit not in set(seen)]
        tensor = torch.tensor(order, dtype=torch.int64, device=self._collectives.device)
        self._collectives.broadcast([tensor])
        by_index = {unit.index: unit for unit in self._units}
        self._order = [by_index[index] for index in tensor.tolist()]
        self._order_is_shared = True

    def reduce_local_grads(self) -> None:
        """Reduces gradients that were left whole by backwards inside `no_sync`. All ranks call it."""
        if not self.has_local_grads:
            return
        self._reset()
        self._count_trainable()
        with torch._C.DisableTorchFunctionSubclass():
            for position, (_, partition, index) in enumerate(self._params):
                param = partition.params[index]
                self._reports[position] += param.requires_grad and param.grad is not None
        self._reduce_remaining()
        self._reset()

    def _recover(self) -> None:
        if self.in_backward and torch._C._current_graph_task_id() == -1:
            for unit in self._units:
                for partition in unit.partitions:
                    partition.forget_grads()
            self._reset()


def _call(method: weakref.WeakMethod[Callable[..., None]], *args: int) -> None:
    if (function := method()) is not None:
        function(*args)
