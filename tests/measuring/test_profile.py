"""nodes.csv of two gloo ranks, really profiled: its rows are those of the graph that the trace command writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml

from dataset_builder.benchmark import check_graphs, main
from dataset_builder.job.errors import JobError
from dataset_builder.measuring.job_plan import graph_of_file, plan_of_file
from dataset_builder.measuring.plan import write_plans
from dataset_builder.trace import main as trace
from tests.measuring.conftest import BARE, CLUSTER, JOB, run_benchmark

_OPTIONS = ("--only", "steps", "--rounds", "5", "--most-uncertainty", "100", "--profile", "--precision")
_PLAIN_PYTORCH = {"framework": "pytorch", "attention": "flash", "compile": False, "fused_kernels": False}
_SAME = ["kind", "op", "module", "phase", "input_dtype", "output_dtype"]


def test_every_node_of_every_rank_has_one_row(measured: Path, tmp_path: Path, write_job: Callable[..., Path]) -> None:
    done = run_benchmark(2, [str(write_job()), "--output", str(measured), *_OPTIONS, "fp32,bf16_mixed"])
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(measured / "nodes.csv", keep_default_na=False)
    runs = pd.read_csv(measured / "runs.csv")
    assert [*table["run_id"].unique()] == [*runs["run_id"]]
    assert {*table["framework"], *table["license"]} == {"pytorch", "own measurement"}
    assert table["notes"].str.contains("torch=").all()
    assert {*table["gpu"]} == {*runs["gpu"]}
    lines = re.findall(r"tiny (\w+): (\d+) of (\d+) nodes labelled, ([\d.]+)%", done.stderr)
    assert [line[0] for line in lines] == ["fp32", "bf16_mixed"]
    for (precision, found, count, percent), run_id in zip(lines, runs["run_id"], strict=True):
        own = table[table["run_id"] == run_id]
        path = tmp_path / f"{precision}.yaml"
        values = {**JOB, "precision": precision, "software": _PLAIN_PYTORCH}
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        assert trace([str(path), "--output", str(tmp_path / "graph.json")]) == 0
        graph = json.loads((tmp_path / "graph.json").read_text(encoding="utf-8"))
        assert {*own["fingerprint"]} == {graph["fingerprint"]}
        nodes = own[own["node"] != ""]
        for _, rank in nodes.groupby("rank"):
            assert [int(node) for node in rank["node"]] == [node["id"] for node in graph["stages"][0]["nodes"]]
            written = rank[_SAME].to_dict("records")
            assert written == [{key: node[key] for key in _SAME} for node in graph["stages"][0]["nodes"]]
        labelled = nodes[nodes["time_s"] != ""]
        assert (len(labelled), len(nodes)) == (int(found), int(count))
        assert (labelled["time_s"].astype(float) > 0).all()
        assert (labelled["executions"] == labelled["expected_executions"].astype(int)).all()
        assert (labelled["match"] != "").all()
        assert (nodes.loc[nodes["time_s"] == "", "reason"] != "").all()
        rest = own[own["node"] == ""]
        assert (rest["reason"] != "").all()
        labelled_s, rest_s = ((part["time_s"].astype(float) * part["executions"]).sum() for part in (labelled, rest))
        assert abs(100 * labelled_s / (labelled_s + rest_s) - float(percent)) < 0.1
    of_fp32 = table[(table["run_id"] == runs["run_id"][0]) & (table["node"] != "")]
    assert (of_fp32["time_s"] != "").all()
    message = of_fp32[of_fp32["module"] == "data.gradients"]
    assert [*message["match"]] == ["elements", "elements"]


@pytest.mark.parametrize(
    ("options", "word"), [(["--only", "operators", "job.yaml"], "--only leaves out"), (["--quick"], "expected a JOB")]
)
def test_there_has_to_be_a_step_to_profile(options: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--output", "measured", "--profile", *options])
    assert error.value.code == 2
    assert word in capsys.readouterr().err


def test_a_bare_machine_labels_a_plan_once_and_needs_its_graph(measured: Path, write_job: Callable[..., Path]) -> None:
    job = write_job(cluster={**CLUSTER, "gpus_per_node": 1}, batch={**JOB["batch"], "global_batch_size": 2})
    plan = plan_of_file(job, {"precision": "bf16"})
    with pytest.raises(JobError, match="--plan --profile"):
        check_graphs([[plan]])
    write_plans([replace(plan, graph=graph_of_file(job, {"precision": "bf16"}))], measured / "plans.json")
    command = [str(measured / "plans.json"), "--output", str(measured), *_OPTIONS, "bf16"]
    done = run_benchmark(1, command, BARE)
    assert done.returncode == 0, done.stderr
    assert re.search(r"tiny bf16: (\d+) of \1 nodes labelled", done.stderr), done.stderr
    before = (measured / "nodes.csv").read_bytes()
    again = run_benchmark(1, command, BARE)
    assert again.returncode == 0, again.stderr
    assert "already labelled" in again.stderr
    assert (measured / "nodes.csv").read_bytes() == before
