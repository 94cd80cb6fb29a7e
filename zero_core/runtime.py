"""When a unit's weights are needed: module hooks, saved tensors, touches; what is gathered ahead and let go."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from zero_core import placeholder
from zero_core.collectives import Collectives
from zero_core.config import ZeroConfig
from zero_core.errors import PartitionedParameterError
from zero_core.flat_buffer import BufferPool, FlatBuffer
from zero_core.unit import Partition, Unit, UnitState


@dataclass(frozen=True)
class SavedView:
    """What autograd keeps instead of a view of a unit's weights: enough to make the view again."""

    unit: Unit
    buffer: FlatBuffer
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class SavedByCaller:
    """What hooks that surround the region made of a tensor that is not the engine's."""

    packed: Any
    unpack: Callable[[Any], Tensor]


class Runtime:
    """Brings weights in for their use and lets them go afterwards.

    A *region* is a stretch of forward code in which a touched parameter is gathered rather than refused: the call of
    the model or of any module with a unit, or `run`. While a region is open, what autograd saves of a unit's
    weights is replaced by a `SavedView`, so backward gathers exactly the units it reads, whichever way the forward came by
    them.

    Args:
        model: the root module.
        units: the engine's units.
        borrowers: modules that use parameters of units that are not theirs.
        pool: memory of the whole weights.
        collectives: the engine's sends.
        config: stage and prefetch.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        borrowers: Sequence[tuple[nn.Module, tuple[Unit, ...]]],
        pool: BufferPool,
        collectives: Collectives,
        config: ZeroConfig,
    ) -> None:
        self._model = model
        self._units = units
        self._collectives = collectives
        self._config = config
        self._stage = config.zero_stage
        self._where: dict[int, tuple[Unit, Partition, int]] = {
            id(p): (u, part, i) for u in units for part in u.partitions for i, p in enumerate(part.params)
        }
        self._pool = pool
        self._unit_of = {part.buffer: unit for unit in units for part in unit.partitions}
        self._depth = 0
        self._saving: saved_tensors_hooks | None = None
        self._policy = config.mixed_precision
        self._autocast: torch.autocast | None = None
        self._outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = None
        self._active: Counter[Unit] = Counter()
        self._outstanding: Counter[Unit] = Counter()
        self._full = 0
        self._loading = False
        self._buffers_changed = False
        self._trace: list[Unit] = []
        self._expected: dict[bool, list[Unit]] = {False: [], True: []}
        self._tracing_backward = False
        # The engine lives as long as the model: its hooks hold this object.
        self.engine: object = None
        self.on_region: Callable[[], None] = lambda: None
        self.on_backward: Callable[[], None] = lambda: None
        self._handles = self._hook_modules(borrowers)
        for param in itertools.chain.from_iterable(unit.params for unit in units):
            placeholder.register(param, self)

    # -- hooks -------------------------------------------------------------------------------------------------

    def _hook_modules(self, borrowers: Sequence[tuple[nn.Module, tuple[Unit, ...]]]) -> list[RemovableHandle]:
        needs: dict[nn.Module, list[Unit]] = {self._model: []}
        for unit in self._units:
            for module in unit.modules:
                needs.setdefault(module, []).append(unit)
        for module, units in borrowers:
            needs.setdefault(module, []).extend(units)
        self._root_units = tuple(needs[self._model])
        handles = []
        for module, wanted in needs.items():
            hook = ModuleHook(self, tuple(wanted))
            handles.append(module.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(hook.after, always_call=True))
        return handles

    def remove_hooks(self) -> None:
        """Undoes what the constructor attached to the model."""
        for handle in self._handles:
            handle.remove()
        for param in itertools.chain.from_iterable(unit.params for unit in self._units):
            placeholder.forget(param)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `function` in a region, as if it were the model's `forward`."""
        hook = ModuleHook(self, self._root_units)
        hook.before(self._model, args, kwargs)
        output = None
        try:
            output = function(*args, **kwargs)
            return output
        finally:
            hook.after(self._model, args, output)

    def enter(self, units: Sequence[Unit], inputs: Any) -> None:
        """A module whose weights are `units` is about to run."""
        if self._depth == 0 and not self._in_backward:
            self._open_region()
        self._depth += 1
        for unit in units:
            self._active[unit] += 1
            self.use(unit)
            self._watch_inputs(unit, inputs)

    def leave(self, units: Sequence[Unit], output: Any) -> None:
        """The module has run, or raised."""
        self._depth -= 1
        for unit in units:
            self._active[unit] -= 1
        if self._depth == 0 and not self._in_backward:
            self._close_region(output)

    def cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The model's inputs, floating-point ones in the weights' dtype where no autocast will do that."""
        policy = self._policy
        if module is not self._model or policy is None or policy.autocasts:
            return None
        return tree_map_only(Tensor, _to_floating(policy.param), (args, kwargs))

    def cast_output(self, module: nn.Module, output: Any) -> Any:
        """The model's output, floating-point tensors in the dtype that the policy asks for."""
        policy = self._policy
        if module is not self._model or policy is None or policy.output is None:
            return output
        return tree_map_only(Tensor, _to_floating(policy.output), output)

    def _open_region(self) -> None:
        self.on_region()
        self._sync_buffers()
        self._begin_trace(backward=False)
        if self._policy is not None and self._policy.autocasts:
            self._autocast = torch.autocast(self._collectives.device.type, self._policy.param)
            self._autocast.__enter__()
        # Whether gradients are on may change inside the region, so the hooks are always set.
        if self._stage.shards_parameters and not torch.compiler.is_compiling():
            # Only the topmost hooks are called, so those of the caller (say, offloading of activations) go on from here.
            self._outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
            self._saving = saved_tensors_hooks(self._pack, self._unpack)
            self._saving.__enter__()

    def _close_region(self, output: Any) -> None:
        if self._saving is not None:
            self._saving.__exit__()
            self._saving = None
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
            self._autocast = None
        self._end_trace()
        grads = [t for t in _tensors(output) if t.requires_grad] if torch.is_grad_enabled() else []
        for tensor in grads:
            if tensor.grad_fn is not None:
                tensor.register_hook(_weak_hook(self.on_backward))
        # The last units' weights are what backward needs first.
        self.reshard(self._last(2) if grads else ())

    @property
    def _in_backward(self) -> bool:
        return bool(torch._C._current_graph_task_id() != -1)

    # -- gathering and letting go --------------------------------------------------------------------------------

    def use(self, unit: Unit) -> None:
        """Makes `unit`'s weights whole, lets go of idle ones first, and gathers ahead what comes next."""
        if unit.state is not UnitState.GATHERED:
            if not self._in_backward:
                # Two units at a time: this one and the next, or at the end of the pass the one before.
                self._reshard_idle([unit, *(self._next(unit) or self._last(1))])
            unit.gather()
        if self._stage.shards_parameters and (not self._trace or self._trace[-1] is not unit):
            self._trace.append(unit)
            following = self._next(unit)
            for ahead in following:
                ahead.start_gather()
            if not following:
                self._pool.clear()  # nobody's turn is next

    def _last(self, count: int) -> list[Unit]:
        """The units used last; the model's own, small and used throughout, count only where there are no others."""
        used = list(dict.fromkeys(reversed(self._trace)))
        return [unit for unit in used if unit not in self._root_units][:count] or used[:count]

    def _next(self, unit: Unit) -> list[Unit]:
        """The sharded units to gather ahead of their use, by the order of the last pass and the byte budget."""
        if not self._stage.shards_parameters or self._config.prefetch_bytes == 0:
            return []
        expected = self._expected[self._tracing_backward]
        at = len(self._trace) - 1 if self._trace and self._trace[-1] is unit else len(self._trace)
        if at >= len(expected) or expected[at] is not unit:
            return []
        ahead: list[Unit] = []
        budget = self._config.prefetch_bytes
        for candidate in expected[at + 1 :]:
            if candidate is unit or candidate in ahead:
                continue
            nbytes = sum(u.nbytes for u in ahead) + candidate.nbytes
            if ahead and (budget is None or nbytes > budget):
                break
            ahead.append(candidate)
        return ahead

    def release(self, unit: Unit) -> None:
        """Lets go of `unit` in backward: nothing there reads its weights any more."""
        if not self._active[unit] and not self._full:
            unit.reshard()

    def _reshard_idle(self, keep: Sequence[Unit] = ()) -> None:
        if not self._stage.shards_parameters or self._full:
            return
        for unit in self._units:
            if unit.state is not UnitState.SHARDED and not self._active[unit] and unit not in keep:
                unit.reshard()

    @property
    def spare_nbytes(self) -> int:
        """Bytes kept for the next gather."""
        return self._pool.spare_nbytes

    def reshard(self, keep: Sequence[Unit] = ()) -> None:
        """Lets go of every unit that no running module uses, but for `keep`, and of their memory."""
        self._reshard_idle(keep)
        self._pool.clear()

    def _begin_trace(self, backward: bool) -> None:
        self._trace = []
        self._tracing_backward = backward

    def _end_trace(self) -> None:
        if self._trace:
            self._expected[self._tracing_backward] = list(self._trace)

    # -- backward ------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> SavedView | SavedByCaller | Tensor:
        buffer = self._pool.owner(tensor) if tensor.layout is torch.strided else None
        # What sees the memory as another dtype stays a view; it keeps that memory for itself.
        if buffer is not None and tensor.dtype == buffer.layout.dtype and not tensor.is_conj():
            offset = int(tensor.storage_offset() - buffer.tensor.storage_offset())
            return SavedView(self._unit_of[buffer], buffer, tensor.size(), tensor.stride(), offset)
        if self._outer is None:
            return tensor
        pack, unpack = self._outer
        return SavedByCaller(pack(tensor), unpack)

    def _unpack(self, saved: SavedView | SavedByCaller | Tensor) -> Tensor:
        if isinstance(saved, SavedView):
            if self._in_backward:
                self.on_backward()
            self.use(saved.unit)
            return saved.buffer.view(saved.size, saved.stride, saved.offset)
        return saved.unpack(saved.packed) if isinstance(saved, SavedByCaller) else saved

    def begin_backward(self) -> None:
        """The first event of a backward."""
        self._begin_trace(backward=True)

    def end_backward(self) -> None:
        """The last event of a backward."""
        self._end_trace()
        self._outstanding.clear()
        self.reshard()
        self._begin_trace(backward=False)

    def unit_done(self, unit: Unit) -> None:
        """All trainable parameters of `unit` have their gradients, so its uses in the graph are behind us."""
        if self._stage.shards_parameters and not _has_frozen(unit):
            self.release(unit)

    def _watch_inputs(self, unit: Unit, inputs: Any) -> None:
        """Frozen weights are read until the gradients of the unit's inputs exist; no parameter reports that."""
        if not self._stage.shards_parameters or not torch.is_grad_enabled() or not _has_frozen(unit):
            return
        # A recomputed forward has no graph of its own to watch, unless (reentrant) the first one had none.
        if self._in_backward and self._outstanding[unit]:
            return
        tensors = [t for t in _tensors(inputs) if t.requires_grad]
        if not tensors:
            return
        self._outstanding[unit] += 1

        def done(_: Any) -> None:
            self._outstanding[unit] -= 1
            if self._outstanding[unit] == 0:
                self.release(unit)

        register_multi_grad_hook(tensors, done, mode="all")

    # -- owner of the parameters ---------------------------------------------------------------------------------

    def on_touch(self, param: nn.Parameter, func: Callable[..., Any]) -> None:
        """Gathers inside a region or a backward, waits for a gather on its way, refuses elsewhere."""
        unit, partition, index = self._where[id(param)]
        if not self._stage.shards_parameters:
            unit.gather()
            partition.show_views()
        elif self._depth or self._in_backward or self._full:
            self.use(unit)
        else:
            raise PartitionedParameterError(
                partition.layout.params[index].fqn,
                self._collectives.rank,
                self._collectives.world_size,
                f"The value ({getattr(func, '__name__', func)})",
                "Wrap the code in `with engine.full_params():` on every rank (writeback=True to change it); for a "
                "checkpoint call engine.full_state_dict() / engine.load_full_state_dict().",
            )

    def on_copy(self, param: nn.Parameter, source: Tensor) -> bool:
        """While a state dict is loaded, each rank takes its part of `source`; nothing is gathered."""
        if not self._loading:
            return False
        unit, partition, index = self._where[id(param)]
        partition.master.load(index, source)
        if unit.state is UnitState.GATHERED:
            with torch.no_grad():
                partition.buffer.views[index].copy_(source)
        return True

    def zero_gradient(self, param: nn.Parameter) -> None:
        """Zeroes this rank's part of the gradient."""
        _, partition, index = self._where[id(param)]
        for item in partition.slices[index]:
            if item.param.grad is not None:
                item.param.grad.zero_()

    def gradient_error(self, param: nn.Parameter) -> Exception:
        """The error for reading `param.grad`."""
        _, partition, index = self._where[id(param)]
        return PartitionedParameterError(
            partition.layout.params[index].fqn,
            self._collectives.rank,
            self._collectives.world_size,
            "The gradient",
            "Call engine.full_grad(param) on every rank for the whole averaged gradient, engine.clip_grad_norm_ or "
            "engine.clip_grad_value_ to clip.",
        )

    def locate(self, param: nn.Parameter) -> tuple[Unit, Partition, int]:
        """Where `param` lives.

        Raises:
            KeyError: the engine does not know it.
        """
        return self._where[id(param)]

    @property
    def rank(self) -> int:
        """This rank."""
        return self._collectives.rank

    def knows(self, param: object) -> bool:
        """Whether `param` belongs to this engine."""
        return id(param) in self._where

    def fqn(self, param: nn.Parameter) -> str:
        """The fully qualified name of `param`."""
        _, partition, index = self._where[id(param)]
        return partition.layout.params[index].fqn

    @contextmanager
    def full(self, writeback: bool) -> Iterator[None]:
        """Keeps every unit whole; see `ZeroEngine.full_params`."""
        for unit in self._units:
            unit.gather()
        self._full += 1
        versions = self._versions()
        try:
            yield
        finally:
            self._full -= 1
            changed = [name for name, version in self._versions().items() if versions[name] != version]
            if writeback:
                self.keep_changes()
                self.publish(self._units)
            else:
                self.reshard()
        if changed and not writeback and self._stage.shards_parameters:
            raise RuntimeError(
                f"parameter '{changed[0]}' was written inside full_params(writeback=False) on rank "
                f"{self._collectives.rank}, and the change is lost. Use full_params(writeback=True), with the same change "
                "on every rank."
            )

    def partitions(self) -> Iterator[Partition]:
        """All partitions, in the order all ranks have."""
        return (partition for unit in self._units for partition in unit.partitions)

    def keep_changes(self) -> None:
        """Takes what a user wrote into weights that are whole over into the masters."""
        for unit in self._units:
            if unit.state is UnitState.GATHERED:
                for partition in unit.partitions:
                    partition.keep_changes()

    def _versions(self) -> dict[str, int]:
        with torch._C.DisableTorchFunctionSubclass():
            return {self.fqn(param): param._version for unit in self._units for param in unit.params}

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, `copy_` into a parameter goes to this rank's master, and into the weights where they are whole."""
        self._loading = True
        own_masters = [part for unit in self._units for part in unit.partitions if not part.master.in_place]
        if not self._stage.shards_parameters:
            for unit in self._units:
                unit.gather()
            for partition in own_masters:
                partition.guard()
        try:
            yield
        finally:
            self._loading = False
            if not self._stage.shards_parameters:
                for partition in own_masters:
                    partition.show_views()

    def publish(self, units: Sequence[Unit]) -> None:
        """Makes changed masters known to all ranks: at once at stages 1 and 2, at the next gather at stage 3."""
        if not self._stage.shards_parameters:
            for unit in units:
                unit.publish()
            return
        self.reshard()  # what is gathered is old now
        for unit in units:
            for partition in unit.partitions:
                partition.refresh_shard()
            if unit.state is not UnitState.SHARDED:  # a step inside a training step that is still running
                unit.gather()
                unit.refresh()

    # -- buffers -------------------------------------------------------------------------------------------------

    def _sync_buffers(self) -> None:
        # Only a training forward changes buffers (BatchNorm), so only the next forward has something to send. Ranks that
        # evaluate different numbers of batches still make the same calls.
        if self._buffers_changed:
            self._collectives.broadcast([b for b in self._model.buffers() if b.numel()])
        self._buffers_changed = self._model.training and torch.is_grad_enabled()


class ModuleHook:
    """The forward hooks of one module. A copied or unpickled module gets inert ones: the engine stays with the original."""

    def __init__(self, runtime: Runtime | None, units: tuple[Unit, ...]) -> None:
        self._runtime = runtime
        self._units = units

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Forward pre-hook."""
        if self._runtime is None:
            return None
        self._runtime.enter(self._units, (args, kwargs))
        return self._runtime.cast_inputs(module, args, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook; also called when forward raised, with no output."""
        if self._runtime is None:
            return None
        output = self._runtime.cast_output(module, output)
        self._runtime.leave(self._units, output)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook(None, ())

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (None, ())


def _has_frozen(unit: Unit) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return any(not param.requires_grad for param in unit.params)


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested containers, dataclasses and plain objects (one level of attributes)."""
    found: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif leaf is not None and hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)):
            found += [value for value in tree_leaves(list(vars(leaf).values())) if isinstance(value, Tensor)]
    return found


def _to_floating(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def _weak_hook(callback: Callable[[], None]) -> Callable[[Tensor], None]:
    reference = weakref.WeakMethod(callback)

    def hook(_: Tensor) -> None:
        if (call := reference()) is not None:
            call()

    return hook
