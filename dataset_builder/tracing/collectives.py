"""Messages and kernels torch has no traceable CPU operator for, as operators of an own library ``precision_graph``.

Each has a shape rule only (it returns empty tensors), so real autograd runs through them and the recorder sees them
with the formats they really get. The autograd Functions are those of tensor, sequence, context and expert parallelism.
Tensors are [sequence, batch, hidden], so that gathering along the sequence is along the first dimension.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dataset_builder.tracing.precision import TORCH_DTYPE

_SCHEMAS = (
    "all_reduce(Tensor x, str axis) -> Tensor",
    "all_gather(Tensor x, int size, str axis) -> Tensor",
    "reduce_scatter(Tensor x, int size, str axis) -> Tensor",
    "all_to_all(Tensor x, int rows, str axis) -> Tensor",
    "permute(Tensor x, Tensor indices, int rows) -> Tensor",
    "quantize(Tensor x, str fmt, str recipe, str what, bool transpose) -> (Tensor, Tensor)",
    "scaled_mm(Tensor a, Tensor b, str input_format, str out_dtype) -> Tensor",
    "scaled_mm_accumulate(Tensor a, Tensor b, Tensor(c!) main_grad, str input_format) -> ()",
    "mm_accumulate(Tensor a, Tensor b, Tensor(c!) main_grad) -> ()",
    "grouped_mm(Tensor a, Tensor b, str input_format, str out_dtype) -> Tensor",
    "attention(Tensor q, Tensor k, Tensor v, bool causal, int window, bool dropout, str input_format)"
    " -> (Tensor, Tensor)",
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal, int window,"
    " bool dropout, str input_format) -> (Tensor, Tensor, Tensor)",
    "relative_shift(Tensor x) -> Tensor",
)


def _all_gather(x: torch.Tensor, size: int, axis: str) -> torch.Tensor:
    return x.new_empty((x.shape[0] * size, *x.shape[1:]))


def _reduce_scatter(x: torch.Tensor, size: int, axis: str) -> torch.Tensor:
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


def _rows(x: torch.Tensor, rows: int, axis: str) -> torch.Tensor:
    return x.new_empty((rows, *x.shape[1:]))


def _permute(x: torch.Tensor, indices: torch.Tensor, rows: int) -> torch.Tensor:
    return x.new_empty((rows, *x.shape[1:]))


def _quantize(x: torch.Tensor, fmt: str, recipe: str, what: str, transpose: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = TORCH_DTYPE[fmt]
    rows = x.numel() // x.shape[-1]
    transposed = (x.shape[-1], rows) if transpose else (0,)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(transposed, dtype=dtype)


def _scaled_mm(a: torch.Tensor, b: torch.Tensor, input_format: str, out_dtype: str) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=TORCH_DTYPE[out_dtype])


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, input_format: str, out_dtype: str) -> torch.Tensor:
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]), dtype=TORCH_DTYPE[out_dtype])


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int, dropout: bool, input_format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    length, batch, heads, _ = q.shape
    out_dtype = q.dtype if q.dtype.itemsize > 1 else torch.bfloat16
    out = q.new_empty((length, batch, heads, v.shape[-1]), dtype=out_dtype)
    return out, q.new_empty((batch, heads, length), dtype=torch.float32)


def _attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(t.new_empty(t.shape, dtype=grad.dtype) for t in (q, k, v))  # type: ignore[return-value]


def _nothing(*_: Any) -> None:
    return None


@functools.cache
def define_operators() -> torch.library.Library:
    """Defines the library once per process; the result keeps it alive."""
    library = torch.library.Library("precision_graph", "DEF")
    kernels = {
        "all_reduce": lambda x, axis: torch.empty_like(x),
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _rows,
        "permute": _permute,
        "quantize": _quantize,
        "scaled_mm": _scaled_mm,
        "scaled_mm_accumulate": _nothing,
        "mm_accumulate": _nothing,
        "grouped_mm": _grouped_mm,
        "attention": _attention,
        "attention_backward": _attention_backward,
        "relative_shift": lambda x: torch.empty_like(x),
    }
    for schema in _SCHEMAS:
        library.define(schema)
        name = schema.partition("(")[0]
        library.impl(name, kernels[name], "CPU")
        library.impl(name, kernels[name], "Meta")
    return library


def ops() -> Any:
    """``torch.ops.precision_graph``, defined."""
    define_operators()
    return torch.ops.precision_graph


def apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    """Runs an autograd Function with one output (torch leaves ``apply`` untyped)."""
    out: torch.Tensor = function.apply(*arguments)
    return out


class ReduceFromTensor(torch.autograd.Function):
    """Forward all-reduce, backward nothing: the output of a row-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        reduced: torch.Tensor = ops().all_reduce(x, "tensor")
        return reduced

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class CopyToTensor(torch.autograd.Function):
    """Forward nothing, backward all-reduce: the input of a column-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        reduced: torch.Tensor = ops().all_reduce(grad, "tensor")
        return reduced


class ScatterSequence(torch.autograd.Function):
    """Forward reduce-scatter along the sequence, backward all-gather: row-parallel output, sequence parallel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int, axis: str) -> torch.Tensor:
        ctx.size, ctx.axis = size, axis
        scattered: torch.Tensor = ops().reduce_scatter(x, size, axis)
        return scattered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ops().all_gather(grad, ctx.size, ctx.axis), None, None


class GatherSequence(torch.autograd.Function):
    """Forward all-gather along the sequence, backward reduce-scatter: keys and values under context parallelism."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int, axis: str) -> torch.Tensor:
        ctx.size, ctx.axis = size, axis
        gathered: torch.Tensor = ops().all_gather(x, size, axis)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ops().reduce_scatter(grad, ctx.size, ctx.axis), None, None


class AllToAll(torch.autograd.Function):
    """Sends every token to the ranks of its experts (``rows`` arrive), gradients back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.rows = x.shape[0]
        arrived: torch.Tensor = ops().all_to_all(x, rows, "expert")
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ops().all_to_all(grad.contiguous(), ctx.rows, "expert"), None


class Permute(torch.autograd.Function):
    """Sorts token copies by expert, or adds them back up (``rows`` out)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, indices: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.rows = x.shape[0]
        ctx.save_for_backward(indices)
        permuted: torch.Tensor = ops().permute(x, indices, rows)
        return permuted

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        return ops().permute(grad, indices, ctx.rows), None, None


class RelativeShift(torch.autograd.Function):
    """Transformer-XL's shift of relative scores: one copy each way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        shifted: torch.Tensor = ops().relative_shift(x)
        return shifted

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        shifted: torch.Tensor = ops().relative_shift(grad)
        return shifted


class FlashAttention(torch.autograd.Function):
    """One attention kernel each way on [length, batch, heads, dimension]; keys of a group are not expanded.

    An own operator instead of ``aten._scaled_dot_product_flash_attention``, which needs expanded keys, one head
    dimension for keys and values, and square causal scores; its FLOPs are held against torch's counter in the tests.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rule: tuple[bool, int, bool, str],  # causal, window, dropout, input format
    ) -> torch.Tensor:
        out, lse = ops().attention(q, k, v, *rule)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rule = rule
        result: torch.Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *ops().attention_backward(grad, q, k, v, out, lse, *ctx.rule), None
