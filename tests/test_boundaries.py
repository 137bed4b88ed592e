"""Who may import whom, and what the path of ``infer`` never loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_COSTLY = ("torch_geometric", "hydra", "omegaconf", "wandb", "sklearn", "pandas", "jinja2")
_LOADED = (
    "import json, sys, gnn_predictor.infer as infer\n"
    "code = infer.main(sys.argv[1:])\n"
    "print(json.dumps([code, sorted({name.split('.')[0] for name in sys.modules})]), file=sys.stderr)\n"
)


def _modules_of(*arguments: str) -> tuple[int, set[str]]:
    """Exit code and top-level modules of one run of infer in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    code, modules = json.loads(done.stderr.splitlines()[-1])
    return code, set(modules)


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_predicting_loads_nothing_that_only_training_needs() -> None:
    code, modules = _modules_of("conf/job/llama3-70b-fp8.yaml", "--format", "json")
    assert code == 0
    assert "torch" in modules
    assert modules.isdisjoint(_COSTLY)


@pytest.mark.parametrize("content", ["model: {}", "- not\n- a job", "model: [", ""])
def test_a_bad_job_is_answered_without_torch(tmp_path: Path, content: str) -> None:
    job = tmp_path / "bad.yaml"
    job.write_text(content)
    code, modules = _modules_of(str(job))
    assert code == 2
    assert "torch" not in modules


def test_a_layout_that_does_not_divide_is_answered_without_torch() -> None:
    code, modules = _modules_of("conf/job/llama3-70b-fp8.yaml", "--set", "parallel.tensor=7")
    assert code == 4
    assert "torch" not in modules


def test_importing_the_package_loads_neither_torch_nor_pydantic() -> None:
    script = "import sys, gnn_predictor; assert not {'torch', 'pydantic'} & set(sys.modules); dir(gnn_predictor)"
    subprocess.run([sys.executable, "-c", script], cwd=_ROOT, check=True, timeout=60)


def test_predict_stays_a_function_whatever_was_imported_first() -> None:
    script = "import gnn_predictor.prediction; from gnn_predictor import predict; assert callable(predict)"
    subprocess.run([sys.executable, "-c", script], cwd=_ROOT, check=True, timeout=60)


def test_every_package_travels_in_the_wheel() -> None:
    listed = set(tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        ".".join(Path(folder).relative_to(_ROOT).parts)
        for package in ("dataset_builder", "gnn_predictor")
        for folder, _, files in os.walk(_ROOT / package)
        if "__init__.py" in files
    }
    assert listed == found | {"gnn_predictor.conf", "gnn_predictor.checkpoints"}
