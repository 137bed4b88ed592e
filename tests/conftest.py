"""The predictor that the published and the golden figures are asked of."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnn_predictor.checkpoint import Checkpoint, load_checkpoint

_JOBS = Path(__file__).parent / "jobs"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--checkpoint", default=None, help="judge this checkpoint instead of the released one")


@pytest.fixture(scope="session")
def released(request: pytest.FixtureRequest) -> Checkpoint:
    """The released predictor."""
    return load_checkpoint(request.config.getoption("--checkpoint"))


@pytest.fixture(scope="session")
def jobs() -> Path:
    """The folder of jobs that public reports describe."""
    return _JOBS
