"""axolotl and LLaMA-Factory: what their keys mean for weights, recomputation, adapters and ranks, and what is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dataset_builder.job.errors import JobError
from dataset_builder.job.importers.formats import ImportedFiles
from dataset_builder.job.precision import PrecisionPolicy
from tests.importers.test_formats import field

_FILES = Path(__file__).parent / "files"
_SET = {"cluster.gpu": "H100", "cluster.num_gpus": "8"}
_AXOLOTL = {"base_model": "meta-llama/Llama-3.1-8B", "datasets": [{"path": "some/data"}], "sequence_len": 2048,
            "micro_batch_size": 2, "bf16": "auto", "optimizer": "adamw_torch"}  # fmt: skip
_LORA = {"adapter": "lora", "lora_r": 16, "lora_target_linear": True}
_FSDP2 = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
_FP8 = {"fp8": True, "fp8_enable_fsdp_float8_all_gather": True}


def axolotl(folder: Path, **changes: Any) -> ImportedFiles:
    path = folder / "axolotl.yaml"
    path.write_text(json.dumps({**_AXOLOTL, **changes}))
    return ImportedFiles.read([str(path)])


def llama_factory(folder: Path, **changes: Any) -> ImportedFiles:
    path = folder / "llama_factory.yaml"
    path.write_text(json.dumps({**yaml.safe_load((_FILES / "llama_factory.yaml").read_text()), **changes}))
    return ImportedFiles.read([str(path)])


def precision(files: ImportedFiles) -> PrecisionPolicy:
    return files.merged(_SET).job.resolved().precision


@pytest.mark.parametrize("changes", [{}, _FSDP2, {"fsdp_config": {"fsdp_version": 2}}], ids=str)
def test_axolotl_trains_the_16_bit_weights_that_it_loads(tmp_path: Path, changes: Mapping[str, Any]) -> None:
    files = axolotl(tmp_path, **changes)
    policy = precision(files)
    assert (policy.preset, policy.params, policy.main_params) == ("bf16_mixed", "bf16", "none")
    assert (policy.grad_accum, policy.grad_reduce, policy.optimizer_state) == ("bf16", "bf16", "bf16")
    assert "weights are loaded in bf16" in files.merged(_SET).origins["precision.params"]
    assert precision(axolotl(tmp_path, **changes, bf16=False, fp16=True)).params == "fp16"


@pytest.mark.parametrize(
    "changes", [{"fsdp": ["full_shard"], "fsdp_config": {"fsdp_version": 1}}, {"bf16": False}], ids=str
)
def test_axolotl_trains_in_fp32_what_fsdp_1_casts_or_nothing_narrows(
    tmp_path: Path, changes: Mapping[str, Any]
) -> None:
    policy = precision(axolotl(tmp_path, **changes))
    assert (policy.params, policy.main_params, policy.optimizer_state) == ("fp32", "none", "fp32")


@pytest.mark.parametrize(("key", "preset"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_axolotl_in_16_bits_without_autocast(tmp_path: Path, key: str, preset: str) -> None:
    files = axolotl(tmp_path, bf16=False, fp16=False, **{key: True})
    assert (precision(files).preset, precision(files).params) == (preset, preset)


@pytest.mark.parametrize("changes", [{}, {"fsdp": ["full_shard"], "fsdp_config": {"fsdp_version": 1}}, _FSDP2], ids=str)
def test_frozen_weights_beside_adapters_stay_in_16_bits(tmp_path: Path, changes: Mapping[str, Any]) -> None:
    files = axolotl(tmp_path, **_LORA, **changes)
    assert (precision(files).params, precision(files).main_params) == ("bf16", "fp32")
    assert "frozen weights" in files.merged(_SET).origins["precision.params"]


def test_llama_factory_freezes_16_bits_and_trains_fp32(tmp_path: Path) -> None:
    frozen, full = llama_factory(tmp_path), llama_factory(tmp_path, finetuning_type="full")
    assert (precision(frozen).params, precision(frozen).main_params) == ("bf16", "fp32")
    assert (precision(full).params, precision(full).main_params) == ("fp32", "none")


def test_deepspeed_keeps_the_weights_beside_adapters_as_it_says(tmp_path: Path) -> None:
    """Both files speak of the weights; DeepSpeed's knows better and does not contradict."""
    path = tmp_path / "axolotl.yaml"
    for changes in ({}, _LORA):
        path.write_text(json.dumps({**_AXOLOTL, **changes, "gradient_accumulation_steps": 1, "deepspeed": "ds.json"}))
        beside = tmp_path / "ds.json"
        beside.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
        policy = ImportedFiles.read([str(path), str(beside)]).merged(_SET).job.precision
        assert (policy.params, policy.main_params, policy.optimizer_state) == ("bf16", "fp32", "fp32")


@pytest.mark.parametrize("method", ["dpo", "kto", "orpo", "grpo"])
def test_axolotl_tells_that_preferences_take_more_than_one_pass(tmp_path: Path, method: str) -> None:
    warnings = " ".join(axolotl(tmp_path, rl=method).warnings)
    assert f"rl {method}: predicted as one forward and backward pass of the trained model" in warnings
    assert "predicted as one" not in " ".join(axolotl(tmp_path).warnings)


@pytest.mark.parametrize(("stage", "is_told"), [("dpo", True), ("ppo", True), ("rm", True), ("kto", True),
                                                ("sft", False), ("pt", False)])  # fmt: skip
def test_llama_factory_tells_that_its_stage_takes_more_than_one_pass(tmp_path: Path, stage: str, is_told: bool) -> None:
    warnings = " ".join(llama_factory(tmp_path, stage=stage).warnings)
    assert (f"stage {stage}: predicted as one forward and backward pass" in warnings) is is_told


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({"fsdp_config": {"activation_checkpointing": True}}, "full"),
        ({"fsdp_config": {"fsdp_activation_checkpointing": True}, "gradient_checkpointing": False}, "full"),
        ({"fsdp_config": {"activation_checkpointing": False}, "gradient_checkpointing": True}, "full"),
        ({"fsdp_config": {"activation_checkpointing": False}}, "none"),
        ({}, "none"),
    ],
)
def test_axolotl_recomputes_by_its_trainer_or_by_fsdp(tmp_path: Path, changes: Mapping[str, Any], mode: str) -> None:
    assert field(axolotl(tmp_path, **changes).merged(_SET).job, "parallel.recompute.mode") == mode


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gradient_checkpointing": "offload"}, "gradient_checkpointing 'offload'"),
        ({"gradient_checkpointing": "offload_disk"}, "gradient_checkpointing 'offload_disk'"),
        ({"gradient_checkpointing": True, "activation_offloading": "legacy"}, "activation_offloading 'legacy'"),
    ],
)
def test_checkpoints_in_host_memory_are_recomputed_and_told(
    tmp_path: Path, changes: Mapping[str, Any], told: str
) -> None:
    files = axolotl(tmp_path, **changes)
    assert field(files.merged(_SET).job, "parallel.recompute.mode") == "full"
    assert f"{told}: the offload to host memory is not predicted" in " ".join(files.warnings)


def test_another_word_for_checkpointing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="gradient_checkpointing: got 'sometimes'; expected true or false"):
        axolotl(tmp_path, gradient_checkpointing="sometimes").merged(_SET)


@pytest.mark.parametrize(
    ("changes", "gpus", "data", "sharding", "shard_size"),
    [
        ({"expert_parallel_size": 2, "dp_shard_size": 2}, 4, 4, "zero3", None),
        ({"expert_parallel_size": 2, "dp_shard_size": 2, "context_parallel_size": 2}, 8, 4, "zero3", None),
        ({"expert_parallel_size": 2, "dp_shard_size": 2, "dp_replicate_size": 2}, 8, 8, "hsdp", 4),
        ({"expert_parallel_size": 8, "dp_shard_size": 1}, 8, 8, "zero3", None),
    ],
)
def test_axolotl_ranks_of_experts_are_data_parallel_too(
    tmp_path: Path, changes: Mapping[str, Any], gpus: int, data: int, sharding: str, shard_size: int | None
) -> None:
    files = axolotl(tmp_path, base_model="Qwen/Qwen3-30B-A3B", **_FSDP2, **changes)
    job = files.merged({**_SET, "cluster.num_gpus": str(gpus)}).job
    assert (job.parallel.data, job.parallel.expert) == (data, changes["expert_parallel_size"])
    assert (job.parallel.sharding, job.parallel.shard_size) == (sharding, shard_size)
    assert job.batch.global_batch_size == 2 * data


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lora_target_linear": True}, "lora_target_linear True"),
        ({"lora_target_modules": ["q_proj"], "lora_target_linear": True}, "lora_target_linear True"),
        ({"lora_target_modules": ["q_proj", "w1", "w2"]}, "lora_target_modules"),
        ({"lora_target_parameters": ["mlp.experts.down_proj"]}, "lora_target_parameters"),
    ],
)
def test_adapters_of_experts_are_told_and_left_out(tmp_path: Path, changes: Mapping[str, Any], told: str) -> None:
    files = axolotl(tmp_path, base_model="mistralai/Mixtral-8x7B-v0.1", adapter="qlora", lora_r=32, **changes)
    found = files.merged(_SET)
    assert found.job.model.lora is not None
    assert (found.job.model.lora.rank, found.job.model.lora.targets) == (32, "attention")
    (warning,) = (line for line in found.warnings if "adapters of experts are not modelled" in line)
    assert told in warning


def test_llama_factory_leaves_out_adapters_of_experts_too(tmp_path: Path) -> None:
    files = llama_factory(tmp_path, model_name_or_path="mistralai/Mixtral-8x7B-v0.1")
    found = files.merged(_SET)
    assert found.job.model.lora is not None
    assert found.job.model.lora.targets == "attention"
    assert any("adapters of experts" in line and "lora_target 'all'" in line for line in found.warnings)


@pytest.mark.parametrize(
    ("base_model", "other", "given"),
    [
        ("someone/a-mixtral", "mixtral_config.json", {}),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral_config.json", {}),  # the sizes of the file hold
        ("someone/a-mixtral", None, {"model.preset": "mixtral-8x7b"}),
        ("someone/a-mixtral", None, {"model.config": str(_FILES / "mixtral_config.json")}),
    ],
)
def test_adapters_of_experts_are_left_out_whoever_gives_the_experts(
    tmp_path: Path, base_model: str, other: str | None, given: Mapping[str, str]
) -> None:
    axolotl(tmp_path, **_LORA, base_model=base_model, gradient_accumulation_steps=1)
    paths = [str(tmp_path / "axolotl.yaml"), *([str(_FILES / other)] if other else [])]
    found = ImportedFiles.read(paths).merged({**_SET, **given})
    assert found.job.model.moe is not None
    assert found.job.model.lora is not None
    assert (found.job.model.lora.rank, found.job.model.lora.targets) == (16, "attention")
    assert sum("adapters of experts are not modelled" in line for line in found.warnings) == 1
    final = {**_SET, **given, "model.lora.targets": "attention_and_mlp"}
    with pytest.raises(JobError, match=r"lora.targets: got attention_and_mlp with experts"):
        ImportedFiles.read(paths).merged(final)


@pytest.mark.parametrize("modules", [["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]])
def test_adapters_of_attention_are_taken_beside_experts(tmp_path: Path, modules: list[str]) -> None:
    files = axolotl(tmp_path, base_model="mistralai/Mixtral-8x7B-v0.1", adapter="lora", lora_r=8,
                    lora_target_modules=modules)  # fmt: skip
    assert not any("adapters of experts" in line for line in files.merged(_SET).warnings)


def test_every_linear_is_adapted_beside_modules_that_are_named(tmp_path: Path) -> None:
    lora = axolotl(tmp_path, **_LORA, lora_target_modules=["q_proj"]).merged(_SET).job.model.lora
    assert lora is not None
    assert lora.targets == "attention_and_mlp"


def test_fp8_over_fsdp_gathers_in_fp8_and_reduces_as_fsdp_does(tmp_path: Path) -> None:
    files = axolotl(tmp_path, **_FSDP2, **_FP8)
    policy = files.merged(_SET).job.precision
    assert (policy.preset, policy.param_gather, policy.grad_reduce) == ("fp8_tensorwise", "fp8", "bf16")
    assert precision(files).params == "bf16"
    plain = axolotl(tmp_path, **_FSDP2, fp8=True)
    assert plain.merged(_SET).job.precision.param_gather == "bf16"
    unsharded = axolotl(tmp_path, **_FP8)
    assert precision(unsharded).param_gather == "bf16"
    off = axolotl(tmp_path, **_FSDP2, **_FP8 | {"fp8": False})
    assert off.merged(_SET).job.precision.preset == "bf16_mixed"
    assert not any("fp8" in line for line in off.warnings)


@pytest.mark.parametrize(
    ("recipe", "preset"),
    [("tensorwise", "fp8_tensorwise"), ("rowwise", "fp8_rowwise"), ("rowwise_with_gw_hp", "fp8_rowwise")],
)
def test_axolotl_chooses_the_recipe_of_fp8(tmp_path: Path, recipe: str, preset: str) -> None:
    files = axolotl(tmp_path, **_FSDP2, fp8=True, fp8_config={"recipe": recipe})
    assert files.merged(_SET).job.precision.preset == preset
    assert any("weight gradients are in bf16" in line for line in files.warnings) is recipe.endswith("_hp")
    with pytest.raises(JobError, match=r"fp8_config.recipe: got 'blockwise'; expected tensorwise, rowwise or"):
        axolotl(tmp_path, fp8=True, fp8_config={"recipe": "blockwise"}).merged(_SET)


@pytest.mark.parametrize(
    ("backend", "preset", "linear"),
    [
        ({}, "fp8_rowwise", "fp8_rowwise"),
        ({"fp8_backend": "auto"}, "fp8_rowwise", "fp8_rowwise"),
        ({"fp8_backend": "torchao"}, "fp8_rowwise", "fp8_rowwise"),
        ({"fp8_backend": "te"}, "fp8_mixed", "fp8_delayed"),
        ({"fp8_backend": "msamp"}, "fp8_mixed", "fp8_delayed"),
    ],
)
def test_llama_factory_runs_the_recipe_of_its_backend(
    tmp_path: Path, backend: Mapping[str, str], preset: str, linear: str
) -> None:
    files = llama_factory(tmp_path, finetuning_type="full", fsdp="full_shard", **_FP8, **backend)
    policy = precision(files)
    assert (policy.preset, policy.linear, policy.param_gather, policy.params) == (preset, linear, "bf16", "fp32")
    assert any("fp8_enable_fsdp_float8_all_gather is left out" in line for line in files.warnings)
    assert not any("fp8_backend" in line and "meaning" in line for line in files.warnings)
    with pytest.raises(JobError, match="fp8_backend: got 'cutlass'; expected one of auto, torchao, te, msamp"):
        llama_factory(tmp_path, **_FP8, fp8_backend="cutlass").merged(_SET)


def test_axolotl_accumulates_to_its_batch_size(tmp_path: Path) -> None:
    assert axolotl(tmp_path, batch_size=8).merged(_SET).job.batch.global_batch_size == 2 * 4 * 8
    stated = axolotl(tmp_path, batch_size=8, gradient_accumulation_steps=3)
    assert stated.merged(_SET).job.batch.global_batch_size == 2 * 3 * 8
    with pytest.raises(JobError, match="batch_size: got 1; expected at least micro_batch_size 2"):
        axolotl(tmp_path, batch_size=1).merged(_SET)
