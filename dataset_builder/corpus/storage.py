"""Graphs, runs and operators as columns of arrow tables, and back.

A node is a row; ``graph`` numbers the graph it belongs to. Everything that a :class:`TrainingGraph` holds survives the
round trip exactly.
"""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import TypeAdapter

from dataset_builder.corpus.measurements import OpMeasurement, RunMeasurement, collector_paused
from dataset_builder.job.hardware import DeviceSpec
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.graph import Edge, OpNode, StageFacts, TrainingGraph
from dataset_builder.tracing.layout import AxisGroup, Tier

Columns = dict[str, NDArray[Any]]

_TEXT = pa.dictionary(pa.int32(), pa.string())
_NODE_TYPES: dict[str, pa.DataType] = {
    "kind": _TEXT, "op": _TEXT, "module": _TEXT, "phase": _TEXT, "shape": pa.list_(pa.int64()),
    "input_dtype": _TEXT, "output_dtype": _TEXT, "accumulate_dtype": _TEXT, "axis": _TEXT, "group_size": pa.int32(),
    "per": _TEXT, "flops": pa.float64(), "bytes_read": pa.float64(), "bytes_written": pa.float64(),
    "message_bytes": pa.float64(), "launches": pa.float64(),
}  # fmt: skip
NODE_FIELDS = tuple(_NODE_TYPES)
_STAGE_TYPES: dict[str, pa.DataType] = {
    "stage": pa.int32(), "layers": pa.list_(pa.int32()), "has_embedding": pa.bool_(), "has_head": pa.bool_(),
    "num_parameters": pa.int64(), "num_expert_parameters": pa.int64(),
    "num_trained_parameters": pa.int64(), "saved_activation_bytes": pa.float64(),
    "recompute_peak_bytes": pa.float64(), "logits_bytes": pa.float64(),
}  # fmt: skip


def _table(types: dict[str, pa.DataType], records: Sequence[Sequence[Any]]) -> pa.Table:
    columns: Iterable[Any] = zip(*records, strict=True) if records else ([] for _ in types)
    arrays = [pa.array(column, type=kind) for column, kind in zip(columns, types.values(), strict=True)]
    return pa.Table.from_arrays(arrays, names=list(types))


def _fields(value: Any, names: Iterable[str]) -> tuple[Any, ...]:
    return tuple(getattr(value, name) for name in names)


def graph_tables(graphs: Sequence[TrainingGraph]) -> dict[str, pa.Table]:
    """The tables ``graphs``, ``nodes``, ``edges``, ``repeats`` (where not zero) and ``stages``."""
    nodes, edges, repeats, stages, heads = [], [], [], [], []
    for number, graph in enumerate(graphs):
        heads.append((number, graph.num_microbatches, graph.fingerprint, graph.tracer_version, len(graph.stages)))
        nodes += [(number, *_fields(node, NODE_FIELDS)) for node in graph.nodes]
        edges += [(number, edge.source, edge.target, edge.kind) for edge in graph.edges]
        stages += [(number, *_fields(stage, _STAGE_TYPES)) for stage in graph.stages]
        for stage, node in np.argwhere(graph.repeats):
            repeats.append((number, int(stage), int(node), float(graph.repeats[stage, node])))
    number_type = {"graph": pa.int32()}
    return {
        "graphs": _table(
            number_type
            | {"num_microbatches": pa.int64(), "fingerprint": pa.string(), "tracer_version": _TEXT,
               "num_stages": pa.int32()},
            heads,
        ),
        "nodes": _table(number_type | _NODE_TYPES, nodes),
        "edges": _table(number_type | {"source": pa.int32(), "target": pa.int32(), "kind": _TEXT}, edges),
        "repeats": _table(
            number_type | {"stage": pa.int32(), "node": pa.int32(), "repeats": pa.float64()}, repeats
        ),
        "stages": _table(number_type | _STAGE_TYPES, stages),
    }  # fmt: skip


_GRAPHS_A_BLOCK = 256
_BLOCKS_HELD = 4  # runs refer to graphs nearly in order


class StoredGraphs:
    """Graphs read back from their tables in a corpus directory, a block of graphs at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blocks: OrderedDict[int, _GraphBlock] = OrderedDict()

    def __getitem__(self, number: int) -> TrainingGraph:
        block = number // _GRAPHS_A_BLOCK
        if block not in self._blocks:
            if len(self._blocks) == _BLOCKS_HELD:
                self._blocks.popitem(last=False)
            self._blocks[block] = self._read(block * _GRAPHS_A_BLOCK)
        self._blocks.move_to_end(block)
        return self._blocks[block][number]

    def _read(self, first: int) -> _GraphBlock:
        inside = [("graph", ">=", first), ("graph", "<", first + _GRAPHS_A_BLOCK)]
        tables = {name: pq.read_table(self._folder / f"{name}.parquet", filters=inside)
                  for name in ("graphs", "nodes", "edges", "repeats", "stages")}  # fmt: skip
        return _GraphBlock(tables, first)


class _GraphBlock:
    """The rows of some graphs, each built when asked for; the first has number ``first``."""

    def __init__(self, tables: dict[str, pa.Table], first: int) -> None:
        numbers = np.arange(first, first + tables["graphs"].num_rows + 1)
        self._tables, self._first = tables, first
        self._bounds = {
            name: np.searchsorted(tables[name]["graph"].to_numpy(), numbers)
            for name in ("nodes", "edges", "repeats", "stages")
        }

    def _rows(self, name: str, number: int) -> list[dict[str, Any]]:
        place = number - self._first
        start, stop = self._bounds[name][place : place + 2]
        rows: list[dict[str, Any]] = self._tables[name].slice(start, stop - start).drop_columns("graph").to_pylist()
        return rows

    def __getitem__(self, number: int) -> TrainingGraph:
        head = self._tables["graphs"].slice(number - self._first, 1).to_pylist()[0]
        nodes = tuple(OpNode(**{**row, "shape": tuple(row["shape"])}) for row in self._rows("nodes", number))
        repeats = np.zeros((head["num_stages"], len(nodes)))
        for row in self._rows("repeats", number):
            repeats[row["stage"], row["node"]] = row["repeats"]
        return TrainingGraph(
            nodes=nodes,
            edges=tuple(Edge(**row) for row in self._rows("edges", number)),
            repeats=repeats,
            stages=tuple(StageFacts(**{**row, "layers": tuple(row["layers"])}) for row in self._rows("stages", number)),
            num_microbatches=head["num_microbatches"],
            fingerprint=head["fingerprint"],
            tracer_version=head["tracer_version"],
        )


_RUN_TYPES: dict[str, pa.DataType] = {
    "run_id": pa.string(), "source_id": _TEXT, "gpu": _TEXT, "precision": _TEXT, "architecture": _TEXT,
    "job_group": pa.string(), "iter_time_s": pa.float64(), "peak_mem_gb": pa.float64(),
    "doubt": pa.string(), "assumed": pa.list_(pa.string()), "job": pa.string(), "graph": pa.int32(),
}  # fmt: skip


def run_table(runs: Sequence[RunMeasurement], graph_of: Sequence[int]) -> pa.Table:
    """Runs that have a job; ``graph_of[i]`` numbers the graph of run ``i``, and ``job`` is the resolved job as JSON."""
    records = []
    for run, graph in zip(runs, graph_of, strict=True):
        assert run.job is not None
        job = run.job.model_dump_json(exclude_none=True)
        records.append((*_fields(run, list(_RUN_TYPES)[:9]), list(run.assumed), job, graph))
    return _table(_RUN_TYPES, records)


class StoredRuns(Sequence[RunMeasurement]):
    """The runs of :func:`run_table`, each built when asked for."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, place: int) -> RunMeasurement: ...
    @overload
    def __getitem__(self, place: slice) -> list[RunMeasurement]: ...
    def __getitem__(self, place: int | slice) -> RunMeasurement | list[RunMeasurement]:
        if isinstance(place, slice):
            return [self[position] for position in range(*place.indices(len(self)))]
        row = self._table.slice(range(len(self))[place], 1).to_pylist()[0]
        assumed = tuple(row.pop("assumed"))
        job = TrainingJob.model_validate(json.loads(row.pop("job"))).resolved()
        row.pop("graph")
        return RunMeasurement(**row, job=job.model_copy(update={"assumed": assumed}), reason="", assumed=assumed)

    def select(self, rows: NDArray[np.int64]) -> StoredRuns:
        """The runs at these rows."""
        return StoredRuns(self._table.take(rows))


_OP_TYPES: dict[str, pa.DataType] = {
    "op_id": pa.string(), "source_id": _TEXT, "gpu": _TEXT, "latency_s": pa.float64(), "op_group": pa.string(),
    "includes_launch": pa.bool_(), "library": _TEXT,
}  # fmt: skip
_GROUP_TYPES: dict[str, pa.DataType] = {
    "group_ranks": pa.int32(), "group_nodes": pa.int32(), "group_tiers": _TEXT, "group_copies": pa.int32(),
}  # fmt: skip
_TIERS = TypeAdapter(tuple[Tier, ...])


def op_table(operators: Sequence[OpMeasurement]) -> pa.Table:
    """Operators, a row each; a collective's link tiers are their specifications as JSON."""
    records = []
    tiers: dict[tuple[Tier, ...], str] = {}
    for operator in operators:
        group = operator.group
        place: tuple[Any, ...] = (None, None, None, None)
        if group is not None:
            if group.tiers not in tiers:
                tiers[group.tiers] = _TIERS.dump_json(group.tiers).decode()
            place = (group.size, group.nodes, tiers[group.tiers], group.copies)
        records.append((*_fields(operator, _OP_TYPES), *place, *_fields(operator.node, NODE_FIELDS)))
    return _table(_OP_TYPES | _GROUP_TYPES | _NODE_TYPES, records)


def stored_operators(table: pa.Table, devices: dict[str, DeviceSpec]) -> list[OpMeasurement]:
    """The operators of :func:`op_table`; ``devices`` maps the table's GPU names to their specifications."""
    columns = {name: _python_values(table[name]) for name in table.column_names}
    tiers = {text: _TIERS.validate_json(text) for text in set(columns["group_tiers"]) if text is not None}
    places: dict[tuple[Any, ...], AxisGroup] = {}
    operators = []
    with collector_paused():
        place_of = zip(*(columns[name] for name in _GROUP_TYPES), strict=True)
        nodes = map(OpNode, *(columns[name] for name in NODE_FIELDS))
        for own, place, node in zip(zip(*(columns[name] for name in _OP_TYPES), strict=True), place_of, nodes,
                                    strict=True):  # fmt: skip
            if place[2] is None:
                group = None
            else:
                group = places.setdefault(place, AxisGroup(place[0], place[1], tiers[place[2]], place[3]))
            op_id, source_id, gpu, latency_s, *about = own
            operators.append(OpMeasurement(op_id, source_id, gpu, node, devices[gpu], group, latency_s, *about))
    return operators


def _python_values(column: pa.ChunkedArray) -> list[Any]:
    """A column as Python values, lists as tuples: faster than ``to_pylist`` for repeated text and lists."""
    values = column.combine_chunks()
    if pa.types.is_dictionary(values.type):
        words = [*values.dictionary.to_pylist(), None]
        return [words[index] for index in values.indices.fill_null(len(words) - 1).to_numpy().tolist()]
    if pa.types.is_list(values.type):
        flat, ends = values.values.to_numpy().tolist(), values.offsets.to_numpy().tolist()
        return [tuple(flat[start:stop]) for start, stop in itertools.pairwise(ends)]
    plain: list[Any] = values.to_pylist()
    return plain
