"""Reports as files: written under a temporary name beside their target, then renamed."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from dataset_builder.job.precision import PrecisionPolicy
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import unsupported_formats
from gnn_predictor.compare import Comparison, compare
from gnn_predictor.prediction import Prediction, predict_in_detail
from gnn_predictor.report.chrome_trace import chrome_trace
from gnn_predictor.report.page import html_page
from gnn_predictor.report.table import precision_text
from gnn_predictor.report.timeline import timeline


def write_trace(path: Path, answer: Prediction | Comparison, checkpoint: str | None = None) -> str:
    """Writes the timeline of a prediction, or of a comparison's reference; returns what was left out of it, if any."""
    prediction, detail = predict_in_detail(_reported(answer).job, checkpoint, force=True)
    step = timeline(detail)
    _write(path, json.dumps(chrome_trace(prediction, step), separators=(",", ":"), allow_nan=False))
    return step.note


def write_page(path: Path, answer: Prediction | Comparison, checkpoint: str | None = None) -> None:
    """Writes the page of a prediction beside other precisions, or of a comparison's reference beside its variants."""
    prediction, detail = predict_in_detail(_reported(answer).job, checkpoint, force=True)
    comparison, compared = answer, "the values that were asked for"
    if isinstance(comparison, Prediction):
        # Forced: one that does not fit still has a time, and says so.
        comparison = compare(_precisions(prediction.job), checkpoint, force=True)
        compared = "the precisions that this GPU supports"
    _write(path, html_page(prediction, detail, comparison, compared))


def _precisions(job: TrainingJob) -> list[tuple[dict[str, str], TrainingJob]]:
    """The job itself, then under the presets that make sense on its device: no two of the same family."""
    gpu = job.cluster.gpu
    presets = ["tf32" if gpu.supports("tf32") else "fp32", "bf16_mixed" if gpu.supports("bf16") else "fp16_mixed"]
    variants, families = [({"precision": precision_text(job.precision)}, job)], {job.precision.label}
    for name in (*presets, "fp8_mixed", "mxfp8", "nvfp4"):
        policy = PrecisionPolicy.model_validate(name)
        variant = job.model_copy(update={"precision": policy, "assumed": ()}).resolved()
        family = variant.precision.label
        if family not in families and not unsupported_formats(variant):
            variants.append(({"precision": name}, variant))
            families.add(family)
    return variants


def _reported(answer: Prediction | Comparison) -> Prediction:
    if isinstance(answer, Prediction):
        return answer
    prediction = answer.variants[answer.reference or 0].prediction
    assert prediction is not None, "a comparison without a variant that runs has no report"
    return prediction


def _write(path: Path, text: str) -> None:
    """OSError when the file cannot be written; what was there stays until the new one is whole."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp's files are private
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
