"""What the user decides: the stage and a few choices beside it."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn


class ZeroStage(enum.Enum):
    """Which model states are partitioned (paper, section 5). The stage is data: code asks it questions."""

    OPTIMIZER_STATE = 1
    GRADIENTS = 2
    PARAMETERS = 3

    @property
    def shards_optimizer_state(self) -> bool:
        """Whether a rank keeps optimizer state for its own part only; true for every stage."""
        return self.value >= ZeroStage.OPTIMIZER_STATE.value

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients that wait for more micro-batches wait as shards, not whole."""
        return self.value >= ZeroStage.GRADIENTS.value

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank keeps its own part of the weights only, and gathers the rest for their use."""
        return self.value >= ZeroStage.PARAMETERS.value


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """In which dtypes weights are used, gradients travel and the optimizer steps (paper, section 3.1).

    `MixedPrecision()` is the paper's setting in bf16: half-precision weights and gradients, fp32 masters and moments.
    The names that hosts use make the usual policies: `MixedPrecision.named("bf16-mixed")`.

    A model whose floating-point parameters are of several dtypes has decided for itself: there `param` changes nothing,
    and only the masters of half-precision parameters are made fp32.

    Args:
        param: dtype of the weights in forward and backward.
        master: dtype of what the optimizer steps on, keeps moments in and checkpoints hold. `None`: that of `param`
            (pure half, or pure double).
        reduce: dtype of gradients on their way to other ranks. `None`: that of the gradients. They are summed in fp32
            in any case.
        output: dtype that floating-point outputs of the model's forward are cast to. `None`: as they come.
        buffers: dtype of floating-point buffers. `None`: as they are; rotary frequencies and running statistics suffer
            from fewer digits.
        rounding: how pure bf16 weights take up an update. "nearest" loses what is smaller than half the distance to the
            next number (1/512 of a weight); "stochastic" rounds up or down with the probability that keeps the expected
            value. It keeps moments and gradient shards in fp32.
        nonfinite: what a step does when a gradient is not finite, on any rank: "raise" an error on all ranks before the
            weights change, or "skip" the step, which is logged and counted in `ZeroEngine.report`. With a loss scale
            the step is always skipped.
        max_skips: steps skipped in a row after which the run stops with an error.

    Raises:
        ValueError: the dtypes or words do not fit together.
    """

    param: torch.dtype = torch.bfloat16
    master: torch.dtype | None = torch.float32
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffers: torch.dtype | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"
    nonfinite: Literal["raise", "skip"] = "raise"
    max_skips: int = 30

    def __post_init__(self) -> None:
        for name in ("param", "master", "reduce", "output", "buffers"):
            value = getattr(self, name)
            if not (isinstance(value, torch.dtype) and value.is_floating_point) and (
                name == "param" or value is not None
            ):
                raise ValueError(f"MixedPrecision.{name} must be a floating-point torch.dtype, got {value!r}.")
        if self.master is not None and self.master.itemsize < self.param.itemsize:
            raise ValueError(f"master ({self.master}) must not have fewer digits than param ({self.param}).")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f'rounding must be "nearest" or "stochastic", got {self.rounding!r}.')
        if self.rounding == "stochastic" and self.master_dtype is not torch.bfloat16:
            raise ValueError(
                f'rounding="stochastic" is for pure bf16 (param=torch.bfloat16, master=None), got param={self.param}, '
                f"master={self.master}."
            )
        if self.nonfinite not in ("raise", "skip"):
            raise ValueError(f'nonfinite must be "raise" or "skip", got {self.nonfinite!r}.')
        if self.max_skips < 1:
            raise ValueError(f"max_skips must be at least 1, got {self.max_skips}.")

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of the masters."""
        return self.param if self.master is None else self.master

    @property
    def autocasts(self) -> bool:
        """Whether forward runs under `torch.autocast`: half weights with masters; pure half is as the model says."""
        return self.param.itemsize < 4 and self.master_dtype != self.param

    @classmethod
    def named(cls, name: str) -> MixedPrecision | None:
        """The policy that Lightning and transformers mean by `name`; `None` for "32-true", the model as it is.

        Args:
            name: "bf16-mixed", "16-mixed" (fp32 masters), "bf16-true", "16-true", "64-true" or "32-true".

        Raises:
            ValueError: another name.
        """
        policies = {
            "32-true": None,
            "bf16-mixed": cls(),
            "16-mixed": cls(param=torch.float16, nonfinite="skip"),
            "bf16-true": cls(master=None),
            "16-true": cls(param=torch.float16, master=None),
            "64-true": cls(param=torch.float64, master=None),
        }
        if name not in policies:
            raise ValueError(f"precision must be one of {', '.join(policies)}, got {name!r}.")
        return policies[name]


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Where shards live between their uses; a placement, not a mode.

    Args:
        optimizer: memory of masters, gradient shards and optimizer state, and so where the optimizer steps: "device",
            "cpu" (host memory) or "disk" (memory-mapped files).
        params: at stage 3, memory of the weights' shards, from which units are gathered: "device", or "cpu" or "disk" like
            the optimizer, whose masters then are the shards.
        directory: for "disk", a directory on a disk with room for the shards.

    Raises:
        ValueError: the words do not fit together.
    """

    optimizer: Literal["device", "cpu", "disk"] = "cpu"
    params: Literal["device", "cpu", "disk"] = "device"
    directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("optimizer", "params"):
            if getattr(self, name) not in ("device", "cpu", "disk"):
                raise ValueError(f'Offload.{name} must be "device", "cpu" or "disk", got {getattr(self, name)!r}.')
        if self.params != "device" and self.params != self.optimizer:
            raise ValueError(
                f'Offload.params must be "device" or the same as Offload.optimizer, got params="{self.params}" and '
                f'optimizer="{self.optimizer}": the optimizer steps on the shards where they are.'
            )
        if (self.optimizer == "disk") != (self.directory is not None):
            raise ValueError(
                f'Offload.directory goes with "disk": got optimizer="{self.optimizer}" and directory={self.directory!r}.'
            )

    @classmethod
    def named(cls, name: str) -> Offload:
        """The policy of a name.

        Args:
            name: "optimizer" (masters, gradient shards, optimizer state and the step in host memory) or "all" (the
                weights' shards too).

        Raises:
            ValueError: another name.
        """
        if name not in ("optimizer", "all"):
            raise ValueError(f'offload must be "optimizer" or "all" (or an Offload), got {name!r}.')
        return cls(params="cpu" if name == "all" else "device")


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Settings of one engine. The defaults suit most models; the stage is the one to choose.

    Args:
        stage: 1, 2 or 3 (or a `ZeroStage`): what is partitioned.
        unit_classes: module classes, or their names, that are gathered and reduced together. Empty: the
            model's own `_no_split_modules`, else repeated blocks, large leaves and size decide.
        unit_numel: elements above which what no block covers (an embedding, a head) becomes a unit by itself.
        prefetch_bytes: at stage 3, how many bytes of weights may be gathered ahead of their use. `None`
            means one unit, 0 means none.
        local_accumulation: whether gradients wait whole on each rank inside `no_sync` (4 bytes per fp32
            parameter, nothing sent) or are reduced into shards by every backward. `None`: as the stage
            says, whole at stage 1 and as shards at stages 2 and 3.
        precision: dtypes, as a policy or by its name ("bf16-mixed"). `None`: the model's own, for everything.
        offload: where shards live, as a policy or by its name ("optimizer", "all"). `None`: on the device.

    Raises:
        ValueError: a value is out of range; the message says what was expected.
    """

    stage: ZeroStage | int = ZeroStage.PARAMETERS
    unit_classes: tuple[type[nn.Module] | str, ...] = ()
    unit_numel: int = 1_000_000
    prefetch_bytes: int | None = None
    local_accumulation: bool | None = None
    precision: MixedPrecision | str | None = None
    offload: Offload | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage", _stage(self.stage))
        object.__setattr__(self, "unit_classes", _unit_classes(self.unit_classes))
        object.__setattr__(self, "precision", _policy(self.precision))
        object.__setattr__(self, "offload", _offload(self.offload))
        if self.placement.params != "device" and not self.zero_stage.shards_parameters:
            raise ValueError(
                f"stage {self.zero_stage.value} keeps the weights whole on the device, so their shards cannot be offloaded: "
                'use offload="optimizer", or stage=3.'
            )
        if self.unit_numel < 1:
            raise ValueError(f"unit_numel must be at least 1 element, got {self.unit_numel}.")
        if self.prefetch_bytes is not None and self.prefetch_bytes < 0:
            raise ValueError(f"prefetch_bytes must be None (one unit), 0 (off) or positive, got {self.prefetch_bytes}.")

    @property
    def zero_stage(self) -> ZeroStage:
        """The stage, as the enumeration."""
        return _stage(self.stage)

    @property
    def mixed_precision(self) -> MixedPrecision | None:
        """The precision policy; `None` for the model's own dtypes."""
        return _policy(self.precision)

    @property
    def placement(self) -> Offload:
        """Where shards live."""
        return _offload(self.offload) or Offload(optimizer="device")

    @property
    def accumulates_locally(self) -> bool:
        """Whether gradients stay whole on each rank inside `no_sync`."""
        if self.local_accumulation is not None:
            return self.local_accumulation
        return not self.zero_stage.shards_gradients


def _stage(value: ZeroStage | int) -> ZeroStage:
    # bool is an int: stage=True would otherwise mean stage 1.
    if isinstance(value, bool) or value not in [*ZeroStage, *(s.value for s in ZeroStage)]:
        raise ValueError(
            f"stage must be 1 (optimizer state), 2 (+ gradients) or 3 (+ parameters), got {value!r}. "
            "For plain data parallelism, without ZeRO, use torch's DistributedDataParallel."
        )
    return ZeroStage(value)


def _policy(value: MixedPrecision | str | None) -> MixedPrecision | None:
    if isinstance(value, str):
        return MixedPrecision.named(value)
    if value is not None and not isinstance(value, MixedPrecision):
        raise ValueError(f"precision must be a MixedPrecision, its name or None, got {value!r}.")
    return value


def _offload(value: Offload | str | None) -> Offload | None:
    if isinstance(value, str):
        return Offload.named(value)
    if value is not None and not isinstance(value, Offload):
        raise ValueError(f"offload must be an Offload, its name or None, got {value!r}.")
    return value


def _unit_classes(classes: object) -> tuple[type[nn.Module] | str, ...]:
    if isinstance(classes, (str, type)):
        classes = (classes,)
    if not isinstance(classes, (tuple, list, set, frozenset)):
        raise ValueError(f"unit_classes must be module classes or their names, got {classes!r}.")
    for item in classes:
        if not isinstance(item, str) and not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise ValueError(f"unit_classes must be module classes or their names, got {item!r}.")
    return tuple(classes)
