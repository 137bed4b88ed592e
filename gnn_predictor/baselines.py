"""What the network has to beat, on the same rows: three predictors that know no graph network.

B0  the per-stage formula of Kang et al. (arXiv 2604.16145): the slowest stage's compute times (microbatches + stages
    - 1), plus tensor and data communication without overlap, at one constant efficiency of the matrix peak.
B1  the roofline time of the whole iteration at one constant efficiency.
B2  extra-trees on analytic features; the target is log(time / roofline).
B3  the network itself, trained and asked as if every job computed in 16 bits (:func:`blind_job`); ``train`` fits it.

In: ``analytic_features`` of jobs, one table line a job, times in seconds. Out: predicted seconds. A baseline is fitted
on the reference table that a checkpoint carries (``REFERENCE_FILE``: features, measured times and groups of the
training corpus), never on a row that shares a group with the rows it predicts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dataset_builder.corpus.splits import fold_of
from dataset_builder.job.precision import PrecisionPolicy
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.graph import COLLECTIVES, OpNode, TrainingGraph
from dataset_builder.tracing.layout import RankLayout
from dataset_builder.tracing.work import roofline_s

Floats = NDArray[np.float64]
Model = Callable[[pd.DataFrame], Floats]  # a table of features to seconds

REFERENCE_FILE = "reference.parquet"
KEYS = ("run_id", "source_id", "job_group", "job_key")  # what identifies a reference row; the rest are features
CATEGORIES = (
    "gpu", "framework", "architecture", "precision", "linear", "attention", "recompute", "sharding", "schedule",
    "optimizer", "activation", "position_embedding", "intra_node", "inter_node",
)  # fmt: skip
PARTS = (
    "gemm", "attention", "head", "memory", "optimizer", "cast",
    "tensor", "data", "pipeline", "context", "expert",
)  # fmt: skip
SECONDS = (*(f"{part}_s" for part in PARTS), "b0_compute_s", "b0_communication_s")
SMALLEST_SHARE = 1e-6  # of the roofline time; keeps the logarithm of an absent part finite
NUM_TREES = 300
MIN_REFERENCE_ROWS = 20


def blind_job(job: TrainingJob) -> TrainingJob:
    """What B3 sees of a job: the same one, computing in 16 bits."""
    preset = "bf16_mixed" if job.cluster.gpu.supports("bf16") else "fp16_mixed"
    return job.model_copy(update={"precision": PrecisionPolicy.model_validate(preset)}).resolved()


def analytic_features(job: TrainingJob, graph: TrainingGraph, layout: RankLayout) -> dict[str, float | str]:
    """One job as B0-B2 see it: roofline seconds, their parts, sizes, hardware figures and categories.

    ``job`` is resolved. Times are those of the slowest stage at peak; ``roofline_s`` is the iteration's.
    """
    seconds = np.array([roofline_s(node, job.cluster.gpu, layout.group_of(node)) for node in graph.nodes], dtype=float)
    parts = [_part(node) for node in graph.nodes]
    per_microbatch = np.array([node.per == "microbatch" for node in graph.nodes], dtype=bool)
    microbatch_s = graph.repeats @ (seconds * per_microbatch)  # [num_stages]
    slowest = int(np.argmax(microbatch_s))
    bubble = (len(microbatch_s) - 1) / layout.virtual_pipeline  # microbatches of the slowest stage that are idle time
    executions = graph.repeats[slowest] * np.where(per_microbatch, graph.num_microbatches + bubble, 1.0)
    part_s = {part: float(executions @ (seconds * [name == part for name in parts])) for part in PARTS}
    compute = np.array([node.kind not in COLLECTIVES and node.per == "microbatch" for node in graph.nodes], dtype=bool)
    stages = len(microbatch_s)
    features: dict[str, float | str] = {
        "roofline_s": float(executions @ seconds),
        "b0_compute_s": float(np.max(graph.repeats @ (seconds * compute)) * (graph.num_microbatches + stages - 1)),
        "b0_communication_s": part_s["tensor"] + part_s["data"],
        "launches": float(executions @ [node.launches for node in graph.nodes]),
        "bubble": bubble / (graph.num_microbatches + bubble),
    }
    features |= {f"{part}_s": value for part, value in part_s.items()}
    return features | _sizes(job, graph, layout) | _hardware(job) | _categories(job)


def job_key(job: TrainingJob) -> str:
    """Equal for jobs of one model, batch, layout and cluster, whatever their precision and software."""
    return _digest(job, {"model", "batch", "parallel", "cluster"})


def pair_group(job: TrainingJob) -> str:
    """Equal for jobs that differ only in precision."""
    return _digest(job, {"model", "batch", "parallel", "cluster", "software", "optimizer"})


def layout_group(job: TrainingJob) -> tuple[str, str]:
    """A text that is equal for jobs which differ only in layout, and one that is equal for equal layouts."""
    values = job.resolved().model_dump(mode="json", include={"batch", "parallel"})
    layout = {"parallel": values["parallel"], "micro_batch_size": values["batch"].pop("micro_batch_size")}
    rest = _digest(job, {"model", "cluster", "precision", "software", "optimizer"})
    return f"{rest} {_hashed(values['batch'])}", _hashed(layout)


def reference_row(
    keys: Mapping[str, str], features: Mapping[str, float | str], iter_time_s: float
) -> dict[str, float | str]:
    """One line of the reference table; ``keys`` are the columns ``KEYS``."""
    return {**{key: keys[key] for key in KEYS}, **features, "iter_time_s": iter_time_s}


def write_reference(rows: list[dict[str, float | str]], checkpoint: Path) -> Path:
    """Writes the reference table into a checkpoint directory: about 1 MB for 4,000 runs."""
    table = pd.DataFrame(rows)
    floats = table.select_dtypes("number").columns
    path = checkpoint / REFERENCE_FILE
    table.astype(dict.fromkeys(floats, np.float32)).to_parquet(path, compression="zstd", index=False)
    return path


def read_reference(checkpoint: Path) -> pd.DataFrame | None:
    """The reference table of a checkpoint; ``None`` when it carries none."""
    path = checkpoint / REFERENCE_FILE
    return pd.read_parquet(path) if path.is_file() else None


def fit_b0(features: pd.DataFrame, times_s: Floats) -> Model:
    """The efficiency that fits the formula best in mean absolute log error, found on a grid of 1%."""
    efficiencies = np.exp(np.arange(math.log(0.005), math.log(2.0), 0.01))
    predicted = _b0(features, efficiencies[:, None])  # [efficiencies, rows]
    best = float(efficiencies[np.argmin(np.abs(np.log(predicted / times_s)).mean(axis=1))])
    return lambda table: _b0(table, best)


def fit_b1(features: pd.DataFrame, times_s: Floats) -> Model:
    """The constant factor over the roofline with the least mean absolute log error: the median."""
    factor = float(np.exp(np.median(np.log(times_s / features["roofline_s"].to_numpy(float)))))
    return lambda table: factor * table["roofline_s"].to_numpy(float)


def fit_b2(features: pd.DataFrame, times_s: Floats) -> Model:
    """Extra-trees on log parts, log sizes and one-hot categories; deterministic."""
    from sklearn.ensemble import ExtraTreesRegressor  # costs a second to import, and only B2 needs it

    levels = {name: sorted(features[name].astype(str).unique()) for name in CATEGORIES}
    forest = ExtraTreesRegressor(n_estimators=NUM_TREES, max_features=0.5, random_state=0, n_jobs=1)
    forest.fit(_matrix(features, levels), np.log(times_s / features["roofline_s"].to_numpy(float)))

    def predict(table: pd.DataFrame) -> Floats:
        seconds: Floats = table["roofline_s"].to_numpy(float) * np.exp(forest.predict(_matrix(table, levels)))
        return seconds

    return predict


BASELINES: dict[str, Callable[[pd.DataFrame, Floats], Model]] = {"b0": fit_b0, "b1": fit_b1, "b2": fit_b2}


def held_out_predictions(
    reference: pd.DataFrame, rows: pd.DataFrame, names: Collection[str] = tuple(BASELINES), num_folds: int = 5
) -> pd.DataFrame:
    """Seconds that baselines predict for ``rows``, each fitted without any group of the rows it predicts.

    Both tables have the columns ``KEYS`` and the features. Rows that share nothing with the reference are predicted
    by a fit on all of it; the others in ``num_folds`` folds of their groups. Out: a column per baseline, index of
    ``rows``; NaN where the reference has too few rows left.
    """
    shared = np.zeros(len(rows), dtype=bool)
    for key in ("run_id", "job_group", "job_key"):
        shared |= rows[key].isin(set(reference[key])).to_numpy(bool)
    groups = zip(rows["job_group"], shared, strict=True)
    folds = np.array([fold_of(group, num_folds, seed=0) if known else -1 for group, known in groups])
    predicted = pd.DataFrame(np.nan, index=rows.index, columns=list(names))
    for fold in np.unique(folds):
        chosen = rows[folds == fold]
        train = without_groups(reference, chosen)
        if len(train) >= MIN_REFERENCE_ROWS:
            predicted.loc[chosen.index] = fitted_predictions(train, chosen, names)
    return predicted


def fitted_predictions(
    train: pd.DataFrame, rows: pd.DataFrame, names: Collection[str] = tuple(BASELINES)
) -> pd.DataFrame:
    """Seconds that baselines fitted on ``train``, all of it, predict for ``rows``: a column per baseline.

    For a protocol whose split says what may be learnt from; the caller keeps the two apart.
    """
    times_s = train["iter_time_s"].to_numpy(float)
    return pd.DataFrame({name: BASELINES[name](train, times_s)(rows) for name in names}, index=rows.index)


def without_groups(reference: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """The reference rows that share neither run, group nor job with ``rows``."""
    kept = np.ones(len(reference), dtype=bool)
    for key in ("run_id", "job_group", "job_key"):
        kept &= ~reference[key].isin(set(rows[key])).to_numpy(bool)
    return reference[kept]


def _b0(features: pd.DataFrame, efficiency: float | Floats) -> Floats:
    compute = features["b0_compute_s"].to_numpy(float)
    seconds: Floats = compute / efficiency + features["b0_communication_s"].to_numpy(float)
    return seconds


def _matrix(features: pd.DataFrame, levels: Mapping[str, list[str]]) -> NDArray[np.float32]:
    """Features as trees take them: parts as log shares of the roofline, other numbers as logs, categories one-hot."""
    roofline = features["roofline_s"].to_numpy(float)
    columns = [np.log(roofline)]
    for name in sorted(set(features.columns) - set(KEYS) - set(CATEGORIES) - {"iter_time_s", "roofline_s"}):
        values = features[name].to_numpy(float)
        if name in SECONDS:
            columns.append(np.log(np.maximum(values / roofline, SMALLEST_SHARE)))
        else:
            columns.append(np.log1p(values))
    for name, known in levels.items():
        text = features[name].astype(str).to_numpy()
        columns += [(text == level).astype(float) for level in known]
    return np.stack(columns, axis=1).astype(np.float32)


def _part(node: OpNode) -> str:
    """Which of ``PARTS`` a node's time belongs to."""
    if node.kind in COLLECTIVES:
        return node.axis or "data"
    if node.phase == "optimizer" or node.kind == "optimizer":
        return "optimizer"
    if node.kind == "cross_entropy" or "head" in node.module:
        return "head"
    if node.kind in ("gemm", "grouped_gemm"):
        return "gemm"
    if node.kind in ("cast", "quantize"):
        return "cast"
    return "attention" if node.kind == "attention" else "memory"


def _sizes(job: TrainingJob, graph: TrainingGraph, layout: RankLayout) -> dict[str, float | str]:
    model, batch, moe = job.model, job.batch, job.model.moe
    sizes = {
        "num_layers": model.num_layers, "hidden_size": model.hidden_size, "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads, "num_query_groups": model.num_query_groups,
        "head_dim": model.head_dim, "vocab_size": model.vocab_size,
        "num_experts": moe.num_experts if moe else 0, "top_k": moe.top_k if moe else 0,
        "seq_length": batch.seq_length, "micro_batch_size": batch.micro_batch_size,
        "global_batch_size": batch.global_batch_size, "num_microbatches": graph.num_microbatches,
        "tokens_per_microbatch": batch.micro_batch_size * batch.seq_length,
        "tensor": layout.tensor, "num_stages": layout.pipeline, "context_ranks": layout.context,
        "expert_ranks": layout.expert, "data_ranks": layout.data, "virtual_pipeline": layout.virtual_pipeline,
        "num_gpus": job.cluster.num_gpus, "num_nodes": job.cluster.num_nodes,
        "parameters_per_rank": max(stage.num_parameters for stage in graph.stages),
        "sequence_parallel": float(bool(job.parallel.sequence_parallel)),
    }  # fmt: skip
    return {name: float(value) for name, value in sizes.items()}


def _hardware(job: TrainingJob) -> dict[str, float | str]:
    gpu, cluster, software = job.cluster.gpu, job.cluster, job.software
    bf16 = gpu.peak("bf16")
    figures = {
        "peak_bf16_tflops": bf16 / 1e12, "peak_fp32_tflops": gpu.peak("fp32") / 1e12,
        "peak_fp8_ratio": gpu.peak("fp8_e4m3") / bf16, "compute_capability": gpu.compute_capability,
        "hbm_gb_per_s": gpu.hbm_bytes_per_s / 1e9, "num_sms": gpu.num_sms, "clock_mhz": gpu.clock_hz / 1e6,
        "power_w": gpu.power_w,
        "intra_gb_per_s": cluster.intra_node.bytes_per_s_per_gpu / 1e9 if cluster.intra_node else 0.0,
        "inter_gb_per_s": cluster.inter_node.bytes_per_s_per_gpu / 1e9 if cluster.inter_node else 0.0,
        "months_since_2015": _months_since_2015(software.date),
        "compile": _tristate(software.compile), "fused_kernels": _tristate(software.fused_kernels),
        "cuda_graphs": _tristate(software.cuda_graphs), "deterministic": _tristate(software.deterministic),
    }  # fmt: skip
    return {name: float(value) for name, value in figures.items()}


def _categories(job: TrainingJob) -> dict[str, float | str]:
    values = {
        "gpu": job.cluster.gpu.name, "framework": job.software.framework, "precision": job.precision.label,
        "linear": job.precision.linear, "architecture": job.model.architecture, "attention": job.software.attention,
        "recompute": job.parallel.recompute.mode if job.parallel.recompute else None,
        "sharding": job.parallel.sharding, "schedule": job.parallel.schedule, "optimizer": job.optimizer.name,
        "activation": job.model.activation, "position_embedding": job.model.position_embedding,
        "intra_node": job.cluster.intra_node.name if job.cluster.intra_node else None,
        "inter_node": job.cluster.inter_node.name if job.cluster.inter_node else None,
    }  # fmt: skip
    return {name: str(value or "unknown") for name, value in values.items()}


def _months_since_2015(date: str | None) -> float:
    """0 when the date is unknown."""
    if not date or len(date) < 4:
        return 0.0
    year, month = int(date[:4]), int(date[5:7] or 1)
    return max(1.0, 12.0 * (year - 2015) + month)


def _tristate(value: bool | None) -> float:
    """1 for unknown, between no (0) and yes (2)."""
    return 1.0 if value is None else 2.0 * value


def _digest(job: TrainingJob, parts: set[str]) -> str:
    values = job.resolved().model_dump(mode="json", include=parts)
    values["model"].pop("name", None)
    return _hashed(values)


def _hashed(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
