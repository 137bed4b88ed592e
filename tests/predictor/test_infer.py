"""The command line: streams, exit codes and messages."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gnn_predictor import __version__
from gnn_predictor.infer import main

_ROOT = Path(__file__).parents[2]
_EXAMPLES = _ROOT / "conf" / "job"
_JOB = """
name: small
model: {num_layers: 8, hidden_size: 1024, num_attention_heads: 16, vocab_size: 51200}
batch: {seq_length: 1024, micro_batch_size: 2, global_batch_size: 64}
cluster: {gpu: A100-SXM4-80GB, num_nodes: 1, gpus_per_node: 8}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(_JOB)
    return file


def test_json_goes_to_standard_output_and_nothing_else(
    job: Path, untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(job), "--checkpoint", str(untrained), "--format", "json"]) == 0
    printed = capsys.readouterr()
    value = json.loads(printed.out)
    assert value["provenance"] == {
        "checkpoint": "untrained", "format_version": 1, "corpus": "none", "version": __version__
    }  # fmt: skip
    assert printed.err == ""


def test_the_table_echoes_parameters_tokens_stages_and_warnings(
    job: Path, untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(job), "--checkpoint", str(untrained)]) == 0
    out = capsys.readouterr().out
    for words in ("small:", "154 M parameters", "65,536 tokens per step", "Pipeline stages", "Critical path", "MFU"):
        assert words in out
    assert "assumed (not given)" in out
    assert "\x1b" not in out  # plain when piped


def test_no_figure_is_cut_on_a_terminal_of_80_columns(
    job: Path, untrained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main([str(job), "--checkpoint", str(untrained), "--set", "parallel.recompute=full"]) == 0
    out = capsys.readouterr().out
    assert "\u2026" not in out
    assert "per microbatch" in out
    for column in ("forward", "recompute", "exposed comm", "optimizer", "bubble", "memory"):
        assert column in out
    variants = ["--compare", "precision=bf16_mixed,fp16_mixed"]
    assert main([str(job), "--checkpoint", str(untrained), *variants]) == 0
    out = capsys.readouterr().out
    assert "\u2026" not in out
    assert out.count("bf16_mixed ") >= 2
    assert all(column in out for column in ("interval", "MFU", "communication", "host"))


def test_set_overrides_values_with_yaml_types(job: Path, untrained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "parallel.tensor=2", "--set", "precision={preset: bf16, attention: fp32}"]
    assert main([str(job), "--checkpoint", str(untrained), "--format", "json", *settings]) == 0
    resolved = json.loads(capsys.readouterr().out)["job"]
    assert resolved["parallel"]["tensor"] == 2
    assert resolved["precision"]["attention"] == "fp32"


def test_a_format_changed_within_a_preset_is_said(
    job: Path, untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--set", "precision={preset: bf16_mixed, linear: fp8_current}", "--set", "cluster.gpu=H100-SXM5-80GB"]
    assert main([str(job), "--checkpoint", str(untrained), *settings]) == 0
    assert "precision bf16_mixed with linear fp8_current" in capsys.readouterr().out


def test_standard_input_and_several_jobs(
    job: Path, untrained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(_JOB.encode())))
    assert main(["-", str(job), "--checkpoint", str(untrained), "--format", "json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["iteration_time_s"] == second["iteration_time_s"]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('{}\n{"model": {"preset" "x"}}\n', "standard input, line 2: column 21: not JSON: Expecting ':' delimiter"),
        ('{"model": {"preset": 1}\n{}\n', "standard input, line 1: column 24: not JSON: Expecting ',' delimiter"),
        ('{"model": {"preset": 1}\n', "standard input: column 24: not JSON: Expecting ',' delimiter"),
        ("{}\n{model: [1}\n", "standard input, line 2: column 11: not YAML"),
        ('{}\n{"a": 1, "a": 2}\n', "standard input, line 2: key 'a' is given twice"),
    ],
)
def test_a_broken_line_of_standard_input_is_told_as_json_with_one_number(
    lines: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert main(["-"]) == 2
    assert told in capsys.readouterr().err


def test_many_stages_that_do_not_fit_are_told_in_brief_and_kept_in_json(
    job: Path, untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"model.num_layers": 512, "model.hidden_size": 16384, "parallel.pipeline": 8, "parallel.data": "null"}
    pairs = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    arguments = ["--checkpoint", str(untrained), "--format", "json", *pairs]
    assert main([str(job), *arguments]) == 4
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" needs")[0] for line in lines if "needs" in line] == [f"{job}: memory: stage 0"]
    (others,) = (line for line in lines if "others" in line)
    assert others.startswith(f"{job}: memory: and 7 others, the least stage ")
    assert len(others.partition("stages in order: ")[2].split(", ")) == 8
    assert main([str(job), str(job), *arguments]) == 4
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert sum(reason.startswith("memory: stage") for reason in first["reasons"]) == 8


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--set", "parallel.tensr=2"], 2, "parallel.tensr"),
        (["--set", "parallel.tensor=two"], 2, "parallel.tensor"),
        (["--set", "parallel.tensor"], 2, "expected KEY.PATH=VALUE"),
        (["--set", "model=[1"], 2, "--set model"),
        (["--set", "batch.global_batch_size=65"], 4, "65"),
        (["--set", "parallel.tensor=3"], 4, "3"),
        (["--set", "precision=fp8_mixed"], 4, "fp8"),
        (["--set", "model.num_layers=2000"], 4, "memory: stage 0 needs"),
        (["--checkpoint", "/nonexistent"], 3, "/nonexistent: no such directory"),
    ],
)
def test_a_mistake_is_one_line_with_its_exit_code(
    arguments: list[str], code: int, message: str, job: Path, untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(job), "--checkpoint", str(untrained), *arguments]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert all(len(line.split(": ")) > 1 for line in printed.err.splitlines())
    assert "Traceback" not in printed.err


def test_every_problem_is_a_line_of_file_key_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(_JOB.replace("num_layers: 8", "num_layers: -8").replace("seq_length: 1024", "seq_len: 1024"))
    assert main([str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    assert all(line.startswith(f"{file}: ") for line in lines)
    assert any("model.num_layers" in line for line in lines)


@pytest.mark.parametrize("name", ["llama_config.json", "megatron_fp8.sh", "nemo_launcher.yaml"])
def test_a_file_of_another_tool_is_told_where_it_belongs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = _ROOT / "tests" / "importers" / "files" / name
    assert main([str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("expected it behind --from")


def test_a_job_file_needs_no_import(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--from", str(job)]) == 2
    assert capsys.readouterr().err == f"{job}: is a job file, which is read as it is; expected it without --from\n"


@pytest.mark.parametrize("path", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read_is_named(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / path)]) == 2
    assert str(tmp_path / path) in capsys.readouterr().err


@pytest.mark.parametrize("name", [*(file.name for file in sorted(_EXAMPLES.glob("*.yaml"))), "README"])
def test_shipped_jobs_and_the_readmes_run_and_fit(name: str, tmp_path: Path, untrained: Path) -> None:
    file = _EXAMPLES / name
    if name == "README":
        file = tmp_path / "job.yaml"
        file.write_text((_ROOT / "README.md").read_text().split("```yaml\n")[1].split("```")[0])
    assert main([str(file), "--checkpoint", str(untrained)]) == 0


def test_bad_usage_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in (([], 2), (["--nonsense"], 2), (["--help"], 0), (["--version"], 0)):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == code
    assert __version__ in capsys.readouterr().out


def test_a_bad_job_is_answered_at_once(tmp_path: Path) -> None:
    """Before anything is loaded that only a prediction needs; ``benchmarks/infer_speed.py`` says how long it takes."""
    file = tmp_path / "bad.yaml"
    file.write_text("model: {preset: no-such-model}\n")
    command = [sys.executable, "-X", "importtime", "-m", "gnn_predictor.infer", str(file)]
    done: Any = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT)
    assert done.returncode == 2
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "dataset_builder.job.schema" in loaded
    assert not loaded & {"torch", "numpy", "pandas", "rich", "jinja2", "dataset_builder.job.importers.formats"}
