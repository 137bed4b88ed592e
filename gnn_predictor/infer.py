"""Command line: a job file in, its predicted iteration time out, as a table or as JSON.

The result goes to standard output, everything else to standard error. Exit codes: 0 answered; 1 a bug; 2 bad usage or
an invalid job; 3 checkpoint missing or incompatible; 4 the job cannot run. The job is validated before torch loads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gnn_predictor import __version__

if TYPE_CHECKING:
    from dataset_builder.job.schema import TrainingJob
    from gnn_predictor.compare import Comparison
    from gnn_predictor.prediction import Prediction

OK, USAGE, CANNOT_RUN = 0, 2, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    # Errors that a user can mend carry their exit code; anything else is a bug and keeps its traceback.
    from dataset_builder.job.errors import JobError

    try:
        answers = _compare(options) if options.compare else _predict(options)
    except JobError as error:
        _print_error(str(error))
        return error.exit_code
    except _BadUsage as error:
        _print_error(str(error))
        return USAGE
    except ValueError as error:
        exit_code = getattr(error, "exit_code", None)  # CheckpointError, named without importing torch
        if exit_code is None:
            raise
        _print_error(str(error))
        return int(exit_code)
    _write(answers, options.format)
    return CANNOT_RUN if any(_has_nothing_that_runs(answer) for answer in answers) else OK


class _BadUsage(Exception):
    """A command line that argparse cannot see through itself."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gnn_predictor.infer",
        description="Predicts the iteration time of a training job from its job file.",
        epilog="exit codes: 0 ok, 1 bug, 2 bad usage or invalid job, 3 checkpoint unusable, 4 the job cannot run",
    )
    parser.add_argument("jobs", nargs="+", metavar="JOB.yaml", help="job file, or - for standard input")
    parser.add_argument("--checkpoint", metavar="DIR", help="a trained predictor (default: the released one)")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    parser.add_argument(
        "--set", metavar="KEY.PATH=VALUE", action="append", default=[], help="overrides a value of the job file"
    )
    parser.add_argument(
        "--compare", metavar="KEY.PATH=V1,V2", action="extend", nargs="+", default=[],
        help="predicts every combination of these values; speed-ups are over the first",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="predict even a job that cannot run")
    parser.add_argument("--version", action="version", version=f"gnn-predictor {__version__}")
    return parser


def _read_job(source: str, overrides: Mapping[str, Any]) -> TrainingJob:
    from dataset_builder.job.schema import TrainingJob

    with _readable(source):
        return TrainingJob.from_yaml(source, overrides)


@contextlib.contextmanager
def _readable(source: str) -> Iterator[None]:
    """Says which file cannot be read."""
    from dataset_builder.job.errors import JobError

    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise JobError([reason], source=source) from None


def _overrides(settings: Sequence[str]) -> dict[str, Any]:
    """``--set key.path=value`` as key paths to texts, which the job reads as the YAML of its file."""
    overrides: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            raise _BadUsage(f"--set {setting}: expected KEY.PATH=VALUE, e.g. --set parallel.tensor=8")
        overrides[key.strip()] = value
    return overrides


def _compare(options: argparse.Namespace) -> list[Comparison]:
    """Checks every variant of every job without torch, then loads it and predicts."""
    from gnn_predictor.compare import compare, read_choices, read_variants

    overrides = _overrides(options.set)
    try:
        choices = read_choices(options.compare)
    except ValueError as error:
        raise _BadUsage(str(error)) from None
    jobs = []
    for source in options.jobs:
        with _readable(source):
            jobs.append(read_variants(source, overrides, choices))
    import torch

    torch.set_num_threads(1)
    return [compare(variants, options.checkpoint, options.force) for variants in jobs]


def _has_nothing_that_runs(answer: Prediction | Comparison) -> bool:
    from gnn_predictor.compare import Comparison

    return isinstance(answer, Comparison) and answer.reference is None


def _predict(options: argparse.Namespace) -> list[Prediction]:
    """Checks what can be checked without torch, then loads it and predicts."""
    from dataset_builder.tracing.layout import rank_layout, unsupported_formats

    overrides = _overrides(options.set)
    jobs = [_read_job(source, overrides) for source in options.jobs]
    for source, job in zip(options.jobs, jobs, strict=True):
        with _named(source):
            resolved = job.resolved()
            rank_layout(resolved)
            missing = unsupported_formats(resolved)
            if missing and not options.force:
                from dataset_builder.job.errors import CannotRunError

                raise CannotRunError([*missing, "--force predicts anyway"])
    import torch

    from gnn_predictor.prediction import predict

    torch.set_num_threads(1)  # the graph is small: more threads wait for each other longer than they work
    predictions = []
    for source, job in zip(options.jobs, jobs, strict=True):
        with _named(source):
            predictions.append(predict(job, checkpoint=options.checkpoint, force=options.force))
    return predictions


@contextlib.contextmanager
def _named(source: str) -> Any:
    """Says which file a problem is in."""
    from dataset_builder.job.errors import JobError

    try:
        yield
    except JobError as error:
        raise type(error)(error.reasons, source="standard input" if source == "-" else source) from None


def _write(answers: Sequence[Prediction | Comparison], form: str) -> None:
    try:
        if form == "json":
            values = [answer.to_dict() for answer in answers]
            json.dump(values[0] if len(values) == 1 else values, sys.stdout, indent=1, allow_nan=False)
            sys.stdout.write("\n")
        else:
            from gnn_predictor.compare import Comparison
            from gnn_predictor.report.comparison_table import print_comparison
            from gnn_predictor.report.table import print_table

            for answer in answers:
                if isinstance(answer, Comparison):
                    print_comparison(answer, sys.stdout)
                else:
                    print_table(answer, sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(message: str) -> None:
    for line in message.splitlines():
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
