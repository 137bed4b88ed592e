"""Reads a file of another tool into plain values: YAML, JSON, TOML, or the text of a launch script.

Every parser is bounded as a job file's is: a size limit, no aliases, no deep nesting, no repeated keys, UTF-8 only.
A file named inside a file is never opened. Raises JobError naming the file and what is wrong with it.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataset_builder.job.document import MAX_BYTES, parse_document
from dataset_builder.job.errors import JobError

_MAX_DEPTH = 32
_SCRIPT_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch", ".sub")


@dataclass(frozen=True)
class ConfigFile:
    """A file's values by dotted key, or its text when it is a launch script.

    ``spelling`` holds the key as the file writes it where a reader renamed it (``--num-layers`` for ``num_layers``).
    """

    path: str
    values: Mapping[str, Any] = field(default_factory=dict)
    script: str | None = None
    spelling: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The file as comments and messages name it."""
        return "standard input" if self.path == "-" else Path(self.path).name

    def written(self, key: str) -> str:
        return self.spelling.get(key, key)

    def node(self, key: str) -> Any:
        """The value under a dotted key, a mapping too; ``None`` when there is none."""
        if key in self.values:
            return self.values[key]
        node: Any = self.values
        for part in key.split("."):
            if not isinstance(node, Mapping):
                return None
            node = node.get(part)
        return node

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Every dotted key with its value; a list is one value."""
        yield from _leaves(self.values, "")


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_config_file(path: str) -> ConfigFile:
    """Reads one file (``-``: standard input) in the notation that its name or its content says."""
    raw = _bytes(path)
    name = "standard input" if path == "-" else path
    if len(raw) > MAX_BYTES:
        raise JobError([f"got more than {MAX_BYTES} bytes; expected a configuration file"], name)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JobError([f"byte {error.start}: not UTF-8 text; expected a configuration file"], name) from None
    suffix = Path(path).suffix.lower()
    if suffix in _SCRIPT_SUFFIXES or text.startswith("#!") or (suffix not in (".yaml", ".yml") and _is_script(text)):
        return ConfigFile(path, script=text)
    if suffix == ".toml" or (suffix not in (".json", ".yaml", ".yml") and _is_toml(text)):
        values = _toml(text, name)
    elif suffix == ".json":
        values = _json(text, name)
    else:
        values = parse_document(raw, name)
    if not isinstance(values, dict):
        raise JobError([f"got {type(values).__name__} at the top; expected a mapping of keys to values"], name)
    return ConfigFile(path, values=_text_keys(values))


def _bytes(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise JobError([f"cannot read the file: {reason}"], path) from None


def _is_script(text: str) -> bool:
    return bool(re.search(r"^\s*--[a-z][a-z0-9_-]+\s", text, re.MULTILINE)) and "=" in text


def _is_toml(text: str) -> bool:
    return bool(re.search(r"^\[[a-z_.]+\]\s*$", text, re.MULTILINE)) and not text.lstrip().startswith(("{", "- "))


def _toml(text: str, name: str) -> Any:
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise JobError([f"not TOML: {str(error)[:120]}"], name) from None
    _refuse_deep(values, name)
    return values


def _json(text: str, name: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"key {twice[:80]!r} is given twice; expected once")
        return values

    try:
        values = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise JobError([f"not JSON: {str(error)[:160]}"], name) from None
    _refuse_deep(values, name)
    return values


def _refuse_deep(values: Any, name: str) -> None:
    level, depth = [values], 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise JobError([f"nested more than {_MAX_DEPTH} deep; expected a configuration file"], name)
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]


def _text_keys(value: Any) -> Any:
    """Keys as text: YAML may make a number of one."""
    if isinstance(value, dict):
        return {str(key): _text_keys(child) for key, child in value.items()}
    return value
