"""Tables that survive an interruption and refuse what is no measurement."""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_builder.corpus.measurements import shipped_table
from dataset_builder.measuring.table import NODE_COLUMNS, OP_COLUMNS, RUN_COLUMNS, MeasurementTable, TableError


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("name", "columns"), [("runs.parquet", RUN_COLUMNS), ("ops.parquet", OP_COLUMNS)])
def test_columns_are_those_of_the_shipped_tables(name: str, columns: tuple[str, ...]) -> None:
    shipped = {*pq.read_schema(shipped_table(name)).names}
    # label_flags is what the shipped table keeps of label_info
    assert shipped - {"derivation", "dtype_accum", "label_flags"} <= {*columns}


def test_a_half_written_row_is_cut_off_and_the_whole_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    MeasurementTable(path, RUN_COLUMNS).append({"run_id": "a", "iter_time_s": 0.5, "gpu": '{"name": "x, y"}'})
    with path.open("a", encoding="utf-8") as file:
        file.write('b,"interrupted')
    table = MeasurementTable(path, RUN_COLUMNS)
    assert table.known == {"a"}
    table.append({"run_id": "b", "iter_time_s": 0.25})
    assert [(row["run_id"], float(row["iter_time_s"])) for row in _rows(path)] == [("a", 0.5), ("b", 0.25)]
    assert _rows(path)[0]["gpu"] == '{"name": "x, y"}'


@pytest.mark.parametrize("time_s", [0.0, -1.0, float("nan"), float("inf"), None])
def test_no_time_is_no_row(tmp_path: Path, time_s: float | None) -> None:
    path = tmp_path / "runs.csv"
    with pytest.raises(ValueError, match="iter_time_s"):
        MeasurementTable(path, RUN_COLUMNS).append({"run_id": "a", "iter_time_s": time_s})
    assert _rows(path) == []


def test_rows_that_belong_together_are_all_there_or_none(tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    table = MeasurementTable(path, NODE_COLUMNS)
    with pytest.raises(ValueError, match="time_s"):
        table.append_together([{"run_id": "a", "node": 0, "time_s": 1e-5}, {"run_id": "a", "node": 1, "time_s": -1.0}])
    assert _rows(path) == []
    table.append_together([{"run_id": "a", "node": 0, "time_s": 1e-5}, {"run_id": "a", "node": 1, "reason": "no"}])
    table.append_together([{"run_id": "b", "node": 0, "time_s": 2e-5}])
    assert [(row["run_id"], row["node"], row["time_s"]) for row in _rows(path)] == [
        ("a", "0", "1e-05"), ("a", "1", ""), ("b", "0", "2e-05"),
    ]  # fmt: skip
    assert MeasurementTable(path, NODE_COLUMNS).known == {"a", "b"}
    assert [*tmp_path.iterdir()] == [path]


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(TableError, match=r"notes\.csv"):
        MeasurementTable(path, RUN_COLUMNS)
    assert path.read_text(encoding="utf-8") == "a,b\n1,2\n"


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(min_value=0, max_value=400), texts=st.lists(st.text("ab,\"'; =", max_size=9), max_size=5))
def test_whatever_the_place_of_the_interruption_whole_rows_stay(
    tmp_path_factory: pytest.TempPathFactory, cut: int, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("table") / "ops.csv"
    table = MeasurementTable(path, OP_COLUMNS)
    header = path.stat().st_size
    ends = [header]
    for number, text in enumerate(texts):
        table.append({"op_id": str(number), "latency_us": 1.5, "notes": text})
        ends.append(path.stat().st_size)
    length = min(header + cut, path.stat().st_size)
    with path.open("r+b") as file:
        file.truncate(length)
    assert MeasurementTable(path, OP_COLUMNS).known == {str(n) for n, end in enumerate(ends[1:]) if end <= length}
