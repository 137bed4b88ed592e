"""One row of an operator table as the graph node it measured, on its device and over its link.

In: a row of ``ops.parquet`` (microseconds, bytes). Out: an :class:`OpNode` after the conventions of
``tracing/graph.py``, so that a measured kernel and a traced one look alike to the network. Two conventions of the
sources need care. A backward row of a matrix product is the data gradient and the weight gradient together: one node
``linear_backward`` (or ``bmm_backward``) of the forward shape with twice its FLOPs. Low-precision products whose
time includes quantising the activation are ``gemm+quantize``; with a given scale they are ``gemm``. Names of fp8
products end in the recipe, as in ``gemm.fp8_blockwise``.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dataset_builder.job.formats import BYTES_PER_ELEMENT
from dataset_builder.job.hardware import DeviceSpec, LinkSpec, cell_device, cell_link, link, link_names
from dataset_builder.tracing.graph import COLLECTIVES, OpNode, Phase
from dataset_builder.tracing.layout import AxisGroup, Tier

_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "int8": "fp8_e4m3"}  # int8 moves as many bytes
_PRODUCTS = ("gemm", "linear", "bmm")
_WORK_PER_BACKWARD = 2.0  # data gradient and weight gradient, each as much as the forward product
_ATTENTION_BACKWARD = 2.5  # five products for the forward's two, scores computed again (arXiv 2205.14135)
_VOCABULARY = 50_304  # 50,257 words padded, the vocabulary of the source that names only "vocab padded/mp"


class OperatorError(ValueError):
    """A row that is no operator of a training step, or that lacks what its node needs."""


class OperatorRow:
    """A row being read: typed access to its cells and to the ``key=value`` parts of its shape."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.shape_text = self.text("shape")
        self.sizes = _sizes(self.shape_text)
        self.notes = self.text("notes")

    def text(self, column: str) -> str:
        value = self.values.get(column)
        return value if isinstance(value, str) else ""

    def number(self, column: str) -> float | None:
        value = self.values.get(column)
        return float(value) if isinstance(value, (int, float)) and value == value else None

    def size(self, *names: str) -> int:
        """The first of these shape keys that the row has; raises OperatorError without any."""
        for name in names:
            if name in self.sizes:
                return self.sizes[name]
        raise OperatorError(f"shape {self.shape_text!r} lacks {' or '.join(names)}")

    @property
    def latency_s(self) -> float:
        latency_us = self.number("latency_us")
        if not latency_us or not 0 < latency_us < math.inf:
            raise OperatorError(f"latency_us: {latency_us} is not a time")
        return latency_us * 1e-6

    @property
    def is_backward(self) -> bool:
        return self.text("direction") == "bwd"

    @property
    def phase(self) -> Phase:
        return "backward" if self.is_backward else "forward"

    @property
    def dtype(self) -> str:
        name = _DTYPES.get(self.text("dtype"), self.text("dtype"))
        if name not in BYTES_PER_ELEMENT:
            raise OperatorError(f"dtype {name!r} is not a format of the graph" if name else "dtype is not stated")
        return name

    @property
    def dtype_out(self) -> str:
        name = _DTYPES.get(self.text("dtype_out"), self.text("dtype_out"))
        if name in BYTES_PER_ELEMENT:
            return name
        source = self.dtype
        return {"tf32": "fp32"}.get(source, "bf16" if BYTES_PER_ELEMENT[source] < 2 else source)

    @property
    def includes_launch(self) -> bool:
        """Whether the time holds the host's launch, or is the kernel's alone (profiler, CUDA graph)."""
        return any(words in self.notes for words in ("includes launch", "framework overhead", "host call"))

    @property
    def group(self) -> str:
        """Rows of one operator and shape share this hash, whatever their direction, format and device."""
        cells = [self.text("source_id"), self.text("op"), self.shape_text]
        cells += [str(self.values.get(column)) for column in ("b", "m", "n", "k", "bytes", "num_gpus")]
        return hashlib.blake2b("|".join(cells).encode(), digest_size=6).hexdigest()


@functools.lru_cache(maxsize=4096)
def _sizes(text: str) -> dict[str, int]:
    return {key: int(float(value)) for key, value in re.findall(r"(\w+)=(-?\d+(?:\.\d+)?)(?=[,\s]|$)", text)}


@functools.cache
def _device(name: str) -> DeviceSpec | None:
    try:
        return cell_device(name)
    except KeyError:
        return None


def operator_node(row: OperatorRow) -> tuple[OpNode, DeviceSpec, AxisGroup | None]:
    """The node, device and (for a collective) group of a row; raises OperatorError with the reason for none."""
    op = row.text("op")
    if op not in _BUILDERS:
        raise OperatorError(f"{op}: {_NOT_AN_OPERATOR.get(op, 'not an operator of the graph')}")
    if row.text("direction") == "fwd_bwd":
        raise OperatorError(f"{op}: forward and backward timed together")
    spec = _device(row.text("gpu"))
    if spec is None:
        raise OperatorError(f"gpu {row.text('gpu')!r} is not in the device catalogue")
    _check_trusted(row)
    node = _BUILDERS[op](row)
    group = _group(row, spec) if node.kind in COLLECTIVES else None
    _check_physics(row, node, spec)
    return node, spec, group


def _check_trusted(row: OperatorRow) -> None:
    """Rows that their source's own notes show not to be the time of the operator."""
    op = row.text("op")
    if "host-timed" in row.notes:
        raise OperatorError(f"{op}: timed on the host, waiting for other ranks included")
    if op == "optimizer" and "Vista" in row.notes:
        raise OperatorError("optimizer: span of the host's call, shorter than the memory traffic of the step")
    if op == "optimizer" and row.text("op_detail") == "optimizer":
        raise OperatorError("optimizer: a step of many small kernels under the profiler, not the fused one")
    if op == "moe_mlp" and row.text("gpu").startswith("MI308X"):
        raise OperatorError("moe_mlp: not of this device, up to 13 times its peak")
    if op == "dropout" and "-inf-" in row.notes:
        raise OperatorError("dropout: in inference nothing is dropped")


_TOLERANCE = 1.05  # clocks above the specified boost


def _check_physics(row: OperatorRow, node: OpNode, spec: DeviceSpec) -> None:
    """Refuses times no execution can reach: the operator was skipped, or the shape is not what ran."""
    latency_s = row.latency_s
    products = node.kind in ("gemm", "grouped_gemm", "attention")
    if products and node.flops > _TOLERANCE * latency_s * spec.peak(node.input_dtype):
        raise OperatorError(f"{row.text('op')}: faster than the device's dense {node.input_dtype} peak")
    moved = node.bytes_read + node.bytes_written
    streams = node.kind in ("elementwise", "norm", "softmax", "quantize", "reduction", "embedding")
    if streams and moved > 4 * spec.l2_bytes and 0.5 * moved / spec.hbm_bytes_per_s > latency_s:
        raise OperatorError(f"{row.text('op')}: faster than the device's memory, nothing was executed")


_NOT_AN_OPERATOR = {
    "broadcast": "no broadcast in a training step's graph",
    "mlp_geglu": "a whole feed-forward block, not one operator",
    "mlp_swiglu": "a whole feed-forward block, not one operator",
}


@dataclass(frozen=True)
class _Work:
    """Bytes and FLOPs of one execution."""

    flops: float
    read: float
    written: float
    launches: float = 1.0


def _node(
    row: OperatorRow,
    kind: str,
    op: str,
    shape: tuple[int, ...],
    work: _Work,
    *,
    output: str | None = None,
    phase: Phase | None = None,
) -> OpNode:
    if min(shape) < 0 or max(work.flops, work.read + work.written) <= 0:
        raise OperatorError(f"{op}: shape {shape} has no work")
    if row.text("op_detail") in _EAGER_CHAINS:
        op, work = f"{op}_unfused", replace(work, launches=work.launches + 4)
    return OpNode(
        kind=kind, op=op, module="", phase=phase or row.phase, shape=shape, input_dtype=row.dtype,
        output_dtype=output or row.dtype_out, accumulate_dtype="fp32", axis=None, group_size=1, per="microbatch",
        flops=work.flops, bytes_read=work.read, bytes_written=work.written, message_bytes=0.0, launches=work.launches,
    )  # fmt: skip


def _bytes(dtype: str) -> float:
    return BYTES_PER_ELEMENT[dtype]


def _product(row: OperatorRow) -> OpNode:
    sizes = [row.number(column) for column in ("m", "n", "k")]
    if None in sizes:
        raise OperatorError("m, n or k is missing")
    batch, (m, n, k) = int(row.number("b") or 1), (int(size or 0) for size in sizes)
    source, out = _bytes(row.dtype), _bytes(row.dtype_out)
    flops = 2.0 * batch * m * n * k
    first, second, result = batch * m * k, batch * k * n, batch * m * n
    shape = (batch, m, n, k)
    if row.is_backward:
        name = "bmm_backward" if row.text("op") == "bmm" else "linear_backward"
        read, written = (2 * result + first + second) * source, (first + second) * out
        return _node(row, "gemm", name, shape, _Work(_WORK_PER_BACKWARD * flops, read, written, 2.0))
    work = _Work(flops, (first + second) * source, result * out)
    recipe = _recipe(row)
    if "activation quantisation included" not in row.notes or "static" in row.notes:
        return _node(row, "gemm", f"gemm{recipe}", shape, work)
    quantised = _Work(flops, work.read + first * (2.0 + source), work.written + first * source, 2.0)
    return _node(row, "gemm", f"gemm+quantize{recipe}", shape, quantised)


def _recipe(row: OperatorRow) -> str:
    """How an fp8 product is scaled, as a suffix in the words of the job's ``linear`` field; else empty."""
    if not row.dtype.startswith("fp8"):
        return ""
    words = f"{row.notes} {row.text('op_detail')}".lower()
    if "block" in words or "1x128" in words or "128x128" in words:
        return ".fp8_blockwise"
    if "per-token" in words or "rowwise" in words or "per_token" in words:
        return ".fp8_rowwise"
    return ".fp8_delayed" if "static" in words else ".fp8_tensorwise"


def _expert_mlp(row: OperatorRow) -> OpNode:
    """A fused expert feed-forward: all of its products as one grouped product of the same FLOPs."""
    tokens, hidden = row.size("tokens"), row.size("hidden")
    expert_ranks = max(1, row.sizes.get("moe_ep", 1))
    width = row.size("inter") // max(1, row.sizes.get("moe_tp", 1))
    experts = max(1, row.size("experts") // expert_ranks)
    top_k = row.sizes.get("topk", 0)
    if top_k <= 0 or width <= 0:
        raise OperatorError(f"moe_mlp: shape {row.shape_text!r} does not say the experts per token")
    rows = max(1.0, tokens * top_k / expert_ranks)
    flops = 2.0 * rows * hidden * width * 3  # gate, up, down
    weights = min(float(experts), rows) * 3 * hidden * width * _bytes(row.dtype)
    factor = _WORK_PER_BACKWARD if row.is_backward else 1.0
    work = _Work(factor * flops, factor * (weights + rows * hidden * 2.0), factor * rows * hidden * 2.0, 4.0 * factor)
    shape = (experts, math.ceil(rows / experts), width, hidden)
    return _node(row, "grouped_gemm", f"moe_mlp{_recipe(row)}", shape, work)


def _grouped(row: OperatorRow) -> OpNode:
    rows, n, k, groups = row.size("m", "total_m"), row.size("n"), row.size("k"), row.size("groups")
    source, out = _bytes(row.dtype), _bytes(row.dtype_out)
    read, written = (rows * k + groups * k * n) * source, rows * n * out
    work = _Work(2.0 * rows * n * k, read, written)
    return _node(row, "grouped_gemm", "grouped_gemm", (groups, math.ceil(rows / groups), n, k), work)


def _attention(row: OperatorRow) -> OpNode:
    if "mixed batch" in row.text("op_detail") or "decode" in row.text("op_detail"):
        raise OperatorError("attention: a batch that mixes prefill and decoding, none in training")
    batch, heads, kv_heads = row.size("batch"), row.size("heads"), row.size("kv_heads")
    queries, keys, head_dim = row.size("q"), row.size("kv"), row.size("d")
    value_dim = row.sizes.get("dv", head_dim)
    window = min(row.sizes.get("window", 0) or keys, keys)
    pairs = visible_pairs(queries, keys, window) if row.sizes.get("causal") else float(queries * window)
    flops = 2.0 * batch * heads * pairs * (head_dim + value_dim)
    size = _bytes(row.dtype)
    query_bytes = batch * queries * heads * head_dim * size
    key_bytes = batch * keys * kv_heads * (head_dim + value_dim) * size
    output_bytes = batch * queries * heads * value_dim * _bytes(row.dtype_out)
    work = _Work(flops, query_bytes + key_bytes, output_bytes)
    if row.is_backward:
        read = query_bytes + key_bytes + 2 * output_bytes
        work = _Work(_ATTENTION_BACKWARD * flops, read, query_bytes + key_bytes, 2.0)
    shape = (batch, heads, kv_heads, queries, keys, head_dim, window)
    return _node(row, "attention", "attention_backward" if row.is_backward else "attention", shape, work)


def visible_pairs(queries: int, keys: int, window: int) -> float:
    """Query-key pairs under a causal mask aligned to the last key, each query seeing ``window`` keys at most."""
    first = keys - queries + 1  # keys the first query sees
    if first < 1:
        queries, first = keys, 1
    growing = max(0, min(queries, window - first + 1))  # queries that see fewer keys than the window
    return growing * first + growing * (growing - 1) / 2 + (queries - growing) * float(window)


def _rows_and_columns(row: OperatorRow) -> tuple[int, int]:
    found = re.search(r"out=\[([\d, ]+)\]", row.shape_text)
    if found:
        sizes = [int(size) for size in found[1].split(",")]
        return math.prod(sizes[:-1]), sizes[-1]
    if "rows" in row.sizes:
        return row.size("rows"), row.size("cols")
    if "l" in row.sizes and row.text("op") == "softmax":  # scores of one tensor-parallel rank
        return row.size("b") * row.size("h") // row.sizes.get("mp", 1) * row.size("l"), row.size("l")
    if "l" in row.sizes:
        return row.size("b") * row.size("l"), row.size("dim")
    if "N" in row.sizes:
        return row.size("M"), row.size("N")
    return row.size("tokens", "T"), row.size("hidden", "hidden_size")


def _normalise(kind: str) -> Callable[[OperatorRow], OpNode]:
    def build(row: OperatorRow) -> OpNode:
        rows, columns = _rows_and_columns(row)
        source, out = rows * columns * _bytes(row.dtype), rows * columns * _bytes(row.dtype_out)
        flops = (10.0 if row.is_backward else 5.0) * rows * columns
        work = _Work(flops, 2 * source, out, 2.0) if row.is_backward else _Work(flops, source, out)
        op = row.text("op") + ("_backward" if row.is_backward else "")
        return _node(row, kind, op, (rows, columns), work)

    return build


_INPUTS = {"elementwise": 2, "silu_mul": 2}
_UNARY = ("fillmask", "relu", "tanh", "addu", "divu", "mulu", "powu")  # u: the second operand is a number
_EAGER_CHAINS = ("RMSlayernorm", "RoPE", "fillmask", "parallel_cross_entropy_128")  # several kernels, not a fused one


def _pointwise(row: OperatorRow) -> OpNode:
    op = row.text("op")
    elements = _elements(row, op)
    inputs = _inputs(row, op)
    source, out = elements * _bytes(row.dtype), elements * _bytes(row.dtype_out)
    read, written = inputs * source, out
    if op == "dropout":  # one byte of mask an element
        read, written = (source + elements, out) if row.is_backward else (source, out + elements)
    elif row.is_backward and op in ("silu_mul", "gelu", "activation"):
        read, written = (inputs + 1) * source, inputs * out
    name = row.text("op_detail") if op == "elementwise" and row.text("op_detail").isidentifier() else op
    work = _Work(float(elements), read, written)
    return _node(row, "elementwise", name + ("_backward" if row.is_backward else ""), (elements,), work)  # fmt: skip


def _inputs(row: OperatorRow, op: str) -> int:
    operands = re.search(r"in=\[(.*)\] out", row.shape_text)
    if operands:
        result = re.search(r"out=(\[.*\])", row.shape_text)
        same = operands[1].count(result[1]) if result else 1
        return max(1, same)
    return 1 if row.text("op_detail") in _UNARY else _INPUTS.get(op, 1)


def _elements(row: OperatorRow, op: str) -> int:
    sizes = row.sizes
    if op == "rope" and "l" in sizes:  # queries and keys of one tensor-parallel rank
        return 2 * row.size("b") * row.size("l") * row.size("dim") // sizes.get("mp", 1)
    if op == "rope" and "d" in sizes:
        return row.size("tokens") * (row.size("heads") + row.size("kv_heads")) * row.size("d")
    if op == "rope":  # hidden of the model: head_dim 128 in every model of that source
        return row.size("tokens") * (row.size("heads") + row.size("kv_heads")) * 128
    if op == "gelu" and "l" in sizes:
        return 4 * row.size("b") * row.size("l") * row.size("dim") // sizes.get("mp", 1)
    if "fillmask" in row.text("op_detail"):
        return row.size("b") * row.size("h") // sizes.get("mp", 1) * row.size("l") ** 2
    if op == "silu_mul":
        return row.size("tokens") * row.size("ffn")
    rows, columns = _rows_and_columns(row)
    return rows * columns


def _embedding(row: OperatorRow) -> OpNode:
    if "D" in row.sizes:
        tokens, columns = row.size("B") * row.size("T"), row.size("D")
    else:
        tokens, columns = _rows_and_columns(row)
    moved = tokens * columns * _bytes(row.dtype)
    written = moved
    if row.is_backward and "l" in row.sizes:  # the gradient of the whole table is cleared first
        written += _VOCABULARY // row.sizes.get("mp", 1) * columns * _bytes(row.dtype)
    op = "embedding_backward" if row.is_backward else "embedding"
    return _node(row, "embedding", op, (tokens, columns), _Work(0.0, moved, written))


def _cross_entropy(row: OperatorRow) -> OpNode:
    sizes = row.sizes
    if "l" in sizes:
        rows, vocabulary = row.size("b") * row.size("l"), _VOCABULARY // sizes.get("mp", 1)
    elif "V" in sizes and "S" in sizes:
        rows, vocabulary = row.size("B") * row.size("S"), row.size("V")
    elif "V" in sizes:
        rows, vocabulary = row.size("B") * row.size("T"), row.size("V")
    else:
        rows, vocabulary = row.size("BT"), row.size("vocab_size")
    logits = rows * vocabulary * _bytes(row.dtype)
    written = logits if row.is_backward else rows * 4.0
    op = "cross_entropy_backward" if row.is_backward else "cross_entropy"
    return _node(row, "cross_entropy", op, (rows, vocabulary), _Work(5.0 * rows * vocabulary, logits, written))


def _quantize(row: OperatorRow) -> OpNode:
    detail = row.text("op_detail")
    if "minus" in detail:
        raise OperatorError("cast: the difference of two measurements")
    plain = re.match(r"\d+(?:x\d+)+", row.shape_text)
    elements = math.prod(map(int, plain[0].split("x"))) if plain else row.size("m") * row.size("k")
    source = elements * _bytes(row.dtype)
    if detail.startswith("compute_scale"):
        return _node(row, "reduction", "amax", (elements,), _Work(float(elements), source, 4.0), output="fp32")
    out = row.dtype_out
    work = _Work(2.0 * elements, source, elements * _bytes(out))
    if _bytes(out) >= 2:  # between plain formats
        work = _Work(0.0, source, elements * _bytes(out))
        return _node(row, "cast", "_to_copy", (elements,), work, output=out)
    return _node(row, "quantize", "quantize", (elements,), work, output=out)


def _adam(row: OperatorRow) -> OpNode:
    sizes = row.sizes
    if "params" in sizes:
        elements, tensors = row.size("params"), row.sizes.get("param_tensors", 1)
    else:
        encoders, width = row.size("encoders"), row.size("dim")
        ranks = max(1, sizes.get("mp", 1))
        elements = encoders * 12 * width**2 // ranks
        if "first" in row.text("op_detail").lower() or "last" in row.text("op_detail").lower():
            elements += _VOCABULARY * width // ranks
        tensors = 12 * encoders
    # fp32 weight, gradient and two moments read; weight and moments written (apex multi-tensor Adam)
    work = _Work(12.0 * elements, 16.0 * elements, 12.0 * elements, math.ceil(tensors / 36))
    return _node(row, "optimizer", "adam", (elements,), work, output="fp32", phase="optimizer")


def _collective(row: OperatorRow) -> OpNode:
    op, size = row.text("op"), _bytes(row.dtype)
    ranks = int(row.number("num_gpus") or 0)
    if ranks < 2:
        raise OperatorError(f"{op}: the number of GPUs is not stated")
    message = row.number("bytes")
    if message is None:  # expert dispatch or combine
        message = row.size("tokens") * max(1, row.size("topk")) * row.size("hidden") * size
    elif op == "all_gather" and "bytes = per-rank input" in row.notes:
        message *= ranks
    if message <= 0:
        raise OperatorError(f"{op}: empty message")
    return OpNode(
        kind=op, op=op, module="", phase="forward", shape=(max(1, round(message / size)),), input_dtype=row.dtype,
        output_dtype=row.dtype, accumulate_dtype=row.dtype, axis=None, group_size=ranks, per="microbatch", flops=0.0,
        bytes_read=message, bytes_written=message, message_bytes=message, launches=1.0,
    )  # fmt: skip


_BUILDERS: dict[str, Callable[[OperatorRow], OpNode]] = {
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(("elementwise", "gelu", "silu_mul", "dropout", "activation", "rope"), _pointwise),
    **dict.fromkeys(("rmsnorm", "layernorm"), _normalise("norm")),
    **dict.fromkeys(COLLECTIVES, _collective),
    "softmax": _normalise("softmax"),
    "attention": _attention,
    "moe_mlp": _expert_mlp,
    "grouped_gemm": _grouped,
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "cast": _quantize,
    "optimizer": _adam,
}


def _group(row: OperatorRow, spec: DeviceSpec) -> AxisGroup:
    ranks = int(row.number("num_gpus") or 1)
    per_node = int(row.number("gpus_per_node") or ranks)
    nodes = max(1, math.ceil(ranks / per_node))
    tiers = []
    if nodes < ranks:
        tiers.append(Tier(_link(row.text("intra_node"), per_node, spec.intra_node or "")))
    if nodes > 1:
        tiers.append(Tier(_link(row.text("inter_node"), per_node, spec.inter_node or ""), ranks / nodes))
    return AxisGroup(ranks, nodes, tuple(tiers), copies=row.sizes.get("topk") or 1)


_LINK_WORDS = (("nvl72", "nvlink5-nvl72"), ("nvlink-pair", "nvlink-pair+pcie5"), ("h800", "nvlink4-h800"))


@functools.lru_cache(maxsize=256)
def _link(name: str, gpus_per_node: int, usual: str) -> LinkSpec:
    """The catalogue's link of that name, one read off ``kind-NICsxGb/s``, or the device's usual one."""
    if name.startswith("{"):
        try:
            return cell_link(name)
        except KeyError as error:
            raise OperatorError(f"link: the specification cannot be used: {error.args[0]}") from None
    known = link_names()
    lowered = name.lower().rstrip("?")
    for candidate in (lowered, *(target for word, target in _LINK_WORDS if word in lowered), usual):
        if candidate in known and (candidate != usual or not re.search(r"\d+x\d+", lowered)):
            return link(candidate, gpus_per_node)
    nics = re.search(r"(\d+)x(\d+)", lowered)
    if nics:
        bytes_per_s = int(nics[1]) * int(nics[2]) * 1e9 / 8 / gpus_per_node
        return LinkSpec(name=lowered, bytes_per_s_per_gpu=bytes_per_s, latency_s=1e-5, source="rate in its name")
    raise OperatorError(f"link {name!r} is not in the link catalogue")
