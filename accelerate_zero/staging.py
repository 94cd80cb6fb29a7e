"""Hosts' checkpoints on their way: their own steps write them aside, and they take their place when complete."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from zero_core.collectives import raising_together
from zero_core.storage import Folder, beside, flush_tree, recover, remove, replace, sync_directory, where_it_is

# Neither Trainer's `get_last_checkpoint` nor rotation take a name with a leading dot for a checkpoint.
_LEFT_OVER = re.compile(r"\.checkpoint[-_]\d+\.partial")

# By Trainer, where the save that is on its way writes instead of the run's directory.
_asides: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def aside_of(trainer: Any) -> str | None:
    """Where a Trainer's save that is on its way writes; `None` where there is none."""
    return _asides.get(trainer)


@contextmanager
def taking_place(target: str, writes: bool) -> Iterator[str]:
    """A context in which a checkpoint is written aside; at its end it takes its place, whole. All ranks.

    Args:
        target: its place, a local directory.
        writes: whether this is the process that makes it; one.

    Yields:
        an empty directory of the same name, which all ranks may write into.

    Raises:
        ValueError: several processes would make it, as with `save_on_each_node` on several nodes.
        Exception: something failed, on all ranks; nothing of the save is left then.
    """
    _check_one_writes(writes)
    target = where_it_is(target)
    aside = beside(target, "partial")
    written = os.path.join(aside, os.path.basename(target))
    try:
        with raising_together():
            if writes:
                recover(Folder(target))
                shutil.rmtree(aside, ignore_errors=True)
                os.makedirs(written)
        yield written
        with raising_together():
            if writes:
                flush_tree(written)
                replace(written, target)
                sync_directory(os.path.dirname(target))
                os.rmdir(aside)
    except BaseException:
        if writes:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _check_one_writes(writes: bool) -> None:
    writing = [False] * dist.get_world_size()
    dist.all_gather_object(writing, writes)
    if sum(writing) != 1:
        writers = [rank for rank, own in enumerate(writing) if own]
        raise ValueError(
            f"expected one process that makes the checkpoint's directory, got ranks {writers}: leave out "
            "save_on_each_node. Ranks write their parts into one directory, on a file system that all see."
        )


def clear(directory: str) -> None:
    """Removes what interrupted saves have left in a directory of checkpoints. One process."""
    for path in Path(directory).iterdir() if os.path.isdir(directory) else ():
        if _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def staging(trainer: Any, run_dir: str, target: str) -> Iterator[None]:
    """A context in which a Trainer's save is written aside; see `taking_place`. All ranks.

    Args:
        trainer: what saves.
        run_dir: the directory of its checkpoints.
        target: the checkpoint.

    Raises:
        Exception: something failed, on all ranks; nothing of the save is left then.
    """
    writes, best = trainer.args.should_save, trainer.state.best_model_checkpoint
    if writes:
        clear(run_dir)
    try:
        with taking_place(target, writes) as written:
            _asides[trainer] = os.path.dirname(written)
            with raising_together():
                yield
            with raising_together():
                _name_best(trainer.args, trainer.state, run_dir, target)
                if writes:
                    trainer.state.save_to_json(os.path.join(written, "trainer_state.json"))
    except BaseException:
        trainer.state.best_model_checkpoint = best
        raise
    finally:
        _asides.pop(trainer, None)


def rotate(run_dir: str, limit: int | None, best: str | None) -> None:
    """Removes the oldest checkpoints over a limit, but neither the newest nor the best. One process.

    As transformers' `rotate_checkpoints`, of which an interrupted one leaves half a checkpoint, with the newest time.
    """
    from transformers.trainer_utils import sort_checkpoints

    if limit is None or limit <= 0:
        return
    checkpoints = sort_checkpoints(run_dir, use_mtime=True)
    kept = {checkpoints[-1]} | ({str(Path(best))} if best else set())
    excess = max(0, len(checkpoints) - max(limit, len(kept)))
    for checkpoint in [path for path in checkpoints if path not in kept][:excess]:
        with suppress(OSError):  # what is left has no checkpoint's name; the next save removes it
            remove(checkpoint)


def keep_only(best: str) -> None:
    """Removes all checkpoints of a run but one. One process."""
    from transformers.trainer_utils import sort_checkpoints

    for checkpoint in sort_checkpoints(os.path.dirname(best)):
        if checkpoint != str(Path(best)):
            with suppress(OSError):
                remove(checkpoint)


def _name_best(args: Any, state: Any, run_dir: str, target: str) -> None:
    """Trainer looked for the best checkpoint beside the one it wrote."""
    best = os.path.join(run_dir, f"checkpoint-{state.best_global_step}")
    if state.best_global_step and args.save_strategy != "no" and (best == target or os.path.isdir(best)):
        state.best_model_checkpoint = best
