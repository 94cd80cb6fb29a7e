"""The command line: `accelerate-zero config | launch | env`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from accelerate.commands.config.config import get_user_input
from accelerate.commands.config.config_utils import _ask_field, _ask_options, _convert_yes_no_to_bool
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from accelerate_zero import migrate
from accelerate_zero.launch import DEFAULT_FILE, launch
from accelerate_zero.plugin import FIELDS, SECTION, SECTION_VERSION, ZeroPlugin, read_config, read_section

app = typer.Typer(help="ZeRO for Hugging Face Accelerate.", no_args_is_help=True, add_completion=False)
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_HEADER = """\
# Written by `accelerate-zero config`; start scripts with `accelerate-zero launch --config_file {path} script.py`.
# `accelerate launch` stops at the key '{section}' ("unknown keys"). To use it all the same, move that section to a file
# of its own, set the variable ACCELERATE_ZERO_CONFIG_FILE to its path, and write `import accelerate_zero` in the script.
"""


@app.command()
def config(
    config_file: Annotated[Path, typer.Option("--config_file", help="Where to write.")] = DEFAULT_FILE,
    default: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=VALUE: write without asking; a key of Accelerate's config or of ZeRO's settings. Repeatable."
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Translate a DeepSpeed ds_config.json, or an Accelerate config with DeepSpeed or FSDP."
        ),
    ] = None,
) -> None:
    """Write a config file: Accelerate's questions, then ZeRO's."""
    if source is not None:
        translation = migrate.translate(source)
        _show(translation, source)
        accelerate, zero = translation.accelerate, translation.zero
    elif default:
        accelerate, zero = _without_asking(default)
    else:
        accelerate, zero = _ask()
    text = _HEADER.format(path=config_file, section=SECTION) + yaml.safe_dump(
        {**accelerate, SECTION: {"version": SECTION_VERSION, **zero}}, sort_keys=False
    )
    read_section({SECTION: zero}, config_file)
    ZeroPlugin(**{key: value for key, value in zero.items() if key != "version"}).config(
        str(accelerate.get("mixed_precision") or "no")
    )
    config_file.parent.mkdir(parents=True, exist_ok=True)
    config_file.write_text(text, encoding="utf-8")
    typer.echo(f"Written: {config_file}")


@app.command(name="launch", context_settings=_PASSED_ON)
def launch_command(context: typer.Context) -> None:
    """Start a script with ZeRO active in it; options and arguments as for `accelerate launch`."""
    launch(context.args)


@app.command()
def env(
    config_file: Annotated[Path | None, typer.Option("--config_file", help="A config file to include.")] = None,
) -> None:
    """Print what a bug report needs."""
    packages = ("zero-redundancy", "torch", "accelerate", "transformers", "lightning", "peft", "trl", "safetensors")
    facts: dict[str, Any] = {name: _version(name) for name in packages}
    facts["python"] = platform.python_version()
    facts["platform"] = platform.platform()
    facts["cores"] = os.cpu_count()
    facts["devices"] = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "CPU only"
    facts["backends"] = ", ".join(name for name in ("gloo", "nccl") if torch.distributed.is_backend_available(name))
    if torch.cuda.is_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for name in sorted(os.environ):
        if name.startswith(("ACCELERATE_", "NCCL_", "GLOO_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")):
            facts[name] = os.environ[name]
    for name, value in facts.items():
        typer.echo(f"- {name}: {value}")
    path = config_file or (DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
    typer.echo(f"- config file: {path or 'none'}")
    if path is not None:
        typer.echo(yaml.safe_dump(read_config(path), sort_keys=False))


def main() -> None:
    """Runs the command line; what the user can mend is said in one line, without a traceback."""
    try:
        app()
    except (ValueError, FileNotFoundError) as error:
        typer.secho(f"accelerate-zero: {error}", fg="red", err=True)
        sys.exit(2)


def _without_asking(pairs: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    devices = torch.cuda.device_count()
    accelerate: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if devices > 1 else "NO" if devices else "MULTI_CPU",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": devices or 2,
        "machine_rank": 0,
        "use_cpu": devices == 0,
    }
    zero: dict[str, Any] = {"stage": 3}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator:
            raise ValueError(f"--default expects KEY=VALUE, as in stage=3, got {pair!r}.")
        if key in FIELDS:
            zero[key] = FIELDS[key](text)
        elif key in accelerate:
            accelerate[key] = yaml.safe_load(text) if key != "mixed_precision" else text
        else:
            raise ValueError(f"--default: unknown key {key!r}; expected one of {', '.join([*FIELDS, *accelerate])}.")
    return accelerate, zero


def _ask() -> tuple[dict[str, Any], dict[str, Any]]:
    answers = get_user_input().to_dict()
    accelerate = {key: value for key, value in answers.items() if value not in ({}, [], None)}
    for engine in ("deepspeed_config", "fsdp_config", "megatron_lm_config"):
        if engine in accelerate:
            raise ValueError(f"you chose {engine.removesuffix('_config')}, which does what ZeRO does: answer no to it.")
    stages = [1, 2, 3]
    zero: dict[str, Any] = {}
    zero["stage"] = stages[
        int(
            _ask_options(
                "Which states should ZeRO partition over the processes?",
                ["optimizer state (stage 1)", "and gradients (stage 2)", "and parameters (stage 3)"],
                default=2,
            )
        )
    ]
    places = ["on the device", "optimizer state in host memory"]
    if zero["stage"] == 3:
        places.append("optimizer state and parameters in host memory")
    offload = [None, "optimizer", "all"][int(_ask_options("Where should they live?", places))]
    if offload is not None:
        zero["offload"] = offload
        directory = _ask_field("A directory to keep them in files instead of host memory? [no]: ", default="no")
        if directory != "no":
            zero["offload_directory"] = directory
    if accelerate.get("mixed_precision") == "bf16" and not _ask_field(
        "Should masters of the bf16 weights be kept in fp32? [YES/no]: ",
        _convert_yes_no_to_bool,
        default=True,
        error_message="Please enter yes or no.",
    ):
        zero["precision"] = "bf16-true"
        accelerate["mixed_precision"] = "no"
    classes = _ask_field(
        "Module classes to gather together, separated by commas? [what the model itself says]: ", default="auto"
    )
    if classes != "auto":
        zero["unit_classes"] = FIELDS["unit_classes"](classes)
    return accelerate, zero


def _show(translation: migrate.Translation, source: Path) -> None:
    table = Table(title=f"{source}: what became of each key")
    for heading in ("key", "value", "outcome", "note"):
        table.add_column(heading, overflow="fold")
    colours = {"translated": "green", "not needed": "dim", "unsupported": "yellow"}
    for row in translation.rows:
        outcome = f"[{colours[row.outcome]}]{row.outcome}[/]"
        table.add_row(escape(row.key), escape(str(row.value)), outcome, escape(row.note))
    Console().print(table)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
