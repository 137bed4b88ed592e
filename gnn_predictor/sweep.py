"""``python -m gnn_predictor.sweep job_file=JOB.yaml parts=4 part='range(4)' -m``: a search in parts, by Hydra.

Every job of the multirun, by whatever launcher, searches its part of the layouts and writes its plans to ``output``;
``python -m gnn_predictor.plan JOB.yaml --merge FILE ...`` ranks what all parts found. Layouts are dealt one by one, so
parts take about the same time.
"""

from __future__ import annotations

import sys

from dataset_builder.command_line import answered_at_once

HELP = """usage: python -m gnn_predictor.sweep job_file=JOB.yaml [parts=N part='range(N)' -m] [key=value ...]

Searches the layouts of a job in parts, by Hydra's launchers; conf/plan.yaml lists the keys and their defaults.

examples:
  python -m gnn_predictor.sweep job_file=job.yaml parts=4 part='range(4)' -m
  python -m gnn_predictor.plan job.yaml --merge multirun/*/*/*/plans.json     ranks what all parts found"""

if __name__ == "__main__" and answered_at_once(HELP, sys.argv[1:]):
    sys.exit(0)  # before what takes seconds to import

import json
from pathlib import Path
from typing import Annotated, Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dataset_builder.hydra_errors import answering
from dataset_builder.job.document import job_text
from dataset_builder.job.errors import CannotRunError
from dataset_builder.job.settings import read_settings
from gnn_predictor.checkpoint import load_checkpoint
from gnn_predictor.compare import read_choices
from gnn_predictor.search import search
from gnn_predictor.search_space import search_spaces

_HERE = Path(__file__).resolve().parent
CONFIGURATION = str(_HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf")


class Settings(BaseModel):
    """Everything ``conf/plan.yaml`` holds; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job_file: str
    set: tuple[str, ...]
    free: tuple[str, ...]
    parts: Annotated[int, Field(ge=1)]
    part: Annotated[int, Field(ge=0)]
    top: Annotated[int, Field(ge=1)]
    workers: Annotated[int, Field(ge=1)]
    checkpoint: str | None
    output: str


def search_part(settings: Settings) -> dict[str, Any]:
    """What ``plan --format json`` prints, of one part; a part in which nothing runs has no plans, only reasons."""
    choices = read_choices(settings.free, option="free", most=None)
    spaces = search_spaces(job_text(settings.job_file), read_settings(settings.set), choices)
    part = (settings.part, settings.parts)
    try:
        plans = search(spaces, load_checkpoint(settings.checkpoint), settings.top, settings.workers, part=part)
    except CannotRunError as error:
        return {"plans": [], "reasons": list(error.reasons)}
    return plans.to_dict()


@hydra.main(version_base="1.3", config_path=CONFIGURATION, config_name="plan")
def main(configuration: DictConfig) -> None:
    """The command; exit codes 2 and 3 as those of ``plan``."""
    try:
        settings = Settings.model_validate(OmegaConf.to_container(configuration, resolve=True))
        torch.set_num_threads(1)
        found = search_part(settings)
    except ValidationError as error:
        for problem in error.errors():
            print(f"sweep: {'.'.join(map(str, problem['loc']))}: {problem['msg']}", file=sys.stderr)
        sys.exit(2)
    except ValueError as error:  # JobError, CheckpointError, wrong settings
        print(f"sweep: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))
    output = Path(settings.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(output)


if __name__ == "__main__":
    answering(main, "sweep")
