"""Reduces a recording of ATen operators to kernels as a GPU runs them, with symbolic work.

Operators outside fusion regions are one kernel each. Where the stack fuses (``structure.fused``), the pointwise and
reduction operators of one region become one kernel that moves only the tensors crossing the region, and a region's
backward kernel computes the forward region's internals again from its inputs instead of reading them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dataset_builder.tracing.block import Recording
from dataset_builder.tracing.graph import COLLECTIVES, Axis, EdgeKind, Phase
from dataset_builder.tracing.recorder import RawOp, TensorRef
from dataset_builder.tracing.structure import TWO_PASS_RECIPES, BlockStructure, element_bytes
from dataset_builder.tracing.symbols import Polynomial, constant
from dataset_builder.tracing.work import ATTENTION_BACKWARD_FACTOR

Dimension = Callable[[int], Polynomial]

_KIND_OF_OP: dict[str, str] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "scaled_mm", "scaled_mm_accumulate", "mm_accumulate"), "gemm"),
    "grouped_mm": "grouped_gemm",
    **dict.fromkeys(("attention", "attention_backward"), "attention"),
    **dict.fromkeys(("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm"), "norm"),
    **dict.fromkeys(("_softmax", "_softmax_backward_data"), "softmax"),
    **dict.fromkeys(
        ("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward"), "cross_entropy"
    ),
    **dict.fromkeys(("embedding", "embedding_dense_backward"), "embedding"),
    **dict.fromkeys(
        ("sum", "mean", "amax", "max", "topk", "linalg_vector_norm", "_foreach_norm", "argmax"), "reduction"
    ),
    **dict.fromkeys(
        ("clone", "copy_", "cat", "slice_backward", "select_backward", "zeros", "new_zeros", "zeros_like", "zero_",
         "permute", "relative_shift", "stack", "gather", "scatter_add", "scatter", "fill_", "index", "index_put",
         "index_select", "index_add",
         "_foreach_copy_", "_foreach_zero_", "constant_pad_nd", "split_with_sizes_copy"), "copy"
    ),
    **dict.fromkeys(("_fused_adamw_", "_fused_adam_", "_fused_sgd_"), "optimizer"),
    "quantize": "quantize",
    **{name: name for name in COLLECTIVES},
}  # fmt: skip
_KIND_OF_REGION = {
    "norm": "norm", "softmax": "softmax", "router": "softmax", "loss": "cross_entropy", "word": "embedding",
    "position": "embedding", "moments": "optimizer", "apply": "optimizer", "trust_ratio": "reduction",
    "statistics": "reduction",
}  # fmt: skip
_NEVER_FUSED = ("gemm", "grouped_gemm", "attention", "quantize", "optimizer", *COLLECTIVES)
_ROWWISE = ("norm", "softmax", "cross_entropy")
_FLOATING = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "nvfp4", "fp64")


@dataclass(frozen=True)
class Kernel:
    """A node whose numbers are polynomials of the sizes' names."""

    kind: str
    op: str
    module: str
    phase: Phase
    shape: tuple[Polynomial, ...]
    input_dtype: str
    output_dtype: str
    accumulate_dtype: str
    axis: Axis | None
    per: Literal["microbatch", "iteration"]
    flops: Polynomial
    bytes_read: Polynomial
    bytes_written: Polynomial
    message_bytes: Polynomial
    launches: float
    is_causal: bool = False


@dataclass
class Template:
    """A block's kernels, edges and ports (indices of kernels), and the sizes of what it holds."""

    structure_key: str
    kernels: list[Kernel]
    edges: list[tuple[int, int, EdgeKind]]
    ports: dict[str, list[int]]  # input, output, output_gradient, input_gradient, weight_gradient
    output_dtype: str
    saved_bytes: Polynomial
    recompute_bytes: Polynomial
    parameters: dict[str, Polynomial]  # dense, expert, vocabulary (the tied table); trained: those with a gradient


@dataclass
class _Group:
    """Operators that run as one kernel."""

    ops: list[int]
    region: str
    kind: str
    reads: dict[int, list[TensorRef]] = field(default_factory=dict)
    writes: dict[int, list[TensorRef]] = field(default_factory=dict)


def reduce_recording(recording: Recording, dimension: Dimension) -> Template:
    """The kernels of a recording; ``dimension`` turns a traced dimension into a polynomial."""
    return _Reducer(recording, dimension).template()


def kernel_of(op: RawOp, structure: BlockStructure) -> Kernel | None:
    """One operator alone as a kernel on its own sizes, so all polynomials are numbers; ``None``: scalars only."""
    unfused = dataclasses.replace(structure, fused=False)
    kernels = reduce_recording(Recording(unfused, [op]), constant).kernels
    return kernels[0] if kernels else None


class _Reducer:
    """One reduction: grouping, traffic of each group, edges, what is saved."""

    def __init__(self, recording: Recording, dimension: Dimension) -> None:
        self.recording, self.structure = recording, recording.structure
        self.dimension = dimension
        self.ops = [op for op in recording.ops if not _is_negligible(op)]
        self.groups = self._group()
        self.group_of = {index: number for number, group in enumerate(self.groups) for index in group.ops}
        self.producers = self._producers()
        self._traffic()

    # ---- sizes

    def elements(self, ref: TensorRef) -> Polynomial:
        product = constant(1.0)
        for size in ref.shape:
            product = product * self.dimension(size)
        return product

    def bytes_of(self, ref: TensorRef) -> Polynomial:
        return self.elements(ref) * element_bytes(ref.fmt)

    # ---- grouping

    def _group(self) -> list[_Group]:
        groups: list[_Group] = []
        open_groups: dict[tuple[str, str, str], _Group] = {}
        for index, op in enumerate(self.ops):
            kind = kind_of(op)
            key = (op.scope.module, op.scope.region, op.phase)
            if not self.structure.fused or not op.scope.region or kind in _NEVER_FUSED:
                groups.append(_Group([index], "", kind))
                open_groups.pop(key, None)
                continue
            if key not in open_groups:
                open_groups[key] = _Group([], op.scope.region, _KIND_OF_REGION.get(op.scope.region, "elementwise"))
                groups.append(open_groups[key])
            open_groups[key].ops.append(index)
        return groups

    def _producers(self) -> dict[int, dict[int, int]]:
        """For every operator: which operator last wrote each storage it reads."""
        last: dict[int, int] = {}
        producers: dict[int, dict[int, int]] = {}
        for index, op in enumerate(self.ops):
            producers[index] = {ref.storage: last[ref.storage] for ref in op.inputs if ref.storage in last}
            for ref in op.outputs:
                last[ref.storage] = index
        return producers

    # ---- traffic

    def _traffic(self) -> None:
        consumers: dict[int, set[int]] = {}  # producing operator -> reading groups, forward internals recomputed
        for index, sources in self.producers.items():
            for source in sources.values():
                consumers.setdefault(source, set()).add(self.group_of[index])
        final = {self.recording.output.storage} if self.recording.output else set()
        final |= self.recording.input_gradients | self.recording.weight_gradients
        last_writer = {ref.storage: index for index, op in enumerate(self.ops) for ref in op.outputs}
        allocator: dict[int, int] = {}  # storage -> group that made it; tensors changed in place are made elsewhere
        for index, op in enumerate(self.ops):
            for ref in op.outputs:
                if ref.storage not in {source.storage for source in op.inputs}:
                    allocator.setdefault(ref.storage, self.group_of[index])
        for number, group in enumerate(self.groups):
            inside = set(group.ops)
            for index in group.ops:
                op = self.ops[index]
                for ref in _reads(op):
                    if self.producers[index].get(ref.storage) not in inside:
                        self._read(group, ref, self.producers[index].get(ref.storage))
                for ref in op.outputs:
                    readers = consumers.get(index, set()) - {number}
                    is_final = ref.storage in final and last_writer[ref.storage] == index
                    is_kept = any(ref.fmt == "bool" or not self._recomputes(reader, number) for reader in readers)
                    is_kept = is_kept or allocator.get(ref.storage) != number
                    if not group.region or is_kept or is_final or not consumers.get(index):
                        _touch(group.writes, ref)

    def _recomputes(self, reader: int, writer: int) -> bool:
        """Whether the reading kernel is the backward of the writing region, and computes its internals again."""
        first, second = self.groups[writer], self.groups[reader]
        if not first.region or not second.region:
            return False
        forward, backward = self.ops[first.ops[0]], self.ops[second.ops[0]]
        return forward.scope == backward.scope and backward.phase == "backward" and forward.phase != "backward"

    def _read(self, group: _Group, ref: TensorRef, producer: int | None) -> None:
        if producer is not None:
            source = self.group_of[producer]
            number = self.group_of[group.ops[0]]
            if self._recomputes(number, source) and ref.storage not in self.groups[source].writes:
                for again in _flat(self.groups[source].reads):
                    _touch(group.reads, again)
                return
        _touch(group.reads, ref)

    # ---- the template

    def template(self) -> Template:
        kept: dict[int, int] = {}
        kernels: list[Kernel] = []
        for number, group in enumerate(self.groups):
            op = self.ops[group.ops[0]]
            is_cached_weight = op.attributes.get("what") == "weight" and not self.structure.autocast
            if is_cached_weight and op.phase == "recompute":
                continue  # the quantised weight of the forward pass is still there
            kept[number] = len(kernels)
            kernels.append(self._kernel(group, "iteration" if is_cached_weight else "microbatch"))
        saved, again = self._saved()
        recording = self.recording
        return Template(
            structure_key=self.structure.key,
            kernels=kernels,
            edges=self._edges(kept, kernels),
            ports=self._ports(kept),
            output_dtype=recording.output.fmt if recording.output else "fp32",
            saved_bytes=saved,
            recompute_bytes=again,
            parameters=self._parameters(),
        )

    def _kernel(self, group: _Group, per: Literal["microbatch", "iteration"]) -> Kernel:
        ops = [self.ops[index] for index in group.ops]
        op = ops[0]
        reads, writes = _flat(group.reads), _flat(group.writes)
        read_bytes, written_bytes = _total(map(self.bytes_of, reads)), _total(map(self.bytes_of, writes))
        input_dtype, output_dtype = _widest(reads, writes), _widest(writes, reads)
        shape, flops = self._shape_and_flops(group)
        axis: Axis | None = None
        message = constant(0.0)
        if group.kind in COLLECTIVES:
            axis = op.attributes["axis"]
            message = self.bytes_of(max((*op.inputs[:1], *op.outputs[:1]), key=_size))
        if group.kind in ("gemm", "grouped_gemm", "attention"):
            operand = next(ref for ref in op.inputs if len(ref.shape) >= 2)
            input_dtype = op.attributes.get("input_format") or operand.fmt
            if input_dtype == "fp32" and self._runs_tf32(op):
                input_dtype = "tf32"
        launches = 3.0 if op.name.endswith("attention_backward") else 1.0
        if group.kind == "norm" and op.phase == "backward" and not self.structure.frozen:
            launches = 2.0  # input gradient, and the weight gradient's reduction over rows
        name = f"fused_{group.region}" if group.region and len(ops) > 1 else _short(op)
        if group.kind == "quantize":
            name = f"quantize.{op.attributes['recipe']}.{op.attributes['what']}"
            passes = 2.0 if op.attributes["recipe"] in TWO_PASS_RECIPES else 1.0
            read_bytes, launches = read_bytes * passes, passes
        return Kernel(
            group.kind, name, op.scope.module, op.phase, shape, input_dtype, output_dtype,
            _accumulate(group.kind, output_dtype), axis, per, flops, read_bytes, written_bytes, message, launches,
            bool(op.attributes.get("causal", False)),
        )  # fmt: skip

    def _runs_tf32(self, op: RawOp) -> bool:
        is_head = op.scope.module.endswith("lm_head")
        return (self.structure.lm_head if is_head else self.structure.compute) == "tf32"

    def _shape_and_flops(self, group: _Group) -> tuple[tuple[Polynomial, ...], Polynomial]:
        op = self.ops[group.ops[0]]
        dims = self.dimension
        if group.kind in ("gemm", "grouped_gemm"):
            matrices = [ref for ref in op.inputs if len(ref.shape) >= 2]
            left, right = matrices[0].shape, matrices[1].shape
            batch = dims(left[0]) if len(left) == 3 else constant(1.0)
            m, k, n = dims(left[-2]), dims(left[-1]), dims(right[-1])
            return (batch, m, n, k), batch * m * n * k * 2.0
        if group.kind == "attention":
            return self._attention_shape(op)
        if group.kind in COLLECTIVES:
            return (self.elements(max((*op.inputs[:1], *op.outputs[:1]), key=_size)),), constant(0.0)
        tensors = [*_flat(group.reads), *_flat(group.writes)]
        largest = max(tensors, key=_size)
        flops = _total(
            self.elements(max(self.ops[i].outputs + _reads(self.ops[i]), key=_size))
            for i in group.ops
            if kind_of(self.ops[i]) not in ("copy", "embedding", "cast")
        )
        if group.kind == "embedding":
            table = max((ref for ref in tensors if len(ref.shape) >= 2), key=_size)
            return (self.elements(self._tokens(group)), dims(table.shape[-1])), constant(0.0)
        if group.kind in _ROWWISE and largest.shape:
            matrices = [ref for ref in tensors if len(ref.shape) >= 2] or [largest]
            widest = max(matrices, key=lambda ref: (ref.shape[-1], _size(ref)))
            rows = constant(1.0)
            for size in widest.shape[:-1]:
                rows = rows * dims(size)
            return (rows, dims(widest.shape[-1])), flops
        return (self.elements(largest),), flops

    def _tokens(self, group: _Group) -> TensorRef:
        refs = [ref for index in group.ops for ref in self.ops[index].inputs if ref.fmt == "int64"]
        return max(refs, key=_size) if refs else min(_flat(group.writes), key=_size)

    def _attention_shape(self, op: RawOp) -> tuple[tuple[Polynomial, ...], Polynomial]:
        backward = op.name.endswith("attention_backward")
        q, k, v = op.inputs[1:4] if backward else op.inputs[:3]
        length, batch, heads, columns = (self.dimension(size) for size in q.shape)
        keys, groups, value_columns = (self.dimension(k.shape[0]), self.dimension(k.shape[2]), v.shape[-1])
        window = op.attributes["window"]
        seen = self.dimension(window) if window else keys
        flops = batch * heads * length * keys * (columns + self.dimension(value_columns)) * 2.0
        if backward:
            flops = flops * ATTENTION_BACKWARD_FACTOR
        return (batch, heads, groups, length, keys, columns, seen), flops

    def _edges(self, kept: dict[int, int], kernels: list[Kernel]) -> list[tuple[int, int, EdgeKind]]:
        edges: dict[tuple[int, int], EdgeKind] = {}
        for index, sources in self.producers.items():
            for source in sources.values():
                first, second = self.group_of[source], self.group_of[index]
                if first == second or first not in kept or second not in kept:
                    continue
                pair = (kept[first], kept[second])
                if kernels[pair[0]].kind in COLLECTIVES or kernels[pair[1]].kind in COLLECTIVES:
                    edges[pair] = "communication"
                elif kernels[pair[0]].phase != "backward" and kernels[pair[1]].phase == "backward":
                    edges[pair] = "saved_activation"
                else:
                    edges[pair] = "data"
        return [(source, target, kind) for (source, target), kind in sorted(edges.items())]

    def _ports(self, kept: dict[int, int]) -> dict[str, list[int]]:
        recording = self.recording
        phases = {number: self.ops[group.ops[0]].phase for number, group in enumerate(self.groups)}

        def reading(storages: set[int], phase: Phase) -> list[int]:
            return [
                kept[number]
                for number, group in enumerate(self.groups)
                if number in kept and phases[number] == phase and storages & set(group.reads)
            ]

        def writing(storages: set[int]) -> list[int]:
            last = {storage: number for number, group in enumerate(self.groups) for storage in group.writes}
            return sorted({kept[last[storage]] for storage in storages if last.get(storage) in kept})

        output = {recording.output.storage} if recording.output else set()
        gradient = set() if recording.output_gradient is None else {recording.output_gradient}
        return {
            "input": reading(recording.inputs, "forward"),
            "output": writing(output),
            "output_gradient": reading(gradient, "backward"),
            "input_gradient": writing(recording.input_gradients),
            "weight_gradient": writing(recording.weight_gradients),
        }

    def _saved(self) -> tuple[Polynomial, Polynomial]:
        """Bytes the backward pass needs from the forward pass, and from the recomputation.

        Quantised weights are no activations: there is one copy, however many microbatches are in flight.
        """
        weights = {ref.storage for op in self.ops if op.attributes.get("what") == "weight" for ref in op.outputs}
        persistent = self.recording.persistent | weights
        allocated: dict[int, TensorRef] = {}
        phase_of: dict[int, Phase] = {}
        for op in self.ops:
            for ref in op.outputs:
                allocated.setdefault(ref.storage, ref)
                phase_of.setdefault(ref.storage, op.phase)
        saved: dict[int, TensorRef] = {}
        again: dict[int, TensorRef] = {}
        for group in self.groups:
            phase = self.ops[group.ops[0]].phase
            if phase == "forward":
                continue
            for storage, (ref, *_) in group.reads.items():
                if storage in persistent:
                    continue
                if storage in self.recording.inputs or phase_of.get(storage) == "forward":
                    saved.setdefault(storage, allocated.get(storage, ref))
                elif phase_of.get(storage) == "recompute" and phase == "backward":
                    again.setdefault(storage, allocated[storage])
        return _total(map(self.bytes_of, saved.values())), _total(map(self.bytes_of, again.values()))

    def _parameters(self) -> dict[str, Polynomial]:
        counts = {name: constant(0.0) for name in ("dense", "expert", "vocabulary", "trained")}
        for name, ref in self.recording.parameters:
            is_vocabulary = name in ("weight", "lm_head.weight")
            share = "vocabulary" if is_vocabulary else "expert" if "expert_fc" in name else "dense"
            counts[share] = counts[share] + self.elements(ref)
            if ref.storage in self.recording.trained:
                counts["trained"] = counts["trained"] + self.elements(ref)
        return counts


def kind_of(op: RawOp) -> str:
    """The kind of a single operator."""
    name = _short(op)
    if name in ("_to_copy", "copy_") and op.inputs:
        return "cast" if op.inputs[-1].fmt != op.outputs[0].fmt else "copy"
    return _KIND_OF_OP.get(name, "elementwise")


def _short(op: RawOp) -> str:
    return op.name.partition("::")[2]


def _size(ref: TensorRef) -> float:
    return math.prod(ref.shape) * element_bytes(ref.fmt)


def _is_negligible(op: RawOp) -> bool:
    """Scalars: the loss, its gradient, counters."""
    return all(math.prod(ref.shape) <= 1 for ref in (*op.inputs, *op.outputs))


def _reads(op: RawOp) -> list[TensorRef]:
    """What an operator reads: of a table only the rows it looks up, of a gathered tensor only what is picked."""
    name = _short(op)
    if name in ("embedding", "gather", "index_select"):
        table = TensorRef(op.inputs[0].storage, op.outputs[0].shape, op.inputs[0].fmt)
        return [table, *op.inputs[1:]]
    if name in ("zeros_like", "ones_like", "new_zeros"):
        return []
    if name in ("copy_", "zero_", "fill_"):
        return op.inputs[1:]
    return op.inputs


def _touch(refs: dict[int, list[TensorRef]], ref: TensorRef) -> None:
    """Adds a tensor to what a kernel reads or writes: columns of one storage count once each, not beside the whole."""
    parts = refs.setdefault(ref.storage, [])
    if any(_covers(part, ref) for part in parts):
        return
    parts[:] = [part for part in parts if not _covers(ref, part)] + [ref]


def _covers(whole: TensorRef, part: TensorRef) -> bool:
    is_larger = math.prod(part.shape) <= math.prod(whole.shape)
    return whole.start <= part.start and part.stop <= whole.stop and is_larger


def _flat(refs: dict[int, list[TensorRef]]) -> list[TensorRef]:
    return [ref for parts in refs.values() for ref in parts]


def _total(terms: object) -> Polynomial:
    total = constant(0.0)
    for term in terms:  # type: ignore[attr-defined]
        total = total + term
    return total


def _widest(refs: list[TensorRef], otherwise: list[TensorRef]) -> str:
    """Format of the largest floating tensor."""
    floating = [ref for ref in refs if ref.fmt in _FLOATING] or [ref for ref in otherwise if ref.fmt in _FLOATING]
    return max(floating, key=lambda ref: math.prod(ref.shape)).fmt if floating else "int64"


def _accumulate(kind: str, output_dtype: str) -> str:
    """GPU kernels accumulate products, statistics and sums in fp32; pointwise results need no accumulator."""
    if kind in ("copy", "cast", *COLLECTIVES) or output_dtype == "int64":
        return output_dtype
    return "fp32"
