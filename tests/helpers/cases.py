"""Many small cases in one group of ranks: starting processes is the dear part, so it is done once a file."""

from __future__ import annotations

import importlib
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run_ranks

Case = Callable[..., None]


class Cases:
    """Collects the cases of a test file; each runs once per stage on every rank.

    Args:
        module: the test file's `__name__`, where the object must be called `cases`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._functions: dict[str, tuple[Case, tuple[Any, ...]]] = {}

    def __call__(self, function: Case) -> Case:
        """Adds a case that takes the stage."""
        self._functions[function.__name__] = (function, (1, 2, 3))
        return function

    def at(self, *stages: int) -> Callable[[Case], Case]:
        """Adds a case for some stages only."""

        def add(function: Case) -> Case:
            self._functions[function.__name__] = (function, stages)
            return function

        return add

    @property
    def ids(self) -> list[tuple[str, int]]:
        return [(name, stage) for name, (_, stages) in self._functions.items() for stage in stages]

    def fixture(self, *world_sizes: int, timeout: float = 200) -> Any:
        """A module-scoped fixture that runs everything once per world size."""

        @pytest.fixture(scope="module", params=world_sizes, ids=[f"{n}_ranks" for n in world_sizes])
        def outcomes(request: pytest.FixtureRequest) -> list[dict[tuple[str, int], str | None]]:
            selected = {item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")}
            wanted = [case for case in self.ids if case in selected]
            return run_ranks(request.param, _run, self._module, wanted, timeout=timeout)

        return outcomes

    def parametrize(self) -> Any:
        """A mark that makes one test of each case and stage; it stands below the cases."""
        return pytest.mark.parametrize("case", self.ids, ids=[f"{name}-zero{stage}" for name, stage in self.ids])


def folder() -> str:
    """An empty directory that all ranks see and that goes with them. All ranks."""
    made = [tempfile.mkdtemp(dir=os.environ["TEST_RANKS_FOLDER"]) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return str(made[0])


def check(outcomes: list[dict[tuple[str, int], str | None]], case: tuple[str, int]) -> None:
    """Fails with every rank's traceback unless the case passed on all."""
    failures = [
        f"--- rank {rank}\n{found.get(case, 'not finished: another rank or an earlier case failed')}"
        for rank, found in enumerate(outcomes)
        if found.get(case, "") is not None
    ]
    assert not failures, "\n".join(["", *failures])


def _run(module: str, wanted: list[tuple[str, int]]) -> dict[tuple[str, int], str | None]:
    functions = importlib.import_module(module).cases._functions
    found: dict[tuple[str, int], str | None] = {}
    for name, stage in wanted:
        torch.manual_seed(0)
        try:
            functions[name][0](stage)
        except (Exception, pytest.fail.Exception):
            found[name, stage] = traceback.format_exc()
            break  # this process ends, so that ranks that wait for it in the middle of the case fail at once
        try:
            dist.barrier()
        except RuntimeError:  # another rank failed and says why
            break
        found[name, stage] = None
    return found
