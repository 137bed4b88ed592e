"""Operators of a training step as cases to be timed: products in every layout and format, attention, norms, the rest.

A case says its row of the operator table and makes its work with new random operands. Sizes are those of transformer
layers: ``tokens`` rows, ``hidden`` columns. Sources of the conventions (m, n, k, shape keys): ``corpus/operators.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dataset_builder.measuring.machine import Machine
from dataset_builder.measuring.table import Cell
from dataset_builder.measuring.timing import Work

_DTYPE = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_HEAD_DIM = 64
_VOCABULARY = 32_000
_EXPERTS = 8


@dataclass(frozen=True)
class Case:
    """One operator at one size in one format. ``moved_bytes``: what one execution reads and writes."""

    op: str
    detail: str
    direction: str
    dtype: str
    moved_bytes: float
    make: Callable[[], Work]
    dtype_out: str = ""
    flops: float = 0.0
    cells: dict[str, Cell] = field(default_factory=dict)  # b, m, n, k, shape

    @property
    def key(self) -> str:
        sizes = ",".join(f"{key}={value}" for key, value in self.cells.items())
        return f"{self.op}/{self.detail}/{self.direction}/{self.dtype}>{self.dtype_out}/{sizes}"


def cases(machine: Machine, formats: tuple[str, ...], sizes: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    """Every case for (tokens, hidden) in ``sizes``, the products first; ``formats`` are among the machine's."""
    device = machine.device
    for tokens, hidden in sizes:
        for fmt in formats:
            if fmt in _DTYPE:
                yield from _products(device, fmt, tokens, hidden)
            elif fmt == "fp8_e4m3":
                yield from _scaled_products(device, (tokens, 4 * hidden, hidden))
            elif fmt == "mxfp8":
                yield _block_scaled_product(device, (tokens, 4 * hidden, hidden))
        for fmt in formats:
            if fmt in _DTYPE and fmt != "tf32":
                yield from _attention(device, fmt, tokens, hidden)
                yield from _norms(device, fmt, tokens, hidden)
                yield from _pointwise(device, fmt, tokens, hidden)
                yield from _ends(device, fmt, tokens, hidden)
        yield from _casts(device, formats, tokens, hidden)
        yield _optimizer(device, 4 * hidden * hidden)


def _random(device: torch.device, fmt: str, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float32).to(_DTYPE[fmt])


def _in_format(fmt: str, work: Work) -> Work:
    """Products of fp32 tensors use TF32 only in the case that measures it."""

    def run() -> object:
        torch.backends.cuda.matmul.allow_tf32 = fmt == "tf32"
        return work()

    return run


def product(device: torch.device, fmt: str, m: int, n: int, k: int) -> Case:
    """A forward product x w^T in any of a machine's formats (fp8 with scales of the whole tensor)."""
    if fmt == "fp8_e4m3":
        return next(_scaled_products(device, (m, n, k)))
    if fmt == "mxfp8":
        return _block_scaled_product(device, (m, n, k))

    def make() -> Work:
        a, b = _random(device, fmt, m, k), _random(device, fmt, n, k)
        return _in_format(fmt, lambda: a.mm(b.t()))

    moved = float(_DTYPE[fmt].itemsize * (m * k + k * n + m * n))
    return Case("gemm", "torch.mm forward", "fwd", fmt, moved, make, fmt if fmt != "tf32" else "fp32",
                2.0 * m * n * k, {"b": 1, "m": m, "n": n, "k": k})  # fmt: skip


def _products(device: torch.device, fmt: str, tokens: int, hidden: int) -> Iterator[Case]:
    """Forward (x w^T), data gradient (g w) and weight gradient (g^T x) of the layers' linears; grouped products."""
    size = _DTYPE[fmt].itemsize
    for out, into in ((3 * hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)):
        yield product(device, fmt, tokens, out, into)
        layouts = {
            "dgrad": ((tokens, into, out), lambda a, b: a.mm(b), ((tokens, out), (out, into))),
            "wgrad": ((out, into, tokens), lambda a, b: a.t().mm(b), ((tokens, out), (tokens, into))),
        }
        for name, ((m, n, k), run, shapes) in layouts.items():

            def make(run: Any = run, shapes: Any = shapes) -> Work:
                a, b = (_random(device, fmt, *shape) for shape in shapes)
                return _in_format(fmt, lambda: run(a, b))

            moved = float(size * (m * k + k * n + m * n))
            yield Case("gemm", f"torch.mm {name}", "fwd", fmt, moved, make, fmt if fmt != "tf32" else "fp32",
                       2.0 * m * n * k, {"b": 1, "m": m, "n": n, "k": k})  # fmt: skip
    rows = max(1, tokens // _EXPERTS)

    def make_grouped() -> Work:
        a = _random(device, fmt, _EXPERTS, rows, hidden)
        b = _random(device, fmt, _EXPERTS, hidden, 2 * hidden)
        return _in_format(fmt, lambda: torch.bmm(a, b))

    moved = float(size * _EXPERTS * (rows * hidden + 2 * hidden * hidden + 2 * rows * hidden))
    yield Case("grouped_gemm", "torch.bmm", "fwd", fmt, moved, make_grouped, fmt if fmt != "tf32" else "fp32",
               4.0 * _EXPERTS * rows * hidden * hidden,
               {"shape": f"m={rows * _EXPERTS},n={2 * hidden},k={hidden},groups={_EXPERTS}"})  # fmt: skip


def _scaled_products(device: torch.device, size: tuple[int, int, int]) -> Iterator[Case]:
    """fp8 products with given scales, of the tensor or of each row."""
    m, n, k = size
    for recipe in ("tensorwise", "rowwise"):

        def make(recipe: str = recipe) -> Work:
            a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
            b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
            is_row = recipe == "rowwise"
            scale_a = torch.full((m, 1) if is_row else (), 0.5, device=device)
            scale_b = torch.full((1, n) if is_row else (), 0.5, device=device)
            return lambda: torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16)

        moved = float(m * k + n * k + 2 * m * n)
        yield Case("gemm", f"torch._scaled_mm {recipe}", "fwd", "fp8_e4m3", moved, make, "bf16", 2.0 * m * n * k,
                   {"b": 1, "m": m, "n": n, "k": k})  # fmt: skip


def _block_scaled_product(device: torch.device, size: tuple[int, int, int]) -> Case:
    """An mxfp8 product: one e8m0 scale for 32 elements, in the layout of 128 x 4 tiles that the hardware reads."""
    m, n, k = size

    def scales(rows: int) -> Tensor:
        count = -(-rows // 128) * 128 * -(-k // 128) * 4
        return torch.ones(count, device=device).to(torch.float8_e8m0fnu)

    def make() -> Work:
        a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
        scale_a, scale_b = scales(m), scales(n)
        return lambda: torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16)

    moved = (m * k + n * k) * (1 + 1 / 32) + 2 * m * n
    return Case("gemm", "torch._scaled_mm mxfp8", "fwd", "mxfp8", moved, make, "bf16", 2.0 * m * n * k,
                {"b": 1, "m": m, "n": n, "k": k})  # fmt: skip


def _attention(device: torch.device, fmt: str, tokens: int, hidden: int) -> Iterator[Case]:
    length = min(tokens, 2048)
    batch, heads = max(1, tokens // length), max(1, hidden // _HEAD_DIM)
    size = _DTYPE[fmt].itemsize
    flops = 2.0 * batch * heads * length * length * _HEAD_DIM  # causal: half of the two products' square
    tensor = float(batch * heads * length * _HEAD_DIM * size)
    shape = f"batch={batch},heads={heads},kv_heads={heads},q={length},kv={length},d={_HEAD_DIM},causal=1"

    def operands(trained: bool) -> tuple[Tensor, ...]:
        return tuple(_random(device, fmt, batch, heads, length, _HEAD_DIM).requires_grad_(trained) for _ in range(3))

    def make() -> Work:
        q, k, v = operands(False)
        return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def make_backward() -> Work:
        q, k, v = operands(True)
        return _backward(functional.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v))

    detail = "torch scaled_dot_product_attention"
    yield Case("attention", detail, "fwd", fmt, 4 * tensor, make, fmt, flops, {"shape": shape})
    yield Case("attention", detail, "bwd", fmt, 8 * tensor, make_backward, fmt, 2.5 * flops, {"shape": shape})


def _backward(out: Tensor, inputs: tuple[Tensor, ...]) -> Work:
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _norms(device: torch.device, fmt: str, tokens: int, hidden: int) -> Iterator[Case]:
    moved = float(2 * tokens * hidden * _DTYPE[fmt].itemsize)
    kernels: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "layernorm": lambda x, w: functional.layer_norm(x, (hidden,), w),
        "rmsnorm": lambda x, w: functional.rms_norm(x, (hidden,), w),
        "softmax": lambda x, w: torch.softmax(x, dim=-1),
    }
    for op, kernel in kernels.items():

        def make(kernel: Any = kernel) -> Work:
            x, w = _random(device, fmt, tokens, hidden), _random(device, fmt, hidden)
            return lambda: kernel(x, w)

        def make_backward(kernel: Any = kernel) -> Work:
            x, w = _random(device, fmt, tokens, hidden).requires_grad_(), _random(device, fmt, hidden)
            return _backward(kernel(x, w), (x,))

        cells: dict[str, Cell] = {"shape": f"rows={tokens},cols={hidden}"}
        yield Case(op, f"torch {op}", "fwd", fmt, moved, make, fmt, cells=cells)
        yield Case(op, f"torch {op}", "bwd", fmt, 1.5 * moved, make_backward, fmt, cells=cells)


def _pointwise(device: torch.device, fmt: str, tokens: int, hidden: int) -> Iterator[Case]:
    size, columns = _DTYPE[fmt].itemsize, 4 * hidden

    def make_add() -> Work:
        a, b = (_random(device, fmt, tokens, hidden) for _ in range(2))
        return lambda: a + b

    def make_gelu() -> Work:
        x = _random(device, fmt, tokens, columns)
        return lambda: functional.gelu(x)

    moved = float(tokens * hidden * size)
    yield Case("elementwise", "add", "fwd", fmt, 3 * moved, make_add, fmt,
               cells={"shape": f"rows={tokens},cols={hidden}"})  # fmt: skip
    yield Case("gelu", "torch gelu", "fwd", fmt, 8 * moved, make_gelu, fmt,
               cells={"shape": f"rows={tokens},cols={columns}"})  # fmt: skip


def _ends(device: torch.device, fmt: str, tokens: int, hidden: int) -> Iterator[Case]:
    """Embedding and cross entropy, either way."""
    size = _DTYPE[fmt].itemsize

    def ids() -> Tensor:
        return torch.randint(_VOCABULARY, (tokens,), device=device)

    def make_embedding() -> Work:
        table, rows = _random(device, fmt, _VOCABULARY, hidden), ids()
        return lambda: functional.embedding(rows, table)

    def make_loss() -> Work:
        logits, labels = _random(device, fmt, tokens, _VOCABULARY), ids()
        return lambda: functional.cross_entropy(logits, labels)

    def make_loss_backward() -> Work:
        logits, labels = _random(device, fmt, tokens, _VOCABULARY).requires_grad_(), ids()
        return _backward(functional.cross_entropy(logits, labels), (logits,))

    shape: dict[str, Cell] = {"shape": f"B=1,T={tokens},V={_VOCABULARY}"}
    logit_bytes = float(tokens * _VOCABULARY * size)
    yield Case("embedding", "torch embedding", "fwd", fmt, 2.0 * tokens * hidden * size, make_embedding, fmt,
               cells={"shape": f"B=1,T={tokens},D={hidden}"})  # fmt: skip
    yield Case("cross_entropy", "torch cross_entropy", "fwd", fmt, 3 * logit_bytes, make_loss, fmt, cells=shape)
    yield Case(
        "cross_entropy", "torch cross_entropy", "bwd", fmt, 3 * logit_bytes, make_loss_backward, fmt, cells=shape
    )


def _casts(device: torch.device, formats: tuple[str, ...], tokens: int, hidden: int) -> Iterator[Case]:
    """Between fp32 and 16 bit, and quantising to fp8 with the scale of the largest value."""
    pairs = [("fp32", low) for low in ("fp16", "bf16") if low in formats]
    for first, second in [*pairs, *((low, wide) for wide, low in pairs)]:

        def make(first: str = first, second: str = second) -> Work:
            x, dtype = _random(device, first, tokens, hidden), _DTYPE[second]
            return lambda: x.to(dtype)

        moved = float(tokens * hidden * (_DTYPE[first].itemsize + _DTYPE[second].itemsize))
        yield Case("cast", "torch to", "fwd", first, moved, make, second, cells={"shape": f"m={tokens},k={hidden}"})
    if "fp8_e4m3" in formats:

        def make_quantised() -> Work:
            x = _random(device, "bf16", tokens, hidden)

            def run() -> Tensor:
                scale = x.abs().amax().float() / 448.0
                return (x / scale).to(torch.float8_e4m3fn)

            return run

        yield Case("cast", "amax, scale and cast, eager", "fwd", "bf16", 3.0 * tokens * hidden, make_quantised,
                   "fp8_e4m3", cells={"shape": f"m={tokens},k={hidden}"})  # fmt: skip


def _optimizer(device: torch.device, elements: int) -> Case:
    def make() -> Work:
        parameter = torch.nn.Parameter(torch.randn(elements, device=device))
        parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
        return optimizer.step

    return Case("optimizer", "torch fused AdamW", "none", "fp32", 28.0 * elements, make, "fp32",
                cells={"shape": f"params={elements},param_tensors=1"})  # fmt: skip
