"""A checkpoint is written whole or not at all, and one that does not fit is refused with a reason."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gnn_predictor.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from gnn_predictor.domain import Domain

_CONFIG = CheckpointConfig(
    corpus_hash="c0ffee",
    name="test",
    network={"hidden": 8, "devices": ["A100"]},
    domain=Domain(gpus=("A100",), precisions=("bf16",), ranges={"model.hidden_size": (768.0, 8192.0)}),
)


def _checkpoint(value: float = 1.0) -> Checkpoint:
    return Checkpoint(_CONFIG, {"members.0.weight": torch.full((2, 3), value)}, {"P1": {"mape_percent": 7.0}})


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "deep" / "new", _checkpoint(), "# card\n")
    loaded = load_checkpoint(path)
    assert loaded.config == _CONFIG
    assert torch.equal(loaded.tensors["members.0.weight"], torch.ones(2, 3))
    assert loaded.metrics == {"P1": {"mape_percent": 7.0}}
    assert (path / "README.md").read_text() == "# card\n"


def test_baseline_b3_travels_with_its_checkpoint(tmp_path: Path) -> None:
    blind = {"members.0.weight": torch.zeros(2, 3)}
    path = save_checkpoint(tmp_path / "c", replace(_checkpoint(), blind=blind), "")
    loaded = load_checkpoint(path)
    assert loaded.blind is not None
    assert torch.equal(loaded.blind["members.0.weight"], blind["members.0.weight"])


def test_an_unchanged_checkpoint_is_read_once_and_a_new_one_anew(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "c", _checkpoint(1.0), "")
    first = load_checkpoint(path)
    assert load_checkpoint(path) is first
    save_checkpoint(path, _checkpoint(2.0), "")
    os.utime(path / MODEL_FILE, ns=(1, 1))
    assert float(load_checkpoint(path).tensors["members.0.weight"][0, 0]) == 2.0


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "c", _checkpoint(1.0), "old")
    with pytest.raises(CheckpointError, match=r"not finite in members\.0\.weight"):
        save_checkpoint(path, _checkpoint(float("nan")), "new")
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(path, Checkpoint(_CONFIG, _checkpoint().tensors, {"mape": float("inf")}), "new")
    assert (path / "README.md").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def _break_version(path: Path) -> None:
    (path / CONFIG_FILE).write_text(json.dumps({"format_version": 99, "anything": "else"}))


def _break_features(path: Path) -> None:
    config = json.loads((path / CONFIG_FILE).read_text())
    (path / CONFIG_FILE).write_text(json.dumps(config | {"feature_hash": "other"}))


def _add_key(path: Path) -> None:
    config = json.loads((path / CONFIG_FILE).read_text())
    (path / CONFIG_FILE).write_text(json.dumps(config | {"surprise": 1}))


def _pickle_weights(path: Path) -> None:
    (path / MODEL_FILE).write_bytes(pickle.dumps({"weights": 1}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_break_version, "format_version: 99, this package reads 1"),
        (_break_features, "feature_hash: 'other'"),
        (_add_key, "surprise"),
        (_pickle_weights, "not a safetensors file"),
        (lambda path: (path / MODEL_FILE).write_bytes((path / MODEL_FILE).read_bytes()[:-4]), "not a safetensors file"),
        (lambda path: (path / MODEL_FILE).unlink(), "no such file"),
        (lambda path: (path / CONFIG_FILE).unlink(), r"config\.json: no such file"),
        (lambda path: (path / CONFIG_FILE).write_text("{"), "not JSON"),
        (lambda path: (path / CONFIG_FILE).write_text("[" * 100_000), "not JSON"),
        (lambda path: (path / CONFIG_FILE).write_text("[]"), "format_version"),
        (lambda path: os.truncate(path / CONFIG_FILE, 5 * 2**20), "more than"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, damage: object, reason: str) -> None:
    path = save_checkpoint(tmp_path / "c", _checkpoint(), "")
    assert callable(damage)
    damage(path)
    with pytest.raises(CheckpointError, match=reason) as error:
        load_checkpoint(path)
    assert error.value.exit_code == 3
    assert str(path) in str(error.value)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        load_checkpoint(tmp_path / "nowhere")
