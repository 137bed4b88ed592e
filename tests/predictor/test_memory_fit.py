"""What measured peaks teach of memory: known factors are found again, nothing is learnt from one's own job."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dataset_builder.corpus.measurements import MemoryMeter, read_runs, read_table, shipped_table
from dataset_builder.corpus.trust import peak_doubts
from gnn_predictor.checkpoint import load_checkpoint
from gnn_predictor.memory import COUNTED, MemoryFit, StageTerms
from gnn_predictor.memory_fit import (
    MemoryExample,
    fit_memory,
    held_out_peaks,
    interval_bounds,
    main,
    memory_examples,
    memory_figures,
)

_TRUE = MemoryFit(
    activations=0.9,
    expert_activations=1.1,
    logits=1.3,
    split_logits=0.8,
    workspace_bytes=0.0,
    cached_share=0.1,
    runtime_bytes=3e9,
)


def _examples(count: int, meter: MemoryMeter = "allocator", scale: float = 1.0) -> list[MemoryExample]:
    """Peaks of jobs with terms drawn at random, as :data:`_TRUE` has them (times ``scale``)."""
    random = np.random.default_rng(0)
    examples = []
    for number in range(count):
        params, grads, optimizer, activations, logits = random.uniform(1e9, 1e10, 5).tolist()
        terms = (StageTerms(params, grads, optimizer, activations, logits, 0.0, number % 3 == 0, number % 2 == 0),)
        example = MemoryExample(terms, meter, 1.0, "lab", f"job {number // 4}")
        measured = example.predicted_bytes(_TRUE) * scale
        examples.append(MemoryExample(terms, meter, measured, "lab", f"job {number // 4}"))
    return examples


def test_known_factors_are_found_again_in_spite_of_wrong_labels() -> None:
    examples = [*_examples(400), *_examples(20, scale=3.0), *_examples(300, "device")]
    fit = fit_memory(examples)
    assert fit.activations == pytest.approx(0.9, abs=0.05)
    assert fit.expert_activations == pytest.approx(1.1, abs=0.05)
    assert (fit.logits, fit.split_logits) == pytest.approx((1.3, 0.8), abs=0.07)
    device = [example.predicted_bytes(fit) / example.measured_bytes for example in examples[-300:]]
    assert np.mean(np.abs(np.array(device) - 1)) < 0.03


def test_few_runs_teach_nothing() -> None:
    assert fit_memory(_examples(4)) == COUNTED


def test_a_peak_is_predicted_from_other_jobs_only() -> None:
    """A job measured at three times its memory does not pull its own prediction."""
    examples = _examples(200)
    odd = [MemoryExample(e.terms, e.meter, 3 * e.measured_bytes, e.source_id, e.job_group) for e in examples[:4]]
    table = held_out_peaks([*odd, *examples[4:]])
    assert (table["predicted"][:4] / table["measured"][:4]).to_numpy() == pytest.approx([1 / 3] * 4, rel=0.05)
    figures = memory_figures(table)
    assert figures["count"] == 200
    assert figures["median_ape_percent"] < 2.0  # as much as the shrinkage of few examples leaves


def test_an_interval_leaves_out_half_of_the_rest_on_each_side() -> None:
    low, high = interval_bounds(np.linspace(-1, 1, 101), 0.9)
    assert (low, high) == pytest.approx((-0.92, 0.92))


def test_a_checkpoint_is_refitted_without_its_weights(untrained: Path, tmp_path: Path) -> None:
    """The command changes what stands beside the weights, and the figures are those of its held-out peaks."""
    folder = shutil.copytree(untrained, tmp_path / "checkpoint")
    weights = (folder / "model.safetensors").read_bytes()
    rows = tmp_path / "runs.csv"
    table = read_table(shipped_table("runs.parquet")).query("peak_mem_gb > 0").iloc[::20]
    table.to_csv(rows, index=False)
    assert main([str(folder), "--runs", str(rows)]) == 0
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config.memory != COUNTED
    assert checkpoint.metrics["memory"]["count"] == len([run for run in read_runs(rows) if run.job])
    assert (folder / "model.safetensors").read_bytes() == weights
    assert json.loads((folder / "metrics.json").read_text()) == checkpoint.metrics


def test_a_checkpoint_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    assert main([str(tmp_path / "none")]) == 3


def test_no_checkpoint_is_changed_that_was_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "required: CHECKPOINT" in capsys.readouterr().err


def test_sources_say_what_they_measured() -> None:
    runs = {run.source_id: run.memory_meter for run in read_runs(shipped_table("runs.parquet")) if run.peak_mem_gb}
    assert runs == {"megatron-golden": "last_rank", "bigscience": "device"}


def test_a_peak_above_that_of_a_larger_micro_batch_is_doubted_and_still_evaluated() -> None:
    assert peak_doubts([("a", 2, 65.0), ("a", 4, 56.0), ("b", 2, 45.0), ("b", 4, 56.0), ("a", 1, 40.0)]) == [
        "the same run with a larger micro batch needs less: 56 GB", "", "", "", "",
    ]  # fmt: skip
    table = held_out_peaks([replace(each, doubt="odd" * (number < 3)) for number, each in enumerate(_examples(200))])
    figures = memory_figures(table)
    assert (figures["count"], figures["doubted"]["count"]) == (197, 3)


def test_one_peak_of_the_shipped_table_contradicts_its_own_source() -> None:
    doubted = [each for each in memory_examples(read_runs(shipped_table("runs.parquet"))) if each.doubt]
    assert [(each.source_id, each.measured_bytes) for each in doubted] == [("bigscience", 65e9)]
