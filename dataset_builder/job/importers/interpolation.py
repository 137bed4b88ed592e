"""Resolves ``${...}`` in a document as OmegaConf and Hydra do: references, relative ones, and small arithmetic.

What refers to nothing, to itself, or to a variable of the environment without a default stays as it is written, so
that its reader asks for it. Bounded in depth and in length; nothing is evaluated but the listed functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_MAX_STEPS = 64
_MAX_CHARACTERS = 4096


def interpolated(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with every reference that can be followed replaced by its value."""
    return {key: _resolved(value, document, (key,)) for key, value in document.items()}


def _resolved(value: Any, root: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        return {key: _resolved(child, root, (*path, str(key))) for key, child in value.items()}
    if isinstance(value, str) and "${" in value:
        return _substituted(value, root, path)
    return value


def _substituted(text: str, root: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    open_ends: list[str] = []
    current: Any = text
    for _ in range(_MAX_STEPS):
        match = _INNERMOST.search(current) if isinstance(current, str) else None
        if match is None or len(current) > _MAX_CHARACTERS:
            break
        found = _lookup(match[1].strip(), root, path)
        if match.span() == (0, len(current)) and found is not None:
            current = found
        else:
            if found is None or isinstance(found, list | Mapping):
                open_ends.append(match[0])
                found = f"\0{len(open_ends) - 1}\0"  # set aside, so that it is not looked up again
            current = f"{current[: match.start()]}{found}{current[match.end() :]}"
    if isinstance(current, str):
        for index in reversed(range(len(open_ends))):
            current = current.replace(f"\0{index}\0", open_ends[index])
        return current[:_MAX_CHARACTERS]
    return current


def _lookup(reference: str, root: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    function, colon, arguments = reference.partition(":")
    if colon:
        return _call(function.strip(), [part.strip() for part in arguments.split(",")])
    levels = len(reference) - len(reference.lstrip("."))
    parts = [part for part in reference.split(".") if part]
    starts = [path[: max(0, len(path) - levels)]] if levels else [(), path[:1]]
    if not levels and len(parts) > 1:
        starts.append(())
        # A launcher nests the whole document under one more name (``${training.run.name}``).
        if root.get(parts[0]) is None:
            return _at(root, parts[1:])
    return next((value for start in starts if (value := _at(root, [*start, *parts])) is not None), None)


def _at(node: Any, parts: list[str]) -> Any:
    for part in parts:
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return None if isinstance(node, Mapping) else node


def _call(function: str, arguments: list[str]) -> Any:
    if function == "oc.env":
        return _number(arguments[1]) if len(arguments) > 1 else None
    if function in ("multiply", "divide", "divide_floor", "divide_ceil", "add", "subtract", "int", "eval"):
        numbers = [_number(argument) for argument in arguments]
        if not all(isinstance(number, int | float) for number in numbers) or not numbers:
            return None
        result = numbers[0]
        for number in numbers[1:]:
            result = _arithmetic(function, result, number)
            if result is None:
                return None
        return result
    # Primus writes ${NAME:default}
    return _number(":".join([*arguments])) if re.fullmatch(r"[A-Z][A-Z0-9_]*", function) and arguments != [""] else None


def _arithmetic(function: str, one: Any, other: Any) -> Any:
    if max(abs(one), abs(other)) > 1e15 or (function.startswith("divide") and other == 0):
        return None
    if function == "multiply":
        return one * other
    if function == "add":
        return one + other
    if function == "subtract":
        return one - other
    quotient = one / other
    return (
        -(-one // other) if function == "divide_ceil" else int(quotient) if quotient == int(quotient) else one // other
    )


def _number(text: str) -> Any:
    try:
        return int(text) if re.fullmatch(r"[-+]?\d{1,18}", text) else float(text)
    except ValueError:
        return text.strip("'\"")
