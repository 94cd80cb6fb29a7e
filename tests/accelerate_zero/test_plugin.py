"""Settings come from arguments, variables or a file, and a message says which said what."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_zero import ZeroPlugin
from zero_core import MixedPrecision, Offload, ZeroConfig


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ACCELERATE_ZERO_")]:
        monkeypatch.delenv(name)


def file(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_arguments_become_the_engines_settings() -> None:
    plugin = ZeroPlugin(
        stage=2, offload="optimizer", unit_classes=["LlamaDecoderLayer"], unit_numel=5, local_accumulation=True
    )
    expected = ZeroConfig(
        stage=2, offload="optimizer", unit_classes=("LlamaDecoderLayer",), unit_numel=5, local_accumulation=True
    )
    assert plugin.config() == expected
    assert ZeroPlugin().config() == ZeroConfig()


def test_mixed_precision_means_fp32_masters_and_outputs() -> None:
    assert ZeroPlugin().config("bf16").precision == MixedPrecision(output=torch.float32)
    fp16 = ZeroPlugin().config("fp16").mixed_precision
    assert fp16 is not None and (fp16.param, fp16.nonfinite) == (torch.float16, "skip")
    assert ZeroPlugin(precision="bf16-true").config().precision == MixedPrecision.named("bf16-true")
    own = MixedPrecision(reduce=torch.float32)
    assert ZeroPlugin(precision=own).config("bf16").precision == MixedPrecision(
        reduce=torch.float32, output=torch.float32
    )
    with pytest.raises(ValueError, match="mean different things"):
        ZeroPlugin(precision="bf16-true").config("fp16")
    with pytest.raises(ValueError, match="mixed_precision must be one of no, bf16, fp16"):
        ZeroPlugin().config("fp8")


def test_a_directory_puts_what_is_offloaded_on_disk(tmp_path: Path) -> None:
    plugin = ZeroPlugin(offload="all", offload_directory=tmp_path)
    assert plugin.config().placement == Offload(optimizer="disk", params="disk", directory=tmp_path)
    plugin = ZeroPlugin(stage=2, offload="optimizer", offload_directory=tmp_path)
    assert plugin.config().placement == Offload(optimizer="disk", directory=tmp_path)
    with pytest.raises(ValueError, match="offload_directory goes with"):
        ZeroPlugin(offload_directory=tmp_path).config()


def test_variables_say_what_arguments_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ZeroPlugin(
        stage=3, offload="all", offload_directory="/d", precision="bf16-mixed", unit_classes=["A", "B"], unit_numel=7,
        prefetch_bytes=0, local_accumulation=False,
    )  # fmt: skip
    for name, value in given.variables().items():
        monkeypatch.setenv(name, value)
    assert ZeroPlugin() == given
    assert ZeroPlugin(unit_numel=7) == given


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ACCELERATE_ZERO_STAGES", "3", "unknown variable ACCELERATE_ZERO_STAGES. Did you mean ACCELERATE_ZERO_STAGE"),
        ("ACCELERATE_ZERO_STAGE", "three", "variable ACCELERATE_ZERO_STAGE cannot be read: 'three'"),
        ("ACCELERATE_ZERO_LOCAL_ACCUMULATION", "maybe", "cannot be read: 'maybe'"),
        ("ACCELERATE_ZERO_STAGE", "1", "variable ACCELERATE_ZERO_STAGE says 1 and the argument stage says 2"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        ZeroPlugin(stage=2)


def test_a_contradiction_says_where_each_side_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ACCELERATE_ZERO_STAGE", "2")
    with pytest.raises(
        ValueError,
        match=r"offload='all' from argument offload; stage=2 from variable ACCELERATE_ZERO_STAGE",
    ):
        ZeroPlugin(offload="all").config()
    monkeypatch.setenv("ACCELERATE_ZERO_CONFIG_FILE", "/home/me/zero.yaml")
    with pytest.raises(ValueError, match=r"set from /home/me/zero\.yaml"):
        ZeroPlugin(offload="all").config()
    monkeypatch.delenv("ACCELERATE_ZERO_STAGE")
    monkeypatch.delenv("ACCELERATE_ZERO_CONFIG_FILE")
    path = file(tmp_path, "zero_config: {version: 1, stage: 1, offload: all}")
    with pytest.raises(ValueError, match=rf"stage=1 from zero_config\.stage in {path}"):
        ZeroPlugin.from_file(path).config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_processes: 2", "has no section 'zero_config'.*accelerate-zero config --from"),
        ("[1, 2", "is neither YAML nor JSON"),
        ("zero_config: {version: 1}", "zero_config.stage is missing; expected 1, 2 or 3"),
        ("zero_config: {version: 2, stage: 3}", "version 2.*knows 1: upgrade"),
        ("zero_config: {stage: 3, ofload: all}", "unknown key zero_config.ofload. Did you mean offload"),
        ("zero_config: {stage: '3'}", "zero_config.stage must be of type int, got '3'"),
        ("zero_config: {stage: true}", "zero_config.stage must be of type int, got True"),
        ("zero_config: {stage: 3, unit_classes: Block}", "unit_classes must be of type list"),
        ("zero_config: {stage: 3, local_accumulation: 1}", "local_accumulation must be of type bool"),
    ],
)
def test_a_file_that_makes_no_sense_is_named_with_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(ValueError, match=f"(?s){path}.*{message}|{message}"):
        ZeroPlugin.from_file(path)
    with pytest.raises(FileNotFoundError, match="accelerate-zero config"):
        ZeroPlugin.from_file(tmp_path / "none.yaml")


def test_a_file_of_settings_is_read(tmp_path: Path) -> None:
    path = file(tmp_path, "num_processes: 2\nzero_config: {version: 1, stage: 2, offload: optimizer, unit_numel: 9}")
    plugin = ZeroPlugin.from_file(path)
    assert plugin.config() == ZeroConfig(stage=2, offload="optimizer", unit_numel=9)


def test_a_variable_names_a_file_for_accelerates_own_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = file(tmp_path, "zero_config: {version: 1, stage: 2, offload: optimizer}")
    monkeypatch.setenv("ACCELERATE_ZERO_CONFIG_FILE", str(path))
    assert ZeroPlugin().config() == ZeroConfig(stage=2, offload="optimizer")
    with pytest.raises(ValueError, match=rf"zero_config\.stage in {path} says 2 and the argument stage says 3"):
        ZeroPlugin(stage=3)


def test_settings_without_a_name_cannot_be_passed_on() -> None:
    wrong: dict[str, Any] = {"offload": Offload(), "precision": MixedPrecision()}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name} must be given by name"):
            ZeroPlugin(**{name: value}).variables()
