"""Files that want to hurt: refused with a reason, at once, in little memory, and without running anything."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataset_builder.job.document import parse_document
from dataset_builder.job.errors import JobError
from dataset_builder.job.importers.huggingface import read_config
from gnn_predictor.checkpoint import CheckpointError, load_checkpoint

_ROOT = Path(__file__).parents[2]
_SMALL = _ROOT / "conf" / "job" / "gpt2-124m.yaml"
_GOOD = _SMALL.read_text()
_LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(f'*{old}' for _ in range(10))}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
_HOSTILE: dict[str, bytes] = {
    "billion laughs": _LAUGHS.encode(),
    "merge keys": b"a: &a {x: 1}\nb: {<<: [*a, *a]}\n",
    "a recursive alias": b"&a [*a]\n",
    "deep lists": b"[" * 100_000,
    "deep mappings": b"{a: " * 100_000,
    "deep block": b"".join(b" " * depth + b"a:\n" for depth in range(1000)),
    "a huge integer": b"model: " + b"9" * 100_000,
    "a huge exponent": b"batch: {seq_length: 1e999999999, micro_batch_size: 1, global_batch_size: 1}\n",
    "a python object": b"!!python/object/apply:os.system ['touch hacked']\n",
    "a python name": b"model: !!python/name:os.system\n",
    "a tag that lies": b"parallel: {!!timestamp tensor: 2}\nmodel: !!bool maybe\n",
    "not UTF-8": b"model: \xff\xfe\n",
    "NUL bytes": b"model: \x00\n",
    "UTF-16": "model: {}\n".encode("utf-16"),
    "a pickle": pickle.dumps({"model": 1}),
    "megabytes": b"a: b\n" * 10_000_000,
    "a long line": b"x" * 40_000_000,
    "many keys": b"".join(b"k%d: 1\n" % number for number in range(100_000)),
    "many anchors": b"".join(b"- &a%d x\n" % number for number in range(80_000)),
    "nothing": b"",
    "a quarter of a million layers": _GOOD.replace("model:", "model: {num_layers: 999999999, x: 1}\nx:").encode(),
}
_MEASURED = (
    "import importlib, sys\n"
    "code = importlib.import_module(f'gnn_predictor.{sys.argv[1]}').main(sys.argv[2:])\n"
    # getrusage would count what the parent had when it forked
    "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
    "print(int(peak.split()[1]) // 1024, file=sys.stderr)\n"
    "sys.exit(code)\n"
)


def _limits() -> None:
    """A process that would take gigabytes or minutes is ended, and its test fails."""
    resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))


def _ask(folder: Path, *arguments: str, command: str = "infer") -> tuple[int, str, int]:
    """Exit code, standard error, and the peak memory in MB of a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, command, *arguments], cwd=folder, env=environment, capture_output=True,
        text=True, timeout=120, preexec_fn=_limits,
    )  # fmt: skip
    *lines, memory = done.stderr.splitlines()
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.returncode, "\n".join(lines), int(memory)


@pytest.mark.parametrize("name", _HOSTILE)
def test_a_hostile_job_file_is_refused_in_little_memory(name: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(_HOSTILE[name])
    code, error, memory_mb = _ask(tmp_path, str(file))
    assert code == 2
    assert error.startswith(str(file))
    assert memory_mb < 200
    assert len(error.replace(str(file), "")) < 20_000
    assert list(tmp_path.iterdir()) == [file]  # nothing was run


@pytest.mark.parametrize(
    "path",
    [
        "/dev/zero",
        "/etc/passwd",
        "../../../../etc/passwd",
        "/proc/self/mem",
        "/",
        "",
        "missing.json",
        "a\0b",
        "~",
        "x" * 5000,
    ],
)
def test_a_config_path_that_leads_elsewhere_is_refused_and_shows_nothing_of_it(path: str, tmp_path: Path) -> None:
    job = json.loads(json.dumps({"batch": {"seq_length": 1, "micro_batch_size": 1, "global_batch_size": 1}}))
    job |= {"model": {"config": path}, "cluster": {"gpu": "H100-SXM5-80GB"}}
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(job))
    code, error, memory_mb = _ask(tmp_path, str(file))
    assert (code, memory_mb < 200) == (2, True)
    assert "root:" not in error


@pytest.mark.parametrize(
    "config",
    [
        "[]", "null", '"x"', "{", "[" * 100_000, '{"num_hidden_layers": ' + "9" * 10_000 + "}",
        '{"model_type": "llama", "hidden_size": "x", "intermediate_size": {}, "num_hidden_layers": [], '
        '"num_attention_heads": null, "vocab_size": true}',
        '{"model_type": {}, "text_config": {"text_config": []}}', '{"text_config": ' * 500 + "{}" + "}" * 500,
    ],
)  # fmt: skip
def test_a_config_of_wrong_types_is_refused(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    job = {
        "model": {"config": "config.json"},
        "batch": {"seq_length": 1, "micro_batch_size": 1, "global_batch_size": 1},
    }
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps({**job, "cluster": {"gpu": "H100-SXM5-80GB"}}))
    code, error, memory_mb = _ask(tmp_path, str(file))
    assert (code, memory_mb < 200) == (2, True)
    assert "config" in error


class _Exploding:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def _torch_pickle(path: Path) -> bytes:
    stream = io.BytesIO()
    torch.save({"weights": _Exploding(path)}, stream)
    return stream.getvalue()


def _zipped(path: Path) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_Exploding(path)))
        archive.writestr("bomb", b"\0" * 10_000_000)
    return stream.getvalue()


@pytest.mark.parametrize("make", [_torch_pickle, _zipped, lambda path: pickle.dumps(_Exploding(path))])
def test_a_pickle_that_poses_as_a_checkpoint_is_never_run(make: object, untrained: Path, tmp_path: Path) -> None:
    trap, folder = tmp_path / "hacked", tmp_path / "checkpoint"
    folder.mkdir()
    for file in untrained.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for name in ("model.safetensors", "config.json", "metrics.json"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(make(trap))  # type: ignore[operator]
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(folder)
        (folder / name).write_bytes(kept)
    (folder / "pytorch_model.bin").write_bytes(make(trap))  # type: ignore[operator]
    load_checkpoint(folder)  # a file of another name is not read
    assert not trap.exists()


_CHECKPOINT_FILES = (
    "model.safetensors", "config.json", "metrics.json", "training_points.safetensors", "measured_runs.safetensors",
)  # fmt: skip


@pytest.mark.parametrize("name", _CHECKPOINT_FILES)
def test_a_pickle_that_poses_as_a_checkpoint_is_refused_in_little_memory(
    name: str, untrained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(untrained, folder)
    (folder / name).write_bytes(_torch_pickle(tmp_path / "hacked"))
    for command in ("infer", "plan"):
        code, error, memory_mb = _ask(tmp_path, str(_SMALL), "--checkpoint", str(folder), command=command)
        assert (code, memory_mb < 200) == (3, True), error
        assert name in error


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "metrics.json"])
@pytest.mark.parametrize("target", ["../outside", "/dev/zero", "/etc/passwd"])
def test_a_checkpoint_does_not_lead_out_of_its_folder(name: str, target: str, untrained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(untrained, folder)
    shutil.copy(folder / name, tmp_path / "outside")
    (folder / name).unlink()
    (folder / name).symlink_to(target)
    with pytest.raises(CheckpointError, match=rf"{name}: leads out of the checkpoint's folder"):
        load_checkpoint(folder)


def test_what_is_no_regular_file_is_not_waited_for(untrained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(untrained, folder)
    (folder / "metrics.json").unlink()
    os.mkfifo(folder / "metrics.json")
    with pytest.raises(CheckpointError, match=r"metrics.json: not a regular file"):
        load_checkpoint(folder)


@pytest.mark.parametrize("key", ["weights", "card", "file", "path"])
def test_a_configuration_names_no_files(key: str, untrained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(untrained, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: "../../outside"}))
    with pytest.raises(CheckpointError, match=rf"config.json: {key}: Extra inputs are not permitted"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:4], lambda raw: raw[: len(raw) // 2], lambda raw: raw[:-1], lambda raw: b"",
        lambda raw: struct.pack("<Q", 2**62) + raw[8:], lambda raw: struct.pack("<Q", 0) + raw[8:],
        lambda raw: raw[:8] + b"\xff" * 64 + raw[72:], lambda raw: raw.replace(b"F32", b"F99", 1),
        lambda raw: raw.replace(b'"shape":[', b'"shape":[99999999999,', 1),
    ],
)  # fmt: skip
def test_damaged_weights_are_refused_by_name(damage: object, untrained: Path, tmp_path: Path) -> None:
    for file in untrained.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_checkpoint(tmp_path)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_document_or_an_error(raw: bytes) -> None:
    with contextlib.suppress(JobError):
        parse_document(raw, "job")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(("model_type", "hidden_size", "n_layer", "num_hidden_layers", "vocab_size",
      "text_config", "num_experts", "num_attention_heads", "intermediate_size", "layer_types", "rms_norm_eps")), inner),
    max_leaves=20,
)  # fmt: skip


@given(
    _JSON, st.sampled_from(("llama", "gpt2", "bert", "t5", "falcon", "mpt", "deepseek_v3", "gemma3", "qwen2_moe", "x"))
)
def test_any_json_is_a_config_or_an_error(tmp_path_factory: pytest.TempPathFactory, value: object, family: str) -> None:
    file = tmp_path_factory.getbasetemp() / "config.json"
    content = {"model_type": family, **value} if isinstance(value, dict) else value
    file.write_text(json.dumps(content))
    reason = "config:"
    try:
        read_config(file, Path())
    except ValueError as error:
        reason = str(error)
    assert reason.startswith("config:")


def test_five_hundred_random_and_mutated_inputs_break_no_rule() -> None:
    """The same run with 10,000 is a benchmark: ``python benchmarks/fuzz.py``."""
    command = [sys.executable, "benchmarks/fuzz.py", "--inputs", "500", "--seed", "20"]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=600)
    report = json.loads(done.stdout)
    assert report["failures"] == 0, done.stderr[-5000:]
    assert report["inputs"] == 500
    assert set(report["exit_codes"]) <= {"0", "2", "3", "4"}
    assert done.returncode == 0
