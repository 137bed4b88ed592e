# PYTHON_ARGCOMPLETE_OK
"""Command line: a job file in, its fastest plans that fit in memory out, as a table or as JSON.

The result goes to standard output, everything else to standard error. Exit codes: 0 answered; 1 a bug; 2 bad usage or
an invalid job; 3 checkpoint missing or incompatible; 4 no plan can run. The job is validated before torch loads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataset_builder.command_line import CommandParser

if TYPE_CHECKING:
    from gnn_predictor.search import Plans


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().read(arguments)
    try:
        plans = _plans(options)
        if options.format == "json":
            json.dump(plans.to_dict(), sys.stdout, indent=1, allow_nan=False)
            sys.stdout.write("\n")
        else:
            from gnn_predictor.report.plan_table import print_plans

            print_plans(plans, options.job, sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:  # JobError, _UsageError, CheckpointError: what a user can mend carries its exit code
        exit_code = getattr(error, "exit_code", None)
        if exit_code is None:
            raise
        print(error, file=sys.stderr)
        return int(exit_code)
    return 0


class _UsageError(ValueError):
    """A command line that argparse cannot see through itself."""

    exit_code = 2


def _parser() -> CommandParser:
    parser = CommandParser(
        "gnn_predictor.plan",
        "Searches the layouts of a training job for the fastest that fit in memory.",
        [
            "job.yaml",
            "job.yaml --set parallel.sharding=zero1             searches with this key as it is set",
            "job.yaml --free parallel.tensor=1,2,4 precision=bf16_mixed,fp8_mixed",
        ],
    )
    parser.add_argument("job", metavar="JOB.yaml", help="job file, or - for standard input")
    parser.add_argument("--checkpoint", metavar="DIR", help="a trained predictor (default: the released one)")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    parser.add_argument("--top", type=_count, default=10, metavar="N", help="plans in the ranking (default: 10)")
    settings = parser.add_argument(
        "--set", metavar="KEY.PATH=VALUE", action="append", default=[],
        help="overrides a value of the job file; a layout key set here is not searched",
    )  # fmt: skip
    choices = parser.add_argument(
        "--free", metavar="KEY.PATH=V1,V2", action="extend", nargs="+", default=[],
        help="searches these values of a key, whether or not it is a layout key",
    )  # fmt: skip
    parser.add_argument("--workers", type=_count, metavar="N", help="processes (default: one for every core)")
    parser.add_argument(
        "--merge", nargs="+", metavar="PLANS.json", default=[],
        help="ranks what the parts of a search found (gnn_predictor.sweep) instead of searching",
    )  # fmt: skip
    parser.complete_settings(settings, choices)
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _plans(options: argparse.Namespace) -> Plans:
    """Checks the job and the freed values without torch, then loads it and searches."""
    from dataset_builder.job.document import job_text
    from dataset_builder.job.settings import read_settings
    from gnn_predictor.checkpoint_files import check_files
    from gnn_predictor.compare import read_choices
    from gnn_predictor.report.progress import counting
    from gnn_predictor.search_space import search_spaces

    try:
        settings, choices = read_settings(options.set), read_choices(options.free, option="--free", most=None)
    except ValueError as error:
        raise _UsageError(str(error)) from None
    for key in settings:
        if key in choices:
            raise _UsageError(f"--free {key}: also given by --set; expected one of the two")
    text = job_text(options.job)
    spaces = search_spaces(text, settings, choices)
    check_files(options.checkpoint)
    import torch

    from gnn_predictor.checkpoint import load_checkpoint
    from gnn_predictor.search import merge, search

    torch.set_num_threads(1)  # the graphs are small, and every core has a process
    checkpoint = load_checkpoint(options.checkpoint)
    if options.merge:
        return merge(spaces, [_part(path) for path in options.merge], checkpoint, options.top)
    with counting(f"{text.name}: layouts") as progress:
        return search(spaces, checkpoint, options.top, options.workers, progress)


def _part(path: str) -> dict[str, Any]:
    """What one part of a search found."""
    try:
        part: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        if all({"set", "iteration_time_s"} <= set(plan) for plan in part["plans"]):
            return part
        reason = "plans without their settings"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error)
    raise _UsageError(f"--merge {path}: expected what gnn_predictor.sweep writes ({reason})")


if __name__ == "__main__":
    sys.exit(main())
