"""Reads a job document: YAML (so JSON too) into plain values, without anything YAML can surprise with.

Safe tags only, ``1e-4`` is a number, a date is text, a repeated key is an error, aliases and deep nesting are refused.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dataset_builder.job.errors import JobError

MAX_BYTES = 2**20
_MAX_DEPTH = 32
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _JobLoader(_Base):  # type: ignore[misc]  # the C loader is untyped
    """The safe loader with plain numbers, no dates and no repeated keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _Refused(f"line {key.start_mark.line + 1}: key {key.value!r} is given twice; expected once")
                seen.add(key.value)
        result: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return result


class _Refused(Exception):
    """YAML that a job may not contain."""


_JobLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rsplit(":", 1)[1] in ("bool", "null", "int")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# Whole numbers without YAML 1.1's octal and base-60 forms ("010", "1:30"), which nobody means.
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
for _first in "-+0123456789.":
    _JobLoader.yaml_implicit_resolvers[_first] = [
        ("tag:yaml.org,2002:int", _INT),
        ("tag:yaml.org,2002:float", _FLOAT),
    ]


@dataclass(frozen=True, slots=True)
class JobText:
    """A job before it is parsed: a file or its text, its name for messages, and the folder its paths start from."""

    content: Path | bytes
    name: str
    folder: Path
    is_line: bool = False  # one of several on standard input

    def values(self) -> Any:
        """Its plain values; raises JobError when it cannot be read or is not YAML."""
        if isinstance(self.content, Path):
            return parse_document(_read(self.content), self.name)
        is_one_line = b"\n" not in self.content.strip()
        return (_parse_line if is_one_line else parse_document)(self.content, self.name)


def job_texts(source: str | Path) -> Iterator[JobText]:
    """The jobs of a file (``-``: standard input, which may hold a job a line, each a JSON object of its own)."""
    if str(source) != "-":
        yield job_text(source)
        return
    stream = sys.stdin.buffer
    lines = [stream.readline(MAX_BYTES + 1)]
    if not _is_json_object(lines[0]):  # one job over several lines, or a broken line before others
        lines.append(stream.readline(MAX_BYTES + 1))
    if not _is_json_object(lines[-1]):
        yield JobText(b"".join(lines) + stream.read(MAX_BYTES + 1), "standard input", Path())
        return
    following = iter(lambda: stream.readline(MAX_BYTES + 1), b"")
    for number, line in enumerate(itertools.chain(lines, following), start=1):
        if line.strip():
            yield JobText(line, f"standard input, line {number}", Path(), is_line=True)


def _is_json_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def job_text(source: str | Path | JobText) -> JobText:
    """The whole of a file (``-``: standard input) as one job."""
    if isinstance(source, JobText):
        return source
    if str(source) == "-":
        return JobText(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input", Path())
    path = Path(source)
    return JobText(path, str(path), path.parent)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise JobError([f"cannot read the file: {getattr(error, 'strerror', None) or error}"], str(path)) from None


def parse_document(raw: bytes, name: str) -> Any:
    """The values of a YAML text; raises JobError naming the line of what is wrong."""
    if len(raw) > MAX_BYTES:
        raise JobError([f"got more than {MAX_BYTES} bytes; expected a job, which is a page of text"], name)
    try:
        text = raw.decode("utf-8-sig")
        _refuse_traps(text)
        return yaml.load(text, Loader=_JobLoader)
    except UnicodeDecodeError as error:
        raise JobError([f"byte {error.start}: not UTF-8 text; expected YAML"], name) from None
    except _Refused as error:
        raise JobError([str(error)], name) from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, TypeError, AttributeError, KeyError) as error:
        # the last two: PyYAML's own constructors, where a tag such as !!timestamp stands before what is none
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise JobError([f"{where}not YAML: {getattr(error, 'problem', None) or error}"], name) from None


def _parse_line(line: bytes, name: str) -> Any:
    """The values of a text of one line, which is told without its number; a JSON object, in JSON's terms."""
    try:
        return parse_document(line.strip(), name)
    except JobError as error:
        broken = _broken_json(line)
        reasons = [broken] if broken else [re.sub(r"^line 1(: |, )", "", reason) for reason in error.reasons]
        raise JobError(reasons, name) from None


def _broken_json(line: bytes) -> str | None:
    """Where a line stops to be JSON, if it begins as JSON objects do and YAML seldom does."""
    if not re.match(rb'\s*\{\s*"', line):
        return None
    try:
        json.loads(line.strip())
    except json.JSONDecodeError as error:
        return f"column {error.colno}: not JSON: {error.msg}"
    except (ValueError, RecursionError):
        return None  # not UTF-8, or nested too deep, which is told as of any document
    return None


def _refuse_traps(text: str) -> None:
    """Aliases multiply (a few lines can stand for gigabytes) and deep nesting exhausts the stack: refuse both."""
    depth = 0
    for event in yaml.parse(text, Loader=_Base):
        if isinstance(event, yaml.AliasEvent):
            raise _Refused(f"line {_line(event)}: YAML alias *{event.anchor}; expected the value itself")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                raise _Refused(f"line {_line(event)}: nested more than {_MAX_DEPTH} deep; expected a job")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 0
