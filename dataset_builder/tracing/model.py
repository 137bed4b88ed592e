"""The reference parallel transformer, as one rank runs it: rank-local sizes, real autograd, marked fusion regions.

Tensors between blocks are [sequence, batch, hidden]. A module takes a :class:`BlockContext`: the structure that says
what runs, and the sizes (by the names of :mod:`symbols`) that say how large it is. Parallelism is Megatron-LM's
(arXiv 1909.08053, 2205.05198): column- and row-parallel linears, sequence parallelism, a parallel vocabulary, gathered
keys and values under context parallelism, all-to-all to the experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dataset_builder.tracing.collectives import (
    AllToAll,
    CopyToTensor,
    FlashAttention,
    GatherSequence,
    Permute,
    ReduceFromTensor,
    RelativeShift,
    ScatterSequence,
    ops,
)
from dataset_builder.tracing.precision import TORCH_DTYPE, CudaAutocast
from dataset_builder.tracing.recorder import Recorder, resume_scope, scope
from dataset_builder.tracing.structure import FORWARD_FORMAT, GRADIENT_FORMAT, BlockStructure


@dataclass(frozen=True)
class BlockContext:
    """What a block needs to know: structure, sizes, and the recorder and autocast rules of the trace."""

    structure: BlockStructure
    sizes: Mapping[str, int]
    rules: CudaAutocast
    recorder: Recorder

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
        return nn.Parameter(torch.empty(*shape, dtype=TORCH_DTYPE[self.structure.params]))

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
    """``x @ weight^T`` with its messages and quantisations, forward and backward; gathers the input again for wgrad."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, main_grad: Tensor | None, rule: MatmulRule
    ) -> Tensor:
        ctx.rule, ctx.main_grad, ctx.has_bias = rule, main_grad, bias is not None
        leading = x.shape[:-1]
        if rule.fmt == "same":
            full = ops().all_gather(x, rule.ranks, "tensor") if rule.gather else x
            rows = full.reshape(-1, full.shape[-1])
            out = rows.mm(weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
            ctx.save_for_backward(x, weight)
        else:
            fmt = FORWARD_FORMAT[rule.fmt]
            x_rows, x_columns = ops().quantize(x, fmt, rule.fmt, "input", True)
            w_rows, w_columns = ops().quantize(weight, fmt, rule.fmt, "weight", True)
            full = ops().all_gather(x_rows, rule.ranks, "tensor") if rule.gather else x_rows
            out = ops().scaled_mm(full.reshape(-1, full.shape[-1]), w_rows.t(), fmt, rule.compute)
            if bias is not None:
                out = out + bias
            ctx.save_for_backward(x_columns, w_columns)
        rank_factor = rule.ranks if rule.gather else 1
        return out.view(leading[0] * rank_factor, *leading[1:], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rule: MatmulRule = ctx.rule
        x, weight = ctx.saved_tensors
        shape = grad.shape
        flat = grad.reshape(-1, shape[-1])
        if rule.fmt == "same":
            d_input = flat.mm(weight)
            full = ops().all_gather(x, rule.ranks, "tensor") if rule.gather else x
            d_weight = _transposed_mm(flat, full.reshape(-1, full.shape[-1]), ctx.main_grad)
        else:
            grad_format = GRADIENT_FORMAT[rule.fmt]
            g_rows, g_columns = ops().quantize(flat, grad_format, rule.fmt, "gradient", True)
            d_input = ops().scaled_mm(g_rows, weight.t(), grad_format, rule.compute)
            if rule.gather:  # x is [features, rows]: gathered along the rows
                x = ops().all_gather(x.t(), rule.ranks, "tensor").t()
            if ctx.main_grad is None:
                d_weight = ops().scaled_mm(g_columns, x.t(), grad_format, rule.compute)
            else:
                ops().scaled_mm_accumulate(g_columns, x.t(), ctx.main_grad, grad_format)
                d_weight = None
        d_input = d_input.view(*shape[:-1], -1)
        if rule.gather:
            d_input = ops().reduce_scatter(d_input, rule.ranks, "tensor")
        elif rule.reduce_gradient:
            d_input = ops().all_reduce(d_input, "tensor")
        d_bias = flat.sum(0) if ctx.has_bias else None
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
        out: Tensor = ParallelMatmul.apply(x, weight, bias, main_grad, rule)  # type: ignore[no-untyped-call]
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
                out = ScatterSequence.apply(out, self.context.sizes["t"], "tensor")  # type: ignore[no-untyped-call]
            elif is_row:
                out = ReduceFromTensor.apply(out)  # type: ignore[no-untyped-call]
            return out, self.context.to_compute(self.bias) if late and self.bias is not None else None


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


def _dropout(x: Tensor, structure: BlockStructure) -> Tensor:
    if not structure.dropout:
        return x
    out: Tensor = torch.ops.aten.native_dropout(x, 0.1, True)[0]
    return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [length, batch, heads, dimension] by cos and sin [length, 1, 1, dimension]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-right, left), dim=-1) * sin.to(x.dtype)


def _activate(x: Tensor, structure: BlockStructure) -> Tensor:
    activation = structure.activation
    if activation in ("swiglu", "geglu"):
        gate, up = x.chunk(2, dim=-1)
        return (functional.silu(gate) if activation == "swiglu" else functional.gelu(gate)) * up
    if activation == "relu":
        return functional.relu(x)
    if activation == "squared_relu":
        return functional.relu(x).pow(2)
    return functional.gelu(x)


class CoreAttention(nn.Module):
    """Scores, softmax and the weighted sum: one flash kernel, or two batched GEMMs with the softmax between them."""

    def __init__(self, context: BlockContext, is_causal: bool) -> None:
        super().__init__()
        self.context, self.is_causal = context, is_causal
        self.uses_positions = context.structure.position_embedding in ("relative", "alibi")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """q [length, batch, heads, d], k and v [keys, batch, groups, d] -> [length, batch, heads * d]."""
        structure = self.context.structure
        fmt = structure.attention_format
        if structure.kernel == "flash" and bias is None:
            with scope("core"):
                if fmt == "fp8":
                    return self._flash_fp8(q, k, v)
                dtype = TORCH_DTYPE[fmt]
                q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
                out: Tensor = FlashAttention.apply(q, k, v, self._rule(fmt))  # type: ignore[no-untyped-call]
                return out.flatten(2).to(self.context.low)
        with scope("core"):
            return self._unfused(q, k, v, bias)

    def _rule(self, fmt: str) -> tuple[bool, int, bool, str]:
        structure = self.context.structure
        window = self.context.sizes["w"] if structure.windowed else 0
        return self.is_causal, window, structure.dropout, fmt

    def _flash_fp8(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Fp8Attention.apply(q, k, v, self._rule("fp8_e4m3"))  # type: ignore[no-untyped-call]
        return out.flatten(2).to(self.context.low)

    def _unfused(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        structure = self.context.structure
        length, batch, heads, _ = q.shape
        if k.shape[2] != heads:
            repeats = heads // k.shape[2]
            k, v = k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2)
        q, k, v = (t.flatten(1, 2).transpose(0, 1) for t in (q, k, v))  # [batch * heads, length, d]
        with scope("scores"):
            scores = torch.bmm(q, k.transpose(1, 2))
        with scope("softmax", "softmax"):
            scores = scores.view(batch, heads, *scores.shape[1:]) / math.sqrt(64.0)
            if bias is not None:
                scores = scores + bias
            if self.is_causal:
                mask = torch.empty(1, 1, *scores.shape[2:], dtype=torch.bool)
                scores = scores.masked_fill(mask, -10000.0)
            if structure.fused or structure.autocast:
                weights = torch.softmax(scores, dim=-1)
            else:  # softmax in fp32, as the eager 16-bit implementations do
                weights = torch.softmax(scores.float(), dim=-1).to(scores.dtype)
        with scope("dropout"):
            weights = _dropout(weights, structure)
        with scope("context"):
            out = torch.bmm(weights.flatten(0, 1), v)
        return out.view(batch, heads, length, -1).permute(2, 0, 1, 3).reshape(length, batch, -1)


class _Fp8Attention(torch.autograd.Function):
    """Flash attention on quantised operands; gradients are quantised before the backward kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rule: tuple[bool, int, bool, str]) -> Tensor:
        operands = [ops().quantize(t, "fp8_e4m3", "fp8_delayed", "attention", False)[0] for t in (q, k, v)]
        out, lse = ops().attention(*operands, *rule)
        ctx.save_for_backward(*operands, out, lse)
        ctx.rule = rule
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        quantised = ops().quantize(grad, "fp8_e5m2", "fp8_delayed", "gradient", False)[0]
        grads = ops().attention_backward(quantised, q, k, v, out, lse, *ctx.rule)
        return *(g.to(grad.dtype) for g in grads), None


class Attention(nn.Module):
    """Multi-head (grouped) attention; ``is_cross``: keys and values come from the encoder's output."""

    def __init__(self, context: BlockContext, is_cross: bool = False) -> None:
        super().__init__()
        structure, sizes = context.structure, context.sizes
        self.context, self.is_cross = context, is_cross
        self.prefix = "cross_" if is_cross else ""
        hidden, groups, dim = sizes["h"], sizes["g"], sizes["d"]
        self.query = groups * sizes["r"] * dim
        self.key = groups * dim
        bias = structure.qkv_bias
        widths: dict[str, int]
        if is_cross:
            widths = {"cross_q": self.query, "cross_kv": 2 * self.key}
        elif structure.fused:
            widths = {"qkv": groups * dim * sizes["u"]}
        else:
            widths = {"q": self.query, "k": self.key, "v": self.key}
        self.inputs = nn.ModuleDict(
            {name: Linear(context, name, (hidden, width), "columns", bias) for name, width in widths.items()}
        )
        self.projection = Linear(context, f"{self.prefix}projection", (self.query, hidden), "rows", structure.bias)
        self.core = CoreAttention(context, structure.causal and not is_cross)
        over = {"head": (dim, dim), "projection": (self.query, self.key)}.get("" if is_cross else structure.qk_norm, ())
        self.norms = nn.ModuleList(
            [Norm(context, f"{name}_norm", columns, bias=False) for name, columns in zip("qk", over, strict=False)]
        )
        # Transformer-XL projects its relative positions in every layer; T5 (which has cross-attention) has one table
        if structure.position_embedding == "relative" and structure.causal and not structure.cross_attention:
            self.relative = Linear(context, "relative", (hidden, self.query), "columns")

    def _project(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        parts = {name: layer(memory if name == "cross_kv" else x) for name, layer in self.inputs.items()}
        if "qkv" in parts:
            region = "rope" if self.context.structure.position_embedding == "rope" else ""
            with scope("rope" if region else "split", region):
                q, k, v = parts["qkv"].split([self.query, self.key, self.key], dim=-1)
        elif self.is_cross:
            q = parts["cross_q"]
            k, v = parts["cross_kv"].split([self.key, self.key], dim=-1)
        else:
            q, k, v = parts["q"], parts["k"], parts["v"]
        dim = self.context.sizes["d"]
        if self.norms and self.context.structure.qk_norm == "projection":
            q, k = (norm(t) for norm, t in zip(self.norms, (q, k), strict=True))
        return tuple(t.unflatten(-1, (-1, dim)) for t in (q, k, v))  # type: ignore[return-value]

    def forward(
        self, x: Tensor, tables: tuple[Tensor, ...], memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        structure, sizes = self.context.structure, self.context.sizes
        with scope(f"{self.prefix}attention"):
            q, k, v = self._project(x, memory)
            if self.norms and structure.qk_norm == "head":
                q, k = (norm(t) for norm, t in zip(self.norms, (q, k), strict=True))
            if structure.position_embedding == "rope" and not self.is_cross:
                with scope("rope", "rope"):
                    q, k = _rotate(q, *tables), _rotate(k, *tables)
            if structure.context and not self.is_cross:
                with scope("key_value_gather"):
                    k, v = (GatherSequence.apply(t.contiguous(), sizes["c"], "context") for t in (k, v))
            bias = self._position_bias(q, tables)
            selective = structure.recompute == "selective"
            out = _maybe_checkpoint(self.context, selective, self.core, q, k, v, bias)
            return self.projection.without_bias(out)

    def _position_bias(self, q: Tensor, tables: tuple[Tensor, ...]) -> Tensor | None:
        """What is added to the scores: a table (T5, ALiBi), or Transformer-XL's query-dependent relative scores."""
        structure = self.context.structure
        if structure.position_embedding == "alibi":
            return tables[0] if structure.kernel == "unfused" else None
        if structure.position_embedding != "relative" or self.is_cross:
            return None
        if not structure.causal or structure.cross_attention:
            return tables[0]
        length, batch, heads, dim = q.shape
        with scope("relative_scores"):
            keys = self.relative(tables[0]).unflatten(-1, (heads, dim))  # [keys, heads, d]
            per_head = q.permute(2, 1, 0, 3).flatten(1, 2)  # [heads, batch * length, d]
            scores = torch.bmm(per_head, keys.permute(1, 2, 0))
            shifted: Tensor = RelativeShift.apply(scores)  # type: ignore[no-untyped-call]
            return shifted.view(heads, batch, length, -1).transpose(0, 1)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    def __init__(self, context: BlockContext) -> None:
        super().__init__()
        structure, sizes = context.structure, context.sizes
        self.context = context
        self.heads = sizes["g"] * sizes["r"]
        self.nope, self.rotary, self.value = sizes["D"], 2 * sizes["j"], 2 * sizes["V"]
        hidden, query = sizes["h"], self.heads * sizes["E"]
        self.is_compressed = structure.attention == "latent_compressed_queries"
        if self.is_compressed:
            self.q_down = Linear(context, "q_down", (hidden, sizes["q"]), "none")
            self.q_norm = Norm(context, "q_norm", sizes["q"])
        self.q_up = Linear(context, "q_up", (sizes["q"] if self.is_compressed else hidden, query), "columns")
        self.kv_down = Linear(context, "kv_down", (hidden, sizes["L"]), "none")
        self.kv_norm = Norm(context, "kv_norm", sizes["l"])
        self.kv_up = Linear(context, "kv_up", (sizes["l"], self.heads * sizes["B"]), "columns")
        self.projection = Linear(context, "projection", (self.heads * self.value, hidden), "rows")
        self.core = CoreAttention(context, structure.causal)

    def forward(
        self, x: Tensor, tables: tuple[Tensor, ...], memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        structure, sizes = self.context.structure, self.context.sizes
        with scope("attention"):
            q = self.q_up(self.q_norm(self.q_down(x)) if self.is_compressed else x).unflatten(-1, (self.heads, -1))
            latent, k_rope = self.kv_down(x).split([sizes["l"], self.rotary], dim=-1)
            kv = self.kv_up(self.kv_norm(latent)).unflatten(-1, (self.heads, -1))
            if self.context.is_scattered:
                k_rope = GatherSequence.apply(k_rope.contiguous(), sizes["t"], "tensor")
            with scope("rope", "rope"):
                q_nope, q_rope = q.split([self.nope, self.rotary], dim=-1)
                k_nope, v = kv.split([self.nope, self.value], dim=-1)
                q = torch.cat((q_nope, _rotate(q_rope, *tables)), dim=-1)
                rotated = _rotate(k_rope.unsqueeze(2), *tables).expand(-1, -1, self.heads, -1)
                k = torch.cat((k_nope, rotated), dim=-1)
            if structure.context:
                with scope("key_value_gather"):
                    k, v = (GatherSequence.apply(t.contiguous(), sizes["c"], "context") for t in (k, v))
            out = _maybe_checkpoint(self.context, structure.recompute == "selective", self.core, q, k, v, None)
            return self.projection.without_bias(out)


class FeedForward(nn.Module):
    """The dense feed-forward layer (or the shared experts: the same with ``columns`` of their own)."""

    def __init__(self, context: BlockContext, columns: int, name: str = "mlp") -> None:
        super().__init__()
        structure, hidden = context.structure, context.sizes["h"]
        self.context, self.name = context, name
        self.is_gated = structure.activation in ("swiglu", "geglu")
        self.is_split = self.is_gated and not structure.fused  # gate and up as two layers
        prefix = "" if name == "mlp" else "shared_"
        widths = {"gate": columns, "up": columns} if self.is_split else {"fc1": columns * (2 if self.is_gated else 1)}
        self.inputs = nn.ModuleList(
            [Linear(context, prefix + key, (hidden, width), "columns", structure.bias) for key, width in widths.items()]
        )
        self.fc2 = Linear(context, f"{prefix}fc2", (columns, hidden), "rows", structure.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        structure = self.context.structure
        with scope(self.name):
            if self.is_split:
                gate, up = (layer(x) for layer in self.inputs)
                with scope("activation", "activation"):
                    act = functional.silu if structure.activation == "swiglu" else functional.gelu
                    inner = act(gate) * up
            else:
                inner, bias = self.inputs[0].without_bias(x)
                with scope("activation", "activation"):
                    inner = _activate(inner if bias is None else inner + bias, structure)
            return self.fc2.without_bias(inner)


class GroupedMatmul(torch.autograd.Function):
    """``x[e] @ weight[e]`` for every expert of the rank, quantised when the recipe says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rule: MatmulRule) -> Tensor:
        """x [experts, tokens, in], weight [experts, in, out]."""
        ctx.rule = rule
        if rule.fmt == "same":
            ctx.save_for_backward(x, weight)
            out: Tensor = ops().grouped_mm(x, weight, rule.compute, rule.compute)
            return out
        fmt = FORWARD_FORMAT[rule.fmt]
        x_rows, x_columns = ops().quantize(x, fmt, rule.fmt, "input", True)
        w_rows, w_columns = ops().quantize(weight, fmt, rule.fmt, "weight", True)
        ctx.save_for_backward(x_columns, w_columns)
        ctx.shapes = x.shape, weight.shape
        quantised: Tensor = ops().grouped_mm(x_rows, w_rows, fmt, rule.compute)
        return quantised

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rule: MatmulRule = ctx.rule
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        if rule.fmt == "same":
            d_input = ops().grouped_mm(grad, weight.transpose(1, 2), rule.compute, rule.compute)
            return d_input, ops().grouped_mm(x.transpose(1, 2), grad, rule.compute, rule.compute), None
        fmt = GRADIENT_FORMAT[rule.fmt]
        x, weight = x.view(ctx.shapes[0]), weight.view(ctx.shapes[1])
        g_rows, g_columns = ops().quantize(grad, fmt, rule.fmt, "gradient", True)
        d_input = ops().grouped_mm(g_rows, weight.transpose(1, 2), fmt, rule.compute)
        d_weight = ops().grouped_mm(x.transpose(1, 2), g_columns.view(grad.shape), fmt, rule.compute)
        return d_input, d_weight, None


class Experts(nn.Module):
    """Router, dispatch, the rank's experts, combine; shared experts beside them."""

    def __init__(self, context: BlockContext) -> None:
        super().__init__()
        structure, sizes = context.structure, context.sizes
        self.context = context
        experts, columns, hidden = sizes["e"], sizes["a"], sizes["h"]
        is_gated = structure.activation in ("swiglu", "geglu")
        self.router = Linear(context, "router", (hidden, experts * (sizes["x"] if structure.expert else 1)), "none")
        self.expert_fc1 = context.parameter(experts, hidden, columns * (2 if is_gated else 1))
        self.expert_fc2 = context.parameter(experts, columns, hidden)
        self.shared = FeedForward(context, sizes["i"], "shared_experts") if structure.shared_experts else None

    def _grouped(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        structure = self.context.structure
        rule = MatmulRule(structure.linear_format(name), structure.compute, False, False, 1)
        with scope(name):
            x, weight = self.context.to_compute(x), self.context.to_compute(weight)
            out: Tensor = GroupedMatmul.apply(x, weight, rule)  # type: ignore[no-untyped-call]
            return out

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        structure, sizes = self.context.structure, self.context.sizes
        with scope("mlp"):
            tokens = x.flatten(0, 1)
            scores = self.router(tokens)
            with scope("router", "router"):
                probabilities = torch.softmax(scores.float(), dim=-1)
                gates, chosen = torch.topk(probabilities, sizes["k"], dim=-1)
            out = self._experts(self.context.to_compute(tokens), chosen)
            with scope("combine", "combine"):
                weighted = out.view(-1, sizes["k"], sizes["h"]) * gates.unsqueeze(-1).to(out.dtype)
                merged = weighted.sum(1).view(*x.shape)
            if self.shared is not None:
                shared, bias = self.shared(x)
                with scope("shared_add", "combine"):
                    merged = merged + (shared if bias is None else shared + bias)
            return merged, None

    def _experts(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """tokens [rows, hidden] -> the experts' outputs [rows * k, hidden], in the tokens' order."""
        structure, sizes = self.context.structure, self.context.sizes
        experts, per_expert = sizes["e"], sizes["n"]
        copies, arriving = tokens.shape[0] * sizes["k"], experts * per_expert
        ranks = sizes["t"] if structure.expert_tensor else 1
        with scope("dispatch"):
            sent = Permute.apply(tokens, chosen, copies if structure.expert else arriving)  # type: ignore[no-untyped-call]
            if structure.expert:
                sent = AllToAll.apply(sent, arriving)  # type: ignore[no-untyped-call]
            if structure.expert_tensor:
                sent = GatherSequence.apply(sent, ranks, "tensor")  # type: ignore[no-untyped-call]
        inner = self._grouped("expert_fc1", sent.view(experts, per_expert * ranks, -1), self.expert_fc1)
        with scope("expert_activation", "activation"):
            inner = _activate(inner, structure)
        out = self._grouped("expert_fc2", inner, self.expert_fc2).flatten(0, 1)
        with scope("return"):
            if structure.expert_tensor:
                out = ScatterSequence.apply(out, ranks, "tensor")  # type: ignore[no-untyped-call]
            if structure.expert:
                out = AllToAll.apply(out, copies)  # type: ignore[no-untyped-call]
            back: Tensor = Permute.apply(out, chosen, copies)  # type: ignore[no-untyped-call]
            return back


def _maybe_checkpoint(context: BlockContext, enabled: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Runs ``function``, again during backward when ``enabled``; its operators then have the phase ``recompute``."""
    if not enabled:
        return function(*args)
    place = resume_scope()
    calls = 0

    def run(*inner: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            return function(*inner)
        with context.recorder.recompute(), place():
            return function(*inner)

    with set_checkpoint_early_stop(False):
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


class Layer(nn.Module):
    """One transformer layer: attention, (cross attention,) feed-forward, with norms and residuals."""

    def __init__(self, context: BlockContext) -> None:
        super().__init__()
        structure, hidden = context.structure, context.sizes["h"]
        self.context = context
        is_latent = structure.attention != "multi_head"
        self.attention: nn.Module = LatentAttention(context) if is_latent else Attention(context)
        self.cross = Attention(context, is_cross=True) if structure.cross_attention else None
        self.mlp: nn.Module = (
            Experts(context) if structure.feed_forward == "experts" else FeedForward(context, context.sizes["f"])
        )
        names = ["attention_norm", *(["cross_norm"] if self.cross else []), "mlp_norm"]
        if structure.parallel_block:
            names = names[:1]
        self.norms = nn.ModuleDict({name: Norm(context, name, hidden) for name in names})
        self.output_norms = nn.ModuleDict(  # Gemma: the outputs of sub-layers are normed as well
            {name: Norm(context, f"post_{name}", hidden) for name in names} if structure.post_norm else {}
        )

    def forward(self, x: Tensor, tables: tuple[Tensor, ...], memory: Tensor | None = None) -> Tensor:
        full = self.context.structure.recompute == "full"
        out: Tensor = _maybe_checkpoint(self.context, full, self._forward, x, tables, memory)
        return out

    def _forward(self, x: Tensor, tables: tuple[Tensor, ...], memory: Tensor | None) -> Tensor:
        if self.context.structure.parallel_block:
            normed = self.norms["attention_norm"](x)
            attended, attention_bias = self.attention(normed, tables)
            out, bias = self.mlp(normed)
            with scope("residual", "residual"):
                return self._add(self._add(x, attended, attention_bias), out, bias)
        x = self._sublayer("attention_norm", x, lambda y: self.attention(y, tables))
        if self.cross is not None:
            cross = self.cross
            x = self._sublayer("cross_norm", x, lambda y: cross(y, tables, memory))
        return self._sublayer("mlp_norm", x, self.mlp)

    def _add(self, x: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
        return x + _dropout(out if bias is None else out + bias, self.context.structure)

    def _sublayer(self, name: str, x: Tensor, run: Callable[[Tensor], tuple[Tensor, Tensor | None]]) -> Tensor:
        norm = self.norms[name]
        norm_after = self.context.structure.norm_after
        out, bias = run(x if norm_after else norm(x))
        if self.output_norms:
            out, bias = self.output_norms[name](out if bias is None else out + bias), None
        with scope(name.replace("norm", "residual"), "residual"):
            x = self._add(x, out, bias)
        return norm(x) if norm_after else x


class Embedding(nn.Module):
    """Token (position, token type) embeddings with a vocabulary-parallel table; BERT adds a norm."""

    def __init__(self, context: BlockContext) -> None:
        super().__init__()
        structure, sizes = context.structure, context.sizes
        self.context = context
        self.weight = context.parameter(sizes["v"], sizes["h"])
        self.positions = (
            context.parameter(sizes["p"], sizes["h"]) if structure.position_embedding == "learned" else None
        )
        self.types = context.parameter(sizes["y"], sizes["h"]) if structure.token_types else None
        self.norm = Norm(context, "norm", sizes["h"]) if structure.norm_after else None

    def forward(self, ids: Tensor, position_ids: Tensor, type_ids: Tensor) -> Tensor:
        """ids [batch, length] -> [length, batch, hidden]."""
        structure, sizes = self.context.structure, self.context.sizes
        with scope("embedding"):
            with scope("word", "word"):
                if structure.tensor:
                    outside = (ids < 0) | (ids >= sizes["v"])
                    ids = (ids - 1).masked_fill(outside, 0)
                out = functional.embedding(ids, self.weight)
                if structure.tensor:
                    out = out.masked_fill(outside.unsqueeze(-1), 0.0)
                out = out.transpose(0, 1).contiguous()
            if self.context.is_scattered:
                out = ScatterSequence.apply(out, sizes["t"], "tensor")  # type: ignore[no-untyped-call]
            elif structure.tensor:
                out = ReduceFromTensor.apply(out)  # type: ignore[no-untyped-call]
            for table, indices in ((self.positions, position_ids), (self.types, type_ids)):
                if table is not None:
                    with scope("position", "position"):
                        out = out + functional.embedding(indices, table).transpose(0, 1)
            if self.norm is not None:
                out = self.norm(out)
            with scope("dropout"):
                return _dropout(out, structure)


class ParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy over a vocabulary split across tensor ranks (Megatron-LM): maximum, target logit and sum reduced."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, is_parallel: bool) -> Tensor:
        """logits [length, batch, vocabulary] in fp32, labels [length, batch] -> losses [length, batch]."""

        def reduce(x: Tensor) -> Tensor:
            return ops().all_reduce(x, "tensor") if is_parallel else x  # type: ignore[no-any-return]

        largest = reduce(logits.amax(-1))
        shifted = logits - largest.unsqueeze(-1)
        target = reduce(shifted.gather(-1, labels.unsqueeze(-1)).squeeze(-1))
        exponents = shifted.exp()
        total = reduce(exponents.sum(-1))
        loss: Tensor = total.log() - target
        softmax = exponents.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, labels)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, labels = ctx.saved_tensors
        gradient = softmax.scatter_add(-1, labels.unsqueeze(-1), grad.unsqueeze(-1))
        return gradient.mul_(grad.unsqueeze(-1)), None, None


class Head(nn.Module):
    """Final norm, (masked-language-model dense layer,) vocabulary-parallel logits and the loss."""

    def __init__(self, context: BlockContext) -> None:
        super().__init__()
        structure, sizes = context.structure, context.sizes
        self.context = context
        self.norm = None if structure.norm_after else Norm(context, "final_norm", sizes["h"])
        self.dense = Linear(context, "dense", (sizes["h"], sizes["h"]), "none", True) if structure.mlm_head else None
        self.dense_norm = Norm(context, "dense_norm", sizes["h"]) if structure.mlm_head else None
        self.lm_head = Linear(context, "lm_head", (sizes["h"], sizes["v"]), "columns", structure.mlm_head)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        structure = self.context.structure
        with scope("head"):
            if self.norm is not None:
                x = self.norm(x)
            if self.dense is not None and self.dense_norm is not None:
                x = self.dense(x)
                with scope("dense_activation", "activation"):
                    x = functional.gelu(x)
                x = self.dense_norm(x)
            logits = self.lm_head(x)
            with scope("loss", "loss"):
                if structure.tensor or not structure.autocast:
                    losses = ParallelCrossEntropy.apply(logits.float(), labels, structure.tensor)  # type: ignore[no-untyped-call]
                    mean: Tensor = losses.mean()
                    return mean
                return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
