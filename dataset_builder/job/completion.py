"""What a shell offers after ``--set`` and ``--compare``: every key path of a job, and the values it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from dataset_builder.job.hardware import device_names, link_names
from dataset_builder.job.precision import PRECISION_PRESETS
from dataset_builder.job.presets import preset_names
from dataset_builder.job.reasons import model_in
from dataset_builder.job.schema import WHOLE_MODEL, TrainingJob

_SEPARATOR = ","


def settings_starting_with(prefix: str) -> list[str]:
    """Completions of ``KEY.PATH=V1,V2`` as far as it is typed: key paths before the equals sign, values after it."""
    path, equals, typed = prefix.partition("=")
    if not equals:
        return [f"{known}=" for known in key_paths() if known.startswith(path)]
    before = typed[: typed.rfind(_SEPARATOR) + 1]
    return [f"{path}={before}{value}" for value in values_of(path) if f"{before}{value}".startswith(typed)]


def key_paths() -> list[str]:
    """Every key path of a job, groups before what they hold."""
    return [*WHOLE_MODEL, *_paths_below(TrainingJob, "")]


def values_of(path: str) -> tuple[str, ...]:
    """The names that a key path takes; empty where any number or text goes."""
    named = {
        "model.preset": preset_names, "cluster.gpu": device_names, "cluster.intra_node": link_names,
        "cluster.inter_node": link_names,
    }  # fmt: skip
    if path in named:
        return named[path]()
    if path in ("precision", "precision.preset"):
        return tuple(PRECISION_PRESETS)
    *parents, key = path.split(".")
    model: type[BaseModel] | None = TrainingJob
    for part in parents:
        model = model_in(model.model_fields[part].annotation) if model and part in model.model_fields else None
    if model is None or key not in model.model_fields:
        return ()
    below = model_in(model.model_fields[key].annotation)
    if below is not None:  # a group that may be given by one name
        first = next((name for name in ("name", "mode") if name in below.model_fields), None)
        return tuple(_literals(below.model_fields[first].annotation)) if first else ()
    return tuple(_literals(model.model_fields[key].annotation))


def _paths_below(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if field.exclude:
            continue
        yield prefix + name
        below = model_in(field.annotation)
        if below is not None and get_origin(field.annotation) is not tuple:
            yield from _paths_below(below, f"{prefix}{name}.")


def _literals(annotation: Any) -> Iterator[str]:
    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) not in (dict, tuple):  # an optional value, not one of many
        for part in get_args(annotation):
            yield from _literals(part)
