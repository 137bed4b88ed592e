"""Rank layout: groups, the links they cross, stages, and the arithmetic of layouts that do not divide."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_builder.job.errors import CannotRunError
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout, unsupported_formats
from dataset_builder.tracing.trace import build_graph


def job(parallel: dict[str, Any], nodes: int = 8, **changes: Any) -> TrainingJob:
    data: dict[str, Any] = {
        "model": {"preset": "llama3-70b"},
        "batch": {"seq_length": 4096, "micro_batch_size": 1, "global_batch_size": 256},
        "cluster": {"gpu": "H100-SXM5-80GB", "num_nodes": nodes, "gpus_per_node": 8},
        "parallel": parallel,
    }
    for key, change in changes.items():
        data[key] = {**data[key], **change} if isinstance(data.get(key), dict) and key != "model" else change
    return TrainingJob.parse(data)


def reasons(given: TrainingJob) -> str:
    with pytest.raises(CannotRunError) as caught:
        rank_layout(given)
    assert caught.value.exit_code == 4
    return "\n".join(caught.value.reasons)


def test_a_layout_that_needs_more_gpus_says_the_product() -> None:
    eight = job({"tensor": 8, "pipeline": 2}, nodes=1, batch={"global_batch_size": 1})
    assert "8 GPUs given, 16 = TP8 x PP2 x DP1 needed" in reasons(eight)
    assert "64 GPUs given, 128 = TP8 x PP2 x CP2 x DP4 needed" in reasons(
        job({"tensor": 8, "pipeline": 2, "context": 2, "data": 4})
    )
    layout = rank_layout(job({"tensor": 8, "pipeline": 2}, nodes=2, batch={"global_batch_size": 1}))
    assert (layout.data, layout.num_microbatches) == (1, 1)


def test_every_problem_of_a_layout_is_named() -> None:
    text = reasons(
        job(
            {"tensor": 3, "pipeline": 7, "expert": 2, "sequence_parallel": True},
            batch={"global_batch_size": 7, "micro_batch_size": 2},
        )
    )
    for expected in (
        "64 GPUs given, 63 = TP3 x PP7 x DP3 needed",
        "the model has no experts",
        "batch.global_batch_size: 7 is not a multiple of 6 = DP3 x micro_batch_size 2",
        "batch.seq_length: 4096 / CP1 is not a multiple of TP3",
        "TP3 does not divide num_attention_heads 64",
        "80 layers do not divide into 7 = PP7",
        "layers_per_stage: [12, 12, 12, 11, 11, 11, 11]",
    ):
        assert expected in text


def test_groups_and_links_follow_megatrons_rank_order() -> None:
    layout = rank_layout(job({"tensor": 4, "pipeline": 8, "virtual_pipeline": 5, "sharding": "zero1"}))
    assert (layout.data, layout.num_microbatches, layout.shard_size) == (2, 128, 2)
    seen = {axis: (group.size, group.nodes, group.link.name) for axis, group in layout.groups.items()}
    assert seen == {
        "tensor": (4, 1, "nvlink4"),
        "context": (1, 1, "nvlink4"),
        "data": (2, 1, "nvlink4"),
        "expert": (1, 1, "nvlink4"),
        "pipeline": (8, 8, "ib-ndr-8x400"),
    }
    assert layout.stage_layers[0] == (0, 1, 16, 17, 32, 33, 48, 49, 64, 65)
    assert layout.chunk_layers[7][4] == (78, 79)


def test_two_stages_in_one_node_talk_over_its_own_link() -> None:
    layout = rank_layout(job({"tensor": 2, "pipeline": 4}, nodes=1, batch={"global_batch_size": 8}))
    assert layout.groups["pipeline"].link.name == "nvlink4"


def test_a_group_across_nodes_of_nvl72_stays_on_nvlink_until_the_rack_ends() -> None:
    def data_link(nodes: int) -> tuple[str, int]:
        given = job(
            {"tensor": 4}, nodes=nodes, batch={"global_batch_size": 4 * nodes},
            cluster={"gpu": "GB200-186GB", "gpus_per_node": 4},
        )  # fmt: skip
        group = rank_layout(given).groups["data"]
        return group.link.name, group.nodes

    assert data_link(16) == ("nvlink5-nvl72", 16)
    assert data_link(18) == ("nvlink5-nvl72", 18)
    assert data_link(36) == ("ib-ndr-4x400", 36)


def test_a_bridge_joins_two_cards_only() -> None:
    def link_of(tensor: int) -> str:
        given = job(
            {"tensor": tensor}, nodes=1, batch={"global_batch_size": 8},
            cluster={"gpu": "H100-NVL-94GB", "gpus_per_node": 8, "intra_node": "nvlink-pair+pcie5"},
        )  # fmt: skip
        return rank_layout(given).groups["tensor"].link.name

    assert (link_of(2), link_of(4)) == ("nvlink-pair+pcie5", "pcie5")


def test_experts_are_spread_over_the_ranks_of_a_stage() -> None:
    given = job(
        {"tensor": 1, "pipeline": 2, "expert": 8, "sharding": "zero1"}, nodes=4, model={"preset": "qwen3-30b-a3b"}
    )
    layout = rank_layout(given)
    assert (layout.data, layout.groups["expert"].size, layout.groups["expert"].nodes) == (16, 8, 1)
    assert (layout.expert_data_group.size, layout.expert_data_group.nodes) == (2, 2)
    assert "EP24 does not divide num_experts 128" in reasons(
        job({"expert": 24}, nodes=3, model={"preset": "qwen3-30b-a3b"}, batch={"global_batch_size": 24})
    )


def test_rails_share_a_nodes_adapters_among_the_ranks_of_a_group() -> None:
    """A ring over nodes enters and leaves each through the adapters of all its ranks there."""
    eight = rank_layout(job({})).groups["data"]  # all 64 ranks: eight of each node
    one = rank_layout(job({"tensor": 8})).groups["data"]  # one rank of each of eight nodes
    assert (eight.nodes, one.nodes, eight.link, len(one.tiers)) == (8, 8, one.link, 1)
    assert one.ring_bytes_per_s == one.link.bytes_per_s_per_gpu
    inner = eight.tiers[0].link
    assert eight.ring_bytes_per_s == min(8 * one.ring_bytes_per_s, inner.bytes_per_s_per_gpu)


def test_a_ring_over_racks_goes_through_the_adapters_of_a_whole_rack() -> None:
    given = job(
        {"tensor": 4}, nodes=64, batch={"global_batch_size": 64}, cluster={"gpu": "GB200-186GB", "gpus_per_node": 4}
    )
    group = rank_layout(given).groups["data"]  # one rank of each of 64 trays in 4 racks of 64 GPUs
    assert [(tier.link.name, tier.ranks) for tier in group.tiers] == [("nvlink5-nvl72", 1), ("ib-ndr-4x400", 16)]
    assert group.ring_bytes_per_s == 16 * 50e9
    in_a_rack = job({"expert": 32}, nodes=64, model={"preset": "qwen3-30b-a3b"}, cluster={
        "gpu": "GB200-186GB", "gpus_per_node": 4, "inter_node": "nvlink5-nvl72",
    })  # fmt: skip
    assert [tier.link.name for tier in rank_layout(in_a_rack).groups["expert"].tiers] == ["nvlink5-nvl72"]


def test_tokens_cross_the_network_once_a_node() -> None:
    """Eight copies a token, drawn over 16 ranks of two nodes: half of those for the other node, all in one message."""
    experts = rank_layout(job({"expert": 16}, nodes=2, model={"preset": "qwen3-30b-a3b"})).groups["expert"]
    assert experts.copies == 8
    reached = 2 * (1 - 0.5**8)  # expected nodes of two that eight draws reach
    assert experts.exchange_bytes_per_s == pytest.approx(50e9 / (reached / 8 / 2))
    plain = replace(experts, copies=1)
    assert plain.exchange_bytes_per_s == pytest.approx(50e9 / 0.5)
    in_a_node = rank_layout(job({"expert": 8}, nodes=2, model={"preset": "qwen3-30b-a3b"})).groups["expert"]
    assert replace(in_a_node, copies=1).exchange_bytes_per_s == pytest.approx(450e9 / (7 / 8))


def test_a_message_is_priced_on_the_ranks_that_it_is_between() -> None:
    given = job(
        {"expert": 8, "sharding": "zero1"}, nodes=4, model={"preset": "qwen3-30b-a3b"}, batch={"global_batch_size": 32}
    )
    layout = rank_layout(given)
    groups = {node.module: layout.group_of(node) for node in build_graph(given).nodes if node.axis == "data"}
    assert groups["data.gradients"] is layout.groups["data"]
    assert groups["data.expert_gradients"] is layout.expert_data_group
    hybrid = job({"sharding": "hsdp"})
    layout = rank_layout(hybrid)
    by_kind = {node.kind: layout.group_of(node) for node in build_graph(hybrid).nodes if node.axis == "data"}
    shard, replica = layout.shard_group, layout.replica_group
    assert by_kind == {"all_gather": shard, "reduce_scatter": shard, "all_reduce": replica}


def test_hybrid_sharding_shards_within_a_node_by_default() -> None:
    layout = rank_layout(job({"sharding": "hsdp"}))
    assert (layout.shard_size, layout.shard_group.nodes) == (8, 1)
    assert (layout.replica_group.size, layout.replica_group.nodes) == (8, 8)
    assert "shard_size: 5 does not divide 64" in reasons(job({"sharding": "hsdp", "shard_size": 5}))


@pytest.mark.parametrize(
    ("parallel", "sizes"),
    [
        ({"pipeline": 4, "layers_per_stage": [21, 20, 20, 19]}, [21, 20, 20, 19]),
        ({"pipeline": 2, "virtual_pipeline": 2, "layers_per_stage": [44, 36]}, [44, 36]),
        ({"pipeline": 2, "virtual_pipeline": 2, "layers_per_stage": [22, 20, 20, 18]}, [42, 38]),
    ],
)
def test_uneven_stages(parallel: dict[str, Any], sizes: list[int]) -> None:
    layout = rank_layout(job(parallel))
    assert [len(layers) for layers in layout.stage_layers] == sizes
    assert sorted(layer for layers in layout.stage_layers for layer in layers) == list(range(80))


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"pipeline": 4, "layers_per_stage": [20, 20, 20, 21]}, "20 + 20 + 20 + 21 = 81, the model has 80"),
        ({"pipeline": 4, "layers_per_stage": [40, 40]}, "got 2 numbers; expected 4 = PP4"),
        ({"virtual_pipeline": 2}, "2 model chunks need pipeline of 2 or more"),
        ({"pipeline": 8, "virtual_pipeline": 3}, "do not divide into 24 = PP8 x virtual_pipeline 3"),
    ],
)
def test_splits_that_do_not_add_up(parallel: dict[str, Any], expected: str) -> None:
    assert expected in reasons(job(parallel))


def test_an_encoder_decoder_lines_up_both_stacks() -> None:
    given = job({"pipeline": 2}, nodes=1, model={"preset": "t5-3b"}, batch={"global_batch_size": 16})
    assert rank_layout(given).stage_layers == (tuple(range(24)), tuple(range(24, 48)))


def test_formats_without_hardware_are_named() -> None:
    v100 = job({}, cluster={"gpu": "V100-SXM2-32GB"})
    assert [text.split(":")[0] for text in unsupported_formats(v100)] == ["bf16"]
    assert "15.7 TFLOP/s" in unsupported_formats(v100)[0]
    hopper = job({}, precision="nvfp4")
    assert [text.split(":")[0] for text in unsupported_formats(hopper)] == ["nvfp4"]
    a100 = job({}, cluster={"gpu": "A100-SXM4-80GB"}, precision="fp8_mixed")
    assert [text.split(":")[0] for text in unsupported_formats(a100)] == ["fp8_e4m3"]
    assert not unsupported_formats(job({}, precision="fp8_rowwise"))
    assert not unsupported_formats(job({}, cluster={"gpu": "V100-SXM2-32GB"}, precision="fp32"))


_powers = st.sampled_from([1, 2, 4, 8])


@settings(max_examples=60, deadline=None)
@given(tensor=_powers, pipeline=_powers, context=_powers, data=_powers, per_node=st.sampled_from([1, 2, 4, 8, 16]))
def test_groups_match_a_count_over_all_ranks(
    tensor: int, pipeline: int, context: int, data: int, per_node: int
) -> None:
    world = tensor * pipeline * context * data
    if world % per_node:
        per_node = 1
    layout = rank_layout(
        job(
            {"tensor": tensor, "pipeline": pipeline, "context": context},
            cluster={"gpu": "A100", "num_nodes": world // per_node, "gpus_per_node": per_node},
        )
    )
    strides = {"tensor": 1, "context": tensor, "data": tensor, "pipeline": tensor * context * data}
    for axis, group in layout.groups.items():
        if axis == "expert":
            continue
        stride, size = strides[axis], group.size
        starts = [rank for rank in range(world) if (rank // stride) % size == 0]
        nodes = max(len({(rank + step * stride) // per_node for step in range(size)}) for rank in starts)
        assert group.nodes == nodes


def test_a_huge_cluster_is_laid_out_as_fast_as_a_small_one() -> None:
    layout = rank_layout(job({"tensor": 8, "pipeline": 8}, nodes=131072, batch={"global_batch_size": 16384}))
    assert (layout.data, layout.groups["data"].nodes) == (16384, 16384)


def test_absurd_sizes_are_answered_at_once() -> None:
    absurd = {"tensor": 10**12, "pipeline": 10_000, "virtual_pipeline": 10_000, "context": 10**12}
    given = job(absurd, nodes=10**15, cluster={"gpu": "H100", "gpus_per_node": 10_000})
    assert "80 layers are fewer than the 100000000 model chunks" in reasons(given)
