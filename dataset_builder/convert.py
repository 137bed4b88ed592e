"""``python -m dataset_builder.convert FILE [FILE ...] [--output JOB.yaml]``: other tools' files as one job file.

The job goes to stdout or to the file, everything else to stderr. Exit codes: 0 ok, 2 unreadable files, missing or
contradictory values (each with the flag that supplies it), 4 the job cannot run on its cluster (with the arithmetic).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dataset_builder.job.errors import JobError
from dataset_builder.job.importers.formats import FORMATS, import_job
from dataset_builder.job.importers.job_file import job_file
from dataset_builder.job.overrides import read_settings
from dataset_builder.tracing.layout import rank_layout


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        imported = import_job(options.files, read_settings(options.set))
        for warning in imported.warnings:
            sys.stderr.write(f"{warning}\n")
        rank_layout(imported.job)
        text = job_file(imported, ", ".join(options.files))
        if options.output is None:
            sys.stdout.write(text)
        else:
            _write(text, options.output)
    except JobError as error:
        sys.stderr.write("".join(f"{error.source}: {reason}\n" for reason in error.reasons))
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"{options.output}: {error.strerror or error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dataset_builder.convert",
        description="Reads the files of other tools as one job file; a model, an engine and a launcher merge.",
        epilog=f"formats, told by content: {'; '.join(form.name for form in FORMATS)}",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a file of any known format, or - for standard input")
    parser.add_argument(
        "--set", metavar="KEY.PATH=VALUE", action="append", default=[], help="supplies or replaces a value of the job"
    )
    parser.add_argument("--output", type=Path, metavar="JOB.yaml", help="the file to write (default: standard output)")
    return parser


def _write(text: str, path: Path) -> None:
    """The file, whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    raise SystemExit(main())
