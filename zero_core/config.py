"""What the user decides: the stage and a few choices beside it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

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

    Raises:
        ValueError: a value is out of range; the message says what was expected.
    """

    stage: ZeroStage | int = ZeroStage.PARAMETERS
    unit_classes: tuple[type[nn.Module] | str, ...] = ()
    unit_numel: int = 1_000_000
    prefetch_bytes: int | None = None
    local_accumulation: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage", _stage(self.stage))
        object.__setattr__(self, "unit_classes", _unit_classes(self.unit_classes))
        if self.unit_numel < 1:
            raise ValueError(f"unit_numel must be at least 1 element, got {self.unit_numel}.")
        if self.prefetch_bytes is not None and self.prefetch_bytes < 0:
            raise ValueError(f"prefetch_bytes must be None (one unit), 0 (off) or positive, got {self.prefetch_bytes}.")

    @property
    def zero_stage(self) -> ZeroStage:
        """The stage, as the enumeration."""
        return _stage(self.stage)

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


def _unit_classes(classes: object) -> tuple[type[nn.Module] | str, ...]:
    if isinstance(classes, (str, type)):
        classes = (classes,)
    if not isinstance(classes, (tuple, list, set, frozenset)):
        raise ValueError(f"unit_classes must be module classes or their names, got {classes!r}.")
    for item in classes:
        if not isinstance(item, str) and not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise ValueError(f"unit_classes must be module classes or their names, got {item!r}.")
    return tuple(classes)
