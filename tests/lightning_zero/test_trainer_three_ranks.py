"""The Trainer on three ranks: sizes that do not divide, batches cut in three."""

from __future__ import annotations

from typing import Any

from tests.helpers.cases import Cases, check
from tests.lightning_zero import test_trainer as two_ranks

cases = Cases(__name__)
outcomes = cases.fixture(3, timeout=280)

cases(two_ranks.every_family_trains_as_one_process_does)
cases.at(1, 3)(two_ranks.adam_with_clipping_by_global_norm)
cases.at(1, 3)(two_ranks.checkpoints_are_plain_and_resume)
cases.at(1, 3)(two_ranks.configure_model_builds_on_meta)


@cases.parametrize()
def test_the_trainer_works_on_three_ranks(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)
