"""Training examples: measured runs as torch-geometric graphs, measured operators as isolated nodes.

Every example's features come from :mod:`gnn_predictor.features`; labels are seconds. torch-geometric batches the runs;
:func:`graph_batch` turns its batch into the one type the network reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, RandomSampler, Sampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from dataset_builder.corpus.measurements import OpMeasurement
from dataset_builder.tracing.work import roofline_s
from gnn_predictor import ranks
from gnn_predictor.batch import GraphBatch, pipeline_shape, stage_rows, vector_index
from gnn_predictor.features import (
    FORMATS,
    GraphArrays,
    format_features,
    hardware_features,
    in_16_bits,
    node_features,
    operator_software_features,
)
from gnn_predictor.graph_store import GraphStore

_SHIFTED_BY_NODES = ("edge_index", "entry_node")
_TENSORS = (
    "node_features", "format_features", "node_formats", "log_roofline_s", "launches", "is_overlappable",
    "is_weight_gradient", "is_serial", "is_chunked", "is_hidden_in_pairs", "edge_index", "edge_kind", "entry_node",
    "entry_cell", "entry_weight", "cell_launches", "hardware", "software", "workload",
)  # fmt: skip


class RunData(Data):  # type: ignore[misc]
    """One run's graph; says how its index columns shift when graphs are put side by side."""

    def __inc__(self, key: str, value: Any, *args: Any) -> Any:
        if key in _SHIFTED_BY_NODES:
            return self.num_nodes
        if key == "entry_cell":
            return len(self.cell_launches)
        return 0

    def __cat_dim__(self, key: str, value: Any, *args: Any) -> Any:
        return 1 if key == "edge_index" else 0


def run_data(graph: GraphArrays, devices: Sequence[str], row: int) -> RunData:
    """A graph as torch-geometric data; ``row`` finds its labels in the run table."""
    tensors = {name: torch.from_numpy(getattr(graph, name)) for name in _TENSORS}
    return RunData(
        **tensors,
        num_nodes=len(graph.log_roofline_s),
        num_cells=torch.tensor([len(graph.cell_launches)]),
        device=torch.tensor([vector_index(graph.device_name, devices)]),
        row=torch.tensor([row]),
        shape=pipeline_shape(graph),
        stage_class=tuple(graph.stage_class.tolist()),
    )


def graph_batch(data: Any) -> GraphBatch:
    """A torch-geometric batch of :class:`RunData` as the network's input."""
    num_cells = data.num_cells.tolist()
    return GraphBatch(
        **{name: getattr(data, name) for name in _TENSORS},
        node_graph=data.batch,
        cell_graph=torch.repeat_interleave(torch.arange(len(num_cells)), data.num_cells),
        device=data.device,
        library=torch.zeros_like(data.device),
        shapes=tuple(data.shape),
        stage_rows=stage_rows(data.stage_class, num_cells),
    )


class _RunDataset(Dataset[RunData]):
    """Graphs as torch-geometric data: those in memory made once, those of a store when asked for."""

    def __init__(self, graphs: Sequence[GraphArrays], devices: Sequence[str]) -> None:
        self._graphs, self._devices = graphs, devices
        held = () if isinstance(graphs, GraphStore) else graphs
        self._made = [run_data(graph, devices, row) for row, graph in enumerate(held)]

    def __len__(self) -> int:
        return len(self._graphs)

    def __getitem__(self, row: int) -> RunData:
        return self._made[row] if self._made else run_data(self._graphs[row], self._devices, row)


class _WindowOrder(Sampler[int]):
    """Rows in the random order in which a store reads each of its groups once."""

    def __init__(self, graphs: GraphStore, generator: torch.Generator) -> None:
        self._graphs, self._generator = graphs, generator

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[int]:
        return self._graphs.shuffled_rows(self._generator)


class _OwnShare(Sampler[list[int]]):
    """This rank's part of every batch."""

    def __init__(self, batches: BatchSampler) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches:
            yield [batch[position] for position in ranks.share(len(batch))]


def run_loader(
    graphs: Sequence[GraphArrays], devices: Sequence[str], batch_size: int, generator: torch.Generator
) -> DataLoader:
    """This rank's part of shuffled batches of runs."""
    data = _RunDataset(graphs, devices)
    order = (
        _WindowOrder(graphs, generator) if isinstance(graphs, GraphStore) else RandomSampler(data, generator=generator)
    )
    batches = _OwnShare(BatchSampler(order, batch_size, drop_last=False))
    return DataLoader(data, batch_sampler=batches, generator=generator)


@dataclass(frozen=True)
class RunExamples:
    """Measured runs: a table of labels and groups, and the graph of each row."""

    table: pd.DataFrame  # the columns of examples.load_examples
    graphs: Sequence[GraphArrays]

    def __len__(self) -> int:
        return len(self.graphs)

    def select(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> RunExamples:
        """The runs at these positions, or where a mask is true."""
        positions = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows.astype(np.int64)
        table = self.table.iloc[positions].reset_index(drop=True)
        if isinstance(self.graphs, GraphStore):
            return RunExamples(table, self.graphs.select(positions))
        return RunExamples(table, tuple(self.graphs[i] for i in positions))


@dataclass(frozen=True)
class OperatorExamples:
    """Measured operators, columns as in :class:`GraphBatch`; ``place`` is the row of their device and library."""

    table: pd.DataFrame  # op_id, source_id, gpu, kind, dtype, op_group, latency_s
    node_features: Tensor  # [O, node feature]
    format_features: Tensor  # [O, format feature]
    node_formats: Tensor  # [O, 2]
    log_roofline_s: Tensor  # [O]
    launches: Tensor  # [O]
    is_message: Tensor  # [O]
    log_seconds: Tensor  # [O]
    place: Tensor  # [O]
    hardware: Tensor  # [P, hardware feature]
    device: Tensor  # [P]
    library: Tensor  # [P]
    software: Tensor  # [P, software feature]
    workload: Tensor  # [P, workload feature]

    def __len__(self) -> int:
        return len(self.place)

    def select(self, rows: Tensor) -> OperatorExamples:
        """The operators at these positions."""
        columns = (
            "node_features",
            "format_features",
            "node_formats",
            "log_roofline_s",
            "launches",
            "is_message",
            "log_seconds",
            "place",
        )
        chosen = {name: getattr(self, name)[rows] for name in columns}
        return replace(self, table=self.table.iloc[rows.numpy()].reset_index(drop=True), **chosen)

    def batch(self, rows: Tensor) -> GraphBatch:
        """These operators as isolated nodes."""
        places, node_graph = torch.unique(self.place[rows], return_inverse=True)
        none = torch.zeros(0, dtype=torch.long)
        return GraphBatch(
            node_features=self.node_features[rows],
            format_features=self.format_features[rows],
            node_formats=self.node_formats[rows],
            log_roofline_s=self.log_roofline_s[rows],
            launches=self.launches[rows],
            is_overlappable=self.is_message[rows],
            is_weight_gradient=torch.zeros(len(rows)),
            is_serial=torch.zeros(len(rows)),
            is_chunked=torch.zeros(len(rows)),
            is_hidden_in_pairs=torch.zeros(len(rows)),
            node_graph=node_graph,
            edge_index=none.view(1, 0).expand(2, 0),
            edge_kind=none,
            entry_node=none,
            entry_cell=none,
            entry_weight=torch.zeros(0),
            cell_launches=torch.zeros(0),
            cell_graph=none,
            device=self.device[places],
            library=self.library[places],
            hardware=self.hardware[places],
            software=self.software[places],
            workload=self.workload[places],
            shapes=(),
            stage_rows=(),
        )


def operator_examples(
    operators: Sequence[OpMeasurement], devices: Sequence[str], libraries: Sequence[str], num_workload: int
) -> OperatorExamples:
    """Features and labels of measured operators; ``devices`` and ``libraries`` are those with a learned vector."""
    index = {name: vector_index(name, libraries) for name in {op.library for op in operators}}
    places: dict[tuple[str, str, bool, int], int] = {}
    hardware, place, rows, properties, formats, rooflines = [], [], [], [], [], []
    for op in operators:
        seconds = max(roofline_s(op.node, op.device, op.group), 1e-9)
        key = (op.device.name, op.source_id, op.includes_launch, index[op.library])
        if key not in places:
            places[key] = len(places)
            hardware.append(hardware_features(op.device, None, None, 1))
        place.append(places[key])
        neutral = in_16_bits(op.node, op.device)
        rows.append(np.asarray(node_features(op.node, neutral, op.device, op.group, seconds), dtype=np.float32))
        properties.append(format_features(op.node, op.device))
        formats.append([FORMATS.index(op.node.input_dtype), FORMATS.index(op.node.output_dtype)])
        rooflines.append(seconds)
    software = [operator_software_features(source, includes_launch) for _, source, includes_launch, _ in places]
    table = pd.DataFrame(
        {
            "op_id": [op.op_id for op in operators],
            "source_id": [op.source_id for op in operators],
            "gpu": [op.gpu for op in operators],
            "kind": [op.node.kind for op in operators],
            "dtype": [op.node.input_dtype for op in operators],
            "op_group": [op.op_group for op in operators],
            "latency_s": [op.latency_s for op in operators],
        }
    )
    return OperatorExamples(
        table=table,
        node_features=torch.from_numpy(np.stack(rows)),
        format_features=torch.tensor(properties, dtype=torch.float32),
        node_formats=torch.tensor(formats),
        log_roofline_s=torch.tensor(rooflines).log().float(),
        launches=torch.tensor([op.node.launches for op in operators], dtype=torch.float32),
        is_message=torch.tensor([float(op.group is not None) for op in operators]),
        log_seconds=torch.tensor([op.latency_s for op in operators], dtype=torch.float64).log().float(),
        place=torch.tensor(place),
        hardware=torch.tensor(hardware, dtype=torch.float32),
        device=torch.tensor([vector_index(name, devices) for name, *_ in places]),
        library=torch.tensor([library for *_, library in places]),
        software=torch.tensor(software, dtype=torch.float32),
        workload=torch.zeros(len(places), num_workload),  # the first column, 0, says: an operator on its own,
    )


def endless_rows(weights: Tensor, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows drawn with these weights, with replacement, for ever."""
    while True:
        drawn = torch.multinomial(weights, min(batch_size * 64, 2**20), replacement=True, generator=generator)
        yield from torch.split(drawn, batch_size)
