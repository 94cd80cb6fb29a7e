"""Translates configs of other engines into ours: DeepSpeed's, and Accelerate's with DeepSpeed or FSDP.

Pure functions: a file in, a `Translation` out. What becomes of each key is in the tables of `deepspeed.py`,
`fsdp.py` and `accelerate.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from accelerate_zero.migrate import deepspeed, fsdp
from accelerate_zero.migrate.accelerate import ACCELERATE, distributed_type
from accelerate_zero.migrate.deepspeed import ALIASES, DECIDED, DEEPSPEED
from accelerate_zero.migrate.fsdp import FSDP
from accelerate_zero.migrate.rules import Entry, Outcome, Rule, Said, Table, Verdict, unsupported
from accelerate_zero.plugin import FIELDS, SECTION, SECTION_VERSION
from zero_core import ZeroConfig

_DEEPSPEED_MARKS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
_ACCELERATE_MARKS = ("compute_environment", "distributed_type", "deepspeed_config", "fsdp_config")
_DEFAULTS = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": -1,  # Accelerate's word for "say it to launch"; DeepSpeed's own launcher would count the devices
    "machine_rank": 0,
    "use_cpu": False,
}
_AUTO = {**deepspeed.AUTO, **fsdp.AUTO}
_UNKNOWN = unsupported("unknown here, so it was not taken over. If it matters, set it in code.")


@dataclass(frozen=True)
class Row:
    """What became of one key of the input.

    Args:
        key: dotted path, such as "zero_optimization.offload_optimizer.device". Keys of a DeepSpeed file that an Accelerate
            config names are below "deepspeed_config_file".
        value: its value in the input.
        outcome: "translated", "not needed" or "unsupported".
        note: to which key of ours with which value, why it is not needed, or what to do instead.
    """

    key: str
    value: Any
    outcome: Outcome
    note: str


@dataclass(frozen=True)
class Translation:
    """A config of ours, and how it came about.

    Args:
        accelerate: an Accelerate config without an engine of its own. `num_processes` is -1 (to be given to launch) where
            the input does not say it.
        zero: the `zero_config` section: version, stage, and what differs from the defaults.
        rows: one for each key of the input, in its order.
    """

    accelerate: dict[str, Any]
    zero: dict[str, Any]
    rows: tuple[Row, ...]


def translate(path: str | os.PathLike[str]) -> Translation:
    """Translates a DeepSpeed config, or an Accelerate config with DeepSpeed or FSDP (YAML or JSON).

    Raises:
        ValueError: the file is none of these, is ours already, cannot be read, or has a value of a wrong kind; the message
            names file and key.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no config file {str(path)!r} to translate.")
    said = _said(path, _read(path))
    verdicts = [_judge(said, entry) for entry in said.entries]
    zero = _merged(said, [verdict.zero for verdict in verdicts])
    accelerate = _merged(said, [verdict.accelerate for verdict in verdicts])
    zero = {"version": SECTION_VERSION, "stage": max(said.default_stage, 1), **zero}
    return Translation(
        accelerate=_nested({**_DEFAULTS, "distributed_type": distributed_type(said), **accelerate}),
        zero={key: zero[key] for key in ("version", *FIELDS) if key in zero and not _is_default(key, zero[key])},
        rows=tuple(
            Row(entry.shown, entry.value, v.outcome, v.note) for entry, v in zip(said.entries, verdicts, strict=True)
        ),
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        try:
            data = json.loads(text)
        except json.JSONDecodeError:
            data = yaml.safe_load(text)  # also JSON with comments, which DeepSpeed reads
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be parsed, it is neither YAML nor JSON: {error}") from error
    if not isinstance(data, Mapping):
        raise ValueError(f"{path} must hold keys and values, got {type(data).__name__}.")
    return data


def _said(path: Path, data: Mapping[str, Any]) -> Said:
    if SECTION in data:
        raise ValueError(f"{path} has a section '{SECTION}': it is ours already, and there is nothing to translate.")
    if any(mark in data for mark in _ACCELERATE_MARKS):
        return _said_to_accelerate(path, data)
    if any(mark in data for mark in _DEEPSPEED_MARKS):
        return Said(path, _flat(data, "", DEEPSPEED), default_stage=0)
    raise ValueError(
        f"{path} is neither a DeepSpeed config (it has none of the keys {', '.join(_DEEPSPEED_MARKS)}) nor an Accelerate "
        f"config with a section deepspeed_config or fsdp_config."
    )


def _said_to_accelerate(path: Path, data: Mapping[str, Any]) -> Said:
    engine = _engine(path, data)
    section = f"{engine}_config"
    table, default_stage = (FSDP, 3) if engine == "fsdp" else (DEEPSPEED, 2)
    entries: list[Entry] = []
    for key, value in data.items():
        if key != section or not value:
            entries += _flat({key: value}, "", ACCELERATE)
        elif isinstance(value, Mapping):
            entries += _flat(value, f"{key}.", table)
        else:
            raise ValueError(f"{path}: {key} must hold keys and values, got {value!r}.")
    named = (data.get(section) or {}).get("deepspeed_config_file", "none")
    if named not in (None, "none"):
        file = _beside(path, named)
        entries, default_stage = entries + _flat(_read(file), "deepspeed_config_file.", DEEPSPEED), 0
    return Said(path, entries, default_stage)


def _engine(path: Path, data: Mapping[str, Any]) -> str:
    kind = str(data.get("distributed_type", "")).lower()
    named = [engine for engine in ("deepspeed", "fsdp") if data.get(f"{engine}_config") or kind == engine]
    if not named:
        raise ValueError(
            f"{path} is an Accelerate config without DeepSpeed or FSDP, so there is nothing to translate: add a section "
            f"'{SECTION}' with a stage, or make one with `accelerate-zero config`."
        )
    if len(named) == 2:
        raise ValueError(f"{path} asks for both, DeepSpeed and FSDP: keep deepspeed_config or fsdp_config.")
    return named[0]


def _beside(path: Path, named: Any) -> Path:
    for file in (path.parent / str(named), Path(str(named))):
        if file.is_file():
            return file
    raise ValueError(
        f"{path}: deepspeed_config.deepspeed_config_file names {named!r}, and there is no such file, neither beside the "
        "config nor in the working directory."
    )


def _flat(data: Mapping[str, Any], prefix: str, table: Table) -> list[Entry]:
    """An entry for each leaf, under the key by which the tables know it."""
    return [Entry(prefix + key, _known_as(key, table), value, table) for key, value in _leaves(data)]


def _known_as(key: str, table: Table) -> str:
    if table is FSDP:  # Accelerate reads these keys with and without the prefix
        return key if key.startswith("fsdp_") else f"fsdp_{key}"
    return ALIASES.get(key, key)


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _judge(said: Said, entry: Entry) -> Verdict:
    rule = _found(entry.key, entry.table)
    if isinstance(rule, str):
        return Verdict("not needed", rule)
    if rule is _UNKNOWN:
        return _unknown(said, entry)
    if entry.value == "auto" and entry.key not in DECIDED:
        return Verdict("not needed", _AUTO.get(entry.key, "left open here as well: the default holds."))
    verdict = rule(said, entry.key)
    section = entry.key.rpartition(".")[0]
    off = said.value(f"{section}.enabled") is False or (section == "fp16" and said.value("bf16.enabled") is True)
    if verdict.outcome == "unsupported" and off:
        return Verdict("not needed", f"{section} is switched off.")
    return verdict


def _unknown(said: Said, entry: Entry) -> Verdict:
    if not any(name.startswith(f"{entry.key}.") for name in entry.table):
        return _UNKNOWN(said, entry.key)
    if entry.value not in (None, {}):
        raise ValueError(f"{said.path}: {entry.shown} must hold keys and values, got {entry.value!r}.")
    return Verdict("not needed", "empty.")


def _found(key: str, table: Table) -> str | Rule:
    """The rule of a key, or else that of the narrowest section around it."""
    parts = key.split(".")
    names = [key, *(".".join([*parts[:end], "*"]) for end in range(len(parts) - 1, 0, -1))]
    return next((table[name] for name in names if name in table), _UNKNOWN)


def _merged(said: Said, settings: list[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for entry, ours in zip(said.entries, settings, strict=True):
        for name, value in ours.items():
            if name in merged and merged[name] != value:
                raise ValueError(
                    f"{said.path}: {origin[name]} asks for {name}={merged[name]!r} and {entry.shown} for {name}={value!r}. "
                    "Keep one."
                )
            merged[name], origin[name] = value, entry.shown
    return merged


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, leaf = key.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[leaf] = value
    return nested


def _is_default(key: str, value: Any) -> bool:
    return key != "stage" and value == getattr(ZeroConfig(), key, None)
