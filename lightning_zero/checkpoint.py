"""Lightning's checkpoints: what of its dict goes where in a sharded directory, and whole files that appear whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, TypeVar

import lightning
import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.core import saving
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from zero_core.checkpoint import check_plain
from zero_core.shard_tensor import ShardTensor
from zero_core.sharded_state import ModelState, clean
from zero_core.storage import Folder, beside, flush, remove, sync_directory
from zero_core.storage import replace as take_place
from zero_core.stored import Stored, open_checkpoint

M = TypeVar("M", bound=pl.LightningModule)

_ELSEWHERE = ("state_dict", "optimizer_states")  # what is tensors of the model and the optimizers
_HYPER_PARAMETERS = (
    pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY,
    pl.LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY,
)


class CheckpointIO(TorchCheckpointIO):
    """Writes whole checkpoints aside and renames them; removes files and directories so that none is half there."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes one file. One process."""
        folder = Folder(path)
        if not folder.is_local:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        aside, directory = beside(folder.path, "partial"), os.path.dirname(folder.path)
        os.makedirs(directory, exist_ok=True)
        try:
            with open(aside, "wb") as file:
                torch.save(checkpoint, file)
                flush(file)
            take_place(aside, folder.path)
        except BaseException:
            if os.path.exists(aside):
                os.unlink(aside)
            raise
        sync_directory(directory)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a file or a directory, if it is there. One process."""
        if Folder(path).exists():
            remove(path)


# -- saving ----------------------------------------------------------------------------------------------------------


def to_dict(state: ModelState) -> dict[str, Any]:
    """A model's state as hooks see it: what this rank has no part of is on the meta device; tied names share a tensor."""
    found: dict[str, Any] = {}
    for name, shape in state.names.items():
        kept = state.tied.get(name, name)
        found[name] = found[kept] if kept != name else state.tensors.get(name, torch.empty(shape, device="meta"))
    return found | state.values


def plain_state(module: pl.LightningModule) -> dict[str, Any]:
    """The state dict of a module that is whole; tied names share a tensor."""
    shared: dict[int, Any] = {}
    return {
        clean(name): shared.setdefault(id(value), value.detach() if isinstance(value, Tensor) else value)
        for name, value in module.state_dict(keep_vars=True).items()
    }


def from_dict(state: Mapping[str, Any]) -> ModelState:
    """The state that hooks have left; see `to_dict`."""
    found, first = ModelState(), dict[int, str]()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            found.values[name] = value
            continue
        found.names[name] = tuple(value.shape)
        if first.setdefault(id(value), name) != name:
            found.tied[name] = first[id(value)]
        elif isinstance(value, ShardTensor) or not value.is_meta:
            found.tensors[name] = value
    return found


def rest_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What of Lightning's dict is not weights or optimizer state, as plain values.

    Hyper-parameters that are not plain (classes, functions) are left out with a warning, as a script gives them again.

    Raises:
        ValueError: another value is not plain; says where.
    """
    found = {key: _plain(value, key) for key, value in checkpoint.items() if key not in (*_ELSEWHERE, *_TYPES)}
    for key in _HYPER_PARAMETERS:
        if key in checkpoint:
            found[key] = _plain_part(checkpoint[key])
    return found


_TYPES = (pl.LightningModule.CHECKPOINT_HYPER_PARAMS_TYPE, *_HYPER_PARAMETERS)


def _plain_part(parameters: Any) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in dict(parameters).items():
        try:
            kept[key] = _plain(value, str(key))
        except ValueError as error:
            rank_zero_warn(f"The checkpoint is saved without the hyper-parameter '{key}': {error}")
    return kept


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item, f"{where}.{number}") for number, item in enumerate(value))
    if isinstance(value, PurePath):
        return str(value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    if not isinstance(value, Tensor | str | int | float | bool | None):
        check_plain({where: value}, "checkpoint")
    return value


# -- loading ---------------------------------------------------------------------------------------------------------


@dataclass
class Opened:
    """A directory that a Trainer loads.

    Attributes:
        stored: the directory.
        markers: by name of a tensor there, what stands for it in the dict that hooks see.
    """

    stored: Stored
    markers: dict[str, Tensor]

    @classmethod
    def at(cls, path: str | Path) -> Opened:
        """Opens it; reads its small files only."""
        stored = open_checkpoint(os.fspath(path))
        key = model_key(stored)
        sizes = {name: stored.entry(place).size for name, place in stored.models[key].items()}
        return cls(stored, {name: torch.empty(size, device="meta") for name, size in sizes.items()})

    def as_lightning(self) -> dict[str, Any]:
        """The dict that Lightning restores from. What another host saved has no loops, callbacks or schedulers."""
        missing: dict[str, Any] = {"pytorch-lightning_version": lightning.__version__, "epoch": 0, "global_step": 0}
        if "loops" not in self.stored.extra:
            missing["lr_schedulers"] = []
        state: dict[str, Any] = {**missing, **self.stored.extra, "state_dict": {**self.markers, **self._values()}}
        if self.stored.optimizers:
            state["optimizer_states"] = [{} for _ in self.stored.optimizers]
        return state

    def named(self, state: Mapping[str, Any]) -> tuple[Stored, dict[str, Tensor]]:
        """The checkpoint under the names that hooks gave its tensors, and tensors that hooks made themselves."""
        key = model_key(self.stored)
        places = {id(marker): self.stored.models[key][name] for name, marker in self.markers.items()}
        models = {name: places[id(value)] for name, value in state.items() if id(value) in places}
        values = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        own = {name: v for name, v in state.items() if isinstance(v, Tensor) and id(v) not in places}
        return replace(self.stored, models={"model": models}, values={"model": values}), own

    def _values(self) -> dict[str, Any]:
        return self.stored.values.get(model_key(self.stored), {})


def model_key(stored: Stored) -> str:
    """The key of a checkpoint's only model.

    Raises:
        ValueError: it has several.
    """
    if len(stored.models) != 1:
        raise ValueError(
            f"expected a checkpoint of one model, and {stored.folder.name} has {sorted(stored.models) or 'none'}. Load "
            "those that you need with zero_core.load_checkpoint()."
        )
    return next(iter(stored.models))


def is_directory(path: Any) -> bool:
    """Whether a checkpoint's path is a directory, and not one of Lightning's files."""
    if not isinstance(path, str | os.PathLike):
        return False
    folder = Folder(path)
    return bool(folder.fs.isdir(folder.path))


def whole_checkpoint(path: str | Path, map_location: Any = None) -> dict[str, Any]:
    """A directory's content as Lightning's one file has it, without optimizer state. One process, no process group.

    Args:
        path: the directory.
        map_location: where to put the weights, a device; `None` for the CPU.

    Raises:
        CheckpointError: it is damaged, or no checkpoint.
    """
    opened = Opened.at(path)
    places = opened.stored.models[model_key(opened.stored)]
    read = opened.stored.read({*places.values()})
    if isinstance(map_location, str | torch.device | int):
        read = {place: tensor.to(map_location) for place, tensor in read.items()}
    state = opened.as_lightning()
    state.pop("optimizer_states", None)
    state["state_dict"].update({name: read[place] for name, place in places.items()})
    return state


def load_from_checkpoint(module_class: type[M], path: str | Path, **kwargs: Any) -> M:
    """`module_class.load_from_checkpoint(path, ...)` of a directory or a file; needs no strategy and no process group.

    Args:
        module_class: a `LightningModule` class.
        path: the checkpoint.
        **kwargs: as for `LightningModule.load_from_checkpoint`: `strict`, `map_location`, the module's own arguments.

    Returns:
        a plain module with the checkpoint's weights.

    Raises:
        CheckpointError: it is damaged, or no checkpoint.
    """
    return module_class.load_from_checkpoint(path, **kwargs)


def read_directories() -> None:
    """Makes Lightning's own `load_from_checkpoint` read directories, too; what reads files stays Lightning's."""
    stock: Any = vars(saving)["pl_load"]
    if hasattr(stock, "__wrapped__"):
        return

    def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if is_directory(path_or_url):
            return whole_checkpoint(path_or_url, map_location)
        return stock(path_or_url, map_location=map_location, weights_only=weights_only)

    load.__wrapped__ = stock  # type: ignore[attr-defined]
    saving.__dict__["pl_load"] = load
