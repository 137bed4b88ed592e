"""Floating-point formats and the precision policy of a job: which format each operator, weight copy and message has.

A policy starts from a preset; single fields override it. ``params`` may stay ``None``: mixed presets store the weights
as the framework does (16 bit with fp32 master weights in Megatron-style frameworks, fp32 under autocast elsewhere),
and :meth:`TrainingJob.resolved` fills it in.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from dataset_builder.job.formats import LinearFormat, StorageFormat
from dataset_builder.job.reasons import shown
from dataset_builder.job.spellings import value_hint
from dataset_builder.job.values import CountOrZero, Frozen


class HighPrecisionLayers(Frozen):
    """Layers at either end whose linears stay in the compute format."""

    first: CountOrZero = 0
    last: CountOrZero = 0


class PrecisionOverride(Frozen):
    """Formats of the modules that a glob names, e.g. ``layers.*.mlp.*``; the last match wins."""

    modules: str
    linear: LinearFormat


class PrecisionPolicy(Frozen):
    """The format of every operator, cast, weight copy and message of a training step."""

    preset: str | None = None
    compute: Literal["fp32", "tf32", "fp16", "bf16"] = "bf16"
    linear: LinearFormat = "same"
    attention: Literal["fp32", "fp16", "bf16", "fp8"] | None = None
    lm_head: Literal["fp32", "tf32", "fp16", "bf16"] | None = None
    params: StorageFormat | None = None
    main_params: Literal["fp32", "fp16", "bf16", "none"] | None = None
    grad_accum: StorageFormat | None = None
    grad_reduce: StorageFormat | None = None
    param_gather: Literal["fp32", "fp16", "bf16", "fp8"] | None = None
    optimizer_state: StorageFormat = "fp32"
    loss_scaling: bool = False
    high_precision_layers: HighPrecisionLayers = HighPrecisionLayers()
    overrides: tuple[PrecisionOverride, ...] = Field(default=())

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"preset": data}
        if not isinstance(data, dict) or data.get("preset") is None:
            return data
        name = data["preset"]
        if not isinstance(name, str) or name not in PRECISION_PRESETS:
            near = value_hint("precision", name, tuple(PRECISION_PRESETS))
            raise ValueError(f"preset: got {shown(name)}; expected one of {', '.join(PRECISION_PRESETS)}{near}")
        return {**PRECISION_PRESETS[name], **{key: value for key, value in data.items() if value is not None}}

    @property
    def is_mixed(self) -> bool:
        """Whether weights are kept in a wider format than the one that is computed in."""
        return "fp32" in (self.params, self.main_params) and self.compute not in ("fp32", "tf32")

    @property
    def label(self) -> str:
        """The measurement tables' name of this policy's family, for grouping."""
        if self.linear != "same":
            return {"mxfp8": "mxfp8", "nvfp4": "nvfp4"}.get(self.linear, "fp8_mixed")
        if self.compute in ("fp32", "tf32"):
            return self.compute
        return f"{self.compute}_mixed" if self.main_params == "fp32" or self.params == "fp32" else self.compute


def _pure(name: str, storage: str) -> dict[str, Any]:
    return {
        "compute": name, "params": storage, "main_params": "none", "grad_accum": storage, "grad_reduce": storage,
        "param_gather": storage, "optimizer_state": storage, "attention": storage, "lm_head": name,
    }  # fmt: skip


def _mixed(compute: str, linear: str = "same") -> dict[str, Any]:
    return {"compute": compute, "linear": linear, "loss_scaling": compute == "fp16"}


PRECISION_PRESETS: dict[str, dict[str, Any]] = {
    "fp32": _pure("fp32", "fp32"),
    "tf32": _pure("tf32", "fp32"),
    "fp16": _pure("fp16", "fp16"),
    "bf16": _pure("bf16", "bf16"),
    "fp16_mixed": _mixed("fp16"),
    "bf16_mixed": _mixed("bf16"),
    "fp8_mixed": _mixed("bf16", "fp8_delayed"),
    "fp8_tensorwise": _mixed("bf16", "fp8_tensorwise"),
    "fp8_rowwise": _mixed("bf16", "fp8_rowwise"),
    "fp8_blockwise": _mixed("bf16", "fp8_blockwise"),
    "mxfp8": _mixed("bf16", "mxfp8"),
    "nvfp4": _mixed("bf16", "nvfp4"),
}


def resolve_precision(policy: PrecisionPolicy, sixteen_bit_params: bool) -> PrecisionPolicy:
    """Fills the fields a mixed preset leaves to the framework.

    ``sixteen_bit_params``: the framework stores 16-bit weights and keeps fp32 master weights in the optimizer
    (Megatron, DeepSpeed); otherwise weights are fp32 and autocast casts them (torch AMP).
    """
    low = policy.compute if policy.compute in ("fp16", "bf16") else "fp32"
    params = policy.params or (low if sixteen_bit_params else "fp32")
    main = policy.main_params or ("fp32" if params != "fp32" else "none")
    # fp16 gradients are reduced and kept in fp16 by loss-scaled frameworks; bf16 gradients are accumulated in fp32.
    grads = "fp16" if params == "fp16" else "fp32"
    return policy.model_copy(
        update={
            "params": params,
            "main_params": main,
            "grad_accum": policy.grad_accum or grads,
            "grad_reduce": policy.grad_reduce or policy.grad_accum or grads,
            "param_gather": policy.param_gather or params,
            "attention": policy.attention or low,
            "lm_head": policy.lm_head or policy.compute,
        }
    )
