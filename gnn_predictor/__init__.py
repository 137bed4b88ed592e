"""Predicts the iteration time of distributed transformer training from a job file, whatever its precision mix.

The names below load on first use, so that importing the package costs neither torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dataset_builder import __version__

if TYPE_CHECKING:
    from dataset_builder.job.errors import CannotRunError, JobError
    from dataset_builder.job.schema import TrainingJob
    from gnn_predictor.checkpoint import Checkpoint, CheckpointError, load_checkpoint
    from gnn_predictor.prediction import Prediction, predict

__all__ = [
    "CannotRunError",
    "Checkpoint",
    "CheckpointError",
    "JobError",
    "Prediction",
    "TrainingJob",
    "__version__",
    "load_checkpoint",
    "predict",
]

_HOME = {
    "CannotRunError": "dataset_builder.job.errors",
    "Checkpoint": "gnn_predictor.checkpoint",
    "CheckpointError": "gnn_predictor.checkpoint",
    "JobError": "dataset_builder.job.errors",
    "Prediction": "gnn_predictor.prediction",
    "TrainingJob": "dataset_builder.job.schema",
    "load_checkpoint": "gnn_predictor.checkpoint",
    "predict": "gnn_predictor.prediction",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
