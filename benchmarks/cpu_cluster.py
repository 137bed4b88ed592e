"""The loop closed on two CPU ranks: measure, calibrate on four runs, predict the others.

Prints how well two runs of the operator benchmark agree, and the errors of the predictor before and after calibration
on runs that it was not calibrated with: other sizes, other precisions, pure bf16 never calibrated on, and the errors of
the bf16/fp32 speed-ups. Takes under twelve minutes on two idle cores; run it again to go on where it was interrupted.

    python benchmarks/cpu_cluster.py [--output build/cpu-cluster]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

_LLAMA = {"activation": "swiglu", "normalization": "rmsnorm", "position_embedding": "rope", "bias": False}
_GPT = {"activation": "gelu", "normalization": "layernorm", "position_embedding": "learned", "bias": True}
# name: (family, layers, hidden, feed-forward, heads, vocabulary, sequence, micro batch, global batch)
_JOBS: dict[str, tuple[Any, ...]] = {
    "small": (_LLAMA, 2, 256, 704, 4, 4096, 128, 4, 8),
    "large": (_LLAMA, 2, 512, 1408, 8, 4096, 256, 2, 8),
    "deeper": (_LLAMA, 6, 256, 704, 4, 4096, 128, 4, 8),
    "between": (_LLAMA, 3, 384, 1024, 6, 8192, 256, 2, 4),
    "longer": (_LLAMA, 2, 384, 1024, 6, 2048, 512, 1, 4),
    "gpt": (_GPT, 2, 512, 2048, 8, 4096, 128, 4, 8),
    "accumulated": (_LLAMA, 2, 448, 1216, 7, 4096, 128, 2, 16),
}
_PRECISIONS = ("fp32", "bf16_mixed", "bf16")
_CALIBRATED = {("small", "fp32"), ("large", "bf16_mixed"), ("deeper", "bf16_mixed"), ("between", "fp32")}


def _write_jobs(folder: Path) -> list[Path]:
    paths = []
    for name, (family, layers, hidden, width, heads, vocabulary, length, micro, whole) in _JOBS.items():
        model = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": width, "num_attention_heads": heads,
                 "vocab_size": vocabulary, "tie_embeddings": False, **family}  # fmt: skip
        batch = {"seq_length": length, "micro_batch_size": micro, "global_batch_size": whole}
        job = {"name": name, "model": model, "batch": batch, "cluster": {"gpu": "measured", "gpus_per_node": 2}}
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(job), encoding="utf-8")
        paths.append(path)
    return paths


def _run(*command: str) -> None:
    print("$", " ".join(command), file=sys.stderr, flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", *command], check=True, env=environment, stdout=sys.stderr)


def _benchmark(*arguments: str) -> None:
    _run("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "dataset_builder.benchmark", *arguments)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _write_rows(rows: list[dict[str, str]], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _agreement(first: Path, second: Path) -> dict[str, float | None]:
    """How far two runs of the operator benchmark are apart on the rows that both wrote, in percent of their mean."""
    times = [{row["op_id"]: float(row["latency_us"]) for row in _rows(path / "ops.csv")} for path in (first, second)]
    both = times[0].keys() & times[1].keys()
    apart = [200 * abs(times[0][key] - times[1][key]) / (times[0][key] + times[1][key]) for key in both]
    return {"operators": len(apart), "median_percent": statistics.median(apart) if apart else None}


def _mean_size(errors: Iterable[float]) -> float | None:
    """``None`` when nothing was measured well enough to be written."""
    sizes = [abs(error) for error in errors]
    return statistics.fmean(sizes) if sizes else None


def _errors(runs: list[dict[str, str]], predictions: Path) -> dict[str, Any]:
    """Errors on runs that no calibration saw, and of their speed-ups over fp32, in percent."""
    predicted = {row["run_id"]: float(row["predicted_iter_time_s"]) for row in _rows(predictions / "predictions.csv")}
    time_of = {(run["model_name"], run["precision"]): float(run["iter_time_s"]) for run in runs}
    guess_of = {(run["model_name"], run["precision"]): predicted[run["run_id"]] for run in runs}
    unseen = {key: 100 * (guess_of[key] / time_of[key] - 1) for key in time_of if key not in _CALIBRATED}
    speed_ups = {
        (name, precision): 100 * (guess_of[name, "fp32"] / guess_of[name, precision]
                                  / (time_of[name, "fp32"] / time_of[name, precision]) - 1)
        for name, precision in unseen if precision != "fp32" and (name, "fp32") in time_of
    }  # fmt: skip
    of_precision = {
        precision: [error for (_, each), error in unseen.items() if each == precision] for precision in _PRECISIONS
    }
    return {
        "runs": len(unseen),
        "mape_percent": _mean_size(unseen.values()),
        "mape_percent_by_precision": {name: _mean_size(errors) for name, errors in of_precision.items()},
        "speed_up_mape_percent": _mean_size(speed_ups.values()),
        "speed_up_worst_percent": max(map(abs, speed_ups.values()), default=None),
        "by_run": {" ".join(key): round(error, 1) for key, error in unseen.items()},
        "speed_ups": {" ".join(key): round(error, 1) for key, error in speed_ups.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("build/cpu-cluster"))
    parser.add_argument("--budget-s", type=float, default=240.0, help="seconds that the training steps may take")
    parser.add_argument("--operators-s", type=float, default=75.0, help="seconds for each of two runs of the operators")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--most-uncertainty", type=float, default=0.05)
    options = parser.parse_args()
    first, second = options.output / "first", options.output / "second"
    for folder in (first, second):
        folder.mkdir(parents=True, exist_ok=True)
    known = f"--most-uncertainty={options.most_uncertainty}"
    if not (first / "cluster.json").exists():  # measured again, it would be another device
        _benchmark("--output", str(first), "--only", "cluster")
    (second / "cluster.json").write_bytes((first / "cluster.json").read_bytes())
    for folder in (first, second) if options.operators_s else ():
        _benchmark("--output", str(folder), "--only", "operators", f"--budget-s={options.operators_s}", known)
    jobs = [str(path) for path in _write_jobs(options.output)]
    limits = [known, f"--budget-s={options.budget_s}", f"--rounds={options.rounds}"]
    _benchmark(*jobs, "--output", str(first), "--only", "steps", *limits)
    runs = _rows(first / "runs.csv")
    few = [run for run in runs if (run["model_name"], run["precision"]) in _CALIBRATED]
    _write_rows(few, options.output / "four-runs.csv")
    calibrated, before, after = (str(options.output / name) for name in ("calibrated", "before", "after"))
    operators = ["--ops", str(first / "ops.csv")] if options.operators_s else []
    _run("gnn_predictor.calibrate", str(options.output / "four-runs.csv"), *operators, "--output", calibrated)
    _run("gnn_predictor.evaluate", f"runs={first / 'runs.csv'}", f"output={before}")
    _run("gnn_predictor.evaluate", f"runs={first / 'runs.csv'}", f"checkpoint={calibrated}", f"output={after}")
    figures = {
        "calibrated_with": len(few),
        "operator_benchmark": _agreement(first, second) if options.operators_s else None,
        "before": _errors(runs, Path(before)),
        "after": _errors(runs, Path(after)),
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
