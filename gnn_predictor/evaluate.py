"""Judges a checkpoint on measured runs: ``python -m gnn_predictor.evaluate runs=RUNS.csv checkpoint=DIR output=DIR``.

In: any runs.csv of the measurement schema. Out, in ``output``: predictions.csv (one line a row of the file, seconds and
GB of 1e9 bytes) and metrics.json (:func:`gnn_predictor.metrics.evaluation_metrics`, errors in percent), with
``nodes=NODES.csv`` also node_errors.csv (:mod:`gnn_predictor.node_errors`), each written whole or not at all. A row
without a job is skipped with the reason; every other row is answered.
Exit codes: 0; 2 bad usage or a file that can't be read (names file and column); 3 checkpoint missing or incompatible.
"""

from __future__ import annotations

import os
import sys

from dataset_builder.command_line import answered_at_once

USAGE = (
    "usage: python -m gnn_predictor.evaluate runs=RUNS.csv output=DIR [checkpoint=DIR] [baselines=false] "
    "[nodes=NODES.csv]"
)
HELP = f"""{USAGE}

Predicts every row of a table of measured runs; writes predictions.csv and metrics.json. With nodes= (what
dataset_builder.benchmark --profile writes beside the runs) also node_errors.csv: the network's seconds of the graph's
nodes beside the measured ones, by kind.

examples:
  python -m gnn_predictor.evaluate runs=runs.csv output=outputs/evaluation
  python -m gnn_predictor.evaluate runs=runs.csv output=outputs/mine checkpoint=my-checkpoint baselines=false"""

if __name__ == "__main__":  # before what takes seconds to import
    if answered_at_once(HELP, sys.argv[1:]):
        sys.exit(0)
    from dataset_builder.corpus.measurements import header_exit_code

    _plain = [each.removeprefix("runs=") for each in sys.argv[1:] if each.startswith("runs=")]
    if _plain and os.path.isfile(_plain[-1]) and (_refused := header_exit_code(_plain[-1])):
        sys.exit(_refused)

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from dataset_builder.corpus.measurements import RunMeasurement, read_runs, runs_columns
from dataset_builder.corpus.table_columns import unread_columns
from dataset_builder.hydra_errors import told_in_one_line
from dataset_builder.job.errors import JobError
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.floor import impossible
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.baselines import (
    BASELINES,
    analytic_features,
    blind_job,
    held_out_predictions,
    job_key,
    layout_group,
    pair_group,
    read_reference,
)
from gnn_predictor.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from gnn_predictor.memory import metered_bytes
from gnn_predictor.metrics import BASELINE_PREFIX, evaluation_metrics
from gnn_predictor.node_errors import node_errors
from gnn_predictor.prediction import Prediction, predict
from gnn_predictor.run_classes import gpu_count, model_size
from gnn_predictor.table_warnings import PredictedRun, another_unit, assumptions, far_off, too_large, untimed

COLUMNS = (
    "run_id", "iter_time_s", "predicted_iter_time_s", "predicted_low_s", "predicted_high_s", "peak_mem_gb",
    "predicted_peak_mem_gb", "in_domain", "status", "reason",
)  # fmt: skip
NUMBERS = COLUMNS[1:7]
BATCH = 64  # jobs predicted at once

PredictJobs = Callable[[Sequence[TrainingJob]], Sequence[Prediction]]


class UsageError(ValueError):
    """Arguments that are missing or unknown."""

    exit_code = 2


def evaluate(
    runs: Path, output: Path, checkpoint: Checkpoint, *, baselines: bool = True, predict_jobs: PredictJobs | None = None
) -> dict[str, Any]:
    """Predicts every row of ``runs``, writes the two files and returns the content of metrics.json.

    ``predict_jobs`` stands in for the checkpoint's network. Raises JobError, naming file and column, for a file that
    can't be read.
    """
    unread, measurements = unread_columns(runs_columns(runs)), read_runs(runs)
    if not measurements:
        raise JobError(["no rows; expected at least one run"], source=str(runs))
    table = predictions_table(measurements, predict_jobs or _predictor(checkpoint))
    reference = read_reference(checkpoint.path) if checkpoint.path else None
    if baselines and reference is not None:
        table = table.join(baseline_columns(measurements, reference))
    if baselines and checkpoint.blind is not None:
        blind = replace(checkpoint, tensors=checkpoint.blind, process=None)
        table[f"{BASELINE_PREFIX}b3_s"] = blind_column(measurements, _predictor(blind))
    metrics = evaluation_metrics(table)
    metrics["checkpoint"] = {"name": checkpoint.config.name, "corpus": checkpoint.config.corpus_hash}
    metrics["overlap_with_training"] = training_overlap(table, reference)
    metrics["impossible"] = table.loc[(table["status"] == "ok") & (table["reason"] != ""), "run_id"].tolist()
    answered = [run for run, status in zip(measurements, table["status"], strict=True) if status == "ok"]
    metrics["notes"] = [*untimed(answered), *_notes(metrics, baselines)]
    output.mkdir(parents=True, exist_ok=True)
    _write_whole(output / "predictions.csv", table[list(COLUMNS)].to_csv(index=False))
    _write_whole(output / "metrics.json", json.dumps(metrics, indent=1, allow_nan=False) + "\n")
    for line in filter(None, (unread, *assumptions(answered), *_warnings(measurements, table))):
        print(line, file=sys.stderr)
    return metrics


def _warnings(measurements: Sequence[RunMeasurement], table: pd.DataFrame) -> list[str]:
    """Of rows that were answered and look wrong."""
    columns = (table["status"], table["predicted_iter_time_s"], table["predicted_peak_mem_gb"])
    predicted = [
        PredictedRun(run, seconds, peak_gb * 1e9)
        for run, status, seconds, peak_gb in zip(measurements, *columns, strict=True)
        if status == "ok"
    ]
    unit = another_unit(predicted)
    return [*too_large(predicted), *([f"warning: {unit}"] if unit else far_off(predicted))]


def predictions_table(measurements: Sequence[RunMeasurement], predict_jobs: PredictJobs) -> pd.DataFrame:
    """One line a measurement: the columns of predictions.csv and the facts by which the figures are broken down."""
    facts = pd.DataFrame([_facts(run) for run in measurements], columns=list(_FACTS))
    possible = [index for index, run in enumerate(measurements) if run.job is not None]
    answers = pd.DataFrame(
        [{"status": "skipped", "reason": run.reason or "no job can be built from this row"} for run in measurements],
        columns=["predicted_iter_time_s", "predicted_low_s", "predicted_high_s", "predicted_peak_mem_gb", "in_domain",
                 "status", "reason"],
        dtype=object,
    )  # fmt: skip
    for start in range(0, len(possible), BATCH):
        chosen = possible[start : start + BATCH]
        runs = [measurements[index] for index in chosen]
        for index, answer in zip(chosen, _answers(runs, predict_jobs), strict=True):
            for column, value in answer.items():
                answers.at[index, column] = value
        print(f"\rpredicted {start + len(chosen)} of {len(possible)} rows", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    table = facts.join(answers)
    table["in_domain"] = table["in_domain"].map(lambda value: bool(value) if value in (True, False) else False)
    return table.astype(dict.fromkeys(NUMBERS, float))


def baseline_columns(measurements: Sequence[RunMeasurement], reference: pd.DataFrame) -> pd.DataFrame:
    """Columns ``baseline_<name>_s`` for every measurement, from fits that saw no group of the row they predict."""
    lines: dict[int, dict[str, float | str]] = {}
    for index, run in enumerate(measurements):
        if run.job is None:
            continue
        job = run.job.resolved()
        try:
            lines[index] = {**_keys(run), **analytic_features(job, build_graph(job), rank_layout(job))}
        except Exception as error:  # a row without baselines is no reason to lose the others
            print(f"{run.run_id}: no baselines: {error!r}", file=sys.stderr)
    columns = [f"{BASELINE_PREFIX}{name}_s" for name in BASELINES]
    everything = pd.DataFrame(np.nan, index=range(len(measurements)), columns=columns)
    if lines:
        predicted = held_out_predictions(reference, pd.DataFrame.from_dict(lines, orient="index"))
        everything.loc[predicted.index, columns] = predicted.to_numpy(float)
    return everything


def blind_column(measurements: Sequence[RunMeasurement], predict_jobs: PredictJobs) -> pd.Series[float]:
    """B3's seconds for every measurement: NaN where there is no job."""
    blind = [replace(run, job=blind_job(run.job.resolved())) if run.job else run for run in measurements]
    return predictions_table(blind, predict_jobs)["predicted_iter_time_s"]


def training_overlap(table: pd.DataFrame, reference: pd.DataFrame | None) -> dict[str, Any]:
    """How many answered rows the checkpoint was trained on, by run, by group and by :func:`job_key`."""
    if reference is None:
        return {"known": False, "rows": None, "by_run_id": None, "by_job_group": None, "by_job": None}
    answered = table[table["status"] == "ok"]
    by_run = answered["run_id"].isin(set(reference["run_id"]))
    by_group = answered["job_group"].isin(set(reference["job_group"]))
    by_job = answered["job_key"].isin(set(reference["job_key"]))
    return {
        "known": True,
        "rows": int((by_run | by_group | by_job).sum()),
        "by_run_id": int(by_run.sum()),
        "by_job_group": int(by_group.sum()),
        "by_job": int(by_job.sum()),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    overrides = list(sys.argv[1:] if arguments is None else arguments)
    if answered_at_once(HELP, overrides):
        return 0
    try:
        config = _configuration(overrides)
        checkpoint = load_checkpoint(config["checkpoint"])
        output = Path(config["output"])
        metrics = evaluate(Path(config["runs"]), output, checkpoint, baselines=bool(config["baselines"]))
        errors = _node_errors(config, checkpoint)
    except (UsageError, CheckpointError, JobError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(summary(metrics, output))
    if errors is not None:
        _write_whole(output / "node_errors.csv", errors.to_csv(index=False))
        print(errors.to_string(index=False, float_format="{:.4g}".format))
    return 0


def _node_errors(config: dict[str, Any], checkpoint: Checkpoint) -> pd.DataFrame | None:
    if config["nodes"] is None:
        return None
    return node_errors(Path(config["nodes"]), read_runs(Path(config["runs"])), checkpoint)


def summary(metrics: dict[str, Any], output: Path) -> str:
    """The figures of metrics.json that matter most, a line for each predictor."""
    lines = [
        f"{metrics['count']} rows answered, {metrics['skipped']} skipped; written to {output}",
        f"{'':10} {'MAPE':>8} {'median':>8} {'signed':>8} {'by source':>10}",
    ]
    for name, figures in {"predictor": metrics, **metrics["baselines"]}.items():
        values = [figures["mape_percent"], figures["median_ape_percent"], figures["signed_mean_percent"]]
        cells = " ".join(f"{_percent(value):>8}" for value in values)
        lines.append(f"{name:10} {cells} {_percent(figures['macro_mape_by_source_percent']):>10}")
    return "\n".join([*lines, *metrics["notes"]])


def _configuration(overrides: list[str]) -> dict[str, Any]:
    """The composed configuration; raises UsageError for an unknown key or a missing value."""
    package = Path(__file__).resolve().parent
    conf = package / "conf" if (package / "conf").is_dir() else package.parent / "conf"
    try:
        with initialize_config_dir(str(conf), version_base="1.3"):
            config = compose("evaluate", overrides=overrides)
        return {key: config[key] for key in ("runs", "output", "checkpoint", "baselines", "nodes")}
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(f"evaluate: {told_in_one_line(error)}\n{USAGE}") from None


def _predictor(checkpoint: Checkpoint) -> PredictJobs:
    return lambda jobs: predict(list(jobs), checkpoint=checkpoint, force=True)


def _answers(runs: list[RunMeasurement], predict_jobs: PredictJobs) -> Iterator[dict[str, Any]]:
    """What predictions.csv says of each run; one that can't be predicted doesn't spoil its batch."""
    try:
        predictions = predict_jobs([run.job for run in runs if run.job])
        answers = [_answer(run, prediction) for run, prediction in zip(runs, predictions, strict=True)]
    except CheckpointError:
        raise
    except Exception as error:  # whatever it is, the other rows of the file deserve their answer
        if len(runs) == 1:
            reason = "; ".join(error.reasons) if isinstance(error, JobError) else f"a bug: {error!r}"
            yield {"status": "skipped", "reason": " ".join(reason.split())[:500]}
            return
        for run in runs:
            yield from _answers([run], predict_jobs)
        return
    yield from answers


def _answer(run: RunMeasurement, prediction: Prediction) -> dict[str, Any]:
    """``reason`` of an answered run is empty unless its measured time is below the physical floor."""
    if not math.isfinite(prediction.iteration_time_s):
        return {"status": "skipped", "reason": "the predicted time is not finite"}
    return {
        "predicted_iter_time_s": prediction.iteration_time_s,
        "predicted_low_s": prediction.iteration_time_low_s,
        "predicted_high_s": prediction.iteration_time_high_s,
        "predicted_peak_mem_gb": metered_bytes([s.memory for s in prediction.stages], run.memory_meter) / 1e9,
        "in_domain": prediction.in_domain,
        "status": "ok",
        "reason": (run.is_timed and impossible(run.iter_time_s, prediction.floor)) or "",
    }


_FACTS = (
    "run_id", "source_id", "job_group", "job_key", "pair_group", "layout_group", "layout", "gpu", "precision",
    "architecture", "model_size", "gpu_count", "iter_time_s", "peak_mem_gb",
)  # fmt: skip


def _facts(run: RunMeasurement) -> dict[str, Any]:
    peak_mem_gb = math.nan if run.peak_mem_gb is None else run.peak_mem_gb
    # Another source's run of the same job differs in more than precision: its cluster and software are not the same.
    pair = f"{run.source_id}/{pair_group(run.job)}" if run.job else ""
    group, layout = layout_group(run.job) if run.job else ("", "")
    facts = {"gpu": run.gpu, "precision": run.precision, "architecture": run.architecture, "pair_group": pair,
             "model_size": model_size(run.job) if run.job else "", "gpu_count": gpu_count(run.job) if run.job else "",
             "layout_group": group, "layout": layout}  # fmt: skip
    return {**_keys(run), **facts, "iter_time_s": run.iter_time_s, "peak_mem_gb": peak_mem_gb}


def _keys(run: RunMeasurement) -> dict[str, str]:
    key = job_key(run.job) if run.job else f"no job: {run.run_id}"
    return {"run_id": run.run_id, "source_id": run.source_id, "job_group": run.job_group, "job_key": key}


def _notes(metrics: dict[str, Any], baselines: bool) -> list[str]:
    notes = []
    overlap = metrics["overlap_with_training"]
    if overlap["rows"]:
        notes.append(
            f"{overlap['rows']} of the {metrics['count']} answered rows belong to jobs the checkpoint was trained on: "
            "these figures are not held out; the checkpoint's own metrics.json has the cross-validated ones"
        )
    if metrics["impossible"]:
        notes.append(
            f"{len(metrics['impossible'])} rows measured less than their physical floor, which no job can; "
            f"their arithmetic stands in predictions.csv: {', '.join(metrics['impossible'][:10])}"
        )
    if not overlap["known"]:
        notes.append("the checkpoint carries no reference table: no baselines, and overlap with training is unknown")
    elif not baselines:
        notes.append("baselines were not asked for")
    return notes


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}%"


def _write_whole(path: Path, text: str) -> None:
    """Writes all of a file or none of it."""
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(scratch, 0o644)  # mkstemp's files are private; a result is to be read
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    sys.exit(main())
