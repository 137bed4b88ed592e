"""Attention as one rank runs it: multi-head (grouped) and multi-head latent, flash or unfused, with positions.

Keys and values are gathered over context ranks. Tensors are [length, batch, heads, dimension].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dataset_builder.tracing.collectives import GatherSequence, RelativeShift, apply, ops
from dataset_builder.tracing.linear import AttentionRule, BlockContext, Linear, Norm, dropout
from dataset_builder.tracing.precision import TORCH_DTYPE
from dataset_builder.tracing.recorder import resume_scope, scope


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [length, batch, heads, dimension] by cos and sin [length, 1, 1, dimension]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-right, left), dim=-1) * sin.to(x.dtype)


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
                out = self.context.attend(q, k, v, self._rule(fmt))
                return out.flatten(2).to(self.context.low)
        with scope("core"):
            return self._unfused(q, k, v, bias)

    def _rule(self, fmt: str) -> AttentionRule:
        structure = self.context.structure
        window = self.context.sizes["w"] if structure.windowed else 0
        return self.is_causal, window, structure.dropout, fmt

    def _flash_fp8(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = apply(_Fp8Attention, q, k, v, self._rule("fp8_e4m3"))
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
            if structure.fused or structure.autocast or structure.normalization == "layernorm":
                weights = torch.softmax(scores, dim=-1)
            else:  # eager attention casts to fp32 since Llama; BERT, GPT-2 and Transformer-XL leave that to the kernel
                weights = torch.softmax(scores.float(), dim=-1).to(scores.dtype)
        with scope("dropout"):
            weights = dropout(weights, structure)
        with scope("context"):
            out = torch.bmm(weights.flatten(0, 1), v)
        return out.view(batch, heads, length, -1).permute(2, 0, 1, 3).reshape(length, batch, -1)


class _Fp8Attention(torch.autograd.Function):
    """Flash attention on quantised operands; gradients are quantised before the backward kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
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
            # Every rank knows all positions, so none are gathered where the sequence is scattered.
            split = "none" if context.is_scattered else "columns"
            self.relative = Linear(context, "relative", (hidden, self.query), split)

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
        return tuple(t.unflatten(-1, (-1, dim)) for t in (q, k, v))

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
                    k, v = (apply(GatherSequence, t.contiguous(), sizes["c"], "context") for t in (k, v))
            bias = self._position_bias(q, tables)
            selective = structure.recompute == "selective"
            out = maybe_checkpoint(self.context, selective, self.core, q, k, v, bias)
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
            shifted = apply(RelativeShift, scores)
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
                k_rope = apply(GatherSequence, k_rope.contiguous(), sizes["t"], "tensor")
            with scope("rope", "rope"):
                q_nope, q_rope = q.split([self.nope, self.rotary], dim=-1)
                k_nope, v = kv.split([self.nope, self.value], dim=-1)
                q = torch.cat((q_nope, _rotate(q_rope, *tables)), dim=-1)
                rotated = _rotate(k_rope.unsqueeze(2), *tables).expand(-1, -1, self.heads, -1)
                k = torch.cat((k_nope, rotated), dim=-1)
            if structure.context:
                with scope("key_value_gather"):
                    k, v = (apply(GatherSequence, t.contiguous(), sizes["c"], "context") for t in (k, v))
            out = maybe_checkpoint(self.context, structure.recompute == "selective", self.core, q, k, v, None)
            return self.projection.without_bias(out)


def maybe_checkpoint(context: BlockContext, enabled: bool, function: Callable[..., Any], *args: Any) -> Any:
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
