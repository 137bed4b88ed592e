"""Files that want to hurt an importer, and mutations of good ones: a reason at once, never a traceback."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_builder.job.errors import JobError
from dataset_builder.job.importers.formats import FORMATS, ImportedFiles, read_file
from dataset_builder.job.importers.interpolation import interpolated
from dataset_builder.job.importers.job_file import job_file
from dataset_builder.job.importers.shell import read_script

_FILES = Path(__file__).parent / "files"
_SAMPLES = sorted(path for path in _FILES.rglob("*") if path.is_file())
_RUN = {"cluster.gpu": "H100", "cluster.num_gpus": "8", "batch.seq_length": "1024", "batch.micro_batch_size": "1",
        "batch.global_batch_size": "64"}  # fmt: skip
_DOUBLING = "a=--x\n" + 'a="$a$a"\n' * 60 + "torchrun pretrain_gpt.py --num-layers $a\n"
_HOSTILE: dict[str, tuple[str, bytes]] = {
    "aliases": ("a.yaml", b"a: &a [x, x]\nb: [*a, *a]\n"),
    "deep YAML": ("a.yaml", b"[" * 100_000),
    "deep JSON": ("a.json", b"[" * 100_000),
    "deep JSON objects": ("a.json", b'{"a":' * 500 + b"1" + b"}" * 500),
    "deep TOML": ("a.toml", b"a = " + b"[" * 50_000),
    "a Python object": ("a.yaml", b"!!python/object/apply:os.system ['touch hacked']\n"),
    "a huge integer": ("a.json", b'{"zero_optimization": {"stage": ' + b"9" * 100_000 + b"}}"),
    "a number beyond all counts": ("a.json", b'{"zero_optimization": {}, "train_batch_size": 1e999, "bf16": {}}'),
    "a key given twice": ("a.json", b'{"train_batch_size": 1, "train_batch_size": 2}'),
    "not UTF-8": ("a.toml", b"[training]\nseq_len = \xff\n"),
    "a list": ("a.json", b"[1, 2]"),
    "nothing": ("a.yaml", b""),
    "megabytes": ("a.json", b" " * 2**22),
    "no known keys": ("a.yaml", b"hello: world\n"),
    "a script of variables that double": ("a.sh", _DOUBLING.encode()),
    "a script of open brackets": ("a.sh", b"a=" + b"$((" * 30_000 + b"\n--num-layers 2"),
    "a script of open braces": ("a.sh", b"a=" + b"${a:-" * 30_000 + b"\n--num-layers 2"),
    "a script of open quotes": ("a.sh", b'echo "' * 30_001 + b"\n--num-layers 2"),
    "a script of ifs": ("a.sh", b"if [ 1 == 1 ]; then\n" * 20_000 + b"--num-layers 2 --hidden-size 3\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", _HOSTILE)
def test_what_wants_to_hurt_is_refused_at_once(name: str, tmp_path: Path) -> None:
    file, content = _HOSTILE[name]
    (tmp_path / file).write_bytes(content)
    start = time.process_time()
    with pytest.raises(JobError):
        ImportedFiles.read([str(tmp_path / file)]).merged(_RUN)
    assert time.process_time() - start < 5
    assert not (tmp_path / "hacked").exists()


def test_a_file_named_in_a_file_is_never_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret.yaml"
    secret.write_text("num_layers: 3\nnormalization: RMSNorm\nswiglu: true\n")
    (tmp_path / "sub").mkdir()
    child = tmp_path / "sub" / "child.yaml"
    child.write_text("extends: [../secret.yaml]\nhidden_size: 64\nnum_attention_heads: 4\nffn_hidden_size: 256\n")
    with pytest.raises(JobError, match=r"model\.num_layers: missing"):
        ImportedFiles.read([str(child)]).merged(_RUN)
    accelerate = tmp_path / "accelerate.yaml"
    accelerate.write_text(
        "distributed_type: DEEPSPEED\nnum_machines: 1\nnum_processes: 8\nmixed_precision: bf16\n"
        "deepspeed_config: {deepspeed_config_file: /etc/passwd}\n"
    )
    with pytest.raises(JobError, match=r"parallel\.sharding: missing.*another file; give it too"):
        ImportedFiles.read([str(accelerate)]).merged({**_RUN, "model.preset": "llama3-8b"})


def test_an_unknown_file_is_told_every_known_format(tmp_path: Path) -> None:
    path = tmp_path / "notes.yaml"
    path.write_text("shopping: [bread, milk]\n")
    with pytest.raises(JobError, match="no known format") as caught:
        read_file(str(path))
    assert all(form.name in caught.value.reasons[0] for form in FORMATS)


def test_a_file_of_two_formats_is_told_both(tmp_path: Path) -> None:
    path = tmp_path / "both.yaml"
    path.write_text(
        "base_model: gpt2\nsequence_len: 8\ndatasets: []\n"
        "model_name_or_path: gpt2\nfinetuning_type: full\ncutoff_len: 8\n"
    )
    with pytest.raises(JobError, match="looks like axolotl YAML and LLaMA-Factory YAML alike"):
        read_file(str(path))


def test_comments_of_the_job_file_stay_comments(tmp_path: Path) -> None:
    config = json.loads((_FILES / "simumax.json").read_text())
    path = tmp_path / "evil.json"
    path.write_text(json.dumps({**config, "model_name": "x\nparallel: {tensor: 8}\n# "}))
    found = ImportedFiles.read([str(path)]).merged({**_RUN, "model.tie_embeddings": "false", "precision": "fp32"})
    text = job_file(found, "evil\nname: hacked.json")
    assert "\nparallel:" not in text
    assert "\nname:" not in text


_VALUES = (None, "", "auto", "${X}", "$Y", -1, 0, 1, 3, 1e9, "5e8", 10**30, True, False, "yes", [], [1], {}, {"a": 1},
           "x" * 500, "é\u2028", float("inf"), float("nan"), "../../etc/passwd", "bf16", "None")  # fmt: skip


def _mutated(text: str, random_: random.Random) -> str:
    """Lines lost, doubled and swapped, and values replaced, as an editor's slip or a program's fault does."""
    lines = text.splitlines()
    for _ in range(random_.randint(1, 4)):
        place = random_.randrange(len(lines))
        kind = random_.randrange(5)
        if kind == 0:
            del lines[place]
        elif kind == 1:
            lines.insert(place, lines[random_.randrange(len(lines))])
        elif kind == 2:
            cut = random_.randrange(len(lines[place]) + 1)
            lines[place] = lines[place][:cut] + random_.choice("{}[]:,'\"$#&*!|>%@`\\\0\t-=") + lines[place][cut:]
        elif kind == 3 and lines[place]:
            head = lines[place].replace("=", ":").split(":")[0]
            value = json.dumps(random_.choice(_VALUES))
            lines[place] = f"{head}{'=' if '=' in lines[place] else ':'} {value}"
        else:
            other = random_.randrange(len(lines))
            lines[place], lines[other] = lines[other], lines[place]
        lines = lines or [""]
    return "\n".join(lines)


@pytest.mark.parametrize("sample", _SAMPLES, ids=lambda path: str(path.name))
def test_a_mutated_file_is_read_or_refused(sample: Path, tmp_path: Path) -> None:
    text, source = sample.read_text(), random.Random(sample.name)
    path = tmp_path / sample.name
    for _ in range(12):
        path.write_text(_mutated(text, source))
        try:
            found = ImportedFiles.read([str(path)]).merged(_RUN)
        except JobError:
            continue
        assert job_file(found, path.name)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=300))
def test_any_text_is_a_script_or_refused(text: str) -> None:
    try:
        script = read_script(text)
    except ValueError:
        return
    assert all(isinstance(word, str) for command in script.commands for word in command)


_LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.just("${a.b}"),
                    st.just("${multiply:${.a}, 2}"), st.just("${..b}${a}"))  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.recursive(st.dictionaries(st.sampled_from("abc"), _LEAVES, max_size=3), lambda inner: st.dictionaries(
    st.sampled_from("abc"), st.one_of(_LEAVES, inner), max_size=3), max_leaves=12))  # fmt: skip
def test_any_references_are_followed_to_an_end(document: dict[str, object]) -> None:
    assert set(interpolated(document)) == set(document)
