"""Programs as a user starts them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command: str, timeout: float = 200, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; nothing of it is left behind, whatever happens."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    process = subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass
    return subprocess.CompletedProcess(command, process.returncode, output)
