"""The evaluate command: what it writes, what it skips, and how it fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dataset_builder.corpus.measurements import read_runs
from dataset_builder.job.errors import JobError
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.floor import PhysicalFloor
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor import baselines
from gnn_predictor import evaluate as command
from gnn_predictor.checkpoint import Checkpoint, CheckpointConfig, load_checkpoint
from gnn_predictor.prediction import predict

ROW: dict[str, Any] = {
    "run_id": "r0", "source_id": "lab", "framework": "megatron-lm", "gpu": "A100-SXM4-80GB", "num_gpus": 8,
    "gpus_per_node": 8, "model_name": "a small GPT", "arch": "gpt", "layers": 4, "hidden": 1024, "ffn_hidden": 4096,
    "heads": 16, "kv_heads": 16, "head_dim": 64, "vocab": 50304, "seq_len": 1024, "tp": 1, "pp": 1, "dp": 8, "cp": 1,
    "vpp": 1, "micro_batch": 2, "global_batch": 32, "precision": "bf16_mixed", "act_ckpt": "none",
    "optimizer": "adam", "iter_time_s": 0.2, "peak_mem_gb": 8.0, "job_group": "g0", "source_date": "2024-05",
}  # fmt: skip


@dataclass(frozen=True)
class _Memory:
    allocated: float
    shown: float


@dataclass(frozen=True)
class _Stage:
    memory: _Memory = _Memory(9e9, 10e9)


_FLOOR = PhysicalFloor({"compute": 0.001}, {"compute": "1 GFLOP / 1 TFLOP/s bf16"})


@dataclass(frozen=True)
class _Prediction:
    """What evaluate reads of a Prediction: 0.1 s in bf16, 0.05 s in other formats."""

    iteration_time_s: float
    in_domain: bool = True
    stages: tuple[_Stage, ...] = (_Stage(), _Stage(_Memory(1e9, 2e9)))
    floor: PhysicalFloor = _FLOOR

    @property
    def iteration_time_low_s(self) -> float:
        return 0.5 * self.iteration_time_s

    @property
    def iteration_time_high_s(self) -> float:
        return 3.0 * self.iteration_time_s


def _predict(jobs: Sequence[TrainingJob]) -> list[Any]:
    if any(job.batch.seq_length == 4096 for job in jobs):
        raise JobError(["4096 is refused"])
    if any(job.batch.seq_length == 8192 for job in jobs):
        raise RuntimeError("a defect\nof two lines")
    return [_Prediction(0.1 if job.precision.label == "bf16_mixed" else 0.05) for job in jobs]


def _csv(path: Path, *changes: dict[str, Any]) -> Path:
    rows = [{**ROW, "run_id": f"r{index}", **change} for index, change in enumerate(changes)]
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def _checkpoint(path: Path | None = None) -> Checkpoint:
    config = CheckpointConfig(feature_hash="x", corpus_hash="c", name="fake", network={})
    return Checkpoint(config, {}, {}, path)


def _reference(directory: Path, runs: Path) -> None:
    """A reference table in which the first row of ``runs`` and many foreign ones take three times the roofline."""
    first = read_runs(runs)[0]
    assert first.job is not None
    job = first.job.resolved()
    features = baselines.analytic_features(job, build_graph(job), rank_layout(job))
    seconds = 3.0 * float(features["roofline_s"])
    known = {"run_id": "r0", "source_id": "lab", "job_group": "g0", "job_key": baselines.job_key(job)}
    foreign = [{"run_id": f"f{n}", "source_id": "f", "job_group": f"f{n}", "job_key": f"f{n}"} for n in range(30)]
    baselines.write_reference(
        [baselines.reference_row(keys, features, seconds) for keys in [known, *foreign]], directory
    )


def test_writes_every_row_with_the_contracts_columns(tmp_path: Path) -> None:
    runs = _csv(tmp_path / "runs.csv", {}, {"precision": "fp32", "iter_time_s": 0.4}, {"hidden": None})
    metrics = command.evaluate(runs, tmp_path / "out", _checkpoint(), predict_jobs=_predict)
    table = pd.read_csv(tmp_path / "out" / "predictions.csv", keep_default_na=False)
    assert list(table.columns) == [
        "run_id", "iter_time_s", "predicted_iter_time_s", "predicted_low_s", "predicted_high_s", "peak_mem_gb",
        "predicted_peak_mem_gb", "in_domain", "status", "reason",
    ]  # fmt: skip
    assert table["status"].tolist() == ["ok", "ok", "skipped"]
    assert "hidden" in table["reason"][2]
    assert float(table["predicted_peak_mem_gb"][0]) == pytest.approx(9.0)  # the allocator on the fullest stage
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == metrics
    assert (metrics["count"], metrics["skipped"]) == (2, 1)
    assert metrics["mape_percent"] == pytest.approx((50.0 + 87.5) / 2)
    # bf16 takes half of fp32's time when measured, and is predicted to take twice.
    assert metrics["precision_speedup"]["count"] == 1
    assert metrics["precision_speedup"]["right_direction_percent"] == 0.0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["metrics.json", "predictions.csv"]


def test_a_row_that_cannot_be_predicted_does_not_spoil_its_batch(tmp_path: Path) -> None:
    runs = _csv(tmp_path / "runs.csv", {}, {"seq_len": 4096}, {"precision": "fp16_mixed"}, {"seq_len": 8192})
    command.evaluate(runs, tmp_path, _checkpoint(), predict_jobs=_predict)
    table = pd.read_csv(tmp_path / "predictions.csv", keep_default_na=False)
    assert table["status"].tolist() == ["ok", "skipped", "ok", "skipped"]
    assert table["reason"][1] == "4096 is refused"
    assert table["reason"][3].startswith("a bug: RuntimeError")


def test_a_time_below_the_physical_floor_is_answered_and_named(tmp_path: Path) -> None:
    runs = _csv(tmp_path / "runs.csv", {}, {"iter_time_s": 0.0009}, {"iter_time_s": None})
    metrics = command.evaluate(runs, tmp_path, _checkpoint(), predict_jobs=_predict)
    table = pd.read_csv(tmp_path / "predictions.csv", keep_default_na=False)
    assert table["status"].tolist() == ["ok"] * 3
    assert table["reason"][1].startswith("0.0009 s is impossible: needs at least 0.001 s = 1 GFLOP / 1 TFLOP/s bf16")
    assert table["reason"][[0, 2]].tolist() == ["", ""]
    assert metrics["impossible"] == ["r1"]
    assert any("physical floor" in note for note in metrics["notes"])


def test_errors_say_over_which_rows_they_are(tmp_path: Path) -> None:
    runs = _csv(tmp_path / "runs.csv", {}, *({"iter_time_s": time} for time in (-1, "7.9s", None)))
    metrics = command.evaluate(runs, tmp_path, _checkpoint(), predict_jobs=_predict)
    line = "errors over 1 of 4 answered rows; no time in iter_time_s of r1 ('-1'), r2 ('7.9s'), r3 (blank)"
    assert line in command.summary(metrics, tmp_path).splitlines()
    table = pd.read_csv(tmp_path / "predictions.csv", keep_default_na=False)
    assert table["reason"].tolist() == [""] * 4


def test_what_looks_wrong_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = _csv(tmp_path / "runs.csv", {}, {"layers": 6}, {"layers": 8, "iter_time_s": 3400.0})
    pd.read_csv(runs).assign(tensor_parallel=2, notes="a", colour="red").to_csv(runs, index=False)
    command.evaluate(runs, tmp_path, _checkpoint(), predict_jobs=_predict)
    told = capsys.readouterr().err.splitlines()
    assert told.count("columns that nothing reads: tensor_parallel, colour") == 1
    assert "  3 sharding: not stated, none as megatron-lm does" in told
    assert sum(line.startswith("warning: run r2: iter_time_s 3400 against 0.1 s predicted") for line in told) == 1
    assert sum("warning" in line for line in told) == 1


def test_a_table_in_milliseconds_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = _csv(tmp_path / "runs.csv", *({"layers": layers, "iter_time_s": 100.0 + layers} for layers in (2, 4, 6)))
    command.evaluate(runs, tmp_path, _checkpoint(), predict_jobs=_predict)
    assert "iter_time_s: the runs' median is 1,040 times as long as predicted" in capsys.readouterr().err


def test_baselines_stand_beside_and_overlap_is_told(tmp_path: Path) -> None:
    runs = _csv(tmp_path / "runs.csv", {}, {"layers": 6, "job_group": "g1"})
    _reference(tmp_path, runs)
    metrics = command.evaluate(runs, tmp_path / "out", _checkpoint(tmp_path), predict_jobs=_predict)
    assert set(metrics["baselines"]) == {"b0", "b1", "b2"}
    assert all(figures["count"] == 2 for figures in metrics["baselines"].values())
    assert metrics["overlap_with_training"] == {
        "known": True, "rows": 1, "by_run_id": 1, "by_job_group": 1, "by_job": 1,
    }  # fmt: skip
    assert "not held out" in metrics["notes"][0]


def test_a_file_of_which_nothing_can_be_used_still_gets_its_answer(tmp_path: Path) -> None:
    runs = _csv(tmp_path / "runs.csv", {"layers": None}, {"seq_len": None})
    metrics = command.evaluate(runs, tmp_path, _checkpoint(), predict_jobs=_predict)
    assert (metrics["count"], metrics["skipped"], metrics["mape_percent"]) == (0, 2, None)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "No such file"),
        ("", "cannot be read"),
        ("run_id,gpu\nr0,A100\n", "iter_time_s"),
        ("\x00\x01\x02", "column"),
        (f"{','.join(ROW)}\n", "no rows"),
    ],
)
def test_a_bad_file_is_named_with_its_column(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
    named: str,
) -> None:
    runs = tmp_path / "runs.csv"
    if content is not None:
        runs.write_text(content)
    monkeypatch.setattr(command, "load_checkpoint", lambda path: _checkpoint())
    assert command.main([f"runs={runs}", f"output={tmp_path}"]) == 2
    message = capsys.readouterr().err
    assert str(runs) in message
    assert named in message
    assert not (tmp_path / "metrics.json").exists()


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = _csv(tmp_path / "runs.csv", {})
    assert command.main([f"runs={runs}", f"output={tmp_path}", f"checkpoint={tmp_path / 'none'}"]) == 3
    assert "none" in capsys.readouterr().err
    assert command.main([f"output={tmp_path}"]) == 2
    assert "runs" in capsys.readouterr().err
    assert command.main([f"runs={runs}", f"output={tmp_path}", "colour=red"]) == 2
    captured = capsys.readouterr()
    assert "colour" in captured.err
    assert captured.out == ""
    assert not (tmp_path / "predictions.csv").exists()
    assert command.main(["--help"]) == 0


def test_b3_answers_without_the_precision(tmp_path: Path, untrained: Path) -> None:
    checkpoint = load_checkpoint(untrained)
    seeing = replace(checkpoint, blind=checkpoint.tensors)
    same = {"gpu": "A100-SXM4-80GB", "num_gpus": 8, "gpus_per_node": 8}
    runs = _csv(tmp_path / "runs.csv", {**same, "precision": "tf32"}, {**same, "precision": "bf16_mixed"})
    metrics = command.evaluate(runs, tmp_path / "out", seeing)
    assert metrics["baselines"]["b3"]["count"] == 2
    blind = command.blind_column(read_runs(runs), lambda jobs: predict(list(jobs), checkpoint=checkpoint, force=True))
    predicted = pd.read_csv(tmp_path / "out" / "predictions.csv")["predicted_iter_time_s"]
    assert blind[0] == pytest.approx(blind[1], rel=1e-6), "the two differ in precision only"
    assert abs(predicted[0] / predicted[1] - 1) > 0.05
