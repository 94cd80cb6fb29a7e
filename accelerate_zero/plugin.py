"""What the user says to Accelerate about ZeRO, from arguments, variables or a file, as one `ZeroConfig`."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from zero_core import MixedPrecision, Offload, ZeroConfig, ZeroStage

VARIABLE_PREFIX = "ACCELERATE_ZERO_"
CONFIG_FILE_VARIABLE = "ACCELERATE_ZERO_CONFIG_FILE"
SECTION = "zero_config"
SECTION_VERSION = 1

_MIXED = {"no": None, "bf16": "bf16-mixed", "fp16": "16-mixed"}


@dataclass(kw_only=True)
class ZeroPlugin:
    """ZeRO's settings, in the manner of Accelerate's own plugins.

    What is not given as an argument is read from the variable `ACCELERATE_ZERO_<NAME>`, which `accelerate-zero launch`
    sets from its config file; without any of these, from the file that `ACCELERATE_ZERO_CONFIG_FILE` names. What nobody says
    has the default of `zero_core.ZeroConfig`.

    Args:
        stage: 1, 2 or 3. Default: 3.
        offload: "optimizer" (masters, gradient shards, optimizer state in host memory), "all" (stage 3's weights too) or a
            `zero_core.Offload`.
        offload_directory: a directory on a disk; what `offload` names then lives in files there.
        precision: a `zero_core.MixedPrecision` or its name. Default: as `Accelerator(mixed_precision=...)` says, with fp32
            masters.
        unit_classes: module classes, or their names, that are gathered and reduced together.
        unit_numel: elements from which an embedding or head is a unit of its own.
        prefetch_bytes: bytes of weights gathered ahead at stage 3.
        local_accumulation: whether gradients wait whole inside `accumulate`.

    Raises:
        ValueError: a variable is unknown or cannot be read, or an argument contradicts one; the message names both.
    """

    stage: ZeroStage | int | None = None
    offload: Offload | str | None = None
    offload_directory: str | os.PathLike[str] | None = None
    precision: MixedPrecision | str | None = None
    unit_classes: Sequence[type[nn.Module] | str] | None = None
    unit_numel: int | None = None
    prefetch_bytes: int | None = None
    local_accumulation: bool | None = None

    def __post_init__(self) -> None:
        self._sources = {name: f"argument {name}" for name in FIELDS if getattr(self, name) is not None}
        for name, (value, source) in _from_variables(os.environ).items():
            own = getattr(self, name)
            if own is None:
                setattr(self, name, value)
                self._sources[name] = source
            elif own != value:
                raise ValueError(f"{source} says {value!r} and the argument {name} says {own!r}. Give one of them.")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ZeroPlugin:
        """The settings in the `zero_config` section of an Accelerate config file (YAML or JSON).

        Raises:
            ValueError: the file has no such section, or one that cannot be read; the message names file and key.
            FileNotFoundError: there is no such file.
        """
        settings = read_section(read_config(path), path)
        plugin = cls(**settings)
        plugin._sources.update({name: f"{SECTION}.{name} in {os.fspath(path)}" for name in settings})
        return plugin

    def config(self, mixed_precision: str = "no") -> ZeroConfig:
        """The engine's settings.

        Args:
            mixed_precision: the Accelerator's: "no", "bf16" or "fp16".

        Raises:
            ValueError: settings contradict each other; the message says where each came from.
        """
        settings = {name: getattr(self, name) for name in FIELDS if getattr(self, name) is not None}
        directory = settings.pop("offload_directory", None)
        try:
            settings["precision"] = self._policy(mixed_precision)
            if directory is not None:
                settings["offload"] = _on_disk(self.offload, directory)
            if "unit_classes" in settings:
                settings["unit_classes"] = tuple(settings["unit_classes"])
            return ZeroConfig(**settings)
        except ValueError as error:
            said = "; ".join(f"{name}={getattr(self, name)!r} from {source}" for name, source in self._sources.items())
            raise ValueError(f"{error} (Given: {said or 'nothing, all defaults'}.)") from error

    def _policy(self, mixed_precision: str) -> MixedPrecision | None:
        if mixed_precision not in _MIXED:
            raise ValueError(f"mixed_precision must be one of {', '.join(_MIXED)} under ZeRO, got {mixed_precision!r}.")
        name = _MIXED[mixed_precision]
        named = None if name is None else MixedPrecision.named(name)
        own = MixedPrecision.named(self.precision) if isinstance(self.precision, str) else self.precision
        if own is not None and named is not None and (own.param, own.autocasts) != (named.param, named.autocasts):
            raise ValueError(
                f"precision={self.precision!r} and mixed_precision={mixed_precision!r} mean different things. Give one."
            )
        policy = own or named
        # Accelerate promises outputs in fp32 under mixed precision.
        if policy is not None and policy.autocasts and policy.output is None:
            policy = dataclasses.replace(policy, output=torch.float32)
        return policy

    def variables(self) -> dict[str, str]:
        """The variables that say the same to another process.

        Raises:
            ValueError: a setting is an object that has no name.
        """
        return {
            VARIABLE_PREFIX + name.upper(): _as_text(name, getattr(self, name))
            for name in FIELDS
            if getattr(self, name) is not None
        }


FIELDS: dict[str, Callable[[str], Any]] = {
    "stage": int,
    "offload": str,
    "offload_directory": str,
    "precision": str,
    "unit_classes": lambda text: [part.strip() for part in text.split(",") if part.strip()],
    "unit_numel": int,
    "prefetch_bytes": int,
    "local_accumulation": lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()],
}
"""The plugin's fields, each with what reads it from a variable's text."""

_TYPES: dict[str, tuple[type, ...]] = {
    "stage": (int,), "offload": (str,), "offload_directory": (str,), "precision": (str,), "unit_classes": (list,),
    "unit_numel": (int,), "prefetch_bytes": (int,), "local_accumulation": (bool,),
}  # fmt: skip


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A config file's content (YAML or JSON).

    Raises:
        ValueError: it is neither, or no mapping.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no config file {str(path)!r}. Write one with: accelerate-zero config --config_file {path}"
        )
    try:
        whole = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML, too
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is neither YAML nor JSON: {error}") from error
    if not isinstance(whole, dict):
        raise ValueError(f"{path} must hold keys and values, got {type(whole).__name__}.")
    return whole


def read_section(whole: Mapping[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings of a config's `zero_config` section, checked.

    Args:
        whole: the config.
        path: where it is from, for messages.

    Raises:
        ValueError: there is none, it is of a newer version, a key is missing or unknown, or a value of a wrong type.
    """
    section = whole.get(SECTION)
    if not isinstance(section, Mapping):
        raise ValueError(
            f"{path} has no section '{SECTION}'. Make one with `accelerate-zero config`, or translate the file with "
            f"`accelerate-zero config --from {path}`."
        )
    settings = {key: value for key, value in section.items() if key != "version" and value is not None}
    version = section.get("version", SECTION_VERSION)
    if not isinstance(version, int) or version > SECTION_VERSION:
        raise ValueError(
            f"{path} was written for version {version} of the section '{SECTION}', and this installation knows "
            f"{SECTION_VERSION}: upgrade zero-redundancy."
        )
    for key, value in settings.items():
        if key not in FIELDS:
            raise ValueError(f"{path}: unknown key {SECTION}.{key}. {_suggestion(str(key), FIELDS)}")
        # bool is an int, and `stage: true` is a slip.
        if not isinstance(value, _TYPES[key]) or (isinstance(value, bool) and bool not in _TYPES[key]):
            wanted = " or ".join(kind.__name__ for kind in _TYPES[key])
            raise ValueError(f"{path}: {SECTION}.{key} must be of type {wanted}, got {value!r}.")
    if "stage" not in settings:
        raise ValueError(f"{path}: {SECTION}.stage is missing; expected 1, 2 or 3.")
    return settings


def _from_variables(environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Settings by field, each with where it comes from."""
    found: dict[str, tuple[Any, str]] = {}
    file = environment.get(CONFIG_FILE_VARIABLE)
    if file and not any(VARIABLE_PREFIX + name.upper() in environment for name in FIELDS):
        settings = read_section(read_config(file), file)
        return {name: (value, f"{SECTION}.{name} in {file}") for name, value in settings.items()}
    for variable, text in environment.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable == CONFIG_FILE_VARIABLE:
            continue
        name = variable.removeprefix(VARIABLE_PREFIX).lower()
        source = f"variable {variable}" + (f" (set from {file})" if file else "")
        if name not in FIELDS:
            raise ValueError(
                f"unknown {source}. {_suggestion(variable, [VARIABLE_PREFIX + f.upper() for f in FIELDS])}"
            )
        try:
            found[name] = (FIELDS[name](text), source)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{source} cannot be read: {text!r} is no value of {name}.") from error
    return found


def _suggestion(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return (f"Did you mean {close[0]}? " if close else "") + f"Known: {', '.join(known)}."


def _on_disk(offload: Offload | str | None, directory: str | os.PathLike[str]) -> Offload:
    if not isinstance(offload, str):
        raise ValueError(
            'offload_directory goes with offload="optimizer" or offload="all", which says what lives there.'
        )
    named = Offload.named(offload)
    return Offload(optimizer="disk", params="device" if named.params == "device" else "disk", directory=directory)


def _as_text(name: str, value: Any) -> str:
    if isinstance(value, ZeroStage):
        return str(value.value)
    if name == "unit_classes":
        return ",".join(item if isinstance(item, str) else item.__name__ for item in value)
    if isinstance(value, (Offload, MixedPrecision)):
        raise ValueError(f"{name} must be given by name to be passed on to another process, got {value!r}.")
    return str(value)
