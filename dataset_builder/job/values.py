"""Field types shared by every part of a job: counts written as ``4096``, ``"4096"`` or ``1e12``, quantities with their
unit and what they may plausibly be, and frozen models."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def whole_number(value: Any) -> Any:
    """Reads ``"4096"``, ``"1e12"`` and ``4096.0`` as integers; leaves everything else to pydantic."""
    if isinstance(value, bool):
        raise ValueError("expected a whole number, not true or false")
    if isinstance(value, str):
        text = value.strip()
        try:
            value = int(text) if text.isdecimal() and len(text) < 20 else float(text)
        except ValueError:
            raise ValueError("expected a whole number such as 4096, '4096' or 1e12") from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    return value


def in_unit(unit: str, example: str, least: float = -math.inf, most: float = math.inf) -> BeforeValidator:
    """A field in plain ``unit``: "80GB", and 80 where it is meant in GB, are told what the field is in.

    ``least`` and ``most`` only tell a wrong unit from a small device: what no hardware that trains a model has.
    """

    def read(value: Any) -> Any:
        try:
            number = float(value) if isinstance(value, (str, int, float)) else None
        except OverflowError:
            number = math.inf
        except ValueError:
            raise ValueError(f"expected {unit}, e.g. {example}") from None
        if number is not None and (number < least or most < number < math.inf):
            raise ValueError(f"expected {unit}, e.g. {example}")
        return value

    return BeforeValidator(read)


Count = Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=2**62)]
CountOrZero = Annotated[int, BeforeValidator(whole_number), Field(ge=0, le=2**62)]
# Layers, stages and the GPUs of a node are walked one by one: no real job has more, and a slip of the pen is told.
WalkedCount = Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=10_000)]
WalkedCountOrZero = Annotated[int, BeforeValidator(whole_number), Field(ge=0, le=10_000)]


class Frozen(BaseModel):
    """An immutable value; unknown keys are errors, so that a misspelt key is never ignored."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, protected_namespaces=()
    )
