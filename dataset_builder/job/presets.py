"""The shipped models: sizes by name from ``presets.yaml``, each with the published parameter count and its source."""

from __future__ import annotations

import difflib
import functools
from importlib import resources
from typing import Any

import yaml


@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    text = resources.files("dataset_builder.job").joinpath("presets.yaml").read_text(encoding="utf-8")
    data: dict[str, dict[str, Any]] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return data


def preset_names() -> tuple[str, ...]:
    """The shipped models."""
    return tuple(_presets())


def published_parameters(name: str) -> tuple[float, float | None, str]:
    """Parameters and, for a mixture of experts, active parameters as published; and where."""
    facts = _presets()[name]["published"]
    return float(facts["parameters"]), facts.get("active"), str(facts["source"])


def preset(name: Any) -> dict[str, Any]:
    """The sizes of a shipped model; raises ValueError with the nearest names when there is none of that name."""
    known = {key.lower(): key for key in preset_names()}
    key = known.get(str(name).strip().lower())
    if key is None:
        near = difflib.get_close_matches(str(name).lower(), known, n=5, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"the shipped models are {', '.join(known.values())}"
        raise ValueError(f"preset: got {str(name)[:80]!r}; expected a shipped model ({hint})")
    return {"name": key, **_presets()[key]["sizes"]}
