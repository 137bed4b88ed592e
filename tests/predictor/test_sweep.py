"""A search in parts through Hydra's launchers finds what the whole search finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_JOB = """
model: {num_layers: 4, hidden_size: 1024, num_attention_heads: 16, vocab_size: 32000}
batch: {seq_length: 1024, micro_batch_size: 1, global_batch_size: 8}
cluster: {gpu: H100-SXM5-80GB, num_nodes: 1, gpus_per_node: 4}
"""
_FREE = ("parallel.recompute=none,full", "batch.micro_batch_size=1,2")
_LAUNCHERS = {"basic": None, "joblib": "hydra_plugins.hydra_joblib_launcher", "submitit_local": "submitit"}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=300)


def _plans(*arguments: str) -> dict[str, Any]:
    done = _run("gnn_predictor.plan", *arguments, "--format", "json", "--top", "4", "--free", *_FREE)
    assert (done.returncode, done.stderr) == (0, "")
    value: dict[str, Any] = json.loads(done.stdout)
    return value


@pytest.mark.parametrize("launcher", _LAUNCHERS)
def test_parts_make_the_whole(launcher: str, untrained: Path, tmp_path: Path) -> None:
    plugin = _LAUNCHERS[launcher]
    if plugin is not None:
        pytest.importorskip(plugin)
    job = tmp_path / "job.yaml"
    job.write_text(_JOB)
    free = ",".join(f'"{each}"' for each in _FREE)
    done = _run(
        "gnn_predictor.sweep", "-m", f"job_file={job}", f"checkpoint={untrained}", f"free=[{free}]",
        "parts=2", "part=0,1", "top=4", f"hydra/launcher={launcher}", f"hydra.sweep.dir={tmp_path / 'sweep'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = sorted(map(str, (tmp_path / "sweep").glob("*/plans.json")))
    assert len(files) == 2
    whole = _plans(str(job), "--checkpoint", str(untrained))
    merged = _plans(str(job), "--checkpoint", str(untrained), "--merge", *files)
    assert [plan["set"] for plan in merged["plans"]] == [plan["set"] for plan in whole["plans"]]
    assert merged["searched"] == whole["searched"]


def test_wrong_settings_and_files_are_told(tmp_path: Path) -> None:
    done = _run("gnn_predictor.sweep", "job_file=missing.yaml", "parts=0", f"hydra.run.dir={tmp_path}")
    assert done.returncode == 2
    assert "sweep: parts: " in done.stderr
    job = tmp_path / "job.yaml"
    job.write_text(_JOB)
    (tmp_path / "other.json").write_text('{"plans": [{}]}')
    done = _run("gnn_predictor.plan", str(job), "--merge", str(tmp_path / "other.json"))
    assert done.returncode == 2
    assert "expected what gnn_predictor.sweep writes" in done.stderr
    assert "Traceback" not in done.stderr
