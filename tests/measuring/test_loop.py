"""The loop closed for real: two gloo ranks measure, the rows build a corpus, calibrate, are evaluated, and predict."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from dataset_builder.corpus.build import load_corpus
from dataset_builder.corpus.measurements import read_ops, read_runs
from tests.measuring.conftest import JOB, run_benchmark


def _run(module: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_measure_build_calibrate_evaluate_infer(tmp_path: Path, write_job: Callable[..., Path]) -> None:
    output = tmp_path / "measured"
    model = {**JOB["model"], "hidden_size": 128, "ffn_hidden_size": 384}
    jobs = [write_job("first"), write_job("second", model=model), write_job("third", parallel={"tensor": 2})]
    limits = ["--rounds", "5", "--most-uncertainty", "100", "--budget-s", "4"]
    measured = run_benchmark(2, [*map(str, jobs[:2]), "--output", str(output), *limits])
    assert measured.returncode == 0, measured.stderr
    operators, reasons = read_ops(output / "ops.csv")
    assert operators
    assert not [reason for reason in reasons if "faster than" not in reason]  # two cores at work for others as well
    runs = read_runs(output / "runs.csv")
    assert [run.precision for run in runs] == ["fp32", "bf16_mixed", "bf16"] * 2

    tables = [f"runs={output / 'runs.csv'}", f"ops={output / 'ops.csv'}"]
    _run("dataset_builder.build", *tables, f"output={tmp_path / 'corpus'}")
    corpus = load_corpus(tmp_path / "corpus")
    assert [run.iter_time_s for run in corpus.runs] == [run.iter_time_s for run in runs]
    assert {operator.device for operator in corpus.operators} == {operators[0].device}

    calibrated, evaluation = tmp_path / "calibrated", tmp_path / "evaluation"
    _run(
        "gnn_predictor.calibrate",
        str(output / "runs.csv"),
        "--ops",
        str(output / "ops.csv"),
        "--output",
        str(calibrated),
    )
    calibration = json.loads((calibrated / "metrics.json").read_text(encoding="utf-8"))["calibration"]
    assert calibration["runs"] == 6
    assert calibration["fitted"]["mape_percent"] <= calibration["before"]["mape_percent"] + 1e-6
    _run("gnn_predictor.evaluate", f"runs={output / 'runs.csv'}", f"output={evaluation}", f"checkpoint={calibrated}",
         "baselines=false")  # fmt: skip
    metrics = json.loads((evaluation / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["skipped"] == 0

    cluster = (output / "cluster.json").read_text(encoding="utf-8")
    answer = json.loads(
        _run("gnn_predictor.infer", str(jobs[2]), "--set", f"cluster={cluster}", "--set", "software.framework=pytorch",
             "--checkpoint", str(calibrated), "--format", "json")
    )  # fmt: skip
    assert 0 < answer["iteration_time_s"] < math.inf
    assert answer["provenance"]["calibration"]["applied"] is True
