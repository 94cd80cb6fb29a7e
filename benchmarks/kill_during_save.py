"""Kills ranks while they save checkpoints, and looks at what is left.

    python benchmarks/kill_during_save.py                      # 200 kills, some minutes
    python benchmarks/kill_during_save.py --kills 20 --seed 3

Two gloo ranks take a step and save, over and over: into one place, where each checkpoint replaces the one before, and into
directories of their own (step-2, step-4, ...), with `save_checkpoint` and with `async_save_checkpoint`. A step adds one to
every weight and to every element of the optimizer's state, so each number in a checkpoint says which save it belongs to.

At a random moment one rank or both get SIGKILL; every fourth kill waits for the moments in which a checkpoint takes its
place. A rank that is left must end by itself, with an error that says that the other one is gone.

After each kill the newest checkpoint is looked for in both places, the way hosts do it (by the number in its name, and by
time) as well as by ours. It must verify, and two fresh ranks must load it: all of it from one save, and not from one
before the last that was acknowledged. Then these go on saving.

SIGKILL ends processes, not the machine: that what is written is flushed before it takes its place is not shown by this.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import glob
import multiprocessing
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import zero_core
from zero_core import storage

PHASES = (
    "between saves",
    "before writing",
    "while writing",
    "while checking what was written",
    "while taking its place",
)
BETWEEN, PLANNING, WRITING, CHECKING, PUBLISHING = range(len(PHASES))
PLACES = ("replaced", "steps")
PATIENCE = 30.0  # seconds for what must happen within a few

# Ranks are forked from a server that has imported torch and nothing else.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed.checkpoint", "zero_core"])


@dataclass
class Report:
    """What happened.

    Attributes:
        kills: how many, by what a save was doing.
        killed: how many, by which ranks.
        saves: saves that were acknowledged.
        checked: checkpoints that were complete after a kill, verified and loaded.
        unfinished: directories of killed saves that no later save has cleaned up.
        ends: seconds until a rank that was left had ended.
        errors: what such ranks said, and how often.
        losses: what was not as it must be.
        hangs: ranks that did not end.
    """

    kills: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    saves: int = 0
    checked: int = 0
    unfinished: int = 0
    ends: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing was lost and nobody hung."""
        return not self.losses and not self.hangs

    def __str__(self) -> str:
        lines = [f"{self.kills.total()} kills during {self.saves} saves"]
        lines += [f"  {self.kills[phase]:4} {phase}" for phase in PHASES]
        lines += ["killed:", *(f"  {count:4} {ranks}" for ranks, count in sorted(self.killed.items()))]
        lines += [f"complete checkpoints verified and loaded: {self.checked}"]
        lines += [f"directories of killed saves that are left at the end: {self.unfinished}"]
        if self.ends:
            lines += [
                f"ranks that were left: {len(self.ends)} ended by themselves, after {statistics.median(self.ends):.1f} s "
                f"(median), {max(self.ends):.1f} s (longest), saying"
            ]
            lines += [f"  {count:4} {text}" for text, count in self.errors.most_common()]
        lines += [f"hangs: {len(self.hangs)}", *self.hangs, f"losses: {len(self.losses)}", *self.losses]
        return "\n".join(lines)


class Board:
    """What ranks and the killer see of each other: a file in everybody's memory.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self._cells = torch.from_file(path, shared=True, size=8, dtype=torch.int64)

    def __getitem__(self, name: str) -> int:
        return int(self._cells[self._NAMES.index(name)])

    def __setitem__(self, name: str, value: int) -> None:
        self._cells[self._NAMES.index(name)] = value

    # What the save of rank 0 is doing; the last save started; the last acknowledged in each place; how many were.
    _NAMES = ("phase", "started", *PLACES, "saves of this pair", "saves")


# --- the ranks --------------------------------------------------------------------------------------------


class Count(torch.optim.Optimizer):
    """Adds one to each weight, and keeps count for each element."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            state = self.state[param]
            state.setdefault("count", torch.zeros_like(param)).add_(1)
            state.setdefault("step", torch.tensor(0.0)).add_(1)
            param.add_(1)


def work(rank: int, port: int, number: int, folder: str, stage: int, paths: dict[str, str], pipe: Any) -> None:
    """One rank: loads and checks what is there, then saves until it is killed or the other one is gone."""
    with open(f"{folder}/stack{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        try:
            store = dist.PrefixStore(str(number), dist.TCPStore("127.0.0.1", port))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))
            torch.set_num_threads(1)
            _save_forever(rank, folder, stage, paths, pipe)
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {error}"))
        finally:
            os._exit(0)


def _build(stage: int) -> tuple[nn.Module, zero_core.ZeroEngine, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(700, 999), nn.ReLU(), nn.Linear(999, 500))
    for param in model.parameters():
        nn.init.zeros_(param)
    engine = zero_core.shard(model, zero_core.ZeroConfig(stage=stage))
    return model, engine, engine.bind(Count(model.parameters()))


def _save_forever(rank: int, folder: str, stage: int, paths: dict[str, str], pipe: Any) -> None:
    board = Board(f"{folder}/board")
    model, engine, optimizer = _build(stage)
    found = {place: _load(path, engine, optimizer) for place, path in paths.items()}
    if found:  # go on from the newest
        _load(paths[max(found, key=lambda place: found[place])], engine, optimizer)
    pipe.send(("found", found))
    number, pending = max(found.values(), default=0), dict[int, Any]()
    with contextlib.ExitStack() as stack:
        if rank == 0:
            _note_phases(board, stack)
        while True:
            number += 1
            model(torch.ones(1, 700)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            place = PLACES[number % 2]
            path = f"{folder}/replaced" if place == "replaced" else f"{folder}/step-{number}"
            board["started"] = number
            if number // 2 % 2:
                zero_core.save_checkpoint(path, engine, optimizer, {"number": number})
                _acknowledge(board, rank, number)
            else:
                pending[number] = zero_core.async_save_checkpoint(path, engine, optimizer, {"number": number})
            for done in [key for key, future in pending.items() if future.done()]:
                pending.pop(done).result()
                _acknowledge(board, rank, done)
            if rank == 0:
                _rotate(folder, board["steps"])


def _acknowledge(board: Board, rank: int, number: int) -> None:
    if rank == 0:
        board[PLACES[number % 2]] = max(number, board[PLACES[number % 2]])
        board["saves"] += 1
        board["saves of this pair"] += 1


def _rotate(folder: str, last: int) -> None:
    """Removes old checkpoints, as hosts do; a kill may interrupt this, too."""
    for path in Path(folder).glob("step-*"):
        if int(path.name.removeprefix("step-")) < last - 4:
            storage.remove(path)


def _load(path: str, engine: zero_core.ZeroEngine, optimizer: torch.optim.Optimizer) -> int:
    """Loads, and checks that every number is of one save; returns which."""
    number: int = zero_core.load_checkpoint(path, engine, optimizer).extra["number"]
    weights = engine.full_state_dict()
    state = engine.full_optimizer_state_dict(optimizer)
    values = {
        f"{param}.{key}": value for param, entry in state.get("state", {}).items() for key, value in entry.items()
    }
    wrong = [name for name, value in {**weights, **values}.items() if not bool((value == number).all())]
    if wrong or len(values) != 2 * len(weights):
        raise AssertionError(f"{path}: expected {number} in every element; {wrong or sorted(values)} are not so")
    return number


def _note_phases(board: Board, stack: contextlib.ExitStack) -> None:
    def note(owner: type, method: str, during: int, after: int) -> None:
        function = getattr(owner, method)

        def noting(*args: Any, **kwargs: Any) -> Any:
            board["phase"] = during
            result = function(*args, **kwargs)
            board["phase"] = after
            return result

        stack.enter_context(mock.patch.object(owner, method, noting))

    note(storage.Staging, "prepare", PLANNING, PLANNING)
    note(storage.Writer, "write_data", WRITING, CHECKING)
    note(storage.Staging, "publish", PUBLISHING, BETWEEN)


# --- the killer -------------------------------------------------------------------------------------------


def kill(kills: int, seed: int, folder: str, say: Callable[[str], None]) -> Report:
    """Lets ranks save in `folder` and kills them, `kills` times.

    Args:
        kills: how often.
        seed: of all that is random.
        folder: an empty directory.
        say: told what happens.
    """
    dice, report = random.Random(seed), Report()
    Path(f"{folder}/board").write_bytes(bytes(64))
    board = Board(f"{folder}/board")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for number in range(kills + 1):  # the last time only to look at what is left
        ranks = _Ranks(server.port, number, folder, stage=dice.choice((1, 2, 3)), paths=_newest(folder, board, report))
        try:
            if not ranks.found(board, report):
                break
            if number == kills:
                break
            board["phase"], board["saves of this pair"] = BETWEEN, 0
            _wait_until(lambda: board["saves of this pair"] > 0 and all(board[place] for place in PLACES))
            if number % 4 == 3:
                _wait_until(lambda: board["phase"] == PUBLISHING)
                time.sleep(dice.uniform(0, 0.005))
            else:
                time.sleep(dice.uniform(0, 0.5))
            chosen = dice.choice(((0,), (1,), (0, 1)))
            phase = ranks.kill(chosen)
            report.kills[PHASES[phase]] += 1
            report.killed[" and ".join(f"rank {rank}" for rank in chosen)] += 1
            ranks.see_the_others_end(report)
            say(f"kill {number + 1}: {' and '.join(map(str, chosen))} {PHASES[phase]}, {len(report.losses)} losses")
        finally:
            ranks.end()
    report.saves = board["saves"]
    report.unfinished = sum(name.endswith(".partial") for name in os.listdir(folder))
    return report


class _Ranks:
    """Two ranks."""

    def __init__(self, port: int, number: int, folder: str, stage: int, paths: dict[str, str]) -> None:
        self._folder = folder
        self._paths = paths
        self._processes: list[BaseProcess] = []
        self._pipes: list[Any] = []
        self._killed: tuple[int, ...] = ()
        for rank in range(2):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=work, args=(rank, port, number, folder, stage, paths, sender), daemon=True
            )
            process.start()
            sender.close()
            self._processes.append(process)
            self._pipes.append(receiver)

    def found(self, board: Board, report: Report) -> bool:
        """Whether what the ranks loaded is what it must be."""
        for rank, pipe in enumerate(self._pipes):
            kind, what = pipe.recv() if pipe.poll(PATIENCE) else ("hung", self._stack(rank))
            if kind != "found":
                report.losses.append(f"rank {rank} could not load {self._paths}: {kind}: {what}")
                return False
        for place, number in what.items():
            report.checked += 1
            if not board[place] <= number <= board["started"] or PLACES[number % 2] != place:
                report.losses.append(
                    f"{place}: the newest is {number}, the last that was acknowledged {board[place]}, the last that was "
                    f"started {board['started']}"
                )
            if place == "steps" and not self._paths[place].endswith(f"-{number}"):
                report.losses.append(f"{self._paths[place]} holds {number}")
            board[place] = number
        return True

    def kill(self, chosen: tuple[int, ...]) -> int:
        """Kills some; returns what the save was doing."""
        self._killed = chosen
        board = Board(f"{self._folder}/board")
        phase = board["phase"]
        for rank in chosen:
            os.kill(self._processes[rank].pid or 0, signal.SIGKILL)
        return phase

    def see_the_others_end(self, report: Report) -> None:
        """Waits for those that were not killed."""
        start = time.monotonic()
        for rank, (process, pipe) in enumerate(zip(self._processes, self._pipes, strict=True)):
            if rank in self._killed:
                continue
            process.join(PATIENCE)
            if process.exitcode is None:
                report.hangs.append(f"rank {rank} was left and did not end: {self._stack(rank)}")
                continue
            report.ends.append(time.monotonic() - start)
            text = str(pipe.recv()[1]) if pipe.poll() else "nothing"
            text = text.splitlines()[0].replace(self._folder, "").partition(": that rank")[0]
            report.errors[re.sub(r"\d+", "N", text)] += 1

    def end(self) -> None:
        """Ends all."""
        for process in self._processes:
            process.kill()
            process.join()

    def _stack(self, rank: int) -> str:
        os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(1.0)
        return Path(f"{self._folder}/stack{rank}").read_text() or "(no stack)"


def _newest(folder: str, board: Board, report: Report) -> dict[str, str]:
    """The newest checkpoint in each place, verified."""
    found = {}
    if board["replaced"]:
        found["replaced"] = f"{folder}/replaced"
    steps = {int(m[1]): f"{folder}/{m[0]}" for m in map(re.compile(r"step-(\d+)").fullmatch, os.listdir(folder)) if m}
    if steps:
        found["steps"] = steps[max(steps)]
        by_time = max(glob.glob(f"{folder}/step-*"), key=os.path.getmtime)
        if by_time != found["steps"]:
            report.losses.append(f"{by_time} is newer than {found['steps']}")
    elif board["steps"]:
        report.losses.append("there is no step-* any more")
    for path in found.values():
        try:
            zero_core.verify_checkpoint(path)
        except zero_core.CheckpointError as error:
            report.losses.append(str(error))
    return found


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the ranks do not save any more")
        time.sleep(1e-4)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        argv: command line, `sys.argv` by default.

    Returns:
        The exit status: 1 when something was lost or hung, else 0.
    """
    parser = argparse.ArgumentParser(description="Kills ranks while they save checkpoints, and looks at what is left.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and ranks")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where checkpoints go")
    parser.add_argument("--quiet", action="store_true", help="print the report only")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="kill-during-save-") as folder:
        report = kill(args.kills, args.seed, folder, (lambda _: None) if args.quiet else print)
    print(report)
    print(f"{time.monotonic() - start:.0f} s")
    return 0 if report.good and report.kills.total() == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
