"""The blocks of the reference parallel transformer: embedding, layer, head with loss, at rank-local sizes.

Tensors between blocks are [sequence, batch, hidden]. The vocabulary is split over tensor ranks as in Megatron-LM
(arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dataset_builder.tracing.attention import Attention, LatentAttention, maybe_checkpoint
from dataset_builder.tracing.collectives import ReduceFromTensor, ScatterSequence, apply, ops
from dataset_builder.tracing.feed_forward import Experts, FeedForward
from dataset_builder.tracing.linear import BlockContext, Linear, Norm, dropout
from dataset_builder.tracing.recorder import scope


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
        out: Tensor = maybe_checkpoint(self.context, full, self._forward, x, tables, memory)
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
        return x + dropout(out if bias is None else out + bias, self.context.structure)

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
                out = apply(ScatterSequence, out, sizes["t"], "tensor")
            elif structure.tensor:
                out = apply(ReduceFromTensor, out)
            for table, indices in ((self.positions, position_ids), (self.types, type_ids)):
                if table is not None:
                    with scope("position", "position"):
                        out = out + functional.embedding(indices, table).transpose(0, 1)
            if self.norm is not None:
                out = self.norm(out)
            with scope("dropout"):
                return dropout(out, structure)


class EncoderNorm(nn.Module):
    """The norm behind the encoder whose output every decoder layer attends to."""

    def __init__(self, context: BlockContext) -> None:
        super().__init__()
        self.final_norm = Norm(context, "final_norm", context.sizes["h"])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.final_norm(x)
        return out


class MtpInput(nn.Module):
    """What a depth of multi-token prediction runs its layer on: the stream and the next tokens' embeddings, normed,
    side by side, projected to one width (arXiv 2412.19437, equation 21). Every tensor rank projects the positions it
    holds, with a whole weight.
    """

    def __init__(self, context: BlockContext) -> None:
        super().__init__()
        hidden = context.sizes["h"]
        self.norms = nn.ModuleDict({name: Norm(context, name, hidden) for name in ("stream_norm", "embedding_norm")})
        self.projection = Linear(context, "mtp_projection", (2 * hidden, hidden), "none", context.structure.bias)

    def forward(self, stream: Tensor, embedded: Tensor) -> Tensor:
        """Two of [length, batch, hidden] -> [length, batch, hidden]."""
        with scope("mtp"):
            normed = [self.norms["embedding_norm"](embedded), self.norms["stream_norm"](stream)]
            out: Tensor = self.projection(torch.cat(normed, dim=-1))
            return out


class ParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy over a vocabulary split across tensor ranks (Megatron-LM): maximum, target and sum reduced."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, is_parallel: bool) -> Tensor:
        """logits [length, batch, vocabulary] in fp32, labels [length, batch] -> losses [length, batch]."""

        def reduce(x: Tensor) -> Tensor:
            return ops().all_reduce(x, "tensor") if is_parallel else x

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
    """Final norm, (masked-language-model dense layer,) vocabulary-parallel logits or labels, and the loss."""

    def __init__(self, context: BlockContext) -> None:
        super().__init__()
        structure, sizes = context.structure, context.sizes
        self.context = context
        self.norm = None if structure.norm_after else Norm(context, "final_norm", sizes["h"])
        is_mlm = structure.head == "mlm"
        self.dense = Linear(context, "dense", (sizes["h"], sizes["h"]), "none", True) if is_mlm else None
        self.dense_norm = Norm(context, "dense_norm", sizes["h"]) if is_mlm else None
        if structure.head == "classification":
            self.classifier = Linear(context, "classifier", (sizes["h"], sizes["C"]), "none", True)
        else:
            self.lm_head = Linear(context, "lm_head", (sizes["h"], sizes["v"]), "columns", is_mlm)

    def forward(self, x: Tensor, labels: Tensor, masked: Tensor | None = None) -> Tensor:
        """x [length, batch, hidden], labels of its rows; ``masked``: the rows that have labels, all if ``None``."""
        structure = self.context.structure
        with scope("head"):
            if self.norm is not None:
                x = self.norm(x)
            if structure.head == "classification":
                logits = self.classifier(x)
                with scope("loss", "loss"):
                    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            if masked is not None:
                with scope("masked_positions"):
                    x = x.flatten(0, 1).index_select(0, masked)
            if self.dense is not None and self.dense_norm is not None:
                x = self.dense(x)
                with scope("dense_activation", "activation"):
                    x = functional.gelu(x)
                x = self.dense_norm(x)
            logits = self.lm_head(x)
            with scope("loss", "loss"):
                if structure.tensor or not structure.autocast:
                    losses = apply(ParallelCrossEntropy, logits.float(), labels, structure.tensor)
                    return losses.mean()
                return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
