"""Gradients that are not finite: found by all ranks together before a step, never silent."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zero_core.collectives import Collectives
from zero_core.config import MixedPrecision
from zero_core.optimizer import BoundOptimizer
from zero_core.precision import is_half
from zero_core.runtime import Runtime

_log = logging.getLogger("zero_core")


class NonFiniteGuard:
    """Keeps gradients that are not finite away from the weights.

    Args:
        policy: what to do about them, and how often in a row; `None` for the defaults.
        runtime: knows the parameters' names.
        collectives: the ranks, which decide together.
    """

    def __init__(self, policy: MixedPrecision | None, runtime: Runtime, collectives: Collectives) -> None:
        self._policy = policy or MixedPrecision()
        self._runtime = runtime
        self._collectives = collectives
        self._checked = False
        self._in_a_row = 0
        self.skipped = 0

    @contextmanager
    def already_checked(self) -> Iterator[None]:
        """Inside, `check` trusts that a loss scale's own check was passed."""
        self._checked = True
        try:
            yield
        finally:
            self._checked = False

    def check(self, bound: BoundOptimizer) -> None:
        """Before a step: raises, or drops the gradients so that the step changes nothing. All ranks.

        Raises:
            RuntimeError: on all ranks, as the policy says.
        """
        # Full precision is as in plain torch. Decided by the layout, which is the same on all ranks, not by gradients.
        if self._checked or not any(is_half(partition.layout.dtype) for partition in bound.partitions()):
            self._in_a_row = 0
        elif not self._collectives.any_rank([not all_finite(_grads(bound))], "optimizer.step()")()[0]:
            self._in_a_row = 0
        elif self._policy.nonfinite == "raise":
            raise RuntimeError(
                f"the gradient is not finite: {self._where(bound)}. The weights are unchanged. Look for the loss that is "
                'not finite (torch.autograd.set_detect_anomaly), or pass MixedPrecision(nonfinite="skip") to pass over '
                "such steps."
            )
        else:
            self.skip(bound, "")
            bound.drop_gradients()

    def skip(self, bound: BoundOptimizer, remark: str) -> None:
        """Says aloud that a step is skipped, and ends the run when that happens too often in a row. All ranks.

        Args:
            bound: whose step.
            remark: what the message ends with.

        Raises:
            RuntimeError: on all ranks, after `MixedPrecision.max_skips` skipped steps in a row.
        """
        where = self._where(bound)
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= self._policy.max_skips:
            raise RuntimeError(
                f"{self._in_a_row} steps in a row were skipped because the gradient is not finite; the last: "
                f"{where}{remark}. The weights are unchanged since. Look for the loss that is not finite, lower the "
                "learning rate, or raise MixedPrecision(max_skips=...)."
            )
        if self._collectives.rank == 0:
            _log.warning(
                "skipped step %d in a row (%d in all): gradient not finite, %s%s",
                *(self._in_a_row, self.skipped, where, remark),
            )

    def _where(self, bound: BoundOptimizer) -> str:
        """Names a parameter with such a gradient on every rank that holds part of one."""
        own = None
        for param, item in bound.slices():
            if item.param.grad is not None and not all_finite([item.param.grad]):
                own = self._runtime.fqn(param)
                break
        found = enumerate(self._collectives.gather_objects(own))
        return ", ".join(f"parameter '{fqn}' (the part held by rank {rank})" for rank, fqn in found if fqn is not None)


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether every element is finite, in one pass: the sum of magnitudes is, unless an element is not."""
    return bool(torch.isfinite(torch.nn.utils.get_total_norm(tensors, norm_type=1.0)))


def _grads(bound: BoundOptimizer) -> list[Tensor]:
    return [item.param.grad for _, item in bound.slices() if item.param.grad is not None]
