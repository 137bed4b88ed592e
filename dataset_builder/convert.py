# PYTHON_ARGCOMPLETE_OK
"""``python -m dataset_builder.convert FILE [FILE ...] [--output JOB.yaml]``: other tools' files as one job file.

The job goes to stdout or to the file, everything else to stderr. Exit codes: 0 ok, 2 unreadable files, missing or
contradictory values (each with the flag that supplies it), 4 the job cannot run on its cluster (with the arithmetic).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dataset_builder.command_line import CommandParser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().read(arguments)
    from dataset_builder.job.errors import JobError
    from dataset_builder.job.importers.formats import ImportedFiles
    from dataset_builder.job.importers.job_file import job_file
    from dataset_builder.job.settings import read_settings
    from dataset_builder.tracing.layout import rank_layout

    try:
        settings = read_settings(options.set)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    try:
        files = ImportedFiles.read(options.files)
        _tell(*files.warnings)
        imported = files.merged(settings)
        _tell(*imported.warnings)
        rank_layout(imported.job)
        text = job_file(imported, ", ".join("standard input" if file == "-" else file for file in options.files))
        if options.output is None:
            sys.stdout.write(text)
        else:
            _write(text, options.output)
    except JobError as error:
        _tell(*(f"{error.source}: {reason}" for reason in error.reasons))
        return error.exit_code
    except OSError as error:
        _tell(f"{options.output}: {error.strerror or error}")
        return 2
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "dataset_builder.convert",
        "Reads the files of other tools as one job file; a model, an engine and a launcher merge.",
        [
            "config.json ds_config.json accelerate.yaml --set cluster.gpu=H100 --set batch.seq_length=4096",
            "train_gpt.sh --set cluster.gpu=A100 --output job.yaml",
        ],
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a file of another tool, or - for standard input")
    settings = parser.add_argument(
        "--set", metavar="KEY.PATH=VALUE", action="append", default=[], help="supplies or replaces a value of the job"
    )
    parser.add_argument("--output", type=Path, metavar="JOB.yaml", help="the file to write (default: standard output)")
    parser.complete_settings(settings)
    return parser


def _tell(*lines: str) -> None:
    sys.stderr.write("".join(f"{line}\n" for line in lines))


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
