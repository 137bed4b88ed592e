"""Floating-point formats by name, and what an element of each takes; without any dependency.

What only measures needs this module and torch, on a machine that has nothing else.
"""

from __future__ import annotations

from typing import Literal

Format = Literal["fp32", "tf32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4", "int64", "bool"]
StorageFormat = Literal["fp32", "fp16", "bf16"]
LinearFormat = Literal[
    "same", "fp8_delayed", "fp8_current", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"
]

BYTES_PER_ELEMENT: dict[str, float] = {
    "fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0,
    "mxfp8": 1.0 + 1 / 32,  # one e8m0 scale per 32 elements, OCP MX v1.0
    "nvfp4": 0.5 + 1 / 16,  # one e4m3 scale per 16 elements
    "int64": 8.0, "bool": 1.0,
}  # fmt: skip
