"""What the network sees: a training graph, its devices, links and software as arrays.

Everything is known before a run: sizes, formats, specifications, software choices. Times enter only as rooflines,
which are computed from a node's work and the device's specification. Quantities that span decades enter as logarithms.
A floating-point format enters by its properties, so a format that was never measured has a meaning too.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dataset_builder.job.formats import BYTES_PER_ELEMENT
from dataset_builder.job.hardware import DeviceSpec, LinkSpec
from dataset_builder.job.schema import SoftwareStack, TrainingJob
from dataset_builder.tracing.graph import COLLECTIVES, KINDS, OpNode, TrainingGraph
from dataset_builder.tracing.layout import AxisGroup, RankLayout
from dataset_builder.tracing.work import roofline_s
from gnn_predictor.event_order import PAIRED, SPLIT

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

PHASES = ("forward", "backward", "recompute", "optimizer")
AXES = ("tensor", "data", "pipeline", "context", "expert")
EDGE_KINDS = ("data", "saved_activation", "communication")
# Where a node's seconds are summed: compute by phase, then exposed communication by when it runs.
SLOTS = ("forward", "backward", "recompute", "optimizer", "comm_forward", "comm_backward", "comm_iteration", "hop")
NUM_SLOTS = len(SLOTS)
# Where the node features say a node's kind and parallel axis, one column each.
KIND_COLUMNS = slice(0, len(KINDS))
AXIS_COLUMNS = slice(len(KINDS) + len(PHASES), len(KINDS) + len(PHASES) + len(AXES))

# (bits, exponent bits, mantissa bits, elements that share a scale; 0: no scale)
_FORMAT_PROPERTIES: dict[str, tuple[float, float, float, float]] = {
    "fp32": (32, 8, 23, 0), "tf32": (32, 8, 10, 0), "fp16": (16, 5, 10, 0), "bf16": (16, 8, 7, 0),
    "fp8_e4m3": (8, 4, 3, 0), "fp8_e5m2": (8, 5, 2, 0), "mxfp8": (8, 4, 3, 32), "nvfp4": (4, 2, 1, 16),
    "int64": (64, 0, 63, 0), "bool": (8, 0, 1, 0),
}  # fmt: skip
FORMATS = tuple(_FORMAT_PROPERTIES)
_FORMAT_INDEX = {name: index for index, name in enumerate(FORMATS)}
_EDGE_KIND_INDEX = {name: index for index, name in enumerate(EDGE_KINDS)}
_RECIPES = ("delayed", "current", "tensorwise", "rowwise", "blockwise")
_OP_CLASSES = ("rms", "layer_norm", "rope", "swiglu", "gelu", "dropout", "residual", "softmax", "moe", "linear", "bmm",
               "quantize", "norm", "clip")  # fmt: skip
FRAMEWORKS = ("megatron-lm", "megatron-deepspeed", "nemo", "megatron-bridge", "llm-foundry", "pytorch", "tensorflow",
              "jax", "internevo", "deepspeed", "paddle", "mlperf")  # fmt: skip
# Each operator table has its own way of measuring (warm caches, launch included, a library's kernels).
OPERATOR_SOURCES = ("aiconfigurator", "aiter-tuned", "cudnn-frontend", "deepbench", "estimate-train-time",
                    "liger-kernel", "llmservingsim", "nccl-tests-public", "neusight", "published-tables", "vidur",
                    "xla-perf-tables")  # fmt: skip
ARCHITECTURES = ("decoder", "encoder", "encoder_decoder")
OPTIMIZERS = ("adam", "adamw", "sgd", "lion", "adafactor", "muon", "lamb", "none")
SHARDINGS = ("none", "zero1", "zero2", "zero3", "hsdp")
DEVICE_FORMATS = ("fp32", "tf32", "fp16", "bf16", "fp8_e4m3", "mxfp8", "nvfp4")
_FORMAT_KINDS = ("cast", "quantize", "copy", "reduction")  # kernels that are there because of a format
_SHARED_KINDS = tuple(kind for kind in KINDS if kind not in _FORMAT_KINDS)
_IS_SHARED_KIND = np.array([kind in _SHARED_KINDS for kind in KINDS])
_IS_MESSAGE = np.array([kind in COLLECTIVES for kind in KINDS], dtype=np.float32)
_TILE_FEATURES, _GROUP_FEATURES, _WORK_FEATURES = 5, 4, 9
_FORMAT_FEATURES = 12  # six of the input's format and six of the output's
_SHARED_FEATURES = len(KINDS) + len(PHASES) + len(AXES) + len(_OP_CLASSES) + 6 + 1 + _TILE_FEATURES + _GROUP_FEATURES
JOB_FEATURES = _SHARED_FEATURES + _WORK_FEATURES  # leading columns of node_features that no format changes
_NODE_FEATURES = JOB_FEATURES + len(_RECIPES) + _WORK_FEATURES
# Columns of node_features that say what a kernel does in its own formats, and the same as two slices.
KERNEL_FEATURES = (*range(_SHARED_FEATURES), *range(JOB_FEATURES, _NODE_FEATURES))
KERNEL_SLICES = (slice(0, _SHARED_FEATURES), slice(JOB_FEATURES, _NODE_FEATURES))
# Where node_features say how a product fills the device, and a kernel's work: in 16 bits, and in its own formats.
TILE_COLUMNS = slice(_SHARED_FEATURES - _GROUP_FEATURES - _TILE_FEATURES, _SHARED_FEATURES - _GROUP_FEATURES)
WORK_COLUMNS = tuple(slice(end - _WORK_FEATURES, end) for end in (JOB_FEATURES, _NODE_FEATURES))
# Columns that follow from a device's or a link's specification: of the node features tiles per SM, the link of a
# message and what work is in seconds or in caches; of a format this device's peak; of the workload its seconds. Where a
# job's roofline time goes, as shares of it, is not among them.
_NUM_SHARES = len(_SHARED_KINDS) + len(AXES) + len(PHASES)
SPECIFICATION_COLUMNS: dict[str, list[int] | slice] = {
    "node_features": [
        *(TILE_COLUMNS.start + column for column in (0, 1)),
        *(_SHARED_FEATURES - column for column in (2, 1)),
        *(work.start + column for work in WORK_COLUMNS for column in (0, 1, 2, 3, 8)),
    ],
    "format_features": [4, 5, 10, 11],
    "hardware": slice(None),
    "workload": [1 + _NUM_SHARES + 14, 1 + _NUM_SHARES + 15],
}
# Rough cost of launching one kernel from the host, only to scale the launch features (seconds).
_TYPICAL_LAUNCH_S = 8e-6


@dataclass(frozen=True)
class GraphArrays:
    """One job (or one measured operator) as arrays. N nodes, E edges, K distinct stages, S stages, M stage entries."""

    node_features: FloatArray  # [N, node feature] JOB_FEATURES columns that no format changes, then the others
    format_features: FloatArray  # [N, format feature] properties of the input and the output format
    node_formats: IntArray  # [N, 2] index into FORMATS of input and output
    log_roofline_s: FloatArray  # [N]
    launches: FloatArray  # [N]
    is_overlappable: FloatArray  # [N] 1 where the node is a message
    is_weight_gradient: FloatArray  # [N] 1 where a split schedule runs the node apart from its backward pass
    is_serial: FloatArray  # [N] 1 where the job says that nothing runs beside the message
    is_chunked: FloatArray  # [N] 1 where the job says that the message goes in pieces beside its matrix product
    is_hidden_in_pairs: FloatArray  # [N] 1 where the node costs nothing beside a pass of the other direction
    edge_index: IntArray  # [2, E]
    edge_kind: IntArray  # [E]
    entry_node: IntArray  # [M]
    entry_cell: IntArray  # [M] distinct stage * NUM_SLOTS + slot
    entry_weight: FloatArray  # [M] executions per microbatch, or per iteration
    cell_launches: FloatArray  # [K * NUM_SLOTS]
    stage_class: IntArray  # [S] the distinct stage each pipeline stage equals
    hardware: FloatArray  # [1, hardware feature]
    device_name: str
    software: FloatArray  # [1, software feature]
    workload: FloatArray  # [1, workload feature]
    num_microbatches: int
    schedule: str
    virtual_pipeline: int


def format_features(node: OpNode, device: DeviceSpec) -> list[float]:
    """Properties of a node's input and output format."""
    return [*_format_properties(node.input_dtype, device), *_format_properties(node.output_dtype, device)]


def _format_properties(name: str, device: DeviceSpec) -> list[float]:
    """A format's properties and this device's matrix peak for it, relative to its 16-bit peak."""
    bits, exponent, mantissa, block = _FORMAT_PROPERTIES[name]
    reference = device.peak(sixteen_bit_format(device))
    return [
        math.log2(bits) - 4, exponent / 8, mantissa / 10, math.log2(block + 1) / 5,
        math.log2(device.peak(name) / reference), float(device.supports(name)),
    ]  # fmt: skip


def node_features(
    node: OpNode, neutral: OpNode, device: DeviceSpec, group: AxisGroup | None, roofline: float
) -> list[float]:
    """One node's features: first what is the same in every format, then what its formats make of it.

    ``neutral``: the node as :func:`in_16_bits` gives it.
    """
    return [
        *_identity(node),
        *_tiles(node, device),
        *_group_features(group),
        *_work_features(neutral, device, roofline_s(neutral, device, group)),
        *(float(name in node.op) for name in _RECIPES),
        *_work_features(node, device, roofline),
    ]


def in_16_bits(node: OpNode, device: DeviceSpec) -> OpNode:
    """The node as it would be with 16-bit inputs and outputs: its work without what its formats make of it."""
    read, written = (_to_16_bits(name) for name in (node.input_dtype, node.output_dtype))
    return replace(
        node,
        input_dtype=sixteen_bit_format(device),
        bytes_read=node.bytes_read * read,
        bytes_written=node.bytes_written * written,
        message_bytes=node.message_bytes * read,
    )


def _to_16_bits(name: str) -> float:
    return 1.0 if name in ("int64", "bool") else 2.0 / BYTES_PER_ELEMENT[name]


def sixteen_bit_format(device: DeviceSpec) -> str:
    """The 16-bit format of a device, bf16 where it has both."""
    return "bf16" if device.supports("bf16") else "fp16"


def _identity(node: OpNode) -> list[float]:
    one_hot = [float(node.kind == kind) for kind in KINDS] + [float(node.phase == phase) for phase in PHASES]
    one_hot += [float(node.axis == axis) for axis in AXES]
    sizes = [_log(size, 8) for size in (*node.shape[:6], *([0] * 6))[:6]]
    return [*one_hot, *(float(name in node.op) for name in _OP_CLASSES), *sizes, _log(node.launches, 0)]


def _work_features(node: OpNode, device: DeviceSpec, roofline: float) -> list[float]:
    """Roofline, compute and memory seconds, FLOPs and bytes."""
    log = _log
    moved = node.bytes_read + node.bytes_written
    compute_s, memory_s = node.flops / device.peak(node.input_dtype), moved / device.hbm_bytes_per_s
    return [
        log(roofline, -9), log(compute_s, -9), log(memory_s, -9), log(compute_s / (memory_s + 1e-12), 0),
        log(node.flops, 20), log(node.bytes_read, 16), log(node.bytes_written, 16), log(node.message_bytes, 16),
        log(moved / device.l2_bytes, 0),
    ]  # fmt: skip


def _group_features(group: AxisGroup | None) -> list[float]:
    if group is None:
        return [0.0] * _GROUP_FEATURES
    log = _log
    return [log(group.size, 0), log(group.nodes, 0), log(group.ring_bytes_per_s, 24), log(group.link.latency_s, -12)]


def _tiles(node: OpNode, device: DeviceSpec) -> list[float]:
    """How a product fills the device: output tiles per SM, the last wave's fill, and alignment.

    Of matrix products tiles of 128x128; of attention 128 queries of a head (Dao 2023, arXiv 2307.08691, section 3.2),
    going backward 128 keys, with how far its heads are from the next size that kernels are written for, and its query
    heads per key head.
    """
    if node.kind in ("gemm", "grouped_gemm"):
        batch, m, n, k = node.shape[:4]
        tiles = batch * math.ceil(m / 128) * math.ceil(n / 128)
        about = [_alignment(n), _alignment(k), _log(min(m, n, k), 8)]
    elif node.kind == "attention":
        batch, heads, key_heads, queries, keys, head_dim = node.shape[:6]
        rows = keys if node.phase == "backward" else queries
        tiles = batch * heads * math.ceil(rows / 128)
        padded = next((size for size in (64, 128, 192, 256) if size >= head_dim), head_dim)
        about = [_alignment(head_dim), math.log2(padded / head_dim), math.log2(heads / key_heads) / 3]
    else:
        return [0.0] * _TILE_FEATURES
    waves = tiles / device.num_sms
    return [_log(waves, 0), waves / math.ceil(waves) if waves else 0.0, *about]


def _alignment(size: int) -> float:
    return min(math.log2(size & -size) if size else 0.0, 6.0) / 6


def _log(value: float, center: float) -> float:
    """A centred, compressed logarithm; zero maps to a value below all others."""
    return (math.log(value) - center) / 4 if value > 1e-15 else -3.0


def hardware_features(
    device: DeviceSpec, intra: LinkSpec | None, inter: LinkSpec | None, num_nodes: int
) -> list[float]:
    """A device's and its links' specification, as logarithms around an A100's."""
    log = math.log
    peaks = [log(device.peak(name) / 312e12) / 2 for name in DEVICE_FORMATS]
    has = [float(device.supports(name)) for name in DEVICE_FORMATS]
    memory = [
        log(device.hbm_bytes_per_s / 2e12), log(device.hbm_bytes / 80e9) / 2, log(device.l2_bytes / 40e6) / 2,
        log(device.num_sms / 108), log(device.clock_hz / 1.41e9), log(device.power_w / 400),
        float(device.vendor == "amd"), float(device.vendor in ("cpu", "other", "intel")),
        (device.compute_capability - 8) / 2 if device.compute_capability else 0.0,
    ]  # fmt: skip
    links = []
    for link, present in ((intra, True), (inter, num_nodes > 1)):
        use = link is not None and present
        bandwidth = log(link.bytes_per_s_per_gpu / 100e9) / 2 if link is not None and use else 0.0
        links += [float(use), bandwidth]
    return [*peaks, *has, *memory, *links]


def operator_software_features(source_id: str, includes_launch: bool) -> list[float]:
    """How an operator was measured, in the columns of :func:`software_features`; its software is unknown."""
    blank = software_features(SoftwareStack(), optimizer="")
    measured = [float(source_id == name) for name in OPERATOR_SOURCES]
    return [*measured, float(includes_launch), *blank[len(measured) + 1 :]]


def software_features(software: SoftwareStack, optimizer: str) -> list[float]:
    """Software choices; an unknown one is all zeros, which is also what dropout in training makes of it."""
    measured = [0.0] * (len(OPERATOR_SOURCES) + 1)
    framework = [float(software.framework == name) for name in FRAMEWORKS]
    year = [1.0, (int(software.date[:4]) + int(software.date[5:7] or 1) / 12 - 2022.5) / 2] if software.date else [0, 0]
    switches: list[float] = []
    for value in (software.compile, software.fused_kernels, software.cuda_graphs, software.deterministic):
        switches += [0.0, 0.0] if value is None else [float(value), float(not value)]
    attention = [float(software.attention == name) for name in ("flash", "unfused")]
    return [*measured, *framework, *year, *switches, *attention, *(float(optimizer == name) for name in OPTIMIZERS)]


def workload_features(job: TrainingJob, layout: RankLayout, work: _Work) -> list[float]:
    """Sizes of the job and where the roofline time of its work in 16 bits goes.

    Nothing here depends on a format: how a format changes a job's time is for the kernels to say, where operators
    measured in that format teach it even when no run was.
    """
    log = math.log2
    model, batch, total_s = job.model, job.batch, work.total_s
    shares = [
        math.log10(seconds / (total_s + 1e-12) + 1e-4) / 2 + 1
        for seconds in (*work.by_shared_kind_s, *work.by_axis_s, *work.by_phase_s)
    ]
    launch_s = work.launches * _TYPICAL_LAUNCH_S
    sizes = [
        log(model.hidden_size) - 11, log(model.num_layers) - 5, log(batch.seq_length) - 11, log(model.vocab_size) - 15,
        log(batch.micro_batch_size) - 1, log(layout.num_microbatches) / 2 - 1, log(job.cluster.num_gpus) / 2 - 2,
        log(layout.tensor), log(layout.pipeline), log(layout.data) / 2, log(layout.context), log(layout.expert),
        log(layout.virtual_pipeline), log(job.cluster.num_nodes) / 2, log(total_s + 1e-9) / 4,
        log((launch_s + 1e-9) / (total_s + 1e-9)) / 4, float(model.moe is not None), float(model.mla is not None),
    ]  # fmt: skip
    kinds = [float(model.architecture == name) for name in ARCHITECTURES]
    kinds += [float(job.parallel.sharding == name) for name in SHARDINGS]
    # No column for the overlap switches: what they hide follows from is_serial and is_chunked alone, in every job.
    kinds += [float(bool(job.parallel.sequence_parallel)), model.dropout * 5]
    recompute = job.parallel.recompute.mode if job.parallel.recompute else "none"
    kinds += [float(recompute == name) for name in ("selective", "full")]
    return [*shares, *(value / 3 for value in sizes), *kinds]


@dataclass(frozen=True)
class _Work:
    """What the busiest stage runs in one iteration, rooflines in 16 bits; without kernels that only formats cause."""

    by_shared_kind_s: list[float]
    by_axis_s: list[float]
    by_phase_s: list[float]
    total_s: float
    launches: float

    @classmethod
    def of(cls, columns: NDArray[np.void], executions: NDArray[np.float64]) -> _Work:
        """``columns`` [N] as :data:`_COLUMNS`, ``executions`` [stage, N] of one iteration."""
        neutral_s = columns["neutral_roofline_s"]
        times = executions[(executions * neutral_s).sum(axis=1).argmax()] * _IS_SHARED_KIND[columns["kind"]]
        seconds = neutral_s * times

        def summed(code: str, names: Sequence[str]) -> list[float]:
            sums: list[float] = np.bincount(columns[code], weights=seconds, minlength=len(names)).tolist()
            return sums[: len(names)]

        by_kind = summed("kind", KINDS)
        return cls(
            by_shared_kind_s=[by_kind[KINDS.index(name)] for name in _SHARED_KINDS],
            by_axis_s=summed("axis", AXES),
            by_phase_s=summed("phase", PHASES),
            total_s=sum(seconds.tolist()),
            launches=sum((columns["launches"] * times).tolist()),
        )


# What is known of a node on a device, as bytes of one record: the layouts of a job share most nodes, so each is worked
# out once, and those of a job are put together by a copy. Numbers of kind, axis and phase count through their names.
_COLUMNS = np.dtype(
    [
        ("kind", np.int64), ("axis", np.int64), ("phase", np.int64), ("slot", np.int64), ("is_once", np.int64),
        ("formats", np.int64, 2), ("launches", np.float64), ("roofline_s", np.float64),
        ("neutral_roofline_s", np.float64), ("features", np.float32, _NODE_FEATURES),
        ("format_features", np.float32, _FORMAT_FEATURES),
    ],
    align=True,
)  # fmt: skip


@functools.lru_cache(maxsize=16)
def _columns_on(device: DeviceSpec) -> Callable[[OpNode, AxisGroup | None], bytes]:
    """The columns of nodes on one device; ``group``: the ranks that a message is between."""

    @functools.lru_cache(maxsize=2**13)
    def node_columns(node: OpNode, group: AxisGroup | None) -> bytes:
        neutral, seconds = in_16_bits(node, device), roofline_s(node, device, group)
        columns = np.zeros((), dtype=_COLUMNS)
        columns["kind"] = KINDS.index(node.kind)
        columns["axis"] = AXES.index(node.axis) if node.axis else len(AXES)
        columns["phase"] = PHASES.index(node.phase)
        columns["slot"] = _slot(node)
        columns["is_once"] = node.per == "iteration"
        columns["formats"] = _FORMAT_INDEX[node.input_dtype], _FORMAT_INDEX[node.output_dtype]
        columns["launches"] = node.launches
        columns["roofline_s"] = seconds
        columns["neutral_roofline_s"] = roofline_s(neutral, device, group)
        columns["features"] = node_features(node, neutral, device, group, seconds)
        columns["format_features"] = format_features(node, device)
        return columns.tobytes()

    return node_columns


def featurize(job: TrainingJob, graph: TrainingGraph, layout: RankLayout) -> GraphArrays:
    """A resolved job and its graph as the network's input."""
    device = job.cluster.gpu
    of_node = _columns_on(device)
    columns = [of_node(node, layout.group_of(node)) for node in graph.nodes]
    table = np.frombuffer(b"".join(columns), dtype=_COLUMNS)  # [N]
    classes, stage_class = _distinct_rows(graph.repeats)
    entry_class, entry_node = np.nonzero(classes)
    cell = entry_class * NUM_SLOTS + table["slot"][entry_node]
    weight = classes[entry_class, entry_node]
    work = _Work.of(table, classes * np.where(table["is_once"], 1, layout.num_microbatches))
    sources, targets, kinds = zip(*graph.edges, strict=True) if graph.edges else ((), (), ())
    cluster = job.cluster
    return GraphArrays(
        node_features=table["features"].copy(),
        format_features=table["format_features"].copy(),
        node_formats=table["formats"].copy(),
        log_roofline_s=np.log(np.maximum(table["roofline_s"], _LEAST_SECONDS)).astype(np.float32),
        launches=table["launches"].astype(np.float32),
        is_overlappable=_IS_MESSAGE[table["kind"]],
        is_weight_gradient=_is_weight_gradient(job, graph),
        is_serial=_is_serial(job, graph),
        is_chunked=_is_chunked(job, graph),
        is_hidden_in_pairs=_is_hidden_in_pairs(job, graph),
        edge_index=np.array([sources, targets], dtype=np.int64),
        edge_kind=np.array([_EDGE_KIND_INDEX[kind] for kind in kinds], dtype=np.int64),
        entry_node=entry_node.astype(np.int64),
        entry_cell=cell.astype(np.int64),
        entry_weight=weight.astype(np.float32),
        cell_launches=np.bincount(
            cell, weights=weight * table["launches"][entry_node], minlength=len(classes) * NUM_SLOTS
        ).astype(np.float32),
        stage_class=stage_class,
        hardware=_row(hardware_features(device, cluster.intra_node, cluster.inter_node, cluster.num_nodes)),
        device_name=device.name,
        software=_row(software_features(job.software, job.optimizer.name)),
        workload=_row([1.0, *workload_features(job, layout, work)]),
        num_microbatches=layout.num_microbatches,
        schedule=job.parallel.schedule or "1f1b",
        virtual_pipeline=layout.virtual_pipeline,
    )


_LEAST_SECONDS = 1e-9


def _is_weight_gradient(job: TrainingJob, graph: TrainingGraph) -> FloatArray:
    """Backward GEMMs that the gradient which a stage hands back does not depend on; [N], zeros where none is split."""
    found = np.zeros(len(graph.nodes), dtype=np.float32)
    if job.parallel.schedule not in SPLIT:
        return found
    sources: dict[int, list[int]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.target, []).append(edge.source)
    handed_back = [i for i, node in enumerate(graph.nodes) if node.module == "pipeline.gradients"]
    needed = set(handed_back)
    while handed_back:
        new = [source for source in sources.get(handed_back.pop(), ()) if source not in needed]
        needed.update(new)
        handed_back += new
    for i, node in enumerate(graph.nodes):
        is_gemm = node.kind in ("gemm", "grouped_gemm")
        found[i] = float(is_gemm and node.phase == "backward" and i not in needed)
    return found


def _is_serial(job: TrainingJob, graph: TrainingGraph) -> FloatArray:
    """Messages that the job's overlap switches leave alone on their stream; [N]."""
    overlap = job.parallel.overlap
    if overlap.grad_reduce and overlap.param_gather and overlap.pipeline:
        return np.zeros(len(graph.nodes), dtype=np.float32)

    def is_serial(node: OpNode) -> bool:
        if node.axis == "pipeline":
            return node.per == "microbatch" and not overlap.pipeline
        return node.axis == "data" and not (overlap.param_gather if node.kind == "all_gather" else overlap.grad_reduce)

    return np.array([is_serial(node) for node in graph.nodes], dtype=np.float32)


def _is_chunked(job: TrainingJob, graph: TrainingGraph) -> FloatArray:
    """Tensor-parallel messages, where they go in pieces beside their matrix products; [N]."""
    if not job.parallel.overlap.tensor:
        return np.zeros(len(graph.nodes), dtype=np.float32)
    return np.array([node.axis == "tensor" for node in graph.nodes], dtype=np.float32)


def _is_hidden_in_pairs(job: TrainingJob, graph: TrainingGraph) -> FloatArray:
    """The experts' messages, where forward and backward passes run in pairs and overlap; [N]."""
    if job.parallel.schedule not in PAIRED or not job.parallel.overlap.pipeline:
        return np.zeros(len(graph.nodes), dtype=np.float32)
    return np.array([node.axis == "expert" for node in graph.nodes], dtype=np.float32)


def _slot(node: OpNode) -> int:
    if node.kind not in COLLECTIVES:
        return SLOTS.index(node.phase)
    if node.axis == "pipeline" and node.per == "microbatch":
        return SLOTS.index("hop")
    if node.per == "iteration":
        return SLOTS.index("comm_iteration")
    return SLOTS.index("comm_forward" if node.phase == "forward" else "comm_backward")


def _distinct_rows(rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], IntArray]:
    """``np.unique(rows, axis=0, return_inverse=True)``, which sorts all of them; few differ, so sort only those."""
    texts = [row.tobytes() for row in rows]
    distinct = sorted((np.frombuffer(text).tolist(), text) for text in set(texts))
    place = {text: index for index, (_, text) in enumerate(distinct)}
    return np.array([values for values, _ in distinct]), np.array([place[text] for text in texts], dtype=np.int64)


def _row(values: Sequence[float]) -> FloatArray:
    return np.array([values], dtype=np.float32)


# The columns that the network reads; the others of GraphArrays say how its node times are added up.
_NETWORK_INPUTS = ("node_features", "format_features", "node_formats", "log_roofline_s", "launches", "is_overlappable",
                   "edge_index", "edge_kind", "hardware", "device_name", "software", "workload")  # fmt: skip
_REVISION = 4  # goes up when columns change that have no name here, as those of the workload


def _feature_hash() -> str:
    """Identifies the meaning of every input column; a checkpoint of another meaning is refused."""
    names = (KINDS, PHASES, AXES, EDGE_KINDS, SLOTS, _FORMAT_PROPERTIES, _RECIPES, _OP_CLASSES,
             FRAMEWORKS, OPERATOR_SOURCES, ARCHITECTURES, OPTIMIZERS, SHARDINGS, DEVICE_FORMATS,
             sorted(BYTES_PER_ELEMENT), JOB_FEATURES, KERNEL_FEATURES, _NETWORK_INPUTS, _REVISION)  # fmt: skip
    return hashlib.sha256(repr(names).encode()).hexdigest()[:16]


FEATURE_HASH = _feature_hash()
