"""Which measured times are not learnt from."""

from __future__ import annotations

from typing import Any

import pytest

from dataset_builder.corpus.measurements import read_runs, read_table, shipped_table
from dataset_builder.corpus.trust import doubt, label_flags

_ROW: dict[str, Any] = {"source_id": "mlperf", "model_name": "BERT-large", "gpu": "H100-SXM5-80GB", "arch": "bert"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"label_info": "launch_bound=1; FLAG_noisy=p90/p10>1.5; p10 0.1 s"}, "spread"),
        ({"label_flags": "FLAG_ambiguous_config=same_series"}, "two configurations"),
        ({"label_info": "FLAG: calc MFU 121% implausible"}, "peak"),
        ({"notes": "AMBIGUOUS-PRECISION: fp8 or nvfp4"}, "precision"),
        ({"model_name": "gpt3_moe_fine_grained_offloading"}, "host memory"),
        ({"arch": "hybrid-mamba-moe"}, "state-space"),
        ({"source_id": "megatron-golden", "gpu": "GB200-186GB", "model_name": "gpt3_tp1_pp4_1node"}, "two-node twins"),
    ],
)
def test_a_reason_is_what_the_source_says_or_what_is_not_traced(changes: dict[str, Any], reason: str) -> None:
    assert doubt(_ROW) == ""
    assert reason in doubt({**_ROW, **changes})


def test_figures_computed_from_the_time_do_not_pass_with_the_flags() -> None:
    info = "calc_tflops=95.1(causal); FLAG: calc MFU 86% implausible; p10 0.15 s"
    assert label_flags(info) == "FLAG: calc MFU 86% implausible"
    assert label_flags("calc_tflops=95.1") == ""


def test_few_shipped_rows_are_in_doubt() -> None:
    """A decision that grows past a few percent would serve the score, not the truth."""
    runs = read_runs(shipped_table("runs.parquet"))
    assert 0 < sum(bool(run.doubt) for run in runs) < 0.035 * len(runs)


def test_single_node_gb200_tests_are_slower_than_halving_the_gpus_explains() -> None:
    """The claim behind the rule: every such row takes more than 1.7 times its two-node twin."""
    table = read_table(shipped_table("runs.parquet"))
    golden = table[(table["source_id"] == "megatron-golden") & (table["gpu"] == "GB200-186GB")]
    single = golden["model_name"].str.endswith("_1node")
    twins = golden[~single].groupby("model_name")["iter_time_s"].max()
    own = golden[single].assign(twin=golden["model_name"].str.removesuffix("_1node").map(twins)).dropna(subset="twin")
    assert len(own) > 20
    assert (own["iter_time_s"] / own["twin"]).min() > 1.7
