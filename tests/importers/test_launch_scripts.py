"""Launch scripts of Megatron-LM and of what descends from it: flags of their own, and what only a run decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataset_builder.job.errors import JobError
from dataset_builder.job.importers.formats import ImportedFiles
from dataset_builder.job.importers.merging import ImportedJob

_GPUS = {"cluster.gpu": "H100-SXM5-80GB", "cluster.num_gpus": "8"}
_RUN = "--micro-batch-size 1 --global-batch-size 8 --seq-length 512"
_SIZES = f"--num-layers 4 --hidden-size 512 --num-attention-heads 8 --max-position-embeddings 512 {_RUN}"
_GPT = f"torchrun pretrain_gpt.py {_SIZES} --vocab-size 1000"


def files_of(folder: Path, *scripts: str) -> ImportedFiles:
    """Scripts by the names ``run.sh``, ``run1.sh``, ... in this folder."""
    paths = []
    for index, script in enumerate(scripts):
        path = folder / f"run{index or ''}.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        paths.append(str(path))
    return ImportedFiles.read(paths)


def imported(folder: Path, script: str, **more: str) -> ImportedJob:
    return files_of(folder, script).merged({**_GPUS, **{key.replace("__", "."): more[key] for key in more}})


def asked(files: ImportedFiles, **more: str) -> dict[str, str]:
    """What is missing, by key path, with the sentence that asks for it."""
    with pytest.raises(JobError) as caught:
        files.merged({**_GPUS, **{key.replace("__", "."): more[key] for key in more}})
    return dict(reason.split(": ", 1) for reason in caught.value.reasons)


@pytest.mark.parametrize(
    ("flags", "groups"),
    [
        ("--num-key-value-heads 2", 2),
        ("--num-key-value-heads 2 --group-query-attention --num-query-groups 4", 4),
        ("--num-query-groups 2", 8),
        ("", 8),
    ],
)
def test_key_value_heads_need_no_switch(tmp_path: Path, flags: str, groups: int) -> None:
    assert imported(tmp_path, f"{_GPT} {flags}").job.model.num_query_groups == groups
    assert "num-key-value-heads" not in " ".join(files_of(tmp_path, f"{_GPT} {flags}").warnings)


@pytest.mark.parametrize(
    ("command", "size"),
    [
        (f"torchrun pretrain_bert.py {_SIZES} --vocab-file $1", 30592),  # 30522 to a multiple of 128
        (f"torchrun pretrain_bert.py {_SIZES} --vocab-file $1 --tokenizer-type BertWordPieceCase", 29056),
        (f"torchrun pretrain_gpt.py {_SIZES} --vocab-file $1 --merge-file $2", 50304),
        (f"torchrun pretrain_gpt.py {_SIZES} --vocab-file $1 --merge-file $2 --vocab-extra-ids 100", 50304),
        (f"torchrun pretrain_bert.py {_SIZES} --tokenizer-type BertWordPieceCase --vocab-extra-ids 100", 29184),
    ],
)
def test_a_vocabulary_is_that_of_the_tokenizer_that_the_program_takes(tmp_path: Path, command: str, size: int) -> None:
    assert imported(tmp_path, command).job.model.vocab_size == size


def test_encoder_and_decoder_take_word_pieces_and_their_sentinels(tmp_path: Path) -> None:
    layers = "--encoder-num-layers 2 --decoder-num-layers 2 --encoder-seq-length 512 --decoder-seq-length 128"
    sizes = "--hidden-size 512 --num-attention-heads 8 --micro-batch-size 1 --global-batch-size 8"
    script = f"torchrun pretrain_t5.py {layers} {sizes} --vocab-file $1 --vocab-extra-ids 100"
    assert imported(tmp_path, script).job.model.vocab_size == 30720  # 30522 + 100 to a multiple of 128
    assert "30522 and 100 of --vocab-extra-ids" in " ".join(files_of(tmp_path, script).warnings)


def test_a_vocabulary_without_its_merges_is_asked_for(tmp_path: Path) -> None:
    files = files_of(tmp_path, f"torchrun pretrain_gpt.py {_SIZES} --vocab-file vocab.json")
    assert "the size of the tokenizer of this job is not in the file" in asked(files)["model.vocab_size"]


@pytest.mark.parametrize(
    ("flags", "sharding"),
    [
        ("--bf16 --deepspeed --zero-stage 0", "zero1"),
        ("--bf16 --deepspeed --zero-stage=2", "zero2"),
        ("--fp16 --deepspeed --zero-stage 0", "none"),
        ("--bf16 --zero-stage 0", "none"),
    ],
)
def test_bf16_under_deepspeed_shards_the_optimizer_at_stage_0(tmp_path: Path, flags: str, sharding: str) -> None:
    assert imported(tmp_path, f"{_GPT} {flags}").job.parallel.sharding == sharding
    told = "is taken as zero1" in " ".join(files_of(tmp_path, f"{_GPT} {flags}").warnings)
    assert told == (sharding == "zero1")


@pytest.mark.parametrize(
    "options",
    ["--recompute-granularity full --recompute-method uniform --recompute-num-layers ${N}", "--recompute-activations",
     "--checkpoint-activations", "--activations-checkpoint-method uniform"],
)  # fmt: skip
def test_recompute_in_a_branch_is_asked_for(tmp_path: Path, options: str) -> None:
    script = f'MODE=$1\nif [ $MODE = on ]; then options="{options}"; fi\n{_GPT} $options'
    question = asked(files_of(tmp_path, script))
    assert list(question) == ["parallel.recompute.mode"]
    flag = options.split()[0]
    assert (
        f"{flag} stands in a branch that the script decides when it runs; --set parallel.recompute.mode"
        in (question["parallel.recompute.mode"])
    )
    recompute: Any = imported(tmp_path, script, parallel__recompute__mode="selective").job.parallel.recompute
    assert recompute.mode == "selective"


@pytest.mark.parametrize(
    ("options", "layers"),
    [("--activations-checkpoint-method uniform", None),
     ("--activations-checkpoint-method block --activations-checkpoint-num-layers 2", 2)],
)  # fmt: skip
def test_the_older_spelling_recomputes_whole_layers(tmp_path: Path, options: str, layers: int | None) -> None:
    recompute: Any = imported(tmp_path, f"{_GPT} {options}").job.parallel.recompute
    assert (recompute.mode, recompute.full_layers) == ("full", layers)


@pytest.mark.parametrize("branch", ["--fp8-format hybrid --fp8-recipe blockwise", "--bf16 --fp8-format hybrid"])
def test_fp8_in_a_branch_is_undecided_and_not_without_a_meaning(tmp_path: Path, branch: str) -> None:
    always = "" if "--bf16" in branch else "--bf16"
    files = files_of(tmp_path, f'if [ $1 = fp8 ]; then options="{branch}"; fi\n{_GPT} {always} $options')
    assert list(asked(files)) == ["precision.preset"]
    assert "without a meaning" not in " ".join(files.warnings)
    job = files.merged({**_GPUS, "precision": "bf16_mixed"}).job
    assert job.precision.linear in (None, "same")


@pytest.mark.parametrize("flag", ["--zero-stage ${STAGE}", "$sharding"])
def test_sharding_that_a_run_decides_is_asked_for(tmp_path: Path, flag: str) -> None:
    branch = 'if [ $1 = on ]; then sharding="--use-megatron-fsdp"; fi\n' if flag == "$sharding" else ""
    assert list(asked(files_of(tmp_path, f"{branch}{_GPT} {flag}"))) == ["parallel.sharding"]


def test_a_model_of_open_sizes_still_says_which_tokenizer_is_not_known(tmp_path: Path) -> None:
    model = "--num-layers ${L} --hidden-size ${H} --num-attention-heads 8 --patch-tokenizer-type LLama3Tokenizer"
    question = asked(files_of(tmp_path, f"torchrun pretrain_gpt.py {model} {_RUN}"))
    assert "LLama3Tokenizer is not in the file" in question["model.vocab_size"]
    assert "model.normalization" not in question  # Megatron's default holds whatever the sizes are


@pytest.mark.parametrize("line", [". `pwd`/flags.sh", 'source "${HERE}/flags.sh"', ". flags.sh arguments"])
def test_a_script_that_sources_the_flags_names_their_file(tmp_path: Path, line: str) -> None:
    with pytest.raises(JobError) as caught:
        files_of(tmp_path, f"LAYERS=4\n{line}\nexit 0").merged(_GPUS)
    assert "sources flags.sh and has no training flags of its own" in caught.value.reasons[0]
    assert "cat run.sh flags.sh" in caught.value.reasons[0]


def test_one_script_made_of_both_is_read(tmp_path: Path) -> None:
    variables = "LAYERS=4\n. flags.sh\nexit 0"
    flags = f'export PARAMS="{_SIZES} --vocab-size 1000"'.replace("--num-layers 4", "--num-layers ${LAYERS}")
    assert imported(tmp_path, f"{variables}\n{flags}").job.model.num_layers == 4


def test_variables_of_a_sourced_file_are_not_known(tmp_path: Path) -> None:
    script = f"source ./sizes.sh\n{_GPT}".replace("--num-layers 4", "--num-layers ${LAYERS}")
    assert "sources sizes.sh, whose variables are not known here" in " ".join(files_of(tmp_path, script).warnings)
    assert not files_of(tmp_path, f"source ./environment.sh\n{_GPT}").warnings
