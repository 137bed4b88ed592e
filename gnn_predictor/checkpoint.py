"""A trained predictor on disk: weights, what they need to be used rightly, what they were measured to do, and a card.

A checkpoint is a directory of four files: ``model.safetensors`` (tensors only, nothing is ever unpickled),
``config.json`` (:class:`CheckpointConfig`), ``metrics.json`` (the figures of its evaluation) and ``README.md`` (the
model card). It fits this package when its format version and the hash of its input features are the package's own.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from gnn_predictor.adapter import Adapter, ErrorCovariance
from gnn_predictor.blending import Blend, MeasuredRuns
from gnn_predictor.checkpoint_files import (
    BLIND_FILE,
    CARD_FILE,
    FORMAT_VERSION,
    POINTS_FILE,
    RUNS_FILE,
    checkpoint_folder,
    read_bytes,
    read_json,
    read_versioned,
)
from gnn_predictor.checkpoint_files import CONFIG_FILE as CONFIG_FILE
from gnn_predictor.checkpoint_files import METRICS_FILE as METRICS_FILE
from gnn_predictor.checkpoint_files import MODEL_FILE as MODEL_FILE
from gnn_predictor.checkpoint_files import CheckpointError as CheckpointError
from gnn_predictor.checkpoint_files import released_checkpoint as released_checkpoint
from gnn_predictor.distance import TrainingPoints
from gnn_predictor.domain import Domain
from gnn_predictor.features import FEATURE_HASH
from gnn_predictor.gaussian_process import GaussianProcess
from gnn_predictor.interval import Interval
from gnn_predictor.memory import MemoryFit
from gnn_predictor.whole_job import OF_THE_GRAPH

_T = TypeVar("_T")


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CheckpointConfig(_Value):
    """``config.json``: identity, compatibility, and every number the weights need beside themselves."""

    format_version: int = FORMAT_VERSION
    feature_hash: str = FEATURE_HASH
    corpus_hash: str
    name: str
    network: dict[str, Any]  # fields of gnn_predictor.network.NetworkConfig
    blend: Blend = Blend()
    interval: Interval = Interval()
    domain: Domain = Domain()
    memory: MemoryFit = MemoryFit()
    training: dict[str, Any] = {}
    error_covariance: ErrorCovariance = ErrorCovariance()  # of an adapter that is fitted on this checkpoint
    adapter: Adapter | None = None

    @property
    def num_coordinates(self) -> int:
        """Of a whole job."""
        features = [self.network.get(f"{part}_features", 0) for part in ("workload", "hardware", "software")]
        return sum(each for each in features if isinstance(each, int)) + OF_THE_GRAPH

    @model_validator(mode="after")
    def _has_these_coordinates(self) -> CheckpointConfig:
        if max(self.error_covariance.columns, default=0) >= self.num_coordinates:
            raise ValueError("error_covariance.columns: a coordinate that these features do not have")
        known = self.adapter.known if self.adapter else ()
        if any(len(run.point) != self.num_coordinates for run in known):
            raise ValueError(f"adapter.known: a point of other than {self.num_coordinates} coordinates")
        return self


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint in memory, equal only to itself.

    ``tensors`` is the network's state dictionary, ``blind`` that of baseline B3; ``points`` are the training runs',
    ``process`` is what they say of jobs like them.
    """

    config: CheckpointConfig
    tensors: Mapping[str, torch.Tensor]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    blind: Mapping[str, torch.Tensor] | None = None
    points: TrainingPoints | None = None
    process: GaussianProcess | None = None

    @property
    def measured_runs(self) -> MeasuredRuns | None:
        """What corrects the network's times; ``None`` for a checkpoint that carries no runs."""
        return MeasuredRuns(self.process, self.config.blend) if self.process else None


def load_checkpoint(path: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Reads a checkpoint directory (default: the released one); one that has not changed is read once.

    Raises CheckpointError (exit code 3), which names the file and what is wrong with it.
    """
    directory = checkpoint_folder(path)
    stamps = tuple(_stamp(directory, name) for name in (CONFIG_FILE, MODEL_FILE, METRICS_FILE, POINTS_FILE, RUNS_FILE))
    return _load(directory.resolve(), stamps)


@functools.lru_cache(maxsize=8)
def _load(directory: Path, stamps: tuple[int | None, ...]) -> Checkpoint:
    del stamps  # part of the cache's key only: a checkpoint written anew is read anew
    config = _read_config(directory)
    tensors, metrics = _read_tensors(directory), _read_metrics(directory)
    points = _read_object(directory, POINTS_FILE, TrainingPoints.from_tensors)
    process = _read_object(directory, RUNS_FILE, functools.partial(_process, config))
    return Checkpoint(config, tensors, metrics, directory, _read_blind(directory), points, process)


def save_checkpoint(
    path: str | os.PathLike[str], checkpoint: Checkpoint, card: str, beside: Sequence[Callable[[Path], object]] = ()
) -> Path:
    """Writes a checkpoint so that ``path`` holds either all of it or what was there before.

    ``beside`` write the further files without which the directory is not whole. Raises CheckpointError when a weight is
    not finite: such a network predicts nothing.
    """
    target = Path(path)
    broken = _not_finite(checkpoint.tensors)
    if broken:
        raise CheckpointError(f"checkpoint {target}: not saved, values that are not finite in {', '.join(broken)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        new = scratch / "new"
        new.mkdir()
        files = (
            (MODEL_FILE, checkpoint.tensors),
            (BLIND_FILE, checkpoint.blind),
            (POINTS_FILE, checkpoint.points.tensors() if checkpoint.points else None),
            (RUNS_FILE, checkpoint.process.tensors() if checkpoint.process else None),
        )
        for file, tensors in files:
            if tensors is not None:
                plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
                (new / file).write_bytes(safetensors.torch.save(plain))
        for file, text in _description(checkpoint, card).items():
            (new / file).write_text(text, encoding="utf-8")
        for write in beside:
            write(new)
        if target.exists():
            target.rename(scratch / "old")
        new.rename(target)
    except BaseException:
        if (scratch / "old").exists() and not target.exists():
            (scratch / "old").rename(target)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def rewrite_description(path: str | os.PathLike[str], checkpoint: Checkpoint, card: str) -> None:
    """Replaces what stands beside the weights of the checkpoint at ``path``: configuration, metrics and card."""
    for file, text in _description(checkpoint, card).items():
        target = Path(path) / file
        handle, scratch = tempfile.mkstemp(prefix=f".{file}-", dir=path)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as new:
                new.write(text)
            os.chmod(scratch, 0o644)  # mkstemp's files are private; a checkpoint is to be read
            os.replace(scratch, target)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise


def _description(checkpoint: Checkpoint, card: str) -> dict[str, str]:
    """The text files of a checkpoint."""
    metrics = json.dumps(dict(checkpoint.metrics), indent=1, allow_nan=False)
    return {
        CONFIG_FILE: checkpoint.config.model_dump_json(indent=1) + "\n", METRICS_FILE: metrics + "\n", CARD_FILE: card
    }  # fmt: skip


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]


def _stamp(directory: Path, name: str) -> int | None:
    try:
        return (directory / name).stat().st_mtime_ns
    except OSError:
        return None


def _read_config(directory: Path) -> CheckpointConfig:
    file = directory / CONFIG_FILE
    data = read_versioned(directory)
    data.pop("shrinkage", None)  # of the adapters that came before the covariance of errors; nothing else used it
    if isinstance(data.get("adapter"), dict) and "log_factors" in data["adapter"]:
        raise CheckpointError(f"checkpoint {file}: a calibration of an earlier version; calibrate its runs again")
    try:
        config = CheckpointConfig.model_validate(data)
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise CheckpointError(f"checkpoint {file}: {reasons}") from None
    if config.feature_hash != FEATURE_HASH:
        raise CheckpointError(
            f"checkpoint {file}: feature_hash: {config.feature_hash!r}, but this package computes the features "
            f"{FEATURE_HASH!r}; use the package version it was trained with, or train it again"
        )
    return config


def _read_blind(directory: Path) -> dict[str, torch.Tensor] | None:
    return _read_tensors(directory, BLIND_FILE) if (directory / BLIND_FILE).exists() else None


def _process(config: CheckpointConfig, tensors: Mapping[str, torch.Tensor]) -> GaussianProcess:
    """ValueError when it asks for a coordinate that these features do not have."""
    process = GaussianProcess.from_tensors(tensors)
    if len(process.kernel.columns) and int(process.kernel.columns.max()) >= config.num_coordinates:
        raise ValueError("columns")
    return process


def _read_object(directory: Path, name: str, from_tensors: Callable[[Mapping[str, torch.Tensor]], _T]) -> _T | None:
    """What a file's tensors make; ``None`` without the file, for a checkpoint predicts without either of them."""
    if not (directory / name).exists():
        return None
    tensors = _read_tensors(directory, name)
    try:
        return from_tensors(tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {directory / name}: {error} is missing or has another shape") from None


def _read_tensors(directory: Path, name: str = MODEL_FILE) -> dict[str, torch.Tensor]:
    content = read_bytes(directory, name)
    try:
        tensors: dict[str, torch.Tensor] = safetensors.torch.load(content)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {directory / name}: not a safetensors file ({error})") from None
    if not tensors:
        raise CheckpointError(f"checkpoint {directory / name}: holds no tensors")
    broken = _not_finite(tensors)
    if broken:
        raise CheckpointError(f"checkpoint {directory / name}: values that are not finite in {', '.join(broken)}")
    return tensors


def _read_metrics(directory: Path) -> dict[str, Any]:
    if not (directory / METRICS_FILE).exists():
        return {}  # a checkpoint that was never evaluated still predicts
    metrics = read_json(directory, METRICS_FILE)
    if not isinstance(metrics, dict):
        raise CheckpointError(f"checkpoint {directory / METRICS_FILE}: expected a JSON object")
    return metrics
