"""Held-out predictions: every split of a protocol is trained without its test groups and predicts them.

Fits are independent tasks, run in worker processes (one thread each, so two cores run two), and each leaves its result
in the working directory: an interrupted training continues where it was. Under torchrun all ranks train every fit
together instead; the leader alone writes, and how many ranks there were is not part of a fit's name.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from dataset_builder.corpus.splits import Split, fold_of
from gnn_predictor import ranks
from gnn_predictor.batch import collate
from gnn_predictor.dataset import OperatorExamples, RunExamples
from gnn_predictor.features import GraphArrays
from gnn_predictor.finetune import Start
from gnn_predictor.fitting import FitSettings, fit
from gnn_predictor.graph_store import GraphStore
from gnn_predictor.network import Ensemble, NetworkConfig, Predictor, is_population

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]

_GRAPHS_AT_ONCE = 64


@dataclass(frozen=True)
class FitTask:
    """One network to train: a name that is also its file's, and the rows it may see."""

    name: str
    settings: FitSettings
    runs: tuple[int, ...]
    operators: tuple[int, ...]


@dataclass(frozen=True)
class Workshop:
    """What every fit shares."""

    config: NetworkConfig
    runs: RunExamples
    operators: OperatorExamples
    directory: Path
    num_workers: int
    start: Start | None = None  # None: random weights


def split_tasks(split: Split, shop: Workshop, settings: FitSettings, members: int) -> list[FitTask]:
    """The fits of one split. Operators of hidden formats, and a fifth of all shapes, stay unseen."""
    table = shop.operators.table
    fold = int.from_bytes(split.name.encode(), "big") % 5
    held_out = held_out_operators(shop.operators, fold)
    seen = ~held_out & ~table["dtype"].isin(split.hidden_op_dtypes).to_numpy(bool)
    operators = tuple(np.flatnonzero(seen).tolist())
    return member_tasks(split.name, split.train, operators, settings, members)


def member_tasks(
    name: str, runs: tuple[int, ...], operators: tuple[int, ...], settings: FitSettings, members: int
) -> list[FitTask]:
    """The fits of one ensemble: members have seeds of their own, and every second one source effects, if any has."""
    each = [
        replace(settings, seed=settings.seed + member, source_effects=settings.source_effects and is_population(member))
        for member in range(members)
    ]
    return [FitTask(f"{name}.{member}", own, runs, operators) for member, own in enumerate(each)]


def held_out_operators(operators: OperatorExamples, fold: int) -> Mask:
    """Mask of the operators whose shape is in this of five folds."""
    folds = {group: fold_of(group, 5) for group in operators.table["op_group"].unique()}
    mask: Mask = operators.table["op_group"].map(folds).to_numpy() == fold
    return mask


def fit_all(tasks: Sequence[FitTask], shop: Workshop) -> dict[str, list[dict[str, float]]]:
    """Trains what has no result yet; returns every task's losses by epoch."""
    shop.directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    todo = ranks.from_leader(lambda: [task for task in tasks if not _file(task, shop, "weights").exists()])
    if shop.num_workers > 1 and len(todo) > 1 and ranks.count() == 1:
        _fork_shared["shop"] = shop  # inherited by the forked workers: the corpus is not copied
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(shop.num_workers, mp_context=context) as pool:
            list(pool.map(_fit_in_worker, todo))
    else:
        for task in todo:
            _fit_one(task, shop)
    return ranks.from_leader(lambda: {task.name: _history(task, shop) for task in tasks})


_fork_shared: dict[str, Workshop] = {}


def _fit_in_worker(task: FitTask) -> None:
    torch.set_num_threads(1)
    _fit_one(task, _fork_shared["shop"])


def _fit_one(task: FitTask, shop: Workshop) -> None:
    history = _history(task, shop)

    def report(epoch: int, metrics: dict[str, float]) -> None:
        del history[epoch:]
        history.append(metrics)
        _replace(_file(task, shop, "history"), lambda file: file.write_text(json.dumps(history)))
        figures = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        print(f"{task.name} epoch {epoch + 1}/{task.settings.epochs}  {figures}", file=sys.stderr, flush=True)

    network = fit(
        shop.start.of(task.settings.seed) if shop.start else shop.config,
        task.settings,
        shop.runs.select(np.array(task.runs, dtype=np.int64)),
        shop.operators.select(torch.tensor(task.operators)),
        state_file=_file(task, shop, "state"),
        report=report,
        name=task.name,
    )
    if ranks.is_leader():
        _replace(_file(task, shop, "weights"), lambda file: torch.save(network.state_dict(), file))


def _history(task: FitTask, shop: Workshop) -> list[dict[str, float]]:
    file = _file(task, shop, "history")
    history: list[dict[str, float]] = json.loads(file.read_text()) if file.exists() else []
    return history


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """Writes a file beside this one and puts it in its place: a kill leaves the old one or the new one."""
    partial = file.with_name(f"{file.name}.partial")
    write(partial)
    partial.replace(file)


def _file(task: FitTask, shop: Workshop, suffix: str) -> Path:
    """A task's file; other settings, rows, orders of rows or weights to start from make another one."""
    rows: tuple[object, ...] = (task.settings, task.runs, task.operators)
    if isinstance(shop.runs.graphs, GraphStore):
        rows += (shop.runs.graphs.held,)
    if shop.start is not None:
        rows += (shop.start.digest,)
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:8]
    return shop.directory / f"{task.name}.{digest}.{suffix}"


def trained(tasks: Sequence[FitTask], shop: Workshop) -> Ensemble:
    """The ensemble of these tasks' results."""
    members = []
    for task in tasks:
        network = Predictor(shop.config)
        network.load_state_dict(torch.load(_file(task, shop, "weights"), weights_only=True))
        members.append(network.eval())
    return Ensemble(members).eval()


@torch.inference_mode()
def predict_graphs(
    network: Ensemble, graphs: Sequence[GraphArrays], population_share: Floats | None = None
) -> pd.DataFrame:
    """Columns ``network_s`` and ``network_spread`` (expected absolute log error) of every graph."""
    seconds, spread = [], []
    for start in range(0, len(graphs), _GRAPHS_AT_ONCE):
        some = slice(start, start + _GRAPHS_AT_ONCE)
        batch = collate(graphs[some], network.config.devices)
        share = None if population_share is None else torch.from_numpy(population_share[some])
        predicted, times, _ = network(batch, share)
        seconds += predicted.tolist()
        spread += times.log_spread.exp().tolist()
    return pd.DataFrame({"network_s": seconds, "network_spread": spread})


@torch.inference_mode()
def operator_errors(network: Ensemble, operators: OperatorExamples, rows: Mask) -> pd.DataFrame:
    """The table rows of these operators with ``predicted_s``."""
    predicted = []
    for part in torch.split(torch.from_numpy(np.flatnonzero(rows)), 4096):
        predicted += network.node_times(operators.batch(part)).seconds.tolist()
    return operators.table[rows].assign(predicted_s=predicted)


def conformal_factor(log_error: Floats, spread: Floats, level: float) -> float:
    """Split-conformal factor: ``|log error| <= factor * spread`` for a share ``level`` of new jobs.

    Lei et al. 2018 (arXiv 1604.04173), locally weighted: the ceil((n + 1) level)-th smallest score.
    """
    scores = np.sort(np.abs(log_error) / spread)
    rank = min(math.ceil((len(scores) + 1) * level), len(scores))
    return float(scores[rank - 1])
