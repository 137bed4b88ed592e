"""The search for the fastest plan: its space, its ranking against exhaustive prediction, and the command."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_builder.job.document import JobText
from dataset_builder.job.errors import CannotRunError, JobError
from dataset_builder.job.schema import TrainingJob
from dataset_builder.tracing.layout import rank_layout
from dataset_builder.tracing.trace import build_graph
from gnn_predictor import predict
from gnn_predictor.checkpoint import load_checkpoint
from gnn_predictor.prediction import predict_each
from gnn_predictor.report.plan_table import print_plans
from gnn_predictor.search import NO_MEMORY, Plans, search
from gnn_predictor.search_space import KEYS, SearchSpace, search_spaces, uneven_split

_ROOT = Path(__file__).parents[2]
_SCHEMA = json.loads(resources.files("gnn_predictor.report").joinpath("plan.schema.json").read_text())
# Half of the layouts of this one do not fit.
_JOB = """
name: small
model: {num_layers: 6, hidden_size: 8192, num_attention_heads: 64, vocab_size: 51200}
batch: {seq_length: 2048, micro_batch_size: 2, global_batch_size: 16}
cluster: {gpu: A100-SXM4-40GB, num_nodes: 2, gpus_per_node: 4}
parallel: {tensor: 2, sharding: zero1, sequence_parallel: true}
"""
_MIXTURE = """
model:
  {num_layers: 4, hidden_size: 512, num_attention_heads: 8, vocab_size: 32000,
   moe: {num_experts: 4, top_k: 2, expert_ffn_hidden_size: 1024}}
batch: {seq_length: 1024, micro_batch_size: 1, global_batch_size: 8}
cluster: {gpu: H100-SXM5-80GB, num_nodes: 1, gpus_per_node: 4}
"""
_ONE_RECOMPUTE = {"parallel.recompute": ["none"]}
_FREED = {"parallel.recompute": ["none", "full"], "batch.micro_batch_size": [1, 4],
          "parallel.sharding": ["none", "zero1", "zero3"]}  # fmt: skip


def _text(job: str) -> JobText:
    return JobText(job.encode(), "job.yaml", Path())


def _spaces(
    job: str, settings: dict[str, Any] | None = None, choices: dict[str, Any] | None = None
) -> list[SearchSpace]:
    return search_spaces(_text(job), settings or {}, choices or {})


@pytest.fixture(scope="module")
def small(untrained: Path) -> tuple[list[SearchSpace], Plans]:
    spaces = _spaces(_JOB, choices=_FREED)
    return spaces, search(spaces, load_checkpoint(untrained), top=7, num_workers=1)


def test_the_ranking_is_that_of_an_exhaustive_search(small: tuple[list[SearchSpace], Plans], untrained: Path) -> None:
    (space,), plans = small
    outcomes = predict_each([space.applied(layout) for layout in space], checkpoint=untrained)
    possible = [
        (each.iteration_time_s, layout)
        for each, layout in zip(outcomes, space, strict=True)
        if not isinstance(each, CannotRunError) and space.problem(layout) is None
    ]
    assert plans.num_evaluated == len(possible) > 50
    assert plans.pruned[NO_MEMORY] > 40
    assert plans.num_possible == len(outcomes)
    fastest = sorted(seconds for seconds, _ in possible)[:7]
    assert [plan.prediction.iteration_time_s for plan in plans.plans] == pytest.approx(fastest, rel=1e-6)


def test_pruned_layouts_cannot_run_or_do_the_same_as_another() -> None:
    (space,) = _spaces(_JOB, {"parallel.virtual_pipeline": "1", "batch.micro_batch_size": "1"}, _ONE_RECOMPUTE)
    problems = {layout: space.problem(layout) for layout in space}
    for layout, problem in problems.items():
        if problem is not None and "the same as another" not in problem:
            with pytest.raises(CannotRunError):
                rank_layout(space.applied(layout))
        elif problem is not None:
            others = [layout._replace(sharding=name) for name in ("none", "zero3")]
            nodes = [build_graph(space.applied(each)).nodes for each in others if problems[each] is None]
            assert build_graph(space.applied(layout)).nodes in nodes


def test_a_pool_of_processes_finds_the_same(untrained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spaces, checkpoint = _spaces(_MIXTURE), load_checkpoint(untrained)
    told: list[tuple[int, int]] = []
    alone = search(spaces, checkpoint, top=5, num_workers=1)
    monkeypatch.setattr("gnn_predictor.search._LEAST_FOR_A_POOL", 1)
    together = search(spaces, checkpoint, top=5, num_workers=2, progress=lambda *each: told.append(each))
    assert [plan.settings for plan in together.plans] == [plan.settings for plan in alone.plans]
    assert (together.pruned, together.num_evaluated) == (alone.pruned, alone.num_evaluated)
    assert told[-1] == (alone.num_possible, alone.num_possible)
    assert {plan.settings["parallel.expert"] for plan in alone.plans} <= {1, 2, 4}


def test_set_keys_stay_and_freed_keys_take_only_their_values() -> None:
    choices = {"parallel.tensor": [1, 2], "precision": ["bf16_mixed", "fp16_mixed"]}
    spaces = _spaces(_JOB, {"parallel.pipeline": "2", "parallel.layers_per_stage": "[2, 4]"}, choices)
    assert [space.chosen for space in spaces] == [{"precision": "bf16_mixed"}, {"precision": "fp16_mixed"}]
    for space in spaces:
        assert space.candidates["parallel.tensor"] == (1, 2)
        assert space.candidates["parallel.pipeline"] == (2,)
        layouts = list(space)
        assert {layout.virtual_pipeline for layout in layouts} == {1, 2, 3}
        assert all(space.applied(layout).parallel.layers_per_stage == (2, 4) for layout in layouts)


def test_the_jobs_own_layout_is_among_the_candidates() -> None:
    own = {"parallel.tensor": "3", "parallel.sharding": "hsdp", "parallel.recompute": "{full_layers: 2}"}
    text = _JOB.replace("tensor: 2", "tensor: 3").replace("zero1", "hsdp, recompute: {full_layers: 2}")
    (space,) = _spaces(text)
    job = TrainingJob.from_yaml(_text(_JOB), own)
    assert 3 in space.candidates["parallel.tensor"]
    assert job.parallel.recompute in space.candidates["parallel.recompute"]


def test_every_wrong_value_of_a_freed_key_is_told() -> None:
    with pytest.raises(JobError) as caught:
        _spaces(_JOB, choices={"parallel.tensor": [0, 2], "parallel.sharding": ["zero9"], "precision": ["fp7"]})
    text = str(caught.value)
    assert all(key in text for key in ("parallel.tensor", "parallel.sharding", "precision"))


@given(layers=st.integers(1, 130), pipeline=st.integers(1, 40), chunks=st.integers(1, 8))
@settings(max_examples=300)
def test_an_uneven_split_holds_every_layer_and_spares_the_ends(layers: int, pipeline: int, chunks: int) -> None:
    split = uneven_split(layers, pipeline, chunks)
    slots = pipeline * chunks
    if split is None:
        assert layers % slots == 0 or slots > layers + 2
        return
    assert len(split) == slots
    assert sum(split) == layers
    assert max(split) - min(split) == 1
    assert split[-1] == min(split)


def test_llama_405b_is_split_as_it_was_trained() -> None:
    """126 layers on 16 stages of 8 chunks: one each, none in the first and the last (arXiv 2407.21783, 3.3.2)."""
    assert uneven_split(126, 16, 8) == (0, *([1] * 126), 0)


def test_limits_add_up_and_cost_follows_from_the_price(small: tuple[list[SearchSpace], Plans]) -> None:
    for plan in small[1].plans:
        assert sum(plan.limits.values()) == pytest.approx(1, rel=1e-6)
        assert min(plan.limits.values()) >= 0
        hours = plan.prediction.job.cluster.num_gpus * 1e9 / plan.prediction.tokens_per_s / 3600
        assert plan.gpu_hours_per_billion_tokens == pytest.approx(hours)
        assert plan.usd_per_billion_tokens is None


def _plan(*arguments: str, stdin: str = _JOB) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gnn_predictor.plan", "-", *arguments]
    return subprocess.run(command, cwd=_ROOT, input=stdin, capture_output=True, text=True, timeout=120)


def test_the_command_as_json_and_what_it_sets_gives_that_time(untrained: Path, tmp_path: Path) -> None:
    free = [f"{key}={','.join(map(str, values))}" for key, values in _FREED.items()]
    done = _plan("--checkpoint", str(untrained), "--format", "json", "--top", "3", "--free", *free)
    assert (done.returncode, done.stderr) == (0, "")
    value = json.loads(done.stdout)
    jsonschema.validate(value, _SCHEMA)
    times = [plan["iteration_time_s"] for plan in value["plans"]]
    assert times == sorted(times)
    assert len(times) == 3
    assert value["searched"]["possible"] == value["searched"]["evaluated"] + sum(value["searched"]["pruned"].values())
    assert value["given"]["iteration_time_s"] >= times[0]
    for plan in value["plans"]:
        job = TrainingJob.from_yaml(_text(_JOB), plan["set"])
        again = predict(job, checkpoint=untrained)
        assert again.iteration_time_s == pytest.approx(plan["iteration_time_s"], rel=1e-6)
        assert set(KEYS) <= set(plan["set"])


def test_the_command_as_a_table(untrained: Path) -> None:
    free = [f"{key}={','.join(map(str, values))}" for key, values in _FREED.items()]
    done = _plan("--checkpoint", str(untrained), "--top", "2", "--free", *free)
    assert (done.returncode, done.stderr) == (0, "")
    assert "does not fit in memory" in done.stdout
    assert "python -m gnn_predictor.infer - --set parallel.tensor=" in done.stdout
    assert "the job as it is given: " in done.stdout


def test_no_figure_is_cut_on_a_terminal_of_80_columns(
    small: tuple[list[SearchSpace], Plans], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    print_plans(small[1], "job.yaml", stream)
    assert "\u2026" not in stream.getvalue()
    for column in ("pipeline", "data", "interval", "memory", "MFU", "limits"):
        assert column in stream.getvalue()


def test_when_nothing_fits_the_nearest_is_named(untrained: Path) -> None:
    large = _JOB.replace("num_layers: 6", "num_layers: 600")
    done = _plan("--checkpoint", str(untrained), "--set", "parallel.pipeline=1", stdin=large)
    assert done.returncode == 4
    assert done.stdout == ""
    assert "nearest: parallel.tensor=4" in done.stderr
    assert "more than A100-SXM4-40GB has" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--free", "parallel.tensor"], "--free parallel.tensor: expected KEY.PATH=V1,V2"),
        (["--free", "parallel.tensor=x"], "parallel.tensor"),
        (["--free", "parallel.tensr=2"], "parallel.tensr"),
        (["--set", "parallel.tensor"], "--set parallel.tensor: expected KEY.PATH=VALUE"),
        (["--set", "parallel.tensor=2", "--free", "parallel.tensor=4"], "also given by --set"),
        (["--top", "0"], "--top"),
    ],
)
def test_bad_usage_is_told_without_a_traceback(arguments: list[str], told: str) -> None:
    done = _plan(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_job_is_answered_without_torch() -> None:
    code = "import sys; from gnn_predictor.plan import main; main(['-', '--free', 'parallel.tensor=0']); " \
           "print('torch' in sys.modules)"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, input=_JOB, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_formats_that_the_gpu_lacks_are_counted(untrained: Path) -> None:
    done = _plan("--checkpoint", str(untrained), "--set", "precision=fp8_mixed", "--set", "parallel.pipeline=1")
    assert done.returncode == 4
    assert "fp8_e4m3: A100-SXM4-40GB has no hardware for it" in done.stderr


def test_candidates_hold_what_the_cluster_and_the_model_allow() -> None:
    (space,) = _spaces(_MIXTURE)
    tensor, expert = space.candidates["parallel.tensor"], space.candidates["parallel.expert"]
    assert (tensor, expert) == ((1, 2, 4), (1, 2, 4))
    assert space.candidates["parallel.context"] == (1,)
