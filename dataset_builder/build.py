"""``python -m dataset_builder.build [key=value ...]``: measurement tables in, the training corpus out.

Settings are in ``conf/build.yaml``. Exit codes: 0 ok, 2 bad usage or a table that cannot be used.
With ``import_runs=`` and ``import_ops=`` it takes new tables into the package instead (:mod:`corpus.table_import`).
"""

from __future__ import annotations

import sys

from dataset_builder.command_line import answered_at_once

HELP = """usage: python -m dataset_builder.build [key=value ...]

Builds the training corpus from measurement tables; conf/build.yaml lists the keys and their defaults.

examples:
  python -m dataset_builder.build
  python -m dataset_builder.build output=build/mine runs=my-runs.csv
  python -m dataset_builder.build import_runs=runs.csv import_ops=ops.parquet"""

if __name__ == "__main__" and answered_at_once(HELP, sys.argv[1:]):
    sys.exit(0)  # before what takes seconds to import

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from dataset_builder.corpus.build import build_corpus
from dataset_builder.corpus.measurements import shipped_table
from dataset_builder.corpus.table_import import import_tables
from dataset_builder.hydra_errors import told_in_one_line
from dataset_builder.job.errors import JobError


def configuration_directory() -> Path:
    """``conf/`` of the checkout, or where the wheel installs it."""
    root = Path(__file__).resolve().parents[1]
    places = (root / "conf", root / "gnn_predictor" / "conf")
    return next(place for place in places if (place / "build.yaml").is_file())


def run(settings: DictConfig) -> None:
    """Imports tables or builds the corpus, as the settings say."""
    if settings.import_runs or settings.import_ops:
        if not (settings.import_runs and settings.import_ops):
            raise JobError(["import_runs and import_ops: both tables are imported together"], "build")
        import_tables(settings.import_runs, settings.import_ops, shipped_table("runs.parquet").parent)
        return
    build_corpus(settings.output, settings.runs, settings.ops, folds=settings.folds, seed=settings.seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    overrides = list(sys.argv[1:] if arguments is None else arguments)
    if answered_at_once(HELP, overrides):
        return 0
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(configuration_directory())):
            settings = compose("build", overrides=overrides)
        run(settings)
    except (HydraException, OmegaConfBaseException) as error:
        print(f"build: {told_in_one_line(error)}", file=sys.stderr)
        return 2
    except JobError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
