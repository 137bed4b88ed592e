"""Graphs of whole jobs: what they hold, how they scale, and that nothing is allocated for it."""

import functools
import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_builder.job.flops import model_flops_per_sequence
from dataset_builder.job.model import ModelSpec, num_parameters
from dataset_builder.job.presets import preset_names
from dataset_builder.job.schema import TrainingJob, attention_kernel
from dataset_builder.tracing.graph import COLLECTIVES, KINDS
from dataset_builder.tracing.trace import build_graph

BASE = {
    "model": {"preset": "llama3-8b"},
    "batch": {"seq_length": 2048, "micro_batch_size": 1, "global_batch_size": 64},
    "cluster": {"gpu": "H100-SXM5-80GB", "num_nodes": 8, "gpus_per_node": 8},
    "software": {"framework": "megatron-core"},
}


def graph(**changes):
    return build_graph(TrainingJob.parse({**BASE, **changes}))


def total(found, what, *kinds, stage=0):
    counts = found.repeats[stage]
    return sum(getattr(n, what) * c for n, c in zip(found.nodes, counts, strict=True) if n.kind in kinds)


@pytest.mark.parametrize("name", preset_names())
def test_traced_parameters_are_the_models(name):
    one_gpu = {"gpu": "H100-SXM5-80GB", "num_nodes": 1, "gpus_per_node": 1}
    job = TrainingJob.parse({**BASE, "model": {"preset": name}, "cluster": one_gpu}).resolved()
    (stage,) = build_graph(job).stages
    assert stage.num_parameters == num_parameters(job.model)


@pytest.mark.parametrize("name", preset_names())
def test_traced_flops_are_the_models(name):
    """GEMMs and attention add up to the model's FLOPs, but for the scores that flash attention computes again."""
    one_gpu = {"gpu": "H100-SXM5-80GB", "num_nodes": 1, "gpus_per_node": 1}
    job = TrainingJob.parse({**BASE, "model": {"preset": name}, "cluster": one_gpu}).resolved()
    found = build_graph(job)
    again = sum(
        n.flops * c / 5
        for n, c in zip(found.nodes, found.repeats[0], strict=True)
        if n.kind == "attention" and n.phase == "backward"
    )
    # unfused attention computes the masked half of the scores as well
    whole = attention_kernel(job) == "unfused"
    expected = model_flops_per_sequence(job.model, 2048, job.batch.target_seq_length, whole_causal=whole)
    assert total(found, "flops", "gemm", "grouped_gemm", "attention") - again == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel": {"tensor": 4, "pipeline": 2, "virtual_pipeline": 2, "recompute": "full"}},
        {"parallel": {"sharding": "zero3"}, "software": {"framework": "torchtitan"}},
        {"parallel": {"sharding": "hsdp", "shard_size": 8}, "optimizer": "muon"},
        {"model": {"preset": "mixtral-8x7b"}, "parallel": {"expert": 8}, "precision": "mxfp8"},
        {"model": {"preset": "t5-large"}, "parallel": {"pipeline": 2}, "precision": "fp16_mixed"},
        {"model": {"preset": "bert-large"}, "precision": "tf32", "optimizer": "lamb"},
        {"precision": "fp32", "software": {"fused_kernels": False, "attention": "unfused"}},
    ],
    ids=str,
)
def test_a_graph_is_sound(changes):
    found = graph(**changes)
    assert found.repeats.shape == (len(found.stages), len(found.nodes))
    assert np.isfinite(found.repeats).all()
    assert (found.repeats.sum(axis=0) > 0).all()
    for n in found.nodes:
        assert n.kind in KINDS
        amounts = (n.flops, n.bytes_read, n.bytes_written, n.message_bytes, n.launches)
        assert np.isfinite(amounts).all()
        assert min(amounts) >= 0
        assert n.bytes_read + n.bytes_written > 0
        assert (n.axis is not None) == (n.kind in COLLECTIVES)
        assert (n.message_bytes > 0) == (n.kind in COLLECTIVES)
    assert _has_no_cycle(len(found.nodes), found.edges)


def _has_no_cycle(size, edges):
    waiting = Counter(edge.target for edge in edges)
    ready = [index for index in range(size) if not waiting[index]]
    done = 0
    while ready:
        done += 1
        index = ready.pop()
        for edge in edges:
            if edge.source == index:
                waiting[edge.target] -= 1
                if not waiting[edge.target]:
                    ready.append(edge.target)
    return done == size


@functools.cache
def layer_collectives(phases, **parallel):
    found = graph(parallel=dict(parallel), cluster={**BASE["cluster"], "num_nodes": 1})
    return Counter(
        (n.kind, n.axis) for n in found.nodes if n.phase in phases and n.axis == "tensor" and "layer" in n.module
    )


def test_messages_of_a_block_under_sequence_parallelism():
    forward = layer_collectives(("forward",), tensor=4, sequence_parallel=True)
    backward = layer_collectives(("backward",), tensor=4, sequence_parallel=True)
    assert forward == {("all_gather", "tensor"): 2, ("reduce_scatter", "tensor"): 2}
    # the conjugates, and both column-parallel inputs gathered once more for the weight gradients
    assert backward == {("all_gather", "tensor"): 2 + 2, ("reduce_scatter", "tensor"): 2}


def test_messages_of_a_block_under_tensor_parallelism():
    assert layer_collectives(("forward",), tensor=4, sequence_parallel=False) == {("all_reduce", "tensor"): 2}
    assert layer_collectives(("backward",), tensor=4, sequence_parallel=False) == {("all_reduce", "tensor"): 2}


@settings(max_examples=15, deadline=None)
@given(
    hidden=st.sampled_from([512, 1024, 4096]),
    heads=st.sampled_from([8, 16, 32]),
    length=st.sampled_from([512, 2048]),
    tensor=st.sampled_from([1, 2, 4]),
    precision=st.sampled_from(["fp32", "bf16_mixed", "fp8_mixed"]),
)
def test_doubling_tensor_parallelism_halves_the_gemms(hidden, heads, length, tensor, precision):
    model = {"num_layers": 2, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": 51200}
    batch = {"seq_length": length, "micro_batch_size": 2, "global_batch_size": 128}
    one, two = (
        graph(model=model, batch=batch, precision=precision, parallel={"tensor": t}) for t in (tensor, 2 * tensor)
    )
    assert total(two, "flops", "gemm", "attention") == pytest.approx(total(one, "flops", "gemm", "attention") / 2)


def test_nodes_do_not_grow_with_layers_microbatches_or_ranks():
    model = {"hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 50304}
    small = graph(model={**model, "num_layers": 2})
    large = graph(
        model={**model, "num_layers": 200},
        batch={**BASE["batch"], "global_batch_size": 64000},
        cluster={**BASE["cluster"], "num_nodes": 80},
    )
    assert len(small.nodes) == len(large.nodes)
    assert total(large, "flops", "attention") == pytest.approx(100 * total(small, "flops", "attention"))


def test_stages_share_the_layers_and_the_ends_have_more():
    found = graph(parallel={"tensor": 8, "pipeline": 8})
    flops = [total(found, "flops", "gemm", stage=stage) for stage in range(8)]
    assert flops[7] > flops[1] == pytest.approx(flops[6])
    assert [stage.has_head for stage in found.stages] == [False] * 7 + [True]
    uneven = graph(parallel={"tensor": 8, "pipeline": 2, "layers_per_stage": [20, 12]})
    attention = [total(uneven, "flops", "attention", stage=stage) for stage in range(2)]
    assert attention[0] / attention[1] == pytest.approx(20 / 12)


def test_full_recomputation_runs_the_forward_again():
    found = graph(parallel={"recompute": "full"})
    none = graph(parallel={"recompute": "none"})
    again = [n for n in found.nodes if n.phase == "recompute" and n.kind in ("gemm", "attention")]
    forward = [
        n for n in found.nodes if n.phase == "forward" and n.kind in ("gemm", "attention") and "layer" in n.module
    ]
    assert [(n.shape, n.flops) for n in again] == [(n.shape, n.flops) for n in forward]
    assert found.stages[0].saved_activation_bytes < none.stages[0].saved_activation_bytes / 5
    assert found.stages[0].recompute_peak_bytes > 0
    first_two = graph(parallel={"recompute": {"full_layers": 2}})
    recomputed = {c for n, c in zip(first_two.nodes, first_two.repeats[0], strict=True) if n.phase == "recompute"}
    assert recomputed == {2.0}


def formats(found, kind, phase="forward", module="layer"):
    return {n.input_dtype for n in found.nodes if n.kind == kind and n.phase == phase and module in n.module}


def test_formats_of_gemms_follow_the_policy():
    assert formats(graph(precision="tf32"), "gemm") == {"tf32"}
    assert formats(graph(precision="fp32"), "gemm") == {"fp32"}
    fp8 = graph(precision="fp8_mixed")
    assert formats(fp8, "gemm") == {"fp8_e4m3"}
    assert formats(fp8, "gemm", "backward") == {"fp8_e5m2"}
    assert formats(fp8, "gemm", module="head") == {"bf16"}
    assert formats(fp8, "attention") == {"bf16"}
    assert formats(graph(precision="nvfp4"), "gemm", "backward") == {"nvfp4"}


def test_outer_layers_and_overrides_keep_other_formats():
    policy = {
        "preset": "fp8_mixed",
        "high_precision_layers": {"first": 1, "last": 1},
        "overrides": [{"modules": "layers.*.mlp.*", "linear": "mxfp8"}],
    }
    found = graph(precision=policy)
    assert formats(found, "gemm", module="mlp.fc1") == {"mxfp8"}
    assert formats(found, "gemm", module="qkv") == {"bf16", "fp8_e4m3"}
    counts = {n.input_dtype: c for n, c in zip(found.nodes, found.repeats[0], strict=True) if n.op.endswith("mm")
              and n.phase == "forward" and n.module.endswith("qkv")}  # fmt: skip
    assert counts == {"bf16": 2.0, "fp8_e4m3": 30.0}


def test_loss_scaling_adds_the_unscaling():
    ops = [{n.op for n in graph(precision=p).nodes} for p in ("fp16_mixed", "bf16_mixed")]
    assert "_amp_foreach_non_finite_check_and_unscale_" in ops[0] - ops[1]


def test_gradient_and_parameter_messages_have_their_formats():
    found = graph(precision={"preset": "bf16_mixed", "grad_reduce": "fp32", "param_gather": "bf16"},
                  parallel={"sharding": "zero1", "tensor": 2})  # fmt: skip
    data = {n.kind: n for n in found.nodes if n.axis == "data"}
    parameters = found.stages[0].num_parameters
    assert data["reduce_scatter"].message_bytes == pytest.approx(4 * parameters)
    assert data["all_gather"].message_bytes == pytest.approx(2 * parameters)
    assert total(found, "bytes_read", "optimizer") == pytest.approx(16 * parameters / 32, rel=1e-3)


def test_405b_on_1024_gpus_traces_within_a_gigabyte():
    program = """
from dataset_builder.job.schema import TrainingJob, attention_kernel
from dataset_builder.tracing import templates
templates._index = lambda: {}  # trace, do not load
from dataset_builder.tracing.trace import build_graph
job = TrainingJob.parse({"model": {"preset": "llama3.1-405b"}, "precision": "bf16_mixed",
    "batch": {"seq_length": 8192, "micro_batch_size": 1, "global_batch_size": 1024},
    "cluster": {"gpu": "H100-SXM5-80GB", "num_nodes": 128, "gpus_per_node": 8},
    "parallel": {"tensor": 8, "pipeline": 16, "layers_per_stage": [7] + [8] * 14 + [7]},
    "software": {"framework": "megatron-core"}})
graph = build_graph(job)
assert sum(stage.num_parameters for stage in graph.stages) * 8 > 400e9
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(status["VmHWM"].split()[0])  # of this program alone: ru_maxrss starts from what its parent held
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 1e9


def test_binding_a_shipped_template_does_not_import_torch():
    program = """
import sys
from dataset_builder.job.schema import TrainingJob, attention_kernel
from dataset_builder.tracing.trace import build_graph
build_graph(TrainingJob.parse({"model": {"preset": "llama3-8b"},
    "batch": {"seq_length": 8192, "micro_batch_size": 1, "global_batch_size": 64},
    "cluster": {"gpu": "H100-SXM5-80GB"}}))
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


HEADS = {
    "every position": {},
    "masked positions": {"masked_fraction": 0.15625},
    "labels": {"head": "classification", "num_labels": 3},
}


def bert(parallel, head):
    model = {"preset": "bert-large", "overrides": HEADS[head]}
    batch = {"seq_length": 512, "micro_batch_size": 4, "global_batch_size": 256}
    return TrainingJob.parse({**BASE, "model": model, "batch": batch, "parallel": parallel})


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tensor", [1, 4])
def test_a_head_multiplies_the_positions_it_has_labels_for(head, tensor):
    job = bert({"tensor": tensor}, head)
    (m, n), share = {
        "every position": ((4 * 512, 30522 / tensor), tensor),
        "masked positions": ((4 * 80, 30522 / tensor), tensor),
        "labels": ((4 * 512 / tensor, 3), tensor),
    }[head]
    found = build_graph(job)
    projection = next(n for n in found.nodes if n.module in ("head.lm_head", "head.classifier") and n.kind == "gemm")
    assert projection.shape == (1, m, math.ceil(n), 1024)
    gemms = sum(n.flops for n in found.nodes if n.module.startswith("head") and n.kind == "gemm")
    body = dict(job.model) | {"num_layers": 1}
    with_head, hidden = model_flops_per_sequence(type(job.model)(**body), 512), 1024
    without = 3 * 2 * 512 * (12 * hidden**2 + 2 * 512 * hidden)
    assert gemms == pytest.approx(4 * (with_head - without) / share, rel=0.03 * (tensor > 1) + 1e-3)


@pytest.mark.parametrize("head", HEADS)
def test_parameters_of_a_head_over_stages(head):
    job = bert({"pipeline": 2}, head)
    found = build_graph(job)
    stages, again = found.stages, 30522 * 1024 * (head != "labels")  # the last stage's copy of the tied table
    assert sum(stage.num_parameters for stage in stages) == num_parameters(job.model) + again
    assert any(n.module == "embedding.tied" for n in found.nodes) == (head != "labels")
    assert stages[-1].logits_bytes == 4 * {"every position": 4 * 512 * 30522, "labels": 4 * 512 * 3}.get(
        head, 4 * 80 * 30522
    )


def test_quantised_weights_are_no_activations():
    bf16, fp8 = (graph(precision=p).stages[0].saved_activation_bytes for p in ("bf16_mixed", "fp8_mixed"))
    assert fp8 < bf16


def lora(targets="attention", **changes):
    model = {"preset": "llama2-7b", "overrides": {"lora": {"rank": 8, "targets": targets}}}
    return graph(**{"model": model, "batch": {"seq_length": 4096, "micro_batch_size": 1, "global_batch_size": 64},
                    **changes})  # fmt: skip


# per layer: A and B of q, k, v and the projection, of gate, up and down; fused linears share their A
HIDDEN, WIDE = 4096, 11008
STACKS = {"fused": {"framework": "megatron-core"}, "eager": {"framework": "pytorch", "fused_kernels": False}}
ADAPTERS = {
    ("fused", "attention"): 8 * ((HIDDEN + 3 * HIDDEN) + 2 * HIDDEN),
    ("eager", "attention"): 8 * 4 * 2 * HIDDEN,
    ("fused", "attention_and_mlp"): 8 * (4 * HIDDEN + 2 * HIDDEN + (HIDDEN + 2 * WIDE) + (WIDE + HIDDEN)),
    ("eager", "attention_and_mlp"): 8 * (4 * 2 * HIDDEN + 3 * (HIDDEN + WIDE)),
}


@pytest.mark.parametrize(("stack", "targets"), ADAPTERS)
def test_only_adapters_are_reduced_and_updated(stack, targets):
    found = lora(targets, software=STACKS[stack], parallel={"sharding": "none"}, precision="bf16_mixed")
    adapters = 32 * ADAPTERS[stack, targets]
    (stage,), (reduction,) = found.stages, (n for n in found.nodes if n.axis == "data")
    assert (stage.num_trained_parameters, stage.num_parameters) == (adapters, 6_738_415_616 + adapters)
    assert reduction.kind == "all_reduce"
    assert reduction.shape == (adapters,)
    assert {n.shape for n in found.nodes if n.kind == "optimizer"} == {(adapters,)}


def test_frozen_weights_have_no_weight_gradients():
    """Backward GEMMs are the input gradients alone: half of full training's, and what the FLOP formula says."""
    full, frozen = lora(model={"preset": "llama2-7b"}), lora()
    backward, half = (
        sum(
            n.flops * c
            for n, c in zip(g.nodes, g.repeats[0], strict=True)
            if n.kind == "gemm" and n.phase == "backward"
        )
        for g in (full, frozen)
    )
    assert half == pytest.approx(backward / 2, rel=5e-3)
    assert frozen.stages[0].saved_activation_bytes < 0.9 * full.stages[0].saved_activation_bytes
    assert not [n for n in frozen.nodes if n.phase == "backward" and n.module.startswith("embedding")]


@pytest.mark.parametrize("targets", ["attention", "attention_and_mlp"])
@pytest.mark.parametrize("preset", ["llama3-8b", "gpt2-small", "deepseek-v2", "t5-large"])
def test_flops_of_lora_are_the_models(preset, targets):
    if preset == "deepseek-v2" and targets != "attention":
        return
    model = {"preset": preset, "overrides": {"lora": {"rank": 64, "targets": targets}}}
    job = TrainingJob.parse({**BASE, "model": model, "cluster": {**BASE["cluster"], "num_nodes": 1, "gpus_per_node": 1},
                             "software": STACKS["eager"]}).resolved()  # fmt: skip
    found = build_graph(job)
    again = sum(n.flops * c / 5 for n, c in zip(found.nodes, found.repeats[0], strict=True)
                if n.kind == "attention" and n.phase == "backward")  # fmt: skip
    whole = attention_kernel(job) == "unfused"
    expected = model_flops_per_sequence(job.model, 2048, job.batch.target_seq_length, whole_causal=whole)
    assert total(found, "flops", "gemm", "grouped_gemm", "attention") - again == pytest.approx(expected, rel=2e-3)


def test_frozen_weights_are_gathered_but_not_scattered_when_fully_sharded():
    found = lora(parallel={"sharding": "zero3"}, software=STACKS["eager"])
    gathered = {n.module: n.shape[0] for n in found.nodes if n.kind == "all_gather" and n.phase == "backward"}
    scattered = {n.module: n.shape[0] for n in found.nodes if n.kind == "reduce_scatter"}
    assert len(gathered) == 3  # embedding, layer, head
    assert scattered == {"decoder_layer0.gradients": ADAPTERS["eager", "attention"]}


def test_messages_of_adapters_have_the_width_of_their_rank():
    found = lora(parallel={"tensor": 4, "sequence_parallel": True})
    adapters = [n for n in found.nodes if n.axis == "tensor" and "adapter" in n.module]
    assert adapters
    assert {n.shape for n in adapters} == {(4096 * 8,)}
    full = lora(model={"preset": "llama2-7b"}, parallel={"tensor": 4, "sequence_parallel": True})
    layer = [[n for n in g.nodes if n.axis == "tensor" and "layer" in n.module and "adapter" not in n.module]
             for g in (found, full)]  # fmt: skip
    assert len(layer[1]) - len(layer[0]) == 2  # the inputs gathered again for weight gradients


def nodes(found, **fields):
    return [n for n in found.nodes if all(getattr(n, name) == value for name, value in fields.items())]


RECIPES = {"fp8_delayed": 1, "fp8_current": 2, "fp8_tensorwise": 2, "fp8_rowwise": 1, "fp8_blockwise": 1, "mxfp8": 1,
           "nvfp4": 2}  # fmt: skip


@pytest.mark.parametrize(("recipe", "passes"), RECIPES.items())
def test_scales_of_the_same_step_cost_a_pass_of_their_own(recipe, passes):
    found = nodes(graph(precision={"preset": "fp8_mixed", "linear": recipe}), kind="quantize")
    for what in ("input", "gradient"):
        n = next(n for n in found if n.op == f"quantize.{recipe}.{what}" and n.module.endswith("qkv"))
        columns = 4096 if what == "input" else 6144
        assert n.bytes_read == passes * 2 * 2048 * columns
        assert n.launches == passes
        assert n.bytes_written < 2 * 2.2 * 2048 * columns


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("sharding", "share"), {"none": 1, "zero1": 1, "zero2": 64, "zero3": 64}.items())
def test_all_gradients_a_rank_holds_are_zeroed(sharding, share, optimizer):
    found = graph(parallel={"sharding": sharding, "tensor": 1}, optimizer=optimizer, precision="bf16_mixed")
    (n,) = nodes(found, module="optimizer.zero_gradient")
    assert n.bytes_written == pytest.approx(4 * found.stages[0].num_parameters / share, rel=1e-6)


# fp32 values an update reads and writes per parameter: LAMB's trust ratio and its application take a pass each
UPDATES = {
    "adamw": (4, 3), "adam": (4, 3), "sgd": (3, 2), "lion": (3, 2), "adafactor": (1 + 2, 1),
    "lamb": (4 + 2 + 2, 3 + 1),
}  # fmt: skip


@pytest.mark.parametrize(("optimizer", "amounts"), UPDATES.items())
def test_an_update_reads_the_gradient_and_writes_parameters_and_state(optimizer, amounts):
    found = graph(optimizer=optimizer, precision="fp32", parallel={"sharding": "none"})
    steps = ("optimizer.update", "optimizer.trust_ratio", "optimizer.apply", "optimizer.statistics")
    update = [n for n in found.nodes if n.module in steps]
    count = found.stages[0].num_parameters
    moved = sum(n.bytes_read for n in update) / count / 4, sum(n.bytes_written for n in update) / count / 4
    assert moved == pytest.approx(amounts, rel=1e-3)


def test_the_low_precision_weights_are_written_back():
    found = graph(precision={"preset": "bf16_mixed", "params": "bf16", "main_params": "fp32"})
    (copy,) = nodes(found, module="optimizer.weight_copy")
    count = sum(n.shape[0] for n in nodes(found, kind="optimizer"))
    assert (copy.bytes_read, copy.bytes_written) == pytest.approx((4 * count, 2 * count), rel=1e-6)


@pytest.mark.parametrize("parallel", [{}, {"pipeline": 2}, {"tensor": 2, "sequence_parallel": True}], ids=str)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_decoder_layers_share_the_normed_output_of_the_encoder(parallel, recompute):
    found = graph(model={"preset": "t5-large"}, parallel={**parallel, "recompute": recompute}, precision="bf16_mixed",
                  cluster={**BASE["cluster"], "num_nodes": 1, "gpus_per_node": 2})  # fmt: skip
    (norm,) = nodes(found, module="encoder.final_norm", phase="forward")
    at, stages = found.nodes.index(norm), len(found.stages)
    assert norm.shape == (2048 // parallel.get("tensor", 1), 1024)
    assert found.repeats[:, at].tolist() == [1.0] + [0.0] * (stages - 1)
    (add,) = (n for n in found.nodes if n.module.endswith("memory_gradient"))
    size = 2048 * 1024 // parallel.get("tensor", 1)
    assert add.shape == (size,)
    assert found.repeats[:, found.nodes.index(add)].sum() == 24
    assert add.bytes_read == pytest.approx(2 * add.bytes_written)
    edges = {(edge.source, edge.target) for edge in found.edges}
    gradient = nodes(found, module="encoder.final_norm", phase="backward")
    assert gradient
    assert any((found.nodes.index(add), found.nodes.index(n)) in edges for n in gradient)
    assert any(target == at and "encoder_layer" in found.nodes[source].module for source, target in edges)
    assert any(source == at and "decoder_layer" in found.nodes[target].module for source, target in edges)


@pytest.mark.parametrize(("pipeline", "tied"), [(1, False), (2, False), (2, True)])
def test_multi_token_prediction_is_a_further_layer_and_head_beside_the_head(pipeline, tied):
    """DeepSeek-V3, arXiv 2412.19437, section 2.2: a projection of 2 h to h, a layer, and embedding and head again."""
    sizes = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 32000}
    model = {**sizes, "tie_embeddings": tied, "bias": False, "position_embedding": "rope", "normalization": "rmsnorm"}
    plain, predicting = (
        build_graph(
            TrainingJob.parse({**BASE, "model": {**model, "mtp_layers": n}, "parallel": {"pipeline": pipeline}})
        )
        for n in (0, 1)
    )
    layer, table, projection = 12 * 512**2 + 2 * 512, 32000 * 512, 2 * 512**2 + 3 * 512  # and three norms
    more = [b.num_parameters - a.num_parameters for a, b in zip(plain.stages, predicting.stages, strict=True)]
    again = table * (pipeline > 1 and not tied)
    assert more == [0] * (pipeline - 1) + [layer + projection + again]
    gemms = [
        sum(n.flops * c for n, c in zip(found.nodes, found.repeats[-1], strict=True) if n.module == "head.lm_head")
        for found in (plain, predicting)
    ]
    assert gemms[1] == pytest.approx(2 * gemms[0])
    assert predicting.stages[-1].saved_activation_bytes > plain.stages[-1].saved_activation_bytes


def test_multi_token_prediction_counts_in_the_models_flops():
    one, two = (
        model_flops_per_sequence(
            ModelSpec.model_validate({"preset": "deepseek-v3", "overrides": {"mtp_layers": n}}), 4096
        )
        for n in (0, 1)
    )
    assert 1.01 < two / one < 1.06  # a layer of 61 and a head


@pytest.mark.parametrize(("preset", "fmt"), [("bert-large", "fp16"), ("gpt2-small", "fp16"), ("llama3-8b", "fp32")])
def test_only_eager_attention_since_llama_casts_its_scores(preset, fmt):
    found = graph(
        model={"preset": preset}, precision={"preset": "fp16_mixed", "params": "fp16"},
        software={"framework": "pytorch", "attention": "unfused", "fused_kernels": False},
        cluster={**BASE["cluster"], "num_nodes": 1}, batch={**BASE["batch"], "seq_length": 512},
    )  # fmt: skip
    core = [n for n in found.nodes if "attention.core.softmax" in n.module]
    assert {n.input_dtype for n in core if n.kind == "softmax"} == {fmt}
    assert any(n.kind == "cast" for n in core) == (fmt == "fp32")
