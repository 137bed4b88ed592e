"""What a file does not say: the documented default of its framework, told as such, or a question by name.

``DEFAULTS`` names the source of each default; a format without one asks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dataset_builder.job.errors import JobError
from dataset_builder.job.importers.formats import ImportedFiles
from dataset_builder.job.importers.merging import ImportedJob
from tests.importers.test_formats import field

_FILES = Path(__file__).parent / "files"
_GPUS = {"cluster.gpu": "H100-SXM5-80GB", "cluster.num_gpus": "8"}
_RUN = {**_GPUS, "batch.seq_length": "2048", "batch.micro_batch_size": "1", "batch.global_batch_size": "64"}
# The file, the lines that are taken out of it, what else is given, and what the job is then.
DEFAULTS: dict[str, tuple[str, str, dict[str, str], dict[str, Any]]] = {
    "Megatron-LM: megatron/training/arguments.py, params_dtype is torch.float": (
        "megatron_175b.sh", r"--fp16", {**_GPUS, "cluster.num_gpus": "128"}, {"precision.preset": "fp32"}),
    "Primus: primus/configs/modules/megatron/trainer_base.yaml, bf16: true": (
        "primus_experiment.yaml", r"bf16|fp8", _GPUS, {"precision.preset": "bf16_mixed", "precision.params": "bf16"}),
    "DeepSpeed: deepspeed.ai/docs/config-json, fp16 and bf16 are off": (
        "deepspeed.json", r'"bf16"', {**_GPUS, "model.preset": "llama3-8b", "batch.seq_length": "4096"},
        {"precision.preset": "fp32"}),
    "torchtitan: torchtitan/config, mixed_precision_param bfloat16 over float32": (
        "torchtitan_experts.toml", r"state_dtype|mixed_precision", _GPUS, {
            "precision.preset": "bf16_mixed", "precision.params": "fp32", "precision.grad_reduce": "fp32"}),
    "llm-foundry: llmfoundry/utils/config_utils.py, precision: str = 'amp_bf16'": (
        "llm_foundry.yaml", r"^precision|mixed_precision", _GPUS, {
            "precision.preset": "bf16_mixed", "precision.params": "fp32", "precision.grad_reduce": "fp32"}),
    "nanotron: src/nanotron/config/config.py, ModelArgs.dtype is torch.bfloat16": (
        "nanotron.yaml", r"dtype", _GPUS, {"precision.preset": "bf16_mixed", "precision.params": "bf16"}),
    "GPT-NeoX: megatron/neox_arguments/arguments.py, precision is fp32 where fp16 is off": (
        "gpt_neox.yml", r"precision|fp32_allreduce", _GPUS, {"precision.preset": "fp32"}),
    "axolotl: src/axolotl/utils/schemas/config.py, bf16 = 'auto'": (
        "axolotl.yaml", r"^bf16|gradient_checkpointing", _GPUS | {"cluster.num_gpus": "16"}, {
            "precision.preset": "bf16_mixed", "parallel.recompute.mode": "none"}),
    "LLaMA-Factory: transformers' TrainingArguments, bf16 and fp16 are off, 8 sequences a device": (
        "llama_factory.yaml", r"^bf16|per_device_train", _GPUS, {
            "precision.preset": "fp32", "batch.micro_batch_size": 8}),
    "accelerate: commands/launch.py, mixed_precision is 'no'": (
        "accelerate.yaml", r"mixed_precision", {
            **_RUN, "model.preset": "llama3-8b", "cluster.num_gpus": "16"}, {"precision.preset": "fp32"}),
    "MaxText: src/maxtext/configs/base.yml, dtype bfloat16, weight_dtype and grad_dtype float32, remat_policy full": (
        "maxtext.yml", r"dtype|quantization|remat", _GPUS | {"cluster.num_gpus": "16"}, {
            "precision.preset": "bf16_mixed", "precision.params": "fp32", "precision.grad_reduce": "fp32",
            "parallel.recompute.mode": "full"}),
    "NeMo: lightning's Trainer, precision is 32-true": (
        "nemo_launcher.yaml", r"precision: bf16, |fp8: True", {"cluster.gpu": "H100-SXM5-80GB"}, {
            "precision.preset": "fp32"}),
}  # fmt: skip


def without(lines: str, name: str, folder: Path, settings: dict[str, str]) -> ImportedJob:
    """The job of a file that has lost the lines (where one line says several things, the words) that match."""
    text = (_FILES / name).read_text()
    kept = (
        re.sub(lines, "", text)
        if name.endswith((".sh", "launcher.yaml"))
        else "\n".join(line for line in text.splitlines() if not re.search(lines, line))
    )
    (folder / name).write_text(kept)
    return ImportedFiles.read([str(folder / name)]).merged(settings)


@pytest.mark.parametrize("source", DEFAULTS)
def test_what_a_file_leaves_out_is_its_frameworks_default_and_said_so(source: str, tmp_path: Path) -> None:
    name, lines, settings, expected = DEFAULTS[source]
    found = without(lines, name, tmp_path, settings)
    assert {path: field(found.job, path) for path in expected} == expected
    for path in expected:
        assert found.origins[path].startswith("default of "), found.origins[path]


def test_a_model_alone_has_no_training_precision() -> None:
    with pytest.raises(JobError) as caught:
        ImportedFiles.read([str(_FILES / "llama_mha_config.json")]).merged(_RUN)
    (reason,) = caught.value.reasons
    assert reason.startswith("precision.preset: missing, as llama_mha_config.json: ")
    assert "is the format of the weights on disk" in reason
    assert "--set precision.preset=bf16_mixed" in reason


def test_a_launcher_whose_deepspeed_file_is_left_out_says_nothing_of_precision(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\nnum_machines: 1\nnum_processes: 8\nmachine_rank: 0\n"
        "deepspeed_config: {deepspeed_config_file: ds.json}\n"
    )
    with pytest.raises(JobError) as caught:
        ImportedFiles.read([str(path), str(_FILES / "llama_config.json")]).merged(_RUN)
    assert any(reason.startswith("precision.preset: missing") for reason in caught.value.reasons)


def test_a_switch_without_a_default_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"accumulate_grad_in_fp32 is open: bf16_mixed with it, bf16 without"):
        without("accumulate_grad_in_fp32", "nanotron.yaml", tmp_path, _GPUS)


def test_a_change_to_a_recipe_asks_for_all_that_stands_in_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "override.yaml"
    path.write_text(
        "model: {num_layers: 8, hidden_size: 1024, num_attention_heads: 8}\nddp: {overlap_grad_reduce: true}\n"
        "train: {micro_batch_size: 1, global_batch_size: 64}\n"
    )
    with pytest.raises(JobError) as caught:
        ImportedFiles.read([str(path)]).merged(_RUN)
    asked = {reason.split(":")[0] for reason in caught.value.reasons}
    assert asked == {
        "model.ffn_hidden_size", "model.num_query_groups", "model.activation", "model.normalization", "model.bias",
        "model.position_embedding", "model.tie_embeddings", "model.vocab_size", "parallel.tensor", "parallel.pipeline",
        "precision.preset",
    }  # fmt: skip


def test_a_peer_tools_model_of_no_type_is_not_guessed(tmp_path: Path) -> None:
    content = json.loads((_FILES / "llm_analysis.json").read_text())
    del content["model_type"]
    path = tmp_path / "model.json"
    path.write_text(json.dumps(content))
    with pytest.raises(JobError) as caught:
        ImportedFiles.read([str(path)]).merged(_RUN)
    asked = {reason.split(":")[0] for reason in caught.value.reasons}
    assert {"model.activation", "model.normalization", "model.bias", "model.position_embedding"} <= asked


@pytest.mark.parametrize("name", ["gpt_neox.yml", "torchtitan_experts.toml"])
def test_nodes_without_their_gpus_are_asked_about_where_the_batch_follows_from_them(name: str) -> None:
    files = ImportedFiles.read([str(_FILES / name)])
    settings = {"cluster.gpu": "H100-SXM5-80GB", "cluster.num_nodes": "1"}
    with pytest.raises(JobError) as caught:
        files.merged(settings)
    assert any(reason.startswith("cluster.gpus_per_node: missing; ") for reason in caught.value.reasons)
    whole = files.merged({**settings, "cluster.gpus_per_node": "8"}).job
    assert whole.batch.global_batch_size % whole.batch.micro_batch_size == 0
