"""A template bound to real sizes equals a direct trace at those sizes; fake tracing equals real execution."""

import json

import pytest

from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.binding import bind
from dataset_builder.tracing.block import record_block
from dataset_builder.tracing.job_blocks import job_blocks
from dataset_builder.tracing.kernels import reduce_recording
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.structure import BlockStructure
from dataset_builder.tracing.symbols import constant
from dataset_builder.tracing.templates import _index, _shipped, from_json, to_json, trace_structure, write_archive

GROUPS = {"tensor": 4, "context": 2, "expert": 2, "data": 8, "pipeline": 1}
BATCH = {"seq_length": 2048, "micro_batch_size": 2, "global_batch_size": 64}
CLUSTER = {"gpu": "B200-SXM6-180GB", "num_nodes": 2, "gpus_per_node": 8}
JOBS = {
    "gpt, unfused attention, amp, eager": (
        "gpt3-1.3b", "bf16_mixed", {}, {"attention": "unfused", "fused_kernels": False}),
    "llama-3 8B, tensor and sequence parallel, bf16": (
        "llama3-8b", "bf16_mixed", {"tensor": 4, "sequence_parallel": True, "recompute": "full"},
        {"framework": "megatron-core"}),
    "llama-3 8B, fp8": ("llama3-8b", "fp8_mixed", {"tensor": 4}, {"framework": "megatron-core"}),
    "llama-3 8B, nvfp4 under amp, context parallel": ("llama3-8b", "nvfp4", {"context": 2}, {}),
    "llama-3 8B, fp32, unfused grouped attention": (
        "llama3-8b", "fp32", {"tensor": 2, "recompute": "selective"}, {"attention": "unfused"}),
    "mixtral, experts over ranks": ("mixtral-8x7b", "bf16_mixed", {"tensor": 2, "expert": 4, "expert_tensor": 2,
                                    "sequence_parallel": True}, {"framework": "megatron-core"}),
    "deepseek-v3": ("deepseek-v3", "mxfp8", {"expert": 8}, {"framework": "megatron-core"}),
    "llama-3 8B, multi-token prediction": (
        {"preset": "llama3-8b", "overrides": {"mtp_layers": 1}}, "fp8_mixed",
        {"tensor": 2, "sequence_parallel": True}, {"framework": "megatron-core"}),
    "t5": ("t5-large", "fp16_mixed", {"tensor": 2}, {}),
    "bert": ("bert-large", "tf32", {}, {"attention": "unfused"}),
    "bert, masked positions": (
        {"preset": "bert-large", "overrides": {"masked_fraction": 0.15625}}, "fp16_mixed",
        {"tensor": 4, "sequence_parallel": True}, {"framework": "megatron-core"}),
    "bert, fine-tuning": ({"preset": "bert-large", "overrides": {"head": "classification"}}, "fp16_mixed", {}, {}),
    "llama-3 8B, adapters, fp8": (
        {"preset": "llama3-8b", "overrides": {"lora": {"rank": 16, "targets": "attention_and_mlp"}}}, "fp8_mixed",
        {"tensor": 4, "sequence_parallel": True}, {"framework": "megatron-core"}),
    "mixtral, adapters": (
        {"preset": "mixtral-8x7b", "overrides": {"lora": {"rank": 16}}}, "mxfp8", {"tensor": 2, "expert": 2},
        {"framework": "megatron-core"}),
    "gemma-3, windows": ("gemma3-12b", "bf16_mixed", {"tensor": 2}, {}),
    "mpt, alibi": ("mpt-7b", "bf16", {}, {"attention": "unfused"}),
}  # fmt: skip


def job_of(model, precision, parallel, software):
    return TrainingJob.parse(
        {
            "model": {"preset": model} if isinstance(model, str) else model,
            "batch": BATCH,
            "cluster": CLUSTER,
            "precision": precision,
            "parallel": parallel,
            "software": software,
        }
    ).resolved()


@pytest.mark.parametrize("name", JOBS)
def test_a_bound_template_equals_a_direct_trace(name):
    job = job_of(*JOBS[name])
    blocks = job_blocks(job, rank_layout(job))
    pairs = [(blocks.embedding, True), (blocks.head, job.model.architecture != "encoder"), *blocks.layers]
    if blocks.encoder_norm is not None:
        pairs.append((blocks.encoder_norm, False))
    if blocks.mtp is not None:
        pairs.append((blocks.mtp, True))
    for structure, is_decoder in pairs:
        sizes = blocks.sizes[is_decoder]
        bound = bind(from_json(json.loads(json.dumps(trace_structure(structure)))), sizes, "x", GROUPS)
        whole = dict.fromkeys("bsztcmohgrudfvpyexnkaiqlwjDEVBL", 1) | {k: round(v) for k, v in sizes.items()}
        direct = bind(from_json(to_json(reduce_recording(record_block(structure, whole), _number))), {}, "x", GROUPS)
        assert len(bound.nodes) == len(direct.nodes)
        for ours, theirs in zip(bound.nodes, direct.nodes, strict=True):
            assert ours == theirs
        assert bound.edges == direct.edges
        assert bound.totals == pytest.approx(direct.totals)


def _number(dimension):
    return constant(float(dimension))


SMALL = {
    "b": 2, "s": 8, "z": 8, "t": 1, "c": 1, "m": 8, "o": 8, "h": 16, "g": 2, "r": 2, "u": 4, "d": 4, "f": 24, "v": 32,
    "p": 8, "y": 2, "e": 4, "x": 1, "n": 8, "k": 2, "a": 8, "i": 8, "q": 8, "l": 8, "w": 4, "j": 2, "D": 4, "E": 8,
    "V": 2, "B": 8, "L": 12,
}  # fmt: skip
EXECUTED = {
    "fp32": {},
    "bf16": {"compute": "bf16", "params": "bf16", "grad_accum": "bf16", "attention_format": "bf16"},
    "bf16, fp32 gradients": {"compute": "bf16", "params": "bf16", "attention_format": "bf16", "accumulate": True},
    "amp": {"compute": "bf16", "attention_format": "bf16", "autocast": True},
    "amp, recompute": {"compute": "bf16", "attention_format": "bf16", "autocast": True, "recompute": "full"},
}


@pytest.mark.parametrize("fields", EXECUTED.values(), ids=EXECUTED)
@pytest.mark.parametrize("block", ["layer", "head", "embedding"])
def test_fake_tracing_is_what_really_runs(fields, block):
    positions = "rope" if block == "layer" else "learned"
    structure = BlockStructure(
        block=block, normalization="rmsnorm", activation="swiglu", position_embedding=positions, kernel="unfused",
        fused=False, grouped_queries=True, dropout=True, lm_head=fields.get("compute", "fp32"), **fields,
    )  # fmt: skip
    fake, real = (record_block(structure, SMALL, fake=flag).ops for flag in (True, False))
    assert [_what(op) for op in fake] == [_what(op) for op in real]


def _what(op):
    return op.name, op.phase, op.scope, [(r.shape, r.fmt) for r in op.inputs], [(r.shape, r.fmt) for r in op.outputs]


def test_the_callers_gradient_mode_does_not_matter():
    import torch

    structure = BlockStructure("head", lm_head="fp32")
    expected = trace_structure(structure)
    with torch.inference_mode():
        assert trace_structure(structure) == expected
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert trace_structure(structure) == expected


def test_shipped_templates_are_what_tracing_gives_now():
    job = job_of("llama3-8b", "fp8_mixed", {"tensor": 2, "sequence_parallel": True}, {"framework": "megatron-core"})
    blocks = job_blocks(job, rank_layout(job))
    assert len(_index()) > 100
    for structure in (blocks.embedding, blocks.head, *(s for s, _ in blocks.layers), blocks.optimizer):
        assert _shipped(structure) == json.loads(json.dumps(trace_structure(structure)))


def test_an_archive_has_the_same_bytes_every_time(tmp_path):
    structures = [BlockStructure("embedding"), BlockStructure("optimizer")]
    for order in (structures, structures[::-1]):
        (folder := tmp_path / order[0].block).mkdir()
        assert write_archive(order, folder) == 2
    for name in ("templates.json.gz", "templates.index.json"):
        assert (tmp_path / "embedding" / name).read_bytes() == (tmp_path / "optimizer" / name).read_bytes()
