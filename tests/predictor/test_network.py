"""The network: one answer whatever the batch, physics where nothing was learnt, stage times that add up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.graph import COLLECTIVES
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor.batch import GraphBatch, collate
from gnn_predictor.dataset import OperatorExamples, graph_batch, run_data
from gnn_predictor.features import NUM_SLOTS, SLOTS, GraphArrays, featurize
from gnn_predictor.network import Ensemble, NetworkConfig, Predictor, stage_table

JobOf = Callable[..., TrainingJob]


def arrays(job: TrainingJob) -> GraphArrays:
    job = job.resolved()
    return featurize(job, build_graph(job), rank_layout(job))


@pytest.fixture(scope="module")
def graphs(job_of: JobOf) -> list[GraphArrays]:
    return [
        arrays(job_of()),
        arrays(job_of(parallel={"tensor": 2, "pipeline": 4}, precision="fp16_mixed")),
        arrays(job_of(parallel={"pipeline": 2, "virtual_pipeline": 2}, precision="fp32")),
    ]


def network(graph: GraphArrays, seed: int = 0, **settings: Any) -> Predictor:
    torch.manual_seed(seed)
    config = NetworkConfig.fitting(graph, (graph.device_name,), hidden=16, context=12, **settings)
    return Predictor(config).eval()


def test_a_batch_of_torch_geometric_equals_our_own(graphs: list[GraphArrays]) -> None:
    devices = (graphs[0].device_name,)
    ours = collate(graphs, devices)
    theirs = graph_batch(Batch.from_data_list([run_data(graph, devices, row) for row, graph in enumerate(graphs)]))
    for name in GraphBatch.__dataclass_fields__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine, other), name
        else:
            assert mine == other, name


def test_a_job_is_answered_the_same_alone_and_in_company(graphs: list[GraphArrays]) -> None:
    model = network(graphs[0])
    devices = model.config.devices
    with torch.inference_mode():
        together = model(collate(graphs, devices))[0]
        alone = torch.cat([model(collate([graph], devices))[0] for graph in graphs])
    assert torch.allclose(together, alone, rtol=1e-4)


def test_an_untrained_network_stays_near_the_roofline(graphs: list[GraphArrays]) -> None:
    model = network(graphs[0])
    with torch.inference_mode():
        times = model.node_times(collate(graphs, model.config.devices))
    roofline = torch.exp(collate(graphs, ()).log_roofline_s)
    assert ((times.seconds > roofline) & (times.seconds < 6 * roofline + 1e-4)).all()


def test_exposed_time_never_exceeds_a_message_and_is_all_of_a_kernel(job_of: JobOf) -> None:
    job = job_of(parallel={"tensor": 2}).resolved()
    graph = build_graph(job)
    batch = collate([featurize(job, graph, rank_layout(job))], ())
    with torch.inference_mode():
        times = network(arrays(job)).node_times(batch)
    is_message = torch.tensor([node.kind in COLLECTIVES for node in graph.nodes])
    assert is_message.any()
    assert (times.exposed_s[is_message] < times.seconds[is_message]).all()
    assert torch.equal(times.exposed_s[~is_message], times.seconds[~is_message])


def test_stage_times_are_sums_of_node_times(job_of: JobOf) -> None:
    job = job_of(parallel={"pipeline": 4}).resolved()
    graph = build_graph(job)
    batch = collate([featurize(job, graph, rank_layout(job))], ())
    model = network(arrays(job))
    with torch.inference_mode():
        times = model.node_times(batch)
        table = stage_table(batch, times)
    seconds = times.exposed_s.double().numpy()
    for stage, row in enumerate(batch.stage_rows[0]):
        for slot in ("forward", "backward"):
            of_slot = [n.phase == slot and n.kind not in COLLECTIVES for n in graph.nodes]
            expected = float(graph.repeats[stage] @ (seconds * np.array(of_slot)))
            assert float(table.slots[row, SLOTS.index(slot)]) == pytest.approx(expected, rel=1e-4)
    assert table.slots.shape[1] == NUM_SLOTS
    first, middle, last = (batch.stage_rows[0][i] for i in (0, 1, 3))
    assert table.forward_s[last] > table.forward_s[middle], "the head is on the last stage"
    assert table.forward_s[first] > table.forward_s[middle], "the embedding is on the first stage"


def test_an_ensemble_is_the_mean_of_its_members(graphs: list[GraphArrays]) -> None:
    members = [network(graphs[0], seed) for seed in (0, 1)]
    batch = collate(graphs[:1], members[0].config.devices)
    with torch.inference_mode():
        each = [member.node_times(batch).seconds for member in members]
        both = Ensemble(members).eval().node_times(batch).seconds
    assert torch.allclose(both, (each[0] + each[1]) / 2, rtol=1e-4)


def test_members_of_the_population_have_their_share_of_each_job(graphs: list[GraphArrays]) -> None:
    members = [network(graphs[0], seed) for seed in (0, 1, 2, 3)]
    batch = collate(graphs[:2], members[0].config.devices)
    share = torch.tensor([1.0, 0.25], dtype=torch.float64)
    with torch.inference_mode():
        each = torch.stack([member.node_times(batch).seconds for member in members])
        mixed = Ensemble(members).eval().node_times(batch, share).seconds
        alone = Ensemble(members[:1]).eval().node_times(batch, share).seconds
    of_population, others = (each[1] + each[3]) / 2, (each[0] + each[2]) / 2
    of_node = share[batch.node_graph].float()
    assert torch.allclose(mixed, of_node * of_population + (1 - of_node) * others, rtol=1e-4)
    assert torch.allclose(alone, each[0], rtol=1e-4)


def test_members_that_divide_a_sum_differently_do_not_shrink_it(graphs: list[GraphArrays]) -> None:
    members = [network(graphs[0], seed) for seed in (0, 1)]
    batch = collate(graphs[:1], members[0].config.devices)
    with torch.no_grad():
        for member in members:
            member.kernel.outputs.weight.mul_(200)  # each now has kernels it finds slow and kernels it finds fast
        each = [float(member(batch)[0]) for member in members]
        both = float(Ensemble(members).eval()(batch)[0])
    assert both == pytest.approx(sum(each) / 2, rel=0.02)


def test_an_ensemble_survives_its_state_dictionary(graphs: list[GraphArrays]) -> None:
    ensemble = Ensemble([network(graphs[0], seed) for seed in (0, 1)]).eval()
    again = Ensemble.from_tensors(ensemble.config, ensemble.state_dict())
    batch = collate(graphs, ensemble.config.devices)
    with torch.inference_mode():
        assert torch.equal(again(batch)[0], ensemble(batch)[0])


def test_gradients_reach_every_parameter_through_the_schedule(graphs: list[GraphArrays]) -> None:
    model = network(graphs[0], device_dropout=0.0, format_dropout=0.0, software_dropout=0.0, workload_dropout=0.0)
    model.train()
    seconds, times, _ = model(collate(graphs, model.config.devices))
    (seconds.log().sum() + times.log_spread.sum()).backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


@pytest.mark.parametrize(("bias", "of_wire"), [(-9.0, 0.8), (9.0, 4.0)])
def test_a_message_of_a_job_stays_near_its_time_on_the_wire(job_of: JobOf, bias: float, of_wire: float) -> None:
    """Whatever was learnt; its kernels, and the same message measured alone, have no such bound."""
    graph = arrays(job_of(parallel={"tensor": 2}))
    model = network(graph)
    with torch.no_grad():
        model.readout[-1].bias[0] = bias
    batch = collate([graph], model.config.devices)
    batch.launches.zero_()
    is_message = batch.is_overlappable > 0
    with torch.inference_mode():
        in_job = model.node_times(batch).seconds / torch.exp(batch.log_roofline_s)
        batch.workload[:, 0] = 0
        alone = model.node_times(batch).seconds / torch.exp(batch.log_roofline_s)
    torch.testing.assert_close(in_job[is_message], torch.full_like(in_job[is_message], of_wire), rtol=0.01, atol=0.0)
    for unbounded in (in_job[~is_message].log(), alone.log()):
        assert (unbounded.abs() > 3.5).all()
        assert (unbounded.sign() == math.copysign(1, bias)).all()


def test_a_librarys_vector_is_for_what_was_measured_in_it(
    graphs: list[GraphArrays], operators: OperatorExamples
) -> None:
    torch.manual_seed(0)
    devices, libraries = (graphs[0].device_name,), ("one", "other")
    model = Predictor(NetworkConfig.fitting(graphs[0], devices, libraries, hidden=16, context=12)).eval()
    batches = operators.batch(torch.arange(len(operators))), collate(graphs, devices)
    with torch.inference_mode():
        before = [model.node_times(batch).seconds for batch in batches]
        model.library.weight[1:] = torch.randn(2, 12)
        after = [model.node_times(batch).seconds for batch in batches]
    has_vector = operators.library[operators.place] > 0
    assert 0 < int(has_vector.sum()) < len(has_vector)
    assert torch.equal(before[0] != after[0], has_vector)
    assert torch.equal(before[1], after[1]), "a job names no library"


def test_a_time_stays_finite_for_absurd_features(graphs: list[GraphArrays]) -> None:
    model = network(graphs[0])
    batch = collate(graphs, model.config.devices)
    batch.node_features.mul_(1e6)
    batch.workload.mul_(-1e6)
    batch.hardware.mul_(1e3)
    with torch.inference_mode():
        seconds = model(batch)[0]
    assert torch.isfinite(seconds).all()
    assert (seconds > 0).all()
