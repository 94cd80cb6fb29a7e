"""Scripts that do not know of ZeRO, under `accelerate-zero launch`; and the command line itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest
import torch
import torch.distributed as dist
import yaml
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

import accelerate_zero
from accelerate_zero.launch import launch
from accelerate_zero.plugin import ZeroPlugin
from tests.helpers.processes import ROOT, run
from tests.helpers.ranks import join, run_ranks, run_script

SCRIPTS = Path(__file__).parent / "scripts"
LOOP, TRAINER = str(SCRIPTS / "loop.py"), str(SCRIPTS / "trainer.py")
COMMAND = [sys.executable, "-m", "accelerate_zero.cli"]
QUIET = [
    "--use_cpu",
    "true",
    "--report_to",
    "none",
    "--disable_tqdm",
    "true",
    "--logging_steps",
    "1",
    "--max_steps",
    "4",
]
QUIET += ["--per_device_train_batch_size", "4", "--save_steps", "2", "--learning_rate", "1e-3"]


def run_unedited(programs: list[tuple[int, tuple[str, ...]]]) -> None:
    """On ranks that exist: each program at a stage, or, for 0, as it is (with DDP)."""
    for stage, program in programs:
        if not dist.is_initialized():  # the program before ended it
            join()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
        if stage:
            os.environ.update(ACCELERATE_ZERO_STAGE=str(stage), ACCELERATE_ZERO_UNIT_NUMEL="3000")
            accelerate_zero.activate()
        run_script(*program)
        accelerate_zero.deactivate()


def losses(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "losses.json").read_text())
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both scripts at every stage and with DDP, each once through and once resumed (DDP's checkpoint, too)."""
    root = tmp_path_factory.mktemp("unedited")
    programs: list[tuple[int, tuple[str, ...]]] = []
    for stage in (0, 1, 2, 3):
        programs.append((stage, (LOOP, "--output_dir", str(root / f"loop{stage}"))))
        resume = ["--resume_from_checkpoint", str(root / f"loop{stage}" / "step_3")]
        programs.append((max(stage, 1), (LOOP, "--output_dir", str(root / f"loop{stage}again"), *resume)))
        programs.append((stage, (TRAINER, "--output_dir", str(root / f"trainer{stage}"), *QUIET)))
    programs.append((3, (TRAINER, "--output_dir", str(root / "trainer1"), *QUIET, "--max_steps", "6")))
    run_ranks(2, run_unedited, programs, timeout=250)
    return root


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_accelerate_script_has_the_losses_it_has_with_ddp(runs: Path, stage: int) -> None:
    own, expected = losses(runs / f"loop{stage}"), losses(runs / "loop0")
    assert own["kind"] == "accelerate_zero.activation" and expected["kind"] == "accelerate.accelerator"
    assert own["losses"] == pytest.approx(expected["losses"], rel=1e-5) and own["lr"] == expected["lr"]
    weights, others = (load_file(runs / f"loop{at}" / "model.safetensors") for at in (stage, 0))
    assert weights.keys() == others.keys()
    assert all(torch.allclose(weights[name], value, atol=5e-5) for name, value in others.items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_resumes_where_it_was(runs: Path, stage: int) -> None:
    again, whole = losses(runs / f"loop{stage}again")["losses"], losses(runs / f"loop{stage}")["losses"]
    assert again == pytest.approx(whole[-len(again) :], rel=1e-5) and 0 < len(again) < len(whole)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_trainer_script_has_the_losses_it_has_with_ddp(runs: Path, stage: int) -> None:
    own, expected = losses(runs / f"trainer{stage}"), losses(runs / "trainer0")
    assert own["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert own["eval"] == pytest.approx(expected["eval"], rel=1e-4)


def test_a_trainer_script_resumes_at_another_stage(runs: Path) -> None:
    found = losses(runs / "trainer1")
    assert found["resumed"] and len(found["losses"]) == 6
    assert found["losses"][:4] == pytest.approx(losses(runs / "trainer0")["losses"], rel=1e-4)


def test_a_config_written_without_asking_launches_a_script(tmp_path: Path) -> None:
    file = tmp_path / "zero.yaml"
    done = run(*COMMAND, "config", "--config_file", str(file), "--default", "stage=3", "--default", "unit_numel=3000")
    assert done.returncode == 0, done.stdout
    launch_with(file, TRAINER, tmp_path / "out", *QUIET)


def launch_with(file: Path, script: str, folder: Path, *arguments: str) -> None:
    done = run(*COMMAND, "launch", "--config_file", str(file), script, "--output_dir", str(folder), *arguments)
    assert done.returncode == 0, done.stdout
    assert losses(folder)["losses"]


def test_the_questionnaire_writes_what_was_answered_and_it_launches(tmp_path: Path) -> None:
    file = tmp_path / "asked.yaml"
    child = pexpect.spawn(
        COMMAND[0], [*COMMAND[1:], "config", "--config_file", str(file)], env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60, encoding="utf-8", dimensions=(50, 200),
    )  # fmt: skip
    down, enter = "\x1b[B", "\r"
    for question, answer in (
        ("In which compute environment", enter),
        ("Which type of machine", down + enter),  # multi-CPU
        ("How many different machines", enter),
        ("Should distributed operations be checked", enter),
        (r"mpirun", "no" + enter),
        ("optimize your script with torch dynamo", enter),
        ("How many processes|How many CPU", "2" + enter),
        ("mixed precision", enter),
        ("Which states should ZeRO partition", enter),
        ("Where should they live", down + enter),
        ("A directory to keep them in files", enter),
        ("Module classes to gather together", "GPT2Block" + enter),
    ):
        child.expect(question)
        child.send(answer)
    child.expect("Written:")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    written = yaml.safe_load(file.read_text())
    assert written["zero_config"] == {
        "version": 1, "stage": 3, "offload": "optimizer", "unit_classes": ["GPT2Block"],
    }  # fmt: skip
    assert (written["distributed_type"], written["num_processes"], written["mixed_precision"]) == ("MULTI_CPU", 2, "no")
    assert ZeroPlugin.from_file(file).config().zero_stage.value == 3
    launch_with(file, LOOP, tmp_path / "out")


def test_accelerates_own_launcher_takes_the_section_from_a_file_of_its_own(tmp_path: Path) -> None:
    file, script = tmp_path / "zero.yaml", tmp_path / "script.py"
    file.write_text("zero_config: {version: 1, stage: 2, unit_numel: 5}")
    script.write_text(
        "import accelerate_zero, torch\nfrom accelerate import Accelerator\nfrom zero_core import engine_of\n"
        "model = Accelerator().prepare(torch.nn.Linear(3, 3))\nprint(engine_of(model))\n"
    )
    stock = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    done = run(*stock, str(script), ACCELERATE_ZERO_CONFIG_FILE=str(file))
    assert done.returncode == 0 and "ZeroEngine(stage=2, rank=0 of 1" in done.stdout, done.stdout
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text("distributed_type: 'NO'\nnum_processes: 1\nzero_config: {version: 1, stage: 2}")
    refused = run(*stock, "--config_file", str(mixed), str(script))
    assert refused.returncode != 0 and "unknown keys (['zero_config'])" in refused.stdout


def test_a_translated_config_prints_its_table(tmp_path: Path) -> None:
    source, file = tmp_path / "ds_config.json", tmp_path / "zero.yaml"
    source.write_text(json.dumps({"zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": True}}))
    done = run(*COMMAND, "config", "--from", str(source), "--config_file", str(file))
    assert done.returncode == 0, done.stdout
    assert "zero_optimization.stage" in done.stdout and "not needed" in done.stdout
    written = yaml.safe_load(file.read_text())
    assert written["zero_config"]["stage"] == 2 and written["mixed_precision"] == "bf16"


def test_env_prints_what_a_bug_report_needs(tmp_path: Path) -> None:
    done = run(*COMMAND, "env", ACCELERATE_ZERO_STAGE="2")
    assert done.returncode == 0, done.stdout
    for line in (f"- torch: {torch.__version__}", "- accelerate: ", "- ACCELERATE_ZERO_STAGE: 2", "- backends: gloo"):
        assert line in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config_file", "/none.yaml", "x.py"], "no config file '/none.yaml'"),
        (["--zero", "stages=3", "x.py"], "--zero expects KEY=VALUE"),
        (
            ["--zero", "stage=1", "--zero", "offload=all", "x.py"],
            "stage 1 keeps the weights whole.*variable ACCELERATE_ZERO_STAGE",
        ),
        (["--zero", "stage=three", "x.py"], "ACCELERATE_ZERO_STAGE cannot be read: 'three'"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_starts(arguments: list[str], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        launch(["--num_processes", "2", *arguments])


def test_activation_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate
    from transformers import GenerationMixin, Trainer

    before = (accelerate.Accelerator, dict(vars(Trainer)), GenerationMixin.generate)
    accelerate_zero.activate()
    assert issubclass(accelerate.Accelerator, accelerate_zero.Accelerator)
    assert Trainer._save is not before[1]["_save"]
    accelerate_zero.activate()
    accelerate_zero.deactivate()
    assert (accelerate.Accelerator, dict(vars(Trainer)), GenerationMixin.generate) == before
