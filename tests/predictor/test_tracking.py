"""Tracking without an account: what an offline run holds is read back from its file."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from wandb.proto import wandb_internal_pb2 as protocol

from gnn_predictor.tracking import Tracker

_BLOCK = 32768  # the run file is a LevelDB log: records are cut at block borders
_FIRST_OF_FILE, _HEADER = 7, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def _records(file: Path) -> Iterator[Any]:
    content = file.read_bytes()
    assert content[:4] == b":W&B"
    position, parts = _FIRST_OF_FILE, b""
    while position + _HEADER <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + _HEADER])
        data = content[position + _HEADER : position + _HEADER + length]
        if len(data) < length:  # it is being written
            return
        position += _HEADER + length
        parts = data if kind in (_FULL, _FIRST) else parts + data
        if kind in (_FULL, _LAST) and parts:
            record = protocol.Record()
            record.ParseFromString(parts)
            yield record


def _finished(path: Path) -> list[Any]:
    """The records of a run that has ended: W&B's service may write them after the run was told to finish."""
    for _ in range(300):
        records = list(_records(path))
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError("the run's file does not say that it ended")


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("_quiet")
def test_an_offline_run_holds_metrics_predictions_and_artifacts(tmp_path: Path) -> None:
    checkpoint, corpus = tmp_path / "checkpoint", tmp_path / "corpus.json"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    corpus.write_text("{}")
    predictions = pd.DataFrame({"iter_time_s": [1.0, 2.0, None], "predicted_s": [1.1, 1.9, 3.0]})
    with Tracker({"directory": str(tmp_path)}, "test", {"seed": 3, "network": {"hidden": 64}}) as tracker:
        tracker.log_dataset(corpus, {"corpus_hash": "c0ffee"})
        for epoch in range(3):
            tracker.log({"loss": 1.0 / (epoch + 1)}, step=epoch)
        tracker.log_predictions(predictions)
        tracker.summarize({"mape_percent": 7.5})
        tracker.log_checkpoint(checkpoint, {"corpus_hash": "c0ffee"})

    (run_file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    history: dict[str, list[Any]] = {}
    artifacts: dict[str, dict[str, Any]] = {}
    summary: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for record in _finished(run_file):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            for item in record.history.item:
                history.setdefault(item.key or ".".join(item.nested_key), []).append(json.loads(item.value_json))
        elif kind == "artifact":
            metadata = json.loads(record.artifact.metadata or "{}")
            artifacts[record.artifact.type] = metadata
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            artifact = record.request.log_artifact.artifact
            artifacts[artifact.type] = json.loads(artifact.metadata or "{}")
        elif kind == "summary":
            summary |= {u.key or ".".join(u.nested_key): json.loads(u.value_json) for u in record.summary.update}
        elif kind == "run":
            settings |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
    assert history["loss"] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert any(key.startswith("predictions/table") for key in history)
    assert any(key.startswith("predictions/scatter") for key in history)
    assert artifacts["dataset"]["corpus_hash"] == artifacts["model"]["corpus_hash"] == "c0ffee"
    assert summary["mape_percent"] == 7.5
    assert settings["seed"] == 3


@pytest.mark.usefixtures("_quiet")
def test_disabled_tracking_writes_nothing(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    with Tracker({"mode": "disabled", "directory": str(home)}, "test", {}) as tracker:
        tracker.log({"loss": 1.0}, step=0)
        tracker.log_predictions(pd.DataFrame({"iter_time_s": [1.0], "predicted_s": [1.0]}))
        tracker.log_checkpoint(tmp_path, {})
    assert not home.exists()
