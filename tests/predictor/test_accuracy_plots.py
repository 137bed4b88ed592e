"""The pictures of a checkpoint's held-out errors are drawn from what it carries, the same every time."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from gnn_predictor.baselines import read_reference
from gnn_predictor.checkpoint import load_checkpoint
from gnn_predictor.report.accuracy_plots import draw
from gnn_predictor.widening import read_held_out


def _carried() -> tuple[pd.DataFrame, pd.DataFrame]:
    path = load_checkpoint().path
    assert path is not None
    reference = read_reference(path)
    assert reference is not None
    return read_held_out(path), reference


def test_the_pictures_name_what_they_show_and_are_reproducible(tmp_path: Path) -> None:
    held_out, reference = _carried()
    paths = draw(held_out, reference, tmp_path)
    assert [path.suffix for path in paths] == [".svg", ".svg", ".png"]
    first = [path.read_bytes() for path in paths]
    assert first == [path.read_bytes() for path in draw(held_out, reference, tmp_path)]
    errors, sources = (data.decode() for data in first[:2])
    assert "<!-- P1 unseen jobs -->" in errors  # matplotlib notes the text of every label it draws as outlines
    assert "noise floor" in errors
    for source in reference["source_id"].unique():
        assert f"<!-- {source} (" in sources
