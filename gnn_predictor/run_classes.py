"""Classes of runs by which errors are broken down: how large the model is, and on how many GPUs it is trained."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataset_builder.job.schema import TrainingJob

MODEL_SIZES = ("under 1B", "1B-3B", "3B-10B", "10B-30B", "30B-100B", "100B and more")
GPU_COUNTS = ("1", "2-8", "9-64", "65-512", "513 and more")
# Where each class but the first begins.
_PARAMETERS = (1e9, 3e9, 10e9, 30e9, 100e9)
_GPUS = (2, 9, 65, 513)


def model_size(job: TrainingJob) -> str:
    """The class of a resolved job's number of parameters, experts included."""
    from dataset_builder.job.model import num_parameters  # the names alone are read without what takes time to import

    return MODEL_SIZES[bisect_right(_PARAMETERS, num_parameters(job.model))]


def gpu_count(job: TrainingJob) -> str:
    """The class of a resolved job's number of GPUs."""
    return GPU_COUNTS[bisect_right(_GPUS, job.cluster.num_gpus)]
