"""The calibrate command: its folder is a checkpoint, rows that cannot be are refused, exit codes are the contract's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from gnn_predictor import calibrate as command
from gnn_predictor.checkpoint import load_checkpoint
from gnn_predictor.prediction import predict

_ROOT = Path(__file__).parents[2]
_ROW: dict[str, Any] = {
    "run_id": "r0", "framework": "megatron-lm", "gpu": "A100-SXM4-80GB", "num_gpus": 8, "gpus_per_node": 8,
    "arch": "gpt", "layers": 4, "hidden": 1024, "ffn_hidden": 4096, "heads": 16, "vocab": 50304, "seq_len": 1024,
    "tp": 1, "pp": 1, "dp": 8, "micro_batch": 2, "global_batch": 32, "precision": "bf16_mixed", "act_ckpt": "none",
    "optimizer": "adam", "iter_time_s": 0.15,
}  # fmt: skip
_QWEN3_32B_ON_8_H20 = {
    "run_id": "packed", "gpu": "H20-96GB", "tp": 8, "dp": 1, "layers": 64, "hidden": 5120, "ffn_hidden": 25600,
    "heads": 64, "kv_heads": 8, "head_dim": 128, "vocab": 151936, "seq_len": 16384, "arch": "llama", "gated_mlp": 1,
    "tied_embeddings": 0, "global_batch": 16, "precision": "bf16_mixed", "iter_time_s": 43.0,
}  # fmt: skip


def _csv(path: Path, *changes: dict[str, Any]) -> Path:
    pd.DataFrame([{**_ROW, "run_id": f"r{index}", **change} for index, change in enumerate(changes)]).to_csv(
        path, index=False
    )
    return path


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], cwd=_ROOT, capture_output=True, text=True, timeout=300
    )


def test_the_folder_is_a_checkpoint(tmp_path: Path, untrained: Path) -> None:
    runs = _csv(tmp_path / "runs.csv", {}, {"layers": 8, "iter_time_s": 0.26}, {"hidden": 2048, "iter_time_s": 0.31})
    adapter = tmp_path / "adapter"
    done = _run("gnn_predictor.calibrate", runs, "--output", adapter, "--checkpoint", untrained)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("assumed where the 3 rows say nothing")
    assert "  3 sharding: not stated, none as megatron-lm does\n" in done.stderr
    assert "warning" not in done.stderr
    assert "untrained, calibrated with 3 runs on A100-SXM4-80GB under megatron-lm" in done.stdout
    assert str(adapter) in done.stdout
    figures = json.loads((adapter / "metrics.json").read_text())["calibration"]
    assert figures["left_out"]["mape_percent"] < figures["before"]["mape_percent"]
    assert [run["run_id"] for run in figures["by_run"]] == ["r0", "r1", "r2"]
    infer = _run("gnn_predictor.infer", "conf/job/gpt-22b-a100.yaml", "--checkpoint", adapter, "--format", "json")
    assert infer.returncode == 0, infer.stderr
    answer = json.loads(infer.stdout)
    assert answer["provenance"]["checkpoint"] == "untrained+calibration"
    assert answer["provenance"]["calibration"]["base"] == "untrained"
    judged = tmp_path / "judged"
    evaluate = _run("gnn_predictor.evaluate", f"runs={runs}", f"checkpoint={adapter}", f"output={judged}")
    assert evaluate.returncode == 0, evaluate.stderr
    assert json.loads((judged / "metrics.json").read_text())["mape_percent"] == pytest.approx(
        figures["fitted"]["mape_percent"], rel=1e-3
    )


def test_c37_and_other_rows_that_cannot_be_are_refused_together(tmp_path: Path, untrained: Path) -> None:
    runs = _csv(
        tmp_path / "runs.csv", {}, _QWEN3_32B_ON_8_H20, {"iter_time_s": None, "layers": 6}, {"hidden": None},
        {"layers": 8, "iter_time_s": 2.0, "run_id": "r0"}, {},
    )  # fmt: skip
    done = _run("gnn_predictor.calibrate", runs, "--output", tmp_path / "adapter", "--checkpoint", untrained)
    assert (done.returncode, done.stdout) == (2, "")
    reasons = done.stderr.splitlines()
    assert all(line.startswith(f"{runs}: run ") for line in reasons)
    assert "packed: iter_time_s: 43 s is impossible: needs at least 53.9 s = 7.98 PFLOP / 148 TFLOP/s" in reasons[0]
    assert "r2: iter_time_s: got blank; expected the measured seconds" in reasons[1]
    assert "r3: missing: hidden" in reasons[2]
    assert "r0: run_id: stands twice" in reasons[3]
    assert "r5: the same job and time as run r0" in reasons[4]
    assert len(reasons) == 5
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["none.csv", "--output", "{tmp}/a"], 2, "none.csv"),
        (["{runs}", "--output", "{tmp}/a", "--checkpoint", "{tmp}/nowhere"], 3, "nowhere"),
        (["{runs}"], 2, "--output"),
        (["{runs}", "--output", "{base}"], 2, "is the checkpoint to be calibrated"),
        (["{runs}", "--output", "{tmp}/mine"], 2, "holds something else"),
        (["{empty}", "--output", "{tmp}/a"], 2, "no rows"),
    ],
)
def test_exit_codes(
    arguments: list[str], code: int, named: str, tmp_path: Path, untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    runs = _csv(tmp_path / "runs.csv", {})
    empty = tmp_path / "empty.csv"
    empty.write_text(",".join(_ROW) + "\n")
    places = {"tmp": tmp_path, "runs": runs, "base": untrained, "empty": empty}
    given = [each.format(**places) for each in arguments]
    if "--checkpoint" not in given:
        given += ["--checkpoint", str(untrained)]
    assert _exit_code(given) == code
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.out == ""
    assert not (tmp_path / "a").exists()
    assert (tmp_path / "mine" / "thesis.tex").exists()


def _exit_code(arguments: list[str]) -> Any:
    try:
        return command.main(arguments)
    except SystemExit as left:  # argparse's way
        return left.code


def test_times_in_another_unit_are_refused(tmp_path: Path, untrained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = _csv(tmp_path / "runs.csv", {"iter_time_s": 150}, {"layers": 8, "iter_time_s": 260})
    assert command.main([str(runs), "--output", str(tmp_path / "a"), "--checkpoint", str(untrained)]) == 2
    captured = capsys.readouterr()
    assert "runs.csv: iter_time_s: the runs' median is " in captured.err
    assert " times as long as predicted, for example 260 in run r1 against " in captured.err
    assert "expected seconds of one iteration" in captured.err
    assert captured.out == ""
    assert not (tmp_path / "a").exists()


def test_one_absurd_time_is_named(tmp_path: Path, untrained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = _csv(
        tmp_path / "runs.csv", {}, {"layers": 8, "iter_time_s": 0.26}, {"hidden": 2048, "iter_time_s": 0.31},
        {"layers": 6, "iter_time_s": 190},
    )  # fmt: skip
    assert command.main([str(runs), "--output", str(tmp_path / "a"), "--checkpoint", str(untrained)]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning: run" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: run r3: iter_time_s 190 against ")


def test_runs_that_contradict_each_other_are_told(
    tmp_path: Path, untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = _csv(tmp_path / "runs.csv", {}, {"iter_time_s": 1.2})
    assert command.main([str(runs), "--output", str(tmp_path / "a"), "--checkpoint", str(untrained)]) == 0
    assert "warning: the adapter's own runs are still " in capsys.readouterr().err


def test_what_is_no_time_is_shown_as_written(
    tmp_path: Path, untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = _csv(tmp_path / "runs.csv", {}, {"iter_time_s": "7.9s"})
    assert command.main([str(runs), "--output", str(tmp_path / "a"), "--checkpoint", str(untrained)]) == 2
    assert "run r1: iter_time_s: got '7.9s'; expected the measured seconds" in capsys.readouterr().err


def test_runs_that_cannot_have_fitted_are_told(
    tmp_path: Path, untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes alone are read as plain PyTorch with unfused attention and nothing recomputed."""
    sizes = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 128256, "seq_len": 8192, "micro_batch": 1}
    blank = dict.fromkeys(("framework", "arch", "ffn_hidden", "tp", "pp", "dp", "act_ckpt", "optimizer"))
    runs = _csv(tmp_path / "runs.csv", {**sizes, **blank, "gpu": "H100-SXM5-80GB", "iter_time_s": 10.0})
    assert command.main([str(runs), "--output", str(tmp_path / "a"), "--checkpoint", str(untrained)]) == 0
    error = capsys.readouterr().err
    assert "attention: not stated, unfused as plain PyTorch does" in error
    assert "warning: 1 measured rows need more memory than their GPU has" in error
    assert "fill framework, arch, tp, pp, sharding, act_ckpt, attention" in error


def test_a_header_without_its_columns_is_refused_before_torch_loads(tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    runs.write_text("gpu,iteration_time\nA100,1\n")
    for arguments in (
        ["gnn_predictor.calibrate", runs, "--output", tmp_path / "a"],
        ["gnn_predictor.evaluate", f"runs={runs}", f"output={tmp_path / 'a'}"],
    ):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", *map(str, arguments)],
            cwd=_ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 2
        assert "column 'iter_time_s' is missing (did you mean it by 'iteration_time'?" in done.stderr
        assert not [line for line in done.stderr.splitlines() if line.endswith("| torch")]


def test_a_calibrated_checkpoint_is_calibrated_anew(
    tmp_path: Path, untrained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    runs = _csv(tmp_path / "runs.csv", {})
    assert command.main([str(runs), "--output", str(first), "--checkpoint", str(untrained)]) == 0
    assert "nothing can be left out" in capsys.readouterr().out
    assert command.main([str(runs), "--output", str(second), "--checkpoint", str(first)]) == 0
    assert "calibrated anew" in capsys.readouterr().err
    once, twice = load_checkpoint(first).config, load_checkpoint(second).config
    assert once == twice
    assert twice.adapter is not None
    assert twice.adapter.base == "untrained"


def test_the_released_predictor_is_untouched_without_an_adapter(job_of: Any, untrained: Path) -> None:
    prediction = predict(job_of(), checkpoint=untrained)
    assert "calibration" not in prediction.provenance
