"""A save that fails or is killed costs nothing but itself; what is damaged is named."""

from __future__ import annotations

import errno
import glob
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from torch import nn

from tests.helpers import processes
from tests.helpers.cases import Cases, check, folder
from zero_core import (
    CheckpointError,
    PartitionedParameterError,
    ZeroConfig,
    ZeroEngine,
    async_save_checkpoint,
    load_checkpoint,
    save_checkpoint,
    shard,
    storage,
    verify_checkpoint,
)

cases = Cases(__name__)
outcomes = cases.fixture(2)


def test_ten_kills_during_saves_lose_nothing(tmp_path: Path) -> None:
    program = str(processes.ROOT / "benchmarks" / "kill_during_save.py")
    done = processes.run(sys.executable, program, "--kills", "10", "--quiet", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert re.search("^10 kills", done.stdout) and "hangs: 0\nlosses: 0" in done.stdout, done.stdout
    assert not list(tmp_path.iterdir())


class Run:
    """A sharded model whose every number says which save it belongs to."""

    def __init__(self, stage: int, size: int = 40) -> None:
        self.model = nn.Linear(size, size)
        self.engine: ZeroEngine = shard(self.model, ZeroConfig(stage=stage))
        self.optimizer = self.engine.bind(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))

    def become(self, number: int) -> None:
        self.model(torch.zeros(1, self.model.in_features)).sum().backward()
        self.optimizer.step()  # makes the momentum
        self.optimizer.zero_grad()
        with self.engine.overwriting(), torch.no_grad():
            for values in self.values():
                values.fill_(number)

    def values(self) -> list[torch.Tensor]:
        """This rank's part of all that a checkpoint holds."""
        parts: list[Any] = [*self.engine.model_state().tensors.values()]
        for entries in self.engine.optimizer_state(self.optimizer).tensors.values():
            parts += entries.values()
        return [segment.values for part in parts for segment in part._segments]

    def save(self, path: str, number: int) -> None:
        self.become(number)
        save_checkpoint(path, self.engine, self.optimizer, {"number": number})

    def assert_loads(self, path: str, number: int) -> None:
        self.become(-1)
        found = load_checkpoint(path, self.engine, self.optimizer).extra["number"]
        assert found == number and all(bool((values == number).all()) for values in self.values())
        if dist.get_rank() == 0:
            verify_checkpoint(path)


@contextmanager
def raises_on_all(failing: int, *words: str) -> Iterator[None]:
    """All ranks raise, and the others say which rank failed; the words are in every message."""
    with pytest.raises((CheckpointError, RuntimeError, OSError)) as caught:
        yield
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert dist.get_rank() == failing or f"rank {failing} failed" in message, message


@contextmanager
def on_rank(rank: int, target: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    with mock.patch.object(target, name, function if dist.get_rank() == rank else getattr(target, name)):
        yield


def left_behind(root: str) -> list[str]:
    dist.barrier()
    found = sorted(name for name in os.listdir(root) if name.endswith((".partial", ".previous")))
    dist.barrier()
    return found


@cases.at(1, 3)
def a_writer_that_raises_on_one_rank_raises_on_all(stage: int) -> None:
    root, run = folder(), Run(stage)
    place = f"{root}/last"
    run.save(place, 1)

    def late(*args: Any) -> None:
        """Fails when rank 0 has long written, with an error that does not survive a journey to another rank."""
        while not any(os.path.getsize(path) for path in glob.glob(f"{root}/.last.partial/*-0.distcp")):
            pass
        raise PartitionedParameterError("weight", 1, 2, "The value", "There is no cure.")

    with on_rank(1, storage, "_write_item", late), raises_on_all(1, "-1.distcp cannot be written", "no cure"):
        run.save(place, 2)
    assert left_behind(root) == []
    run.assert_loads(place, 1)
    run.save(place, 3)
    run.assert_loads(place, 3)

    run.become(4)
    with on_rank(1, storage, "_write_item", late):
        future = async_save_checkpoint(place, run.engine, run.optimizer)
        with raises_on_all(1, "-1.distcp cannot be written"):
            future.result()
    assert left_behind(root) == []
    run.assert_loads(place, 3)


class FillingUp(DirFileSystem):
    """A store that runs full in the middle of the files whose name ends in a certain way."""

    protocol = "filling"
    cachable = False
    root, ending = "", "nothing"

    def __init__(self, **options: Any) -> None:
        super().__init__(path=self.root, fs=LocalFileSystem())

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super().open(path, mode, **options)
        if "w" in mode and path.endswith(self.ending):
            return _FullFile(file)
        return file


class _FullFile:
    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> _FullFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, data: bytes) -> int:
        self.file.write(data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@cases.at(2)
def a_full_remote_store_is_an_error_that_names_the_file(stage: int) -> None:
    root, run = folder(), Run(stage)
    fsspec.register_implementation("filling", FillingUp, clobber=True)
    FillingUp.root, FillingUp.ending = root, "nothing"
    run.save("filling://place", 1)
    before = sorted(os.listdir(f"{root}/place"))
    dist.barrier()
    for rank, ending in (
        (0, "-0.distcp"),
        (1, "-1.distcp"),
        (0, "-index.json"),
        (0, "-extra.pt"),
        (0, "manifest.json"),
    ):
        FillingUp.ending = ending
        with raises_on_all(rank, ending, "cannot be written", "No space left on device"):
            run.save("filling://place", 2)
        dist.barrier()
        assert ending == "manifest.json" or sorted(os.listdir(f"{root}/place")) == before
    FillingUp.ending = "nothing"


@cases.at(3)
def a_directory_that_takes_no_files_is_an_error_on_all(stage: int) -> None:
    root, run = folder(), Run(stage)
    Path(f"{root}/file").touch()
    dist.barrier()
    with raises_on_all(0, "Not a directory"):
        run.save(f"{root}/file/below", 1)
    assert sorted(os.listdir(root)) == ["file"]
    run.save(f"{root}/place", 2)
    run.assert_loads(f"{root}/place", 2)


@cases.at(1, 3)
def what_is_cut_off_changed_or_missing_is_named_and_nothing_is_loaded(stage: int) -> None:
    root, run = folder(), Run(stage)
    run.save(f"{root}/good", 1)
    for number, harm in enumerate((_cut_off, _flip, os.unlink)):
        bad = f"{root}/bad{number}"
        run.save(bad, 2)
        if dist.get_rank() == 0:
            harm(glob.glob(f"{bad}/*-0.distcp")[0])
        dist.barrier()
        if dist.get_rank() == 0:
            with pytest.raises(CheckpointError, match=r"-0\.distcp' of the checkpoint"):
                verify_checkpoint(bad)
        run.become(5)
        with pytest.raises((CheckpointError, RuntimeError), match=r"-0\.distcp' of the checkpoint"):
            load_checkpoint(bad, run.engine, run.optimizer)
        run.assert_loads(f"{root}/good", 1)


def _cut_off(path: str) -> None:
    os.truncate(path, os.path.getsize(path) - 1)


def _flip(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 255]))


@cases.at(2)
def what_a_killed_save_left_is_no_checkpoint_and_the_next_one_removes_it(stage: int) -> None:
    root, run = folder(), Run(stage)
    run.save(f"{root}/place", 1)
    if dist.get_rank() == 0:
        os.mkdir(f"{root}/.place.partial")
        Path(f"{root}/.place.partial/0-0.distcp").touch()
    dist.barrier()
    run.assert_loads(f"{root}/place", 1)
    with pytest.raises((CheckpointError, RuntimeError), match="is no checkpoint"):
        load_checkpoint(f"{root}/.place.partial", run.engine)
    run.save(f"{root}/place", 2)
    assert left_behind(root) == []
    run.assert_loads(f"{root}/place", 2)


@cases.at(2)
def what_is_no_part_of_a_checkpoint_stays_where_it_was(stage: int) -> None:
    root, run = folder(), Run(stage)
    if dist.get_rank() == 0:
        os.makedirs(f"{root}/place/logs/deep")
        Path(f"{root}/place/logs/deep/events").write_text("mine")
        Path(f"{root}/place/notes").write_text("mine, too")
        os.symlink("notes", f"{root}/place/link")
        os.symlink("place", f"{root}/newest")
    dist.barrier()
    ways: list[Any] = [
        nullcontext(),
        mock.patch.object(storage, "_exchange", return_value=False),  # as elsewhere than on Linux
        mock.patch("os.link", side_effect=OSError(errno.EPERM, "no links")),  # as on some file systems
    ]
    for number, way in enumerate(ways):
        with way:
            run.save(f"{root}/{'newest' if number else 'place'}", number)
        dist.barrier()
        assert sorted(os.listdir(root)) == ["newest", "place"] and os.path.islink(f"{root}/newest")
        names = sorted(name for name in os.listdir(f"{root}/place") if not re.match("[0-9a-f]{8}-", name))
        assert names == [".metadata", "link", "logs", "manifest.json", "notes"]
        assert len(glob.glob(f"{root}/place/*.distcp")) == 2
        assert (
            Path(f"{root}/place/logs/deep/events").read_text() == "mine"
            and os.readlink(f"{root}/place/link") == "notes"
        )
        run.assert_loads(f"{root}/newest", number)
    dist.barrier()
    if dist.get_rank() == 0:
        storage.remove(f"{root}/newest")
        assert os.listdir(root) == ["place"] and verify_checkpoint(f"{root}/place")


@cases.parametrize()
def test_saves_that_fail(case: tuple[str, int], outcomes: Any) -> None:
    check(outcomes, case)
