"""One training run of one network: epochs over measured runs with measured operators beside them, resumable.

The state after every epoch (weights, optimizer, random generators) is one file, replaced atomically; a run that was
killed continues from it and ends with the same weights as one that was not.

Where several ranks train together (:mod:`gnn_predictor.ranks`) each computes its share of every batch. Loss and
gradients are those of the whole batch; only what training drops at random is drawn by each rank for its own rows.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dataset_builder.job.errors import JobError
from gnn_predictor import ranks
from gnn_predictor.batch import GraphBatch
from gnn_predictor.dataset import OperatorExamples, RunExamples, endless_rows, graph_batch, run_loader
from gnn_predictor.graph_store import in_parts
from gnn_predictor.network import NetworkConfig, Predictor
from gnn_predictor.objective import robust, source_weights, spread_loss
from gnn_predictor.source_effects import LEARNING_RATE_FACTOR, SourceEffects


@dataclass(frozen=True)
class FitSettings:
    """How a network is trained."""

    epochs: int = 60
    batch_size: int = 48
    operator_batch_size: int = 1536
    learning_rate: float = 3e-3
    weight_decay: float = 1e-3
    operator_weight: float = 0.5
    spread_weight: float = 0.05
    source_power: float = 0.5  # weight of a run: (runs of its source) ** -source_power
    average_from: float = 0.7  # weights are averaged over the last part of training
    source_effects: bool = False  # what is constant in a source's times is learnt beside the network, not by it
    seed: int = 0


def _scales(runs: RunExamples, operators: OperatorExamples) -> tuple[Tensor, Tensor]:
    """Mean and deviation of node features (half runs, half operators) and of workload features."""
    means = [_moments(_stacked(runs, "node_features")), _moments([operators.node_features])]
    mean = (means[0][0] + means[1][0]) / 2
    workload_mean, workload_variance = _moments(_stacked(runs, "workload"))
    variance = sum((var + (m - mean) ** 2) for m, var in means) / 2
    return (
        torch.stack([mean, _deviation(torch.as_tensor(variance))]),
        torch.stack([workload_mean, _deviation(workload_variance)]),
    )


def _stacked(runs: RunExamples, name: str) -> Iterator[Tensor]:
    """An array of all graphs, [rows, feature], in parts that fit in memory."""
    for graphs in in_parts(runs.graphs):
        yield torch.from_numpy(np.concatenate([getattr(graph, name) for graph in graphs]))


def _moments(parts: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of every column over all parts, merged pairwise (Chan, Golub, LeVeque 1979)."""
    # One row alone varies by nothing, which torch calls NaN.
    each = ((len(part), part.mean(0), part.var(0).nan_to_num()) for part in parts)
    count, mean, variance = next(each)
    for more, its_mean, its_variance in each:
        whole, apart = count + more, its_mean - mean
        squares = variance * (count - 1) + its_variance * (more - 1) + apart**2 * count * more / whole
        count, mean, variance = whole, mean + apart * more / whole, squares / (whole - 1)
    return mean, variance


def _deviation(variance: Tensor) -> Tensor:
    """A deviation to divide by: a column that hardly varies must not blow up elsewhere, one that never did is mute."""
    deviation = variance.sqrt()
    return torch.where(deviation < 1e-4, torch.full_like(deviation, 1e6), deviation.clamp(min=0.05))


EpochReport = Callable[[int, dict[str, float]], None]


def fit(
    start: NetworkConfig | Predictor,
    settings: FitSettings,
    runs: RunExamples,
    operators: OperatorExamples,
    state_file: Path | None = None,
    report: EpochReport = lambda epoch, metrics: None,
    name: str = "fit",
) -> Predictor:
    """Trains a new network of a configuration, or a copy of a network, on these runs; returns it in evaluation mode.

    A copy keeps the scales of its inputs, which its weights were learnt with. JobError, naming the fit, where a loss is
    no longer finite; the epoch before it stays saved.
    """
    training = _Training(start, settings, runs, operators)
    if state_file is not None:
        training.load(state_file)
    while training.epoch < settings.epochs:
        epoch, metrics = training.epoch, training.run_epoch()
        if wrong := [f"{key} is {value}" for key, value in metrics.items() if not math.isfinite(value)]:
            reason = f"epoch {epoch + 1} of {settings.epochs}: {', '.join(wrong)}; expected finite losses"
            raise JobError([f"{reason}: try a fit.learning_rate below {settings.learning_rate:g}"], name)
        if ranks.is_leader():
            report(epoch, metrics)
        if state_file is not None:
            training.save(state_file)
    return training.result()


class _BothBatches(nn.Module):
    """Runs and operators in one forward pass, as DistributedDataParallel wants it."""

    def __init__(self, network: Predictor, effects: SourceEffects | None) -> None:
        super().__init__()
        self.network = network
        self.effects = effects

    def forward(self, runs: GraphBatch, rows: Tensor, operators: GraphBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log seconds of an iteration, log factor of the source and log spread of the runs at ``rows`` [B], seconds of
        the operators [O]."""
        seconds, times, _ = self.network(runs)
        log_factor = torch.zeros_like(seconds) if self.effects is None else self.effects(rows)
        return seconds.log(), log_factor, times.log_spread, self.network.node_times(operators).seconds


class _Training:
    """The mutable state of one training run."""

    def __init__(
        self, start: NetworkConfig | Predictor, settings: FitSettings, runs: RunExamples, operators: OperatorExamples
    ) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.operators = operators
        self.generator = torch.Generator().manual_seed(settings.seed)
        if isinstance(start, Predictor):
            self.network = copy.deepcopy(start)
        else:
            self.network = Predictor(start)
            self.network.set_scales(*_scales(runs, operators))
        self.average = torch.optim.swa_utils.AveragedModel(self.network)
        self.loader = run_loader(runs.graphs, self.network.config.devices, settings.batch_size, self.generator)
        self.log_seconds = torch.tensor(runs.table["iter_time_s"].to_numpy()).log().float()
        sources = runs.table["source_id"].tolist()
        self.weight = source_weights(sources, settings.source_power)
        self.effects = SourceEffects(sources, self.weight) if settings.source_effects else None
        self.optimizer = self._new_optimizer()
        self.operator_weight = source_weights(
            (operators.table["source_id"] + operators.table["kind"] + operators.table["dtype"]).tolist(), 0.5
        )
        self.num_steps = settings.epochs * len(self.loader)
        self.step = 0
        self.epoch = 0
        self.model: nn.Module = _BothBatches(self.network, self.effects)
        if ranks.count() > 1:
            self.model = DistributedDataParallel(self.model)
            self._seed_rank()

    def _new_optimizer(self) -> torch.optim.Optimizer:
        """AdamW; ``rate`` is a group's learning rate at its highest."""
        rate = self.settings.learning_rate
        groups: list[dict[str, Any]] = [{"params": list(self.network.parameters()), "rate": rate}]
        if self.effects is not None:
            own = {"rate": LEARNING_RATE_FACTOR * rate, "weight_decay": 0.0}
            groups.append({"params": list(self.effects.parameters()), **own})
        return torch.optim.AdamW(groups, lr=rate, weight_decay=self.settings.weight_decay, fused=True)

    def _seed_rank(self) -> None:
        """What a rank drops at random is its own; rank 0 alone goes on as a single process would."""
        if not ranks.is_leader():
            torch.manual_seed((self.settings.seed << 32) + (self.epoch << 16) + ranks.rank())

    def run_epoch(self) -> dict[str, float]:
        """One pass over the runs; returns mean losses and the learning rate."""
        self.network.train()
        started = time.perf_counter()
        rows = endless_rows(self.operator_weight, self.settings.operator_batch_size, self.generator)
        losses = []
        for data in self.loader:
            self._set_learning_rate()
            losses.append(self._step(data, next(rows)))
            self.step += 1
        if self.epoch >= self.settings.average_from * self.settings.epochs:
            self.average.update_parameters(self.network)
        self.epoch += 1
        run, operator, error = ranks.total(torch.tensor(losses, dtype=torch.float64)).mean(0).tolist()
        return {"run_loss": run, "operator_loss": operator, "run_abs_log_error": error,
                "learning_rate": self.optimizer.param_groups[0]["lr"],
                "epoch_s": time.perf_counter() - started}  # fmt: skip

    def _step(self, data: Any, operator_rows: Tensor) -> tuple[float, float, float]:
        """One update; returns this rank's part of both losses and of the mean absolute log error."""
        operator_rows = operator_rows[ranks.share(len(operator_rows))]
        batch, operators = graph_batch(data), self.operators.batch(operator_rows)
        log_seconds, log_factor, log_spread, operator_s = self.model(batch, data.row, operators)
        network_error = log_seconds - self.log_seconds[data.row]  # what a source that nobody knows will have
        error = network_error + log_factor
        operator_error = operator_s.log() - self.operators.log_seconds[operator_rows]
        weight, one = self.weight[data.row], torch.ones_like(operator_error)
        mine = torch.stack([weight.sum(), torch.tensor(float(len(error))), one.sum()])
        whole, num_runs, num_operators = ranks.total(mine)
        run_loss = robust(error, weight, whole)
        operator_loss = robust(operator_error, one, num_operators)
        loss = (
            run_loss
            + self.settings.operator_weight * operator_loss
            + self.settings.spread_weight * spread_loss(network_error, log_spread, weight, whole)
        )
        if self.effects is not None:
            loss = loss + self.effects.penalty() / ranks.count()
        self.optimizer.zero_grad()
        (loss * ranks.count()).backward()  # of which the ranks' mean is taken
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        return run_loss.item(), operator_loss.item(), (error.detach().abs().sum() / num_runs).item()

    def _set_learning_rate(self) -> None:
        """Linear warm-up over the first 3% of the steps, then a cosine to 2%."""
        progress = self.step / max(self.num_steps, 1)
        factor = progress / 0.03 if progress < 0.03 else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * max(factor, 0.01)

    def result(self) -> Predictor:
        """The averaged network, in evaluation mode."""
        averaged = self.average.module if self.average.n_averaged > 0 else self.network
        assert isinstance(averaged, Predictor)
        return averaged.eval()

    def save(self, path: Path) -> None:
        """Replaces the state file in one step, so that a kill leaves the last whole one; the leader writes."""
        random_states = ranks.gathered(torch.get_rng_state())
        if not ranks.is_leader():
            return
        state = {
            "epoch": self.epoch, "step": self.step, "network": self.network.state_dict(),
            "average": self.average.state_dict(), "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(), "torch": random_states,
            "effects": self.effects.state_dict() if self.effects is not None else {},
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".partial")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def load(self, path: Path) -> None:
        """Continues from the state file of the same configuration, if there is one.

        Another number of ranks may have written it; then what they drop at random is drawn anew.
        """
        state = ranks.from_leader(lambda: torch.load(path, weights_only=True) if path.exists() else None)
        if state is None:
            return
        self.network.load_state_dict(state["network"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.effects is not None:
            self.effects.load_state_dict(state["effects"])
        self.generator.set_state(state["generator"])
        self.epoch, self.step = state["epoch"], state["step"]
        known = state["torch"]
        torch.set_rng_state(known[ranks.rank() % len(known)].clone())  # a view that does not start at 0 crashes torch
        if len(known) != ranks.count():
            self._seed_rank()
