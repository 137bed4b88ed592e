"""Says what is wrong with a job in the user's terms: ``key.path: got VALUE; expected ...``, one reason per mistake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dataset_builder.job.errors import suggestion
from dataset_builder.job.presets import preset_names
from dataset_builder.job.spellings import key_hint, value_hint

_EXPECTED = {
    "int_parsing": "a whole number such as 4096",
    "int_type": "a whole number such as 4096",
    "int_from_float": "a whole number such as 4096",
    "float_parsing": "a number such as 1e12",
    "float_type": "a number such as 1e12",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "invalid_key": "text as a key",
}
_LIMITS = {"greater_than_equal": ("at least", "ge"), "greater_than": ("more than", "gt"),
           "less_than_equal": ("at most", "le"), "less_than": ("less than", "lt")}  # fmt: skip

_WAYS_TO_A_MODEL = ("preset", "config", "sizes", "overrides")  # no fields: they are resolved to sizes


def reasons_of(error: ValidationError, root: type[BaseModel], data: Any = None) -> list[str]:
    """One reason per mistake. ``data`` is the mapping as the user wrote it, for the spelling of key paths."""
    reasons: list[str] = []
    for detail in error.errors(include_url=False):
        path = _written_path([str(part) for part in detail["loc"]], data)
        if detail["type"] == "value_error":
            for line in str(detail["ctx"]["error"]).splitlines():
                reasons.append(_placed(path, line, detail["input"]))
        else:
            reasons.append(f"{path or 'job'}: {_explain(dict(detail), root)}")
    return list(dict.fromkeys(reasons))


def shown(value: Any) -> str:
    """A value as an error message quotes it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _placed(path: str, line: str, value: Any) -> str:
    """Puts a validator's own message behind its key path; such a message may begin with the key it is about."""
    key, separator, rest = line.partition(": ")
    if separator and key.replace("_", "").replace(".", "").isalnum():
        return f"{path}.{key}: {rest}" if path else line
    if line.startswith("expected"):
        return f"{path or 'job'}: got {shown(value)}; {line}"
    return f"{path or 'job'}: {line}"


def _explain(detail: dict[str, Any], root: type[BaseModel]) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        return "missing; expected a value"
    if kind == "extra_forbidden":
        *parents, key = detail["loc"]
        known = _known_at(root, parents)
        sections = {name: _known_at(root, [name]) for name in root.model_fields}
        hint = key_hint([str(part) for part in parents], str(key), sections)
        if hint is not None:
            return f"unknown key; {hint}"
        return f"unknown key{suggestion(str(key), known)}; expected one of {', '.join(known)}"
    if kind in _LIMITS:
        words, name = _LIMITS[kind]
        return f"got {shown(value)}; expected {words} {context[name]}"
    if kind == "literal_error":
        options = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        near = value_hint(str(detail["loc"][-1]), value, options)
        return f"got {shown(value)}; expected one of {', '.join(options)}{near}"
    if kind == "model_type" and detail["loc"] == ("model",) and isinstance(value, str):
        named = value if value in preset_names() else "llama3-8b"
        return f"got {shown(value)}; expected a mapping, e.g. {{preset: {named}}}"
    if kind in _EXPECTED:
        return f"got {shown(value)}; expected {_EXPECTED[kind]}"
    return f"got {shown(value)}; {detail['msg']}"


def _known_at(root: type[BaseModel], parents: Sequence[int | str]) -> list[str]:
    """The keys that may be written at a path."""
    return [*(_WAYS_TO_A_MODEL if list(parents) == ["model"] else ()), *_keys_at(root, parents)]


def _keys_at(root: type[BaseModel], parents: Sequence[int | str]) -> list[str]:
    """The keys of the model that a path leads to."""
    model: type[BaseModel] | None = root
    for part in parents:
        if model is not None and part in model.model_fields:
            model = model_in(model.model_fields[str(part)].annotation)
    return [name for name, field in model.model_fields.items() if not field.exclude] if model else []


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, inside an optional or a list too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := model_in(part))), None)


def _written_path(parts: list[str], data: Any) -> str:
    """The key path as the user wrote it: model sizes may stand under ``sizes`` or ``overrides``."""
    model = data.get("model") if isinstance(data, Mapping) else None
    if len(parts) > 1 and parts[0] == "model" and isinstance(model, Mapping):
        for group in ("overrides", "sizes"):
            if isinstance(model.get(group), Mapping) and (parts[1] in model[group] or group == "sizes"):
                return ".".join(["model", group, *parts[1:]])
    return ".".join(parts)
