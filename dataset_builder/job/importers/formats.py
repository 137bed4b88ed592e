"""The formats that are read, and which of them a file is, told by its content."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataset_builder.job.errors import JobError
from dataset_builder.job.importers import (
    accelerate,
    axolotl,
    deepspeed,
    gpt_neox,
    huggingface_reading,
    launch_script,
    llama_factory,
    llm_foundry,
    maxtext,
    megatron_arguments,
    nanotron,
    nemo,
    peer_tools,
    torchtitan,
)
from dataset_builder.job.importers.config_file import ConfigFile, read_config_file
from dataset_builder.job.importers.merging import ImportedJob, merge
from dataset_builder.job.importers.reading import Reading


@dataclass(frozen=True)
class Format:
    """A file format: the keys it is known by, how much a file looks like it (0: not at all), and its reader."""

    name: str
    known_by: str
    likeness: Callable[[ConfigFile], int]
    read: Callable[[ConfigFile], Reading]


FORMATS = tuple(
    Format(module.NAME, module.KNOWN_BY, module.likeness, module.read)
    for module in (
        huggingface_reading, launch_script, megatron_arguments, nemo, deepspeed, torchtitan, llm_foundry, nanotron,
        gpt_neox, axolotl, llama_factory, accelerate, maxtext, peer_tools,
    )
)  # fmt: skip


def read_file(path: str) -> Reading:
    """One file as a reading; raises JobError when it is unreadable, or is of no format or of several."""
    file = read_config_file(path)
    scores = {form: form.likeness(file) for form in FORMATS}
    best = max(scores.values())
    matching = [form for form, score in scores.items() if score == best and score > 0]
    if len(matching) == 1:
        return matching[0].read(file)
    source = "standard input" if path == "-" else path
    if matching:
        names = " and ".join(form.name for form in matching)
        raise JobError([f"looks like {names} alike; expected the keys of one of them"], source)
    keys = ", ".join(key[:40] for key in list(file.values)[:8]) or "a script without training flags"
    known = "; ".join(f"{form.name} ({form.known_by})" for form in FORMATS)
    raise JobError([f"no known format (it has {keys}); expected one of: {known}"], source)


def import_job(paths: Sequence[str], overrides: Mapping[str, Any] | None = None) -> ImportedJob:
    """The job that the files give together, with ``overrides`` (key paths to values) over it.

    Raises JobError with everything that is missing or contradictory, CannotRunError when only the layout is.
    """
    return merge(read_files(paths), overrides)


def read_files(paths: Sequence[str]) -> list[Reading]:
    """Every file as a reading; the problems of all unreadable files are told at once."""
    readings, problems = [], []
    for path in paths:
        try:
            readings.append(read_file(path))
        except JobError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise JobError([f"{problem.source}: {reason}" for problem in problems for reason in problem.reasons], "files")
    return readings
