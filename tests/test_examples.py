"""The examples: the same fine-tuning of real weights under every strategy, and written four ways."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import ROOT, run
from tests.helpers.ranks import run_ranks, run_scripts

EXAMPLES = ROOT / "examples"
STEPS = ("--steps", "2", "--held-out", "1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A few steps of each: the main job as a user starts it, the others on ranks that exist."""
    folder = tmp_path_factory.mktemp("examples")
    lightning = str(EXAMPLES / "finetune_minilm.py")
    starts = {
        strategy: (lightning, "--strategy", strategy, "--devices", "2", *STEPS, "--json", str(folder / strategy))
        for strategy in ("zero3", "ddp", "zero1", "zero2")
    }
    for way in ("torch", "accelerate", "transformers"):
        starts[way] = (str(EXAMPLES / f"finetune_{way}.py"), *STEPS, "--json", str(folder / way))
    done = run(sys.executable, *starts["zero3"])
    assert done.returncode == 0, done.stdout
    run_ranks(2, run_scripts, [starts[name] for name in starts if name != "zero3"], timeout=250)
    return {name: json.loads((folder / name).read_text()) for name in starts}


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_the_main_job_has_the_losses_it_has_with_ddp(runs: dict[str, Any], name: str) -> None:
    assert runs[name]["losses"] == pytest.approx(runs["ddp"]["losses"], abs=1e-4)
    assert runs[name]["accuracy"] == pytest.approx(runs["ddp"]["accuracy"], abs=0.07)  # one of 16 articles


@pytest.mark.parametrize("name", ["torch", "accelerate", "transformers"])
def test_it_has_the_same_losses_whichever_way_it_is_written(runs: dict[str, Any], name: str) -> None:
    assert runs[name]["losses"] == pytest.approx(runs["zero3"]["losses"], abs=1e-5)
    assert runs[name]["accuracy"] == pytest.approx(runs["zero3"]["accuracy"], abs=0.07)


def test_each_example_is_readable_in_one_sitting() -> None:
    for file in EXAMPLES.glob("*.py"):
        assert len(Path(file).read_text().splitlines()) < 260, file
