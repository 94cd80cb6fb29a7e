"""Torch's pickled files, which could run code: opened as plain values only, unless the caller trusts them."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import IO, Any

import torch

from zero_core.errors import CheckpointError


def load_mapped(path: str, trusted: bool = False, stand_ins: Mapping[str, Any] | None = None) -> Any:
    """A local file of `torch.save`, whose tensors are read when they are touched.

    Args:
        path: the file.
        trusted: whether it may run code, if it holds more than plain values.
        stand_ins: by full name of a class that is let in, what takes its place and does nothing.

    Raises:
        CheckpointError: it holds more than tensors and plain values, or is damaged; names what and where.
    """
    try:
        return _load(path, path, trusted, stand_ins or {}, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):  # by a torch before 1.6, or without its archive
            raise
    with open(path, "rb") as file:
        return load_plain(file, path, trusted)


def load_plain(file: IO[bytes], where: str, trusted: bool = False) -> Any:
    """What `torch.save` wrote, read whole.

    Args:
        file: open for reading.
        where: what to call it in an error.
        trusted: whether it may run code, if it holds more than plain values.

    Raises:
        CheckpointError: it holds more than tensors and plain values, or is damaged.
    """
    return _load(file, where, trusted, {}, mmap=False)


def _load(source: Any, where: str, trusted: bool, stand_ins: Mapping[str, Any], mmap: bool) -> Any:
    try:
        with torch.serialization.safe_globals([(inert, name) for name, inert in stand_ins.items()]):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        if not trusted:
            raise CheckpointError(f"{where} {_refusal(str(error))}") from error
    except Exception as error:
        if mmap and "mmap can only be used" in str(error):
            raise
        raise _damaged(where, error) from error
    if not mmap:
        source.seek(0)
    try:
        return torch.load(
            source, map_location="cpu", weights_only=False, mmap=mmap, pickle_module=_pickle_module(stand_ins)
        )
    except Exception as error:
        raise _damaged(where, error) from error


def _refusal(text: str) -> str:
    """What torch said, without its advice."""
    named = re.search(r"GLOBAL (\S+)", text)
    if named:
        return (
            f"holds more than tensors and plain values: it names {named[1]}, and opening it could run code. If you trust "
            "where it comes from, pass trusted=True."
        )
    reason = text.partition("\n\nCheck the documentation")[0].splitlines()[-1]
    return (
        f"cannot be read as tensors and plain values ({reason}): it is damaged, or no file of torch.save, or opening it "
        "could run code. If you trust where it comes from, pass trusted=True."
    )


def _damaged(where: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{where} cannot be read, it is damaged or needs what is not here: {type(error).__name__}: {error}"
    )


def _pickle_module(stand_ins: Mapping[str, Any]) -> Any:
    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            full = f"{module}.{name}"
            return stand_ins[full] if full in stand_ins else super().find_class(module, name)

    return SimpleNamespace(
        __name__="pickle", Unpickler=Unpickler, load=lambda file, **settings: Unpickler(file, **settings).load()
    )
