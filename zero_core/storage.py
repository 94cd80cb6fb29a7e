"""Where checkpoints lie: a local or remote directory that appears whole or not at all; DCP's reading and writing in it."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import io
import math
import os
import pickle
import re
import shutil
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future as Background
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization_config

from zero_core.errors import CheckpointError
from zero_core.layout import dense_stride
from zero_core.manifest import NAME, FileRecord, Manifest, Place, index_from_json

# Told on long work: what was read last, bytes read so far, bytes in all.
Progress = Callable[[str, int, int], None]

_BLOCK_BYTES = 4 * 2**20
_FLUSH_BYTES = 32 * 2**20
_TORCH_INDEX = ".metadata"
_EXTRA = re.compile("[0-9a-f]{8}-extra.pt")
_OWN = re.compile(rf"[0-9a-f]{{8}}-(extra\.pt|index\.json|\d+\.distcp)|{re.escape(NAME)}|{re.escape(_TORCH_INDEX)}")


class Folder:
    """A directory, local or anything fsspec knows ("s3://...", "memory://...").

    Args:
        path: the directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.fs, self.path = fsspec.core.url_to_fs(os.fspath(path))
        self.path = self.path.rstrip("/")
        self.name = os.fspath(path)
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def __truediv__(self, name: str) -> str:
        return f"{self.path}/{name}"

    def exists(self, name: str = "") -> bool:
        """Whether the directory, or a file in it, is there."""
        return bool(self.fs.exists(self / name if name else self.path))

    def open(self, name: str) -> BinaryIO:
        """Opens a file for reading.

        Raises:
            CheckpointError: it is missing.
        """
        try:
            return cast(BinaryIO, self.fs.open(self / name, "rb"))
        except FileNotFoundError as error:
            raise CheckpointError(f"'{name}' of the checkpoint {self.name} is missing.") from error

    def read(self, name: str) -> bytes:
        """A whole small file."""
        with self.open(name) as file:
            return file.read()

    @contextmanager
    def writing(self, name: str) -> Iterator[FileWriter]:
        """Opens a file for writing; at the end of the context it is on the disk.

        Raises:
            CheckpointError: it cannot be written; says which, and why.
        """
        try:
            with self.fs.open(self / name, "wb") as file, FileWriter(file, self.is_local) as writer:
                yield writer
        except Exception as error:
            raise CheckpointError(f"{self / name} cannot be written: {type(error).__name__}: {error}") from error

    def write(self, name: str, data: bytes) -> FileRecord:
        """Writes a whole small file, to stay."""
        with self.writing(name) as file:
            file.write(data)
        return file.record

    def read_part(self, file: BinaryIO, place: _StorageInfo, what: str) -> bytes:
        """What lies at a place in a file that is open.

        Args:
            file: the file.
            place: where in it.
            what: the name of what lies there.

        Raises:
            CheckpointError: it cannot be read, or is not what was written; names the file and what lies there.
        """
        try:
            file.seek(place.offset)
            data = file.read(place.length)
        except Exception as error:
            raise self.damaged(place.relative_path, what, str(error)) from error
        if isinstance(place, Place) and place.crc32 and zlib.crc32(data, place.crc32[0]) != place.crc32[1]:
            raise self.damaged(place.relative_path, what, "its checksum does not match")
        return data

    def damaged(self, name: str, what: str, why: str) -> CheckpointError:
        """The error for a part of a file that cannot be used."""
        return CheckpointError(f"'{what}' in '{name}' of the checkpoint {self.name} is damaged: {why}.")

    def own_names(self) -> set[str]:
        """The files in it that are a checkpoint's of ours, as far as a damaged one still says."""
        own = {name for name in self.names() if _OWN.fullmatch(name)}
        with suppress(CheckpointError):
            manifest = self.manifest()
            own |= set() if manifest is None else manifest.files.keys()
        return own

    def add_to_manifest(self, names: Iterable[str]) -> None:
        """Makes files that lie in it as well part of the checkpoint. One process.

        Raises:
            CheckpointError: one of them is missing, or the checkpoint damaged.
        """
        manifest = self.manifest()
        if manifest is None:
            raise CheckpointError(f"{self.name} is no checkpoint of zero-redundancy: it has no manifest.")
        files = {**manifest.files, **{name: self.record(name) for name in names}}
        self.write(NAME, dataclasses.replace(manifest, files=files).to_json().encode())

    def names(self) -> list[str]:
        """The files in it."""
        return [str(path).rsplit("/", 1)[-1] for path in self.fs.ls(self.path, detail=False)]

    def record(self, name: str, progress: Callable[[int], None] | None = None) -> FileRecord:
        """Size and checksum of a file as it is now; reads all of it, and tells `progress` how much it has read."""
        size, crc = 0, 0
        with self.open(name) as file:
            while block := file.read(_BLOCK_BYTES):
                size, crc = size + len(block), zlib.crc32(block, crc)
                if progress is not None:
                    progress(size)
        return FileRecord(size, crc)

    def check(
        self, name: str, expected: FileRecord, content: bool = True, progress: Callable[[int], None] | None = None
    ) -> None:
        """Compares a file with what the manifest says.

        Args:
            name: the file.
            expected: what the manifest says.
            content: whether to read it; if not, its size is compared.
            progress: told how many bytes of it are read.

        Raises:
            CheckpointError: it is missing, truncated or changed; names it.
        """
        if not self.exists(name):
            raise CheckpointError(f"'{name}' of the checkpoint {self.name} is missing.")
        size = int(self.fs.size(self / name))
        if size != expected.size:
            raise CheckpointError(
                f"'{name}' of the checkpoint {self.name} has {size} bytes instead of {expected.size}: it was cut off or "
                "replaced."
            )
        if content and self.record(name, progress) != expected:
            raise CheckpointError(f"'{name}' of the checkpoint {self.name} is damaged: its checksum does not match.")

    def manifest(self) -> Manifest | None:
        """The manifest; `None` where there is none.

        Raises:
            CheckpointError: it is damaged, or all the rest of a checkpoint of ours is there.
        """
        if self.exists(NAME):
            return Manifest.from_json(self.read(NAME), self / NAME)
        # Torch's own index may be there, too.
        if self.exists() and any(_EXTRA.fullmatch(name) for name in self.names()):
            raise CheckpointError(f"'{NAME}' of the checkpoint {self.name} is missing: its save was interrupted.")
        return None


class FileWriter:
    """A file that is being written, with its size and checksum; a context, after which it is on the disk.

    The disk works while more is written. An error is kept until it is asked for: raised while torch writes an archive, it
    would be hidden by the archive's own.

    Args:
        file: where to.
        is_local: whether it can be flushed.
    """

    def __init__(self, file: BinaryIO, is_local: bool) -> None:
        self.size = 0
        self.crc32 = 0
        self._file = file
        self._error: Exception | None = None
        self._flushes = ThreadPoolExecutor(1, "zero-checkpoint-flush") if is_local else None
        self._flushed: list[Background[None]] = []

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._flushes is not None:
            self._flushes.shutdown()
        if error is None:
            self.raise_if_failed()
            for flushed in self._flushed:
                flushed.result()
            flush(self._file)

    @property
    def record(self) -> FileRecord:
        """Size and checksum so far."""
        return FileRecord(self.size, self.crc32)

    def write(self, data: bytes | memoryview) -> int:
        """Appends; after an error nothing is written any more."""
        if self._error is None:
            try:
                self._file.write(data)
            except Exception as error:
                self._error = error
            self.crc32 = zlib.crc32(data, self.crc32)
            self.size += len(data)
            if self._flushes is not None and self.size >= (len(self._flushed) + 1) * _FLUSH_BYTES:
                self._flushed.append(self._flushes.submit(flush, self._file))
        return len(data)

    def flush(self) -> None:
        """Does nothing: torch asks for it after each archive, but only the whole file matters."""

    def raise_if_failed(self) -> None:
        """Raises the error of a `write` before."""
        if self._error is not None:
            raise self._error


class Staging:
    """A checkpoint on its way: a directory aside that takes its place when it is complete.

    On a local file system the place is taken by one rename, which replaces a checkpoint that is there already; until then
    that one is untouched. A remote store has no such rename: there the files get names of their own in the same
    directory, and the manifest, written last, is what makes them the checkpoint.

    Args:
        target: the place.
        save_id: what makes this save's file names its own.
    """

    def __init__(self, target: Folder, save_id: str) -> None:
        self.target = Folder(where_it_is(target.path)) if target.is_local else target
        self.save_id = save_id
        self.folder = Folder(beside(self.target.path, "partial")) if target.is_local else target

    def prepare(self) -> None:
        """Makes the directory. One rank."""
        if self.target.is_local:
            recover(self.target)
            shutil.rmtree(self.folder.path, ignore_errors=True)
        self.folder.fs.makedirs(self.folder.path, exist_ok=True)

    def publish(self, manifest: Manifest) -> None:
        """Makes it the checkpoint. One rank, when all have written."""
        self.folder.write(NAME, manifest.to_json().encode())
        if not self.target.is_local:
            self._remove_older(manifest)
            return
        sync_directory(self.folder.path)
        replace(self.folder.path, self.target.path)
        sync_directory(os.path.dirname(self.target.path))

    def discard(self) -> None:
        """Removes what a save that failed has written, as far as it can. One rank."""
        if self.target.is_local:
            shutil.rmtree(self.folder.path, ignore_errors=True)
            return
        with suppress(Exception):  # the error of the save matters more
            for name in self.folder.names():
                if name.startswith(self.save_id):
                    self.folder.fs.rm(self.folder / name)

    def _remove_older(self, manifest: Manifest) -> None:
        for name in self.folder.names():
            if name not in manifest.files and name not in (NAME, _TORCH_INDEX):
                self.folder.fs.rm(self.folder / name)


def recover(target: Folder) -> None:
    """Puts a checkpoint back whose replacement was interrupted, where one rename did not do (see `replace`)."""
    previous = beside(target.path, "previous")
    if target.is_local and os.path.exists(previous):
        if os.path.exists(target.path):
            _delete(previous)
        else:
            with suppress(FileNotFoundError):  # another rank was faster
                os.rename(previous, target.path)


def remove(path: str | os.PathLike[str]) -> None:
    """Removes a checkpoint, a directory or a file, that is not needed any more. One process.

    Others see all of it or nothing: where a removal is interrupted, what is left is not taken for a checkpoint, nor for the
    newest one because its time has changed.
    """
    folder = Folder(path)
    if not folder.is_local:
        if folder.exists(NAME):
            folder.fs.rm(folder / NAME)
        folder.fs.rm(folder.path, recursive=True)
    elif os.path.isdir(folder.path) and not os.path.islink(folder.path):
        aside = beside(folder.path, "partial")
        _delete(aside)
        os.rename(folder.path, aside)
        _delete(aside)
    else:
        os.unlink(folder.path)


def where_it_is(path: str) -> str:
    """A local path without links: what a link leads to is replaced, and the link stays."""
    return os.path.realpath(path) if os.path.islink(path) else path


def beside(path: str, what: str) -> str:
    """Where something on its way to a local path is kept meanwhile."""
    # A leading dot and another ending: no pattern for checkpoints' names matches it.
    return f"{os.path.dirname(path)}/.{os.path.basename(path)}.{what}"


def replace(source: str, target: str) -> None:
    """Renames a local file or directory to a name that may be another's, which then is removed. One process.

    Of a directory that is replaced, what a checkpoint did not bring along (logs, a user's notes) stays where it was.
    """
    directories = os.path.isdir(source) and os.path.isdir(target)
    if directories:
        _carry_over(target, source)
    if not os.path.isdir(source) and not os.path.isdir(target):
        os.replace(source, target)
    elif os.path.exists(target):
        replaced = source
        if not _exchange(source, target):
            replaced = beside(target, "previous")
            os.rename(target, replaced)
            os.rename(source, target)
        if directories:
            _carry_over(replaced, target)  # what came meanwhile
        _delete(replaced)
    else:
        os.rename(source, target)


def _carry_over(old: str, new: str) -> None:
    own = Folder(old).own_names()
    for entry in os.scandir(old):
        there = os.path.join(new, entry.name)
        if entry.name in own or os.path.lexists(there):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.copytree(entry.path, there, symlinks=True, copy_function=_link)
        else:
            _link(entry.path, there)


def _link(source: str, target: str) -> None:
    """The same file under a second name: whichever directory an interruption leaves, it is in it."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _delete(path: str) -> None:
    """Removes a local file or directory, as far as it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _exchange(a: str, b: str) -> bool:
    """Swaps two files or directories in one step, where the system can (Linux, most local file systems)."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_cwd, exchange = -100, 2
    if renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), a)


def flush(file: Any) -> None:
    """Makes what was written survive a power cut, where the file is local."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except (AttributeError, OSError, io.UnsupportedOperation) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL, errno.ENOTSUP):
            raise


def flush_tree(path: str) -> None:
    """Makes a local directory with all that is in it survive a power cut."""
    for folder, _, names in os.walk(path):
        for name in names:
            if os.path.isfile(own := os.path.join(folder, name)):
                with open(own, "rb") as file:
                    flush(file)
        sync_directory(folder)


def sync_directory(path: str) -> None:
    """Makes a directory's entries survive a power cut."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Writer(StorageWriter):
    """Writes a rank's items into one file, in the format of torch's own `FileSystemWriter`.

    Its own, because there what fails while writing (a full disk) is hidden by an error of the archive's, and no checksum
    is taken.

    Args:
        folder: where to.
        save_id: first part of the file's name.
        tied: further names for tensors, each with the one it is kept under.
    """

    def __init__(self, folder: Folder, save_id: str, tied: dict[str, str]) -> None:
        self.folder = folder
        self.save_id = save_id
        self._tied = tied
        self.records: dict[str, FileRecord] = {}
        self._index: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: `Staging` has made the directory."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, with the file's name for each rank."""
        for rank, plan in enumerate(plans):
            object.__setattr__(plan, "storage_data", f"{self.save_id}-{rank}.distcp")
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file.

        Raises:
            CheckpointError: the file cannot be written; says which, and why.
        """
        results: list[WriteResult] = []
        if plan.items:
            name = str(plan.storage_data)
            with self.folder.writing(name) as file:
                for item in plan.items:
                    offset, before = file.size, file.crc32
                    stride = _write_item(file, planner.resolve_data(item))
                    place = Place(name, offset, file.size - offset, crc32=(before, file.crc32), stride=stride)
                    results.append(WriteResult(item.index, place.length, place))
            self.records[name] = file.record
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Keeps the index."""
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        for name, kept in self._tied.items():
            metadata.state_dict_metadata[name] = metadata.state_dict_metadata[kept]
            if metadata.planner_data is not None:
                metadata.planner_data[name] = (*metadata.planner_data[kept][:-1], name.partition(".")[2])
            for index, place in list(metadata.storage_data.items()):
                if index.fqn == kept:
                    metadata.storage_data[type(index)(name, index.offset, index.index)] = place
        metadata.version = "1.0.0"
        self._index = metadata

    @property
    def index(self) -> Metadata:
        """What is where. On the rank that coordinates the save, when all have written."""
        if self._index is None:
            raise AssertionError("torch calls finish on rank 0")
        return self._index

    def write_torch_index(self) -> None:
        """Writes the index once more as `torch.distributed.checkpoint.load` wants it."""
        places = {key: place.to_torch() for key, place in self.index.storage_data.items()}
        self.folder.write(_TORCH_INDEX, pickle.dumps(dataclasses.replace(self.index, storage_data=places)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any will do."""
        return True


def _write_item(file: FileWriter, data: Tensor | io.BytesIO) -> tuple[int, ...] | None:
    """Writes what torch's reader reads; returns the stride of plain numbers."""
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
        return None
    tensor = _on_its_own(data.detach().cpu().resolve_conj().resolve_neg())
    # torch's reader does not look at the archive's own checksum; the index has one that ours looks at.
    settings: Any = serialization_config
    with settings.patch({"save.compute_crc32": False}):
        torch.save(tensor, cast(BinaryIO, file))
    file.raise_if_failed()
    return tensor.stride() if type(tensor) is Tensor else None


def _on_its_own(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own: torch.save would write all that a view is a view of."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if tensor.stride() != dense_stride(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)
    start = tensor.storage_offset() * tensor.element_size()
    part = tensor.untyped_storage()[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(part, 0, tensor.shape, tensor.stride())


class IndexedReader(StorageReader):
    """A reader that knows what is where.

    Args:
        index: shapes, dtypes and chunks.
    """

    def __init__(self, index: Metadata) -> None:
        self.index = index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        return self.index

    def places(self) -> dict[str, Hashable]:
        """By name, what is equal for two names of one tensor."""
        return {name: name for name in self.index.state_dict_metadata}

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any will do."""
        return True


class Reader(IndexedReader):
    """Reads what `Writer` or torch's `FileSystemWriter` wrote, without opening a pickle that could run code.

    Args:
        folder: where from.
        index: what is where in it.
    """

    def __init__(self, folder: Folder, index: Metadata) -> None:
        super().__init__(index)
        self.folder = folder

    def places(self) -> dict[str, Hashable]:
        """By name, the parts of files that hold it."""
        found: dict[str, set[Hashable]] = defaultdict(set)
        for index, place in self.index.storage_data.items():
            found[index.fqn].add((index.offset, place.relative_path, place.offset))
        return {name: frozenset(parts) for name, parts in found.items()}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the chunks that the plan names, each once; one at a time is in memory."""
        files: dict[str, dict[Any, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            files[self._place(item).relative_path][item.storage_index].append(item)
        for name, chunks in files.items():
            with self.folder.open(name) as file:
                for items in sorted(chunks.values(), key=lambda items: self._place(items[0]).offset):
                    self._read_chunk(file, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: ReadItem) -> Any:
        return self.index.storage_data[item.storage_index]

    def _read_chunk(self, file: BinaryIO, items: list[ReadItem], planner: LoadPlanner) -> None:
        place, name = self._place(items[0]), items[0].storage_index.fqn
        data = self.folder.read_part(file, place, name)
        if items[0].type is LoadItemType.BYTE_IO:
            planner.load_bytes(items[0], io.BytesIO(data))
            return
        try:
            if isinstance(place, Place) and place.stride is not None:
                chunk = _numbers(data, place, cast(Any, self.index.state_dict_metadata[name]).properties.dtype)
            else:
                chunk = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise self.folder.damaged(place.relative_path, name, str(error)) from error
        for item in items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrow_tensor_by_index(chunk, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)


def _numbers(data: bytes, place: Place, dtype: torch.dtype) -> Tensor:
    """A tensor over the bytes of the archive that torch.save made of it: without a copy, and without its pickle."""
    count = math.prod(place.shape) * dtype.itemsize
    if count == 0 or place.stride is None:
        return torch.empty(place.shape, dtype=dtype)
    archive: Any = torch._C.PyTorchFileReader(io.BytesIO(data))
    start = archive.get_record_offset("data/0")
    with warnings.catch_warnings(action="ignore"):  # that they cannot be written to
        numbers = torch.frombuffer(data, dtype=torch.uint8, count=count, offset=start)
    return numbers.view(dtype).as_strided(place.shape, place.stride)


def read_index(folder: Folder, below: str = "") -> Metadata:
    """What is where in a directory: by our own index, or by torch's, of which only torch's index classes are let in."""
    manifest = folder.manifest() if not below else None
    if manifest is not None:
        return index_from_json(folder.read(manifest.index))
    data = folder.read(f"{below}{_TORCH_INDEX}")
    try:
        metadata = _IndexUnpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise CheckpointError(f"'{below}{_TORCH_INDEX}' of {folder.name} cannot be read: {error}") from error
    for place in metadata.storage_data.values():
        place.relative_path = f"{below}{place.relative_path}"
    return cast(Metadata, metadata)


def has_torch_index(folder: Folder, below: str = "") -> bool:
    """Whether a directory (or one in it, `below` ending with a slash) is one of `torch.distributed.checkpoint`."""
    return folder.exists(f"{below}{_TORCH_INDEX}")


class _IndexUnpickler(pickle.Unpickler):
    """Reads torch's index and nothing else: a pickle may name any function, and this one calls none but these."""

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _NAMES = frozenset(
        {
            ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
            ("builtins", "set"), ("pathlib", "Path"), ("pathlib", "PosixPath"),
        }
    )  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        """Looks a class up, if it is one of an index."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.memory_format))
        if (module, name) in self._NAMES or is_dtype:
            return super().find_class(module, name)
        found = super().find_class(module, name) if module in self._MODULES and "." not in name else None
        if isinstance(found, type) and found.__module__ == module:
            return found
        raise CheckpointError(f"it names {module}.{name}, which an index has no use for, and is not opened")
