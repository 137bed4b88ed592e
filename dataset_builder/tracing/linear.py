"""Linear layers and norms as one rank runs them: messages, quantisation, where weight gradients go.

Column- and row-parallel linears and sequence parallelism are Megatron-LM's (arXiv 1909.08053, 2205.05198). A module
takes a :class:`BlockContext`: the structure that says what runs, and the sizes (by the names of :mod:`symbols`) that
say how large it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from dataset_builder.tracing.collectives import FlashAttention, ReduceFromTensor, ScatterSequence, apply, ops
from dataset_builder.tracing.precision import TORCH_DTYPE, CudaAutocast
from dataset_builder.tracing.recorder import PlacingMode, scope
from dataset_builder.tracing.structure import FORWARD_FORMAT, GRADIENT_FORMAT, BlockStructure

AttentionRule = tuple[bool, int, bool, str]  # causal, window, dropout, input format
Attend = Callable[[Tensor, Tensor, Tensor, AttentionRule], Tensor]


def traced_attention(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
    """One flash kernel each way, as the trace sees it."""
    return apply(FlashAttention, q, k, v, rule)


@dataclass(frozen=True)
class BlockContext:
    """What a block needs to know: structure, sizes, who keeps the phase, and the autocast rules of the trace.

    ``attend`` is the flash kernel on [length, batch, heads, dimension]; who really runs a block brings a real one.
    """

    structure: BlockStructure
    sizes: Mapping[str, int]
    rules: CudaAutocast
    recorder: PlacingMode
    attend: Attend = traced_attention

    @property
    def is_scattered(self) -> bool:
        """Whether activations between linears are split along the sequence over the tensor ranks."""
        return self.structure.tensor and self.structure.sequence_parallel

    @property
    def full_length(self) -> int:
        """Positions attention sees on this rank before gathering over context ranks."""
        return self.sizes["z"] * self.sizes["t"] if self.is_scattered else self.sizes["s"]

    @property
    def local_length(self) -> int:
        """Positions of the residual stream on this rank."""
        return self.sizes["z"] if self.is_scattered else self.sizes["s"]

    @property
    def low(self) -> torch.dtype:
        return TORCH_DTYPE[self.structure.compute]

    @property
    def stream_dtype(self) -> torch.dtype:
        """Format of the residual stream: the parameters' (autocast keeps it in fp32)."""
        return TORCH_DTYPE[self.structure.params]

    def parameter(self, *shape: int) -> nn.Parameter:
        weight = torch.empty(*shape, dtype=TORCH_DTYPE[self.structure.params])
        return nn.Parameter(weight, requires_grad=not self.structure.frozen)

    def trained(self) -> BlockContext:
        """The same for an adapter, which is trained though the block is frozen."""
        return replace(self, structure=replace(self.structure, frozen=False, adapters=()))

    def to_compute(self, tensor: Tensor) -> Tensor:
        """The cast autocast would do before a linear layer."""
        if not self.structure.autocast:
            return tensor
        cast: Tensor = self.rules.cast(tensor, self.low)
        return cast


class MatmulRule(NamedTuple):
    """How one linear layer multiplies: its format and what happens to its input's gradient."""

    fmt: str  # "same" or a quantisation recipe
    compute: str
    gather: bool  # the input is scattered along the sequence
    reduce_gradient: bool  # the input is replicated over the tensor ranks
    ranks: int


def _transposed_mm(a: Tensor, b: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """Weight gradient ``a^T b``, added to ``main_grad`` in the GEMM's epilogue when there is one."""
    if main_grad is None:
        return a.t().mm(b)
    ops().mm_accumulate(a.t(), b, main_grad)
    return None


class ParallelMatmul(torch.autograd.Function):
    """``x @ weight^T`` with its messages and quantisations, forward and backward; gathers the input again for wgrad.

    A frozen weight has no gradient, and its input is not kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None, rule: MatmulRule
    ) -> Tensor:
        ctx.rule, ctx.main_grad, is_trained = rule, main_grad, ctx.needs_input_grad[1]
        leading = x.shape[:-1]
        if rule.fmt == "same":
            full = ops().all_gather(x, rule.ranks, "tensor") if rule.gather else x
            rows = full.reshape(-1, full.shape[-1])
            out = rows.mm(weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
            ctx.save_for_backward(x if is_trained else None, weight)
        else:
            fmt = FORWARD_FORMAT[rule.fmt]
            x_rows, x_columns = ops().quantize(x, fmt, rule.fmt, "input", is_trained)
            w_rows, w_columns = ops().quantize(weight, fmt, rule.fmt, "weight", True)
            full = ops().all_gather(x_rows, rule.ranks, "tensor") if rule.gather else x_rows
            out = ops().scaled_mm(full.reshape(-1, full.shape[-1]), w_rows.t(), fmt, rule.compute)
            if bias is not None:
                out = out + bias
            ctx.save_for_backward(x_columns if is_trained else None, w_columns)
        rank_factor = rule.ranks if rule.gather else 1
        return out.view(leading[0] * rank_factor, *leading[1:], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rule: MatmulRule = ctx.rule
        x, weight = ctx.saved_tensors
        shape = grad.shape
        flat = grad.reshape(-1, shape[-1])
        d_weight = None
        if rule.fmt == "same":
            d_input = flat.mm(weight)
            if x is not None:
                full = ops().all_gather(x, rule.ranks, "tensor") if rule.gather else x
                d_weight = _transposed_mm(flat, full.reshape(-1, full.shape[-1]), ctx.main_grad)
        else:
            grad_format = GRADIENT_FORMAT[rule.fmt]
            g_rows, g_columns = ops().quantize(flat, grad_format, rule.fmt, "gradient", x is not None)
            d_input = ops().scaled_mm(g_rows, weight.t(), grad_format, rule.compute)
            if x is not None and rule.gather:  # x is [features, rows]: gathered along the rows
                x = ops().all_gather(x.t(), rule.ranks, "tensor").t()
            if x is not None and ctx.main_grad is None:
                d_weight = ops().scaled_mm(g_columns, x.t(), grad_format, rule.compute)
            elif x is not None:
                ops().scaled_mm_accumulate(g_columns, x.t(), ctx.main_grad, grad_format)
        d_input = d_input.view(*shape[:-1], -1)
        if rule.gather:
            d_input = ops().reduce_scatter(d_input, rule.ranks, "tensor")
        elif rule.reduce_gradient:
            d_input = ops().all_reduce(d_input, "tensor")
        d_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        return d_input, d_weight, d_bias, None, None


class Linear(nn.Module):
    """A linear layer on one rank. ``split``: columns (output), rows (input) or none of the weight over tensor ranks."""

    def __init__(
        self, context: BlockContext, name: str, features: tuple[int, int], split: str, bias: bool = False
    ) -> None:
        super().__init__()
        self.context, self.name, self.split = context, name, split
        self.weight = context.parameter(features[1], features[0])
        self.bias = context.parameter(features[1]) if bias else None
        self.adapter = Adapter(context.trained(), features, split) if name in context.structure.adapters else None

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product, without the messages of a row-parallel output."""
        context, structure = self.context, self.context.structure
        is_column = self.split == "columns" and structure.tensor
        head_format = structure.lm_head if self.name == "lm_head" else structure.compute
        fmt = structure.linear_format(self.name)
        main_grad = getattr(self.weight, "main_grad", None) if structure.fused else None
        if fmt == "same" and not is_column and main_grad is None:
            if structure.autocast and head_format not in ("fp16", "bf16"):
                with torch.autocast("cpu", enabled=False):
                    return functional.linear(x.float(), self.weight, bias)
            dtype = TORCH_DTYPE[head_format]
            if not structure.autocast and x.dtype != dtype:
                return functional.linear(x.to(dtype), self.weight.to(dtype), None if bias is None else bias.to(dtype))
            return functional.linear(x, self.weight, bias)
        rule = MatmulRule(
            fmt,
            structure.compute,
            is_column and context.is_scattered,
            is_column and not context.is_scattered,
            context.sizes["t"],
        )
        if head_format == structure.compute:
            x, weight = context.to_compute(x), context.to_compute(self.weight)
            bias = None if bias is None else context.to_compute(bias)
        else:
            x, weight, main_grad = x.to(TORCH_DTYPE[head_format]), self.weight.to(TORCH_DTYPE[head_format]), None
            bias = None if bias is None else bias.to(TORCH_DTYPE[head_format])
        out = apply(ParallelMatmul, x, weight, bias, main_grad, rule)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out, bias = self.without_bias(x)
        return out if bias is None else out + bias

    def without_bias(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Output and the bias still to be added: by the fused kernel that follows, or after the row reduction."""
        structure = self.context.structure
        with scope(self.name):
            is_row = self.split == "rows" and structure.tensor
            is_fused_later = structure.fused and not structure.autocast and self.name in _BIAS_FUSED_LATER
            late = self.bias is not None and (is_row or is_fused_later)
            out = self.matmul(x, None if late else self.bias)
            if is_row and self.context.is_scattered:
                out = apply(ScatterSequence, out, self.context.sizes["t"], "tensor")
            elif is_row:
                out = apply(ReduceFromTensor, out)
            if self.adapter is not None:
                update = self.adapter(x)
                with scope("adapter.add", "adapter"):
                    out = out + update * 2.0  # a constant, alpha / rank
            return out, self.context.to_compute(self.bias) if late and self.bias is not None else None


class Adapter(nn.Module):
    """A low-rank update of a linear (LoRA): the first matrix is split as the linear's rows, the second as its columns.

    So only tensors of the rank's width are sent beside those of the linear itself.
    """

    def __init__(self, context: BlockContext, features: tuple[int, int], split: str) -> None:
        super().__init__()
        rank = context.sizes["R"]
        self.down = Linear(context, "adapter.down", (features[0], rank), "rows" if split == "rows" else "none")
        self.up = Linear(context, "adapter.up", (rank, features[1]), "columns" if split == "columns" else "none")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(self.down(x))
        return out


_BIAS_FUSED_LATER = ("fc1", "fc2", "projection", "cross_projection")


class Norm(nn.Module):
    """RMSNorm (fp32 statistics, as Llama writes it) or LayerNorm."""

    def __init__(self, context: BlockContext, name: str, columns: int, bias: bool = True) -> None:
        super().__init__()
        structure = context.structure
        self.name, self.columns, self.is_rms = name, columns, structure.normalization == "rmsnorm"
        self.weight = context.parameter(columns) if structure.norm_affine else None
        has_bias = structure.norm_affine and structure.norm_bias and bias and not self.is_rms
        self.bias = context.parameter(columns) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        with scope(self.name, "norm"):
            if not self.is_rms:
                return functional.layer_norm(x, (self.columns,), self.weight, self.bias, 1e-5)
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
            out = wide.type_as(x)
            return out if self.weight is None else out * self.weight


def dropout(x: Tensor, structure: BlockStructure) -> Tensor:
    if not structure.dropout:
        return x
    out: Tensor = torch.ops.aten.native_dropout(x, 0.1, True)[0]
    return out
