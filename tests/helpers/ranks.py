"""Real ranks for a test: processes joined by gloo, with a time limit and every rank's traceback."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Children are forked from a server that has done the slow imports once; it has no threads, so forking it is safe.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch.distributed",
        "lightning.pytorch",
        *(f"transformers.models.{m}.modeling_{m}" for m in ("llama", "gpt2", "bert", "albert", "t5")),
    ]
)


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Calls `function(*args)` on `world_size` gloo ranks and returns what each returned, in rank order.

    Args:
        world_size: number of processes.
        function: importable (module level); finds its rank through `torch.distributed`.
        *args: picklable.
        timeout: seconds for all of it; then each rank's stack is shown.

    Raises:
        AssertionError: a rank raised, died or ran out of time; carries all ranks' tracebacks.
    """
    with tempfile.TemporaryDirectory(prefix="zero-ranks-") as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main,
                args=(rank, world_size, folder, sender, timeout, function, args),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            outcomes = _collect(pipes, timeout)
        finally:
            for process in processes:
                process.join(5 if process.exitcode is None else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
        failures = [_describe(rank, outcome, folder) for rank, outcome in enumerate(outcomes) if outcome[0] != "done"]
    if failures:
        raise AssertionError("\n".join(["ranks failed:", *failures]))
    return [outcome[1] for outcome in outcomes]


def run_script(path: str, *argv: str) -> None:
    """Runs a program on this rank, within `run_ranks`, as torchrun would have started it: its ranks exist already."""
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    os.environ.update(TORCHELASTIC_RUN_ID="tests", LOCAL_RANK=rank, GROUP_RANK="0", LOCAL_WORLD_SIZE=world_size)
    sys.argv = [path, *argv]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def run_scripts(programs: list[tuple[str, ...]]) -> None:
    """Runs several, one after the other; for `run_ranks`."""
    for program in programs:
        run_script(*program)


def join(timeout: float = 120) -> None:
    """Makes the process group; again after a program that ended it. All ranks."""
    import torch.distributed as dist

    _joined.append(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['TEST_RANKS_FOLDER']}/store{len(_joined)}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))


_joined: list[int] = []


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    sender: Connection,
    timeout: float,
    function: Callable[..., Any],
    args: Any,
) -> None:
    import torch

    with open(Path(folder) / f"stack{rank}", "w") as stack:
        faulthandler.dump_traceback_later(timeout * 0.95, file=stack)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), TEST_RANKS_FOLDER=folder)
        torch.set_num_threads(1)
        try:
            join(timeout)
            sender.send(("done", function(*args)))
        except BaseException:
            sender.send(("raised", traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
            sender.close()
    # Nobody waits for the others here: a rank that failed must not keep the rest from showing their own end.
    os._exit(0)


def _collect(pipes: list[Connection], timeout: float) -> list[tuple[str, Any]]:
    outcomes: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + timeout
    while len(outcomes) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in outcomes]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                outcomes[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                outcomes[rank] = ("died", "the process ended without a word")
            if outcomes[rank][0] != "done":
                deadline = min(deadline, time.monotonic() + 10)
    return [outcomes.get(rank, ("hung", None)) for rank in range(len(pipes))]


def _describe(rank: int, outcome: tuple[str, Any], folder: str) -> str:
    kind, text = outcome
    if kind == "hung":
        stack = Path(folder) / f"stack{rank}"
        text = stack.read_text() if stack.exists() and stack.stat().st_size else "(stopped: another rank had failed)"
    return f"--- rank {rank} {kind}\n{text}"
