"""The formats that are read, and which of them a file is, told by its content."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, ClassVar

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
from dataset_builder.job.importers.merging import ImportedJob, absent, merge
from dataset_builder.job.importers.reading import Reading
from dataset_builder.job.schema import TrainingJob


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
    if {"model", "batch", "cluster"} <= set(file.values):
        raise JobError(["is a job file, which is read as it is; expected it without --from"], source)
    keys = ", ".join(key[:40] for key in list(file.values)[:8]) or "a script without training flags"
    known = "; ".join(f"{form.name} ({form.known_by})" for form in FORMATS)
    raise JobError([f"no known format (it has {keys}); expected one of: {known}"], source)


@dataclass(frozen=True)
class ImportedFiles:
    """Files that were read and recognised, and make one job together with what ``--set`` gives."""

    name: str
    readings: tuple[Reading, ...]
    is_line: ClassVar[bool] = False  # they are one job, never one of several lines

    @classmethod
    def read(cls, paths: Sequence[str]) -> ImportedFiles:
        """Reads every file; raises JobError with the problems of all that cannot be read."""
        readings, problems = [], []
        for path in paths:
            try:
                readings.append(read_file(path))
            except JobError as error:
                problems.append(error)
        if len(problems) == 1:
            raise problems[0]
        if problems:
            reasons = [f"{problem.source}: {reason}" for problem in problems for reason in problem.reasons]
            raise JobError(reasons, f"{len(problems)} files")
        names = ["standard input" if path == "-" else path for path in paths]
        return cls(names[0] if len(names) == 1 else ", ".join(PurePath(name).name for name in names), tuple(readings))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the files say that a job cannot hold, whatever else is given."""
        return tuple(
            dict.fromkeys([*(text for each in self.readings for text in each.warnings), *absent(self.readings)])
        )

    def merged(self, overrides: Mapping[str, Any]) -> ImportedJob:
        """The job with the origin of each value; raises JobError with everything missing or contradictory."""
        return merge(self.readings, self.name, overrides)

    def job(self, overrides: Mapping[str, Any]) -> TrainingJob:
        """The job alone; what was told of the files stands among its assumptions."""
        imported = self.merged(overrides)
        notes = (*imported.job.assumed, *self.warnings, *imported.warnings)
        return imported.job.model_copy(update={"assumed": notes})
