"""Feed-forward layers as one rank runs them: dense, and a mixture of experts with its dispatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dataset_builder.tracing.collectives import AllToAll, GatherSequence, Permute, ScatterSequence, apply, ops
from dataset_builder.tracing.linear import BlockContext, Linear, MatmulRule
from dataset_builder.tracing.recorder import scope
from dataset_builder.tracing.structure import FORWARD_FORMAT, GRADIENT_FORMAT, BlockStructure


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
        self.first = next(layer for layer in self.inputs if isinstance(layer, Linear))
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
                inner, bias = self.first.without_bias(x)
                with scope("activation", "activation"):
                    inner = _activate(inner if bias is None else inner + bias, structure)
            return self.fc2.without_bias(inner)


class GroupedMatmul(torch.autograd.Function):
    """``x[e] @ weight[e]`` for every expert of the rank, quantised when the recipe says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rule: MatmulRule) -> Tensor:
        """x [experts, tokens, in], weight [experts, in, out]."""
        ctx.rule = rule
        is_trained = ctx.needs_input_grad[1]
        ctx.shapes = x.shape, weight.shape
        if rule.fmt == "same":
            ctx.save_for_backward(x if is_trained else None, weight)
            out: Tensor = ops().grouped_mm(x, weight, rule.compute, rule.compute)
            return out
        fmt = FORWARD_FORMAT[rule.fmt]
        x_rows, x_columns = ops().quantize(x, fmt, rule.fmt, "input", is_trained)
        w_rows, w_columns = ops().quantize(weight, fmt, rule.fmt, "weight", True)
        ctx.save_for_backward(x_columns if is_trained else None, w_columns)
        quantised: Tensor = ops().grouped_mm(x_rows, w_rows, fmt, rule.compute)
        return quantised

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rule: MatmulRule = ctx.rule
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        if rule.fmt == "same":
            d_input = ops().grouped_mm(grad, weight.transpose(1, 2), rule.compute, rule.compute)
            if x is None:  # the weight is frozen
                return d_input, None, None
            return d_input, ops().grouped_mm(x.transpose(1, 2), grad, rule.compute, rule.compute), None
        fmt = GRADIENT_FORMAT[rule.fmt]
        g_rows, g_columns = ops().quantize(grad, fmt, rule.fmt, "gradient", x is not None)
        d_input = ops().grouped_mm(g_rows, weight.view(ctx.shapes[1]).transpose(1, 2), fmt, rule.compute)
        if x is None:
            return d_input, None, None
        x = x.view(ctx.shapes[0])
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
            out = apply(GroupedMatmul, x, weight, rule)
            return out

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        sizes = self.context.sizes
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
            sent = apply(Permute, tokens, chosen, copies if structure.expert else arriving)
            if structure.expert:
                sent = apply(AllToAll, sent, arriving)
            if structure.expert_tensor:
                sent = apply(GatherSequence, sent, ranks, "tensor")
        inner = self._grouped("expert_fc1", sent.view(experts, per_expert * ranks, -1), self.expert_fc1)
        with scope("expert_activation", "activation"):
            inner = _activate(inner, structure)
        out = self._grouped("expert_fc2", inner, self.expert_fc2).flatten(0, 1)
        with scope("return"):
            if structure.expert_tensor:
                out = apply(ScatterSequence, out, ranks, "tensor")
            if structure.expert:
                out = apply(AllToAll, out, copies)
            back = apply(Permute, out, chosen, copies)
            return back
