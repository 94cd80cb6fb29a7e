"""Plain weights from a checkpoint of any format: one file, or several of a given size, a tensor at a time."""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, BinaryIO, overload

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from zero_core.errors import CheckpointError
from zero_core.storage import Folder, Progress, beside, flush, sync_directory
from zero_core.stored import SAFETENSORS_DTYPES, Stored, open_checkpoint

Path = str | os.PathLike[str]

_TORCH_SUFFIXES = (".pt", ".pth", ".bin")
_SUFFIXES = (".safetensors", *_TORCH_SUFFIXES)
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@overload
def consolidate(
    path: Path,
    out: None = None,
    *,
    model: str | None = None,
    optimizer: str | None = None,
    max_shard_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    trusted: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]: ...


@overload
def consolidate(
    path: Path,
    out: Path,
    *,
    model: str | None = None,
    optimizer: str | None = None,
    max_shard_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    trusted: bool = False,
    progress: Progress | None = None,
) -> list[str]: ...


def consolidate(
    path: Path,
    out: Path | None = None,
    *,
    model: str | None = None,
    optimizer: str | None = None,
    max_shard_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    trusted: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any] | list[str]:
    """A checkpoint's weights, or an optimizer's state, as plain files or a dict. One process; needs no process group.

    Reads every format that `load_checkpoint` does. One tensor at a time is in memory, and a file takes its name when it
    is complete: one of that name that was there before stays until then.

    What is written depends on the name. A `.safetensors` file has every tensor once; further names of tied tensors are in
    its metadata, as `safetensors.torch.save_model` puts them, so `safetensors.torch.load_model` and `from_pretrained` fill
    all of them. A directory gets that file as `model.safetensors`, or, with `max_shard_bytes`, several with the index that
    `from_pretrained` reads. A `.pt`, `.pth` or `.bin` file is the state dict with all names, for `torch.load`. It is put
    together on a local disk: for a remote place, in the temporary directory.

    Args:
        path: the checkpoint; local or an fsspec URL, like `out`.
        out: what to write; `None` returns the state dict, on the CPU, in which tied names share a tensor.
        model: its key, where the checkpoint has several.
        optimizer: the key of one whose state to write instead, as its `state_dict()` is in one process: a torch file, or
            the dict.
        max_shard_bytes: for a directory, the most that a file holds; a tensor that is larger has one for itself.
        dtype: what floating-point weights become; `None` leaves them as they are stored, which for mixed precision is
            the fp32 masters.
        trusted: open pickles that could run code; see `load_checkpoint`.
        progress: called with a tensor's name, bytes read so far and bytes in all.

    Returns:
        the state dict, or the files written.

    Raises:
        CheckpointError: it is damaged or has no weights, or `out` cannot be written; what was there before stays. Or an
            optimizer's state has no numbers in one process.
        ValueError: there are several models and `model` names none of them, or `out` is of no such kind.
    """
    target = None if out is None else os.fspath(out)
    if target is not None:
        _check_target(target, max_shard_bytes)
    stored = open_checkpoint(os.fspath(path), trusted=trusted)
    if optimizer is None:
        content: _Content = _Weights.of(stored, model, dtype, progress)
    else:
        content = _OptimizerState.of(stored, optimizer, progress)
    if target is None:
        return content.whole()
    place = Folder(target)
    try:
        with _appearing(place) as aside:
            files = _write(place, aside, content, max_shard_bytes)
        if not target.endswith(_SUFFIXES):
            _remove_older(place, files)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {type(error).__name__}: {error}") from error
    return files if place.is_local else [place.fs.unstrip_protocol(file) for file in files]


def _check_target(target: str, max_shard_bytes: int | None) -> None:
    if target.endswith(".ckpt"):
        raise ValueError(f"expected a .safetensors, .pt, .pth or .bin file or a directory, got {target}.")
    if max_shard_bytes is not None and target.endswith(_SUFFIXES):
        raise ValueError(f"max_shard_bytes makes several files, which need a directory as `out`, got {target}.")
    if max_shard_bytes is not None and max_shard_bytes <= 0:
        raise ValueError(f"expected max_shard_bytes above 0, got {max_shard_bytes}.")


# -- what is read ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Weight:
    """A tensor that is not read yet."""

    name: str
    place: str  # the reader's name for it
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class _Content:
    """What is to be written, and not read yet.

    Attributes:
        stored: the checkpoint.
        tensors: each tensor once.
        values: what is no tensor of the checkpoint's, as it comes with them.
        progress: told of every tensor that is read.
    """

    stored: Stored
    tensors: list[_Weight]
    values: Mapping[str, Any]
    progress: Progress | None
    _done: int = field(default=0, init=False)

    @cached_property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.tensors)

    def read(self, weight: _Weight) -> Tensor:
        tensor = self.stored.read([weight.place])[weight.place].to(weight.dtype)
        self._done += weight.nbytes
        if self.progress is not None:
            self.progress(weight.name, self._done, self.nbytes)
        return tensor

    def whole(self) -> dict[str, Any]:
        """All of it, read."""
        return self.together({weight.name: self.read(weight) for weight in self.tensors}, self.values)

    def together(self, tensors: dict[str, Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
        """What a plain file holds."""
        raise NotImplementedError


@dataclass
class _Weights(_Content):
    """One model of a checkpoint; `values` is what modules keep beside tensors, by name.

    Attributes:
        tied: further names, each with the one that is in `tensors`.
    """

    tied: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: Stored, model: str | None, dtype: torch.dtype | None, progress: Progress | None) -> _Weights:
        if not stored.models:
            raise CheckpointError(f"{stored.folder.name} holds no model.")
        if model is None and len(stored.models) > 1:
            raise ValueError(f"{stored.folder.name} has the models {sorted(stored.models)}: say which, with model=.")
        key = next(iter(stored.models)) if model is None else model
        if key not in stored.models:
            raise ValueError(f"{stored.folder.name} has no model '{key}'; it has {sorted(stored.models)}.")
        if not stored.models[key] and not stored.values.get(key):
            raise CheckpointError(
                f"{stored.folder.name} has no weights of '{key}': they were saved elsewhere, as beside a Trainer's "
                "optimizer."
            )
        tied, tensors = stored.tied(key), []
        for name, place in stored.models[key].items():
            if name not in tied:
                own = stored.entry(place).properties.dtype
                tensors.append(_weight(stored, name, place, dtype if own.is_floating_point else None))
        return cls(stored, tensors, stored.values.get(key, {}), progress, tied)

    def together(self, tensors: dict[str, Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
        return {**tensors, **{name: tensors[kept] for name, kept in self.tied.items()}, **values}


@dataclass
class _OptimizerState(_Content):
    """One optimizer of a checkpoint; `values` is its plain state without the tensors of parameters' shape.

    Attributes:
        places: number of the parameter and key in its state, by the tensor's name here.
    """

    places: dict[str, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: Stored, key: str, progress: Progress | None) -> _OptimizerState:
        if key not in stored.optimizers:
            has = sorted(stored.optimizers) or "none"
            raise ValueError(f"{stored.folder.name} has no optimizer '{key}'; it has {has}.")
        found = stored.optimizers[key]
        if found.param_groups is None:
            raise CheckpointError(
                f"{stored.folder.name} does not say in which groups the parameters of '{key}' were, and so not their "
                "numbers: load it in the run's own code with load_checkpoint(path, engine, optimizer)."
            )
        names = [str(name) for group in found.param_groups for name in group["params"]]
        numbers, first = {name: number for number, name in enumerate(names)}, 0
        groups: list[dict[str, Any]] = []
        for group in found.param_groups:
            last = first + len(group["params"])
            groups.append({**group, "params": list(range(first, last))})
            first = last
        state: dict[int, dict[str, Any]] = {}
        for name, entries in found.shared.items():
            for entry, runs in entries.items():
                if len(runs) > 1:
                    raise CheckpointError(
                        f"the state '{entry}' of '{name}' has one value for each slice of the run that saved it: it fits "
                        "that number of ranks only."
                    )
                state.setdefault(numbers[name], {})[entry] = runs[0][2]
        tensors, places = [], {}
        for name, parts in found.tensors.items():
            for entry, place in parts.items():
                tensors.append(_weight(stored, f"{name}.{entry}", place))
                places[f"{name}.{entry}"] = numbers[name], entry
        return cls(stored, tensors, {"state": state, "param_groups": groups}, progress, places)

    def together(self, tensors: dict[str, Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
        state = {number: dict(entries) for number, entries in values["state"].items()}
        for name, tensor in tensors.items():
            number, entry = self.places[name]
            state.setdefault(number, {})[entry] = tensor
        return {"state": dict(sorted(state.items())), "param_groups": values["param_groups"]}


def _weight(stored: Stored, name: str, place: str, dtype: torch.dtype | None = None) -> _Weight:
    entry = stored.entry(place)
    return _Weight(name, place, tuple(entry.size), entry.properties.dtype if dtype is None else dtype)


# -- what is written -------------------------------------------------------------------------------------------------


@contextmanager
def _appearing(place: Folder) -> Iterator[Callable[[str], str]]:
    """Says where to write files that take their names together, when all are complete."""
    if not place.is_local:
        with place.fs.transaction:
            yield lambda path: path
        return
    asides: dict[str, str] = {}
    try:
        yield lambda path: asides.setdefault(path, beside(path, "partial"))
        for path, aside in asides.items():
            os.replace(aside, path)
    except BaseException:
        for aside in asides.values():
            if os.path.exists(aside):
                os.unlink(aside)
        raise
    for folder in {os.path.dirname(path) for path in asides}:
        sync_directory(folder)


Aside = Callable[[str], str]


def _write(place: Folder, aside: Aside, weights: _Content, limit: int | None) -> list[str]:
    if place.path.endswith(_TORCH_SUFFIXES):
        return [_write_torch(place, aside, weights)]
    if not isinstance(weights, _Weights):
        raise ValueError(f"expected a .pt, .pth or .bin file for an optimizer's state, got {place.name}.")
    if place.path.endswith(".safetensors"):
        return [_write_safetensors(place, aside, place.path, weights, weights.tensors)]
    return _write_directory(place, aside, weights, limit)


def _write_directory(place: Folder, aside: Aside, weights: _Weights, limit: int | None) -> list[str]:
    """The layout of Hugging Face."""
    place.fs.makedirs(place.path, exist_ok=True)
    shards = _shards(weights.tensors, limit)
    if len(shards) == 1:
        return [_write_safetensors(place, aside, place / "model.safetensors", weights, shards[0])]
    files, of = [], dict[str, str]()
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files.append(_write_safetensors(place, aside, place / name, weights, shard))
        of.update({weight.name: name for weight in shard})
    index = {"metadata": {"total_size": weights.nbytes}, "weight_map": of}
    path = place / _INDEX
    with place.fs.open(aside(path), "wb") as file:
        file.write(json.dumps(index, indent=2, sort_keys=True).encode())
        flush(file)
    # The older index goes first and the new one comes last: files of two exports are never taken for one.
    if place.exists(_INDEX):
        place.fs.rm(path)
    return [*files, path]


def _shards(weights: list[_Weight], limit: int | None) -> list[list[_Weight]]:
    shards: list[list[_Weight]] = [[]]
    room = limit
    for weight in weights:
        if limit is not None and room is not None:
            if shards[-1] and weight.nbytes > room:
                shards.append([])
                room = limit
            room -= weight.nbytes
        shards[-1].append(weight)
    return shards


def _remove_older(place: Folder, files: list[str]) -> None:
    """Removes the weights of an export before this one, which `from_pretrained` could take for it."""
    for name in place.names():
        if (_SHARD.fullmatch(name) or name == _INDEX) and place / name not in files:
            place.fs.rm(place / name)


def _write_safetensors(place: Folder, aside: Aside, path: str, weights: _Weights, tensors: list[_Weight]) -> str:
    """Eight bytes of length, a header, and the tensors: safetensors' own writer needs all of them in memory."""
    names = {weight.name for weight in tensors}
    tied = {name: kept for name, kept in weights.tied.items() if kept in names}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **tied}}
    ordered = sorted(tensors, key=lambda weight: (-weight.dtype.itemsize, weight.name))  # each starts aligned
    at = 0
    for weight in ordered:
        if weight.dtype not in _DTYPE_NAMES:
            raise ValueError(f"safetensors has no {weight.dtype}, which '{weight.name}' is of: write a .pt file.")
        span = [at, at := at + weight.nbytes]
        header[weight.name] = {"dtype": _DTYPE_NAMES[weight.dtype], "shape": weight.shape, "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    _make_directory_of(place, path)
    with place.fs.open(aside(path), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for weight in ordered:
            file.write(_content(weights.read(weight)))
        flush(file)
    return path


def _write_torch(place: Folder, aside: Aside, weights: _Content) -> str:
    path: str = place.path
    _make_directory_of(place, path)
    if place.is_local:
        _fill_torch(aside(path), weights)
        return path
    with tempfile.TemporaryDirectory() as folder:
        local = os.path.join(folder, os.path.basename(path))
        _fill_torch(local, weights)
        place.fs.put_file(local, aside(path))
    return path


def _fill_torch(path: str, weights: _Content) -> None:
    """torch.save without the tensors' content, then the content, each tensor's in its place."""
    reads: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def stand_in(like: _Weight | Tensor, read: Callable[[], Tensor]) -> Tensor:
        with FakeTensorMode():
            reads.append((torch.empty(tuple(like.shape), dtype=like.dtype), read))
        return reads[-1][0]

    tensors = {weight.name: stand_in(weight, partial(weights.read, weight)) for weight in weights.tensors}
    values = pytree.tree_map_only(Tensor, lambda tensor: stand_in(tensor, lambda: tensor), dict(weights.values))
    tree = weights.together(tensors, values)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(tree, path)
    with FakeTensorMode():
        placed = torch.load(path, weights_only=True)
    pairs = zip(pytree.tree_leaves(tree), pytree.tree_leaves(placed), strict=True)
    at = {id(a): b.untyped_storage()._checkpoint_offset for a, b in pairs if isinstance(a, Tensor)}
    checksums: dict[int, int] = {}
    with open(path, "r+b") as file:
        for fake, read in reads:
            checksums[at[id(fake)]] = _write_at(file, at[id(fake)], _content(read()))
    _set_checksums(path, [checksums[offset] for offset in sorted(checksums)])


def _set_checksums(path: str, checksums: list[int]) -> None:
    """Puts them into the archive's directory, for readers other than torch's, which does not look at them."""
    with zipfile.ZipFile(path, "a") as archive:
        records = [info for info in archive.infolist() if "/data/" in info.filename]
        for info, checksum in zip(sorted(records, key=lambda r: r.header_offset), checksums, strict=True):
            info.CRC = checksum
        archive.comment = b""  # makes it write the directory again
    with open(path, "r+b") as file:
        flush(file)


def _make_directory_of(place: Folder, path: str) -> None:
    place.fs.makedirs(path.rpartition("/")[0], exist_ok=True)


def _content(tensor: Tensor) -> memoryview:
    """A tensor's elements as they lie in memory, without a copy."""
    tensor = tensor.contiguous()
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # which lives as long as the view does
    return memoryview(memory).cast("B")


def _write_at(file: BinaryIO, offset: int, content: memoryview) -> int:
    """Writes and returns the checksum."""
    file.seek(offset)
    file.write(content)
    return zlib.crc32(content)


_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
