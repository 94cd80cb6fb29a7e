"""Runs a script with ZeRO active: `python -m accelerate_zero.run [-m] script.py arguments`. For `accelerate-zero launch`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from accelerate_zero.activation import activate


def main() -> None:
    """Activates, then becomes the script: its `sys.argv`, its directory first on the path, its `__main__`."""
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    if as_module:
        arguments = arguments[1:]
    if not arguments:
        raise SystemExit("usage: python -m accelerate_zero.run [-m] script.py [arguments]")
    activate()
    sys.argv = arguments
    if as_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
