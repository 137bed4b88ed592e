"""One row of a runs table as the job it measured: the mapping of ``runs.csv`` columns to a ``TrainingJob`` mapping.

In: a row of ``JOB_COLUMNS``. Out: the mapping that ``TrainingJob.parse`` reads and one sentence for each value the row
leaves open. The parts of the job are read by ``row_model``, ``row_layout`` and ``row_precision``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataset_builder.corpus.job_row import REQUIRED_COLUMNS, JobRow, RowError
from dataset_builder.corpus.row_layout import row_batch, row_cluster, row_parallel, split_over_stages
from dataset_builder.corpus.row_model import row_model
from dataset_builder.corpus.row_precision import row_optimizer, row_precision, row_software


def job_mapping(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The job of a row and what was assumed; raises :class:`RowError` when the row describes none."""
    row = JobRow(values)
    _check_present(row)
    if row.framework is None:
        row.assume("framework: unknown, the defaults of plain PyTorch were taken")
    cluster = row_cluster(row)
    model = row_model(row)
    parallel = row_parallel(row, model, cluster)
    batch = row_batch(row, model, parallel["data"])
    split_over_stages(row, model, parallel)
    return {
        "name": row.model_name,
        "model": model,
        "batch": batch,
        "cluster": cluster,
        "precision": row_precision(row),
        "parallel": parallel,
        "software": row_software(row),
        "optimizer": {"name": row_optimizer(row)},
    }, tuple(row.assumed)


def _check_present(row: JobRow) -> None:
    missing = [column for column in REQUIRED_COLUMNS if row.text(column) is None]
    if "global_batch" in missing and row.count("micro_batch") and row.count("grad_accum"):
        missing.remove("global_batch")
    if missing:
        raise RowError(f"missing: {', '.join(missing)}")
