"""Weights & Biases, and nothing but: metrics, predictions and artifacts of a training, offline unless asked otherwise.

Offline needs no account and no network: the run is a file under ``directory``/wandb that ``wandb sync`` can upload.
The only file that imports wandb.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import pandas as pd
import wandb
from pydantic import BaseModel, ConfigDict

Mode = Literal["offline", "online", "disabled"]
MEASURED, PREDICTED = "iter_time_s", "predicted_s"


class TrackingConfig(BaseModel):
    """Where a run is tracked; the ``tracking`` group of the training's configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode = "offline"
    project: str = "gnn-predictor"
    directory: str = "outputs"


class Tracker:
    """One tracked run, as a context manager; with mode ``disabled`` every call does nothing."""

    def __init__(self, tracking: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> None:
        """``tracking`` holds the fields of :class:`TrackingConfig`, ``config`` the training's own, in plain values."""
        self._tracking = TrackingConfig.model_validate(tracking)
        self._name = name
        self._config = dict(config)
        self._run: Any = None

    def __enter__(self) -> Tracker:
        if self._tracking.mode == "disabled":
            return self
        directory = Path(self._tracking.directory).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        # Staged artifact files otherwise go to the home directory, which a container need not have.
        os.environ.setdefault("WANDB_DATA_DIR", str(directory / "wandb-data"))
        os.environ.setdefault("WANDB_CACHE_DIR", str(directory / "wandb-cache"))
        self._run = wandb.init(
            project=self._tracking.project,
            name=self._name,
            dir=str(directory),
            mode=self._tracking.mode,
            config=self._config,
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if kind is None else 1)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs numbers of one step (an epoch, a fold)."""
        if self._run is not None:
            self._run.log(dict(metrics), step=step)

    def summarize(self, metrics: Mapping[str, Any]) -> None:
        """Sets the figures by which runs are compared."""
        if self._run is not None:
            self._run.summary.update(dict(metrics))

    def log_predictions(self, predictions: pd.DataFrame, name: str = "predictions") -> None:
        """Logs a table of predictions and its scatter of log10 predicted against log10 measured seconds."""
        if self._run is None:
            return
        table = wandb.Table(dataframe=predictions.reset_index(drop=True))
        known = predictions[(predictions[MEASURED] > 0) & (predictions[PREDICTED] > 0)]
        points = pd.DataFrame(
            {
                "log10 measured s": np.log10(known[MEASURED]),
                "log10 predicted s": np.log10(known[PREDICTED]),
            }
        )
        scatter = wandb.plot.scatter(
            wandb.Table(dataframe=points), "log10 measured s", "log10 predicted s", title="predicted against measured"
        )
        self._run.log({f"{name}/table": table, f"{name}/scatter": scatter})

    def log_dataset(self, path: Path, metadata: Mapping[str, Any]) -> None:
        """Records the corpus that the run trains on, as its input."""
        if self._run is None:
            return
        artifact = _artifact("corpus", "dataset", path, metadata)
        if self._tracking.mode == "online":
            self._run.use_artifact(artifact)
        else:
            # Offline a run cannot use an artifact; it logs it, and the checkpoint's metadata names its hash.
            self._run.log_artifact(artifact)

    def log_checkpoint(self, path: Path, metadata: Mapping[str, Any]) -> None:
        """Records the trained predictor, as the run's output; ``metadata`` names the corpus it came from."""
        if self._run is not None:
            self._run.log_artifact(_artifact("checkpoint", "model", path, metadata))


def _artifact(name: str, kind: str, path: Path, metadata: Mapping[str, Any]) -> wandb.Artifact:
    artifact = wandb.Artifact(name, type=kind, metadata=dict(metadata))
    if path.is_dir():
        artifact.add_dir(str(path))
    else:
        artifact.add_file(str(path))
    return artifact
