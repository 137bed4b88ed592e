"""Graphs that do not all fit in memory: a scratch file of parquet row groups, of which a few are held at a time.

A :class:`GraphStore` stands where a tuple of graphs would. In the order of its ``shuffled_rows`` a row group is read
once an epoch: groups come in random order, as many together as may be held, and their rows are shuffled together.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from gnn_predictor.features import GraphArrays

GROUP = 32  # graphs in a row group
_ONE_ROW = ("hardware", "software", "workload")
_PER_NODE = ("node_features", "format_features", "node_formats")
_PLAIN = ("device_name", "num_microbatches", "schedule", "virtual_pipeline")
_NAMES = tuple(field.name for field in dataclasses.fields(GraphArrays))


class GraphStore(Sequence[GraphArrays]):
    """Graphs in a scratch file; ``held`` of them at most are in memory, but for those that a caller keeps."""

    def __init__(self, file: _GroupFile, rows: NDArray[np.int64], held: int) -> None:
        self._file, self._rows, self.held = file, rows, held

    @classmethod
    def write(cls, graphs: Iterable[GraphArrays], folder: Path, held: int) -> GraphStore:
        """Stores these graphs in ``folder``, which keeps nothing of it when this process ends, however it ends."""
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="graphs-", suffix=".parquet") as scratch:
            count = _write(graphs, scratch.name)
            file = _GroupFile(pq.ParquetFile(pa.OSFile(scratch.name)), max(1, held // GROUP))
        return cls(file, np.arange(count), held)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> GraphArrays: ...
    @overload
    def __getitem__(self, place: slice) -> list[GraphArrays]: ...
    def __getitem__(self, place: int | slice) -> GraphArrays | list[GraphArrays]:
        if isinstance(place, slice):
            return [self[position] for position in range(*place.indices(len(self)))]
        group, row = divmod(int(self._rows[place]), GROUP)
        return self._file.group(group)[row]

    def select(self, places: NDArray[np.int64]) -> GraphStore:
        """The graphs at these places, in the same file."""
        return GraphStore(self._file, self._rows[places], self.held)

    def shuffled_rows(self, generator: torch.Generator) -> Iterator[int]:
        """Every place once: row groups in random order, as many as are held at a time, their rows shuffled together."""
        groups = self._rows // GROUP
        names = np.unique(groups)
        order = names[torch.randperm(len(names), generator=generator).numpy()]
        together = max(1, self.held // GROUP)
        for start in range(0, len(order), together):
            places = np.flatnonzero(np.isin(groups, order[start : start + together]))
            yield from places[torch.randperm(len(places), generator=generator).numpy()].tolist()


def in_parts(graphs: Sequence[GraphArrays]) -> Iterator[Sequence[GraphArrays]]:
    """All graphs in order, in parts that fit in memory; those that are in memory are one part."""
    step = graphs.held if isinstance(graphs, GraphStore) else max(1, len(graphs))
    for start in range(0, len(graphs), step):
        yield graphs[start : start + step]


class _GroupFile:
    """A file of row groups; those read last are kept."""

    def __init__(self, file: pq.ParquetFile, most: int) -> None:
        self._file, self._most = file, most
        self._kept: OrderedDict[int, list[GraphArrays]] = OrderedDict()

    def group(self, number: int) -> list[GraphArrays]:
        if number not in self._kept:
            while len(self._kept) >= self._most:
                self._kept.popitem(last=False)
            self._kept[number] = _graphs(self._file.read_row_group(number, use_threads=False))
        self._kept.move_to_end(number)
        return self._kept[number]


def _write(graphs: Iterable[GraphArrays], path: str) -> int:
    """Writes row groups as they fill; returns the number of graphs."""
    count, writer = 0, None
    try:
        for group in _batched(graphs):
            table = _table(group)
            writer = writer or pq.ParquetWriter(path, table.schema, use_dictionary=list(_PLAIN))
            writer.write_table(table)
            count += len(group)
    finally:
        if writer is not None:
            writer.close()
    return count


def _batched(graphs: Iterable[GraphArrays]) -> Iterator[list[GraphArrays]]:
    group: list[GraphArrays] = []
    for graph in graphs:
        group.append(graph)
        if len(group) == GROUP:
            yield group
            group = []
    if group:
        yield group


def _table(graphs: Sequence[GraphArrays]) -> pa.Table:
    """A graph a row; arrays as flat lists."""
    columns: dict[str, Any] = {}
    for name in _NAMES:
        values = [getattr(graph, name) for graph in graphs]
        if name in _PLAIN:
            columns[name] = pa.array(values)
        else:
            flat = [value.ravel() for value in values]
            ends = np.cumsum([0, *map(len, flat)])
            columns[name] = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(flat)))
    return pa.table(columns)


def _graphs(table: pa.Table) -> list[GraphArrays]:
    """The inverse of :func:`_table`."""
    columns: dict[str, list[Any]] = {}
    for name in _NAMES:
        column = table[name].combine_chunks()
        if name in _PLAIN:
            columns[name] = column.to_pylist()
        else:
            flat, ends = column.values.to_numpy(), column.offsets.to_numpy()
            columns[name] = [flat[start:stop].copy() for start, stop in itertools.pairwise(ends)]
    graphs = []
    for row in range(table.num_rows):
        fields = {name: values[row] for name, values in columns.items()}
        fields |= {name: fields[name].reshape(1, -1) for name in _ONE_ROW}
        fields |= {name: fields[name].reshape(len(fields["log_roofline_s"]), -1) for name in _PER_NODE}
        graphs.append(GraphArrays(**{**fields, "edge_index": fields["edge_index"].reshape(2, -1)}))
    return graphs
