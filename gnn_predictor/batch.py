"""Several graphs side by side as tensors: what the network reads, in training and in inference.

Training batches through torch-geometric (:mod:`gnn_predictor.dataset`); inference through :func:`collate`, which
needs only torch. B graphs, N nodes, E edges, M stage entries, K distinct stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gnn_predictor.event_order import PipelineShape
from gnn_predictor.features import NUM_SLOTS, GraphArrays


@dataclass(frozen=True)
class GraphBatch:
    """Columns as in :class:`gnn_predictor.features.GraphArrays`, with indices shifted to the whole batch."""

    node_features: Tensor  # [N, node feature]
    format_features: Tensor  # [N, format feature]
    node_formats: Tensor  # [N, 2]
    log_roofline_s: Tensor  # [N]
    launches: Tensor  # [N]
    is_overlappable: Tensor  # [N]
    is_weight_gradient: Tensor  # [N]
    is_serial: Tensor  # [N]
    is_chunked: Tensor  # [N]
    is_hidden_in_pairs: Tensor  # [N]
    node_graph: Tensor  # [N] graph of each node
    edge_index: Tensor  # [2, E]
    edge_kind: Tensor  # [E]
    entry_node: Tensor  # [M]
    entry_cell: Tensor  # [M] distinct stage * NUM_SLOTS + slot
    entry_weight: Tensor  # [M]
    cell_launches: Tensor  # [K * NUM_SLOTS]
    cell_graph: Tensor  # [K * NUM_SLOTS]
    device: Tensor  # [B] index of the learned device vector; 0: unknown
    library: Tensor  # [B] the same of the library that an operator was measured in; 0: unknown, as in every job
    hardware: Tensor  # [B, hardware feature]
    software: Tensor  # [B, software feature]
    workload: Tensor  # [B, workload feature]
    shapes: tuple[PipelineShape, ...]  # [B]
    stage_rows: tuple[tuple[int, ...], ...]  # of every graph, the distinct stage each pipeline stage equals


def pipeline_shape(graph: GraphArrays) -> PipelineShape:
    """The order of events of this job's pipeline."""
    return PipelineShape(graph.schedule, len(graph.stage_class), graph.virtual_pipeline, graph.num_microbatches)


def collate(graphs: Sequence[GraphArrays], devices: Sequence[str]) -> GraphBatch:
    """Puts graphs side by side; ``devices`` are those with a learned vector."""
    num_nodes = np.array([len(g.log_roofline_s) for g in graphs])
    num_cells = np.array([len(g.cell_launches) for g in graphs])
    node_offset = np.concatenate([[0], num_nodes.cumsum()])
    cell_offset = np.concatenate([[0], num_cells.cumsum()])

    def joined(name: str, offset: NDArray[np.int64] | None = None, axis: int = 0) -> Tensor:
        parts = [getattr(g, name) for g in graphs]
        if offset is not None:
            parts = [part + shift for part, shift in zip(parts, offset, strict=False)]
        return torch.from_numpy(np.concatenate(parts, axis=axis))

    return GraphBatch(
        node_features=joined("node_features"),
        format_features=joined("format_features"),
        node_formats=joined("node_formats"),
        log_roofline_s=joined("log_roofline_s"),
        launches=joined("launches"),
        is_overlappable=joined("is_overlappable"),
        is_weight_gradient=joined("is_weight_gradient"),
        is_serial=joined("is_serial"),
        is_chunked=joined("is_chunked"),
        is_hidden_in_pairs=joined("is_hidden_in_pairs"),
        node_graph=torch.from_numpy(np.repeat(np.arange(len(graphs)), num_nodes)),
        edge_index=joined("edge_index", node_offset, axis=1),
        edge_kind=joined("edge_kind"),
        entry_node=joined("entry_node", node_offset),
        entry_cell=joined("entry_cell", cell_offset),
        entry_weight=joined("entry_weight"),
        cell_launches=joined("cell_launches"),
        cell_graph=torch.from_numpy(np.repeat(np.arange(len(graphs)), num_cells)),
        device=torch.tensor([vector_index(g.device_name, devices) for g in graphs]),
        library=torch.zeros(len(graphs), dtype=torch.long),
        hardware=joined("hardware"),
        software=joined("software"),
        workload=joined("workload"),
        shapes=tuple(pipeline_shape(g) for g in graphs),
        stage_rows=stage_rows([g.stage_class.tolist() for g in graphs], num_cells.tolist()),
    )


def vector_index(name: str, known: Sequence[str]) -> int:
    """Row of the learned vector of a device or a library; 0 when it has none."""
    return known.index(name) + 1 if name in known else 0


def stage_rows(stage_classes: Sequence[Sequence[int]], num_cells: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Rows of the batch's stage table for every pipeline stage of every graph."""
    offsets = np.concatenate([[0], np.cumsum(np.asarray(num_cells) // NUM_SLOTS)])
    return tuple(
        tuple(int(index) + int(offset) for index in classes)
        for classes, offset in zip(stage_classes, offsets, strict=False)
    )
