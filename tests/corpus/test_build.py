"""The corpus: everything goes in or is listed with its reason, and comes out as it went in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dataset_builder.build import main
from dataset_builder.corpus.build import Corpus, build_corpus, load_corpus, open_corpus, pair_key
from dataset_builder.corpus.measurements import read_ops, read_runs, read_table, shipped_table
from dataset_builder.corpus.table_import import OP_COLUMNS, RUN_COLUMNS, import_tables
from dataset_builder.job.errors import JobError
from dataset_builder.tracing.trace import build_graph

SOURCES = ("internevo", "megatron-lm", "llm-foundry", "nvidia-dle", "megatron-bridge")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A few rows of each kind, some of which describe no job or no operator."""
    directory = tmp_path_factory.mktemp("tables")
    runs = read_table(shipped_table("runs.parquet"))
    few = [
        rows.iloc[:: max(1, len(rows) // 4)].head(4) for source, rows in runs.groupby("source_id") if source in SOURCES
    ]
    untimed = few[0].head(1).assign(run_id="untimed", iter_time_s=np.nan)
    pd.concat([*few, runs[runs["layers"].isna()].head(1), untimed]).to_csv(directory / "runs.csv", index=False)
    ops = read_table(shipped_table("ops.parquet"))
    pd.concat([rows.head(3) for _, rows in ops.groupby(["source_id", "op"])]).to_parquet(directory / "ops.parquet")
    return directory / "runs.csv", directory / "ops.parquet"


@pytest.fixture(scope="module")
def corpus(tables: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return build_corpus(tmp_path_factory.mktemp("built") / "corpus", *tables)


def test_rows_are_kept_or_listed(corpus: Corpus, tables: tuple[Path, Path]) -> None:
    skipped = pd.read_csv(corpus.path / "skipped.csv")
    assert len(corpus.runs) + sum(skipped["table"] == "runs") == len(read_table(tables[0]))
    assert len(corpus.operators) + sum(skipped["table"] == "ops") == len(read_table(tables[1]))
    assert skipped["table"].is_monotonic_decreasing  # own runs are found above the shipped operators
    assert skipped["reason"].str.len().min() > 0
    assert skipped.set_index("id")["reason"]["untimed"] == "iter_time_s: no time to learn"
    assert all(run.is_timed for run in corpus.runs)


def test_what_comes_out_is_what_went_in(corpus: Corpus, tables: tuple[Path, Path]) -> None:
    measured = {run.run_id: run for run in read_runs(tables[0])}
    for run in corpus.runs:
        assert run == measured[run.run_id]
        assert run.job is not None
        graph, expected = corpus.graph(run.run_id), build_graph(run.job)
        assert graph.nodes == expected.nodes
        assert graph.edges == expected.edges
        assert graph.stages == expected.stages
        assert graph.num_microbatches == expected.num_microbatches
        np.testing.assert_array_equal(graph.repeats, expected.repeats)
    assert corpus.operators == read_ops(tables[1])[0]


def test_content_hash_depends_on_the_content_alone(corpus: Corpus, tables: tuple[Path, Path], tmp_path: Path) -> None:
    assert build_corpus(tmp_path / "again", *tables).content_hash == corpus.content_hash
    changed = read_table(tables[0])
    changed.loc[0, "iter_time_s"] *= 1.01
    changed.to_csv(tmp_path / "runs.csv", index=False)
    assert build_corpus(tmp_path / "other", tmp_path / "runs.csv", tables[1]).content_hash != corpus.content_hash


def test_splits_file(corpus: Corpus) -> None:
    definitions = json.loads((corpus.path / "splits.json").read_text(encoding="utf-8"))
    assert len(definitions["fold"]) == len(corpus.runs)
    assert {split["name"][:2] for split in definitions["splits"]} == {"P1", "P2", "P3", "P4", "P5"}
    for first, second in definitions["P6"]:
        assert pair_key(corpus.runs[first]) == pair_key(corpus.runs[second])
        assert corpus.runs[first].precision != corpus.runs[second].precision


def test_cards_and_metadata_validate(corpus: Corpus) -> None:
    croissant = pytest.importorskip("mlcroissant")
    for directory in (corpus.path, shipped_table("runs.parquet").parent):
        dataset = croissant.Dataset(str(directory / "croissant.json"))
        assert not dataset.metadata.issues.errors
        assert (directory / "README.md").read_text(encoding="utf-8").startswith("# ")
    assert corpus.content_hash in (corpus.path / "README.md").read_text(encoding="utf-8")


def test_another_directory_is_not_overwritten(tables: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(JobError, match="no corpus"):
        build_corpus(tmp_path, *tables)
    assert (tmp_path / "thesis.txt").exists()


def test_a_broken_build_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("gpu\nT4-16GB\n")
    with pytest.raises(JobError):
        build_corpus(tmp_path / "corpus", tmp_path / "runs.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs.csv"]


def test_no_corpus_and_other_formats_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="not a corpus"):
        load_corpus(tmp_path)
    (tmp_path / "corpus.json").write_text('{"format_version": 0}')
    with pytest.raises(JobError, match="format 0"):
        load_corpus(tmp_path)
    assert open_corpus(corpus.path).content_hash == corpus.content_hash


def test_a_corpus_is_built_anew_only_of_other_tables(tables: tuple[Path, Path], tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    read_table(tables[0]).head(6).to_csv(runs, index=False)
    first = open_corpus(tmp_path / "corpus", runs, tables[1])
    written = (first.path / "corpus.json").stat().st_mtime_ns
    assert open_corpus(first.path, runs, tables[1]).facts == open_corpus(first.path).facts == first.facts
    assert (first.path / "corpus.json").stat().st_mtime_ns == written
    read_table(tables[0]).head(8).to_csv(runs, index=False)
    other = open_corpus(first.path, runs, tables[1])
    assert other.content_hash != first.content_hash
    assert other.facts["num_runs"] > first.facts["num_runs"]
    with pytest.raises(JobError, match="cannot be read as a table: No such file"):
        open_corpus(first.path, tmp_path / "none.csv")


def test_command(tables: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"runs={tables[0]}", f"ops={tables[1]}", f"output={tmp_path / 'corpus'}"]) == 0
    assert "runs have a graph" in capsys.readouterr().err
    assert main(["colour=blue"]) == 2
    assert main([f"runs={tmp_path / 'nothing.csv'}", f"output={tmp_path / 'other'}"]) == 2
    assert main([f"import_runs={tables[0]}"]) == 2


def test_import_keeps_rows_and_drops_derived_figures(tables: tuple[Path, Path], tmp_path: Path) -> None:
    runs = read_table(tables[0]).assign(tflops_per_gpu=1.0, label_info="x")
    runs.to_csv(tmp_path / "runs.csv", index=False)
    import_tables(tmp_path / "runs.csv", tables[1], tmp_path / "tables")
    imported = read_table(tmp_path / "tables" / "runs.parquet")
    assert tuple(imported.columns) == RUN_COLUMNS
    assert tuple(read_table(tmp_path / "tables" / "ops.parquet").columns) == OP_COLUMNS
    assert set(imported["run_id"]) == set(runs["run_id"].astype(str))


def test_shipped_tables_name_source_and_licence_on_every_row() -> None:
    size = 0
    for name in ("runs.parquet", "ops.parquet"):
        table = read_table(shipped_table(name))
        assert table[["source", "license", "derivation"]].notna().to_numpy().all()
        size += shipped_table(name).stat().st_size
    assert size < 25e6
