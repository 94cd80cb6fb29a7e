"""Wiring: `shard` makes a model's engine, `ZeroEngine` is what a training loop holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from zero_core import clipping, memory, placeholder, sharded_state, state_dict, units
from zero_core.collectives import Collectives, Traffic
from zero_core.config import ZeroConfig
from zero_core.deferred import source_of
from zero_core.flat_buffer import BufferPool
from zero_core.materialize import materialize, materialize_buffers
from zero_core.nonfinite import NonFiniteGuard
from zero_core.offload import ShardMemory
from zero_core.optimizer import BoundOptimizer
from zero_core.precision import dtypes_of, is_uniform
from zero_core.reducer import Reducer
from zero_core.runtime import Runtime
from zero_core.sharded_state import ModelState, OptimizerLoad, OptimizerState
from zero_core.unit import Unit


def shard(
    model: nn.Module,
    config: ZeroConfig | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> ZeroEngine:
    """Partitions the states of `model` over ranks, in place: `model` stays the user's object.

    Every rank of the group must call. All ranks start from rank 0's parameters and buffers. The engine lives as long as
    the model; `engine_of(model)` finds it again.

    Args:
        model: any module. Parameters on the meta device are created a unit at a time and initialised by their module's
            `reset_parameters` (or, in a transformers model, its `_init_weights`), so no rank ever holds the whole model;
            of deferred ones (`deferred_loading`) each rank reads its own part.
        config: stage and units; `None` for stage 3 with the defaults.
        process_group: ranks to partition over; `None` for all.
        device: where the model shall live; it is brought there a unit at a time, so that a model in host memory or on
            the meta device need never fit whole. `None`: where its parameters are, or, for the meta device, the current
            CUDA device where the process group serves CUDA, else the CPU.

    Raises:
        ValueError: the model is wrapped, spread over devices, or a unit class matches nothing.
        RuntimeError: `torch.distributed` is not initialised, the model is sharded already, or a module on the meta device
            cannot be initialised.
    """
    config = config or ZeroConfig()
    _check_model(model)
    policy = config.mixed_precision
    uniform = is_uniform(param.dtype for param in model.parameters())
    target = _device_of(model, device)
    collectives = Collectives(process_group, target)
    with collectives.raising_together(may_fail=config.placement.optimizer == "disk"):
        shard_memory = ShardMemory.of(config.placement, target)
    partitioning = units.find(model, config)
    pool = BufferPool()
    built: dict[int, Unit] = {}
    tag = collectives.first_tag
    for index, spec in enumerate(partitioning.units):
        materialize(model, spec, target)
        unit = Unit(
            spec,
            index,
            tag,
            collectives,
            config.zero_stage,
            pool,
            lambda given: dtypes_of(given, policy, uniform),
            shard_memory,
        )
        tag += len(unit.partitions)
        built[id(spec)] = unit
        unit.reshard()  # before the next one is made, so that no more than one is whole
    materialize_buffers(model, target, policy.buffers if policy is not None else None)
    collectives.broadcast([b.data for b in model.buffers()])
    borrowers = [(module, tuple(built[id(spec)] for spec in specs)) for module, specs in partitioning.borrowers]
    runtime = Runtime(model, list(built.values()), borrowers, pool, collectives, config)
    return ZeroEngine(model, config, list(built.values()), runtime, collectives)


def engine_of(item: nn.Module | nn.Parameter | Optimizer) -> ZeroEngine | None:
    """The engine of a sharded model, of one of its parameters or of an optimizer over them; `None` where there is none."""
    if isinstance(item, Optimizer):
        params = (param for group in item.param_groups for param in group["params"])
        return next((found for param in params if (found := engine_of(param)) is not None), None)
    param = item if isinstance(item, nn.Parameter) else next(item.parameters(), None)
    owner = None if param is None else placeholder.owner_of(param)
    engine = owner.engine if isinstance(owner, Runtime) else None
    return engine if isinstance(engine, ZeroEngine) else None


class ZeroEngine:
    """One sharded model. Made by `shard`.

    Methods marked "all ranks" are collective: every rank must call them, in the same order.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ZeroConfig,
        units: list[Unit],
        runtime: Runtime,
        collectives: Collectives,
    ) -> None:
        self.model = model
        self.config = config
        self._units = units
        self._runtime = runtime
        self._collectives = collectives
        self._reducer = Reducer(
            units,
            collectives,
            config,
            on_backward_begin=runtime.begin_backward,
            on_unit_done=runtime.unit_done,
            on_backward_end=runtime.end_backward,
        )
        runtime.on_region = self._reducer.prepare
        runtime.on_backward = self._reducer.begin_backward
        runtime.engine = self
        policy = config.mixed_precision
        self._guard = NonFiniteGuard(policy, runtime, collectives)
        self._bound: dict[int, BoundOptimizer] = {}
        self._steps = 0
        self._step_began = collectives.traffic.copy()
        self._last_step = Traffic()

    @property
    def rank(self) -> int:
        """This rank, within the process group."""
        return self._collectives.rank

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self._collectives.device

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks the model is partitioned over."""
        return self._collectives.process_group

    @property
    def world_size(self) -> int:
        """Number of ranks the model is partitioned over."""
        return self._collectives.world_size

    # -- optimizer -----------------------------------------------------------------------------------------------

    def bind(self, optimizer: Optimizer) -> Optimizer:
        """Makes `optimizer` step on this rank's slices; it stays the user's object, over the model's parameters.

        All ranks must bind the same optimizers in the same order. Nothing is sent, unless state lives on disk: then ranks
        agree that there is room for it.

        Args:
            optimizer: any element-wise torch optimizer over parameters of the model, with or without state.

        Returns:
            the same optimizer.

        Raises:
            ValueError: a parameter in its groups is not the model's.
            UnsupportedOptimizerError: it needs whole matrices (a `ValueError`).
            RuntimeError: it is bound already, or some rank has no room on disk for its state.
        """
        if id(optimizer) in self._bound:
            raise RuntimeError(
                f"this {type(optimizer).__name__} is bound already; bind each optimizer once. Parameters added by "
                "add_param_group are taken in at the next step by themselves."
            )
        bound = BoundOptimizer(optimizer, self._runtime, self._before_step, self._runtime.publish, self._stepped)
        try:
            with self._collectives.raising_together(may_fail=self.config.placement.optimizer == "disk"):
                bound.reserve_state()
        except Exception:
            bound.release()
            raise
        self._bound[id(optimizer)] = bound
        return optimizer

    def _before_step(self, bound: BoundOptimizer) -> None:
        self._reducer.reduce_local_grads()
        self._reducer.drop_zeroed()
        self._runtime.keep_changes()
        if self._guard is not None:
            self._guard.check(bound)

    def _stepped(self) -> None:
        self._steps += 1
        self._last_step = self._collectives.traffic.since(self._step_began)
        self._step_began = self._collectives.traffic.copy()

    @contextmanager
    def showing_slices(self, optimizer: Optimizer) -> Iterator[None]:
        """A context in which a bound optimizer's groups hold this rank's slices with their gradients. All ranks.

        For code that works on what an optimizer holds, like a gradient scaler.
        """
        binding = self._binding(optimizer)
        self._reducer.reduce_local_grads()
        self._reducer.drop_zeroed()
        with binding.showing_slices():
            yield

    def skip_step(self, optimizer: Optimizer, remark: str = "") -> None:
        """Counts and reports a step that is left out because the gradient is not finite. All ranks.

        Raises:
            RuntimeError: too many in a row (`MixedPrecision.max_skips`).
        """
        self._guard.skip(self._binding(optimizer), remark)

    def gradients_are_finite(self) -> AbstractContextManager[None]:
        """A context for steps whose gradients all ranks have found finite, so that nobody looks again."""
        return self._guard.already_checked()

    @property
    def skipped_steps(self) -> int:
        """Steps left out so far because a gradient was not finite; the same on all ranks."""
        return self._guard.skipped

    def _binding(self, optimizer: Optimizer) -> BoundOptimizer:
        if id(optimizer) not in self._bound:
            raise RuntimeError(
                f"this {type(optimizer).__name__} is not bound to the engine; call engine.bind(optimizer)."
            )
        return self._bound[id(optimizer)]

    # -- gradients -----------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """A context for backwards that end no step (gradient accumulation).

        At stage 1 gradients inside stay whole on each rank and nothing is sent, as with DDP. At stages 2 and 3 they are
        reduced into shards all the same, which keeps memory low, unless `ZeroConfig.local_accumulation` asks
        otherwise. The sum is the same.
        """
        return self._reducer.no_sync()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        params: Optimizer | Iterable[nn.Parameter] | None = None,
    ) -> Tensor:
        """Clips the gradient by its norm over all ranks, like `torch.nn.utils.clip_grad_norm_`. All ranks.

        Args:
            max_norm: largest norm left; `inf` only measures.
            norm_type: order of the norm.
            error_if_nonfinite: raise, on all ranks, where the norm is not finite.
            params: an optimizer's parameters or some of the model's; `None` for all.

        Returns:
            the norm before clipping: 0-dim, the same bits on every rank.

        Raises:
            RuntimeError: the norm is not finite and `error_if_nonfinite`.
        """
        total = self.grad_norm(norm_type, params)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"the gradient norm of order {norm_type} is {total.item()}, so it cannot be clipped. Pass "
                "error_if_nonfinite=False to clip all the same, or look for the loss that is not finite."
            )
        self.clip_grads_with_norm_(max_norm, total, params)
        return total

    def grad_norm(self, norm_type: float = 2.0, params: Optimizer | Iterable[nn.Parameter] | None = None) -> Tensor:
        """The averaged gradient's norm over all ranks: 0-dim, the same bits on every rank. All ranks.

        Args:
            norm_type: order of the norm.
            params: as in `clip_grad_norm_`.
        """
        grads = [p.grad for p in self._slices_with_grad(params) if p.grad is not None]
        return clipping.global_norm(grads, norm_type, self._collectives)

    def clip_grads_with_norm_(
        self, max_norm: float, total_norm: Tensor, params: Optimizer | Iterable[nn.Parameter] | None = None
    ) -> None:
        """Scales the gradient by `max_norm / total_norm` where that is less than 1, like torch's function of this name.

        For a norm over several engines: `total_norm` is that of their `grad_norm`s. Sends nothing.
        """
        clipping.clip_by_norm(self._slices_with_grad(params), max_norm, total_norm)

    def clip_grad_value_(self, clip_value: float, params: Optimizer | Iterable[nn.Parameter] | None = None) -> None:
        """Clamps the averaged gradient's elements to ±`clip_value`, like `torch.nn.utils.clip_grad_value_`.

        All ranks must call where gradients may still wait whole (after `no_sync`); otherwise nothing is sent.
        """
        clipping.clip_by_value(self._slices_with_grad(params), clip_value)

    def _slices_with_grad(self, params: Optimizer | Iterable[nn.Parameter] | None) -> list[nn.Parameter]:
        self._reducer.reduce_local_grads()
        self._reducer.drop_zeroed()
        if isinstance(params, Optimizer):
            wanted: Iterable[nn.Parameter] = self._binding(params).params
        else:
            wanted = self._params() if params is None else params
        located = [self._runtime.locate(param) for param in wanted]
        slices = [item.param for _, partition, index in located for item in partition.slices[index]]
        return [param for param in slices if param.grad is not None]

    def full_grad(self, param: nn.Parameter) -> Tensor | None:
        """The whole averaged gradient of a parameter of the model. All ranks.

        Returns:
            a new tensor of the parameter's shape on its device, in the dtype gradients are kept in (fp32 under a policy
            with fp32 masters), the same on all ranks; `None` where no rank has a gradient.

        Raises:
            ValueError: not a parameter of the model.
        """
        self._check_param(param)
        self._reducer.reduce_local_grads()
        self._reducer.drop_zeroed()
        _, partition, index = self._runtime.locate(param)
        shard = partition.master.gradient(index)
        if not any(self._collectives.any_rank([shard is not None], "engine.full_grad()")()):
            return None
        return partition.whole(index, shard)

    # -- parameters and state ------------------------------------------------------------------------------------

    def full_params(self, writeback: bool = False) -> AbstractContextManager[None]:
        """A context in which every parameter is whole on every rank. All ranks.

        Args:
            writeback: keep what is written inside. Make the same change on every rank: of each element the rank that
                owns it keeps its own value. At stages 1 and 2 parameters are whole anyway and changes always stay.

        Raises:
            RuntimeError: on leaving, the model has a parameter that is new, or at stage 3 one that was written without
                `writeback`.
        """
        return self._full_params(writeback)

    @contextmanager
    def _full_params(self, writeback: bool) -> Iterator[None]:
        self.meet("engine.full_params()")
        with self._runtime.full(writeback):
            yield
        for name, param in self.model.named_parameters():
            if not self._runtime.knows(param):
                raise RuntimeError(
                    f"parameter '{name}' is new: the engine does not know it, so it would be neither reduced nor stepped. "
                    "To change which parameters a model has (resize_token_embeddings, adapters), call engine.close() on "
                    "every rank first, and shard and bind again afterwards."
                )

    def full_state_dict(self, *, all_ranks: bool = False) -> dict[str, Any]:
        """`model.state_dict()` as the unsharded model would give it. All ranks.

        Each rank sends its parts of a tensor straight to where the result is, so nobody holds anything beside it.

        Args:
            all_ranks: whether every rank gets it, or rank 0 alone (the others get `{}`).

        Returns:
            tensors on the CPU by fully qualified name, in logical shapes, tied names included. Parameters come in their
            masters' dtype (fp32 under a policy with fp32 masters), so that nothing is lost.
        """
        self.meet("engine.full_state_dict()")
        return state_dict.full_model_state(self.model, self._runtime, self._collectives, all_ranks)

    def load_full_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """`model.load_state_dict` for the sharded model; each rank keeps its part. Sends nothing.

        Args:
            state: a whole state dict, the same on every rank (memory-mapped, say: only this rank's part is read).
            strict: as in `torch.nn.Module.load_state_dict`.

        Returns:
            the missing and unexpected keys.
        """
        return state_dict.load_full_model_state(self.model, self._runtime, state, strict)

    def loading(self) -> AbstractContextManager[None]:
        """A context in which whole values copied into parameters are loaded: each rank keeps its part. Sends nothing.

        For code that calls `model.load_state_dict` itself. All ranks, with the same values.
        """
        return self._runtime.loading()

    def full_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """`optimizer.state_dict()` as the unsharded optimizer would give it, on rank 0 (`{}` elsewhere). All ranks.

        Tensors are on the CPU; like `full_state_dict`, it holds nothing beside the result.

        Raises:
            RuntimeError: the optimizer is not bound.
        """
        binding = self._binding(optimizer)
        self.meet("engine.full_optimizer_state_dict()")
        return state_dict.full_optimizer_state(binding, self._runtime, self._collectives)

    def load_full_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Loads a whole optimizer state (from any world size or a plain run); each rank keeps its part. Sends nothing.

        Args:
            optimizer: a bound optimizer with the same parameter groups as the saved one.
            state: the same on every rank.

        Raises:
            RuntimeError: the optimizer is not bound.
            ValueError: its groups do not fit.
        """
        state_dict.load_full_optimizer_state(self._binding(optimizer), self._runtime, state)

    # -- for checkpoints -------------------------------------------------------------------------------------------

    @property
    def checkpoint_group(self) -> dist.ProcessGroup:
        """The same ranks, on gloo, for the traffic of checkpoints alone, which may go on beside training. All ranks."""
        return self._collectives.checkpoint_group

    def raising_together(self) -> AbstractContextManager[None]:
        """See `collectives.raising_together`; over the ranks of this engine. All ranks."""
        return self._collectives.raising_together()

    def model_state(self) -> ModelState:
        """The model's state by name, of which this rank has a part. Sends nothing."""
        return sharded_state.model_state(self.model, self._runtime)

    def optimizer_state(self, optimizer: Optimizer) -> OptimizerState:
        """A bound optimizer's state by name, of which this rank has a part. Sends nothing."""
        return sharded_state.optimizer_state(self._binding(optimizer), self._runtime)

    def optimizer_load(self, optimizer: Optimizer) -> OptimizerLoad:
        """Room for a bound optimizer's state. Sends nothing."""
        return OptimizerLoad(self._binding(optimizer), self._runtime)

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        """A context for writing into masters (the tensors of `model_state`); afterwards all ranks know them. All ranks."""
        if not self.config.zero_stage.shards_parameters:
            for unit in self._units:
                unit.gather()  # what is still sent must not change
        yield
        self._runtime.publish(self._units)

    # -- forward, reports ----------------------------------------------------------------------------------------

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls `function(*args, **kwargs)` as if it were the model's `forward`.

        For methods other than `forward` that read parameters directly (a training step, `encode`). At stage 3 all
        ranks must call, with the same flow through the model's modules.
        """
        return self._runtime.run(function, *args, **kwargs)

    def report(self) -> memory.Report:
        """Bytes held now and sent in the last step on this rank, beside the paper's formulas. Sends nothing."""
        stage = self.config.zero_stage
        self._reducer.drop_zeroed()
        states = memory.unique_tensors(
            value
            for bound in self._bound.values()
            for entries in bound.optimizer.state.values()
            for value in entries.values()
        )
        return memory.Report(
            stage.value,
            self.rank,
            self.world_size,
            self._steps,
            self._guard.skipped,
            memory.held(self._units, stage, self.world_size, self._runtime.spare_nbytes, states),
            memory.sent(self._units, stage, self.world_size, self._last_step),
        )

    def meet(self, call: str) -> None:
        """Waits until all ranks are in `call`, which is named where they are not. All ranks.

        Raises:
            RuntimeError: within seconds, where no rank can go on; says where each one is (gloo).
        """
        self._collectives.meet(call)

    def close(self) -> None:
        """Takes the engine off the model, whose parameters are whole again, in their first dtype, on every rank. All ranks.

        Bound optimizers keep stepping this rank's slices only, so make new ones.
        """
        self.meet("engine.close()")
        for unit in self._units:
            unit.gather()
        self._runtime.keep_changes()
        for partition in (partition for unit in self._units for partition in unit.partitions):
            partition.restore()
        self._runtime.remove_hooks()
        self._reducer.remove_hooks()
        for bound in self._bound.values():
            bound.release()
        self._bound.clear()

    def __repr__(self) -> str:
        stage, world = self.config.zero_stage, self.world_size
        rows = [("unit", "modules", "parameters", "elements", "bytes", "held here")]
        for unit in self._units:
            kinds = dict.fromkeys(type(module).__name__ for module in unit.modules)
            here = sum(p.layout.filled_numel(self.rank) for p in unit.partitions)
            held = f"{here:,} of {unit.numel:,}" if stage.shards_parameters else f"all, steps {here:,}"
            rows.append(
                (
                    unit.name,
                    ", ".join(kinds),
                    str(len(unit.params)),
                    f"{unit.numel:,}",
                    f"{unit.nbytes:,}",
                    held,
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        )
        head = f"ZeroEngine(stage={stage.value}, rank={self.rank} of {world}, backend='{self._collectives.backend}')"
        return f"{head}\n{table}"

    def _params(self) -> Iterator[nn.Parameter]:
        return (param for unit in self._units for param in unit.params)

    def _check_param(self, param: nn.Parameter) -> None:
        if not self._runtime.knows(param):
            raise ValueError(
                f"expected a parameter of the sharded model, got {type(param).__name__} of shape {tuple(param.shape)}. "
                "Take it from model.parameters(), not from the optimizer, whose parameters are slices."
            )


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"shard() expects a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, (DistributedDataParallel, DataParallel)) or type(model).__name__ == "FullyShardedDataParallel":
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}, which does what the engine does. Pass the module inside: "
            "shard(model.module, ...)."
        )
    for name, param in model.named_parameters():
        if engine_of(param) is not None:
            raise RuntimeError(
                f"parameter '{name}' belongs to an engine already. Shard a model once; to change the stage, call "
                "engine.close() first."
            )
        if hasattr(param, "device_mesh"):
            raise ValueError(
                f"parameter '{name}' is a DTensor (fully_shard or tensor parallelism was applied). Pass the plain model."
            )


def _device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return _with_index(torch.device(device))
    devices = {p.device for p in model.parameters() if p.device.type != "meta" and source_of(p) is None}
    if len(devices) > 1:
        raise ValueError(
            f"the parameters are on several devices: {sorted(map(str, devices))}. Name one: shard(..., device=...)."
        )
    if devices:
        return devices.pop()
    served = dist.is_initialized() and "nccl" in str(dist.get_backend_config())
    return _with_index(torch.device("cuda")) if served else torch.device("cpu")


def _with_index(device: torch.device) -> torch.device:
    # "cuda" is not equal to "cuda:0", where its tensors are.
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
