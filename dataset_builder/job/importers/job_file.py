"""Writes an imported job as a job file: every value with a comment that says where it comes from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dataset_builder.job.importers.merging import ImportedJob

_ORDER = ("name", "model", "batch", "precision", "parallel", "cluster", "software", "optimizer", "training", "price")
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_NOT_TEXT = ("true", "false", "yes", "no", "on", "off", "null", "none", "y", "n")
_COMMENT_COLUMN = 44
_MAX_COMMENT = 160


def job_file(imported: ImportedJob, files: str) -> str:
    """The text of a job file that reads as this job; what it leaves to the predictor stands at its end."""
    lines = [f"# Read from {_one_line(files)}. Behind each value: the file and the key it comes from."]
    keys = [key for key in _ORDER if key in imported.data] + [key for key in imported.data if key not in _ORDER]
    for key in keys:
        lines += _lines(key, imported.data[key], key, imported.origins)
    assumed = imported.job.resolved().assumed
    if assumed:
        lines += ["", "# Left open by the files; the predictor takes:"]
        lines += [f"#   {_one_line(note)}" for note in assumed]
    return "\n".join(lines) + "\n"


def _lines(key: str, value: Any, path: str, origins: Mapping[str, str], indent: int = 0) -> list[str]:
    margin = "  " * indent
    if isinstance(value, Mapping) and value:
        lines = [f"{margin}{key}:"]
        for child, inner in value.items():
            lines += _lines(str(child), inner, f"{path}.{child}", origins, indent + 1)
        return lines
    text = f"{margin}{key}: {_value(value)}"
    return [f"{text:<{_COMMENT_COLUMN}}  # {_one_line(origins.get(path, 'derived'))}"]


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, str) and not (_PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT):
        return json.dumps(value)
    return str(value)


def _one_line(text: str) -> str:
    plain = "".join(character if character.isprintable() else " " for character in text)
    return plain if len(plain) <= _MAX_COMMENT else f"{plain[: _MAX_COMMENT - 3]}..."
