"""Throws random and mutated inputs at the commands: job files, configs, checkpoints, options, graphs.

Every answer must be an exit code of the contract (0, 2, 3 or 4); with 0 there is strict JSON on standard output and
nothing in it is NaN or infinite; otherwise a line on standard error says why. Prints what was tried, which exit codes
came back, the longest time and the peak memory; every broken rule is printed with the input that broke it, and the
exit code is 1 if there is any. The same seed gives the same inputs.

    python benchmarks/fuzz.py [--inputs 10000] [--seed 0] [--kind job --kind config ...] [--keep DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dataset_builder import convert, trace
from dataset_builder.job.completion import key_paths, values_of
from gnn_predictor import infer, plan
from gnn_predictor.checkpoint import CONFIG_FILE, METRICS_FILE, MODEL_FILE, released_checkpoint

ROOT = Path(__file__).resolve().parents[1]
EXIT_CODES = (0, 2, 3, 4)
TIME_LIMIT_S = 60

_CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4,
     "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32000, "rms_norm_eps": 1e-5,
     "hidden_act": "silu", "max_position_embeddings": 4096, "tie_word_embeddings": False},
    {"model_type": "gpt2", "n_embd": 768, "n_layer": 6, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
    {"model_type": "mixtral", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
     "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000, "num_local_experts": 8,
     "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    {"model_type": "deepseek_v3", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 5,
     "num_attention_heads": 8, "vocab_size": 32000, "n_routed_experts": 16, "n_shared_experts": 1,
     "num_experts_per_tok": 4, "moe_intermediate_size": 256, "first_k_dense_replace": 1, "q_lora_rank": 192,
     "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "rms_norm_eps": 1e-6},
    {"model_type": "t5", "d_model": 512, "d_ff": 1024, "d_kv": 64, "num_layers": 6, "num_heads": 8,
     "vocab_size": 32128, "feed_forward_proj": "gated-gelu"},
    {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 512, "vocab_size": 32000,
     "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
     "head_dim": 64, "sliding_window": 512, "sliding_window_pattern": 6, "rms_norm_eps": 1e-6}},
    {"model_type": "bert", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4,
     "num_attention_heads": 12, "vocab_size": 30522, "max_position_embeddings": 512, "hidden_act": "gelu"},
)  # fmt: skip
_SMALL_JOB = {
    "name": "small",
    "model": {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 51200},
    "batch": {"seq_length": 1024, "micro_batch_size": 2, "global_batch_size": 64},
    "cluster": {"gpu": "A100-SXM4-80GB", "num_nodes": 1, "gpus_per_node": 8},
}
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 1.5, -0.0, 1e308, 1e-308, float("nan"), float("inf"), 2**31, 2**62, 2**63,
    10**40, "", " ", "0", "1e4", "1e400", "nan", "inf", "null", "0x10", "1_000", "ä\u0000", "x" * 5000,
    "../../etc/passwd",
    "/dev/zero", "-", "*", "[", "layers.*", [], {}, [[]], [None], [1, 2, 3], {"a": 1}, {"preset": "bf16"},
    {"name": "adamw"}, {1: 2}, [0] * 300, {"num_experts": 8, "top_k": 2}, "none", "fp8_mixed", "llama3-8b",
    "H100-SXM5-80GB",
)  # fmt: skip
_TEXTS = (
    b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"&a ", b"*a", b"<<: *a", b"!!python/object/apply:os.system [ls]", b"---\n",
    b"...", b"? ", b"|\n", b">-\n", b"%YAML 1.2\n", b"{" * 50, b"[" * 2000, b"- " * 500, b"\t", b"\r", b": ", b"#",
    b"1e999", b".nan", b".inf", b"-.inf", b"0o17", b"2001-01-01", b"~", b"!!binary aGk=", b"!!set {a}", b'"\\ud800"',
    b"9" * 5000, b"\xf0\x9f\x92\xa3", b"\xc3\x28", b"=", b"!!timestamp 2001-01-01", b"{a: 1, a: 2}",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One call of a command: its arguments, what stands on standard input, and the input as text for a report."""

    main: Callable[[Sequence[str]], int]
    arguments: tuple[str, ...]
    standard_input: bytes = b""
    input_text: str = ""
    writes_json: bool = True


@dataclass
class Report:
    """What came of the trials."""

    tried: Counter[str] = field(default_factory=Counter)
    exit_codes: Counter[int | str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    longest: tuple[float, Trial | None] = (0.0, None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "inputs": sum(self.tried.values()),
            "by_kind": dict(self.tried),
            "exit_codes": {str(code): count for code, count in sorted(self.exit_codes.items(), key=str)},
            "failures": len(self.failures),
            "longest_s": round(self.longest[0], 3),
            "longest_arguments": self.longest[1].arguments[1:] if self.longest[1] else (),
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }


class _TooSlowError(BaseException):
    """Not an Exception, so that no handler of the commands swallows it."""


def fuzz(inputs: int, seed: int, kinds: Sequence[str], keep: Path | None = None) -> Report:
    """Runs so many trials, the kinds in turn."""
    rng = random.Random(seed)
    report = Report()
    signal.signal(signal.SIGALRM, _too_slow)
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(inputs):
            kind = kinds[number % len(kinds)]
            trial = KINDS[kind](rng, Path(scratch))
            report.tried[kind] += 1
            problem = _run(trial, report)
            if problem:
                words = f"{kind} {number}: {problem}\n  arguments {trial.arguments}\n  input {trial.input_text[:3000]}"
                report.failures.append(words)
                print(words, file=sys.stderr, flush=True)
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{kind}-{number}.txt").write_text(words, encoding="utf-8", errors="replace")
    return report


def _too_slow(*_: object) -> None:
    raise _TooSlowError


def _run(trial: Trial, report: Report) -> str:
    """Calls the command; says which rule it broke, if any."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(trial.standard_input))
    start, code, crash = time.process_time(), -1, ""
    signal.alarm(TIME_LIMIT_S)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = trial.main(trial.arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except _TooSlowError:
        crash = f"no answer within {TIME_LIMIT_S} s"
    except BaseException:  # whatever it is, it is a traceback that a user would see
        crash = traceback.format_exc(limit=-4)
    finally:
        signal.alarm(0)
        sys.stdin = before
    seconds = time.process_time() - start
    if seconds > report.longest[0]:
        report.longest = seconds, trial
    report.exit_codes["crash" if crash else code] += 1
    return crash or _broken_rule(trial, code, out.getvalue(), err.getvalue())


def _broken_rule(trial: Trial, code: int, out: str, err: str) -> str:
    if code not in EXIT_CODES:
        return f"exit code {code}: {err[-500:]}"
    if "Traceback" in err:
        return f"a traceback: {err[-800:]}"
    if code != 0 and not err.strip() and '"reason"' not in out:  # a comparison names each variant's
        return f"exit code {code} without a word"
    if code == 0 and trial.writes_json:
        try:
            for line in [out] if out.startswith("{\n") else out.splitlines():
                json.loads(line, parse_constant=_refuse)
        except ValueError as error:
            return f"not strict JSON: {error}: {out[:300]}"
    return ""


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# --- inputs


def _any_job(rng: random.Random) -> dict[str, Any]:
    files = sorted((ROOT / "conf" / "job").glob("*.yaml"))
    choice = rng.randrange(len(files) + 2)
    job = _SMALL_JOB if choice >= len(files) else yaml.safe_load(files[choice].read_text(encoding="utf-8"))
    return json.loads(json.dumps(job))  # type: ignore[no-any-return]  # a deep copy of plain values


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield from _places(below, (*path, key))


def _at(value: Any, path: Sequence[Any]) -> Any:
    for key in path:
        value = value[key]
    return value


def _mutated(rng: random.Random, value: Any, keys: Sequence[str]) -> Any:
    """A few random changes somewhere in plain values; ``keys`` are names that mean something there."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        places = list(_places(value))
        if not places:
            return value
        path = rng.choice(places)
        parent, key = _at(value, path[:-1]), path[-1]
        change = rng.randrange(6)
        if change == 0:
            parent[key] = _copy(rng.choice(_ODD))
        elif change == 1:
            del parent[key]
        elif change == 2:
            parent[key] = _copy(_at(value, rng.choice(places)))
        elif change == 3 and isinstance(parent, dict):
            parent[rng.choice((*keys, "assumed", "x"))] = _copy(rng.choice((*_ODD, parent[key])))
        elif change == 4 and isinstance(parent[key], int | float):
            parent[key] = parent[key] * rng.choice((-1, 0, 0.5, 2, 3, 10, 1000, 1e9, 1e18))
        elif change == 5 and isinstance(parent, dict):
            parent[f"{key}{rng.choice('sx_ .')}"] = parent.pop(key)
    return value


def _copy(value: Any) -> Any:
    return {key: _copy(below) for key, below in value.items()} if isinstance(value, dict) else (
        [_copy(below) for below in value] if isinstance(value, list) else value
    )  # fmt: skip


def _mutated_text(rng: random.Random, raw: bytes) -> bytes:
    """Bytes cut, doubled, moved, replaced, or with something odd put in."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, length = rng.randrange(len(raw) + 1), rng.choice((1, 2, 8, 40))
        piece = raw[at : at + length]
        raw = rng.choice((
            raw[:at], raw[:at] + raw[at + length :], raw[:at] + piece * 3 + raw[at:],
            raw[:at] + rng.choice(_TEXTS) + raw[at:], raw[:at] + rng.randbytes(length) + raw[at + length :],
            raw[at:] + raw[:at],
        ))  # fmt: skip
    return raw


def _infer(file: Path, raw: bytes, *options: str) -> Trial:
    file.write_bytes(raw)
    return Trial(infer.main, (str(file), "--format", "json", *options), input_text=raw.decode("utf-8", "replace"))


def _job(rng: random.Random, scratch: Path) -> Trial:
    """A job whose values were tampered with."""
    names = sorted({part for path in key_paths() for part in path.split(".")})
    job = _mutated(rng, _any_job(rng), names)
    text = yaml.safe_dump(job, allow_unicode=rng.random() < 0.5)
    return _infer(scratch / "job.yaml", text.encode("utf-8", "surrogatepass"), *(["--force"] * (rng.random() < 0.3)))


def _valid_job(rng: random.Random, scratch: Path) -> Trial:
    """A job of values that are each valid, in a combination that nobody chose."""
    paths = [path for path in key_paths() if not path.startswith(("cluster.gpu.", "training.", "name"))]
    settings: list[str] = []
    for _ in range(rng.choice((1, 2, 3, 5))):
        path = rng.choice(paths)
        values = values_of(path) or (str(rng.choice((1, 2, 3, 4, 8, 16, 40, 128, 1000, 4096, 2**40))),)
        settings += ["--set", f"{path}={rng.choice(values)}"]
    raw = json.dumps(_any_job(rng)).encode()
    return _infer(scratch / "job.yaml", raw, *settings, *(["--force"] * (rng.random() < 0.8)))


def _text(rng: random.Random, scratch: Path) -> Trial:
    """A job file whose bytes were tampered with, or random bytes."""
    raw = yaml.safe_dump(_any_job(rng)).encode()
    if rng.random() < 0.3:
        raw = json.dumps(_any_job(rng), indent=rng.choice((None, 1))).encode()
    return _infer(
        scratch / "job.yaml", rng.randbytes(rng.randrange(300)) if rng.random() < 0.05 else _mutated_text(rng, raw)
    )


def _config(rng: random.Random, scratch: Path) -> Trial:
    """A Hugging Face config that was tampered with."""
    config = _copy(rng.choice(_CONFIGS))
    names = sorted({str(place[-1]) for each in _CONFIGS for place in _places(each)})
    raw = json.dumps(_mutated(rng, config, names)).encode()
    raw = _mutated_text(rng, raw) if rng.random() < 0.2 else raw
    (scratch / "config.json").write_bytes(raw)
    job = {**_SMALL_JOB, "model": {"config": "config.json"}}
    trial = _infer(scratch / "job.yaml", json.dumps(job).encode(), "--force")
    return Trial(trial.main, trial.arguments, input_text=raw.decode("utf-8", "replace"))


def _options(rng: random.Random, scratch: Path) -> Trial:
    """Settings and comparisons that were typed at random."""
    paths = [*key_paths(), "x", "", ".", "model..x", "model.preset.x", "batch"]
    words: list[str] = []
    for _ in range(rng.choice((1, 2, 3))):
        option = rng.choice(("--set", "--set", "--compare"))
        path = rng.choice(paths)
        known = values_of(path) if path in key_paths() else ()
        values = [
            str(rng.choice((*known, *_ODD, *known, *known))).replace("\0", "") for _ in range(rng.choice((1, 1, 2)))
        ]
        words += [option, f"{path}={','.join(values)}"]
    words += rng.choice(((), (), ("--force",), ("--nonsense",), ("--format",), ("--checkpoint", "nowhere")))
    return _infer(scratch / "job.yaml", json.dumps(_any_job(rng)).encode(), *words)


def _lines(rng: random.Random, scratch: Path) -> Trial:
    """Jobs by the line on standard input, some of them broken."""
    names = sorted({part for path in key_paths() for part in path.split(".")})
    lines = [
        json.dumps(_mutated(rng, _any_job(rng), names) if rng.random() < 0.7 else _any_job(rng)).encode()
        for _ in range(3)
    ]
    raw = b"\n".join(_mutated_text(rng, line) if rng.random() < 0.2 else line for line in lines)
    return Trial(infer.main, ("-", "--format", "json"), raw, raw.decode("utf-8", "replace"))


def _checkpoint(rng: random.Random, scratch: Path) -> Trial:
    """A checkpoint that was tampered with."""
    folder = scratch / "checkpoint"
    folder.mkdir(exist_ok=True)
    for name in (CONFIG_FILE, MODEL_FILE, METRICS_FILE):
        raw = (released_checkpoint() / name).read_bytes()
        if name == MODEL_FILE and rng.random() < 0.5:
            cut = 8 + int.from_bytes(raw[:8], "little")
            raw = _mutated_text(rng, raw[:cut]) + raw[cut:] if rng.random() < 0.5 else _mutated_text(rng, raw)
        elif name != MODEL_FILE and rng.random() < 0.5:
            value = json.loads(raw)
            raw = json.dumps(_mutated(rng, value, sorted(map(str, value)))).encode()
        elif rng.random() < 0.1:
            raw = rng.choice((b"", b"\x80\x04\x95", b"PK\x03\x04", rng.randbytes(100), b"\xff" * 16))
        (folder / name).write_bytes(raw)
    return _infer(scratch / "job.yaml", json.dumps(_SMALL_JOB).encode(), "--checkpoint", str(folder))


def _trace(rng: random.Random, scratch: Path) -> Trial:
    """The training graph of a job that was tampered with."""
    names = sorted({part for path in key_paths() for part in path.split(".")})
    job = _mutated(rng, {**_SMALL_JOB, **_copy(_SMALL_JOB)}, names)
    file = scratch / "job.yaml"
    file.write_text(yaml.safe_dump(job), encoding="utf-8")
    arguments = (str(file), "--output", str(scratch / "graph.json"))
    return Trial(trace.main, arguments, input_text=file.read_text(encoding="utf-8"), writes_json=False)


_FOREIGN = sorted(file for file in (ROOT / "tests" / "importers" / "files").rglob("*") if file.is_file())
_SUPPLIED = (
    "cluster.gpu=H100", "batch.seq_length=2048", "batch.global_batch_size=64", "batch.micro_batch_size=1",
    "cluster.num_nodes=1", "cluster.gpus_per_node=8", "model.vocab_size=32000", "model.preset=llama3-8b",
)  # fmt: skip


def _foreign(rng: random.Random, scratch: Path) -> Trial:
    """Files of other tools that were tampered with, alone or together, with some of what they do not say supplied."""
    files: list[str] = []
    texts: list[str] = []
    for source in rng.sample(_FOREIGN, rng.choice((1, 1, 1, 2))):
        raw = source.read_bytes()
        if source.suffix == ".json" and rng.random() < 0.5:
            value = json.loads(raw)
            raw = json.dumps(_mutated(rng, value, [str(place[-1]) for place in _places(value)])).encode()
        elif source.suffix in (".yaml", ".yml") and rng.random() < 0.4:
            value = yaml.safe_load(raw)
            raw = yaml.safe_dump(_mutated(rng, value, [str(place[-1]) for place in _places(value)])).encode()
        elif rng.random() < 0.8:
            raw = _mutated_text(rng, raw)
        folder = scratch / f"foreign{len(files)}"
        folder.mkdir(exist_ok=True)
        file = folder / (source.name if rng.random() < 0.9 else rng.choice(("x", "x.json", "x.sh", "x.toml")))
        file.write_bytes(raw)
        files.append(str(file))
        texts.append(raw.decode("utf-8", "replace"))
    settings = [word for each in _SUPPLIED if rng.random() < 0.7 for word in ("--set", each)]
    if rng.random() < 0.8:
        return Trial(convert.main, (*files, *settings), input_text="\n----\n".join(texts), writes_json=False)
    return Trial(infer.main, ("--from", *files, *settings, "--format", "json"), input_text="\n----\n".join(texts))


def _plan(rng: random.Random, scratch: Path) -> Trial:
    """A search over layouts of a job that was tampered with."""
    trial = rng.choice((_job, _valid_job))(rng, scratch)
    words = [word for word in trial.arguments if word != "--force"]
    words += rng.choice(((), ("--top", rng.choice(("1", "0", "-1", "x", "1000"))), ("--free", "parallel.tensor=1,2,x")))
    return Trial(plan.main, (*words, "--workers", "1"), input_text=trial.input_text)


KINDS: dict[str, Callable[[random.Random, Path], Trial]] = {
    "job": _job, "valid_job": _valid_job, "text": _text, "config": _config, "options": _options, "lines": _lines,
    "checkpoint": _checkpoint, "trace": _trace, "foreign": _foreign,
    "plan": _plan,
}  # fmt: skip


def main() -> int:
    """Prints the report; 1 when a rule was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kind", action="append", choices=tuple(KINDS), help="default: all but plan, which takes seconds"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="writes every failing input here")
    options = parser.parse_args()
    report = fuzz(
        options.inputs, options.seed, options.kind or tuple(kind for kind in KINDS if kind != "plan"), options.keep
    )
    print(json.dumps(report.to_dict(), indent=1))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
