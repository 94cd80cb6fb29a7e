"""Ranks that wait for each other in different places: noticed within seconds, with the place of each.

A rank that calls alone what all must call, or takes another way through the model, leaves everybody waiting until the
process group's timeout. Here each rank notes what it has posted to the others and what it waits for. One that has waited
for some seconds publishes its notes in the store; when all have, and each waits for something that another has not posted,
nobody can go on. Slow ranks and slow networks do not look like that. A rank in torch's own barrier waits for all, too: that
is where the others usually are when `if rank == 0` stands before a call that all must make.

gloo only: NCCL's calls do not block the host, and it has a watchdog of its own.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

_PATIENCE = 5.0  # seconds in one wait before others are asked
_INTERVAL = 1.0
_BROKEN = re.compile("Connection|Broken pipe")
_BARRIER = inspect.unwrap(dist.barrier).__code__


class Waitable(Protocol):
    """The part of `torch.distributed.Work` used here."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Waits for the operation."""

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""


@dataclass(frozen=True)
class Operation:
    """Something that needs all ranks, as a context: inside, this rank waits for the others.

    Attributes:
        watchdog: who looks after it.
        what: its kind and buffer, or the call it belongs to; the same on all ranks.
        number: how many of these this rank has posted.
        interruptible: whether the wait can end in an error rather than with the process.
    """

    watchdog: Watchdog
    what: str
    number: int
    interruptible: bool

    def __enter__(self) -> None:
        self.watchdog.waiting = (self, time.monotonic())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.watchdog.waiting = None
        try:
            self.watchdog.retract(self)
        finally:
            if _is_broken(error):
                raise _lost(self.watchdog.rank, self.what) from error

    def finish(self, work: Waitable, timeout: timedelta) -> None:
        """Waits for `work`, looking up now and then.

        Raises:
            RuntimeError: no rank can go on, the group's time is up, or the operation failed.
        """
        end = time.monotonic() + timeout.total_seconds()
        with self:
            while True:
                try:
                    work.wait(timedelta(seconds=_INTERVAL))
                    return
                except RuntimeError:
                    if work.is_completed() or time.monotonic() > end:
                        raise
                if self.watchdog.verdict is not None:
                    verdict, self.watchdog.verdict = self.watchdog.verdict, None
                    raise RuntimeError(verdict)


class LostRankError(RuntimeError):
    """Another rank ended while this one waited for it."""


@contextmanager
def saying_who_is_lost(rank: int, what: str) -> Iterator[None]:
    """A context in which the error of a connection that broke becomes one that says what it means.

    Args:
        rank: this rank.
        what: what it waits in; of nested contexts, the outer one's is said.
    """
    try:
        yield
    except LostRankError as error:
        raise _lost(rank, what) from error.__cause__
    except RuntimeError as error:
        if _is_broken(error):
            raise _lost(rank, what) from error
        raise


def _is_broken(error: BaseException | None) -> bool:
    of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error) and _BROKEN.search(str(error)) is not None
    return of_gloo or isinstance(error, dist.DistNetworkError)


def _lost(rank: int, what: str) -> LostRankError:
    return LostRankError(
        f"rank {rank} lost another rank while it waited in {what}: that rank ended, or cannot be reached. Its own error "
        "says why; look for the first one among all ranks'."
    )


class Watchdog:
    """Looks after one set of ranks, from a thread of its own that sleeps while nothing takes long.

    Args:
        store: where ranks leave notes for each other; `None` where there is nothing to look after.
        rank: this rank.
        world_size: their number.
        touch: raises where a rank cannot be reached any more.
    """

    def __init__(self, store: Any, rank: int, world_size: int, touch: Callable[[], None]) -> None:
        self.waiting: tuple[Operation, float] | None = None
        self.verdict: str | None = None
        self.rank = rank
        self._store, self._world_size, self._touch = store, world_size, touch
        self._posted: Counter[str] = Counter()
        self._published: Operation | None = None
        self._before: list[str] | None = None
        self._barrier: tuple[int, tuple[Operation, float]] | None = None
        if store is not None:
            threading.Thread(target=_watch, args=(weakref.ref(self),), name="zero_core-watchdog", daemon=True).start()

    def post(self, what: str, interruptible: bool = False) -> Operation:
        """Notes that this rank starts its part of an operation."""
        self._posted[what] += 1
        return Operation(self, what, self._posted[what], interruptible)

    def meet(self, call: str, timeout: timedelta) -> None:
        """Waits until all ranks are in `call`, through the store: a rank that gives up leaves nothing half done.

        Raises:
            RuntimeError: no rank can go on, or the time is up.
        """
        operation = self.post(call, interruptible=True)
        key, end, pause = f"{call}/{operation.number}", time.monotonic() + timeout.total_seconds(), 1e-4
        touched, rest = time.monotonic(), _INTERVAL
        with operation:
            self._store.add(key, 1)
            while self._store.add(key, 0) < self._world_size:
                late = time.monotonic() > end
                if self.verdict is not None or late:
                    verdict, self.verdict = self.verdict, None
                    self._store.add(key, -1)
                    self._posted[call] -= 1
                    raise RuntimeError(verdict or f"not all ranks came to {call} within {timeout}.")
                if time.monotonic() > touched + rest:  # the store does not tell that a rank is gone
                    self._touch()
                    touched, rest = time.monotonic(), min(2 * rest, _PATIENCE)
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        if operation.number > 1:  # everybody has left the one before
            self._store.delete_key(f"{call}/{operation.number - 1}")

    def retract(self, operation: Operation) -> None:
        """Takes the note back that this rank waits for `operation`."""
        if self._published is operation:
            self._published = None
            self._store.set(str(self.rank), "")

    def look(self) -> None:
        """Called now and then: publishes a long wait, and acts when nobody can go on."""
        waiting = self._place()
        if waiting is None or time.monotonic() - waiting[1] < _PATIENCE:
            self._before = None
            if self._published is not None:
                self.retract(self._published)
            return
        operation = waiting[0]
        if self._published is not operation:
            notes = {"waits": operation.what, "number": operation.number, "posted": self._posted}
            notes["interruptible"] = operation.interruptible
            self._published = operation
            self._store.set(str(self.rank), json.dumps(notes))
        if self._place() is not waiting:  # over in the meantime
            self.retract(operation)
            return
        notes_of_all = self._read()
        if notes_of_all is None or notes_of_all != self._before:
            self._before = notes_of_all
            return
        found = [json.loads(text) for text in notes_of_all]
        if _nobody_goes_on(found):
            self._act(found)

    def _place(self) -> tuple[Operation, float] | None:
        """What the main thread waits in, and since when."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if self.waiting is not None or frame is None or frame.f_code is not _BARRIER:
            self._barrier = None
            return self.waiting
        if frame.f_locals.get("group") not in (None, dist.group.WORLD):
            return None
        if self._barrier is None or self._barrier[0] != id(frame):
            operation = Operation(self, "torch.distributed.barrier()", 1, interruptible=False)
            self._barrier = id(frame), (operation, time.monotonic())
        return self._barrier[1]

    def _read(self) -> list[str] | None:
        keys = [str(rank) for rank in range(self._world_size)]
        if not self._store.check(keys):
            return None
        texts = [self._store.get(key).decode() for key in keys]
        return texts if all(texts) else None

    def _act(self, found: list[dict[str, Any]]) -> None:
        places = "\n".join(f"  rank {rank} waits in {notes['waits']}" for rank, notes in enumerate(found))
        message = (
            f"the ranks wait for each other and none can go on:\n{places}\nEvery rank must make the same calls in the same "
            "order: look for a call that only some ranks make (after `if rank == 0`), or for a way through the model that "
            "only some take."
        )
        if found[self.rank]["interruptible"]:
            self.verdict = message
        elif not any(notes["interruptible"] for notes in found):
            # Waiting for a peer's message cannot be interrupted; NCCL's watchdog ends the process, too.
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            sys.stderr.write(f"zero_core, rank {self.rank}: {message}\nThis rank is at:\n{stack}")
            sys.stderr.flush()
            os._exit(1)


def _nobody_goes_on(found: list[dict[str, Any]]) -> bool:
    """Whether each rank waits for an operation that some other rank has not posted."""
    return all(
        any(other is not own and other["posted"].get(own["waits"], 0) < own["number"] for other in found)
        for own in found
    )


def _watch(reference: weakref.ref[Watchdog]) -> None:
    while True:
        time.sleep(_INTERVAL)
        watchdog = reference()
        if watchdog is None:
            return
        try:
            watchdog.look()
        except (RuntimeError, ConnectionError):  # the store is gone: the job is ending
            return
        del watchdog
