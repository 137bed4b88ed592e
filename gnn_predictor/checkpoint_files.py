"""A checkpoint's files before anything is made of them: which there are, how large, and what they begin with.

Needs no torch: what is no checkpoint is refused at once and in little memory. Nothing is read but regular files of the
folder itself, each up to its own limit; a link that leads out of the folder is refused.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

FORMAT_VERSION = 1
MODEL_FILE, CONFIG_FILE, METRICS_FILE, CARD_FILE = "model.safetensors", "config.json", "metrics.json", "README.md"
BLIND_FILE = "baseline_b3.safetensors"  # baseline B3: a network of the same shape that never saw a format
POINTS_FILE = "training_points.safetensors"  # where the training runs are, for the distance of a job to them
RUNS_FILE = "measured_runs.safetensors"  # the Gaussian process over them
_MOST_BYTES = {
    POINTS_FILE: 64 * 2**20,
    RUNS_FILE: 64 * 2**20,
    MODEL_FILE: 256 * 2**20,
    BLIND_FILE: 256 * 2**20,
    CONFIG_FILE: 4 * 2**20,
    METRICS_FILE: 16 * 2**20,
    CARD_FILE: 2**20,
}
_MOST_HEADER_BYTES = 100 * 10**6  # of a safetensors file, by its specification


class CheckpointError(ValueError):
    """A checkpoint that is missing, broken or made for another version of this package."""

    exit_code = 3


def released_checkpoint() -> Path:
    """The directory of the released predictor, in a checkout, an editable install or a wheel alike."""
    package = Path(__file__).resolve().parent
    installed = package / "checkpoints"
    return installed if installed.is_dir() else package.parent / "checkpoints"


def checkpoint_folder(path: str | os.PathLike[str] | None = None) -> Path:
    """The directory that is meant (default: the released one); raises CheckpointError where there is none."""
    directory = released_checkpoint() if path is None else Path(path).expanduser()
    try:
        is_folder, exists = directory.is_dir(), directory.exists()
    except (OSError, ValueError) as error:  # a name too long, or with a NUL
        raise CheckpointError(f"checkpoint {directory!s:.200}: {getattr(error, 'strerror', None) or error}") from None
    if not is_folder:
        what = "not a directory" if exists else "no such directory"
        raise CheckpointError(f"checkpoint {directory}: {what}; expected one with {CONFIG_FILE} and {MODEL_FILE}")
    return directory


def check_files(path: str | os.PathLike[str] | None = None) -> None:
    """Raises CheckpointError (exit code 3) for what cannot be a checkpoint, by its version and its first bytes."""
    directory = checkpoint_folder(path)
    read_versioned(directory)
    if (directory / METRICS_FILE).exists():
        read_json(directory, METRICS_FILE)
    for name in (MODEL_FILE, BLIND_FILE, POINTS_FILE, RUNS_FILE):
        if name == MODEL_FILE or (directory / name).exists():
            _check_header(directory, name)


def read_versioned(directory: Path) -> Any:
    """``config.json`` as plain values, once its version is known to be this package's."""
    data = read_json(directory, CONFIG_FILE)
    # The version is looked at first: a later format may well have other fields.
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        file = directory / CONFIG_FILE
        raise CheckpointError(f"checkpoint {file}: format_version: {version!r}, this package reads {FORMAT_VERSION}")
    return data


def read_json(directory: Path, name: str) -> Any:
    """One JSON file of a checkpoint."""
    content = read_bytes(directory, name)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {directory / name}: not JSON ({error})") from None


def read_bytes(directory: Path, name: str) -> bytes:
    """One file of a checkpoint, whole."""
    try:
        with _opened(directory, name) as file:
            return file.read()
    except OSError as error:
        raise CheckpointError(f"checkpoint {directory / name}: {error.strerror or error}") from None


def _check_header(directory: Path, name: str) -> None:
    """A safetensors file begins with the length of its header, which is a JSON object."""
    try:
        with _opened(directory, name) as file:
            start, size = file.read(9), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CheckpointError(f"checkpoint {directory / name}: {error.strerror or error}") from None
    length = int.from_bytes(start[:8], "little")
    if len(start) < 9 or start[8:] != b"{" or length > min(_MOST_HEADER_BYTES, size - 8):
        raise CheckpointError(f"checkpoint {directory / name}: not a safetensors file (its header is none)")


def _opened(directory: Path, name: str) -> BinaryIO:
    """A regular file inside the directory, of a size that it may have; raises CheckpointError, OSError."""
    file = directory / name
    if not file.resolve().is_relative_to(directory.resolve()):
        raise CheckpointError(f"checkpoint {file}: leads out of the checkpoint's folder; expected a file inside it")
    try:
        found = file.stat()
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {file}: no such file") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"checkpoint {file}: not a regular file")
    if found.st_size > _MOST_BYTES[name]:
        raise CheckpointError(
            f"checkpoint {file}: {found.st_size} bytes, more than the {_MOST_BYTES[name]} it may have"
        )
    return file.open("rb")
