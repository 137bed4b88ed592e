"""``--set KEY.PATH=VALUE`` of every command, as key paths to texts."""

from __future__ import annotations

from collections.abc import Sequence


def read_settings(settings: Sequence[str]) -> dict[str, str]:
    """Key paths to texts, which a job reads as the YAML of its file; raises ValueError for anything else."""
    overrides: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            raise ValueError(f"--set {setting}: expected KEY.PATH=VALUE, e.g. --set parallel.tensor=8")
        overrides[key.strip()] = value
    return overrides
