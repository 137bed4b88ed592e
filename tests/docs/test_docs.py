"""The documentation does what it says: its commands and snippets run, its tables are those of the program.

The blocks of a page run in order in one folder, as a reader would run them. A mark before a block changes that:
``<!-- not run: why -->`` leaves it out (and shows up as a skipped test), ``<!-- exits with 2 -->`` expects that code.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from dataset_builder.corpus.measurements import read_runs, runs_columns, shipped_table
from dataset_builder.corpus.table_columns import unread_columns
from gnn_predictor.card import with_figures
from gnn_predictor.checkpoint import load_checkpoint
from tests.docs.precision_table import PAGE, with_tables

_ROOT = Path(__file__).parents[2]
_CALIBRATE = _ROOT / "docs" / "guides" / "calibrate.md"
_PAGES = sorted([_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md")])
_BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]*?) -->\n)?```(?P<language>bash|python)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_JOB = re.compile(r"^```yaml(?: title=\"job.yaml\")?\n(model:.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A piece of a page that a reader would run."""

    page: str
    language: str
    code: str
    not_run: str  # why; empty where it runs
    exit_code: int


def blocks(page: Path) -> list[Block]:
    """The bash and Python blocks of a page, in order."""
    found = []
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        mark = match["mark"] or ""
        reason = mark.removeprefix("not run: ") if mark.startswith("not run: ") else ""
        code = int(mark.removeprefix("exits with ")) if mark.startswith("exits with ") else 0
        found.append(Block(str(page.relative_to(_ROOT)), match["language"], match["code"], reason, code))
    return found


_BLOCKS = {page: blocks(page) for page in _PAGES}
_LEFT_OUT = [block for found in _BLOCKS.values() for block in found if block.not_run]
_RUN = [page for page, found in _BLOCKS.items() if any(not block.not_run for block in found)]


def _folder_of_a_reader(page: Path, folder: Path) -> None:
    """What a page takes for granted: folders of the checkout, and the job file it shows."""
    for name in ("conf", "examples", "tests"):
        (folder / name).symlink_to(_ROOT / name)
    shown = _JOB.search(page.read_text(encoding="utf-8"))
    job = shown[1] if shown else (_ROOT / "conf" / "job" / "gpt2-124m.yaml").read_text(encoding="utf-8")
    (folder / "job.yaml").write_text(job, encoding="utf-8")
    (folder / "jobs.jsonl").write_text(yaml.safe_dump(yaml.safe_load(job), default_flow_style=True, width=10**6))


@pytest.mark.parametrize("page", _RUN, ids=[str(page.relative_to(_ROOT)) for page in _RUN])
def test_what_a_page_shows_runs(page: Path, tmp_path: Path) -> None:
    _folder_of_a_reader(page, tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(_ROOT), "WANDB_MODE": "offline"}
    for block in _BLOCKS[page]:
        if block.not_run:
            continue
        program = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
        done = subprocess.run(
            [*program, block.code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == block.exit_code, f"{block.code}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr, f"{block.code}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("block", _LEFT_OUT, ids=lambda block: f"{block.page}: {block.code.splitlines()[0][:60]}")
def test_what_is_left_out_says_why(block: Block) -> None:
    pytest.skip(f"{block.page}: {block.not_run}")


def test_marks_are_spelt_as_they_are_read() -> None:
    """A misspelt mark would run a block that must not run, or expect the wrong code."""
    before_blocks = re.compile(r"<!-- ([^>]*?) -->\n```(?:bash|python)")
    for page in _PAGES:
        for mark in before_blocks.findall(page.read_text(encoding="utf-8")):
            assert re.fullmatch(r"not run: .+|exits with [234]", mark), (page, mark)


def test_the_sample_of_runs_is_rows_of_the_shipped_table() -> None:
    """Columns that say nothing of a run of one's own, its group and remarks on its time, are left out."""
    sample = (_ROOT / "examples" / "runs.csv").read_text(encoding="utf-8")
    runs = pd.read_parquet(shipped_table("runs.parquet")).drop(columns=["job_group", "label_flags"])
    shown = runs[runs["run_id"].isin([line.split(",")[0] for line in sample.splitlines()])]
    assert sample == shown.to_csv(index=False)
    assert shown[["source", "license"]].ne("").all(axis=None)


def test_the_overview_lists_every_page() -> None:
    def pages(entries: list[dict[str, Any]]) -> list[tuple[str, str]]:
        found = []
        for entry in entries:
            for title, below in entry.items():
                found += pages(below) if isinstance(below, list) else [(title, below)]
        return found

    overview, *others = pages(yaml.safe_load((_ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    text = (_ROOT / "docs" / overview[1]).read_text(encoding="utf-8")
    assert re.findall(r"^- \[(.+?)\]\((.+?)\): ", text, re.MULTILINE) == others


def test_the_example_table_says_all_that_matters(tmp_path: Path) -> None:
    shown = re.search(r'^```csv title="runs.csv"\n(.*?)^```$', _CALIBRATE.read_text(encoding="utf-8"), re.M | re.S)
    assert shown
    (tmp_path / "runs.csv").write_text(shown[1], encoding="utf-8")
    assert unread_columns(runs_columns(tmp_path / "runs.csv")) == ""
    runs = read_runs(tmp_path / "runs.csv")
    assert [run.run_id for run in runs] == ["a", "b", "c", "d"]
    for run in runs:
        assert run.job is not None
        assert run.is_timed
        assert not run.blank


def test_the_table_of_precisions_is_what_the_tracer_does() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_tables(text), "run python -m tests.docs.precision_table"


@pytest.mark.parametrize("page", ["docs/accuracy.md", "docs/guides/memory.md"])
def test_pages_quote_the_released_figures(page: str) -> None:
    text = (_ROOT / page).read_text(encoding="utf-8")
    assert text == with_figures(text, load_checkpoint().metrics), f"run python -m gnn_predictor.card {page}"
