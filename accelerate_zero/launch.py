"""`accelerate-zero launch`: Accelerate's own launcher, with ZeRO active in the script, and several processes on a CPU."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.commands import launch as stock
from accelerate.commands.config.config_args import cache_dir, default_config_file
from accelerate.utils import patch_environment

from accelerate_zero.plugin import CONFIG_FILE_VARIABLE, FIELDS, SECTION, VARIABLE_PREFIX, ZeroPlugin, read_config

DEFAULT_FILE = Path(cache_dir, "zero_config.yaml")
"""Where `accelerate-zero config` writes, and `launch` looks when no file is named; not where Accelerate looks."""


def parser() -> argparse.ArgumentParser:
    """Accelerate's parser, with an option for ZeRO's settings."""
    made: argparse.ArgumentParser = stock.launch_command_parser()
    made.prog = "accelerate-zero launch"
    made.add_argument(
        "--zero",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"A setting of ZeRO, which wins over the config file's; repeatable. Keys: {', '.join(FIELDS)}.",
    )
    return made


def launch(arguments: Sequence[str]) -> None:
    """Starts a script on all processes.

    Args:
        arguments: as for `accelerate launch`.

    Raises:
        ValueError: the config file or an option makes no sense; says which.
        FileNotFoundError: there is no such file.
    """
    args = parser().parse_args(arguments)
    with ExitStack() as stack:
        variables = _settings(args, stack)
        # ZeRO is switched on in every process before the script runs.
        args.training_script_args = [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]
        args.training_script, args.module = "accelerate_zero.run", True
        stack.enter_context(patch_environment(**variables))
        _start(args, stack)


def _settings(args: argparse.Namespace, stack: ExitStack) -> dict[str, str]:
    """ZeRO's variables; leaves the rest of the config file, if one has a section of ours, to Accelerate."""
    path = args.config_file or (str(DEFAULT_FILE) if DEFAULT_FILE.is_file() else None)
    options = {VARIABLE_PREFIX + name.upper(): text for name, text in map(_pair, args.zero)}
    variables = dict(options)
    read = path or default_config_file  # which Accelerate reads by itself, if it is there
    whole = read_config(read) if path is not None or os.path.isfile(read) else {}
    if path is not None and (SECTION in whole or not options):
        from_file = ZeroPlugin.from_file(path).variables()
        variables = {CONFIG_FILE_VARIABLE: os.path.abspath(path), **from_file, **options}
        file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".yaml"))
        yaml.safe_dump({key: value for key, value in whole.items() if key != SECTION}, file)
        file.flush()
        args.config_file = file.name
    with patch_environment(**variables):
        # What makes no sense is said here, once, and not by every process.
        ZeroPlugin().config(args.mixed_precision or str(whole.get("mixed_precision") or "no"))
    return variables or {VARIABLE_PREFIX + "STAGE": "3"}


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or key not in FIELDS:
        raise ValueError(
            f"--zero expects KEY=VALUE, as in stage=3, with one of the keys {', '.join(FIELDS)}; got {text!r}."
        )
    return key, value


def _start(args: argparse.Namespace, stack: ExitStack) -> None:
    checked, _, _ = stock._validate_launch_command(args)
    on_cpu = bool(checked.cpu or getattr(checked, "use_cpu", False)) or not torch.accelerator.is_available()
    if not on_cpu:
        stock.launch_command(args)
        return
    # Accelerate starts one process on a CPU; torch's elastic launcher, which it uses for GPUs, starts several.
    checked.num_processes = checked.num_processes or 1
    checked.num_machines = checked.num_machines or 1
    if checked.num_machines == 1 and checked.main_process_port is None:
        checked.main_process_port = 0  # any free one: several jobs share a machine
    stack.enter_context(patch_environment(**_cpu_variables(checked)))
    stock.multi_gpu_launcher(checked)


def _cpu_variables(args: Any) -> dict[str, str]:
    local = max(1, args.num_processes // args.num_machines)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // local))
    return {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": threads}
