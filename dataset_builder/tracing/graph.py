"""The annotated training graph: one node per kernel or message, with shape, formats, phase, place and work.

A job's graph holds each distinct block once (embedding, every kind of layer, head, optimizer, communication);
``repeats[s, n]`` says how often pipeline stage ``s`` runs node ``n`` per microbatch (or per iteration, by the node's
``per``). So the graph does not grow with layers, microbatches or GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Phase = Literal["forward", "backward", "recompute", "optimizer"]
Axis = Literal["tensor", "data", "pipeline", "context", "expert"]
EdgeKind = Literal["data", "saved_activation", "communication"]

KINDS = (
    "gemm", "grouped_gemm", "attention", "norm", "softmax", "elementwise", "reduction", "embedding", "cross_entropy",
    "cast", "quantize", "optimizer", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "copy",
)  # fmt: skip
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


@dataclass(frozen=True, slots=True)
class OpNode:
    """One kernel (or message) as a rank runs it.

    ``shape`` by kind: gemm (batch, m, n, k); grouped_gemm (groups, m per group, n, k); attention (batch, heads,
    kv_heads, query length, key length, head_dim, window: key positions a query sees at most); norm and softmax (rows,
    columns); cross_entropy (rows, vocabulary); embedding (tokens, columns); elementwise, reduction, cast, quantize,
    copy, optimizer (elements,); collectives (elements of the whole tensor before an all-reduce, reduce-scatter,
    all-to-all or send, and after an all-gather).
    ``flops`` and ``bytes_read``/``bytes_written`` are of one execution on one rank; ``message_bytes`` is the tensor a
    collective moves. ``launches`` is the number of device kernels the node stands for.
    """

    kind: str
    op: str
    module: str
    phase: Phase
    shape: tuple[int, ...]
    input_dtype: str
    output_dtype: str
    accumulate_dtype: str
    axis: Axis | None
    group_size: int
    per: Literal["microbatch", "iteration"]
    flops: float
    bytes_read: float
    bytes_written: float
    message_bytes: float
    launches: float

    def __hash__(self) -> int:
        return hash((self.module, self.op, self.phase, self.shape, self.group_size))  # nearly all nodes differ in these


class Edge(NamedTuple):
    """From one node to another, by index."""

    source: int
    target: int
    kind: EdgeKind


@dataclass(frozen=True)
class StageFacts:
    """What one pipeline stage holds: its layers and the elements and bytes its memory is made of, on one rank."""

    stage: int
    layers: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    num_parameters: int  # adapters included
    num_expert_parameters: int
    num_trained_parameters: int  # all but the frozen ones
    saved_activation_bytes: float  # one microbatch, after recompute
    recompute_peak_bytes: float  # activations of the block that is being recomputed
    logits_bytes: float

    @property
    def num_trained_expert_parameters(self) -> int:
        """Of the experts: all or none, for adapters are on attention and dense feed-forwards only."""
        return self.num_expert_parameters if self.num_trained_parameters == self.num_parameters else 0


@dataclass(frozen=True)
class TrainingGraph:
    """The graph of one job: distinct nodes, edges between them and how often every stage runs each node."""

    nodes: tuple[OpNode, ...]
    edges: tuple[Edge, ...]
    repeats: NDArray[np.float64]  # [num_stages, num_nodes]
    stages: tuple[StageFacts, ...]
    num_microbatches: int
    fingerprint: str
    tracer_version: str
