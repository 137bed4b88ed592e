"""``python -m gnn_predictor.train [overrides]``: from the corpus to a checkpoint with held-out figures.

1. reads the corpus (building it first when it is not there) and makes examples of it;
2. runs the configured protocols: every split trains without its test groups and predicts them;
3. trains the released networks on everything, calibrates the interval on the held-out errors of P1, and writes the
   checkpoint with metrics.json and its card.

Interrupted, the same command continues; the result does not depend on the interruption nor on the number of workers.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pandas as pd
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, ValidationError

from dataset_builder.corpus import splits
from dataset_builder.corpus.build import open_corpus
from gnn_predictor.baselines import fitted_predictions, write_reference
from gnn_predictor.card import model_card
from gnn_predictor.checkpoint import Checkpoint, CheckpointConfig, Interval, save_checkpoint
from gnn_predictor.crossvalidation import (
    FitTask,
    Floats,
    Workshop,
    conformal_factor,
    fit_all,
    operator_errors,
    predict_graphs,
    split_tasks,
    trained,
)
from gnn_predictor.domain import domain_of
from gnn_predictor.examples import Examples, load_examples
from gnn_predictor.features import FEATURE_HASH
from gnn_predictor.fitting import FitSettings
from gnn_predictor.metrics import evaluation_metrics, operator_figures
from gnn_predictor.network import NetworkConfig
from gnn_predictor.tracking import Tracker

_HERE = Path(__file__).resolve().parent
CONFIGURATION = str(_HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf")


class ProtocolSettings(BaseModel):
    """Which held-out protocols to run, and with how many networks a split."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: tuple[str, ...] = ("P1",)
    folds: int = 5
    members: int = 1


class Settings(BaseModel):
    """Everything ``conf/train.yaml`` holds; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    corpus: str
    output: str
    work: str
    workers: int
    members: int
    max_runs: int | None
    max_operators: int | None
    fit: FitSettings
    network: dict[str, Any]
    protocols: ProtocolSettings
    tracking: dict[str, Any]


def run_training(settings: Settings) -> Path:
    """Trains, evaluates and writes the checkpoint; returns its directory."""
    examples = load_examples(open_corpus(settings.corpus), settings.max_runs, settings.max_operators)
    config = network_config(examples, settings.network)
    directory = Path(settings.work) / _identity(config, examples)
    shop = Workshop(config, examples.runs, examples.operators, directory, settings.workers)
    with Tracker(settings.tracking, name=settings.name, config=settings.model_dump(mode="json")) as tracker:
        tracker.log_dataset(Path(settings.corpus), {"hash": examples.corpus_hash, "runs": len(examples.runs)})
        everything = np.arange(len(examples.runs))
        final = [
            FitTask(f"final.{member}", replace(settings.fit, seed=settings.fit.seed + member),
                    tuple(everything.tolist()), tuple(range(len(examples.operators))))
            for member in range(settings.members)
        ]  # fmt: skip
        protocols = {name: protocol_splits(name, examples, settings.protocols) for name in settings.protocols.names}
        tasks = {
            split.name: split_tasks(split, shop, settings.fit, settings.protocols.members)
            for each in protocols.values()
            for split in each
        }
        histories = fit_all([task for each in tasks.values() for task in each] + final, shop)
        for epoch in range(settings.fit.epochs):
            losses = {f"{task}/{key}": value for task, each in histories.items() for key, value in each[epoch].items()}
            tracker.log(losses, step=epoch)
        metrics: dict[str, Any] = {}
        held_out: dict[str, pd.DataFrame] = {}
        for name, each in protocols.items():
            held_out[name] = pd.concat([predicted_split(split, tasks[split.name], shop) for split in each])
            metrics[name] = protocol_metrics(held_out[name], each, examples)
            tracker.log_predictions(held_out[name], name)
        if "P1" in protocols:
            metrics["operators"] = unseen_operator_metrics(protocols["P1"], tasks, shop)
        checkpoint = Checkpoint(
            CheckpointConfig(
                feature_hash=FEATURE_HASH,
                corpus_hash=examples.corpus_hash,
                name=settings.name,
                network=asdict(config),
                interval=interval_of(held_out.get("P1")),
                domain=domain_of(examples.jobs),
                training={"fit": asdict(settings.fit), "members": settings.members, "runs": len(examples.runs)},
            ),
            dict(trained(final, shop).state_dict()),
            metrics,
        )
        path = save_checkpoint(settings.output, checkpoint, model_card(checkpoint))
        write_reference(list(examples.reference), path)
        tracker.log_checkpoint(path, {"corpus": examples.corpus_hash})
    return path


def _identity(config: NetworkConfig, examples: Examples) -> str:
    """Names the working directory, so that a continued training never mixes networks, features or corpora."""
    parts = (asdict(config), FEATURE_HASH, examples.corpus_hash, len(examples.runs), len(examples.operators))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def network_config(examples: Examples, chosen: dict[str, Any]) -> NetworkConfig:
    """The configured sizes and what the examples decide: column counts and the devices with a learned vector."""
    graph = examples.runs.graphs[0]
    return NetworkConfig(
        node_features=graph.node_features.shape[1],
        hardware_features=graph.hardware.shape[1],
        software_features=graph.software.shape[1],
        workload_features=graph.workload.shape[1],
        devices=examples.devices,
        **chosen,
    )


def protocol_splits(name: str, examples: Examples, settings: ProtocolSettings) -> list[splits.Split]:
    """The splits of a protocol of the method: P1 unseen jobs, P2 and P3 precision, P4 GPU, P5 source."""
    runs = examples.measurements
    if name == "P1":
        return splits.unseen_jobs(runs, settings.folds)
    if name in ("P2", "P3"):
        return splits.unseen_precision(runs, hide_operators=name == "P3")
    if name in ("P4", "P5"):
        return splits.unseen_gpu(runs) if name == "P4" else splits.unseen_source(runs)
    raise ValueError(f"protocols.names: got {name!r}; expected P1, P2, P3, P4 or P5")


def predicted_split(split: splits.Split, tasks: list[FitTask], shop: Workshop) -> pd.DataFrame:
    """The held-out rows of one split with ``predicted_s``, ``spread`` and the split's name."""
    test = shop.runs.select(np.array(split.test, dtype=np.int64))
    predicted = predict_graphs(trained(tasks, shop), test.graphs)
    return pd.concat([test.table, predicted], axis=1).assign(split=split.name)


def protocol_metrics(held_out: pd.DataFrame, each: Sequence[splits.Split], examples: Examples) -> dict[str, Any]:
    """The figures of a protocol, with every baseline fitted and tested on the same rows."""
    table = held_out.rename(columns={"predicted_s": "predicted_iter_time_s"}).reset_index(drop=True)
    log_error = _log_error(table["predicted_iter_time_s"], table["iter_time_s"])
    spread = table["spread"].to_numpy(float)
    factor = np.empty(len(table))
    for name in table["split"].unique():  # a split's interval is calibrated on the other splits
        inside = (table["split"] == name).to_numpy()
        others = ~inside if (~inside).any() else inside
        factor[inside] = conformal_factor(log_error[others], spread[others], Interval().level)
    table["predicted_low_s"] = table["predicted_iter_time_s"] * np.exp(-factor * spread)
    table["predicted_high_s"] = table["predicted_iter_time_s"] * np.exp(factor * spread)
    table = table.assign(status="ok", in_domain=True, predicted_peak_mem_gb=np.nan)
    return evaluation_metrics(table.join(baselines_of(table, examples, {split.name: split.train for split in each})))


def baselines_of(table: pd.DataFrame, examples: Examples, train_rows: Mapping[str, Sequence[int]]) -> pd.DataFrame:
    """B0-B2 for every held-out row, fitted on the rows its split was trained on."""
    reference = pd.DataFrame(examples.reference)
    parts = []
    for name, rows in table.groupby("split"):
        own = reference.set_index("run_id").loc[rows["run_id"]].reset_index().set_index(rows.index)
        parts.append(fitted_predictions(reference.iloc[list(train_rows[str(name)])], own))
    predicted = pd.concat(parts).loc[table.index]
    return predicted.rename(columns=lambda name: f"baseline_{name}_s")


def unseen_operator_metrics(
    protocol: list[splits.Split], tasks: dict[str, list[FitTask]], shop: Workshop
) -> dict[str, Any]:
    """Errors on the operator shapes that each split of P1 did not see."""
    seen = shop.operators
    parts = []
    for split in protocol:
        rows = np.ones(len(seen), dtype=bool)
        rows[list(tasks[split.name][0].operators)] = False
        parts.append(operator_errors(trained(tasks[split.name], shop), seen, rows))
    return operator_figures(pd.concat(parts))


def interval_of(held_out: pd.DataFrame | None) -> Interval:
    """The interval that covers 90% of unseen jobs, in units of the spread that the network expects."""
    if held_out is None:
        return Interval()
    log_error = _log_error(held_out["predicted_s"], held_out["iter_time_s"])
    factor = conformal_factor(log_error, held_out["spread"].to_numpy(float), Interval().level)
    return Interval(low=factor, high=factor)


def _log_error(predicted: pd.Series[float], measured: pd.Series[float]) -> Floats:
    errors: Floats = np.log(predicted.to_numpy(float) / measured.to_numpy(float))
    return errors


@hydra.main(version_base="1.3", config_path=CONFIGURATION, config_name="train")
def main(configuration: DictConfig) -> None:
    """The command; exit code 2 with every wrong key when the configuration is invalid."""
    plain = OmegaConf.to_container(configuration, resolve=True)
    try:
        settings = Settings.model_validate(plain)
    except ValidationError as error:
        for problem in error.errors():
            where = ".".join(map(str, problem["loc"]))
            print(f"train: {where}: {problem['msg']}", file=sys.stderr)
        sys.exit(2)
    path = run_training(settings)
    print(json.dumps({"checkpoint": str(path)}))


if __name__ == "__main__":
    main()
