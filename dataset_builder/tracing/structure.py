"""Structural choices of a block: what decides which operators run, as opposed to how large they are.

Two jobs whose blocks have the same structure share one trace. Fields that a block does not depend on keep their
default, so that they do not split the templates.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Literal

from dataset_builder.job.formats import BYTES_PER_ELEMENT, LinearFormat

TRACER_VERSION = "5"

Block = Literal["embedding", "layer", "encoder_norm", "mtp", "head", "optimizer"]


@dataclass(frozen=True, slots=True)
class BlockStructure:
    """The key of a template. Formats are those of :mod:`dataset_builder.job.precision`."""

    block: Block
    # what is computed
    normalization: str = "layernorm"
    norm_affine: bool = True
    norm_bias: bool = True
    norm_after: bool = False  # the norm follows the residual, and the embedding has one (BERT)
    activation: str = "gelu"
    bias: bool = True
    qkv_bias: bool = True
    position_embedding: str = "none"
    causal: bool = True
    grouped_queries: bool = False  # the unfused path copies keys and values to every query head of a group
    windowed: bool = False
    qk_norm: Literal["none", "head", "projection"] = "none"
    post_norm: bool = False
    parallel_block: bool = False
    dropout: bool = False
    attention: Literal["multi_head", "latent", "latent_compressed_queries"] = "multi_head"
    cross_attention: bool = False
    feed_forward: Literal["dense", "experts"] = "dense"
    shared_experts: bool = False
    token_types: bool = False
    head: Literal["lm", "mlm", "classification"] = "lm"
    frozen: bool = False  # only adapters have gradients
    adapters: tuple[str, ...] = ()  # linears that have one
    masked_positions: bool = False  # an mlm head gathers the masked positions first
    # how it is spread over ranks
    tensor: bool = False
    sequence_parallel: bool = False
    context: bool = False
    expert: bool = False
    expert_tensor: bool = False
    # in which formats
    compute: str = "fp32"
    params: str = "fp32"
    grad_accum: str = "fp32"
    attention_format: str = "fp32"
    lm_head: str = "fp32"
    linears: tuple[tuple[str, LinearFormat], ...] = ()  # linear name -> format, where it is not "same"
    autocast: bool = False
    accumulate: bool = False
    # by which kernels
    kernel: Literal["flash", "unfused"] = "flash"
    fused: bool = True
    recompute: Literal["none", "selective", "full"] = "none"
    # optimizer only
    optimizer: str = "adamw"
    main_params: str = "none"
    optimizer_state: str = "fp32"
    loss_scaling: bool = False

    def linear_format(self, name: str) -> LinearFormat:
        """The format of one linear layer's GEMMs (``qkv``, ``projection``, ``fc1``, ``fc2``, ...)."""
        return dict(self.linears).get(name, "same")

    @property
    def key(self) -> str:
        """Text that is equal exactly when two structures are: the fields that differ from their default."""
        parts = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if f.name == "block" or getattr(self, f.name) != f.default
        ]
        return " ".join(parts)

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{TRACER_VERSION} {self.key}".encode()).hexdigest()[:24]


# Formats of the quantised GEMM operands: forward operands, and the gradient operand of the backward GEMMs.
# Transformer Engine's "hybrid" recipes use e5m2 gradients; row-wise and block-wise recipes keep e4m3 everywhere.
FORWARD_FORMAT: dict[str, str] = {
    "fp8_delayed": "fp8_e4m3", "fp8_current": "fp8_e4m3", "fp8_tensorwise": "fp8_e4m3", "fp8_rowwise": "fp8_e4m3",
    "fp8_blockwise": "fp8_e4m3", "mxfp8": "mxfp8", "nvfp4": "nvfp4",
}  # fmt: skip
GRADIENT_FORMAT: dict[str, str] = {
    **FORWARD_FORMAT, "fp8_delayed": "fp8_e5m2", "fp8_current": "fp8_e5m2", "fp8_tensorwise": "fp8_e5m2",
}  # fmt: skip
# Scales from the largest value of the whole tensor of this very step: it is read once for them and once to be cast.
# Delayed scaling takes the scale of earlier steps; rows and blocks find theirs within the kernel that casts them.
TWO_PASS_RECIPES = ("fp8_current", "fp8_tensorwise", "nvfp4")


def element_bytes(fmt: str) -> float:
    """Bytes of one element; ``uint8`` and ``int32`` are what index and mask tensors use."""
    return {"uint8": 1.0, "int32": 4.0, "fp64": 8.0, "int16": 2.0}.get(fmt) or BYTES_PER_ELEMENT[fmt]
