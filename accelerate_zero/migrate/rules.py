"""What a rule sees of the input, and what it says of a key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["translated", "not needed", "unsupported"]


@dataclass(frozen=True)
class Verdict:
    """What becomes of a key, and which settings of ours come of it."""

    outcome: Outcome
    note: str
    zero: Mapping[str, Any] = field(default_factory=dict)
    accelerate: Mapping[str, Any] = field(default_factory=dict)


Rule = Callable[["Said", str], Verdict]
Table = Mapping[str, str | Rule]


@dataclass(frozen=True)
class Entry:
    """A key of the input: as the file spells it, as the tables know it, its value and its table."""

    shown: str
    key: str
    value: Any
    table: Table


class Said:
    """All that the input says; a rule looks up here what it depends on.

    Args:
        path: the file, for messages.
        entries: its keys, in order.
        default_stage: the stage it means where it names none.

    Raises:
        ValueError: two keys contradict each other. The methods raise it for a value of a wrong kind.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], default_stage: int) -> None:
        self.path, self.entries, self.default_stage = path, entries, default_stage
        self._known: dict[str, Entry] = {}
        for entry in entries:
            before = self._known.setdefault(entry.key, entry)
            if before.value == "auto":
                self._known[entry.key] = entry
            elif entry.value not in ("auto", before.value):
                raise ValueError(
                    f"{path}: {before.shown} says {before.value!r} and {entry.shown} says {entry.value!r}. Keep one."
                )

    def value(self, key: str, default: Any = None) -> Any:
        """The value as it stands."""
        return self._known[key].value if key in self._known else default

    def shown(self, key: str) -> str:
        """The key as the file spells it."""
        return self._known[key].shown if key in self._known else key

    def below(self, section: str) -> dict[str, Any]:
        """The values of a section, by their names in it."""
        return {key.removeprefix(section): entry.value for key, entry in self._known.items() if key.startswith(section)}

    def boolean(self, key: str, default: bool = False) -> bool:
        """True or false; Accelerate reads words, too."""
        words = {"true": True, "false": False, "none": default, "auto": default}
        word = str(self.value(key, default)).lower()
        if word not in words:
            raise self._wrong(key, "true or false")
        return words[word]

    def number(self, key: str, default: float = 0, least: float = 0) -> float:
        """A number from `least` on."""
        value = self.value(key, default)
        try:
            number = float(default if value in (None, "none", "auto") else value)
        except (TypeError, ValueError):
            raise self._wrong(key, "a number") from None
        if isinstance(value, bool) or not least <= number < float("inf"):
            raise self._wrong(key, f"a number from {least} on")
        return number

    def whole(self, key: str, default: int = 0, least: int = 0) -> int:
        """A whole number from `least` on, also one written as 5e8."""
        number = self.number(key, default, least)
        if number != int(number):
            raise self._wrong(key, "a whole number")
        return int(number)

    def word(self, key: str, words: Sequence[str], default: str) -> str:
        """One of some words, in their spelling, in whichever case it was written."""
        value = self.value(key, default)
        wanted = default.lower() if value in (None, "auto") else str(value).lower()
        found = [word for word in words if word.lower() == wanted]
        if not found:
            raise self._wrong(key, f"one of {', '.join(words)}")
        return found[0]

    def _wrong(self, key: str, wanted: str) -> ValueError:
        entry = self._known[key]
        return ValueError(f"{self.path}: {entry.shown} must be {wanted}, got {entry.value!r}.")


def to(zero: Mapping[str, Any] | None = None, accelerate: Mapping[str, Any] | None = None, why: str = "") -> Verdict:
    """The key becomes these settings."""
    zero, accelerate = zero or {}, accelerate or {}
    named = [f"zero_config.{key}: {value}" for key, value in zero.items()]
    named += [f"{key}: {value}" for key, value in accelerate.items()]
    return Verdict("translated", ", ".join(named) + (f"; {why}" if why else "."), zero, accelerate)


def unsupported(advice: str, off: tuple[Any, ...] = (None, False, "none", "false")) -> Rule:
    """A rule for what is not offered; with a value of `off` nothing is lost."""

    def rule(said: Said, key: str) -> Verdict:
        if said.value(key) in off:
            return Verdict("not needed", "this value asks for nothing.")
        return Verdict("unsupported", advice)

    return rule


def keep(said: Said, key: str) -> Verdict:
    """The key stays as it is."""
    return to(accelerate={key: said.value(key)})


def count(default: int) -> Rule:
    """A rule for a number that stays as it is."""
    return lambda said, key: to(accelerate={key: said.whole(key, default, least=-1)})


# -- notes that several tables use ---------------------------------------------------------------------------------------

PLAIN = "ZeRO has no stage 0: stage 1 gives the same results as plain data parallelism, with less memory."
SAVES = "saves are whole and plain, always."
GROUPS = (
    "ZeRO shards over all ranks here: less memory, more traffic between machines. zero_core.shard(process_group=...) shards "
    "within a group, and averages gradients within it only."
)
PARALLEL = "ZeRO here is data parallelism only. Remove it, or stay with the engine that offers it."
CHECKPOINTING = "call model.gradient_checkpointing_enable(), or set TrainingArguments(gradient_checkpointing=True)."
SHARDED_INIT = "build or load the model inside `with accelerate_zero.sharded_init():`."
FP8 = "fp8 is not offered; bf16 is the nearest."
