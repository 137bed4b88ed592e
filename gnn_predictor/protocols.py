"""The held-out protocols of the method, each judged beside every baseline on the same rows.

P1 unseen jobs, P2 unseen precision, P3 unseen precision with its operators hidden too, P4 unseen GPU, P5 unseen source.
B3 is the same network, trained and tested in the same splits on graphs that were traced as if every job computed in 16
bits: what a predictor of one format knows (one network a split, whatever the number of members).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pandas as pd

from dataset_builder.corpus import splits
from dataset_builder.corpus.splits import Split
from dataset_builder.job.errors import JobError
from gnn_predictor.adapter import ErrorCovariance, PlacedJobs
from gnn_predictor.baselines import BASELINES, fitted_predictions
from gnn_predictor.blending import Blend, MeasuredRuns, RunsEstimate, best_network_error, weighed
from gnn_predictor.calibration import ClusterErrors
from gnn_predictor.crossvalidation import (
    FitTask,
    Floats,
    Workshop,
    conformal_factor,
    operator_errors,
    predict_graphs,
    split_tasks,
    trained,
)
from gnn_predictor.dataset import RunExamples
from gnn_predictor.distance import TrainingPoints
from gnn_predictor.examples import Examples
from gnn_predictor.fitting import FitSettings
from gnn_predictor.gaussian_process import GaussianProcess
from gnn_predictor.interval import Interval
from gnn_predictor.metrics import BASELINE_PREFIX, error_figures, evaluation_metrics, macro_mape, operator_figures
from gnn_predictor.run_regression import RunRegression
from gnn_predictor.source_calibration import HeldOutSource, calibrated_figures, learn_covariance
from gnn_predictor.widening import coverage_figures, fit_widening, left_out_half_widths

NAMES = ("P1", "P2", "P3", "P4", "P5")
# To fit on, in every split. P4 does not hold fewer runs of a GPU out on their own either. The Gaussian process wants
# more (LEAST_RUNS) and is left out of splits that have less; a network of these few is at least judged.
LEAST_RUNS_OF_FIT = 10
_NO_IDEA = 1e3  # deviation of a log error, where there are no runs
LEFT_OUT = {"P2": "precision", "P3": "precision", "P4": "gpu", "P5": "source_id"}  # column of what a split never saw


def protocol_splits(name: str, examples: Examples, folds: int) -> list[Split]:
    """The splits of a protocol."""
    runs = cast("list[splits.Run]", list(examples.runs.table.itertuples(index=False)))
    if name == "P1":
        return splits.unseen_jobs(runs, folds)
    if name in ("P2", "P3"):
        return splits.unseen_precision(runs, hide_operators=name == "P3")
    return splits.unseen_gpu(runs) if name == "P4" else splits.unseen_source(runs)


def check_enough_runs(splits_of: Mapping[str, Sequence[Split]], examples: Examples, corpus: str) -> None:
    """JobError, before hours of fits, where a corpus has too few runs for the protocols that are asked of it."""
    trusted = set(examples.trusted)
    reasons = [f"{name}: the runs make no split of it" for name, each in splits_of.items() if not each]
    for split in (split for each in splits_of.values() for split in each):
        tested = len(trusted & set(split.test))
        if len(split.train) < LEAST_RUNS_OF_FIT or not tested:
            reasons.append(f"{split.name}: {len(split.train)} runs to fit on, {tested} to test")
    if len(trusted) < LEAST_RUNS_OF_FIT or reasons:
        groups = examples.runs.table["job_group"].nunique()
        reasons.append(
            f"got {len(examples.runs)} runs in {groups} job groups, {len(trusted)} of them beyond doubt; expected "
            f"{LEAST_RUNS_OF_FIT} to fit on and 1 to test, beyond doubt, in every split of protocols.names. Few runs "
            "are for python -m gnn_predictor.calibrate; the shipped runs do not join a table given as corpus.runs"
        )
        raise JobError(reasons, f"corpus {corpus}")


@dataclass(frozen=True)
class Protocol:
    """A protocol with the fits it needs, by split; ``blind`` are those of B3."""

    name: str
    splits: tuple[Split, ...]
    shop: Workshop
    tasks: Mapping[str, list[FitTask]]
    blind_shop: Workshop | None
    blind: Mapping[str, list[FitTask]]
    regression: RunRegression

    @classmethod
    def plan(
        cls, name: str, each: Sequence[Split], shop: Workshop, blind_shop: Workshop | None,
        settings: FitSettings, members: int, regression: RunRegression,
    ) -> Protocol:  # fmt: skip
        """The fits of all splits, not yet run."""
        tasks = {split.name: split_tasks(split, shop, settings, members) for split in each}
        blind = {
            split: [replace(task, name=f"B3-{task.name}") for task in of_split[:1]] if blind_shop else []
            for split, of_split in tasks.items()
        }
        return cls(name, tuple(each), shop, tasks, blind_shop, blind, regression)

    @functools.cached_property
    def processes(self) -> Mapping[str, GaussianProcess | None]:
        """What each split's training runs say of others."""
        fitted = self.regression.fit_each([split.train for split in self.splits], self.shop.num_workers)
        return dict(zip((split.name for split in self.splits), fitted, strict=True))

    def network_errors(self, jobs: pd.DataFrame) -> dict[str, float]:
        """The network's error by split, as P1's held-out rows ``jobs`` have it, but for those of the split itself."""
        names = self.shop.runs.table["run_id"]
        return network_errors(jobs, {split.name: set(names.iloc[list(split.test)]) for split in self.splits})

    def held_out(self) -> pd.DataFrame:
        """Every test row with both estimates, ``distance`` from its split's training rows, ``protocol`` and ``split``.

        ``network_s`` and ``network_spread`` are the network's, ``runs_s`` and ``runs_deviation`` the measured runs';
        with B3 there is ``baseline_b3_s`` too.
        """
        return pd.concat([self._split(split) for split in self.splits]).reset_index(drop=True)

    def _split(self, split: Split) -> pd.DataFrame:
        rows = np.array(split.test, dtype=np.int64)
        test = self.shop.runs.select(rows)
        known = self._known(split, test)
        share = known.population_share if known else None
        predicted = predict_graphs(trained(self.tasks[split.name], self.shop), test.graphs, share)
        table = pd.concat([test.table, predicted], axis=1).assign(protocol=self.name, split=split.name)
        table["runs_s"] = np.exp(known.log_seconds) if known else table["network_s"]
        table["runs_deviation"] = known.deviation if known else _NO_IDEA
        table["distance"] = self._distances(split, test)
        if self.blind_shop is not None:
            blind = trained(self.blind[split.name], self.blind_shop)
            graphs = self.blind_shop.runs.select(rows).graphs
            table[f"{BASELINE_PREFIX}b3_s"] = predict_graphs(blind, graphs)["network_s"]
        return table

    def _known(self, split: Split, test: RunExamples) -> RunsEstimate | None:
        """What the split's training runs say of the test's; ``None`` where they are too few to say anything."""
        process = self.processes[split.name]
        if process is None:
            return None
        precisions = test.table["precision_label"].tolist()
        return MeasuredRuns(process, self.regression.blend).estimate(test.graphs, precisions)

    def _distances(self, split: Split, test: RunExamples) -> Floats:
        train = self.shop.runs.select(np.array(split.train, dtype=np.int64))
        seen, unseen = train.table["precision_label"].tolist(), test.table["precision_label"].tolist()
        names = sorted(set(seen))
        return TrainingPoints.of(train.graphs, seen, names).distances(test.graphs, unseen, names)

    def unseen_operators(self) -> dict[str, Any]:
        """Errors on the operators that a split did not see."""
        operators = self.shop.operators
        parts = []
        for split in self.splits:
            tasks = self.tasks[split.name]
            unseen = np.ones(len(operators), dtype=bool)
            unseen[list(tasks[0].operators)] = False
            parts.append(operator_errors(trained(tasks, self.shop), operators, unseen))
        return operator_figures(pd.concat(parts))


def protocol_metrics(
    protocol: Protocol, held_out: pd.DataFrame, examples: Examples, known: pd.DataFrame
) -> dict[str, Any]:
    """The figures of a protocol, the baselines' beside them, and the MAPE averaged over what P2 to P5 leave out.

    ``held_out`` are its rows, blended, but those whose time is in doubt, ``known`` those of all protocols; no row's
    interval is calibrated on a run of its own split. ``parts``: the errors of each of the two estimates alone.
    """
    table = held_out.rename(columns={"predicted_s": "predicted_iter_time_s"})
    half_width = left_out_half_widths(known, protocol.name, Interval().level).set_axis(table.index)
    table["predicted_low_s"] = table["predicted_iter_time_s"] * np.exp(-half_width)
    table["predicted_high_s"] = table["predicted_iter_time_s"] * np.exp(half_width)
    table = table.assign(status="ok", in_domain=True, predicted_peak_mem_gb=np.nan)
    table = table.join(_baselines(protocol, table, examples))
    figures = evaluation_metrics(table)
    figures["interval"] |= coverage_figures(table, half_width)
    figures["parts"] = {name: _part_figures(table, f"{name}_s") for name in ("network", "runs")}
    predicted = {"network": "predicted_iter_time_s"} | {
        column.removeprefix(BASELINE_PREFIX).removesuffix("_s"): column
        for column in table.columns
        if column.startswith(BASELINE_PREFIX)
    }
    if left_out := LEFT_OUT.get(protocol.name):
        figures["macro_mape_over_left_out_percent"] = {
            name: macro_mape(table["iter_time_s"], table[column], table[left_out].tolist())
            for name, column in predicted.items()
        }
    return figures


def _part_figures(table: pd.DataFrame, column: str) -> dict[str, Any]:
    sources = table["source_id"].tolist()
    return error_figures(table["iter_time_s"], table[column]) | {
        "macro_mape_by_source_percent": macro_mape(table["iter_time_s"], table[column], sources)
    }


def network_error_of(jobs: pd.DataFrame) -> float:
    """The network's error under which these held-out rows are estimated best; a usual one without rows."""
    if jobs.empty:
        return Blend().network_error
    columns = ("network_s", "runs_s", "iter_time_s")
    network, runs, measured = (np.log(jobs[column].to_numpy(float)) for column in columns)
    return best_network_error(network, runs, jobs["runs_deviation"].to_numpy(float), measured)


def network_errors(jobs: pd.DataFrame, runs_of: Mapping[str, set[str]]) -> dict[str, float]:
    """The network's error by split, as held-out rows ``jobs`` have it, but for those of the split's own runs."""
    return {name: network_error_of(jobs[~jobs["run_id"].isin(runs)]) for name, runs in runs_of.items()}


def blended(held_out: pd.DataFrame, errors: Mapping[str, float]) -> pd.DataFrame:
    """Held-out rows with ``predicted_s``, ``log_error`` (of measured over predicted) and ``spread``."""
    log_network, log_runs = np.log(held_out["network_s"].to_numpy(float)), np.log(held_out["runs_s"].to_numpy(float))
    spread, deviation = held_out["network_spread"].to_numpy(float), held_out["runs_deviation"].to_numpy(float)
    error = np.asarray(held_out["split"].map(errors), dtype=np.float64)
    corrections = weighed(log_network, spread, log_runs, deviation, error)
    log_predicted = log_network + corrections.log_factor
    log_error = np.log(held_out["iter_time_s"].to_numpy(float)) - log_predicted
    return held_out.assign(predicted_s=np.exp(log_predicted), log_error=log_error, spread=corrections.spread)


def calibrated(
    held_out: pd.DataFrame, half_width: pd.Series[float], examples: Examples
) -> tuple[dict[str, Any], ErrorCovariance]:
    """What a few runs of every source are worth that P5 held out, and how the errors on one of all sources go together.

    ``held_out`` are P5's rows, blended, but those whose time is in doubt; ``half_width`` is of the same rows.
    """
    row_of = {run_id: row for row, run_id in enumerate(examples.runs.table["run_id"])}
    sources = []
    for name, own in held_out.assign(half_width=half_width.to_numpy()).groupby("split"):
        rows = np.array([row_of[run_id] for run_id in own["run_id"]], dtype=np.int64)
        runs = examples.runs.select(rows)
        placed = PlacedJobs.of(runs.graphs, runs.table["precision_label"].tolist())
        errors = ClusterErrors(placed, own["log_error"].to_numpy(float), runs.table["job_group"].to_numpy(str))
        jobs = tuple(job for row in rows if (job := examples.measurements[row].job) is not None)
        sources.append(HeldOutSource(str(name), errors, jobs, own["half_width"].to_numpy(float)))
    return calibrated_figures(sources), learn_covariance([source.errors for source in sources])


def doubtful_figures(held_out: pd.DataFrame) -> dict[str, Any]:
    """Errors on the rows whose time is in doubt, which are predicted like all others, and how many for which reason."""
    rows = held_out[held_out["doubt"] != ""]
    reasons = {str(reason): len(part) for reason, part in rows.groupby("doubt")}
    return error_figures(rows["iter_time_s"], rows["predicted_s"]) | {"reasons": reasons}


def _baselines(protocol: Protocol, table: pd.DataFrame, examples: Examples) -> pd.DataFrame:
    """B0-B2 for every held-out row, fitted on the rows its split was trained on."""
    reference = pd.DataFrame(list(examples.reference))
    by_run = reference.set_index("run_id")
    parts = []
    for split in protocol.splits:
        rows = table[table["split"] == split.name]
        own = by_run.loc[rows["run_id"]].reset_index().set_index(rows.index)
        parts.append(fitted_predictions(reference.iloc[list(split.train)], own))
    predicted = pd.concat(parts).loc[table.index, list(BASELINES)]
    return predicted.rename(columns=lambda name: f"{BASELINE_PREFIX}{name}_s")


def interval_of(known: pd.DataFrame, there: Interval) -> Interval:
    """The interval that covers 90% of unseen jobs, in spreads: by distance from the held-out rows of all protocols.

    ``low`` and ``high``, for want of a distance, from P1's. Without P1, whose jobs are the nearest, all stays as it is.
    """
    jobs = known[known["protocol"] == "P1"]
    if jobs.empty:
        return there
    factor = conformal_factor(jobs["log_error"].to_numpy(float), jobs["spread"].to_numpy(float), there.level)
    return there.model_copy(update={"low": factor, "high": factor, "by_distance": fit_widening(known, there.level)})
