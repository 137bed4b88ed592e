"""Network and measured runs: the surer of the two counts more, and the answer lies between them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.blending import SOURCE_DEVIATION, Blend, RunsEstimate, best_network_error, weighed
from gnn_predictor.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from gnn_predictor.checkpoint_files import RUNS_FILE
from gnn_predictor.features import GraphArrays, featurize
from gnn_predictor.gaussian_process import GaussianProcess, Kernel
from gnn_predictor.prediction import Prediction, predict
from gnn_predictor.whole_job import WholeJobs

JobOf = Callable[..., TrainingJob]


def _one(value: float) -> np.ndarray:
    return np.array([value])


@given(
    network=st.floats(-5, 5), runs=st.floats(-5, 5), deviation=st.floats(1e-4, 1e3), error=st.floats(0.02, 0.7),
    spread=st.floats(0.01, 0.5),
)  # fmt: skip
def test_the_answer_lies_between_both(
    network: float, runs: float, deviation: float, error: float, spread: float
) -> None:
    found = weighed(_one(network), _one(spread), _one(runs), _one(deviation), error)
    answer = network + found.log_factor[0]
    assert min(network, runs) - 1e-9 <= answer <= max(network, runs) + 1e-9
    assert 0 <= found.share[0] <= 1
    surer = weighed(_one(network), _one(spread), _one(runs), _one(deviation / 2), error)
    assert surer.share[0] >= found.share[0]
    assert found.share[0] == pytest.approx(1 / (1 + (deviation / error) ** 2))


@given(nearer=st.floats(0, 5), farther=st.floats(0, 5))
def test_the_population_counts_more_the_farther_measured_runs_are(nearer: float, farther: float) -> None:
    shares = RunsEstimate(np.zeros(2), np.sort([nearer, farther])).population_share
    assert 0 <= shares[0] <= shares[1] <= 1
    at_a_source = RunsEstimate(np.zeros(1), np.array([SOURCE_DEVIATION])).population_share
    assert at_a_source[0] == pytest.approx(0.5)


def test_equal_variances_weigh_equally_and_none_is_believed_alone() -> None:
    found = weighed(_one(0.0), _one(0.1), _one(1.0), _one(0.2), 0.2)
    assert found.log_factor[0] == pytest.approx(0.5)
    assert weighed(_one(0.0), _one(0.1), _one(1.0), _one(1e3), 0.2).log_factor[0] == pytest.approx(0.0, abs=1e-6)
    assert weighed(_one(0.0), _one(0.1), _one(1.0), _one(1e-4), 0.2).spread[0] < 1e-3


def test_the_error_of_the_network_is_found_from_held_out_jobs() -> None:
    generator = np.random.default_rng(0)
    measured = generator.normal(0, 1, 20000)
    deviation = generator.uniform(0.02, 0.5, 20000)
    runs = measured + generator.normal(0, 1, 20000) * deviation
    for error in (0.05, 0.15, 0.4):
        network = measured + generator.normal(0, error, 20000)
        assert best_network_error(network, runs, deviation, measured) == pytest.approx(error, rel=0.3)


def _graph(job: TrainingJob) -> GraphArrays:
    job = job.resolved()
    return featurize(job, build_graph(job), rank_layout(job))


@pytest.fixture(scope="module")
def knowing(job_of: JobOf, untrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The untrained checkpoint with one measured run: the small job, which took 7 s."""
    base = load_checkpoint(untrained)
    job = job_of().resolved()
    jobs = WholeJobs.of([_graph(job)])
    blend = Blend(network_error=0.2, gpus=(job.cluster.gpu.name,), precisions=(job.precision.label,))
    count = jobs.coordinates.shape[1]
    plain = torch.float64
    kernel = Kernel(
        torch.arange(count), torch.full((1, count), 0.5, dtype=plain), torch.ones(1, 2, dtype=plain),
        torch.tensor([0.5], dtype=plain), torch.tensor(1e-4, dtype=plain), torch.tensor(0.0, dtype=plain),
    )  # fmt: skip
    codes = blend.names.codes([job.cluster.gpu.name], [job.precision.label])
    process = GaussianProcess.of(kernel, jobs, codes, torch.tensor([7.0], dtype=plain).log())
    config = base.config.model_copy(update={"blend": blend})
    path = tmp_path_factory.mktemp("knowing") / "knowing"
    return load_checkpoint(save_checkpoint(path, replace(base, config=config, process=process), ""))


def test_a_job_that_was_measured_takes_what_was_measured(job_of: JobOf, knowing: Checkpoint, untrained: Path) -> None:
    plain, answer = predict(job_of(), checkpoint=untrained), predict(job_of(), checkpoint=knowing)
    assert answer.iteration_time_s == pytest.approx(7.0, rel=0.03)
    assert answer.iteration_time_s != pytest.approx(plain.iteration_time_s, rel=0.1)
    assert answer.provenance["measured_runs_share"] > 0.99
    assert "measured_runs_share" not in plain.provenance
    factor = answer.iteration_time_s / plain.iteration_time_s
    for scaled, before in zip(_parts(answer), _parts(plain), strict=True):
        assert scaled == pytest.approx(before * factor, rel=1e-4)


def _parts(answer: Prediction) -> list[float]:
    parts = answer.breakdown
    kinds = [*parts.by_kind.values(), *parts.exposed_communication.values(), *parts.overlapped_communication.values()]
    return [*kinds, *(stage.forward_s for stage in answer.stages), *(stage.backward_s for stage in answer.stages)]


def test_a_job_unlike_any_that_was_measured_is_the_networks(
    job_of: JobOf, knowing: Checkpoint, untrained: Path
) -> None:
    unlike = job_of(
        model={"hidden_size": 8192, "num_layers": 32}, cluster={"gpu": "H100-SXM5-80GB"}, precision="fp8_mixed",
        parallel={"tensor": 8},
    )  # fmt: skip
    plain, answer = (predict(unlike, checkpoint=each, force=True) for each in (untrained, knowing))
    assert answer.iteration_time_s == pytest.approx(plain.iteration_time_s, rel=0.2)
    assert answer.provenance["measured_runs_share"] < 0.1


def test_alone_and_among_others_a_job_has_one_answer(job_of: JobOf, knowing: Checkpoint) -> None:
    jobs = [job_of(batch={"micro_batch_size": micro}) for micro in (1, 2, 4)]
    together = predict(jobs, checkpoint=knowing)
    for job, answer in zip(jobs, together, strict=True):
        assert predict(job, checkpoint=knowing).iteration_time_s == pytest.approx(answer.iteration_time_s, rel=1e-6)


@pytest.mark.parametrize("change", [
    {"pulls": torch.zeros(2)}, {"columns": torch.tensor([9999])}, {"weights": torch.ones(2, 3)}, {"codes": None},
])  # fmt: skip
def test_runs_that_do_not_fit_are_refused(
    change: dict[str, torch.Tensor | None], knowing: Checkpoint, tmp_path: Path
) -> None:
    assert knowing.path is not None
    assert knowing.process is not None
    folder = tmp_path / "broken"
    shutil.copytree(knowing.path, folder)
    tensors = {name: each for name, each in {**knowing.process.tensors(), **change}.items() if each is not None}
    if "columns" in change:
        tensors |= {"points": torch.ones(1, 1), "weights": torch.ones(1, 1)}
    safetensors.torch.save_file({name: each.contiguous() for name, each in tensors.items()}, folder / RUNS_FILE)
    with pytest.raises(CheckpointError, match=rf"{RUNS_FILE}.*{next(iter(change))}"):
        load_checkpoint(folder)


def test_physics_of_a_whole_job(job_of: JobOf) -> None:
    """More work or fewer GPUs is longer; the pipeline's bubble is in it: (stages - 1) microbatches."""

    def seconds(**changes: object) -> float:
        return math.exp(WholeJobs.of([_graph(job_of(**changes))]).log_physical_s[0].item())

    assert seconds(batch={"global_batch_size": 128}) == pytest.approx(2 * seconds(), rel=0.1)
    assert seconds(model={"num_layers": 16}) > 1.6 * seconds()
    deep = {"pipeline": 4, "schedule": "1f1b"}
    few, many = (seconds(parallel=deep, batch={"global_batch_size": size}) for size in (16, 64))
    overhead = 3e-3
    assert (many - overhead) / (few - overhead) == pytest.approx((16 + 3) / (4 + 3), rel=0.1)  # by microbatches
