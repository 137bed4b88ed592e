"""What every command shares: version, help with examples, completion; jobs by the line; terminals and pipes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dataset_builder.job.completion import key_paths, settings_starting_with, values_of
from dataset_builder.job.errors import JobError
from dataset_builder.job.schema import TrainingJob
from gnn_predictor import __version__

_ROOT = Path(__file__).parents[2]
_JOB = _ROOT / "conf" / "job" / "llama3-70b-fp8.yaml"
_COMMANDS = sorted(
    ".".join(file.relative_to(_ROOT).with_suffix("").parts)
    for package in ("dataset_builder", "gnn_predictor")
    for file in (_ROOT / package).rglob("*.py")
    if 'if __name__ == "__main__"' in file.read_text()
)


def _run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("module", _COMMANDS)
def test_every_command_says_its_version_and_shows_examples(module: str) -> None:
    version, help_text = _run("-m", module, "--version"), _run("-m", module, "--help")
    assert (version.returncode, version.stdout) == (0, f"gnn-predictor {__version__}\n")
    assert help_text.returncode == 0
    assert "examples:" in help_text.stdout
    assert f"python -m {module} " in help_text.stdout.split("examples:")[1]
    assert "exit codes:" in help_text.stdout


@pytest.mark.parametrize("module", _COMMANDS)
def test_help_loads_nothing_that_takes_time(module: str) -> None:
    done = _run("-X", "importtime", "-m", module, "--help")
    assert done.returncode == 0
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    heavy = {"torch", "pydantic", "yaml", "rich", "numpy", "pandas", "argcomplete", "hydra", "pyarrow"}
    assert not loaded & heavy, loaded & heavy


def test_an_unknown_option_names_the_nearest() -> None:
    done = _run("-m", "gnn_predictor.infer", "job.yaml", "--comprae", "precision=bf16")
    assert done.returncode == 2
    assert "did you mean --compare" in done.stderr


@pytest.mark.parametrize(
    ("setting", "nearest"),
    [
        ("precison=bf16", "precision"),
        ("parallel.tensr=2", "tensor"),
        ("precision=fp8_mixd", "fp8_mixed"),
        ("precision.linear=fp8_delay", "fp8_delayed"),
        ("model.preset=llama3-70", "llama3-70b"),
        ("cluster.gpu=H100-SXM5-8GB", "H100-SXM5-80GB"),
        ("cluster.inter_node=ib-ndr-8x40", "ib-ndr-8x400"),
        ("parallel.recompute=selectiv", "selective"),
        ("optimizer=adamm", "adamw"),
    ],
)
def test_a_misspelt_key_or_name_is_answered_with_the_nearest(setting: str, nearest: str) -> None:
    done = _run("-m", "gnn_predictor.infer", str(_JOB), "--set", setting)
    assert done.returncode == 2
    assert re.search(rf"did you mean .*{re.escape(nearest)}", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("module", "override", "told"),
    [
        ("gnn_predictor.train", "fit.epoch=3", "train: fit.epoch: unknown key (did you mean fit.epochs?)"),
        ("gnn_predictor.train", "output_dir=3", "train: output_dir: unknown key (did you mean output?)"),
        (
            "gnn_predictor.train",
            "protocols.names=[P1,P9]",
            "train: protocols.names: got ['P1', 'P9']; expected each one of P1, P2, P3, P4, P5",
        ),
        ("gnn_predictor.train", "experiment=p9", "train: In 'train': Could not find 'experiment/p9' Available options"),
        ("gnn_predictor.sweep", "prts=2", "sweep: prts: unknown key (did you mean parts, part?)"),
        ("gnn_predictor.evaluate", "run=runs.csv", "evaluate: run: unknown key (did you mean runs?)"),
        ("dataset_builder.build", "fold=3", "build: fold: unknown key (did you mean folds?)"),
    ],
)
def test_a_misspelt_override_is_told_in_one_line(module: str, override: str, told: str, tmp_path: Path) -> None:
    done = _run("-m", module, override, f"corpus.path={tmp_path}" if module.endswith("train") else "output=x")
    assert (done.returncode, done.stdout) == (2, "")
    first, *usage = done.stderr.splitlines()
    assert first.startswith(told)
    assert not usage or (module.endswith("evaluate") and usage[0].startswith("usage: "))


def test_the_benchmark_says_what_its_options_are_by_default() -> None:
    help_text = " ".join(_run("-m", "dataset_builder.benchmark", "--help").stdout.split())
    for default in ("may take; default: 600", "or more; default: 15", "known worse; default: 0.05",
                    "default: fp32,bf16_mixed,bf16", "default: cluster.json, or torch's name"):  # fmt: skip
        assert default in help_text


def test_json_lines_are_answered_in_order_with_the_faults_in_their_places(untrained: Path) -> None:
    good = json.dumps(yaml.safe_load(_JOB.read_text()))
    lines = "\n".join([good, '{"model": 1}', "nonsense", "", good])
    command = ["-m", "gnn_predictor.infer", "-", "--format", "json", "--checkpoint", str(untrained)]
    done = _run(*command, input=lines)
    assert done.returncode == 2
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer.get("exit_code") for answer in answers] == [None, 2, 2, None]
    assert answers[0] == answers[3]
    assert answers[1]["source"] == "standard input, line 2"
    assert any("model" in reason for reason in answers[1]["reasons"])


def test_a_broken_first_line_keeps_back_no_other(untrained: Path) -> None:
    good = json.dumps(yaml.safe_load(_JOB.read_text()))
    command = ["-m", "gnn_predictor.infer", "-", "--format", "json", "--checkpoint", str(untrained)]
    done = _run(*command, input=f"{good[:40]}\n{good}\n")
    first, second = map(json.loads, done.stdout.splitlines())
    assert (done.returncode, first["exit_code"], first["source"]) == (2, 2, "standard input, line 1")
    assert second["iteration_time_s"] > 0


def test_one_job_file_that_is_missing_keeps_back_no_other(untrained: Path) -> None:
    jobs = ["missing.yaml", str(_JOB), str(_JOB)]
    done = _run("-m", "gnn_predictor.infer", *jobs, "--format", "json", "--checkpoint", str(untrained))
    assert done.returncode == 2
    first, second, third = map(json.loads, done.stdout.splitlines())
    assert first["source"] == "missing.yaml"
    assert second["iteration_time_s"] == third["iteration_time_s"]
    assert done.stderr.splitlines() == ["missing.yaml: cannot read the file: No such file or directory"]


def test_a_job_over_several_lines_of_standard_input_stays_one_job(untrained: Path) -> None:
    text = json.dumps(yaml.safe_load(_JOB.read_text()), indent=1)
    done = _run("-m", "gnn_predictor.infer", "-", "--format", "json", "--checkpoint", str(untrained), input=text)
    assert json.loads(done.stdout)["iteration_time_s"] > 0


def _on_a_terminal(*arguments: str) -> tuple[int, str]:
    """Exit code and everything written to a terminal that both output streams are."""
    terminal, theirs = pty.openpty()
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, cwd=_ROOT, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # Linux's way to say that nobody writes any more
                break
            if not part:
                break
            written += part
    os.close(terminal)
    return process.returncode, written.decode()


def test_a_terminal_gets_colour_and_a_sign_of_life_and_a_pipe_neither(untrained: Path) -> None:
    arguments = ["-m", "gnn_predictor.infer", str(_JOB), "--checkpoint", str(untrained)]
    code, written = _on_a_terminal(*arguments)
    assert code == 0
    assert "\x1b[" in written
    assert "0:00:0" in written  # the time passed, beside the spinner
    piped = _run(*arguments)
    assert piped.returncode == 0
    assert "\x1b" not in piped.stdout
    assert piped.stderr == ""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python -m gnn_predictor.infer --set parallel.sh", {"parallel.sharding=", "parallel.shard_size="}),
        ("python -m gnn_predictor.infer --set precision=mx", {"mxfp8"}),
        ("python -m gnn_predictor.infer --com", {"--compare"}),
        ("python -m dataset_builder.trace --out", {"--output"}),
    ],
)
def test_a_shell_is_told_options_key_paths_and_values(line: str, expected: set[str], tmp_path: Path) -> None:
    """What argcomplete's shell function sets and reads (3: words of ``python -m MODULE``)."""
    answer = tmp_path / "completions"
    asked = {
        "_ARGCOMPLETE": "3", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SHELL": "bash", "COMP_TYPE": "9",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><=;|&(:", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line, "COMP_POINT": str(len(line)),
    }  # fmt: skip
    _run("-m", line.split()[2], env={**os.environ, **asked})
    assert {word.strip() for word in answer.read_text().splitlines()} == expected


def _refusals(path: str, value: str) -> list[str]:
    """What is said of this very value; it may want another key beside it."""
    try:
        TrainingJob.from_yaml(_JOB, {"cluster.num_nodes": "1", path: value})
    except JobError as error:
        return [reason for reason in error.reasons if reason.startswith(f"{path}: got")]
    return []


def test_every_completed_key_and_value_is_one_that_a_job_takes() -> None:
    refused = [reason for path in key_paths() for value in values_of(path) for reason in _refusals(path, value)]
    assert refused == []
    assert settings_starting_with("precision=bf16,fp8_m") == ["precision=bf16,fp8_mixed"]
    assert set(yaml.safe_load(_JOB.read_text())) <= set(key_paths())
