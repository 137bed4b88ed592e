"""How long ``infer`` takes: against ``import torch`` in the same environment, and as a job grows tenfold.

Prints a table. The wall times of whole processes are taken in turn (A B A B ...), and the fastest of each counts, so
that a busy machine hurts both alike.

    python benchmarks/infer_speed.py [JOB.yaml] [--rounds 5]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
# Ten times the layers need ten times the layers a stage, ten times the GPUs ten times the batch at equal microbatches.
_GROWN = {
    "10x layers": ("model.num_layers={layers}0",),
    "10x microbatches": ("batch.global_batch_size={batch}0",),
    "10x GPUs": ("cluster.num_nodes={nodes}0", "batch.global_batch_size={batch}0"),
}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", default=str(_ROOT / "conf" / "job" / "llama3-70b-fp8.yaml"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bad = Path(folder) / "bad.yaml"
        bad.write_text("model: {preset: no-such-model}\n")
        times = measure(commands(options.job, str(bad)), options.rounds)
    reference = times["import torch"]
    print(f"{'command':28} {'fastest':>9} {'x import torch':>15}")
    for name, seconds in times.items():
        print(f"{name:28} {seconds:8.3f}s {seconds / reference:15.2f}")


def commands(job: str, bad_job: str) -> dict[str, list[str]]:
    """What is timed, by name."""
    from dataset_builder.job.schema import TrainingJob

    resolved = TrainingJob.from_yaml(job).resolved()
    sizes = {
        "layers": resolved.model.num_layers,
        "batch": resolved.batch.global_batch_size,
        "nodes": resolved.cluster.num_nodes,
    }
    infer = [sys.executable, "-m", "gnn_predictor.infer", "--force"]
    grown = {
        name: [*infer, job, *(word for each in settings for word in ("--set", each.format(**sizes)))]
        for name, settings in _GROWN.items()
    }
    return {
        "import torch": [sys.executable, "-c", "import torch"],
        "infer": [*infer, job],
        "infer --help": [*infer, "--help"],
        "infer, a bad job": [*infer, bad_job],
        **{f"infer, {name}": command for name, command in grown.items()},
    }


def measure(timed: Mapping[str, Sequence[str]], rounds: int) -> dict[str, float]:
    """The fastest wall time of each command, in seconds."""
    best = dict.fromkeys(timed, float("inf"))
    for _ in range(rounds):
        for name, command in timed.items():
            start = time.perf_counter()
            done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            best[name] = min(best[name], time.perf_counter() - start)
            if done.returncode not in (0, 2):
                raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr}")
    return best


if __name__ == "__main__":
    main()
