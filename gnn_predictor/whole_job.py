"""A training job as one point: the inputs that describe it as a whole, and what physics alone says that it takes.

The point is what the network reads of the whole job (workload, hardware, software) and where the time at the roofline
of the busiest stage goes, in the formats that the job computes in. The physical time is the busiest stage's kernels and
messages at the efficiency that an untrained network starts from, with the bubble of its pipeline; no schedule is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnn_predictor.features import KIND_COLUMNS, NUM_SLOTS, SLOTS, FloatArray, GraphArrays
from gnn_predictor.network import HOST_LAUNCH_S, KERNEL_LAUNCH_S, STARTING_SLOWDOWN, STEP_OVERHEAD_S

_IS_ONCE_AN_ITERATION = np.array([name in ("optimizer", "comm_iteration") for name in SLOTS])  # by slot
OF_THE_GRAPH = KIND_COLUMNS.stop + NUM_SLOTS + 4  # coordinates beside the network's inputs of the whole job
# A rank's idle time over that of 1F1B, with backward passes twice as long as forward passes, half of it for the weights
# (Qi et al. 2023, arXiv 2401.10241, table 2; DeepSeek-V3, arXiv 2412.19437, table 2, of many ranks).
_BUBBLE = {"zero_bubble": 1 / 3, "zero_bubble_2p": 0.0, "zero_bubble_v": 0.0, "dualpipe": 1 / 3, "dualpipe_v": 1 / 3}
_HIDDEN = 0.4  # of a message that something can run beside
_LEAST_SHARE, _LEAST_S = 1e-4, 1e-12


@dataclass(frozen=True)
class WholeJobs:
    """Jobs as points: of each its coordinates, of order one, and the logarithm of its physical seconds."""

    coordinates: Tensor  # [B, coordinate] float64
    log_physical_s: Tensor  # [B] float64

    @classmethod
    def of(cls, graphs: Sequence[GraphArrays]) -> WholeJobs:
        """The points of these graphs."""
        each = [_point(graph) for graph in graphs]
        return cls(
            torch.from_numpy(np.stack([coordinates for coordinates, _ in each])).double(),
            torch.tensor([seconds for _, seconds in each], dtype=torch.float64).log(),
        )

    def select(self, rows: Tensor) -> WholeJobs:
        """These jobs of them."""
        return WholeJobs(self.coordinates[rows], self.log_physical_s[rows])


def _point(graph: GraphArrays) -> tuple[FloatArray, float]:
    slot = graph.entry_cell % NUM_SLOTS
    executions = graph.entry_weight * np.where(_IS_ONCE_AN_ITERATION[slot], 1, graph.num_microbatches)
    roofline = np.exp(graph.log_roofline_s, dtype=np.float64)[graph.entry_node] * executions
    stage = graph.entry_cell // NUM_SLOTS
    busiest = stage == np.bincount(stage, weights=roofline).argmax()
    node, slot, executions, roofline = (each[busiest] for each in (graph.entry_node, slot, executions, roofline))
    total = float(roofline.sum()) + _LEAST_S
    launches = graph.launches[node] * executions
    kind = graph.node_features[node][:, KIND_COLUMNS].argmax(axis=1)
    by_kind = np.bincount(kind, weights=roofline, minlength=KIND_COLUMNS.stop)
    by_slot = np.bincount(slot, weights=roofline, minlength=NUM_SLOTS)
    physical_s = _physical_s(graph, node, slot, roofline, launches)
    sizes = [total, float(launches.sum()) * HOST_LAUNCH_S / total + 1e-6, physical_s / total, physical_s]
    shares = np.log10(np.concatenate([by_kind, by_slot]) / total + _LEAST_SHARE) / 2 + 1
    whole = np.concatenate([graph.workload[0], graph.hardware[0], graph.software[0], shares, np.log2(sizes) / 4])
    return whole.astype(np.float32), physical_s


def _physical_s(
    graph: GraphArrays, node: np.ndarray, slot: np.ndarray, roofline: np.ndarray, launches: np.ndarray
) -> float:
    """Seconds of an iteration from the entries of its busiest stage, each with all its executions. [entry]"""
    hidden = _HIDDEN * graph.is_overlappable[node] * (1 - graph.is_serial[node])
    device = (roofline * STARTING_SLOWDOWN + launches * KERNEL_LAUNCH_S) * (1 - hidden)
    once = _IS_ONCE_AN_ITERATION[slot]
    microbatches, iteration = (
        max(float(device[part].sum()), float(launches[part].sum()) * HOST_LAUNCH_S) for part in (~once, once)
    )
    bubble = _BUBBLE.get(graph.schedule, 1.0) * (len(graph.stage_class) - 1) / _chunks(graph)
    return microbatches * (1 + bubble / graph.num_microbatches) + iteration + STEP_OVERHEAD_S


def _chunks(graph: GraphArrays) -> int:
    """Into how many pieces a rank's layers are split so that its pipeline fills sooner."""
    return graph.virtual_pipeline if graph.schedule == "interleaved" else 1
