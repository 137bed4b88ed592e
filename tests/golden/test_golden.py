"""Predictions of the released predictor for example jobs, kept as files: a change of any figure is seen.

After a release, or a change that is meant to move the figures: ``python -m tests.golden.test_golden`` in the checkout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dataset_builder.job.schema import TrainingJob
from gnn_predictor.checkpoint import Checkpoint, load_checkpoint
from gnn_predictor.prediction import predict

_HERE = Path(__file__).parent
_EXAMPLES = _HERE.parents[1] / "conf" / "job"
_JOBS = ("bert-large", "gpt-22b-a100", "llama3-70b-fp8", "t5-3b")
# Versions of PyTorch sum single precision in their own order.
_RELATIVE, _OF_ITERATION = 1e-3, 1e-5


@pytest.mark.parametrize("name", _JOBS)
def test_predictions_stay(name: str, released: Checkpoint) -> None:
    golden = json.loads((_HERE / f"{name}.json").read_text(encoding="utf-8"))
    rounding_s = _OF_ITERATION * golden["iteration_time_s"]
    assert _differences(json.loads(json.dumps(_predicted(name, released))), golden, rounding_s, name) == []


def _predicted(name: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """What ``infer`` prints, without the echo of the job and the package's version."""
    value = predict(TrainingJob.from_yaml(_EXAMPLES / f"{name}.yaml"), checkpoint=checkpoint).to_dict()
    del value["job"], value["provenance"]["version"]
    return value


def _differences(value: Any, golden: Any, rounding_s: float, path: str) -> list[str]:
    """Every leaf that is not as it was, by its key path. A bubble has the rounding of what it is the rest of."""
    if isinstance(value, dict) and isinstance(golden, dict) and value.keys() == golden.keys():
        pairs = [(value[key], golden[key], f"{path}.{key}") for key in golden]
    elif isinstance(value, list) and isinstance(golden, list) and len(value) == len(golden):
        pairs = [(value[index], golden[index], f"{path}.{index}") for index in range(len(golden))]
    else:
        rounding = rounding_s if path.endswith(".bubble_s") else 0.0
        same = value == golden
        if isinstance(value, float) and isinstance(golden, float):
            same = value == pytest.approx(golden, rel=_RELATIVE, abs=rounding)
        return [] if same else [f"{path}: {value}, was {golden}"]
    return [line for one, other, below in pairs for line in _differences(one, other, rounding_s, below)]


if __name__ == "__main__":
    for each in _JOBS:
        text = json.dumps(_predicted(each, load_checkpoint()), indent=1, allow_nan=False)
        (_HERE / f"{each}.json").write_text(text + "\n", encoding="utf-8")
        print(f"wrote {_HERE / each}.json")
