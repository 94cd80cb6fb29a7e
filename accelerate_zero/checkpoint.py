"""Accelerate's states: models and optimizers in one checkpoint, each rank's part, and Accelerate's own files beside it."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)
from accelerate.utils.constants import MODEL_NAME, RNG_STATE_NAME, SAFE_MODEL_NAME
from safetensors.torch import load_file
from torch import Tensor, nn

from accelerate_zero.staging import clear, taking_place
from zero_core import ZeroEngine, engine_of, load_checkpoint, save_checkpoint
from zero_core.collectives import raising_together
from zero_core.errors import CheckpointError
from zero_core.manifest import NAME
from zero_core.sharded_state import ModelState
from zero_core.storage import Folder, recover, remove
from zero_core.stored import Stored, open_checkpoint

if TYPE_CHECKING:
    from accelerate_zero.accelerator import Accelerator

_NUMBERED = re.compile(r"checkpoint_(\d+)")
_CUSTOM = re.compile(r"custom_checkpoint_\d+\.pkl")


# -- saving ----------------------------------------------------------------------------------------------------------


def save_state(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None, safe_serialization: bool) -> Path:
    """`Accelerator.save_state`: hooks see whole states on the main process, and what they leave as it is stays in parts.

    What they take out is theirs to load, and what they change is written by Accelerate, whole.
    """
    project = accelerator.project_configuration
    main = accelerator.is_local_main_process if project.save_on_each_node else accelerator.is_main_process
    with raising_together():
        target = _target(accelerator, output_dir)
    if main and project.automatic_checkpoint_naming:
        clear(os.path.dirname(target))
    with taking_place(target, main) as aside:
        in_parts, whole, hooks_own = _after_hooks(accelerator, aside)
        with raising_together():
            _save_rest(accelerator, aside, main, whole, safe_serialization)
        _save_in_parts(accelerator, aside, in_parts)
        with raising_together():
            folder = Folder(aside)
            if main and folder.exists(NAME):
                folder.add_to_manifest({*os.listdir(aside)} - hooks_own - folder.own_names())
    if main and project.automatic_checkpoint_naming and project.total_limit is not None:
        _rotate(os.path.dirname(target), project.total_limit)
    project.iteration += 1
    return Path(target)


def _target(accelerator: Accelerator, output_dir: str | os.PathLike[str] | None) -> str:
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        if output_dir is None:
            raise ValueError(
                "save_state() needs output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True), got neither."
            )
        path = os.path.abspath(os.path.expanduser(output_dir))
        if os.path.isfile(path):
            raise NotADirectoryError(f"save_state() needs a directory, and {path} is a file.")
        return path
    number = accelerator.save_iteration
    target = os.path.join(_states_dir(accelerator), f"checkpoint_{number}")
    if os.path.exists(target):
        raise ValueError(
            f"Checkpoint directory {target} ({number}) already exists. Please manually override `self.save_iteration` with "
            "what iteration to start with."
        )
    return target


def _states_dir(accelerator: Accelerator) -> str:
    return os.path.abspath(os.path.join(accelerator.project_dir, "checkpoints"))


def _after_hooks(accelerator: Accelerator, aside: str) -> tuple[list[int], list[dict[str, Any]], set[str]]:
    """Numbers of the models to save in parts, states to write whole, names that hooks wrote; as the main process says."""
    models, hooks = accelerator._models, accelerator._save_model_state_pre_hook
    given = [accelerator.get_state_dict(m) if hooks or engine_of(m) is None else {} for m in models]
    contents, left = [dict(state) for state in given], list(given)
    with accelerator.showing(zip(models, given, strict=True)), raising_together():
        for hook in hooks.values():
            hook(models, left, aside)
    untouched = [
        number
        for number, (model, state, before) in enumerate(zip(models, given, contents, strict=True))
        if engine_of(model) is not None and any(state is item for item in left) and _is_as_before(state, before)
    ]
    decided: list[Any] = [(untouched, set(os.listdir(aside)))]  # before any rank writes more
    dist.broadcast_object_list(decided)  # other ranks' hooks often do nothing
    in_parts, hooks_own = decided[0]
    return in_parts, [state for state in left if not any(state is given[number] for number in in_parts)], hooks_own


def _is_as_before(state: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return state.keys() == before.keys() and all(state[key] is value for key, value in before.items())


def _save_rest(
    accelerator: Accelerator, aside: str, main: bool, whole: list[dict[str, Any]], safe_serialization: bool
) -> None:
    each_node = accelerator.project_configuration.save_on_each_node
    save_accelerator_state(
        aside,
        whole,
        [],
        accelerator._schedulers,
        accelerator._dataloaders if main else [],  # into one file, which ranks would write over each other
        accelerator.process_index,
        accelerator.step,
        accelerator.scaler if main else None,
        save_on_each_node=each_node,
        safe_serialization=safe_serialization,
    )
    for number, item in enumerate(accelerator._custom_objects):
        save_custom_state(item, aside, number, save_on_each_node=each_node)


def _save_in_parts(accelerator: Accelerator, aside: str, numbers: list[int]) -> None:
    engines = _engines(accelerator)
    if not engines:
        return
    nothing = {key: ModelState() for number, key, _ in engines if number not in numbers}
    optimizers = {_key("optimizer", n): item.optimizer for n, item in enumerate(accelerator._optimizers)}
    extra = {"accelerate": {"step": accelerator.step}}  # for ranks that were not there
    save_checkpoint(aside, {key: engine for _, key, engine in engines}, optimizers, extra, states=nothing)


def _engines(accelerator: Accelerator) -> list[tuple[int, str, ZeroEngine]]:
    """Of each model that has one its number, key and engine."""
    found = [(number, engine_of(model)) for number, model in enumerate(accelerator._models)]
    return [(number, _key("model", number), engine) for number, engine in found if engine is not None]


def _key(what: str, number: int) -> str:
    return f"{what}_{number}" if number else what


def _numbered(directory: str) -> list[Path]:
    """The complete states in a directory, oldest first."""
    found = [(int(match[1]), path) for path in Path(directory).iterdir() if (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _rotate(directory: str, limit: int) -> None:
    states = _numbered(directory)
    for path in states[: max(0, len(states) - limit)]:
        with suppress(OSError):  # what is left has no state's name; the next save removes it
            remove(path)


# -- loading ---------------------------------------------------------------------------------------------------------


def load_state(
    accelerator: Accelerator,
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: dict[str, Any] | None,
    model_kwargs: dict[str, Any],
) -> None:
    """`Accelerator.load_state`: of our own states, and of others that Accelerate or another host wrote."""
    with raising_together():
        path = _source(accelerator, input_dir)
    models = list(accelerator._models)
    with raising_together():
        for hook in accelerator._load_model_state_pre_hook.values():
            hook(models, path)
    step: int = accelerator.step
    optimizers = accelerator._optimizers
    if not _is_plain(path):
        with raising_together():
            stored = open_checkpoint(path)
        models = _load_in_parts(accelerator, stored, models, model_kwargs.get("strict", True))
        step = stored.extra.get("accelerate", {}).get("step", step)
        optimizers = []
    _load_models(models, path)
    with raising_together():
        if any(name.startswith(RNG_STATE_NAME) for name in os.listdir(path)):
            _load_rest(accelerator, path, optimizers, load_kwargs, model_kwargs.get("map_location"), step)
        elif accelerator.is_main_process:
            warnings.warn(
                f"{path} was not saved by Accelerate: weights and optimizers go on from it; schedulers, data loaders, loss "
                "scale and registered objects start afresh.",
                stacklevel=4,
            )


def _source(accelerator: Accelerator, input_dir: str | os.PathLike[str] | None) -> str:
    if input_dir is not None:
        path = os.path.abspath(os.path.expanduser(input_dir))
    elif not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
    elif os.path.isdir(directory := _states_dir(accelerator)) and (states := _numbered(directory)):
        path = str(states[-1])
    else:
        raise ValueError(f"{directory} holds no state yet: expected directories checkpoint_<number>.")
    recover(Folder(path))
    if not os.path.isdir(path):
        raise ValueError(f"Tried to find {path} but folder does not exist")
    if re.fullmatch(r"\..*\.partial", os.path.basename(path)):
        raise CheckpointError(f"{path} is what an interrupted save has left, and not complete; load the one before.")
    return path


def _is_plain(path: str) -> bool:
    """Whether it holds models as Accelerate's own whole files alone."""
    whole = (f"{SAFE_MODEL_NAME}.safetensors", f"{MODEL_NAME}.bin")
    return not Path(path, NAME).exists() and any(Path(path, name).is_file() for name in whole)


def _load_in_parts(accelerator: Accelerator, stored: Stored, models: list[nn.Module], strict: bool) -> list[nn.Module]:
    """Loads what a checkpoint has of models and optimizers; returns the models that it does not have."""
    engines = _engines(accelerator)
    if not engines:
        return models
    own = "accelerate" in stored.extra
    wanted = {
        key for number, key, _ in engines
        if any(accelerator._models[number] is model for model in models) and (stored.models.get(key) or not own)
    }  # fmt: skip
    load_checkpoint(
        stored,
        {key: engine for _, key, engine in engines},
        {_key("optimizer", number): item.optimizer for number, item in enumerate(accelerator._optimizers)},
        strict=strict,
        skip=[key for _, key, _ in engines if key not in wanted],
    )
    loaded = [accelerator._models[number] for number, key, _ in engines if key in wanted]
    return [model for model in models if not any(model is other for other in loaded)]


def _load_rest(
    accelerator: Accelerator,
    path: str,
    optimizers: list[Any],
    load_kwargs: dict[str, Any] | None,
    map_location: str | None,
    step: int,
) -> None:
    on_device = accelerator.num_processes > 1 and accelerator.multi_device
    found = load_accelerator_state(
        path,
        [],
        optimizers,
        accelerator._schedulers,
        accelerator._dataloaders,
        accelerator.process_index,
        accelerator.scaler,
        map_location or ("on_device" if on_device else "cpu"),
        load_kwargs,
    )
    accelerator.step = found.get("step", step)
    items, files = accelerator._custom_objects, [name for name in os.listdir(path) if _CUSTOM.fullmatch(name)]
    if len(files) != len(items):
        raise RuntimeError(
            f"{path} has {len(files)} custom checkpoints ({', '.join(sorted(files)) or 'none'}), and "
            f"{len(items)} objects are registered: call accelerator.register_for_checkpointing() for the same ones."
        )
    for number, item in enumerate(items):
        load_custom_state(item, path, number)


def _load_models(models: list[nn.Module], input_dir: str) -> None:
    """Loads models from the whole files that Accelerate wrote."""
    for number, model in enumerate(models):
        suffix = f"_{number}" if number else ""
        file = Path(input_dir, f"{SAFE_MODEL_NAME}{suffix}.safetensors")
        if file.exists():
            state = load_file(file)
        else:
            state = torch.load(Path(input_dir, f"{MODEL_NAME}{suffix}.bin"), map_location="cpu", weights_only=True)
        engine = engine_of(model)
        result = model.load_state_dict(state, False) if engine is None else engine.load_full_state_dict(state, False)
        _check_keys(model, result, state, file)


def _check_keys(model: nn.Module, result: Any, state: Mapping[str, Tensor], file: Path) -> None:
    # A tensor of several names is saved under one of them.
    names: dict[int, set[str]] = {}
    for name, tensor in chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        names.setdefault(id(tensor), set()).add(name)
    missing = [
        key for key in result.missing_keys if not any(key in same and same & state.keys() for same in names.values())
    ]
    if missing or result.unexpected_keys:
        raise RuntimeError(
            f"{file} is not of this {type(model).__name__}: missing {missing or 'nothing'}, unexpected "
            f"{list(result.unexpected_keys) or 'nothing'}."
        )
