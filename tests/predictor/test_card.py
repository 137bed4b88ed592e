"""Figures stand once, in metrics.json: the README and the model card say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnn_predictor.card import ablations, breakdowns, figures, model_card, with_figures
from gnn_predictor.checkpoint import Checkpoint, CheckpointConfig, load_checkpoint

_README = Path(__file__).parents[2] / "README.md"
_P1 = {
    "count": 4000,
    "mape_percent": 7.96,
    "median_ape_percent": 4.0,
    "macro_mape_by_source_percent": None,
    "parts": {"network": {"mape_percent": 9.04}},
    "baselines": {"B0": {"mape_percent": 60.0}},
}


def test_the_readme_quotes_the_released_figures() -> None:
    text = _README.read_text(encoding="utf-8")
    assert text == with_figures(text, load_checkpoint().metrics), "run python -m gnn_predictor.card README.md"


def test_the_released_card_quotes_the_released_figures() -> None:
    released = load_checkpoint()
    assert released.path is not None
    assert (released.path / "README.md").read_text(encoding="utf-8") == model_card(released)


def test_figures_stand_beside_the_baselines_and_missing_ones_are_dashes() -> None:
    *_, row = figures({"P1": _P1, "operators": {}}).splitlines()
    assert row == "| P1 unseen jobs | 4,000 | 8.0% | 4.0% | - | - | 9.0% | - | 60.0% |"


def test_a_card_of_an_unevaluated_checkpoint_says_so() -> None:
    config = CheckpointConfig(corpus_hash="c0ffee", name="new", network={})
    assert "has not been evaluated" in model_card(Checkpoint(config, {}))


def test_a_text_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="no block between"):
        with_figures("# Title", {"P1": _P1})


def test_speed_ups_between_precisions_are_told_with_b3_beside_them() -> None:
    speedup = {"count": 20, "mape_percent": 5.0, "median_ape_percent": 2.5, "right_direction_percent": 99.0,
               "by_pair": {"bf16_mixed->fp8_mixed": {"count": 20, "mape_percent": 5.0}}}  # fmt: skip
    blind = {"mape_percent": 60.0, "precision_speedup": {**speedup, "mape_percent": 30.0}}
    text = figures({"P1": {**_P1, "precision_speedup": speedup, "baselines": {"b3": blind}}})
    assert "of 20 pairs of unseen runs" in text
    assert "with 5.0% mean error (B3 30.0%), 2.5% median, and in the right direction in 99.0%." in text
    released = load_checkpoint().metrics
    for name, own in released["P1"]["precision_speedup"]["by_pair"].items():
        line = f"| {name.replace('->', ' to ')} | {own['count']:,} | {own['mape_percent']:.1f}% |"
        assert line in breakdowns(released)


def test_every_class_of_runs_has_its_line() -> None:
    metrics = load_checkpoint().metrics
    text = breakdowns(metrics)
    for key in ("by_precision", "by_gpu", "by_source", "by_architecture", "by_model_size", "by_gpu_count"):
        for name, own in metrics["P1"][key].items():
            assert f"| {name} | {own['count']:,} | {own['mape_percent']:.1f}% |" in text, (key, name)
    assert f"{metrics['noise_floor']['count']:,} runs are repeats" in text


def test_both_blocks_of_a_text_are_filled_and_the_rest_stays() -> None:
    metrics = load_checkpoint().metrics
    text = "a\n<!-- breakdowns --><!-- /breakdowns -->\nb\n<!-- metrics -->to be replaced<!-- /metrics -->\nc\n"
    filled = with_figures(text, metrics)
    assert breakdowns(metrics) in filled
    assert figures(metrics) in filled
    assert "to be replaced" not in filled
    assert [line for line in filled.splitlines() if line in ("a", "b", "c")] == ["a", "b", "c"]


def test_ablations_stand_side_by_side_and_their_section_is_left_out_where_there_are_none() -> None:
    assert ablations({"P1": _P1, "P2": _P1}) == ""
    alone = {"mape_percent": 20.0, "median_ape_percent": 10.0, "macro_mape_over_left_out_percent": 15.0}
    own = {
        **alone,
        "by_precision": {"fp8_mixed": {"mape_percent": 18.0}},
        "precision_speedup": {"mape_percent": None},
        "blended": {**alone, "mape_percent": 17.0},
    }
    names = ("full", "without_operators", "without_format_properties", "without_hardware")
    metrics = {"P2": {"ablations": {name: {**own, "mape_percent": 20.0 + i} for i, name in enumerate(names)}}}
    section = with_figures("<!-- ablations --><!-- /ablations -->", metrics)
    assert "| all runs | 20.0% | 21.0% | 22.0% | 23.0% |" in section
    assert "| fp8_mixed unseen | 18.0% | 18.0% | 18.0% | 18.0% |" in section
    assert "| precision speed-up | - | - | - | - |" in section
    assert "| all runs, blended with measured runs | 17.0% | 17.0% | 17.0% | 17.0% |" in section
