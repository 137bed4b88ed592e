"""Rows of a runs table become the jobs they describe, and never anything that was derived from the measured time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dataset_builder.corpus.job_row import REQUIRED_COLUMNS, RowError
from dataset_builder.corpus.measurements import (
    RunMeasurement,
    build_job,
    read_runs,
    read_table,
    shipped_table,
)
from dataset_builder.corpus.run_jobs import job_mapping
from dataset_builder.corpus.table_columns import LABEL_COLUMNS, missing_columns, unread_columns
from dataset_builder.corpus.table_import import RUN_COLUMNS
from dataset_builder.job.errors import JobError
from dataset_builder.measuring.table import RUN_COLUMNS as MEASURED_COLUMNS

GPT_22B: dict[str, Any] = {
    "source_id": "megatron-lm", "framework": "megatron-lm", "gpu": "A100-SXM4-80GB", "num_gpus": 8,
    "gpus_per_node": 8, "model_name": "GPT 22B", "arch": "gpt", "layers": 48, "hidden": 6144, "heads": 64,
    "vocab": 51200, "seq_len": 2048, "tp": 8, "pp": 1, "micro_batch": 4, "global_batch": 4,
    "precision": "fp16_mixed", "act_ckpt": "full", "sequence_parallel": 0.0, "sharding": "none",
}  # fmt: skip


@pytest.fixture(scope="module")
def shipped() -> list[RunMeasurement]:
    return read_runs(shipped_table("runs.parquet"))


def mapping(**changes: Any) -> dict[str, Any]:
    return job_mapping({**GPT_22B, **changes})[0]


def test_nearly_every_row_is_a_job_and_every_other_says_why(shipped: list[RunMeasurement]) -> None:
    without = [run for run in shipped if run.job is None]
    assert len(without) <= 0.05 * len(shipped)
    assert all(run.reason for run in without)
    assert not any(run.reason for run in shipped if run.job is not None)


def test_only_rows_that_lack_a_needed_field_are_no_job(shipped: list[RunMeasurement]) -> None:
    reasons = Counter(run.reason.split(":")[0].split(" ")[0] for run in shipped if run.job is None)
    assert set(reasons) <= {"missing", "tp,", "global_batch"}


def test_a_job_multiplies_out_to_the_gpus_of_its_row(shipped: list[RunMeasurement]) -> None:
    num_gpus = read_table(shipped_table("runs.parquet")).set_index("run_id")["num_gpus"]
    for run in shipped:
        if run.job is not None:
            parallel, cluster = run.job.parallel, run.job.cluster
            assert cluster.num_gpus == num_gpus[run.run_id] == parallel.model_parallel_size * (parallel.data or 0)


def test_labels_never_reach_a_job(tmp_path: Path) -> None:
    """Poisoning everything that was computed from the measured time, and that time itself, changes no job."""
    table = read_table(shipped_table("runs.parquet")).astype(object).iloc[::7].reset_index(drop=True)
    table.to_parquet(tmp_path / "clean.parquet")
    poisoned = table.copy()
    poisoned["iter_time_s"] = poisoned["iter_time_s"].astype(float).sample(frac=1, random_state=1).to_numpy() * 3
    poisoned["peak_mem_gb"] = 1.0
    for column in LABEL_COLUMNS:
        poisoned[column] = "999999"
    poisoned["notes"] = poisoned["notes"].fillna("").astype(str) + "; calc_tflops=312.0; spread=9%; mfu=61; hfu_pct=70"
    poisoned.to_parquet(tmp_path / "poisoned.parquet")
    clean, dirty = read_runs(tmp_path / "clean.parquet"), read_runs(tmp_path / "poisoned.parquet")
    assert [run.job for run in clean] == [run.job for run in dirty]
    assert [run.assumed for run in clean] == [run.assumed for run in dirty]
    assert [run.iter_time_s for run in clean] != [run.iter_time_s for run in dirty]


def test_missing_columns_are_named(tmp_path: Path) -> None:
    pd.DataFrame({"gpu": ["T4-16GB"], "iter_time_s": [1.0]}).to_csv(tmp_path / "runs.csv")
    with pytest.raises(JobError) as caught:
        read_runs(tmp_path / "runs.csv")
    assert all(
        any(column in reason for reason in caught.value.reasons) for column in REQUIRED_COLUMNS if column != "gpu"
    )


@pytest.mark.parametrize("separator", [";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_spreadsheets_separators_are_read(tmp_path: Path, separator: str, encoding: str) -> None:
    decimal = "," if separator == ";" else "."
    table = pd.DataFrame([{**GPT_22B, "iter_time_s": 1.42, "peak_mem_gb": 60.5}])
    table.to_csv(tmp_path / "plain.csv", index=False)
    table.to_csv(tmp_path / "runs.csv", index=False, sep=separator, decimal=decimal, encoding=encoding)
    assert read_runs(tmp_path / "runs.csv") == read_runs(tmp_path / "plain.csv")
    table.to_csv(tmp_path / "points.csv", index=False, sep=separator)
    assert [run.iter_time_s for run in read_runs(tmp_path / "points.csv")] == [1.42]


def test_columns_under_other_names_are_guessed() -> None:
    names = ["gpu", "num_gpus", "num_layers", "hidden_size", "n_heads", "Vocab Size", "seq_length", "global_batch"]
    reasons = missing_columns([*names, "iteration time (s)"])
    assert len(reasons) == 6
    assert "column 'layers' is missing (did you mean it by 'num_layers'?" in reasons[0]
    for reason, name in zip(reasons, [*names[2:7], "iteration time (s)"], strict=True):
        assert repr(name) in reason


def test_columns_that_nothing_reads_are_told() -> None:
    required = (*REQUIRED_COLUMNS, "iter_time_s")
    assert unread_columns([*required, *RUN_COLUMNS, *MEASURED_COLUMNS, "licence", "tokens_per_s"]) == ""
    assert unread_columns([*required, "tensor_parallel", "colour"]) == (
        "columns that nothing reads: tensor_parallel (did you mean tp?), colour"
    )


def test_optional_columns_may_be_absent(tmp_path: Path) -> None:
    columns = (*REQUIRED_COLUMNS, "iter_time_s")
    pd.DataFrame([{**GPT_22B, "iter_time_s": 1.42}])[list(columns)].to_csv(tmp_path / "runs.csv", index=False)
    (run,) = read_runs(tmp_path / "runs.csv")
    assert run.job is not None
    assert run.run_id == "row-0"
    assert run.job_group


def test_unreadable_file_is_a_job_error(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"nothing\.csv"):
        read_runs(tmp_path / "nothing.csv")


def test_a_known_row() -> None:
    job, reason, _ = build_job(GPT_22B)
    assert not reason
    assert job is not None
    assert job.model.ffn_hidden_size == 4 * 6144
    assert (job.precision.compute, job.precision.params, job.precision.main_params) == ("fp16", "fp16", "fp32")
    assert job.precision.loss_scaling
    assert job.parallel.recompute is not None
    assert job.parallel.recompute.mode == "full"
    assert (job.cluster.num_nodes, job.cluster.gpus_per_node) == (1, 8)


@pytest.mark.parametrize(
    ("arch", "architecture", "position", "normalization"),
    [
        ("gpt", "decoder", "learned", "layernorm"), ("llama", "decoder", "rope", "rmsnorm"),
        ("mpt", "decoder", "alibi", "layernorm"), ("bert", "encoder", "learned", "layernorm"),
        ("t5", "encoder_decoder", "relative", "rmsnorm"), ("transformer-xl", "decoder", "relative", "layernorm"),
    ],
)  # fmt: skip
def test_architectures(arch: str, architecture: str, position: str, normalization: str) -> None:
    model = mapping(arch=arch, source_id="x", framework="pytorch")["model"]
    assert (model["architecture"], model["position_embedding"], model["normalization"]) == (
        architecture, position, normalization,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("detail", "linear"),
    [
        ("TE fp8 delayed scaling hybrid", "fp8_delayed"),
        ("fp8 per-tensor current scaling (FP8-CS recipe)", "fp8_current"),
        ("params=bf16, fp8_recipe=tensorwise, fp8_param_gather=1", "fp8_tensorwise"),
        ("params=bf16, fp8_recipe=blockwise", "fp8_blockwise"),
        ("TE fp8", "fp8_delayed"),
    ],
)
def test_fp8_recipes(detail: str, linear: str) -> None:
    assert mapping(precision="fp8_mixed", precision_detail=detail)["precision"]["linear"] == linear


def test_precision_words_of_the_source() -> None:
    words = "params=bf16, grad_reduce=bf16, main_params=fp32, main_grads=fp32, exp_avg=fp32"
    policy = mapping(precision="bf16_mixed", precision_detail=words)["precision"]
    assert (policy["grad_reduce"], policy["grad_accum"], policy["main_params"]) == ("bf16", "fp32", "fp32")
    assert mapping(precision="bf16", precision_detail="bf16 params, fp32 master")["precision"]["preset"] == "bf16_mixed"
    assert mapping(precision="fp32")["precision"] == {"preset": "fp32"}
    pure = mapping(precision="bf16_mixed", framework="llm-foundry", precision_detail="mixed_precision=PURE")[
        "precision"
    ]
    assert (pure["params"], pure["param_gather"], pure["grad_reduce"]) == ("fp32", "bf16", "bf16")


def test_mxfp8_without_the_hardware_is_block_scaled() -> None:
    hopper = mapping(precision="mxfp8", gpu="H100-SXM5-80GB")["precision"]
    assert hopper["linear"] == "fp8_blockwise"
    assert "linear" not in mapping(precision="mxfp8", gpu="B200-SXM6-180GB")["precision"]


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [("naive", "unfused"), ("te:unfused", "unfused"), ("fmha", "flash"), ("flash2", "flash"), ("te", "flash"),
     ("te:flash", "flash"), ("te:auto", None)],
)  # fmt: skip
def test_attention_kernels(kernel: str, expected: str | None) -> None:
    assert mapping(attention=kernel)["software"].get("attention") == expected


def test_flags_of_a_megatron_test() -> None:
    notes = "deterministic_mode=1; overlap_grad_reduce=1; hidden_dropout=0.1; moe_layers=9; dense_ffn=4096"
    row = {"source_id": "megatron-golden", "notes": notes, "layers": 12, "num_experts": 8, "top_k": 2,
           "ffn_hidden": 1024, "arch": "moe", "ep": 2, "tp": 2, "global_batch": 16}  # fmt: skip
    job = mapping(**row)
    assert job["software"]["deterministic"]
    assert job["parallel"]["overlap"] == {
        "grad_reduce": True,
        "param_gather": False,
        "tensor": False,
        "pipeline": False,
    }
    assert job["model"]["moe"]["dense_layers"] == [0, 1, 2]
    assert (job["model"]["ffn_hidden_size"], job["model"]["moe"]["expert_ffn_hidden_size"]) == (4096, 1024)
    assert job["parallel"]["expert_tensor"] == 2
    assert job["model"]["dropout"] == 0.1


def test_deepseek_v3_gets_its_latent_attention() -> None:
    model = mapping(model_name="DeepSeekV3 (w/o MTP)", arch="moe", layers=61, hidden=7168, heads=128, ffn_hidden=2048,
                    num_experts=256, top_k=8, gated_mlp=1, tp=1, global_batch=64)["model"]  # fmt: skip
    assert model["mla"]["kv_lora_rank"] == 512
    assert model["moe"]["dense_layers"] == [0, 1, 2]
    assert (model["ffn_hidden_size"], model["moe"]["num_shared_experts"]) == (18432, 1)


@pytest.mark.parametrize(
    ("name", "notes", "layers"),
    [("DeepSeekV3 (w/o MTP)", "", 0), ("DeepSeekV3 (w/ MTP)", "", 1), ("proxy", "mtp_num_layers=2; vocab_raw=1", 2),
     ("proxy", "mtp_num_layers=2; mtp_use_repeated_layer=1", 1), ("DeepSeekV3", "MTP layer probably on", 1)],
)  # fmt: skip
def test_multi_token_prediction_is_what_a_row_says_of_it(name: str, notes: str, layers: int) -> None:
    model = mapping(model_name=name, arch="moe", layers=8, hidden=1024, heads=16, ffn_hidden=512, num_experts=8,
                    top_k=2, gated_mlp=1, tp=1, global_batch=64, notes=notes)["model"]  # fmt: skip
    assert model.get("mtp_layers", 0) == layers


def test_a_batch_that_does_not_divide_is_changed_openly() -> None:
    job, assumed = job_mapping({**GPT_22B, "tp": 1, "micro_batch": 3, "global_batch": 64})
    assert job["batch"]["micro_batch_size"] == 4
    assert any("micro_batch_size" in sentence for sentence in assumed)


def test_uneven_stages_keep_every_layer() -> None:
    job, assumed = job_mapping({**GPT_22B, "layers": 45, "tp": 2, "pp": 4})
    split = job["parallel"]["layers_per_stage"]
    assert sum(split) == 45
    assert split[0] <= split[1]
    assert any("layers_per_stage" in sentence for sentence in assumed)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"layers": math.nan, "model_name": "own"}, "layers"), ({"gpu": "abacus"}, "abacus"),
     ({"tp": 3}, "does not divide"), ({"precision": "int4"}, "int4"), ({"hidden": "wide"}, "wide"),
     ({"global_batch": 0}, "global_batch")],
)  # fmt: skip
def test_rows_without_a_job_say_why(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RowError, match=words):
        job_mapping({**GPT_22B, **changes})


def test_an_uneven_interleaved_split_keeps_its_model_chunks() -> None:
    """Llama 3.1 405B: 126 layers over 8 stages x 8 chunks."""
    row = {**GPT_22B, "layers": 126, "pp": 8, "tp": 8, "vpp": 8, "num_gpus": 128, "global_batch": 64}
    job, reason, _ = build_job(row)
    assert job is not None, reason
    split = job.parallel.layers_per_stage
    assert split is not None
    assert (job.parallel.virtual_pipeline, job.parallel.schedule, len(split), sum(split)) == (8, "interleaved", 64, 126)
    assert split[0] == split[-1] == 1  # beside the embedding and the head
    with pytest.raises(RowError, match="64 model chunks"):
        job_mapping({**row, "layers": 40})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"framework": "nemo", "source_date": "2024-08"}, True), ({"framework": "nemo", "source_date": "2022-04"}, False),
     ({"framework": "megatron-lm", "source_date": "2021-04"}, False),
     ({"framework": "megatron-lm", "source_date": "2024-07"}, True), ({"framework": "megatron-lm"}, False),
     ({"framework": "megatron-lm", "num_experts": 8, "top_k": 2, "ffn_hidden": 1024}, True),
     ({"framework": "pytorch", "num_experts": 8, "top_k": 2, "ffn_hidden": 1024}, False),
     ({"framework": "x", "source_id": "mlperf"}, True), ({"framework": "nemo", "sequence_parallel": 0}, False),
     ({"framework": "megatron-bridge", "tp": 1}, False)],
)  # fmt: skip
def test_sequence_parallel_where_a_row_leaves_it_open(changes: dict[str, Any], expected: bool) -> None:
    row = {**GPT_22B, "sequence_parallel": None, "global_batch": 64, "micro_batch": 1, **changes}
    assert job_mapping(row)[0]["parallel"]["sequence_parallel"] is expected


def test_tuned_rows_overlap_and_others_say_what_they_do() -> None:
    def grad_reduce(**changes: Any) -> bool:
        overlap = mapping(**changes)["parallel"]["overlap"]
        assert overlap["grad_reduce"] == overlap["param_gather"]
        return bool(overlap["grad_reduce"])

    assert grad_reduce(framework="megatron-core dev", source_date="2026-01")
    assert grad_reduce(framework="megatron-bridge")
    assert not grad_reduce(source_date="2021-04")
    assert not grad_reduce(source_id="megatron-golden", source_date="2025-06")
    assert grad_reduce(source_id="megatron-golden", notes="overlap_grad_reduce=1; overlap_param_gather=1")


def test_sharding_within_a_group_is_said() -> None:
    row = {**GPT_22B, "framework": "internevo", "sharding": "zero1", "notes": "zero1 within 8 GPUs", "tp": 1}
    job, assumed = job_mapping({**row, "global_batch": 32})
    assert job["parallel"]["sharding"] == "zero1"
    assert any("zero1 within 8 GPUs" in sentence for sentence in assumed)


@pytest.mark.parametrize("time", [None, "", "nan", 0, "inf", -1])
def test_a_row_without_a_time_is_still_a_job(tmp_path: Path, time: Any) -> None:
    pd.DataFrame([{**GPT_22B, "iter_time_s": time}]).astype(object).to_csv(tmp_path / "runs.csv", index=False)
    (run,) = read_runs(tmp_path / "runs.csv")
    assert run.job is not None
    assert not run.is_timed


@pytest.mark.parametrize(
    ("written", "name"),
    [("H100", "H100-SXM5-80GB"), ("a100-80gb", "A100-SXM4-80GB"), ("h100-sxm5-80gb", "H100-SXM5-80GB"),
     ("H200", "H200-SXM5-141GB"), ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
     ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB")],
)  # fmt: skip
def test_gpus_in_other_spellings(written: str, name: str) -> None:
    job, assumed = job_mapping({**GPT_22B, "gpu": written})
    assert job["cluster"]["gpu"] == name
    assert any(name in sentence for sentence in assumed) or written.lower() == name.lower()


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(RowError, match=r"nearest are .*H100"):
        job_mapping({**GPT_22B, "gpu": "H101"})


@pytest.mark.parametrize(
    ("column", "written", "path", "expected"),
    [("precision", "BF16-mixed", ("precision", "preset"), "bf16_mixed"),
     ("precision", "fp8", ("precision", "linear"), "fp8_delayed"),
     ("precision", "fp8_blockwise", ("precision", "preset"), "fp8_blockwise"),
     ("precision", "None", ("precision", "preset"), "bf16_mixed"),
     ("sharding", "ZeRO-1", ("parallel", "sharding"), "zero1"), ("sharding", "FSDP", ("parallel", "sharding"), "zero3"),
     ("sharding", "None", ("parallel", "sharding"), "none"), ("act_ckpt", "True", ("parallel", "recompute"), "full"),
     ("act_ckpt", "Selective", ("parallel", "recompute"), "selective"),
     ("act_ckpt", "nan", ("parallel", "recompute"), "none"), ("vpp", "None", ("parallel", "virtual_pipeline"), 1),
     ("layers", "48.0", ("model", "num_layers"), 48), ("vocab", "51,200", ("model", "vocab_size"), 51200),
     ("arch", "Llama", ("model", "normalization"), "rmsnorm"),
     ("arch", "qwen2", ("model", "position_embedding"), "rope")],
)  # fmt: skip
def test_cells_in_other_spellings(column: str, written: str, path: tuple[str, str], expected: Any) -> None:
    assert mapping(**{column: written})[path[0]][path[1]] == expected


def test_a_shipped_model_fills_the_sizes_a_row_leaves_out() -> None:
    blank = dict.fromkeys(("layers", "hidden", "heads", "vocab", "arch"))
    row = {**GPT_22B, **blank, "model_name": "meta-llama/Llama-3-8B-Instruct"}
    job, reason, assumed = build_job(row)
    assert job is not None, reason
    assert (job.model.num_layers, job.model.num_query_groups, job.model.ffn_hidden_size) == (32, 8, 14336)
    assert (job.model.activation, job.model.position_embedding) == ("swiglu", "rope")
    assert any("those of llama3-8b taken" in sentence for sentence in assumed)
    with pytest.raises(RowError, match="missing: heads, vocab"):  # 40 layers are not Llama 3 8B
        job_mapping({**row, "layers": 40, "hidden": 4096})
    mixture, reason, _ = build_job({**row, "model_name": "DeepSeek-V3", "tp": 1, "global_batch": 64})
    assert mixture is not None, reason
    assert mixture.model.mla is not None
    assert mixture.model.moe is not None
    assert (mixture.model.moe.num_experts, mixture.model.moe.shared_width, len(mixture.model.moe.dense_layers)) == (
        256, 2048, 3,
    )  # fmt: skip


def test_a_global_batch_follows_from_its_factors() -> None:
    job, assumed = job_mapping({**GPT_22B, "global_batch": None, "tp": 1, "micro_batch": 2, "grad_accum": 3})
    assert job["batch"]["global_batch_size"] == 2 * 3 * 8
    assert any("global_batch" in sentence for sentence in assumed)


def test_what_is_blank_of_a_layout_follows_from_the_rest() -> None:
    wide = {**GPT_22B, "num_gpus": 64, "global_batch": 64, "micro_batch": 1}
    follows = job_mapping({**wide, "tp": 4, "pp": None, "dp": 4})[0]["parallel"]
    assert (follows["tensor"], follows["pipeline"], follows["data"]) == (4, 4, 4)
    fits = job_mapping({**wide, "tp": 4, "pp": None, "global_batch": 2})[0]["parallel"]
    assert (fits["tensor"], fits["pipeline"], fits["data"]) == (4, 8, 2)
    mixture, assumed = job_mapping({**GPT_22B, "num_experts": 8})
    assert mixture["model"]["moe"]["top_k"] == 2
    assert any("Megatron's defaults" in sentence for sentence in assumed)
    with pytest.raises(RowError, match="num_experts"):
        job_mapping({**GPT_22B, "ep": 8})


_SPOKEN_GPUS = {
    "H100-SXM5-80GB": "H100", "A100-SXM4-80GB": "NVIDIA A100-SXM4-80GB", "V100-SXM2-16GB": "Tesla V100-SXM2-16GB",
    "GB200-186GB": "gb200", "A100-SXM4-40GB": "A100-40GB",
}  # fmt: skip
_NEEDED = [*REQUIRED_COLUMNS, "num_experts", "iter_time_s"]  # a mixture without its number of experts is no model
_CHANGES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "spoken gpus": lambda table: table.assign(gpu=table["gpu"].replace(_SPOKEN_GPUS)),
    "lower case, other order": lambda table: table[table.columns[::-1]].assign(gpu=table["gpu"].str.lower()),
    "text, None": lambda table: table.astype(object).where(table.notna(), "None").map(str),
    "text, nan": lambda table: table.astype(object).where(table.notna(), "nan").map(str),
    "only what is required": lambda table: table[_NEEDED],
    "every other column": lambda table: table[[*_NEEDED, *table.columns.difference(_NEEDED)[::2]]],
    "the others": lambda table: table[[*_NEEDED, *table.columns.difference(_NEEDED)[1::2]]],
}  # fmt: skip


@pytest.mark.parametrize("change", _CHANGES)
def test_tables_of_others_are_answered(change: str, tmp_path: Path) -> None:
    table = read_table(shipped_table("runs.parquet")).iloc[::9].reset_index(drop=True)
    for column in table.columns[table.dtypes == "category"]:
        table[column] = table[column].astype(object)
    _CHANGES[change](table).to_csv(tmp_path / "runs.csv", index=False)
    runs = read_runs(tmp_path / "runs.csv")
    assert sum(run.job is not None for run in runs) >= 0.95 * len(runs) == 0.95 * len(table)
    if "text" in change or "order" in change:
        table.to_parquet(tmp_path / "same.parquet")
        assert [run.job and run.job.model for run in runs] == [
            run.job and run.job.model for run in read_runs(tmp_path / "same.parquet")
        ]


@pytest.mark.parametrize(
    ("source", "name", "head", "fraction"),
    [
        ("nvidia-dle", "BERT-large pretrain", "mlm", 80 / 512),
        ("nvidia-dle", "BERT-large SQuAD", "classification", 1.0),
        ("lambda-bench", "BERT-base SQuAD", "classification", 1.0),
        ("nvidia-dle", "BioBERT-base NER", "classification", 1.0),
        ("mlperf", "BERT-large MLPerf", "mlm", 80 / 512),
        ("neusight", "bert_large", "mlm", 1.0),
        ("nemo-launcher", "BERT 4B", "mlm", 1.0),
    ],
)
def test_an_encoder_has_the_head_that_was_run(source: str, name: str, head: str, fraction: float) -> None:
    model = mapping(source_id=source, model_name=name, arch="bert")["model"]
    assert (model["head"], model.get("masked_fraction", 1.0)) == (head, fraction)


def test_a_lora_row_trains_adapters_only() -> None:
    notes = "LoRA rank 16, frozen base weights; no matching config file, layout left blank"
    job = mapping(model_name="Llama2-70B LoRA", arch="llama", source_id="mlperf", notes=notes)
    assert job["model"]["lora"] == {"rank": 16, "targets": "attention"}
    assert job["optimizer"]["name"] == "adam"
    assert "lora" not in mapping()["model"]


_MLPERF_BERT: dict[str, Any] = {
    "source_id": "mlperf", "framework": "pytorch", "model_name": "BERT-large MLPerf", "arch": "bert", "layers": 24,
    "hidden": 1024, "heads": 16, "vocab": 30522, "seq_len": 512, "tp": 1, "micro_batch": 48, "grad_accum": 2,
    "global_batch": 768, "notes": "unpadded/packed variable-length samples", "act_ckpt": None,
}  # fmt: skip


def test_bert_of_mlperf_packs_two_sequences_and_computes_in_fp8_on_hopper() -> None:
    hopper = mapping(**_MLPERF_BERT, gpu="H100-SXM5-80GB")
    assert hopper["batch"] == {"seq_length": 256, "micro_batch_size": 96, "global_batch_size": 768}
    policy = hopper["precision"]
    assert (policy["preset"], policy["compute"], policy["linear"]) == ("fp8_mixed", "fp16", "fp8_delayed")
    assert hopper["software"]["cuda_graphs"]
    ampere = mapping(**{**_MLPERF_BERT, "micro_batch": 56, "global_batch": 448}, gpu="A100-SXM4-80GB")
    assert (ampere["batch"]["micro_batch_size"], ampere["precision"]["preset"]) == (56, "fp16_mixed")
    assert "cuda_graphs" not in ampere["software"]


def test_a_run_has_the_precision_that_its_job_computes_in(shipped: list[RunMeasurement]) -> None:
    assert all(run.precision == run.job.precision.label for run in shipped if run.job)
    hopper = {run.precision for run in shipped if run.source_id == "mlperf" and run.architecture == "bert"
              and "H100" in run.gpu}  # fmt: skip
    assert hopper == {"fp8_mixed"}


def test_bins_of_equal_lengths_leave_the_padding_out() -> None:
    notes = "LDDL sequence binning: real tokens < seq_len"
    bert = {"source_id": "nvidia-dle", "framework": "pytorch (DLE BERT)", "arch": "bert"}
    assert mapping(**bert, notes=notes, seq_len=512)["batch"]["seq_length"] == 256
    assert mapping(**bert, notes=notes, seq_len=128)["batch"]["seq_length"] == 128
    assert mapping(**bert, seq_len=512)["batch"]["seq_length"] == 512
