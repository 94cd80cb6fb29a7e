"""What a checkpoint of any format holds, in plain values."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from zero_core import deepspeed
from zero_core.checkpoint import Path
from zero_core.storage import Folder, Reader
from zero_core.stored import Stored, StoredOptimizer, open_checkpoint


def inspect(path: Path, *, tensors: bool = False, trusted: bool = False) -> dict[str, Any]:
    """What a checkpoint holds; reads its small files only. One process; needs no process group.

    Args:
        path: the checkpoint; local or an fsspec URL.
        tensors: list every tensor.
        trusted: open pickles that could run code; see `load_checkpoint`.

    Returns:
        numbers, text, lists and dicts. Sizes are bytes; `elements` counts each tensor once, however many names it has.

    Raises:
        CheckpointError: nothing is there, or nothing that can be read.
    """
    stored = open_checkpoint(os.fspath(path), trusted=trusted)
    manifest, files = stored.manifest, _files(stored.folder)
    found = {
        "path": os.fspath(path),
        "format": _format(stored),
        "version": manifest and manifest.version,
        "world_size": manifest and manifest.world_size,
        "written_by": dict(manifest.written_by) if manifest else {},
        "models": {key: _model(stored, key) for key in stored.models},
        "optimizers": {key: _optimizer(stored, key, optimizer) for key, optimizer in stored.optimizers.items()},
        "extra": {key: type(value).__name__ for key, value in stored.extra.items()},
        "random_states": len(stored.rng),
        "files": files,
        "bytes": sum(files.values()),
    }
    return {**found, "tensors": _tensors(stored)} if tensors else found


def _format(stored: Stored) -> str:
    if stored.manifest is not None:
        return "zero-redundancy"
    if isinstance(stored.reader, Reader):
        return "torch.distributed.checkpoint"
    if stored.folder.fs.isdir(stored.folder.path):
        return "Hugging Face" if deepspeed.find(stored.folder) is None else "DeepSpeed"
    return "safetensors" if stored.folder.path.endswith(".safetensors") else "torch"


def _files(folder: Folder) -> dict[str, int]:
    if not folder.fs.isdir(folder.path):
        return {folder.path.rpartition("/")[2]: int(folder.fs.size(folder.path))}
    found = folder.fs.find(folder.path, detail=True)
    return {name.removeprefix(f"{folder.path}/"): int(facts["size"]) for name, facts in sorted(found.items())}


def _model(stored: Stored, key: str) -> dict[str, Any]:
    tied = stored.tied(key)
    record = stored.manifest.models[key] if stored.manifest else None
    return {
        "stage": record and record.stage,
        "precision": record and record.precision,
        **_sizes(stored, [place for name, place in stored.models[key].items() if name not in tied]),
        "tied": tied,
    }


def _optimizer(stored: Stored, key: str, found: StoredOptimizer) -> dict[str, Any]:
    record = stored.manifest.optimizers[key] if stored.manifest else None
    return {
        "class": record and record.kind,
        "model": record and record.model,
        "groups": None if found.param_groups is None else len(found.param_groups),
        "parameters": len({*found.tensors, *found.shared}),
        "state": sorted(
            {key for kept in (found.tensors, found.shared) for entries in kept.values() for key in entries}
        ),
        **_sizes(stored, [place for entries in found.tensors.values() for place in entries.values()]),
    }


def _sizes(stored: Stored, places: Iterable[str]) -> dict[str, Any]:
    by_dtype: dict[str, dict[str, int]] = {}
    for place in places:
        entry = stored.entry(place)
        row = by_dtype.setdefault(_dtype(entry), {"tensors": 0, "elements": 0, "bytes": 0})
        row["tensors"] += 1
        row["elements"] += entry.size.numel()
        row["bytes"] += entry.size.numel() * entry.properties.dtype.itemsize
    sums = {what: sum(row[what] for row in by_dtype.values()) for what in ("tensors", "elements", "bytes")}
    return {**sums, "dtypes": by_dtype}


def _tensors(stored: Stored) -> list[dict[str, Any]]:
    named = [(f"{key}.{name}", place) for key, names in stored.models.items() for name, place in names.items()]
    named += [
        (f"{key}.state.{name}.{entry}", place)
        for key, found in stored.optimizers.items()
        for name, entries in found.tensors.items()
        for entry, place in entries.items()
    ]
    rows = []
    for name, place in named:
        entry = stored.entry(place)
        size = entry.size.numel() * entry.properties.dtype.itemsize
        rows.append({"name": name, "shape": list(entry.size), "dtype": _dtype(entry), "bytes": size})
    return rows


def _dtype(entry: Any) -> str:
    return str(entry.properties.dtype).removeprefix("torch.")
