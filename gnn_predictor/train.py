"""``python -m gnn_predictor.train [overrides]``: from the corpus to a checkpoint with held-out figures.

1. opens the corpus (building it first when it is not there) and makes examples of it;
2. runs the configured protocols: every split trains without its test groups and predicts them;
3. trains the released networks on everything, calibrates the interval on the held-out errors of P1, and writes the
   checkpoint with metrics.json and its card. With ``members: 0`` there are no such networks: the protocols' figures are
   added to the checkpoint that is there, if it has this configuration and corpus.

Interrupted, the same command continues; the result does not depend on the interruption nor on the number of workers.
Under torchrun the ranks train every fit together, data parallel, and the first of them does and writes all the rest.
"""

from __future__ import annotations

import sys

from dataset_builder.command_line import answered_at_once

HELP = """usage: python -m gnn_predictor.train [experiment=smoke|p2|...|p6|b3|ablation] [key=value ...] [--multirun]

Trains a predictor and judges it on held-out runs; conf/train.yaml lists the keys and their defaults.

examples:
  python -m gnn_predictor.train experiment=smoke           in a minute, to build/smoke
  python -m gnn_predictor.train                            an hour, to build/released; output=checkpoints: a release
  python -m gnn_predictor.train fit.epochs=60 network.hidden=128 output=outputs/wide
  python -m gnn_predictor.train corpus=my_cluster corpus.runs=runs.csv finetune_from=checkpoints output=build/mine
  python -m gnn_predictor.train --multirun sweep=each network.hidden=48,64
  torchrun --nproc-per-node 2 -m gnn_predictor.train       every fit on two processes
  python -m gnn_predictor.train --cfg job                  the composed configuration"""

if __name__ == "__main__" and answered_at_once(HELP, sys.argv[1:]):
    sys.exit(0)  # before what takes seconds to import

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pandas as pd
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import Tensor

from dataset_builder.corpus.build import load_corpus, open_corpus
from dataset_builder.corpus.splits import Split
from dataset_builder.hydra_errors import answering
from dataset_builder.job.errors import JobError
from gnn_predictor import ablation, ranks
from gnn_predictor.ablation import Ablation, ablation_figures
from gnn_predictor.adapter import ErrorCovariance
from gnn_predictor.baselines import write_reference
from gnn_predictor.blending import Blend
from gnn_predictor.card import model_card
from gnn_predictor.checkpoint import (
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from gnn_predictor.crossvalidation import FitTask, Workshop, fit_all, member_tasks, trained
from gnn_predictor.distance import TrainingPoints
from gnn_predictor.domain import domain_of
from gnn_predictor.examples import ExampleLimits, Examples, load_examples
from gnn_predictor.features import FEATURE_HASH
from gnn_predictor.finetune import config_of, known_devices, known_libraries, start_from
from gnn_predictor.fitting import FitSettings
from gnn_predictor.gaussian_process import GaussianProcess
from gnn_predictor.graph_store import GROUP
from gnn_predictor.interval import Interval
from gnn_predictor.memory_fit import learn_memory
from gnn_predictor.metrics import noise_figures
from gnn_predictor.network import Ensemble, NetworkConfig
from gnn_predictor.protocols import (
    NAMES,
    Protocol,
    blended,
    calibrated,
    check_enough_runs,
    doubtful_figures,
    interval_of,
    network_error_of,
    protocol_metrics,
    protocol_splits,
)
from gnn_predictor.run_regression import RunRegression
from gnn_predictor.tracking import Tracker
from gnn_predictor.widening import interval_metrics, joined, left_out_half_widths, read_held_out, write_held_out

_HERE = Path(__file__).resolve().parent
CONFIGURATION = str(_HERE / "conf" if (_HERE / "conf").is_dir() else _HERE.parent / "conf")


class ProtocolSettings(BaseModel):
    """Which held-out protocols to run, with how many networks a split, and whether B3 is trained beside them.

    ``ablations``: P2 again without one kind of knowledge each; its own rows may be those of the checkpoint.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: tuple[str, ...] = Field(default=("P1",), examples=[NAMES])
    folds: int = Field(default=5, ge=2)
    members: int = Field(default=1, ge=1)
    b3: bool = False
    ablations: bool = False

    @field_validator("names")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not set(names) <= set(NAMES):
            raise ValueError(f"expected each one of {', '.join(NAMES)}")
        return names


class CorpusSettings(BaseModel):
    """Where the corpus is, and the tables that it is built of where they are not the shipped ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    runs: str | None
    ops: str | None


class Settings(BaseModel):
    """Everything ``conf/train.yaml`` holds; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    corpus: CorpusSettings
    finetune_from: str | None
    output: str
    work: str
    workers: int = Field(ge=1)
    members: int = Field(ge=0)
    max_runs: int | None
    max_operators: int | None
    graphs_held: int | None = Field(ge=GROUP)
    fit: FitSettings
    network: dict[str, Any]
    protocols: ProtocolSettings
    tracking: dict[str, Any]


def run_training(settings: Settings) -> Path:
    """Trains, evaluates and writes the checkpoint; returns its directory. Of several ranks only the leader writes."""
    # A wrong path is told before a corpus is built.
    start = load_checkpoint(settings.finetune_from) if settings.finetune_from is not None else None
    if not settings.members:
        load_checkpoint(settings.output)
    corpus = settings.corpus
    ranks.from_leader(lambda: open_corpus(**corpus.model_dump()).content_hash)  # builds it where there is none
    examples = load_examples(
        load_corpus(corpus.path),
        ExampleLimits(settings.max_runs, settings.max_operators, settings.graphs_held),
        Path(settings.work),
        blind=settings.protocols.b3,
        known_devices=known_devices(start) if start else (),
        known_libraries=known_libraries(start) if start else (),
    )
    config = NetworkConfig.fitting(examples.runs.graphs[0], examples.devices, examples.libraries, **settings.network)
    directory = Path(settings.work) / _identity(config, examples)
    if not settings.members:
        _checkpoint_there(settings, config, examples)  # before hours of fits
    splits_of = _splits(settings, examples)
    check_enough_runs(splits_of, examples, corpus.path)
    shop = Workshop(config, examples.runs, examples.operators, directory, settings.workers)
    blind_shop = replace(shop, runs=examples.blind_runs) if examples.blind_runs else None
    known_runs = start.measured_runs if start else None
    regression = RunRegression.of(examples.runs, settings.fit.source_power, settings.fit.seed, known_runs)
    if start is not None:
        shop = replace(shop, start=start_from(start, config))
        blind_shop = replace(blind_shop, start=start_from(start, config, blind=True)) if blind_shop else None
    protocols = [
        Protocol.plan(name, splits_of[name], shop, blind_shop, settings.fit, settings.protocols.members, regression)
        for name in settings.protocols.names
    ]
    final = _final_tasks(settings, examples)
    # Rows of networks that are about to be replaced say nothing of the new ones.
    there = read_held_out(None if final else Path(settings.output))
    ablations = _ablations(settings, examples, shop, there, splits_of)
    final_blind = [replace(task, name=f"B3-{task.name}") for task in final[:1]] if blind_shop else []
    tracking = settings.tracking if ranks.is_leader() else {**settings.tracking, "mode": "disabled"}
    with Tracker(tracking, name=settings.name, config=settings.model_dump(mode="json")) as tracker:
        tracker.log_dataset(Path(corpus.path), {"hash": examples.corpus_hash, "runs": len(examples.runs)})
        seeing = [task for protocol in protocols for tasks in protocol.tasks.values() for task in tasks]
        histories = fit_all([*seeing, *final], shop)
        if blind_shop is not None:
            blind = [task for protocol in protocols for tasks in protocol.blind.values() for task in tasks]
            histories |= fit_all([*blind, *final_blind], blind_shop)
        for each in ablations:
            histories |= each.fit()
        if not ranks.is_leader():
            return Path(settings.output)
        _log_histories(tracker, histories, settings.fit.epochs)
        estimates = {protocol.name: protocol.held_out() for protocol in protocols}
        jobs = _unseen_jobs(estimates, there)
        network_errors = {protocol.name: protocol.network_errors(jobs) for protocol in protocols}
        held_out = {name: blended(rows, network_errors[name]) for name, rows in estimates.items()}
        trusted = {name: _trusted(rows) for name, rows in held_out.items()}
        known = joined(there, list(trusted.values()))
        metrics: dict[str, Any] = {}
        covariance = None
        for protocol in protocols:
            metrics[protocol.name] = protocol_metrics(protocol, trusted[protocol.name], examples, known)
            metrics[protocol.name]["doubtful"] = doubtful_figures(held_out[protocol.name])
            if protocol.name == "P5":
                half_width = left_out_half_widths(known, "P5", Interval().level)
                metrics["P5"]["calibrated"], covariance = calibrated(trusted["P5"], half_width, examples)
            tracker.log_predictions(held_out[protocol.name], protocol.name)
            tracker.summarize({f"{protocol.name}/mape_percent": metrics[protocol.name]["mape_percent"]})
            if protocol.name == "P1":
                metrics["operators"] = protocol.unseen_operators()
        if ablations:
            own = metrics if ablation.PROTOCOL in metrics else load_checkpoint(settings.output).metrics
            with_ablations = {"ablations": ablation_figures(ablations, known, examples.runs)}
            metrics[ablation.PROTOCOL] = {**own[ablation.PROTOCOL], **with_ablations}
        blind_weights = dict(trained(final_blind, blind_shop).state_dict()) if blind_shop and final_blind else None
        network = trained(final, shop) if final else None
        process = regression.fit(examples.trusted) if final else None
        blend = regression.blend.model_copy(update={"network_error": network_error_of(jobs)})
        weights = _Weights(network, blind_weights, covariance, process, blend)
        path = _write(settings, config, examples, weights, metrics, known)
        tracker.log_checkpoint(path, {"corpus": examples.corpus_hash})
    return path


def _unseen_jobs(estimates: Mapping[str, pd.DataFrame], there: pd.DataFrame) -> pd.DataFrame:
    """P1's held-out rows, of this training or of the checkpoint that is there."""
    return _trusted(estimates["P1"]) if "P1" in estimates else there[there["protocol"] == "P1"]


def _trusted(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["doubt"] == ""].reset_index(drop=True)


def _identity(config: NetworkConfig, examples: Examples) -> str:
    """Names the working directory, so that a continued training never mixes networks, features or corpora."""
    parts = (asdict(config), FEATURE_HASH, examples.corpus_hash, len(examples.runs), len(examples.operators))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _splits(settings: Settings, examples: Examples) -> dict[str, list[Split]]:
    """The splits of every protocol that is fitted."""
    asked = settings.protocols
    names = (*asked.names, *([ablation.PROTOCOL] if asked.ablations else []))
    return {name: protocol_splits(name, examples, asked.folds) for name in names}


def _ablations(
    settings: Settings, examples: Examples, shop: Workshop, there: pd.DataFrame, splits_of: Mapping[str, list[Split]]
) -> list[Ablation]:
    """Those that are asked for; CheckpointError without the full network's rows to set them beside."""
    if not settings.protocols.ablations:
        return []
    if settings.finetune_from is not None:
        raise CheckpointError("finetune_from: an ablation must not start from weights that know what it lacks")
    splits = splits_of[ablation.PROTOCOL]
    trusted, names = set(examples.trusted), examples.runs.table["run_id"]
    tested = {names.iloc[row] for split in splits for row in split.test if row in trusted}
    rows_there = set(there["run_id"][there["protocol"] == ablation.PROTOCOL])
    if ablation.PROTOCOL not in settings.protocols.names and rows_there != tested:
        raise CheckpointError(
            f"checkpoint {settings.output}: has no {ablation.PROTOCOL} of these runs to set ablations beside; "
            "run experiment=p2 first"
        )
    return [Ablation.plan(name, splits, shop, settings.fit, settings.protocols.members) for name in ablation.NAMES]


def _final_tasks(settings: Settings, examples: Examples) -> list[FitTask]:
    runs, operators = examples.trusted, tuple(range(len(examples.operators)))
    return member_tasks("final", runs, operators, settings.fit, settings.members)


def _log_histories(tracker: Tracker, histories: Mapping[str, list[dict[str, float]]], epochs: int) -> None:
    for epoch in range(epochs):
        losses = {f"{task}/{key}": value for task, each in histories.items() for key, value in each[epoch].items()}
        tracker.log(losses, step=epoch)


@dataclass(frozen=True)
class _Weights:
    """What was fitted: the released networks and B3, if any are to be released, how errors on one source go together,
    the measured runs that are released with the networks, and how they are blended."""

    network: Ensemble | None
    blind: Mapping[str, Tensor] | None
    error_covariance: ErrorCovariance | None
    process: GaussianProcess | None
    blend: Blend


def _write(
    settings: Settings,
    config: NetworkConfig,
    examples: Examples,
    weights: _Weights,
    metrics: Mapping[str, Any],
    known: pd.DataFrame,
) -> Path:
    """A new checkpoint, or, without final networks, the one that is there with these figures added.

    ``known`` are the held-out rows of all protocols that its interval is calibrated on; they travel with it.
    """
    reference = [examples.reference[row] for row in examples.trusted]
    metrics = {**metrics, "noise_floor": noise_figures(pd.DataFrame(reference))}
    if weights.network is not None:
        memory, memory_figures = learn_memory(examples.measurements)
        description = CheckpointConfig(
            feature_hash=FEATURE_HASH,
            corpus_hash=examples.corpus_hash,
            name=settings.name,
            network=asdict(config),
            domain=domain_of(examples.trusted_jobs()),
            training={
                "fit": asdict(settings.fit),
                "members": settings.members,
                "runs": len(examples.trusted),
                **({"finetune_from": settings.finetune_from} if settings.finetune_from else {}),
            },
            blend=weights.blend,
            interval=interval_of(known, Interval()),
            memory=memory,
        )
        metrics = {**metrics, "memory": memory_figures}
        tensors = dict(weights.network.state_dict())
        checkpoint = Checkpoint(description, tensors, metrics, blind=weights.blind, process=weights.process)
    else:
        there = _checkpoint_there(settings, config, examples)
        interval = interval_of(known, there.config.interval)
        description = there.config.model_copy(update={"interval": interval, "blend": weights.blend})
        checkpoint = replace(there, config=description, metrics=_with_intervals({**there.metrics, **metrics}, known))
    if weights.error_covariance is not None:
        description = checkpoint.config.model_copy(update={"error_covariance": weights.error_covariance})
        checkpoint = replace(checkpoint, config=description)
    learnt = examples.runs.select(np.array(examples.trusted, dtype=np.int64))
    labels = learnt.table["precision_label"].tolist()
    points = TrainingPoints.of(learnt.graphs, labels, checkpoint.config.domain.precisions)
    checkpoint = replace(checkpoint, points=points)
    beside = (partial(write_reference, reference), partial(write_held_out, known))
    return save_checkpoint(settings.output, checkpoint, model_card(checkpoint), beside)


def _checkpoint_there(settings: Settings, config: NetworkConfig, examples: Examples) -> Checkpoint:
    """The checkpoint that figures are added to; CheckpointError when they would not be its own."""
    there = load_checkpoint(settings.output)
    network_there = config_of(there)
    if there.config.corpus_hash != examples.corpus_hash or network_there != config:
        raise CheckpointError(
            f"checkpoint {settings.output}: its network or corpus is not this configuration's; train it again first"
        )
    return there


def _with_intervals(metrics: Mapping[str, Any], known: pd.DataFrame) -> dict[str, Any]:
    """With what the interval covers of every protocol, now that rows of others have their part in it."""
    level = Interval().level
    names = [name for name in known["protocol"].unique() if name in metrics]
    return {**metrics, **{name: {**metrics[name], "interval": interval_metrics(known, name, level)} for name in names}}


@hydra.main(version_base="1.3", config_path=CONFIGURATION, config_name="train")
def main(configuration: DictConfig) -> float | None:
    """The command; exit code 2 with every wrong key when the configuration is invalid, 3 for a checkpoint's fault.

    Returns what a sweep minimises, the MAPE in percent of the first protocol.
    """
    plain = OmegaConf.to_container(configuration, resolve=True)
    try:
        settings = Settings.model_validate(plain)
    except ValidationError as error:
        for problem in error.errors():
            where = ".".join(map(str, problem["loc"]))
            wanted = problem["msg"].removeprefix("Value error, ")
            print(f"train: {where}: got {problem['input']!r}; {wanted}", file=sys.stderr)
        sys.exit(2)
    if _launched_rank() is not None and HydraConfig.get().mode == RunMode.MULTIRUN:
        print(
            "train: --multirun under torchrun: start each training of the sweep with its own torchrun", file=sys.stderr
        )
        sys.exit(2)
    try:
        with ranks.joined():
            path = run_training(settings)
    except (JobError, CheckpointError) as error:
        print(f"train: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    if _launched_rank():
        return None
    print(json.dumps({"checkpoint": str(path)}))
    metrics = load_checkpoint(path).metrics
    return float(metrics[settings.protocols.names[0]]["mape_percent"]) if settings.protocols.names else None


def _launched_rank() -> int | None:
    """This process's rank where torchrun started several."""
    return int(os.environ["RANK"]) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None


if __name__ == "__main__":
    if _launched_rank():  # what Hydra writes of a run, the leader writes
        sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled"]
    answering(main, "train")
