"""Several files as one job: what wins, what is asked for, and contradictions with their arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dataset_builder.job.errors import CannotRunError, JobError
from dataset_builder.job.importers.formats import ImportedFiles
from dataset_builder.job.importers.job_file import job_file
from dataset_builder.job.importers.merging import ImportedJob
from dataset_builder.job.importers.model_names import preset_called
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout

_ROOT = Path(__file__).parents[2]
_FILES = Path(__file__).parent / "files"
_RUN = {"cluster.gpu": "H100", "cluster.num_gpus": "8", "batch.seq_length": "1024", "batch.micro_batch_size": "1",
        "batch.global_batch_size": "64"}  # fmt: skip
_MODEL = {**_RUN, "precision.preset": "bf16_mixed"}  # beside a file that holds a model alone


def files_of(*names: str) -> ImportedFiles:
    return ImportedFiles.read([str(_FILES / name) for name in names])


def imported(*names: str, settings: Mapping[str, str] | None = None, **more: str) -> ImportedJob:
    """The job of these files; ``batch__seq_length=...`` stands for ``--set batch.seq_length=...``."""
    return files_of(*names).merged({**(settings or {}), **{key.replace("__", "."): more[key] for key in more}})


def refused(*names: str, settings: Mapping[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(JobError) as caught:
        imported(*names, settings=settings)
    return caught.value.reasons


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_model_an_engine_and_a_launcher_make_one_job() -> None:
    job = imported("llama_config.json", "deepspeed.json", "accelerate.yaml", cluster__gpu="A100",
                   batch__seq_length="4096", cluster__num_gpus="8", parallel__sharding="zero2").job  # fmt: skip
    assert (job.model.hidden_size, job.batch.global_batch_size, job.parallel.sharding) == (1024, 64, "zero2")
    assert (job.cluster.num_gpus, job.software.framework) == (8, "deepspeed")
    assert job.precision.grad_reduce == "fp32"  # communication_data_type, firmer than what accelerate's FSDP implies


def test_two_files_that_state_different_values_are_told_with_both() -> None:
    (reason, *_) = refused("llama_config.json", "llama_mha_config.json", settings=_MODEL)
    assert reason == (
        "model.num_query_groups: 4 in llama_config.json: num_key_value_heads, 16 in llama_mha_config.json: "
        "num_key_value_heads; expected one value, e.g. --set model.num_query_groups=4"
    )
    settings = {**_MODEL, "model.num_query_groups": "8"}
    assert files_of("llama_config.json", "llama_mha_config.json").merged(settings).job.model.num_query_groups == 8


def test_a_file_wins_over_the_one_that_it_extends() -> None:
    child = imported("primus_model.yaml", "qwen_base.yaml", settings=_MODEL).job
    assert (child.model.num_layers, child.model.normalization) == (80, "rmsnorm")
    assert child.model.qkv_bias is True
    reasons = refused("primus_model.yaml", settings=_MODEL)
    assert [reason.split(":")[0] for reason in reasons] == [
        "model.normalization", "model.position_embedding", "model.tie_embeddings", "model.bias", "model.activation",
    ]  # fmt: skip
    assert "qwen_base.yaml" in " ".join(files_of("primus_model.yaml").warnings)


def test_a_deepspeed_file_may_not_contradict_the_launcher_that_names_it(tmp_path: Path) -> None:
    """accelerate and the Hugging Face trainer stop there too; to change it is no inheritance."""
    launcher = write(tmp_path / "accelerate.yaml", {
        "distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"},
        "num_machines": 1, "num_processes": 8, "mixed_precision": "fp16", "machine_rank": 0,
    })  # fmt: skip
    engine = write(tmp_path / "ds.json", {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    files = ImportedFiles.read([str(launcher), str(engine), str(_FILES / "llama_config.json")])
    with pytest.raises(JobError, match=r"precision.preset: 'fp16_mixed' in accelerate.yaml.*'bf16_mixed' in ds.json"):
        files.merged(_RUN)
    job = files.merged({**_RUN, "precision.preset": "fp16_mixed"}).job.resolved()
    assert (job.precision.params, job.precision.grad_reduce) == ("fp16", "fp16")  # nothing of bf16 is left


def test_another_preset_keeps_what_a_file_states_beside_its_own() -> None:
    changed = imported("megatron_fp8.sh", settings=_RUN, precision__preset="bf16_mixed")
    stated = imported("megatron_fp8.sh", settings=_RUN).job.precision
    assert changed.job.precision.grad_reduce == stated.grad_reduce == "bf16"  # --grad-reduce-in-bf16
    assert changed.job.precision.linear == "same"
    replaced = imported("megatron_fp8.sh", settings=_RUN, precision="bf16_mixed")
    assert any("replaces all of it, " in line and "grad_reduce bf16" in line for line in replaced.warnings)


def test_a_loss_that_keeps_no_logits_is_named(tmp_path: Path) -> None:
    content = yaml.safe_load((_FILES / "axolotl.yaml").read_text())
    for switch in ({"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]},
                   {"liger_fused_linear_cross_entropy": True}):  # fmt: skip
        path = write(tmp_path / "axolotl.yaml", {**content, **switch})
        assert any("keeps no logits" in line for line in ImportedFiles.read([str(path)]).warnings)
    assert not any("keeps no logits" in line for line in files_of("axolotl.yaml").warnings)


def test_auto_is_asked_for_by_name_with_the_flag_that_supplies_it() -> None:
    """Case C31: one message that lists every open field."""
    reasons = refused("deepspeed_auto.json")
    for key, path in (
        ("train_batch_size", "batch.global_batch_size"), ("train_micro_batch_size_per_gpu", "batch.micro_batch_size"),
        ("gradient_accumulation_steps", "batch.gradient_accumulation_steps"), ("bf16.enabled", "precision.preset"),
    ):  # fmt: skip
        (reason,) = (reason for reason in reasons if reason.startswith(f"{path}: "))
        assert key in reason
        assert f"--set {path}=" in reason
    asked = {reason.split(":")[0] for reason in reasons}
    assert {"model", "batch.seq_length", "cluster.gpu", "cluster.num_gpus"} <= asked
    job = imported("deepspeed_auto.json", model__preset="llama3-8b", batch__seq_length="2048", cluster__gpu="H100",
                   batch__micro_batch_size="2", batch__gradient_accumulation_steps="4", cluster__num_gpus="16",
                   precision="bf16_mixed").job  # fmt: skip
    assert (job.batch.global_batch_size, job.parallel.sharding, job.cluster.num_nodes) == (128, "zero3", 2)


def test_every_placeholder_is_asked_for_by_its_name() -> None:
    reasons = " ".join(refused("model_zoo.yaml"))
    for placeholder in ("TP", "PP", "LAYERS_PER_VP", "EP", "MBS", "GBS", "SEQ_LEN"):
        assert f"${{{placeholder}}}" in reasons
    assert "MOE_GROUPED_GEMM" not in reasons  # without effect on the job


def test_a_stage_list_is_refused_with_its_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "ds.json", {"train_batch_size": 8, "zero_optimization": {"stage": [2, 3]}, "bf16": {}})
    with pytest.raises(JobError, match=r"stage: got \[2, 3\], which the autotuner would try one after the other"):
        ImportedFiles.read([str(path)]).merged(_RUN)


_BF16 = {"bf16": {"enabled": True}, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}


@pytest.mark.parametrize(
    ("changes", "sharding", "accumulated"),
    [
        ({"zero_optimization": {"stage": 0}}, "zero1", "fp32"),
        ({}, "zero1", "fp32"),
        ({"zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "bf16"}}, "none", "bf16"),
        ({"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "fp32"}}, "zero2", "fp32"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "none", "fp16"),
    ],
)
def test_deepspeed_in_bf16_without_zero_shards_optimizer_states(
    tmp_path: Path, changes: Mapping[str, Any], sharding: str, accumulated: str
) -> None:
    files = ImportedFiles.read([str(write(tmp_path / "ds.json", {**_BF16, **changes}))])
    job = files.merged({"model.preset": "llama3-8b", "cluster.gpu": "H100", "cluster.num_gpus": "8",
                        "batch.seq_length": "2048"}).job  # fmt: skip
    assert (job.parallel.sharding, job.precision.grad_accum) == (sharding, accumulated)
    told = "zero_optimization.stage 0 with bf16 is taken as zero1: DeepSpeed's BF16_Optimizer shards"
    assert any(told in line for line in files.warnings) is (sharding == "zero1")


def test_an_open_zero_stage_is_asked_for_in_bf16_too(tmp_path: Path) -> None:
    content = {**_BF16, "zero_optimization": {"stage": "auto"}, "data_types": {"grad_accum_dtype": "fp32"}}
    files = ImportedFiles.read([str(write(tmp_path / "ds.json", content))])
    with pytest.raises(JobError, match=r"parallel.sharding: missing, as ds.json: zero_optimization.stage is 'auto'"):
        files.merged({**_RUN, "model.preset": "llama3-8b"})


def test_a_batch_that_does_not_multiply_out_is_told_with_the_arithmetic(tmp_path: Path) -> None:
    path = write(tmp_path / "ds.json", {
        "train_batch_size": "1e2", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "reduce_bucket_size": "5e8"},
    })  # fmt: skip
    files = ImportedFiles.read([str(path)])
    settings = {"model.preset": "llama3-8b", "cluster.gpu": "H100", "cluster.num_gpus": "8", "batch.seq_length": "2048"}
    with pytest.raises(JobError) as caught:
        files.merged(settings)
    (reason,) = caught.value.reasons
    assert "100 (ds.json: train_batch_size)" in reason
    assert "micro batch 2 x accumulation 4 x 8 data-parallel GPUs = 64" in reason
    assert files.merged({**settings, "batch.global_batch_size": "64"}).job.batch.global_batch_size == 64


def test_gpus_that_do_not_hold_the_layout_are_told_with_the_arithmetic() -> None:
    found = imported("megatron_175b.sh", cluster__gpu="A100")
    (warning,) = (text for text in found.warnings if text.startswith("cluster:"))
    assert "1 nodes x 8 = 8 GPUs" in warning
    assert "tensor 8 x pipeline 16 = 128" in warning
    with pytest.raises(CannotRunError, match="128 = TP8 x PP16"):
        rank_layout(found.job)
    assert "grows in phases; the final one (1536)" in " ".join(files_of("megatron_175b.sh").warnings)


def test_layers_that_do_not_divide_into_chunks_are_refused(tmp_path: Path) -> None:
    script = (_FILES / "megatron_fp8.sh").read_text().replace("--num-layers 16 ", "--num-layers 18 ")
    path = write(tmp_path / "run.sh", script)
    with pytest.raises(JobError, match=r"18 layers do not divide into chunks of 2 on 4 stages \(18 / \(4 x 2\)\)"):
        ImportedFiles.read([str(path)]).merged({"cluster.gpu": "H100"})


def test_bf16_beside_fp8_is_the_linears_fp8_and_said_aloud() -> None:
    files = files_of("megatron_fp8.sh")
    assert "--bf16 and --fp8-format are both on: linears run in fp8_current, everything else in bf16" in " ".join(
        files.warnings
    )


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("ds.json", {"fp16": {"enabled": True}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
         "fp16.enabled and bf16.enabled are both true"),
        ("run.sh", "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --fp16 --bf16\n",
         "fp16 and bf16 are both on"),
        ("a.yaml", "base_model: gpt2\nsequence_len: 8\nmicro_batch_size: 1\nbf16: true\nfp16: true\n",
         "bf16 and fp16 are both true"),
        ("b.yml", "pos_emb: none\nnorm: layernorm\npipe_parallel_size: 1\nprecision: bfloat16\nfp16: {enabled: true}\n",
         "precision bfloat16 and fp16.enabled are both on"),
    ],
)  # fmt: skip
def test_bf16_and_fp16_together_are_an_error(tmp_path: Path, name: str, content: Any, reason: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(JobError) as caught:
        ImportedFiles.read([str(path)]).merged(_RUN)
    assert reason in " ".join(caught.value.reasons)


def test_a_name_that_contradicts_the_sizes_is_told(tmp_path: Path) -> None:
    found = imported("gpt2/config.json", settings=_MODEL)
    assert any("'gpt2' means gpt2-small" in text and "as gpt2-large" in text for text in found.warnings)
    assert any("774 M parameters" in text for text in found.warnings)
    (tmp_path / "llama-70b").mkdir()
    path = write(tmp_path / "llama-70b" / "config.json", (_FILES / "llama_config.json").read_text())
    warnings = ImportedFiles.read([str(path)]).merged(_MODEL).warnings
    assert any("'llama-70b' says 70B" in text for text in warnings)


def test_a_reduction_in_fp32_costs_what_it_costs() -> None:
    """Case C20: bf16 that all-reduces in fp32 sends twice the bytes."""
    job = imported("gpt_neox.yml", cluster__gpu="RTX3090", cluster__num_gpus="8").job.resolved()
    assert (job.precision.compute, job.precision.grad_reduce) == ("bf16", "fp32")


@pytest.mark.parametrize(
    ("written", "activation", "width"),
    [
        ('"mlp_type": "llama", "activation": "silu"', "swiglu", 2048),  # 8/3 of 768
        ('"mlp_type": "llama", "activation": "silu", "intermediate-size": 3000', "swiglu", 3000),
        ('"activation": "swiglu", "intermediate-size": 6144', "swiglu", 2048),
        ('"activation": "swiglu", "mlp_multiple_of": 256', "swiglu", 1024),
        ('"activation": "silu", "intermediate-size": 3000', "gelu", 3000),
    ],
)
def test_gpt_neox_gates_by_kind_or_by_activation(tmp_path: Path, written: str, activation: str, width: int) -> None:
    text = (_FILES / "gpt_neox.yml").read_text().replace('"norm": "layernorm"', f'"norm": "layernorm", {written}')
    job = ImportedFiles.read([str(write(tmp_path / "job.yml", text))]).merged(_RUN | {"parallel.tensor": "1"}).job
    assert (job.model.activation, job.model.ffn_hidden_size) == (activation, width)


def changed(tmp_path: Path, name: str, *changes: tuple[str, str]) -> ImportedFiles:
    """A file of the table with other text in it."""
    text = (_FILES / name).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return ImportedFiles.read([str(write(tmp_path / name, text))])


@pytest.mark.parametrize(
    ("mesh", "each", "micro", "total"),
    [
        ("ici_tensor_parallelism: 2", "0.5", 1, 4),
        ("ici_tensor_parallelism: 2", "1.5", 3, 12),
        ("ici_tensor_parallelism: 2\ngradient_accumulation_steps: 3", "1", 2, 24),
        ("ici_pipeline_parallelism: 2", "1", 1, 8),
        ("ici_pipeline_parallelism: 2\nnum_pipeline_microbatches: 4", "2", 1, 16),
    ],
)
def test_maxtext_counts_sequences_by_all_devices(tmp_path: Path, mesh: str, each: str, micro: int, total: int) -> None:
    files = changed(tmp_path, "maxtext_run.yml", ("ici_tensor_parallelism: 2", mesh), ("size: 0.5", f"size: {each}"))
    batch = files.merged({"cluster.gpu": "H100"}).job.batch
    assert (batch.micro_batch_size, batch.global_batch_size) == (micro, total)


def test_part_of_a_sequence_for_a_device_is_explained_and_can_be_given(tmp_path: Path) -> None:
    files = changed(tmp_path, "maxtext_run.yml", ("size: 0.5", "size: 0.125"))
    with pytest.raises(JobError) as caught:
        files.merged({"cluster.gpu": "H100"})
    (reason,) = caught.value.reasons
    assert reason.startswith("batch.micro_batch_size: missing, as ")
    assert "0.125, one sequence for 8 devices, but tensor x context of the mesh is 2; with 8 it is" in reason
    wider = {"cluster.gpu": "H100", "parallel.tensor": "8", "batch.micro_batch_size": "1", "parallel.data": "1"}
    assert files.merged(wider).job.batch.global_batch_size == 1
    with pytest.raises(JobError, match=r"per_device_batch_size: got -1; expected sequences, above 0"):
        changed(tmp_path, "maxtext_run.yml", ("size: 0.5", "size: -1")).merged({"cluster.gpu": "H100"})


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("capacity_factor: 1.25", "capacity_factor: -1.0", None),
        ("megablox: False", "megablox: True", "capacity_factor 1.25 has no effect"),
        ("megablox: False", "sparse_matmul: True", "capacity_factor 1.25 has no effect"),
    ],
)
def test_maxtext_drops_no_tokens_without_a_capacity(tmp_path: Path, old: str, new: str, told: str | None) -> None:
    files = changed(tmp_path, "maxtext_run.yml", (old, new))
    moe = files.merged({"cluster.gpu": "H100"}).job.model.moe
    assert moe is not None
    assert moe.capacity_factor is None
    assert any("capacity_factor" in line for line in files.warnings) == (told is not None)
    assert told is None or any(told in line for line in files.warnings)


def test_a_model_that_maxtext_names_and_nobody_ships_is_asked_for(tmp_path: Path) -> None:
    files = changed(tmp_path, "maxtext_run.yml", ("mixtral-8x7b", "subsup"))
    with pytest.raises(JobError, match=r"model: missing, as maxtext_run.yml: model_name subsup is no shipped model"):
        files.merged({"cluster.gpu": "H100"})
    dense = changed(tmp_path, "maxtext_run.yml", ("mixtral-8x7b", "llama2-7b")).merged({"cluster.gpu": "H100"})
    assert dense.job.model.moe is None


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("deepseek2-16b", "deepseek-v2-lite"),
        ("deepseek2-236b", "deepseek-v2"),
        ("deepseek3-671b", "deepseek-v3"),
        ("deepseek3-671b-2dfsdp", "deepseek-v3"),
        ("deepseek3-671b-batchsplit", "deepseek-v3"),
    ],
)
def test_maxtexts_own_names_of_shipped_models_are_found(tmp_path: Path, name: str, preset: str) -> None:
    files = changed(tmp_path, "maxtext_run.yml", ("mixtral-8x7b", name))
    assert files.merged({"cluster.gpu": "H100"}).job.model.name == preset


@pytest.mark.parametrize("key", ["base_moe_mlp_dim", "base_moe_dim"])
def test_maxtext_experts_have_their_width_under_either_name(tmp_path: Path, key: str) -> None:
    experts = f"num_experts: 8\nnum_experts_per_tok: 2\n{key}: 512\nhead_dim"
    job = changed(tmp_path, "maxtext.yml", ("head_dim", experts)).merged({"cluster.gpu": "H100"}).job
    assert job.model.moe is not None
    assert job.model.moe.expert_ffn_hidden_size == 512


def test_nanotron_experts_are_as_wide_as_the_dense_layer_unless_told(tmp_path: Path) -> None:
    files = changed(
        tmp_path, "nanotron_experts.yaml", ("      moe_intermediate_size: 384\n", ""), ("      layers: [1, 3]\n", ""),
        ("      shared_expert_intermediate_size: 768\n", ""), ("attention_bias: false", "attention_bias: true"),
    )  # fmt: skip
    model = files.merged({"cluster.gpu": "H100"}).job.model
    assert model.moe is not None
    assert (model.moe.expert_ffn_hidden_size, model.moe.shared_width, model.moe.dense_layers) == (1536, 1536, ())
    assert model.qkv_bias is True
    silent = changed(tmp_path, "nanotron_experts.yaml", ("    attention_bias: false\n", ""))
    assert silent.merged({"cluster.gpu": "H100"}).job.model.qkv_bias is False


_FOUNDRY_RUN = {"cluster.gpu": "A100", "cluster.num_gpus": "256"}  # 1024 sequences: 4 a GPU


def test_llm_foundry_reduces_a_micro_batch_to_the_share_of_a_device() -> None:
    found = imported("llm_foundry.yaml", settings=_FOUNDRY_RUN)
    assert (found.job.batch.micro_batch_size, found.job.batch.global_batch_size) == (4, 1024)
    told = "reduced from 8 to 1024 sequences / 256 data-parallel GPUs"
    assert any(told in line for line in found.warnings)
    assert told in found.origins["batch.micro_batch_size"]
    fewer = imported("llm_foundry.yaml", settings={**_FOUNDRY_RUN, "cluster.num_gpus": "64"})
    assert fewer.job.batch.micro_batch_size == 8
    assert not any("reduced from" in line for line in fewer.warnings)
    with pytest.raises(CannotRunError, match="global_batch_size"):
        rank_layout(imported("llm_foundry.yaml", settings={**_FOUNDRY_RUN, "batch.micro_batch_size": "8"}).job)


def test_llm_foundry_once_counted_micro_batches(tmp_path: Path) -> None:
    size = "device_train_microbatch_size: 8"
    older = changed(tmp_path, "llm_foundry.yaml", (size, "device_train_grad_accum: 2"))
    assert older.merged(_FOUNDRY_RUN).job.batch.micro_batch_size == 2
    logged = changed(tmp_path, "llm_foundry.yaml", (size, f"{size}\ndevice_train_grad_accum: 16"))
    assert logged.merged(_FOUNDRY_RUN).job.batch.micro_batch_size == 4
    assert not any("device_train_grad_accum" in line for line in logged.warnings)
    for key in ("device_train_grad_accum", "device_train_microbatch_size"):
        with pytest.raises(JobError, match=f"batch.micro_batch_size: missing, as llm_foundry.yaml: {key} is 'auto'"):
            changed(tmp_path, "llm_foundry.yaml", (size, f"{key}: auto")).merged(_FOUNDRY_RUN)


def test_a_trainer_with_llm_foundrys_batch_keys_is_not_llm_foundry(tmp_path: Path) -> None:
    path = write(tmp_path / "olmo.yaml", (
        "run_name: tiny\nmodel: {d_model: 512, n_heads: 8, n_layers: 4, mlp_hidden_size: 2048}\n"
        "max_duration: 2ep\nglobal_train_batch_size: 64\ndevice_train_microbatch_size: 2\n"
        "device_eval_batch_size: 2\nfsdp: {wrapping_strategy: by_block}\ndata: {num_workers: 4}\n"
    ))  # fmt: skip
    with pytest.raises(JobError, match="no known format"):
        ImportedFiles.read([str(path)])


_TE = '"te_layernorm_mlp": true, "te_mha": true, "te_fp8_format": "hybrid", "norm": "layernorm"'


def test_gpt_neox_runs_transformer_engine_and_fp8_only_where_attention_does(tmp_path: Path) -> None:
    files = changed(tmp_path, "gpt_neox.yml", ('"norm": "layernorm"', _TE))
    job = files.merged(_RUN).job
    assert (job.software.attention, job.software.fused_kernels, job.precision.linear) == ("flash", True, "same")
    assert any("te_fp8_format hybrid has no effect without te_fp8_mha" in line for line in files.warnings)
    files = changed(tmp_path, "gpt_neox.yml", ('"norm": "layernorm"', f'"te_fp8_mha": true, {_TE}'))
    job = files.merged(_RUN).job
    assert (job.precision.linear, job.precision.attention) == ("fp8_delayed", "fp8")
    assert job.precision.preset == "bf16_mixed"
    assert any("te_fp8_wgrad is off" in line for line in files.warnings)


@pytest.mark.parametrize("key", ["cpu_offload", "cpu_offload_params", "cpu_offload_param"])
def test_offloading_by_its_older_name_is_told(tmp_path: Path, key: str) -> None:
    zero = '"zero_optimization": {'
    for name, old in (("deepspeed.json", f"{zero}"), ("gpt_neox.yml", f"{zero}")):
        files = changed(tmp_path, name, (old, f'{zero}"{key}": true, "cpu_offload_use_pin_memory": true, '))
        assert any(f"zero_optimization.{key} is not modelled" in line for line in files.warnings)
        files = changed(tmp_path, name, (old, f'{zero}"{key}": false, '))
        assert not any(key in line for line in files.warnings)


@pytest.mark.parametrize(
    ("strategy", "sharding"), [("'full'", "zero3"), ("hybrid", "hsdp"), ("grad", "zero2"), ("null", "zero3")]
)
def test_nemo_shards_by_fsdp_when_it_is_on(tmp_path: Path, strategy: str, sharding: str) -> None:
    fsdp = f"model:\n  fsdp: True\n  fsdp_sharding_strategy: {strategy}\n  fsdp_grad_reduce_dtype: bf16\n"
    text = (_FILES / "nemo_launcher.yaml").read_text().replace("model:\n", fsdp, 1)
    job = ImportedFiles.read([str(write(tmp_path / "job.yaml", text))]).merged({"cluster.gpu": "H100"}).job
    assert (job.parallel.sharding, job.precision.grad_reduce) == (sharding, "bf16")


@pytest.mark.parametrize(
    ("options", "sharding"),
    [("full_shard auto_wrap", "zero3"), ("hybrid_shard auto_wrap", "hsdp"), ("shard_grad_op", "zero2")],
)
def test_llama_factory_shards_by_the_options_of_fsdp(tmp_path: Path, options: str, sharding: str) -> None:
    text = (_FILES / "llama_factory.yaml").read_text() + f"\nfsdp: {options}\n"
    settings = {"cluster.gpu": "H100", "cluster.num_gpus": "8"}
    job = ImportedFiles.read([str(write(tmp_path / "job.yaml", text))]).merged(settings).job
    assert job.parallel.sharding == sharding


def test_a_longest_sequence_is_not_the_trainings() -> None:
    assert any(reason.startswith("batch.seq_length: missing") for reason in refused("llama_config.json"))


def test_a_sequence_beyond_the_learned_positions_is_told_with_both_lengths() -> None:
    longer = {**_MODEL, "batch.seq_length": "1025"}
    told = "batch.seq_length: 1025 tokens, but the model has 1024 learned positions; expected at most 1024"
    assert told in imported("gpt2/config.json", settings=longer).warnings
    assert not any("learned positions" in text for text in imported("gpt2/config.json", settings=_MODEL).warnings)


def test_layers_of_unequal_blocks_come_from_the_blocks() -> None:
    origins = imported("blocks_config.json", settings=_MODEL).origins
    for size in ("num_layers", "ffn_hidden_size", "num_query_groups"):
        assert origins[f"model.{size}"] == "blocks_config.json: block_configs"


@pytest.mark.parametrize("filtered", ['"output,attention.wk"', '["output", "attention.wk"]'])
def test_linears_left_out_of_float8_are_told(tmp_path: Path, filtered: str) -> None:
    text = (_FILES / "torchtitan_float8.toml").read_text().replace('"output"', filtered)
    files = ImportedFiles.read([str(write(tmp_path / "job.toml", text))])
    assert any("filter_fqns attention.wk: predicted in fp8_tensorwise" in text for text in files.warnings)
    assert files.merged({"cluster.gpu": "H100", "cluster.num_gpus": "128"}).job.precision.lm_head == "bf16"


@pytest.mark.parametrize(
    ("written", "schedule"),
    [("Interleaved1F1B", "interleaved"), ("ZBVZeroBubble", "zero_bubble_v"), ("DualPipeV", "dualpipe_v")],
)
def test_schedules_of_two_chunks_keep_their_shape(tmp_path: Path, written: str, schedule: str) -> None:
    text = (_FILES / "torchtitan.json").read_text().replace('"1F1B"', f'"{written}"')
    job = ImportedFiles.read([str(write(tmp_path / "job.json", text))]).merged({"cluster.gpu": "H100"}).job
    assert (job.parallel.schedule, job.parallel.virtual_pipeline) == (schedule, 2)
    rank_layout(job)  # it runs as it is


def test_unknown_keys_are_listed() -> None:
    assert any("--made-up-flag" in text for text in files_of("megatron_fp8.sh").warnings)
    assert any("training.aggressive_memory_mode" in text for text in files_of("torchtitan_experts.toml").warnings)


@pytest.mark.parametrize(
    "names", [["megatron_fp8.sh"], ["nemo_launcher.yaml"], ["axolotl.yaml"], ["nanotron.yaml"], ["torchtitan.json"]]
)
def test_the_job_file_reads_as_the_same_job_and_comments_every_value(names: list[str]) -> None:
    found = imported(*names, cluster__gpu="H100")
    text = job_file(found, ", ".join(names))
    assert TrainingJob.parse(yaml.safe_load(text)) == found.job
    values = [
        line for line in text.splitlines() if line.strip() and not line.startswith("#") and not line.endswith(":")
    ]
    assert len(values) > 15
    assert all("  # " in line for line in values)


def test_the_command_writes_a_job_that_infer_answers(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    command = [sys.executable, "-m", "dataset_builder.convert", str(_FILES / "megatron_fp8.sh"), "--set",
               "cluster.gpu=H100", "--output", str(job)]  # fmt: skip
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
    assert "--made-up-flag" in done.stderr
    answers = []
    for arguments in ([str(job)], ["--from", str(_FILES / "megatron_fp8.sh"), "--set", "cluster.gpu=H100"]):
        command = [sys.executable, "-m", "gnn_predictor.infer", *arguments, "--format", "json"]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    assert answers[0]["iteration_time_s"] == answers[1]["iteration_time_s"]
    assert any("both on" in text for text in answers[1]["warnings"])


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--from", "deepspeed_auto.json"], 2, "--set batch.micro_batch_size=N"),
        (["--from", "megatron_175b.sh", "--set", "cluster.gpu=A100"], 4, "128 = TP8 x PP16"),
        (["--from", "no_such_file.yaml"], 2, "cannot read the file"),
        (["--from", "primus_model.yaml"], 2, "give it as another file"),
        (["job.yaml", "--from", "llama_config.json"], 2, "expected job files, or --from"),
        ([], 2, "expected job files, or --from"),
    ],
)
def test_infer_tells_what_other_tools_files_lack(arguments: list[str], code: int, told: str) -> None:
    command = [sys.executable, "-m", "gnn_predictor.infer", *arguments]
    done = subprocess.run(command, cwd=_FILES, capture_output=True, text=True, timeout=120, env=_environment())
    assert (done.returncode, done.stdout) == (code, "")
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(_ROOT)}


def test_variants_of_other_tools_files_stand_side_by_side() -> None:
    command = [sys.executable, "-m", "gnn_predictor.infer", "--from", "gpt_neox.yml", "--set", "cluster.gpu=RTX3090",
               "--set", "cluster.num_gpus=8", "--compare", "precision.grad_reduce=fp32,bf16",
               "--format", "json"]  # fmt: skip
    done = subprocess.run(command, cwd=_FILES, capture_output=True, text=True, timeout=240, env=_environment())
    assert done.returncode == 0, done.stderr
    full, half = json.loads(done.stdout)["variants"]
    assert full["iteration_time_s"] > half["iteration_time_s"]
    assert sum(full["parts"]["communication"].values()) > sum(half["parts"]["communication"].values())


def test_what_an_undecided_branch_sets_is_asked_for(tmp_path: Path) -> None:
    """A script of positional arguments: nobody knows whether it trains in bf16, so fp32 is not taken for granted."""
    path = write(tmp_path / "run.sh", '''#!/bin/bash
        SIZE=$1; PRECISION=$2
        if [ -z ${CHUNKS} ]; then more=""; else more="--num-layers-per-virtual-pipeline-stage ${CHUNKS}"; fi
        if [ $SIZE = 7B ]; then layers=28; tie="--untie-embeddings-and-output-weights"; fi
        case $PRECISION in
            bf16) options="--bf16" ;;
            fp8) options="--bf16 --fp8-format hybrid" ;;
        esac
        command="torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers ${layers} --hidden-size 512 \\
            --num-attention-heads 8 --vocab-size 1000 --micro-batch-size 1 --global-batch-size 8 --seq-length 64"
        eval $command $options $tie $more
    ''')  # fmt: skip
    files = ImportedFiles.read([str(path)])
    with pytest.raises(JobError) as caught:
        files.merged({"cluster.gpu": "H100"})
    asked = [reason.split(":")[0] for reason in caught.value.reasons]
    assert asked == ["model.num_layers", "model.tie_embeddings", "precision.preset"]
    assert "cannot tell what ${2} is" in " ".join(files.warnings)
    given = {
        "cluster.gpu": "H100",
        "model.num_layers": "28",
        "model.tie_embeddings": "false",
        "precision": "bf16_mixed",
    }
    assert files.merged(given).job.parallel.virtual_pipeline == 1


def test_wrong_values_are_told_in_the_message_that_asks_for_the_missing_ones(tmp_path: Path) -> None:
    config = json.loads((_FILES / "llama_mha_config.json").read_text())
    path = write(tmp_path / "config.json", {**config, "num_hidden_layers": -3, "vocab_size": float("nan")})
    with pytest.raises(JobError) as caught:
        ImportedFiles.read([str(path)]).merged({"cluster.gpu": "H1000"})
    told = dict(reason.split(": ", 1) for reason in caught.value.reasons)
    assert told["model.num_layers"].startswith("got -3")
    assert told["model.vocab_size"].startswith("got nan")
    assert told["cluster.gpu"].startswith("got 'H1000'")
    assert {"batch.seq_length", "precision.preset", "cluster.num_gpus"} <= set(told)


_LORA = """
base_model: someone/no-such-model
adapter: lora
lora_r: 16
lora_target_linear: true
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 4
bf16: true
"""


def test_an_adapter_stays_on_the_model_that_is_given(tmp_path: Path) -> None:
    files = ImportedFiles.read([str(write(tmp_path / "lora.yaml", _LORA))])
    run = {"cluster.gpu": "H100", "cluster.num_gpus": "8", "model.preset": "llama3-8b"}
    given = files.merged(run)
    assert given.job.model.lora is not None
    assert (given.job.model.lora.rank, given.job.model.lora.targets) == (16, "attention_and_mlp")
    assert given.origins["model.overrides.lora.rank"] == "lora.yaml: lora_r"
    changed = files.merged({**run, "model.lora.rank": "4"})
    assert changed.job.model.lora is not None
    assert changed.job.model.lora.rank == 4
    assert changed.origins["model.overrides.lora.rank"] == "given with --set"


def test_sizes_that_a_given_model_replaces_are_told() -> None:
    given = imported("llama_config.json", settings={**_MODEL, "model.preset": "llama3-8b"})
    assert given.job.model.hidden_size == 4096
    assert "model.preset: what is given replaces what the files state of model too: num_layers 8" in " ".join(
        given.warnings
    )


def test_a_base_model_that_is_not_shipped_is_asked_for_by_its_name(tmp_path: Path) -> None:
    files = ImportedFiles.read([str(write(tmp_path / "lora.yaml", _LORA))])
    with pytest.raises(JobError) as caught:
        files.merged({"cluster.gpu": "H100", "cluster.num_gpus": "8"})
    (reason,) = caught.value.reasons
    assert reason.startswith("model: missing, as lora.yaml: base_model someone/no-such-model is no shipped model")


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("unsloth/DeepSeek-V3-0324", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3.1-70b"),  # Llama 3.3 has the sizes of 3.1
        ("someone/unknown-v2", None),
    ],
)
def test_versions_in_a_models_name(name: str, preset: str | None) -> None:
    assert preset_called(name) == preset
