"""Reports as files: written under a temporary name beside their target, then renamed."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from gnn_predictor.checkpoint import Checkpoint
from gnn_predictor.compare import Comparison
from gnn_predictor.prediction import Prediction, predict_in_detail
from gnn_predictor.report.chrome_trace import chrome_trace
from gnn_predictor.report.timeline import timeline


def write_trace(path: Path, answer: Prediction | Comparison, checkpoint: str | Checkpoint | None = None) -> str:
    """Writes the timeline of a prediction, or of a comparison's reference; returns what was left out of it, if any."""
    prediction, detail = predict_in_detail(_reported(answer).job, checkpoint, force=True)
    step = timeline(detail)
    _write(path, json.dumps(chrome_trace(prediction, step), separators=(",", ":"), allow_nan=False))
    return step.note


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
