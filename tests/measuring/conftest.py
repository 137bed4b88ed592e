"""A small cluster of two CPU ranks and a job for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

CLUSTER: dict[str, Any] = {
    "gpu": {
        "name": "two-rank cpu", "vendor": "cpu", "architecture": "x86_64",
        "peak_flops_per_s": {"fp32": 1e13, "bf16": 1e13}, "hbm_bytes": 8e9, "hbm_bytes_per_s": 1e11, "l2_bytes": 2e6,
        "num_sms": 1, "clock_hz": 2e9,
    },
    "num_nodes": 1, "gpus_per_node": 2, "intra_node": {"name": "gloo", "bytes_per_s_per_gpu": 2e9, "latency_s": 1e-4},
}  # fmt: skip
JOB: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 192, "num_attention_heads": 4, "num_query_groups": 2,
        "vocab_size": 256, "activation": "swiglu", "normalization": "rmsnorm", "position_embedding": "rope",
        "bias": False, "tie_embeddings": False,
    },
    "batch": {"seq_length": 32, "micro_batch_size": 2, "global_batch_size": 8},
    "cluster": CLUSTER,
}  # fmt: skip


# what a machine with torch and numpy only does not have
BARE = ("pydantic", "yaml", "pandas", "pyarrow", "jsonschema", "rich", "hydra", "sklearn", "torch_geometric")


@pytest.fixture
def write_job(tmp_path: Path) -> Callable[..., Path]:
    """Writes the small job with parts replaced."""

    def write(name: str = "tiny", **parts: Any) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**JOB, "name": name, **parts}), encoding="utf-8")
        return path

    return write


def run_benchmark(
    ranks: int, arguments: Sequence[str], blocked: Sequence[str] = ("none",)
) -> subprocess.CompletedProcess[str]:
    """The command under torchrun; modules in ``blocked`` cannot be imported in it."""
    start = "import sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split(','))); "
    start += "from dataset_builder.benchmark import main; sys.exit(main())"
    command = [sys.executable, "-c", start, ",".join(blocked), *arguments]
    if ranks > 1:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launch, "--no-python", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """An output directory whose cluster is known."""
    output = tmp_path / "measured"
    output.mkdir()
    (output / "cluster.json").write_text(json.dumps(CLUSTER), encoding="utf-8")
    return output
