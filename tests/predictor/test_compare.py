"""Variants side by side: the command's table and JSON, and explanations computed from made-up breakdowns."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnn_predictor.compare import (
    PARTS,
    Comparison,
    compare,
    parts,
    paying_speedup,
    read_choices,
    read_variants,
    reasons,
)
from gnn_predictor.critical_path import Breakdown

_ROOT = Path(__file__).parents[2]
_SCHEMA = json.loads(resources.files("gnn_predictor.report").joinpath("comparison.schema.json").read_text())
_COSTLY = ("pandas", "torch_geometric", "hydra", "wandb", "sklearn")
_JOB = """
name: small
model: {num_layers: 8, hidden_size: 1024, num_attention_heads: 16, vocab_size: 51200}
batch: {seq_length: 1024, micro_batch_size: 2, global_batch_size: 64}
cluster: {gpu: H100-SXM5-80GB, num_nodes: 1, gpus_per_node: 8}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(_JOB)
    return file


def _infer(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gnn_predictor.infer", *arguments]
    return subprocess.run(command, cwd=_ROOT, input=stdin, capture_output=True, text=True, timeout=120)


def _json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(value, _SCHEMA)
    return value


def test_formats_side_by_side_as_json(job: Path, untrained: Path) -> None:
    formats = ["fp32", "tf32", "bf16_mixed", "fp8_mixed", "nvfp4"]
    arguments = ["--checkpoint", str(untrained), "--compare", f"precision={','.join(formats)}", "--format", "json"]
    done = _infer("-", *arguments, stdin=job.read_text())
    assert (done.returncode, done.stderr) == (0, "")
    value = _json(done)
    *running, refused = value["variants"]
    assert [each["set"]["precision"] for each in value["variants"]] == formats
    assert (value["reference"], running[0]["speedup"], value["base"]["precision"]["preset"]) == (0, 1.0, "fp32")
    assert refused["status"] == "cannot_run"
    assert "nvfp4: H100-SXM5-80GB has no hardware for it" in refused["reason"]
    for each in running:
        whole = [
            *(v for k, v in each["parts"].items() if k != "communication"),
            *each["parts"]["communication"].values(),
        ]
        assert math.fsum(whole) == pytest.approx(each["iteration_time_s"])
        assert each["speedup"] == pytest.approx(running[0]["iteration_time_s"] / each["iteration_time_s"])
    hinted = [any("tf32 would be 7.38x faster" in line for line in each["warnings"]) for each in running]
    assert hinted == [True, False, False, False]
    assert running[3]["parts"]["cast_and_quantize"] > running[2]["parts"]["cast_and_quantize"] > 0
    for each in value["explanations"]:
        assert each["speedup"] < each["threshold"] == pytest.approx(paying_speedup(each["gemm_peak_ratio"]))


def test_the_product_of_two_keys_as_a_plain_table(job: Path, untrained: Path) -> None:
    choices = ["precision=bf16_mixed,fp8_mixed", "parallel.tensor=1,3,2"]
    done = _infer(str(job), "--checkpoint", str(untrained), "--compare", *choices)
    assert (done.returncode, done.stderr) == (0, "")
    assert "small: 6 variants" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[1:2] and line.split()[1] in "123"]
    assert [row[:2] for row in rows] == [[name, size] for name in ("bf16_mixed", "fp8_mixed") for size in "132"]
    assert all(("cannot run" in " ".join(row)) == (row[1] == "3") for row in rows)
    refused = (
        "! precision=bf16_mixed, parallel.tensor=3; precision=fp8_mixed, parallel.tensor=3: parallel: 8 GPUs given"
    )
    assert refused in " ".join(done.stdout.split())
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("choices", "code", "message"),
    [
        (["parallel.tensr=1,2"], 2, "parallel.tensr"),
        (["precision=bf16_mixed,fp99"], 2, "fp99"),
        (["precision"], 2, "--compare precision: expected KEY.PATH=V1,V2"),
        (["precision="], 2, "expected KEY.PATH=V1,V2"),
        (["precision=[fp32"], 2, "--compare precision: line"),
        (["precision=fp32", "precision=bf16"], 2, "precision is given twice"),
        (
            [f"batch.micro_batch_size={','.join('123456789')}", f"parallel.tensor={','.join('12345678')}"],
            2,
            "72 = 9 x 8",
        ),
    ],
)
def test_a_mistake_is_named(
    choices: list[str], code: int, message: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gnn_predictor.infer import main

    assert main([str(job), "--compare", *choices]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert len(set(printed.err.splitlines())) == len(printed.err.splitlines())


def test_a_reader_that_has_seen_enough_is_no_error(job: Path, untrained: Path) -> None:
    command = [sys.executable, "-m", "gnn_predictor.infer", str(job), "--checkpoint", str(untrained)]
    with subprocess.Popen([*command, "--compare", "precision=fp32,tf32"], cwd=_ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=120) == 0


def test_when_no_variant_runs_the_reasons_are_answered_with_their_exit_code(job: Path, untrained: Path) -> None:
    arguments = ["--checkpoint", str(untrained), "--compare", "precision=nvfp4,mxfp8", "--format", "json"]
    done = _infer(str(job), *arguments)
    value = _json(done)
    assert (done.returncode, value["reference"]) == (4, None)
    assert [each["status"] for each in value["variants"]] == ["cannot_run"] * 2


def test_a_variant_without_memory_stays_with_the_arithmetic(job: Path, untrained: Path) -> None:
    variants = read_variants(str(job), {}, {"model.num_layers": [2000, 8]})
    comparison = compare(variants, checkpoint=str(untrained))
    value = comparison.to_dict()
    assert value["reference"] == 1
    assert value["variants"][1]["speedup"] == 1.0
    reason = value["variants"][0]["reason"]
    assert "memory: stage 0 needs" in reason
    assert "too much for H100" in reason
    assert "--force" not in reason


def test_comparing_loads_nothing_that_only_training_needs(job: Path, untrained: Path) -> None:
    script = (
        "import sys, gnn_predictor.infer as infer\n"
        "assert infer.main(sys.argv[1:]) == 0\n"
        f"assert not set({_COSTLY}) & set(sys.modules)"
    )
    arguments = [str(job), "--checkpoint", str(untrained), "--compare", "precision=bf16_mixed,fp8_mixed"]
    subprocess.run([sys.executable, "-c", script, *arguments], cwd=_ROOT, check=True, capture_output=True, timeout=120)


def test_values_have_yaml_types_and_parts_hold_under_every_whole(job: Path) -> None:
    choices = read_choices(["precision=fp8_mixed,{preset: bf16_mixed, linear: fp8_rowwise}", "parallel.tensor=1,2"])
    assert choices["parallel.tensor"] == [1, 2]
    variants = read_variants(str(job), {"precision.attention": "fp32", "parallel.tensor": "8"}, choices)
    assert [job.precision.linear for _, job in variants[::2]] == ["fp8_delayed", "fp8_rowwise"]
    assert [job.parallel.tensor for _, job in variants] == [1, 2, 1, 2]
    assert {job.precision.attention for _, job in variants} == {"fp32"}


def _breakdown(
    gemm: float = 60.0, cast: float = 0.0, other: float = 20.0, communication: float = 20.0, dtype: str = "bf16",
    memory_bound_gemm: float = 0.0, wide_gemm: float = 0.0,
) -> Breakdown:  # fmt: skip
    """A made-up critical path; ``wide_gemm`` seconds of the GEMMs stay in bf16."""
    return Breakdown(
        by_kind={"gemm": gemm, "quantize": cast, "norm": other, "host": 0.0},
        by_dtype={},
        by_bound={
            "gemm": {"compute": gemm - memory_bound_gemm, "memory": memory_bound_gemm, "launch": 0.0},
            "norm": {"compute": 0.0, "memory": other, "launch": 0.0},
        },
        gemm_by_dtype={dtype: gemm - wide_gemm} | ({"bf16": wide_gemm} if wide_gemm else {}),
        exposed_communication={"tensor": communication},
        exposed_communication_by_dtype={"bf16": communication},
        overlapped_communication={},
    )


def test_what_did_not_shrink_is_named_by_its_share() -> None:
    narrow = _breakdown(gemm=30, cast=6, dtype="fp8_e4m3")
    assert reasons(narrow, _breakdown(), 2.0) == [
        "exposed communication 26% unchanged",
        "memory-bound kernels 26% unchanged",
        "casts and quantisation +6%",
    ]


def test_small_and_wide_products_are_named() -> None:
    narrow = _breakdown(gemm=50, memory_bound_gemm=35, wide_gemm=10, other=0, communication=0, dtype="fp8_e4m3")
    wide = _breakdown(other=0, communication=0)
    assert reasons(narrow, wide, 2.0) == ["GEMMs 1.20x (70% of their time memory- or launch-bound, 20% still in bf16)"]


def test_what_grew_or_is_new_is_said() -> None:
    narrow = _breakdown(gemm=30, communication=30, other=0, dtype="fp8_e4m3")
    assert reasons(narrow, _breakdown(other=0), 2.0) == ["exposed communication 50% (+50%)"]
    assert reasons(narrow, _breakdown(other=0, communication=0), 2.0) == ["exposed communication 50% (new)"]


@pytest.mark.parametrize(
    ("gemm", "why"),
    [(54.0, ["exposed communication 21% unchanged", "memory-bound kernels 21% unchanged"]), (10.0, [])],
)
def test_a_floor_that_scales_every_part_is_a_reason_of_its_own(
    job: Path, untrained: Path, gemm: float, why: list[str]
) -> None:
    """The second estimate pays, and only the floor keeps it from doing so."""
    variants = read_variants(str(job), {}, {"precision": ["bf16_mixed", "fp8_mixed"]})
    wide, narrow = compare(variants, checkpoint=str(untrained)).variants
    assert wide.prediction
    assert narrow.prediction
    before, now = _breakdown(), _breakdown(gemm=gemm, dtype="fp8_e4m3")
    factor = 99.64 / sum(parts(now).values())
    raised = replace(narrow.prediction, iteration_time_s=99.64, breakdown=now.scaled(factor), raised_by=factor)
    estimated = replace(wide.prediction, iteration_time_s=100.0, breakdown=before)
    comparison = Comparison((replace(wide, outcome=estimated), replace(narrow, outcome=raised)))
    (explanation,) = comparison.explanations
    told = explanation.text.rpartition("(GEMM peak 2.0x): ")[2].split(", ")
    assert told[-1] == f"all of it raised to the physical floor of its {raised.floor.bound} ({factor - 1:+.0%})"
    assert [reason for reason in told[:-1] if not reason.startswith("GEMMs")] == why


_SECONDS = st.floats(0.01, 100)


@given(_SECONDS, _SECONDS, _SECONDS, _SECONDS, st.floats(1.1, 16))
def test_whatever_the_parts_a_reason_is_found(
    gemm: float, cast: float, other: float, communication: float, ratio: float
) -> None:
    narrow = _breakdown(gemm, cast, other, communication)
    assert 1 <= len(reasons(narrow, _breakdown(), ratio)) <= 4
    assert tuple(parts(narrow)) == PARTS
    assert math.fsum(parts(narrow).values()) == pytest.approx(gemm + cast + other + communication)


def test_a_format_pays_from_half_of_its_peak_gain_on() -> None:
    assert paying_speedup(2.0) == 1.5
    assert paying_speedup(8.0) == 4.5
