"""Programs as a user starts them: by Lightning itself, by torchrun, from a LightningCLI file."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.helpers.processes import run

CLI = Path(__file__).parent / "scripts" / "cli.py"
QUIET = ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"]
QUIET += ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_epochs=1"]


def test_lightning_launches_by_name_and_torchrun_gives_the_same(tmp_path: Path) -> None:
    results = {}
    starts = {
        "lightning": [sys.executable, str(CLI)],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(CLI)],
    }
    for name, start in starts.items():
        file = tmp_path / name
        done = run(*start, "fit", "--trainer.strategy=zero3", *QUIET, RESULT=str(file))
        assert done.returncode == 0, done.stdout
        results[name] = sorted(file.read_text().split("\n"))
    assert results["lightning"] == results["torchrun"]
    assert len({line.split("weights=")[1] for line in results["lightning"] if line}) == 1
    assert "stage=3" in results["lightning"][1] and "/2" in results["lightning"][1]


def test_a_cli_file_names_the_strategy_by_class_path(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "trainer:\n  strategy:\n    class_path: lightning_zero.ZeroStrategy\n"
        "    init_args: {stage: 2, unit_numel: 10, unit_classes: [Linear]}\n"
    )
    done = run(sys.executable, str(CLI), "fit", "--config", str(config), *QUIET, RESULT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "out").read_text().count("stage=2") == 2


def test_a_rank_that_raises_ends_the_run_and_shows_its_error(tmp_path: Path) -> None:
    start = time.monotonic()
    options = ["--trainer.strategy=zero3", "--model.fail_on_rank=1", *QUIET]
    done = run(sys.executable, str(CLI), "fit", *options, RESULT=str(tmp_path / "out"), timeout=120)
    assert done.returncode != 0 and "a bad sample on one rank" in done.stdout
    assert time.monotonic() - start < 100
