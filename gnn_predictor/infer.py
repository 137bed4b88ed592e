# PYTHON_ARGCOMPLETE_OK
"""Command line: a job file in, its predicted iteration time out, as a table or as JSON.

The result goes to standard output, everything else to standard error. Exit codes: 0 answered; 1 a bug; 2 bad usage or
an invalid job; 3 checkpoint missing or incompatible; 4 the job cannot run. The job is validated before torch loads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataset_builder.command_line import CommandParser

if TYPE_CHECKING:
    from dataset_builder.job.document import JobText
    from dataset_builder.job.errors import JobError
    from dataset_builder.job.importers.formats import ImportedFiles
    from gnn_predictor.compare import Comparison
    from gnn_predictor.prediction import Prediction

OK, USAGE, CANNOT_RUN = 0, 2, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = _parser()
    options = parser.read(arguments)
    if bool(options.jobs) == bool(options.files):
        parser.error("expected job files, or --from with other tools' files")
    # Errors that a user can mend carry their exit code; anything else is a bug and keeps its traceback.
    from dataset_builder.job.errors import JobError

    try:
        return _answer_all(options)
    except JobError as error:
        _print_refusal(error)
        return error.exit_code
    except _BadUsage as error:
        _print_error(str(error))
        return error.exit_code
    except BrokenPipeError:  # the reader has seen enough, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except ValueError as error:
        exit_code = getattr(error, "exit_code", None)  # CheckpointError, named without importing torch
        if exit_code is None:
            raise
        _print_error(str(error))
        return int(exit_code)


class _BadUsage(Exception):
    """A command line that argparse cannot see through itself."""

    exit_code = USAGE


def _parser() -> CommandParser:
    parser = CommandParser(
        "gnn_predictor.infer",
        "Predicts the iteration time of a training job from its job file.",
        [
            "job.yaml",
            "job.yaml --set precision=bf16_mixed --set parallel.tensor=8",
            "job.yaml --compare precision=tf32,bf16_mixed,fp8_mixed",
            "a.yaml b.yaml --format json                one line of JSON for each job",
            "- --format json < jobs.jsonl               a job on each line, answered as it comes",
            "--from config.json ds_config.json --set cluster.gpu=H100 ...    other tools' files as they are",
        ],
    )
    parser.add_argument(
        "jobs", nargs="*", metavar="JOB.yaml", help="job file, or - for standard input (one YAML job, or JSON lines)"
    )
    parser.add_argument(
        "--from", metavar="FILE", action="extend", nargs="+", default=[], dest="files",
        help="files of other tools instead, merged to one job: config.json, a Megatron script, DeepSpeed json, ...",
    )  # fmt: skip
    parser.add_argument("--checkpoint", metavar="DIR", help="a trained predictor (default: the released one)")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="default: table")
    settings = parser.add_argument(
        "--set", metavar="KEY.PATH=VALUE", action="append", default=[], help="overrides a value of the job file"
    )
    choices = parser.add_argument(
        "--compare", metavar="KEY.PATH=V1,V2", action="extend", nargs="+", default=[],
        help="predicts every combination of these values; speed-ups are over the first",
    )  # fmt: skip
    parser.add_argument("--html", metavar="OUT.html", help="writes a report: one page that loads nothing")
    parser.add_argument("--trace", metavar="OUT.json", help="writes the step's timeline, for ui.perfetto.dev")
    parser.add_argument("--force", action="store_true", help="predict even a job that cannot run")
    parser.complete_settings(settings, choices)
    return parser


def _answer_all(options: argparse.Namespace) -> int:
    """Writes an answer for every job as it is found; of several, one that has none does not keep back the others."""
    from dataset_builder.job.document import job_texts
    from dataset_builder.job.errors import JobError
    from gnn_predictor.report.progress import working

    settings, choices = _overrides(options.set), _choices(options.compare)
    worst = OK
    texts: Iterable[JobText | ImportedFiles]
    texts = itertools.chain.from_iterable(job_texts(source) for source in options.jobs)
    if options.files:
        texts = [_imported(options.files, settings, choices)]
    for number, text in enumerate(texts, start=1):
        is_one_of_many = len(options.jobs) > 1 or text.is_line
        for option in ("html", "trace"):
            if path := getattr(options, option):
                _check_report(f"--{option}", path, is_one_of_many)
        try:
            with working(f"job {number}: {text.name}" if is_one_of_many else text.name):
                answer = _compare(text, settings, choices, options) if choices else _predict(text, settings, options)
        except JobError as invalid:
            error = _of_another_tool(text) or invalid
            if not is_one_of_many:
                raise error from None
            worst = max(worst, error.exit_code)
            _print_refusal(error)
            if options.format == "json":
                _write_json({"source": text.name, "exit_code": error.exit_code, "reasons": error.reasons}, None)
            continue
        _write_reports(answer, options)
        _write(answer, options.format, None if is_one_of_many else 1)
        worst = max(worst, CANNOT_RUN if _has_nothing_that_runs(answer) else OK)
    return worst


def _of_another_tool(text: JobText | ImportedFiles) -> JobError | None:
    """What to say of a file that is no job because it is another tool's, such as a config.json."""
    from dataset_builder.job.document import JobText
    from dataset_builder.job.errors import JobError
    from dataset_builder.job.schema import TrainingJob

    if not isinstance(text, JobText) or not isinstance(text.content, Path):
        return None
    try:
        values = text.values()
        if isinstance(values, dict) and values.keys() <= TrainingJob.model_fields.keys():
            return None  # a job, if a bad one
    except JobError:
        pass  # a launch script is no YAML
    from dataset_builder.job.importers.formats import read_file

    try:
        tool = read_file(text.name).format
    except JobError:
        return None
    return JobError([f"is no job but a file of {tool}; expected it behind --from"], text.name)


def _imported(paths: Sequence[str], settings: Mapping[str, Any], choices: Mapping[str, Any]) -> ImportedFiles:
    """Other tools' files; what they say that a job cannot hold is told when they are no whole job."""
    from dataset_builder.job.errors import JobError
    from dataset_builder.job.importers.formats import ImportedFiles

    files = ImportedFiles.read(paths)
    try:
        files.merged({**settings, **{key: values[0] for key, values in choices.items() if values}})
    except JobError:
        _print_error("\n".join(files.warnings))
        raise
    return files


def _overrides(settings: Sequence[str]) -> dict[str, str]:
    from dataset_builder.job.settings import read_settings

    try:
        return read_settings(settings)
    except ValueError as error:
        raise _BadUsage(str(error)) from None


def _choices(texts: Sequence[str]) -> dict[str, list[Any]]:
    if not texts:
        return {}
    from gnn_predictor.compare import read_choices

    try:
        return read_choices(texts)
    except ValueError as error:
        raise _BadUsage(str(error)) from None


def _compare(
    text: JobText | ImportedFiles,
    settings: Mapping[str, Any],
    choices: Mapping[str, list[Any]],
    options: argparse.Namespace,
) -> Comparison:
    """Checks every variant without torch, then loads it and predicts."""
    from gnn_predictor.checkpoint_files import check_files
    from gnn_predictor.compare import compare, read_variants

    variants = read_variants(text, settings, choices)
    check_files(options.checkpoint)
    import torch

    torch.set_num_threads(1)
    return compare(variants, options.checkpoint, options.force)


def _check_report(option: str, path: str, is_one_of_many: bool) -> None:
    """Before anything is computed: a report is of one job, and has a place to go."""
    if is_one_of_many:
        raise _BadUsage(f"{option} {path}: got several jobs; expected one")
    if not Path(path).parent.is_dir() or Path(path).is_dir():
        raise _BadUsage(f"{option} {path}: expected a file in a folder that exists")


def _write_reports(answer: Prediction | Comparison, options: argparse.Namespace) -> None:
    """The files asked for beside the answer; none when no variant of a comparison runs."""
    if not (options.trace or options.html) or _has_nothing_that_runs(answer):
        return
    from gnn_predictor.report.files import write_page, write_trace

    try:
        note = write_trace(Path(options.trace), answer, options.checkpoint) if options.trace else ""
        if options.html:
            write_page(Path(options.html), answer, options.checkpoint)
    except OSError as error:
        raise _BadUsage(f"{error.filename}: {error.strerror}") from None
    if note:
        _print_error(f"--trace {options.trace}: {note}")


def _has_nothing_that_runs(answer: Prediction | Comparison) -> bool:
    from gnn_predictor.compare import Comparison

    return isinstance(answer, Comparison) and answer.reference is None


def _predict(text: JobText | ImportedFiles, settings: Mapping[str, Any], options: argparse.Namespace) -> Prediction:
    """Checks what can be checked without torch, then loads it and predicts."""
    from dataset_builder.job.document import JobText
    from dataset_builder.job.errors import CannotRunError, JobError
    from dataset_builder.job.schema import TrainingJob

    job = TrainingJob.from_yaml(text, settings) if isinstance(text, JobText) else text.job(settings)
    from dataset_builder.tracing.layout import rank_layout, unsupported_formats
    from gnn_predictor.checkpoint_files import check_files

    try:
        resolved = job.resolved()
        rank_layout(resolved)
        missing = unsupported_formats(resolved)
        if missing and not options.force:
            raise CannotRunError([*missing, "--force predicts anyway"])
        check_files(options.checkpoint)
        import torch

        from gnn_predictor.prediction import predict

        torch.set_num_threads(1)  # the graph is small: more threads wait for each other longer than they work
        return predict(job, checkpoint=options.checkpoint, force=options.force)
    except JobError as error:
        raise type(error)(error.reasons, source=text.name) from None


def _write(answer: Prediction | Comparison, form: str, indent: int | None) -> None:
    if form == "json":
        _write_json(answer.to_dict(), indent)
        return
    from gnn_predictor.compare import Comparison
    from gnn_predictor.report.comparison_table import print_comparison
    from gnn_predictor.report.table import print_table

    if isinstance(answer, Comparison):
        print_comparison(answer, sys.stdout)
    else:
        print_table(answer, sys.stdout)
    sys.stdout.flush()


def _write_json(value: Mapping[str, Any], indent: int | None) -> None:
    sys.stdout.write(json.dumps(value, indent=indent, allow_nan=False) + "\n")
    sys.stdout.flush()


def _print_refusal(error: JobError) -> None:
    from gnn_predictor.report.stage_reasons import in_brief

    _print_error("\n".join(in_brief(str(error).splitlines())))


def _print_error(message: str) -> None:
    for line in message.splitlines():
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
