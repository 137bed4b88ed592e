"""Every format on minimal files of its own: which model, layout and precision fields are read out of each.

``READ`` is the table: the file, what else must be given, and every field of the job that has to come out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataset_builder.job.importers.formats import FORMATS, ImportedFiles, read_file
from dataset_builder.job.importers.merging import ImportedJob

_FILES = Path(__file__).parent / "files"
_GPU = {"cluster.gpu": "H100-SXM5-80GB"}
_GPUS = {**_GPU, "cluster.num_gpus": "8"}
_RUN = {**_GPUS, "batch.seq_length": "2048", "batch.micro_batch_size": "1", "batch.global_batch_size": "64"}
_MODEL = {**_RUN, "precision.preset": "bf16_mixed"}  # beside a file that holds a model alone
_LLAMA = {
    "model.num_layers": 8, "model.hidden_size": 1024, "model.ffn_hidden_size": 2816, "model.num_attention_heads": 16,
    "model.num_query_groups": 4, "model.vocab_size": 32000, "model.activation": "swiglu",
    "model.normalization": "rmsnorm", "model.bias": False, "model.position_embedding": "rope",
}  # fmt: skip
READ: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "Hugging Face: grouped queries": ("llama_config.json", _MODEL, {**_LLAMA, "model.tie_embeddings": False}),
    "Hugging Face: as many key-value heads as heads": ("llama_mha_config.json", _MODEL, {
        **_LLAMA, "model.num_query_groups": 16, "batch.seq_length": 2048,
        "parallel.sequence_parallel": False, "parallel.recompute.mode": "selective"}),
    "Hugging Face: old GPT-2 keys": ("gpt2/config.json", _MODEL, {
        "model.num_layers": 36, "model.hidden_size": 1280, "model.ffn_hidden_size": 5120,
        "model.num_attention_heads": 20, "model.vocab_size": 50257, "model.activation": "gelu",
        "model.normalization": "layernorm", "model.position_embedding": "learned", "model.tie_embeddings": True,
        "model.max_position_embeddings": 1024, "model.dropout": 0.1}),
    "Hugging Face: T5 without num_decoder_layers": ("t5_config.json", _MODEL, {
        "model.architecture": "encoder_decoder", "model.num_encoder_layers": 6, "model.num_decoder_layers": 6,
        "model.hidden_size": 400, "model.ffn_hidden_size": 1600, "model.num_attention_heads": 25,
        "model.head_dim": 64, "model.activation": "relu", "model.relative_buckets": 64}),
    "Hugging Face: num_local_experts": ("mixtral_config.json", _MODEL, {
        **_LLAMA, "model.moe.num_experts": 8, "model.moe.top_k": 2, "model.moe.expert_ffn_hidden_size": 2816}),
    "Hugging Face: moe_intermediate_size": ("qwen3_moe_config.json", _MODEL, {
        "model.moe.num_experts": 64, "model.moe.top_k": 8, "model.moe.expert_ffn_hidden_size": 768,
        "model.head_dim": 128, "model.qk_norm": True, "model.attention": None}),
    "Hugging Face: layers of unequal blocks": ("blocks_config.json", _MODEL, {
        # 4 of 8 with attention; widths 2048 (3.0) and 1024 (1.5), so 3072 for each that has attention
        "model.num_layers": 4, "model.ffn_hidden_size": 3072, "model.num_query_groups": 2}),
    "Hugging Face: nested text_config": ("nested_config.json", _MODEL, {
        **_LLAMA, "model.head_dim": 128, "model.tie_embeddings": True}),
    "Megatron script: variables, arrays, if, case, continuations": ("megatron_fp8.sh", _GPU, {
        "model.num_layers": 16, "model.hidden_size": 2048, "model.ffn_hidden_size": 8192,
        "model.num_attention_heads": 16, "model.num_query_groups": 4, "model.position_embedding": "rope",
        "model.normalization": "rmsnorm", "model.activation": "swiglu", "model.bias": False,
        "model.tie_embeddings": False, "model.vocab_size": 32000,
        "batch.seq_length": 4096, "batch.micro_batch_size": 1, "batch.global_batch_size": 64,
        "precision.preset": "fp8_mixed", "precision.linear": "fp8_current", "precision.param_gather": "fp8",
        "precision.grad_reduce": "bf16", "precision.grad_accum": "bf16", "precision.params": "bf16",
        "precision.main_params": "fp32", "parallel.tensor": 2, "parallel.pipeline": 4, "parallel.virtual_pipeline": 2,
        "parallel.sequence_parallel": True, "parallel.sharding": "zero1", "parallel.overlap.grad_reduce": True,
        "parallel.overlap.param_gather": False, "parallel.overlap.tensor": True, "parallel.recompute.mode": "full",
        "parallel.recompute.full_layers": 2, "cluster.num_nodes": 2, "cluster.gpus_per_node": 8,
        "software.attention": "flash", "software.framework": "megatron-lm", "training.steps": 500}),
    "Megatron script: fp16, a growing batch, no vocabulary": ("megatron_175b.sh", {
        **_GPU, "cluster.num_gpus": "128"}, {
        "model.num_layers": 96, "model.hidden_size": 12288, "model.ffn_hidden_size": 49152,
        "model.num_attention_heads": 96, "model.num_query_groups": 96, "model.normalization": "layernorm",
        "model.position_embedding": "learned", "model.tie_embeddings": True, "model.bias": True,
        "model.vocab_size": 51200,  # 50257 to a multiple of 128 x 8
        "precision.preset": "fp16_mixed", "precision.params": "fp16", "precision.grad_reduce": "fp16",
        "precision.loss_scaling": True, "parallel.tensor": 8, "parallel.pipeline": 16, "parallel.sharding": "none",
        "batch.global_batch_size": 1536, "cluster.num_nodes": 16}),
    "Megatron-DeepSpeed under SLURM: here-documents, bash -c, a partition by type": ("megatron_slurm.sh", _GPU, {
        "model.num_layers": 22, "model.hidden_size": 2048, "model.position_embedding": "alibi",
        "model.vocab_size": 250880, "parallel.tensor": 4, "parallel.pipeline": 6,
        "parallel.sharding": "zero1",  # at stage 0, as bf16 is on
        "parallel.layers_per_stage": (3, 4, 4, 4, 4, 3), "parallel.recompute.mode": "full",
        "precision.preset": "bf16_mixed", "precision.grad_reduce": "fp32", "batch.global_batch_size": 64,
        "cluster.num_nodes": 3, "cluster.gpus_per_node": 8, "software.framework": "megatron-deepspeed",
        "training.samples": 200000}),
    "Megatron YAML: latent attention, experts, patterns": ("megatron_mla_moe.yaml", _GPUS, {
        "model.num_layers": 16, "model.hidden_size": 1024, "model.ffn_hidden_size": 4096,
        "model.num_attention_heads": 32, "model.head_dim": 192, "model.mla.q_lora_rank": 1536,
        "model.mla.kv_lora_rank": 512, "model.mla.qk_nope_head_dim": 128, "model.mla.qk_rope_head_dim": 64,
        "model.mla.v_head_dim": 128, "model.moe.num_experts": 32, "model.moe.top_k": 4,
        "model.moe.expert_ffn_hidden_size": 1024, "model.moe.shared_expert_ffn_hidden_size": 2048,
        "model.mtp_layers": 1,
        "model.moe.dense_layers": (0,), "model.vocab_size": 51712,  # 50257 to a multiple of 3232 x 2
        "parallel.tensor": 2, "parallel.pipeline": 2, "parallel.expert": 4, "parallel.expert_tensor": 1,
        "parallel.virtual_pipeline": 4, "parallel.sequence_parallel": True, "parallel.sharding": "zero1",
        "precision.preset": "bf16_mixed", "precision.grad_reduce": "fp32", "software.attention": "unfused",
        "batch.micro_batch_size": 4, "batch.global_batch_size": 32, "batch.seq_length": 4096}),
    "model zoo: every placeholder given": ("model_zoo.yaml", {
        **_RUN, "parallel.tensor": "1", "parallel.pipeline": "2", "parallel.expert": "4",
        "parallel.virtual_pipeline": "4", "cluster.num_gpus": "16"}, {
        "model.vocab_size": 151936, "model.moe.num_experts": 128, "model.moe.expert_ffn_hidden_size": 768,
        "model.num_query_groups": 4, "model.head_dim": 128, "model.qk_norm": True, "parallel.expert": 4,
        "parallel.sequence_parallel": True, "precision.preset": "bf16_mixed", "software.attention": "flash"}),
    "Primus: an experiment's overrides": ("primus_experiment.yaml", _GPUS, {
        "model.num_layers": 32, "model.hidden_size": 4096, "model.ffn_hidden_size": 14336,
        "model.num_query_groups": 8, "model.normalization": "rmsnorm", "model.activation": "swiglu",
        "model.bias": False, "model.vocab_size": 128256, "precision.preset": "fp8_mixed",
        "precision.linear": "fp8_delayed", "parallel.tensor": 2, "batch.micro_batch_size": 2,
        "batch.global_batch_size": 64, "software.framework": "primus"}),
    "NeMo launcher: Hydra arithmetic, fp8 switches": ("nemo_launcher.yaml", _GPU, {
        "model.num_layers": 24, "model.hidden_size": 2048, "model.ffn_hidden_size": 8192,
        "model.num_attention_heads": 16, "model.num_query_groups": 16, "model.vocab_size": 50432,
        "batch.seq_length": 2048, "batch.micro_batch_size": 2, "batch.global_batch_size": 128,
        "cluster.num_nodes": 4, "cluster.gpus_per_node": 8, "parallel.tensor": 2, "parallel.pipeline": 2,
        "parallel.sequence_parallel": True, "parallel.sharding": "zero1", "parallel.overlap.grad_reduce": True,
        "parallel.overlap.tensor": True, "parallel.overlap.pipeline": False, "parallel.recompute.mode": "selective",
        "precision.preset": "fp8_mixed", "precision.linear": "fp8_delayed", "precision.params": "bf16",
        "precision.main_params": "fp32", "training.steps": 1000}),
    "Megatron-Bridge: a container written out, a layout": ("megatron_bridge.yaml", _GPUS, {
        "model.num_layers": 30, "model.ffn_hidden_size": 5504, "model.num_query_groups": 8, "model.vocab_size": 32001,
        "model.activation": "swiglu", "model.bias": False, "model.tie_embeddings": False, "batch.seq_length": 4096,
        "parallel.pipeline": 4, "parallel.sharding": "zero1", "parallel.virtual_pipeline": 4,
        "parallel.layers_per_stage": (1, *[2] * 14, 1), "precision.preset": "mxfp8", "precision.linear": "mxfp8",
        "precision.grad_reduce": "bf16", "precision.param_gather": "fp8", "precision.optimizer_state": "bf16",
        "precision.high_precision_layers.first": 2, "precision.high_precision_layers.last": 1,
        "software.framework": "megatron-bridge"}),
    "DeepSpeed": ("deepspeed.json", {**_GPUS, "model.preset": "llama3-8b", "batch.seq_length": "4096"}, {
        "batch.micro_batch_size": 2, "batch.global_batch_size": 64, "precision.preset": "bf16_mixed",
        "precision.params": "bf16", "precision.main_params": "fp32", "precision.grad_reduce": "fp32",
        "precision.grad_accum": "fp32", "parallel.sharding": "zero2", "parallel.overlap.grad_reduce": True,
        "software.framework": "deepspeed", "optimizer.name": "adamw"}),
    "torchtitan: float8, a flavour, an old batch_size": ("torchtitan_float8.toml", {
        **_GPU, "cluster.num_gpus": "128"}, {
        "model.num_layers": 126, "model.hidden_size": 16384, "model.vocab_size": 128256, "batch.micro_batch_size": 2,
        "batch.global_batch_size": 32, "batch.seq_length": 8192, "parallel.tensor": 8, "parallel.pipeline": 1,
        "parallel.sharding": "zero3", "parallel.sequence_parallel": True, "parallel.overlap.tensor": True,
        "parallel.recompute.mode": "full", "precision.preset": "fp8_tensorwise", "precision.linear": "fp8_tensorwise",
        "precision.param_gather": "fp8", "precision.params": "fp32", "precision.grad_reduce": "fp32",
        "precision.lm_head": "bf16", "software.compile": True, "cluster.num_nodes": 16, "training.steps": 3000}),
    "torchtitan: experts, bf16 optimizer states": ("torchtitan_experts.toml", _GPU, {
        "model.moe.num_experts": 128, "model.num_layers": 48, "parallel.expert": 8, "parallel.expert_tensor": 1,
        "parallel.data": 8, "parallel.sharding": "zero3", "precision.preset": "bf16_mixed",
        "precision.optimizer_state": "bf16", "precision.param_gather": "bf16", "software.compile": False,
        "batch.global_batch_size": 8, "cluster.num_nodes": 1}),
    "torchtitan JSON: sizes spelt out, HSDP, a pipeline": ("torchtitan.json", _GPU, {
        **_LLAMA, "parallel.pipeline": 2, "parallel.sharding": "hsdp", "parallel.shard_size": 4, "parallel.data": 8,
        "parallel.schedule": "1f1b", "batch.micro_batch_size": 1, "batch.global_batch_size": 32,
        "parallel.recompute.mode": "none", "precision.params": "fp32", "software.compile": True,
        "cluster.num_nodes": 2}),
    "llm-foundry: interpolation, PURE, expansion_ratio": ("llm_foundry.yaml", _GPUS, {
        "model.num_layers": 24, "model.hidden_size": 1024, "model.ffn_hidden_size": 4096, "model.vocab_size": 50368,
        "model.num_attention_heads": 16, "model.activation": "gelu", "model.position_embedding": "learned",
        "model.dropout": 0.1, "model.tie_embeddings": True, "batch.seq_length": 2048, "batch.micro_batch_size": 8,
        "batch.global_batch_size": 1024, "precision.preset": "bf16_mixed", "precision.params": "fp32",
        "precision.param_gather": "bf16", "precision.grad_reduce": "bf16", "parallel.sharding": "zero3",
        "parallel.recompute.mode": "full", "training.steps": 63900, "software.attention": "flash"}),
    "nanotron: fp32 gradients, GPUs from the layout": ("nanotron.yaml", _GPU, {
        **_LLAMA, "model.tie_embeddings": True, "batch.global_batch_size": 24, "batch.micro_batch_size": 3,
        "batch.seq_length": 4096, "parallel.tensor": 2, "parallel.data": 4, "parallel.sharding": "none",
        "parallel.sequence_parallel": True, "parallel.overlap.tensor": True, "precision.preset": "bf16_mixed",
        "precision.params": "bf16", "precision.main_params": "fp32", "precision.grad_accum": "fp32",
        "precision.grad_reduce": "fp32", "cluster.gpus_per_node": 8, "cluster.num_nodes": 1}),
    "nanotron: experts in some layers, a shared one, no bias": ("nanotron_experts.yaml", _GPU, {
        "model.num_layers": 4, "model.ffn_hidden_size": 1536, "model.qkv_bias": False, "model.moe.num_experts": 16,
        "model.moe.top_k": 4, "model.moe.expert_ffn_hidden_size": 384, "model.moe.num_shared_experts": 1,
        "model.moe.shared_expert_ffn_hidden_size": 768, "model.moe.dense_layers": (0, 2),
        "batch.global_batch_size": 16, "parallel.sharding": "zero1"}),
    "GPT-NeoX: dashes, fp32_allreduce": ("gpt_neox.yml", _GPUS, {
        "model.num_layers": 12, "model.hidden_size": 768, "model.ffn_hidden_size": 3072,
        "model.num_attention_heads": 12, "model.vocab_size": 50432, "model.position_embedding": "rope",
        "model.normalization": "layernorm", "model.tie_embeddings": False, "model.dropout": 0.1,
        "batch.seq_length": 2048, "batch.micro_batch_size": 4, "batch.global_batch_size": 32, "parallel.tensor": 2,
        "parallel.pipeline": 1, "parallel.sharding": "zero1", "parallel.recompute.mode": "full",
        "precision.preset": "bf16_mixed", "precision.grad_reduce": "fp32", "precision.params": "bf16",
        "software.attention": "unfused"}),
    "axolotl: HSDP 4 x 2 with tensor 2, bf16 and tf32": ("axolotl.yaml", _GPU, {
        "model.num_layers": 32, "model.vocab_size": 128256, "batch.seq_length": 2048, "batch.micro_batch_size": 1,
        "batch.global_batch_size": 32, "parallel.tensor": 2, "parallel.data": 8, "parallel.sharding": "hsdp",
        "parallel.shard_size": 4, "parallel.recompute.mode": "full", "precision.preset": "bf16_mixed",
        "precision.grad_reduce": "bf16", "precision.param_gather": "bf16", "precision.params": "bf16",
        "precision.main_params": "none", "cluster.num_nodes": 2, "cluster.gpus_per_node": 8,
        "software.attention": "flash"}),
    "LLaMA-Factory: adapters": ("llama_factory.yaml", _GPUS, {
        "model.num_layers": 28, "model.lora.rank": 8, "model.lora.targets": "attention_and_mlp",
        "batch.seq_length": 4096, "batch.micro_batch_size": 2, "batch.global_batch_size": 128,
        "precision.preset": "bf16_mixed", "precision.params": "bf16", "parallel.recompute.mode": "full",
        "software.attention": "flash"}),
    "accelerate: quoted booleans, no model": ("accelerate.yaml", {
        **_GPU, "model.preset": "llama3-8b", "batch.seq_length": "2048", "batch.micro_batch_size": "1",
        "batch.gradient_accumulation_steps": "2"}, {
        "cluster.num_nodes": 2, "cluster.gpus_per_node": 8, "precision.preset": "bf16_mixed",
        "precision.grad_reduce": "bf16", "precision.param_gather": "bf16", "parallel.sharding": "zero3",
        "parallel.recompute.mode": "full", "batch.global_batch_size": 32}),
    "MaxText: base_ names, two layers a block, fp8": ("maxtext.yml", _GPU, {
        "model.num_layers": 24, "model.hidden_size": 1024, "model.ffn_hidden_size": 4096,
        "model.num_attention_heads": 16, "model.num_query_groups": 8, "model.head_dim": 128,
        "model.activation": "geglu", "model.tie_embeddings": True, "model.attention": "sliding",
        "model.window": 4096, "model.full_attention_every": 2, "model.post_norm": True, "parallel.tensor": 2,
        "parallel.sharding": "zero3", "parallel.data": 8, "parallel.recompute.mode": "full",
        "precision.preset": "fp8_mixed", "precision.params": "fp32",
        "batch.micro_batch_size": 4, "batch.global_batch_size": 32,  # 2 a device: 4 for two that share them, 32 for 16
        "batch.seq_length": 8192, "cluster.num_nodes": 2}),
    "MaxText: a run by its model's name, half a sequence a device": ("maxtext_run.yml", _GPU, {
        "model.num_layers": 32, "model.hidden_size": 4096, "model.moe.num_experts": 8, "model.moe.top_k": 2,
        "model.moe.capacity_factor": 1.25, "batch.micro_batch_size": 1, "batch.global_batch_size": 4,
        "batch.seq_length": 2048, "parallel.tensor": 2, "parallel.data": 4, "parallel.sharding": "zero3",
        "precision.preset": "bf16_mixed", "training.steps": 20}),
    "SimuMax: the sizes as they stand": ("simumax.json", {**_MODEL, "model.tie_embeddings": "false"}, {
        "model.num_layers": 32, "model.num_query_groups": 16, "model.head_dim": 128, "model.ffn_hidden_size": 14336,
        "model.activation": "swiglu", "model.normalization": "rmsnorm"}),
    "llm-analysis: key-value heads asked for": ("llm_analysis.json", {**_MODEL, "model.num_query_groups": "1"}, {
        "model.num_layers": 12, "model.hidden_size": 2048, "model.ffn_hidden_size": 8192, "model.num_query_groups": 1,
        "model.num_attention_heads": 16, "model.vocab_size": 49280, "model.activation": "gelu",
        "model.max_position_embeddings": 2048}),
}  # fmt: skip


def imported(name: str, settings: dict[str, str]) -> ImportedJob:
    return ImportedFiles.read([str(_FILES / name)]).merged(settings)


def field(job: Any, path: str) -> Any:
    for part in path.split("."):
        job = getattr(job, part)
    return job


@pytest.mark.parametrize("trait", READ)
def test_every_field_of_the_table_is_read(trait: str) -> None:
    name, settings, expected = READ[trait]
    job = imported(name, settings).job
    read = {path: field(job, path) for path in expected}
    assert read == expected


@pytest.mark.parametrize("trait", READ)
def test_every_value_says_where_it_comes_from(trait: str) -> None:
    name, settings, expected = READ[trait]
    origins = imported(name, settings).origins
    assert all(origin and origin != "derived" for origin in origins.values()), origins
    stated = [path for path in expected if path in origins and path not in settings]
    assert any(Path(name).name in origins[path] for path in stated)


def test_the_table_covers_every_format() -> None:
    named = {read_file(str(_FILES / name)).format for name, _, _ in READ.values()}
    assert len({read_file(str(_FILES / name)).path for name, _, _ in READ.values()}) == len(READ)
    assert len(named) >= len(FORMATS)
    assert {"Megatron-LM", "NeMo", "Megatron-Bridge", "DeepSpeed", "torchtitan", "llm-foundry", "nanotron", "GPT-NeoX",
            "axolotl", "LLaMA-Factory", "accelerate", "MaxText", "SimuMax", "llm-analysis"} <= named  # fmt: skip
