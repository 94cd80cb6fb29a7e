"""Binding a torch optimizer to the shards: it steps on this rank's slices and never learns of the others."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_core.errors import UnsupportedOptimizerError
from zero_core.master import Slice
from zero_core.messages import flat_view
from zero_core.precision import is_half
from zero_core.runtime import Runtime
from zero_core.unit import Partition, Unit

# Optimizers whose update of an element looks at the whole matrix (its norm, its factors, its spectrum), by class name.
_NEEDS_WHOLE_MATRICES = {
    "adafactor": "it factors the second moment into rows and columns",
    "came": "it factors the second moment into rows and columns",
    "sm3": "it keeps one statistic per row and column",
    "lamb": "it scales each matrix's update by the norms of the matrix",
    "lars": "it scales each matrix's update by the norms of the matrix",
    "larc": "it scales each matrix's update by the norms of the matrix",
    "muon": "it orthogonalises each matrix's update",
    "shampoo": "it preconditions with each matrix's row and column statistics",
    "soap": "it preconditions with each matrix's row and column statistics",
    "galore": "it projects each matrix's gradient on its singular vectors",
    "lbfgs": "it searches along directions made of all parameters together",
    "sparseadam": "it works on sparse gradients, while reduced gradients are dense",
}


class BoundOptimizer:
    """A torch optimizer that steps on this rank's slices.

    Between steps its parameter groups hold the model's own parameters, so code that looks them up by name, zeroes their
    gradients or adds groups works as ever; within `step` (and while its state is saved or loaded) they hold slices. The
    optimizer object, its class, hyper-parameters, hooks and schedulers stay; state it already has is sliced along.

    Args:
        optimizer: the user's optimizer over parameters of the engine.
        runtime: knows where each parameter lives.
        before_step: called before each step, with this object.
        after_units: called with units whose step is done.
        after_step: called after each step.

    Raises:
        ValueError: a parameter is not the engine's.
        UnsupportedOptimizerError: the optimizer needs whole matrices.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        runtime: Runtime,
        before_step: Callable[[BoundOptimizer], None],
        after_units: Callable[[Sequence[Unit]], None],
        after_step: Callable[[], None],
    ) -> None:
        _refuse_if_not_elementwise(optimizer)
        self.optimizer = optimizer
        self._runtime = runtime
        self._before_step = before_step
        self._after_units = after_units
        self._after_step = after_step
        self.groups: list[list[nn.Parameter]] = []
        self._slices: list[list[nn.Parameter]] = []
        self._shown: list[list[nn.Parameter]] = []  # what was put into the groups in place of `groups`
        self._units: list[Unit] = []
        self._rounding: dict[torch.device, torch.Generator] = {}
        self._show_slices()
        self._show_params()
        _warn_if_updates_vanish(self)
        # The optimizer's hooks are what keeps this object (and the engine) alive.
        self._handles = [
            optimizer.register_step_pre_hook(lambda _, args, kwargs: self._on_step(args, kwargs)),
            optimizer.register_step_post_hook(lambda *_: self._on_stepped()),
            optimizer.register_state_dict_pre_hook(lambda *_: self._show_slices()),
            optimizer.register_state_dict_post_hook(lambda *_: self._show_params()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._show_slices()),
            optimizer.register_load_state_dict_post_hook(lambda *_: self._show_params()),
        ]

    @property
    def rank(self) -> int:
        """This rank."""
        return self._runtime.rank

    @property
    def params(self) -> list[nn.Parameter]:
        """The model's parameters this optimizer steps, in the order of its groups."""
        return [param for group in self.groups for param in group]

    def slices(self) -> Iterator[tuple[nn.Parameter, Slice]]:
        """(model parameter, this rank's slice of it) in the order of the groups."""
        for param in self.params:
            yield from ((param, item) for item in self._slices_of(param))

    def reserve_state(self) -> None:
        """Takes the room on disk that the optimizer's state will need.

        Raises:
            RuntimeError: there is too little.
        """
        if any(partition.master.place == "disk" for partition in self.partitions()):
            keys = _state_keys(self.optimizer)
            for partition in self.partitions():
                partition.master.reserve(keys)

    def release(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def drop_gradients(self) -> None:
        """Makes the coming step change nothing: torch's optimizers pass over what has no gradient."""
        for _, item in self.slices():
            item.param.grad = None

    @contextmanager
    def showing_slices(self) -> Iterator[None]:
        """Inside, the groups hold slices, for code that steps or scales what an optimizer holds."""
        self._show_slices()
        try:
            yield
        finally:
            self._show_params()

    def units(self) -> list[Unit]:
        """The units with parameters of this optimizer."""
        return self._units

    def partitions(self) -> Iterator[Partition]:
        """The partitions of those units."""
        return (partition for unit in self.units() for partition in unit.partitions)

    def _on_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None:
            self._prepare_step()
            return args, kwargs

        # It computes the gradients: with the model's parameters in the groups, and the step is prepared after it.
        def closure_then_prepare() -> Any:
            self._show_params()
            result = closure()
            self._prepare_step()
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_then_prepare}
        return (args[0], closure_then_prepare, *args[2:]), kwargs

    def _prepare_step(self) -> None:
        self._before_step(self)
        self._show_slices()
        if self._steps_by_unit:
            self._step_all_but_last_unit()

    @property
    def _steps_by_unit(self) -> bool:
        # An optimizer of somebody else's may count its calls.
        from_torch = type(self.optimizer).__module__.startswith("torch.optim")
        return from_torch and any(partition.master.place != "device" for partition in self.partitions())

    def _step_all_but_last_unit(self) -> None:
        """Steps unit after unit, each on its way while the next one steps; torch's own call then does the last."""
        step = type(self.optimizer).step.__wrapped__  # type: ignore[attr-defined]
        *units, last = self.units()
        for unit in units:
            self._show_unit(unit)
            step(self.optimizer)
            self._finish([unit])
        self._show_unit(last)

    def _show_unit(self, unit: Unit) -> None:
        own = {id(item.param) for p in unit.partitions for items in p.slices for item in items}
        self._show([[param for param in slices if id(param) in own] for slices in self._slices])

    def _show(self, lists: list[list[nn.Parameter]]) -> None:
        self._shown = lists
        for group, params in zip(self.optimizer.param_groups, lists, strict=True):
            group["params"] = params

    def _finish(self, units: Sequence[Unit]) -> None:
        for partition in (partition for unit in units for partition in unit.partitions):
            self._narrow(partition)
            for item in (item for items in partition.slices for item in items):
                if item.param in self.optimizer.state:
                    partition.master.keep_state(item, self.optimizer.state[item.param])
        self._after_units(units)

    def _on_stepped(self) -> None:
        self._show_params()
        units = self.units()
        self._finish(units[-1:] if self._steps_by_unit else units)
        self._after_step()

    def _show_slices(self) -> None:
        """Puts slices into the groups; takes in parameters that were added meanwhile."""
        groups = self.optimizer.param_groups
        for number, group in enumerate(groups[len(self.groups) :], len(self.groups)):
            self._check_known(number, group["params"])
        for number, group in enumerate(groups):
            if number == len(self.groups):
                self.groups.append([])
                self._slices.append([])
            if number >= len(self._shown) or group["params"] is not self._shown[number]:
                self._take_in(number, group["params"])
        self._show(list(self._slices))
        for partition in self.partitions():
            partition.master.widen()
        for group in groups:
            _choose_fused(self.optimizer, group)

    def _show_params(self) -> None:
        """Puts the model's parameters back into the groups."""
        for partition in self.partitions():
            self._narrow(partition)
        # Groups that were added meanwhile hold the model's parameters and are taken in by the next step.
        for group, params, shown in zip(self.optimizer.param_groups, self.groups, self._shown, strict=False):
            if group["params"] is shown:
                group["params"] = params

    def _narrow(self, partition: Partition) -> None:
        if partition.dtypes.rounds_stochastically:
            partition.master.narrow(self._generator(partition.master.tensor.device))

    @property
    def rounding(self) -> dict[str, Tensor]:
        """By device, the state of the random numbers by which steps are rounded; this rank's own."""
        return {str(device): generator.get_state() for device, generator in self._rounding.items()}

    @rounding.setter
    def rounding(self, states: Mapping[str, Tensor]) -> None:
        for device, state in states.items():
            self._generator(torch.device(device)).set_state(state)

    def _generator(self, device: torch.device) -> torch.Generator:
        # Its own, so that neither the user's random numbers nor the ranks' different shards depend on each other.
        if device not in self._rounding:
            self._rounding[device] = torch.Generator(device).manual_seed(self._runtime.rank)
        return self._rounding[device]

    def _take_in(self, number: int, params: list[nn.Parameter]) -> None:
        known = {id(param) for param in self.groups[number]}
        added = [param for param in params if id(param) not in known]
        self._check_known(number, added)
        self.groups[number] = params
        for param in added:
            self._slice_state(param)
        if added or len(known) != len(params):
            self._slices[number] = [item.param for param in params for item in self._slices_of(param)]
            units = {self._runtime.locate(param)[0] for param in self.params}
            self._units = sorted(units, key=lambda unit: unit.index)

    def _slice_state(self, param: nn.Parameter) -> None:
        state = self.optimizer.state.pop(param, {})
        _, partition, index = self._runtime.locate(param)
        layout = partition.layout.params[index]
        for item in partition.slices[index]:
            if state:
                own = slice_state(state, item, layout.shape, layout.stride)
                self.optimizer.state[item.param] = {
                    key: value.to(partition.master.step_dtype)
                    if is_elementwise(key, value, item.param.shape)
                    else value
                    for key, value in own.items()
                }

    def _slices_of(self, param: nn.Parameter) -> list[Slice]:
        _, partition, index = self._runtime.locate(param)
        return partition.slices[index]

    def _check_known(self, number: int, params: Sequence[nn.Parameter]) -> None:
        for position, param in enumerate(params):
            if not self._runtime.knows(param):
                raise ValueError(
                    f"parameter {position} of group {number} of {type(self.optimizer).__name__} (shape "
                    f"{tuple(param.shape)}) is not a parameter of the sharded model. Expected parameters of the model "
                    "given to shard(); to step two models with one optimizer, shard them together in one nn.ModuleList."
                )


def slice_state(state: dict[str, Any], item: Slice, shape: tuple[int, ...], stride: tuple[int, ...]) -> dict[str, Any]:
    """This rank's part of a parameter's optimizer state.

    Args:
        state: state by key; tensors of the parameter's shape are cut, others (a step count) are kept whole.
        item: the slice.
        shape: the parameter's logical shape.
        stride: its strides in the flat buffer.
    """
    return {
        key: (
            flat_view(value.detach().to(item.param.device), stride)[item.piece.start : item.piece.stop].clone()
            if is_elementwise(key, value, shape)
            else value.clone()
            if isinstance(value, Tensor)
            else value
        )
        for key, value in state.items()
    }


def is_elementwise(key: str, value: object, shape: tuple[int, ...]) -> bool:
    """Whether a state value holds one number per element of a parameter of `shape`.

    A step count does not, though its shape is that of a 0-dim parameter; torch knows it by its name as well.
    """
    return isinstance(value, Tensor) and key != "step" and tuple(value.shape) == shape


def _refuse_if_not_elementwise(optimizer: Optimizer) -> None:
    for cls in type(optimizer).__mro__:
        for name, reason in _NEEDS_WHOLE_MATRICES.items():
            if name in cls.__name__.lower().replace("_", ""):
                raise UnsupportedOptimizerError(
                    f"{type(optimizer).__name__} cannot step on flat shards: {reason}, and ranks hold only parts of a "
                    "matrix. Use an element-wise optimizer (SGD, Adam, AdamW, RMSprop, Adagrad, NAdam, RAdam, Adadelta)."
                )


def _warn_if_updates_vanish(bound: BoundOptimizer) -> None:
    if bound.rank == 0 and any(p.is_trainable and is_half(p.master.step_dtype) for p in bound.partitions()):
        warnings.warn(
            "weights and optimizer state are in half precision only: an update smaller than 1/512 of a bf16 weight (1/4096 "
            "of an fp16 one) is lost, so small learning rates stop learning. Pass ZeroConfig(precision='bf16-mixed') for "
            "fp32 masters, or precision=MixedPrecision(master=None, rounding='stochastic').",
            stacklevel=4,
        )


def _state_keys(optimizer: Optimizer) -> list[str]:
    """The names of the state that the optimizer keeps per element, found by a step on one element."""
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    accepted = inspect.signature(type(optimizer)).parameters
    try:
        trial = type(optimizer)([param], **{key: value for key, value in optimizer.defaults.items() if key in accepted})
    except TypeError:  # a constructor unlike torch's; its state finds its place after the first step
        return []
    trial.step()
    return [key for key, value in trial.state[param].items() if is_elementwise(key, value, (1,))]


def _choose_fused(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Where the user left the implementation to torch, takes the fused one: on a CPU it is several times faster."""
    if group.get("fused", True) is not None or group.get("foreach") is not None or group.get("differentiable"):
        return
    params = group["params"]
    if not params or not all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in params):
        return
    group["fused"] = True
    # As the constructor does for fused=True: GradScaler then unscales inside the step.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    for param in params:
        step = optimizer.state.get(param, {}).get("step")
        if isinstance(step, Tensor):
            optimizer.state[param]["step"] = step.to(device=param.device, dtype=torch.float32)
