"""Command line: a few measured runs of one's own cluster in, an adapter out, in a folder that is itself a checkpoint.

``python -m gnn_predictor.calibrate RUNS.csv --output DIR [--checkpoint DIR]``; RUNS.csv has the columns of the
measurement schema. The folder holds the base's weights and the adapter; ``infer``, ``plan`` and ``evaluate`` take it as
``--checkpoint DIR``. The report goes to standard output, everything else to standard error.
Exit codes: 0; 2 bad usage, a file that cannot be read, or rows that no adapter may learn from (each named);
3 checkpoint missing or incompatible.
"""

from __future__ import annotations

import sys

from dataset_builder.command_line import CommandParser


def _parser() -> CommandParser:
    parser = CommandParser(
        "gnn_predictor.calibrate",
        "Fits a small adapter to measured runs of one's own cluster; the folder it writes is a checkpoint.",
        ["runs.csv --output my-cluster", "measured/runs.csv --ops measured/ops.csv --output my-cluster"],
    )
    parser.add_argument("runs", metavar="RUNS.csv", help="measured runs, with the columns of the measurement schema")
    parser.add_argument("--output", metavar="DIR", required=True, help="the adapter's folder, written whole")
    parser.add_argument("--ops", metavar="OPS.csv", help="measured operators of the same cluster, used where they help")
    parser.add_argument("--checkpoint", metavar="DIR", help="the predictor to calibrate (default: the released one)")
    return parser


if __name__ == "__main__":
    _runs = _parser().read(None).runs  # answers --help and ends
    from dataset_builder.corpus.measurements import header_exit_code

    if _refused := header_exit_code(_runs):
        sys.exit(_refused)  # before what takes seconds to import

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataset_builder.corpus.measurements import OpMeasurement, RunMeasurement, read_ops, read_runs, runs_columns
from dataset_builder.corpus.table_columns import unread_columns
from dataset_builder.job.errors import JobError
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.floor import impossible, physical_floor
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.adapter import Adapter, Floats, PlacedJobs, known_runs
from gnn_predictor.baselines import REFERENCE_FILE, job_key
from gnn_predictor.calibration import ClusterErrors, best_share, left_out_errors
from gnn_predictor.checkpoint import (
    CONFIG_FILE,
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from gnn_predictor.domain import domain_of
from gnn_predictor.features import GraphArrays, featurize
from gnn_predictor.memory import MemoryFit, metered_bytes, peak_memory
from gnn_predictor.metrics import error_figures
from gnn_predictor.prediction import job_times, network_of, predict
from gnn_predictor.table_warnings import (
    PredictedRun,
    another_unit,
    assumptions,
    far_off,
    stated_time,
    too_large,
)

_POOR_FIT_PERCENT = 50.0  # mean error of the very runs that an adapter was fitted to


@dataclass(frozen=True)
class _Run:
    """A measured run that can be learnt from."""

    measured: RunMeasurement
    job: TrainingJob
    graph: GraphArrays
    peak_bytes: float  # predicted

    @property
    def run_id(self) -> str:
        return self.measured.run_id

    @property
    def iter_time_s(self) -> float:
        return self.measured.iter_time_s


@dataclass(frozen=True)
class Calibration:
    """A fitted adapter and what it does to the runs it was fitted on; log errors are of measured over predicted."""

    adapter: Adapter
    runs: tuple[str, ...]
    measured_s: Floats
    before: Floats  # log errors of the uncalibrated predictor
    left_out: Floats | None  # by an adapter of the other jobs; None for a single job
    after: Floats  # by the adapter itself
    shared: float  # log factor on all jobs of the cluster
    warnings: tuple[str, ...] = ()  # of rows that look wrong

    def figures(self) -> dict[str, Any]:
        """The report as plain values; errors in percent of the measured time."""
        columns = {"before": self.before, "left_out": self.left_out, "fitted": self.after}
        return {
            "base": self.adapter.base,
            "runs": len(self.runs),
            "share": self.adapter.share,
            "shared_factor": math.exp(self.shared),
            "kernels": {name: math.exp(value) for name, value in self.adapter.kernels.items()},
            **{
                name: None if errors is None else error_figures(self.measured_s, self.measured_s * np.exp(-errors))
                for name, errors in columns.items()
            },
            "by_run": [
                {"run_id": run_id, "iter_time_s": float(measured)}
                | {
                    f"{name}_s": None if errors is None else float(measured * math.exp(-errors[index]))
                    for name, errors in columns.items()
                }
                for index, (run_id, measured) in enumerate(zip(self.runs, self.measured_s, strict=True))
            ],
        }


def calibrate(
    measurements: Sequence[RunMeasurement], base: Checkpoint, source: str, operators: Sequence[OpMeasurement] = ()
) -> Calibration:
    """Fits an adapter of ``base`` to these runs; raises JobError, naming every row that it must not learn from.

    The cluster's measured ``operators`` are used when left-out runs are predicted better with them.
    """
    runs = _usable(measurements, source, base.config.memory)
    gpus = tuple(sorted({run.job.cluster.gpu.name for run in runs}))
    covariance = base.config.error_covariance
    before = errors = _errors(runs, base)
    share, left_out = best_share(errors, left_out_errors(errors, covariance))
    adapter = Adapter(
        base=base.config.name,
        known=known_runs(errors.placed, errors.log_errors),
        share=share,
        gpus=gpus,
        frameworks=tuple(sorted({run.job.software.framework for run in runs if run.job.software.framework})),
        domain=domain_of(run.job for run in runs),
        error_ratios=(),
    )
    if operators:
        kernels = _measured_kernels(operators, base, runs, gpus)
        informed = _errors(runs, _with(base, adapter.model_copy(update={"kernels": kernels, "share": 0.0})))
        informed_share, informed_left_out = best_share(informed, left_out_errors(informed, covariance))
        if informed_left_out is None or left_out is None or _mean(informed_left_out) < _mean(left_out):
            errors, share, left_out = informed, informed_share, informed_left_out
            known = known_runs(errors.placed, errors.log_errors)
            adapter = adapter.model_copy(update={"kernels": kernels, "known": known, "share": share})
    predicted = [
        PredictedRun(run.measured, run.iter_time_s * math.exp(-error), run.peak_bytes)
        for run, error in zip(runs, errors.log_errors.tolist(), strict=True)
    ]
    if reason := another_unit(predicted):
        raise JobError([reason], source=source)
    adapter = adapter.model_copy(update={"error_ratios": _error_ratios(runs, left_out, base)})
    field = errors.field(covariance)
    after = errors.log_errors - share * field.expected(errors.placed)
    measured: Floats = np.array([run.iter_time_s for run in runs])
    names = tuple(run.run_id for run in runs)
    warnings = (*too_large(predicted), *far_off(predicted), *_poor_fit(measured, after))
    return Calibration(adapter, names, measured, before.log_errors, left_out, after, share * field.shared, warnings)


def _poor_fit(measured: Floats, after: Floats) -> list[str]:
    error = error_figures(measured, measured * np.exp(-after))["mape_percent"]
    if error is None or error <= _POOR_FIT_PERCENT:
        return []
    return [
        f"warning: the adapter's own runs are still {error:.0f}% wrong: the rows do not describe what ran (layout, "
        "kernels, unit of iter_time_s), or disagree with each other; do not rely on it"
    ]


def _mean(log_errors: Floats) -> float:
    return float(np.abs(log_errors).mean())


def _errors(runs: Sequence[_Run], checkpoint: Checkpoint) -> ClusterErrors:
    """Of the checkpoint's times before any is raised to its floor, which no measured run is below."""
    jobs, graphs = [run.job for run in runs], [run.graph for run in runs]
    predicted = [times.total_s for times in job_times(jobs, graphs, checkpoint)]
    return ClusterErrors(
        PlacedJobs.of(graphs, [job.precision.label for job in jobs]),
        np.log([run.iter_time_s for run in runs]) - np.log(predicted),
        np.array([job_key(job) for job in jobs]),
    )


def _with(base: Checkpoint, adapter: Adapter) -> Checkpoint:
    return replace(base, config=base.config.model_copy(update={"adapter": adapter}))


def _error_ratios(runs: Sequence[_Run], left_out: Floats | None, base: Checkpoint) -> tuple[float, ...]:
    """Errors of left-out runs over the half-widths of their uncalibrated intervals."""
    if left_out is None:
        return ()
    uncalibrated = predict([run.job for run in runs], checkpoint=base, force=True)
    widths = [math.log(each.iteration_time_high_s / each.iteration_time_s) for each in uncalibrated]
    ratios = np.abs(left_out) / np.array(widths)
    return tuple(ratios.tolist())


def _measured_kernels(
    operators: Sequence[OpMeasurement], base: Checkpoint, runs: Sequence[_Run], gpus: Sequence[str]
) -> dict[str, float]:
    from gnn_predictor.kernel_times import measured_slowdowns  # training code, which takes seconds to import

    network, _ = network_of(base)
    return measured_slowdowns(operators, network, runs[0].graph.workload.shape[1], gpus)


def _usable(measurements: Sequence[RunMeasurement], source: str, fit: MemoryFit) -> list[_Run]:
    """All runs, or JobError with every reason against any of them: a wrong row would spoil the others' answers."""
    runs, reasons = [], []
    for run in measurements:
        problems = list(_problems(run, measurements))
        if not problems and run.job is not None:
            job = run.job.resolved()
            graph, layout = build_graph(job), rank_layout(job)
            reason = impossible(run.iter_time_s, physical_floor(job, graph, layout))
            if reason:
                problems.append(f"iter_time_s: {reason}")
            memory = metered_bytes(peak_memory(graph.stages, job, layout, fit), run.memory_meter)
            runs.append(_Run(run, job, featurize(job, graph, layout), memory))
        reasons += [f"run {run.run_id}: {problem}" for problem in problems]
    if not measurements:
        reasons = ["no rows; expected at least one measured run"]
    if reasons:
        raise JobError(reasons, source=source)
    return runs


def _problems(run: RunMeasurement, everything: Sequence[RunMeasurement]) -> Iterator[str]:
    """What is wrong with a row beside physics."""
    if run.job is None:
        yield run.reason
    if not run.is_timed:
        yield f"iter_time_s: got {stated_time(run)}; expected the measured seconds of one iteration, more than 0"
    earlier = everything[: next(index for index, each in enumerate(everything) if each is run)]
    for other in earlier:
        if other.run_id == run.run_id:
            yield "run_id: stands twice; expected every run once"
        elif other.iter_time_s == run.iter_time_s and _unnamed(other.job) == _unnamed(run.job):
            yield f"the same job and time as run {other.run_id}; expected every run once"


def _unnamed(job: TrainingJob | None) -> TrainingJob | None:
    return job.model_copy(update={"name": None}) if job else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().read(arguments)
    torch.set_num_threads(1)
    try:
        _say([unread_columns(runs_columns(options.runs))])
        measurements = read_runs(options.runs)
        base = _without_adapter(load_checkpoint(options.checkpoint))
        output = _free_output(options.output, base)
        operators = read_ops(options.ops)[0] if options.ops else []
        result = calibrate(measurements, base, options.runs, operators)
        path = _save(result, base, output)
    except (CheckpointError, JobError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    _say([*assumptions(measurements), *result.warnings])
    print("\n".join([*report(result), f"written to {path}"]))
    return 0


def _say(lines: Sequence[str]) -> None:
    for line in filter(None, lines):
        print(line, file=sys.stderr)


def _without_adapter(checkpoint: Checkpoint) -> Checkpoint:
    """The base of a calibrated checkpoint: adapters do not add up, a new one takes the place of the old."""
    adapter = checkpoint.config.adapter
    if adapter is None:
        return checkpoint
    print(f"{checkpoint.path} is calibrated already; its base {adapter.base} is calibrated anew", file=sys.stderr)
    return replace(checkpoint, config=checkpoint.config.model_copy(update={"name": adapter.base, "adapter": None}))


def _free_output(name: str, base: Checkpoint) -> Path:
    """A folder that may be written: a new one, an empty one, or an adapter's own."""
    output = Path(name).expanduser()
    if base.path is not None and output.exists() and output.resolve() == base.path:
        raise JobError([f"--output: {output} is the checkpoint to be calibrated; expected another folder"], "calibrate")
    if output.exists() and not (output.is_dir() and ((output / CONFIG_FILE).exists() or not any(output.iterdir()))):
        raise JobError([f"--output: {output} holds something else; expected a new folder"], "calibrate")
    return output


def _save(result: Calibration, base: Checkpoint, output: Path) -> Path:
    config = base.config.model_copy(update={"name": f"{base.config.name}+calibration", "adapter": result.adapter})
    metrics = {"calibration": result.figures()}
    adapted = replace(base, config=config, metrics=metrics, blind=None)  # B3 is a baseline of the base
    path = save_checkpoint(output, adapted, _card(result, base))
    if base.path is not None and (base.path / REFERENCE_FILE).exists():
        partial = path / f".{REFERENCE_FILE}"
        shutil.copyfile(base.path / REFERENCE_FILE, partial)
        os.replace(partial, path / REFERENCE_FILE)
    return path


def report(result: Calibration) -> list[str]:
    """What was fitted and how well it does, as lines of text."""
    figures, adapter = result.figures(), result.adapter
    jobs = ", ".join(adapter.gpus) + (f" under {', '.join(adapter.frameworks)}" if adapter.frameworks else "")
    return [
        f"{adapter.base}, calibrated with {len(adapter.known)} runs on {jobs}",
        f"{'error':16} {'before':>9} {'left out':>9} {'fitted':>9}",
        *(
            f"{label:16} {_percent(figures['before'], key)} {_percent(figures['left_out'], key)} "
            f"{_percent(figures['fitted'], key)}"
            for label, key in (
                ("mean absolute", "mape_percent"), ("median absolute", "median_ape_percent"),
                ("mean signed", "signed_mean_percent"),
            )
        ),
        f"{'run':16} {'measured':>9} {'before':>9} {'left out':>9} {'fitted':>9}   seconds",
        *(
            f"{run['run_id']:16} {run['iter_time_s']:9.4g} {run['before_s']:9.4g} {_seconds(run['left_out_s'])} "
            f"{run['fitted_s']:9.4g}"
            for run in figures["by_run"]
        ),
        *_what_was_fitted(result),
    ]  # fmt: skip


def _what_was_fitted(result: Calibration) -> list[str]:
    adapter = result.adapter
    lines = []
    if adapter.kernels:
        lines.append(f"measured operators in place of the network's times: {', '.join(adapter.kernels)}")
    if not adapter.share and lines:
        return [*lines, "Nothing beside: left-out runs are predicted no better with the errors of the others."]
    if not adapter.share:
        return ["No calibration: left-out runs are predicted no better with one; predictions stay as they are."]
    if adapter.share < 1:
        lines.append(f"of what the runs say {adapter.share:.0%} is believed: left-out runs are predicted best with it")
    factors = np.exp([run.log_error for run in adapter.known] - result.after)
    lines.append(f"all jobs of the cluster x {math.exp(result.shared):.3f}")
    lines.append(f"jobs like these runs x {factors.min():.3f} to x {factors.max():.3f} in its place")
    if result.left_out is None:
        lines.append("Runs of one job: nothing can be left out, so the error on other jobs is unknown.")
    return lines


def _card(result: Calibration, base: Checkpoint) -> str:
    text = "\n".join(report(result))
    return f"""# {base.config.name}, calibrated

The weights of {base.config.name} (corpus {base.config.corpus_hash}) and an adapter to one cluster, fitted by
`python -m gnn_predictor.calibrate`. It is applied to jobs on the GPUs and under the frameworks named below.

```
{text}
```
"""


def _percent(figures: Mapping[str, Any] | None, key: str) -> str:
    value = None if figures is None else figures[key]
    return f"{'-' if value is None else f'{value:.1f}%':>9}"


def _seconds(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.4g}':>9}"


if __name__ == "__main__":
    sys.exit(main())
