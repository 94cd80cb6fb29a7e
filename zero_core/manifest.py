"""The manifest: the small file that makes a directory a checkpoint, and the index of what is where in it."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zero_core.errors import CheckpointError

FORMAT = "zero-redundancy checkpoint"
VERSION = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        size: bytes.
        crc32: checksum of its content.
    """

    size: int
    crc32: int


@dataclass
class Place(_StorageInfo):
    """Where a chunk lies.

    Attributes:
        crc32: checksum of the file up to the chunk, and up to its end: one pass yields the file's and all chunks'.
        shape: of a chunk that is plain numbers.
        stride: in which these follow each other; `None` for a chunk that is something else.
    """

    crc32: tuple[int, int] | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] | None = None

    def to_torch(self) -> _StorageInfo:
        """The same without what torch does not know."""
        return _StorageInfo(self.relative_path, self.offset, self.length)


@dataclass(frozen=True)
class ModelRecord:
    """One model of a checkpoint.

    Attributes:
        stage: 1, 2 or 3.
        precision: the policy's name or description; `None` without one.
        tied: further names of tensors, each with the one it is kept under.
    """

    stage: int
    precision: str | None
    tied: Mapping[str, str]


@dataclass(frozen=True)
class OptimizerRecord:
    """One optimizer of a checkpoint.

    Attributes:
        kind: its class.
        model: the key of its model.
    """

    kind: str
    model: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        world_size: ranks of the run that saved it.
        models: by key.
        optimizers: by key.
        files: by name, all but the manifest itself and torch's own index.
        index: the file that says where each tensor is.
        extra: the file with everything that is not a tensor of a model or an optimizer.
        written_by: versions.
        version: of the format.
    """

    world_size: int
    models: Mapping[str, ModelRecord]
    optimizers: Mapping[str, OptimizerRecord]
    files: Mapping[str, FileRecord]
    index: str
    extra: str
    written_by: Mapping[str, str] = field(default_factory=dict)
    version: int = VERSION

    def to_json(self) -> str:
        """The manifest's file."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        return json.dumps({**content, "crc32": _checksum(content)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Manifest:
        """Reads a manifest's file.

        Raises:
            CheckpointError: it is none, changed, or of a newer format.
        """
        try:
            given: dict[str, Any] = json.loads(text)
            if given["format"] != FORMAT:
                raise KeyError("format")
            version = int(given["version"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where} is damaged: it is not the manifest of a checkpoint.") from error
        if version > VERSION:
            raise CheckpointError(
                f"{where} has format version {version}, and this zero-redundancy reads up to {VERSION}: update it."
            )
        if given.pop("crc32", None) != _checksum(given):
            raise CheckpointError(f"{where} is damaged: its checksum does not match.")
        try:
            return cls(
                world_size=given["world_size"],
                models={key: ModelRecord(**value) for key, value in given["models"].items()},
                optimizers={key: OptimizerRecord(**value) for key, value in given["optimizers"].items()},
                files={key: FileRecord(**value) for key, value in given["files"].items()},
                index=given["index"],
                extra=given["extra"],
                written_by=given["written_by"],
                version=version,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where} is damaged: {error}.") from error


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def index_to_json(metadata: Metadata) -> str:
    """DCP's metadata, which torch itself keeps as a pickle, as JSON."""
    places = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}

    def place(fqn: str, offsets: torch.Size | None) -> list[Any]:
        info = places[fqn, offsets]
        return [info.relative_path, info.offset, info.length, info.crc32, info.stride]

    tensors, values = {}, {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors[fqn] = {
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "shape": list(entry.size),
                "chunks": [[list(c.offsets), list(c.sizes), *place(fqn, c.offsets)] for c in entry.chunks],
            }
        else:
            values[fqn] = place(fqn, None)
    return json.dumps({"tensors": tensors, "values": values})


def index_from_json(text: str | bytes) -> Metadata:
    """The reverse of `index_to_json`."""
    given = json.loads(text)
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for fqn, tensor in given["tensors"].items():
        chunks = []
        for offsets, sizes, *place in tensor["chunks"]:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[MetadataIndex(fqn, torch.Size(offsets))] = _place(sizes, *place)
        properties = TensorProperties(dtype=getattr(torch, tensor["dtype"]))
        entries[fqn] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
    for fqn, place in given["values"].items():
        entries[fqn] = BytesStorageMetadata()
        places[MetadataIndex(fqn)] = _place([], *place)
    return Metadata(entries, storage_data=places)


def _place(
    shape: list[int], file: str, offset: int, length: int, crc32: list[int], stride: list[int] | None = None
) -> Place:
    strides = None if stride is None else tuple(stride)
    return Place(file, offset, length, crc32=(crc32[0], crc32[1]), shape=tuple(shape), stride=strides)
