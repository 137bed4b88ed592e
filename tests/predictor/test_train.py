"""The command that trains: own data, sweeps by every launcher, several ranks; each on a corpus of forty runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from dataset_builder.corpus.build import Corpus
from dataset_builder.corpus.measurements import read_table
from gnn_predictor.checkpoint import load_checkpoint, released_checkpoint
from gnn_predictor.train import CONFIGURATION, Settings

_ROOT = Path(__file__).parents[2]
_QUICK = ("max_operators=200", "protocols.folds=2", "protocols.members=1", "members=1", "workers=1", "fit.epochs=1",
          "tracking=disabled")  # fmt: skip
_PLUGINS = {
    "joblib": "hydra_plugins.hydra_joblib_launcher", "submitit_local": "submitit",
    "ray": "hydra_plugins.hydra_ray_launcher",
}  # fmt: skip


def _train(*arguments: str, ranks: int = 1, **environment: str) -> subprocess.CompletedProcess[str]:
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *launch, "gnn_predictor.train", *arguments]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), **environment}
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=600, env=settings)


def _checkpoint_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    path = json.loads(done.stdout)["checkpoint"]  # one line, of the leader
    value: dict[str, Any] = load_checkpoint(path).config.model_dump()
    return value


def test_own_runs_are_learnt_from_where_a_checkpoint_is(small_corpus: Corpus, tmp_path: Path) -> None:
    """As the guide has it, and on two ranks; then with a checkpoint that is no start."""
    tables = small_corpus.path.parent
    own = (
        "corpus=my_cluster", f"corpus.path={tmp_path / 'own'}", f"corpus.runs={tables / 'runs.csv'}",
        f"corpus.ops={tables / 'ops.parquet'}", f"work={tmp_path / 'work'}", f"output={tmp_path / 'tuned'}",
        f"hydra.run.dir={tmp_path / 'hydra'}", *_QUICK, "members=2", "protocols.members=2",
    )  # fmt: skip
    done = _train(*own, f"finetune_from={released_checkpoint()}", ranks=2)
    tuned = _checkpoint_of(done)
    released = load_checkpoint().config
    assert tuned["corpus_hash"] == small_corpus.content_hash
    assert tuned["training"]["finetune_from"] == str(released_checkpoint())
    assert (tuned["training"]["members"], tuned["training"]["fit"]["source_effects"]) == (2, True)
    assert list(tuned["network"]["devices"])[: len(released.network["devices"])] == released.network["devices"]
    assert sorted(file.name for file in (tmp_path / "hydra").iterdir()) == [".hydra", "train.log"]
    refused = _train(*own, f"finetune_from={tmp_path / 'tuned'}", "network.layers=1")
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "has network.layers=2, this training 1" in refused.stderr


@pytest.mark.parametrize("how", ["joblib", "submitit_local", "ray", "optuna"])
def test_a_sweep_leaves_a_checkpoint_of_each(how: str, small_corpus: Corpus, tmp_path: Path) -> None:
    arguments = ["-m", f"corpus.path={small_corpus.path}", *_QUICK, f"work={tmp_path / 'work'}",
                 f"hydra.sweep.dir={tmp_path / 'sweep'}"]  # fmt: skip
    if how == "optuna":
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
        arguments += ["sweep=optuna", "hydra.sweeper.n_trials=2"]
    else:
        pytest.importorskip(_PLUGINS[how])
        arguments += ["sweep=each", f"hydra/launcher={how}", "network.hidden=8,12"]
    done = _train(*arguments)
    assert done.returncode == 0, done.stderr
    found = [load_checkpoint(path) for path in sorted((tmp_path / "sweep").glob("*/checkpoint"))]
    assert len(found) == 2
    if how == "optuna":
        best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())["best_value"]
        assert best == pytest.approx(min(each.metrics["P1"]["mape_percent"] for each in found))
    else:
        assert [each.config.network["hidden"] for each in found] == [8, 12]


def test_few_runs_are_refused_before_any_fit(small_corpus: Corpus, tmp_path: Path) -> None:
    """Of four runs, as their owner asks for it: no split of theirs can be fitted."""
    tables = small_corpus.path.parent
    read_table(tables / "runs.csv").head(4).to_csv(tmp_path / "runs.csv", index=False)
    done = _train(
        "experiment=smoke", "corpus=my_cluster", f"corpus.path={tmp_path / 'own'}",
        f"hydra.run.dir={tmp_path / 'hydra'}", f"corpus.runs={tmp_path / 'runs.csv'}",
        f"corpus.ops={tables / 'ops.parquet'}", f"work={tmp_path / 'work'}",
        f"output={tmp_path / 'checkpoint'}", "tracking=disabled", "protocols.names=[P1,P2]",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith(("train: ", "corpus "))]
    assert told[0].startswith(f"train: corpus {tmp_path / 'own'}: ")
    assert any(": P1-0: " in line and " runs to fit on, " in line for line in told)
    assert "got 4 runs in " in told[-1]
    assert "expected 10 to fit on and 1 to test" in told[-1]
    assert "gnn_predictor.calibrate" in told[-1]
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("wrong", [["finetune_from={}"], ["experiment=p2", "output={}"]])
def test_a_checkpoint_that_is_not_there_is_told_before_a_corpus_is_built(wrong: list[str], tmp_path: Path) -> None:
    paths = [f"corpus.path={tmp_path / 'corpus'}", f"hydra.run.dir={tmp_path / 'hydra'}", f"work={tmp_path / 'work'}"]
    done = _train(*paths, *(each.format(tmp_path / "nope") for each in wrong))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"train: checkpoint {tmp_path / 'nope'}: no such directory")
    assert not (tmp_path / "corpus").exists()


def test_no_training_replaces_the_released_checkpoint_unasked() -> None:
    """And what adds its figures to a checkpoint looks where the training before it has written one."""
    outputs = {}
    for experiment in (None, *(file.stem for file in (Path(CONFIGURATION) / "experiment").glob("*.yaml"))):
        GlobalHydra.instance().clear()
        with initialize_config_dir(CONFIGURATION, version_base="1.3"):
            outputs[experiment] = compose("train", [f"experiment={experiment}"] if experiment else []).output
    assert outputs.pop("smoke") == "build/smoke"
    assert set(outputs.values()) == {"build/released"}


def test_a_sweep_under_torchrun_is_refused(tmp_path: Path) -> None:
    done = _train("-m", f"hydra.sweep.dir={tmp_path}", WORLD_SIZE="2", RANK="0")
    assert done.returncode == 2
    assert "train: --multirun under torchrun: start each training" in done.stderr


def test_the_wandb_sweep_starts_trainings_that_compose() -> None:
    """What an agent would run, at both ends of every range."""
    sweep = yaml.safe_load((Path(CONFIGURATION) / "wandb-sweep.yaml").read_text())
    assert sweep["method"] in ("bayes", "grid", "random")
    assert sweep["metric"] == {"name": "P1/mape_percent", "goal": "minimize"}
    assert sweep["command"][:3] == ["python", "-m", sweep["program"]]
    assert sweep["command"][-1] == "${args_no_hyphens}"
    GlobalHydra.instance().clear()
    for end in (0, -1):
        values = {
            key: (range_of.get("values") or [range_of["min"], range_of["max"]])[end]
            for key, range_of in sweep["parameters"].items()
        }
        chosen = [*sweep["command"][3:-1], *(f"{key}={value}" for key, value in values.items()), "output=x"]
        with initialize_config_dir(CONFIGURATION, version_base="1.3"):
            settings = Settings.model_validate(OmegaConf.to_container(compose("train", chosen), resolve=True))
        assert settings.tracking["mode"] == "online"
        assert settings.network["hidden"] == values["network.hidden"]
        assert settings.fit.learning_rate == values["fit.learning_rate"]
