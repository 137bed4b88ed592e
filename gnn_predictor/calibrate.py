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


if __name__ == "__main__" and {"-h", "--help", "--version"} & set(sys.argv[1:]):
    _parser().parse_args()  # answers and ends, before what takes seconds to import

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dataset_builder.corpus.measurements import OpMeasurement, RunMeasurement, read_ops, read_runs
from dataset_builder.job.errors import JobError
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.floor import impossible, physical_floor
from dataset_builder.tracing.graph import TrainingGraph
from dataset_builder.tracing.layout import RankLayout, rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.adapter import GROUPS, Adapter, job_point, measured_times
from gnn_predictor.baselines import REFERENCE_FILE, job_key
from gnn_predictor.calibration import Fit, Floats, TimedRuns, fit, left_out_errors
from gnn_predictor.checkpoint import (
    CONFIG_FILE,
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from gnn_predictor.domain import domain_of
from gnn_predictor.features import featurize
from gnn_predictor.metrics import error_figures
from gnn_predictor.prediction import network_of, predict

_NOTICEABLE = 0.005  # of a log factor


@dataclass(frozen=True)
class _Run:
    """A measured run that can be learnt from."""

    run_id: str
    job: TrainingJob
    graph: TrainingGraph
    layout: RankLayout
    iter_time_s: float


@dataclass(frozen=True)
class Calibration:
    """A fitted adapter and what it does to the runs it was fitted on; log errors are of measured over predicted."""

    adapter: Adapter
    runs: tuple[str, ...]
    measured_s: Floats
    before: Floats  # log errors of the uncalibrated predictor
    left_out: Floats | None  # by an adapter of the other jobs; None for a single job
    after: Floats  # by the adapter itself

    def figures(self) -> dict[str, Any]:
        """The report as plain values; errors in percent of the measured time."""
        columns = {"before": self.before, "left_out": self.left_out, "fitted": self.after}
        return {
            "base": self.adapter.base,
            "runs": len(self.runs),
            "mode": self.adapter.mode,
            "offset": math.exp(self.adapter.log_offset),
            "kernels": {name: math.exp(value) for name, value in self.adapter.kernels.items()},
            "factors": {name: math.exp(value) for name, value in self.adapter.log_factors.items()},
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
    runs = _usable(measurements, source)
    network, _ = network_of(base)
    timed = TimedRuns.of(
        network,
        [featurize(run.job, run.graph, run.layout) for run in runs],
        [run.iter_time_s for run in runs],
        [job_point(run.job) for run in runs],
        [job_key(run.job) for run in runs],
        base.measured_runs,
    )
    before = timed.log_errors(np.zeros(1 + len(GROUPS)))
    gpus = tuple(sorted({run.job.cluster.gpu.name for run in runs}))
    fitted, left_out, kernels = _fitted(timed, base), _left_out(timed, base), dict[str, float]()
    if operators:
        measured_kernels = _measured_kernels(operators, base, timed, gpus)
        times = measured_times(timed.batch, timed.times, [measured_kernels] * len(runs))
        informed = replace(timed, times=times)
        errors = _left_out(informed, base)
        if errors is None or left_out is None or np.abs(errors).mean() < np.abs(left_out).mean():
            timed, left_out, kernels = informed, errors, measured_kernels
            fitted = _fitted(timed, base)
    uncalibrated = predict([run.job for run in runs], checkpoint=base, force=True)
    widths = [math.log(each.iteration_time_high_s / each.iteration_time_s) for each in uncalibrated]
    ratios = [] if left_out is None else (np.abs(left_out) / np.array(widths)).tolist()
    adapter = Adapter(
        base=base.config.name,
        num_runs=len(runs),
        mode=fitted.mode,
        log_offset=float(fitted.theta[0]),
        log_factors=dict(zip(GROUPS, fitted.theta[1:].tolist(), strict=True)),
        points=fitted.points,
        local=tuple(fitted.local.tolist()),
        gpus=gpus,
        kernels=kernels,
        frameworks=tuple(sorted({run.job.software.framework for run in runs if run.job.software.framework})),
        domain=domain_of(run.job for run in runs),
        error_ratios=tuple(ratios),
    )
    measured: NDArray[np.float64] = np.array([run.iter_time_s for run in runs])
    after = timed.errors_under(fitted)
    return Calibration(adapter, tuple(run.run_id for run in runs), measured, before, left_out, after)


def _left_out(timed: TimedRuns, base: Checkpoint) -> Floats | None:
    """Errors of left-out runs by what :func:`_fitted` would take."""
    errors, nothing = left_out_errors(timed, base.config.shrinkage), timed.log_errors(np.zeros(1 + len(GROUPS)))
    return nothing if errors is not None and np.abs(errors).mean() > np.abs(nothing).mean() else errors


def _fitted(timed: TimedRuns, base: Checkpoint) -> Fit:
    """The fit, or nothing when left-out runs are predicted no better with one."""
    errors, nothing = left_out_errors(timed, base.config.shrinkage), np.zeros(1 + len(GROUPS))
    if errors is not None and np.abs(errors).mean() > np.abs(timed.log_errors(nothing)).mean():
        return Fit("none", nothing, (), np.zeros(0))
    return fit(timed, base.config.shrinkage)


def _measured_kernels(
    operators: Sequence[OpMeasurement], base: Checkpoint, timed: TimedRuns, gpus: Sequence[str]
) -> dict[str, float]:
    from gnn_predictor.kernel_times import measured_slowdowns  # training code, which takes seconds to import

    network, _ = network_of(base)
    return measured_slowdowns(operators, network, timed.batch.workload.shape[1], gpus)


def _usable(measurements: Sequence[RunMeasurement], source: str) -> list[_Run]:
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
            runs.append(_Run(run.run_id, job, graph, layout, run.iter_time_s))
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
        yield f"iter_time_s: got {run.iter_time_s:g}; expected the measured seconds of one iteration, more than 0"
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
        base = _without_adapter(load_checkpoint(options.checkpoint))
        output = _free_output(options.output, base)
        operators = read_ops(options.ops)[0] if options.ops else []
        result = calibrate(read_runs(options.runs), base, options.runs, operators)
        path = _save(result, base, output)
    except (CheckpointError, JobError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print("\n".join([*report(result), f"written to {path}"]))
    return 0


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
        f"{adapter.base}, calibrated with {adapter.num_runs} runs on {jobs}",
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
    if adapter.mode == "none" and lines:
        return [*lines, "Nothing beside: left-out runs are predicted no better with an offset."]
    if adapter.mode == "none":
        return ["No calibration: left-out runs are predicted no better with one; predictions stay as they are."]
    lines += [f"all times x {math.exp(adapter.log_offset):.3f}"]
    if adapter.mode == "offset":
        lines.append("No factors for kinds of work: with them, left-out runs are predicted no better.")
    else:
        factors = {name: math.exp(value) for name, value in adapter.log_factors.items()}
        lines.append("times x " + ", ".join(f"{name} x {factor:.3f}" for name, factor in factors.items()))
    if any(abs(each) > _NOTICEABLE for each in adapter.local):
        lines.append("jobs like these runs, beside it, by up to x " + f"{math.exp(max(adapter.local, key=abs)):.3f}")
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
