"""Errors that carry what a person needs to repair them: the parameter, the rank, the call."""

from __future__ import annotations


class PartitionedParameterError(RuntimeError):
    """A partitioned parameter (or its gradient) was read or written where its values are not at hand.

    Attributes:
        parameter: fully qualified name of the parameter.
        rank: rank that raised.
        world_size: number of ranks the parameter is partitioned over.
    """

    def __init__(self, parameter: str, rank: int, world_size: int, what: str, cure: str) -> None:
        self.parameter = parameter
        self.rank = rank
        self.world_size = world_size
        super().__init__(
            f"{what} of parameter '{parameter}' was asked for on rank {rank}, "
            f"but it is partitioned over {world_size} rank(s). {cure}"
        )


class UnsupportedOptimizerError(ValueError):
    """The optimizer's update of one element depends on other elements, so flat shards would change it."""


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete, damaged, or not what was asked for; says which file or which tensors."""
