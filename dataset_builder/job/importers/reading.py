"""What one file says of a job: values by the job's key paths, each with where it came from, and what is left to ask.

An importer fills a :class:`Draft` from a :class:`ConfigFile` and ends with a frozen :class:`Reading`.
Four keys stand for what files state and a job derives: ``cluster.num_gpus``, ``batch.gradient_accumulation_steps``,
``batch.is_micro_batch_reduced`` (to the GPU's share of the global batch, where it is larger) and
``model.vocab_multiple`` (what the vocabulary is padded to, times tensor).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from dataset_builder.job.importers.config_file import ConfigFile
from dataset_builder.job.reasons import shown
from dataset_builder.job.values import whole_number

_MAX_LISTED = 25


class Rank(IntEnum):
    """How firmly a value is known; the lower wins over the higher."""

    STATED = 0
    INHERITED = 1  # stated by the file that another one extends
    IMPLIED = 2  # what a stated model type or name means
    DEFAULT = 3  # what the framework does when nothing is said


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of a job with its origin, ``file: key`` as the file spells it."""

    value: Any
    origin: str
    rank: Rank = Rank.STATED


@dataclass(frozen=True)
class Reading:
    """One file's part of a job. ``questions`` are key paths that it names without a value (``auto``, ``${TP}``)."""

    path: str
    format: str
    settings: Mapping[str, Setting]
    questions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    extends: tuple[str, ...] = ()  # files that this one changes
    refers: tuple[str, ...] = ()  # files beside it, which may not contradict it


def is_open(value: Any) -> bool:
    """Whether a file leaves this value to somebody else: ``auto``, or a variable that nothing sets."""
    if not isinstance(value, str):
        return False
    text = value.strip()
    return text.lower() == "auto" or "${" in text or (text[:1] == "$" and len(text) > 1)


def as_flag(value: Any) -> bool:
    """A switch as files write it: ``true``, ``'no'``, ``1``, ``True``; raises ValueError for anything else."""
    word = str(value).strip().lower()
    if word in ("true", "yes", "on", "1", "1.0"):
        return True
    if word in ("false", "no", "off", "0", "0.0", "none", ""):
        return False
    raise ValueError("expected true or false")


def as_count(value: Any) -> int:
    """A whole number written as ``4096``, ``"5e8"`` or ``1e9``; raises ValueError for anything else."""
    number = whole_number(value)
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError("expected a whole number")
    if abs(number) > 2**62:
        raise ValueError("expected a whole number below 2**62")
    return number


def as_number(value: Any) -> float:
    """A number; raises ValueError for anything else."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    number = float(value)
    if not abs(number) < 1e300:
        raise ValueError("expected a finite number")
    return number


def as_text(value: Any) -> str:
    """Text; raises ValueError for a list or a mapping."""
    if isinstance(value, dict | list):
        raise ValueError("expected text")
    return str(value).strip()


class Draft:
    """Collects what one file says; ``reading()`` ends it."""

    def __init__(self, file: ConfigFile, format_name: str) -> None:
        self.file = file
        self.format = format_name
        self._settings: dict[str, Setting] = {}
        self._questions: dict[str, str] = {}
        self._warnings: list[str] = []
        self._reasons: list[str] = []
        self._read: set[str] = set()
        self._extends: list[str] = []
        self._refers: list[str] = []

    # --- looking into the file

    def has(self, *keys: str) -> bool:
        return any(self.file.node(key) is not None for key in keys)

    def raw(self, *keys: str) -> Any:
        """The value of the first key that has one, as it stands; every key named counts as understood."""
        self._read.update(keys)
        return next((value for key in keys if (value := self.file.node(key)) is not None), None)

    def key_of(self, *keys: str) -> str:
        """The key that :meth:`raw` takes, as the file spells it."""
        return self.file.written(next((key for key in keys if self.file.node(key) is not None), keys[0]))

    def value(self, as_type: Callable[[Any], Any], *keys: str, asks: str | None = None) -> Any:
        """A value of a type, or ``None``; what cannot be read is a reason, what is left open a question on ``asks``."""
        value = self.raw(*keys)
        if value is None:
            return None
        if is_open(value):
            if asks:
                self.ask(asks, f"{self.key_of(*keys)} is {shown(value)}")
            return None
        try:
            return as_type(value)
        except (ValueError, TypeError, OverflowError) as error:
            wanted = str(error) if str(error).startswith("expected") else "expected a number"
            self.refuse(f"{self.key_of(*keys)}: got {shown(value)}; {wanted}")
            return None

    def flag(self, *keys: str, asks: str | None = None) -> bool | None:
        """A switch, or ``None`` when the file does not have it."""
        value = self.value(as_flag, *keys, asks=asks)
        return None if value is None else bool(value)

    def text(self, *keys: str, asks: str | None = None) -> str | None:
        value = self.value(as_text, *keys, asks=asks)
        return None if value in (None, "") else str(value)

    def count(self, *keys: str, asks: str | None = None) -> int | None:
        value = self.value(as_count, *keys, asks=asks)
        return None if value is None else int(value)

    # --- saying something of the job

    def take(self, path: str, *keys: str, as_type: Callable[[Any], Any] = as_count) -> Any:
        """States the job's ``path`` as these keys give it; returns the value, ``None`` when there is none."""
        value = self.value(as_type, *keys, asks=path)
        if value is not None:
            self.state(path, value, *keys)
        return value

    def state(self, path: str, value: Any, *keys: str, note: str = "") -> None:
        """States a value that follows from these keys (those that the file has); from none of them, it is a default."""
        present = [self.file.written(key) for key in keys if self.file.node(key) is not None]
        self._read.update(keys)
        remark = f" ({note})" if note else ""
        if present:
            self.found(path, value, f"{', '.join(present)}{remark}")
        else:
            self.default(path, value, f"no {self.file.written(keys[0])}{remark}")

    def found(self, path: str, value: Any, where: str) -> None:
        """States a value that stands in the file, but under none of its keys: a script's launcher or variable."""
        self._settings[path] = Setting(value, f"{self.file.name}: {where}")

    def imply(self, path: str, value: Any, why: str) -> None:
        """A value that a stated type or name means."""
        self._settings.setdefault(path, Setting(value, f"{self.file.name}: {why}", Rank.IMPLIED))

    def default(self, path: str, value: Any, why: str = "") -> None:
        """What the framework does as the file says nothing."""
        if path in self._questions:
            return  # the file speaks of it, so that nobody knows that the default holds
        origin = f"default of {self.format}{f': {why}' if why else ''}"
        self._settings.setdefault(path, Setting(value, origin, Rank.DEFAULT))

    def framework(self, name: str, is_engine: bool = True) -> None:
        """The software that runs the job; an engine's own file knows better than one of a trainer above it."""
        rank = Rank.IMPLIED if is_engine else Rank.DEFAULT
        self._settings["software.framework"] = Setting(name, f"{self.file.name}: a file of {self.format}", rank)

    def get(self, path: str) -> Any:
        """What is known so far of a key path."""
        return self._settings[path].value if path in self._settings else None

    def ask(self, path: str, why: str) -> None:
        self._questions.setdefault(path, f"{self.file.name}: {why}")

    def warn(self, text: str) -> None:
        self._warnings.append(f"{self.file.name}: {text}")

    def warn_mixed(self, wide: str, narrow: str, linear: str) -> None:
        """Two formats switched on together are no contradiction: the narrow one is the linears'."""
        self.warn(f"{wide} and {narrow} are both on: linears run in {linear}, everything else in {wide.lstrip('-')}")

    def refuse(self, text: str) -> None:
        self._reasons.append(f"{self.file.name}: {text}")

    def extend(self, *names: str) -> None:
        """Names files that this one changes: what it states wins over them."""
        self._extends += names

    def refer(self, *names: str) -> None:
        """Names files that hold beside this one, as a trainer's DeepSpeed file: to differ from it is an error."""
        self._refers += names

    def understood(self, *patterns: str) -> None:
        """Keys without effect on an iteration's time, so that they are not listed as unknown."""
        for key, _ in self.file.leaves():
            if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns):
                self._read.add(key)

    def reading(self) -> Reading:
        """What was said; keys that nobody read are listed in one warning."""
        unknown = [
            self.file.written(key)
            for key, value in self.file.leaves()
            if value not in (None, False) and not any(key == read or key.startswith(f"{read}.") for read in self._read)
        ]
        if unknown:
            more = f" and {len(unknown) - _MAX_LISTED} more" if len(unknown) > _MAX_LISTED else ""
            listed = ", ".join(key[:60] for key in unknown[:_MAX_LISTED])
            self.warn(f"keys without a meaning here, left out: {listed}{more}")
        questions = {path: why for path, why in self._questions.items() if path not in self._settings}
        return Reading(
            self.file.path,
            self.format,
            self._settings,
            questions,
            tuple(dict.fromkeys(self._warnings)),
            tuple(dict.fromkeys(self._reasons)),
            tuple(self._extends),
            tuple(self._refers),
        )
