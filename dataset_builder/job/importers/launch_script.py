"""A Megatron-LM launch script: its launcher's processes and nodes, and the arguments of the training program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dataset_builder.job.importers import megatron
from dataset_builder.job.importers.config_file import ConfigFile
from dataset_builder.job.importers.reading import Draft, Reading
from dataset_builder.job.importers.shell import Script, read_script
from dataset_builder.job.reasons import shown

NAME, KNOWN_BY = "Megatron-LM launch script", "a shell script with --num-layers, --hidden-size, ..."
_FORMAT = "Megatron-LM"
_LAUNCHER = {
    "nproc_per_node": "cluster.gpus_per_node", "num_gpus": "cluster.gpus_per_node", "nnodes": "cluster.num_nodes",
    "num_nodes": "cluster.num_nodes", "ntasks": "cluster.num_gpus", "nodes": "cluster.num_nodes",
    "N": "cluster.num_nodes",
    "n": "cluster.num_gpus", "np": "cluster.num_gpus", "gpus_per_node": "cluster.gpus_per_node",
}  # fmt: skip
_MAX_NOTES = 6
_UNDECIDED = "${a branch that cannot be decided}"
_DECIDED_LATE = " stands in a branch that the script decides when it runs"
_MARK = re.compile(r"--(num[-_]layers|hidden[-_]size|tensor[-_]model[-_]parallel[-_]size|micro[-_]batch[-_]size)\b")
_SOURCED = re.compile(r"^[ \t]*(?:source|\.)[ \t]+[\"']?(?:[^\s;&|]*/)?([\w.-]+\.(?:sh|bash))\b", re.MULTILINE)


def likeness(file: ConfigFile) -> int:
    """Flags; failing those, a script that sources another one, which may hold them."""
    if file.script is None:
        return 0
    return len(set(_MARK.findall(file.script))) or int(_SOURCED.search(file.script) is not None)


def read(file: ConfigFile) -> Reading:
    """Follows the script to its training command; a flag given twice counts as argparse takes it, the last time."""
    draft = Draft(ConfigFile(file.path), _FORMAT)
    sourced = tuple(dict.fromkeys(_SOURCED.findall(file.script or "")))
    if not _MARK.search(file.script or ""):
        draft.refuse(
            f"sources {_listed(sourced)} and has no training flags of its own, and variables do not cross files; "
            f"expected one script: cat {' '.join((file.name, *sourced))} > run.sh"
        )
        return draft.reading()
    try:
        script = read_script(file.script or "")
    except (ValueError, RecursionError) as error:
        draft.refuse(str(error) or "nested too deeply; expected a launch script")
        return draft.reading()
    launcher, program, arguments = _training_command(script)
    flags, spelling = _flags(arguments)
    for written in script.left_out:  # what a branch that cannot be decided sets is as open as a variable
        name = written.lstrip("-").replace("-", "_")
        if name not in flags:
            flags[name], spelling[name] = _UNDECIDED, written
    draft = Draft(ConfigFile(file.path, flags, script=file.script, spelling=spelling), _FORMAT)
    for note in script.notes[:_MAX_NOTES]:
        draft.warn(note)
    if len(script.notes) > _MAX_NOTES:
        draft.warn(f"{len(script.notes) - _MAX_NOTES} more conditions could not be decided")
    _read_program(draft, program)
    megatron.read_arguments(draft, complete=True)
    draft.framework("megatron-deepspeed" if "deepspeed" in flags else "megatron-lm")
    _read_launcher(draft, launcher, script, file)
    reading = draft.reading()
    if sourced and reading.questions:
        draft.warn(f"sources {_listed(sourced)}, whose variables are not known here; --set gives what is asked for, "
                   f"or one script made of all of them")  # fmt: skip
        reading = draft.reading()
    # The value that stands for such a branch is none that the script holds, so that no message quotes it.
    told = {path: why.replace(f" is {shown(_UNDECIDED)}", _DECIDED_LATE) for path, why in reading.questions.items()}
    return replace(reading, questions=told)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NOTES} more" if len(names) > _MAX_NOTES else ""
    return ", ".join(name[:60] for name in names[:_MAX_NOTES]) + more


def _training_command(script: Script) -> tuple[list[str], str, list[str]]:
    """The launcher's words, the program, and its arguments, of the command with the most flags."""
    commands = [_split_apart(command) for command in script.commands]
    candidates = [command for command in commands if any(_MARK.match(word) for word in command)]
    if not candidates:  # a script that only sets variables for another one
        words = [word for values in script.variables.values() for word in _split_apart(values)]
        return [], "", words
    command = max(candidates, key=lambda words: sum(word.startswith("--") for word in words))
    place = next((index for index, word in enumerate(command) if word.endswith(".py")), None)
    if place is None:
        place = next(index for index, word in enumerate(command) if _MARK.match(word)) - 1
    return command[: max(0, place)], command[place] if place >= 0 else "", command[place + 1 :]


def _split_apart(words: Sequence[str]) -> list[str]:
    """A quoted word that holds several flags or a flag with its value counts as what it holds."""
    return [
        part.strip("'\"")
        for word in words
        for part in (word.split() if re.match(r"\s*--\w", word) or " --" in word else [word])
    ]


def _flags(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    flags: dict[str, Any] = {}
    spelling: dict[str, str] = {}
    name = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            written, equals, value = word.partition("=")
            name = written.lstrip("-").replace("-", "_")
            spelling[name] = written
            flags[name] = value if equals else True
        elif name and flags[name] is not True and re.fullmatch(r"\$\{\w+\}", word):
            continue  # options of a variable that nothing sets
        elif name and not re.match(r"\d*[<>]", word):
            flags[name] = word if flags[name] is True else f"{flags[name]} {word}"
    return flags, spelling


def _read_program(draft: Draft, program: str) -> None:
    if "bert" in program:
        draft.imply("model.architecture", "encoder", f"runs {program[-40:]}")
        draft.imply("model.head", "mlm", f"runs {program[-40:]}")
        draft.imply("model.num_token_types", 2, f"runs {program[-40:]}")


def _read_launcher(draft: Draft, words: Sequence[str], script: Script, file: ConfigFile) -> None:
    flags, spelling = _flags(words)
    launch = Draft(ConfigFile(file.path, flags, spelling=spelling), _FORMAT)
    launched: dict[str, str] = {}
    for flag, path in _LAUNCHER.items():
        if flag in flags and path not in launched and (path != "cluster.num_gpus" or "nproc_per_node" not in flags):
            launched[path] = flag
    for path, flag in launched.items():
        value = launch.count(flag, asks=path)
        if value is not None:
            draft.found(path, value, spelling[flag])
        else:
            draft.ask(path, f"{spelling[flag]} is {str(flags[flag])[:40]}")
    for path, names in (("cluster.num_nodes", ("NNODES", "NUM_NODES", "SLURM_NNODES")),
                        ("cluster.gpus_per_node", ("GPUS_PER_NODE", "NPROC_PER_NODE", "SLURM_GPUS_PER_NODE")),
                        ):  # fmt: skip
        name = next((name for name in names if re.fullmatch(r"\d{1,6}", "".join(script.variables.get(name, [])))), None)
        if name and path not in launched:
            draft.found(path, int("".join(script.variables[name])), name)
