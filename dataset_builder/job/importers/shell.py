"""Reads a launch script far enough to know the commands it runs: variables, defaults, arrays, if and case.

Nothing is executed. What only a running shell knows (positional arguments, other programs' output, files) stays
written as it is. A condition that cannot be decided counts as false and is told. Loops and functions are read once.
Bounded: words, variables and the script itself have a largest size.
"""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass

from dataset_builder.job.importers.shell_words import Word, tokens

_MAX_CHARACTERS = 4 * 2**20  # of all expansions together
_MAX_DEPTH = 64
_MAX_WORDS = 20_000
_ASSIGNMENT = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)(\+?)=", re.DOTALL)
_KEYWORDS = {
    "then",
    "do",
    "done",
    "{",
    "}",
    "time",
    "exec",
    "eval",
    "export",
    "declare",
    "local",
    "readonly",
    "typeset",
}
# Brackets inside brackets once; unambiguous, so that no text takes longer than it is long.
_EXPANSION = re.compile(
    r"\$\(\((?:[^()]|\([^()]*\))*\)\)|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|\$\{(?:[^{}]|\{[^{}]*\})*\}|\$\w+|\$[@*#?$!]"
)


@dataclass(frozen=True)
class Script:
    """What a script runs: each command as its words, and what could not be told."""

    commands: tuple[tuple[str, ...], ...]
    variables: dict[str, list[str]]
    notes: tuple[str, ...]
    left_out: frozenset[str]  # flags that stand in branches nobody can decide


def read_script(text: str) -> Script:
    """Follows a script; raises ValueError when it is too large to follow."""
    interpreter = _Interpreter()
    interpreter.define_slurm(text)
    words: list[Word] = []
    for token in tokens(text):
        if isinstance(token, str):
            interpreter.command(words, token)
            words = []
        else:
            words.append(token)
    interpreter.command(words, "\n")
    return Script(
        tuple(interpreter.commands),
        interpreter.variables,
        tuple(dict.fromkeys(interpreter.notes)),
        frozenset(interpreter.left_out),
    )


@dataclass
class _Branch:
    """An open if or case: whether its current branch is taken, whether one was, and whether that is sure."""

    is_taken: bool = False
    is_done: bool = False
    is_unsure: bool = False
    word: str | None = None  # what a case compares


class _Interpreter:
    """Follows commands through the open ifs and cases."""

    def __init__(self) -> None:
        self.variables: dict[str, list[str]] = {}
        self.commands: list[tuple[str, ...]] = []
        self.notes: list[str] = []
        self.left_out: set[str] = set()
        self._branches: list[_Branch] = []
        self._doubts: list[str] = []  # conditions that could not be decided, told when they leave something out
        self._condition: list[tuple[list[Word], str]] = []
        self._expects_pattern = False
        self._patterns: list[str] = []
        self._words = 0
        self._characters = 0

    def define_slurm(self, text: str) -> None:
        """What ``#SBATCH`` lines grant, under the names SLURM gives it."""
        granted: dict[str, str] = dict(
            re.findall(r"^#SBATCH\s+(-{1,2}[a-zA-Z-]+)[=\s]+(\S+)", text, re.MULTILINE)[:200]
        )
        nodes = granted.get("--nodes", granted.get("-N", ""))
        if re.fullmatch(r"\d{1,6}", nodes):
            for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
                self.variables[name] = [nodes]
        per_node = granted.get("--gpus-per-node") or granted.get("--gres") or ""
        if match := re.search(r"(?:^|:)(\d{1,3})$", per_node):
            for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
                self.variables[name] = [match[1]]

    def _is_on(self) -> bool:
        return all(branch.is_taken for branch in self._branches)

    def command(self, words: list[Word], ending: str) -> None:
        """One command and the operator behind it."""
        if self._expects_pattern:
            self._read_pattern(words, ending)
            return
        if ending == ";;":
            self._run(words)
            self._expects_pattern = bool(self._branches)
            if self._branches:
                self._branches[-1].is_taken = False
            return
        if self._condition or (words and words[0].raw in ("if", "elif")):
            self._read_condition(words, ending)
            return
        self._run(words)

    def _read_condition(self, words: list[Word], ending: str) -> None:
        """Collects ``if A && B``, up to ``then``; decides it there."""
        if words and words[0].raw == "then":
            self._decide()
            self._run(words[1:])
            return
        if words or self._condition:
            self._condition.append((words, ending))

    def _decide(self) -> None:
        clauses, self._condition = self._condition, []
        keyword = clauses[0][0][0].raw if clauses and clauses[0][0] else "if"
        first = clauses[0][0][1:] if clauses else []
        tests = [(first, clauses[0][1])] + clauses[1:] if clauses else []
        if keyword == "if":
            self._open(_Branch())
        if not self._branches:
            return
        branch = self._branches[-1]
        branch.is_taken = False
        outer = all(each.is_taken for each in self._branches[:-1])
        branch.is_taken = outer and not branch.is_done and self._holds(tests, branch)
        branch.is_done = branch.is_done or branch.is_taken

    def _holds(self, tests: list[tuple[list[Word], str]], branch: _Branch) -> bool:
        result, joined = None, "&&"
        for words, ending in tests:
            if not words:
                continue
            value = self._test(words)
            if value is None:
                shown = " ".join(word.raw for word in words)[:80]
                self._doubts.append(f"cannot tell whether {shown} holds; taken as false")
                branch.is_unsure = True
            held = bool(value)
            result = held if result is None else (result and held if joined == "&&" else result or held)
            joined = ending if ending in ("&&", "||") else "&&"
        return bool(result)

    def _test(self, words: list[Word]) -> bool | None:
        """A ``[ ... ]`` or ``[[ ... ]]`` test; ``None`` when only a running shell knows."""
        values = [" ".join(self._expand(word)) for word in words]
        negated = False
        if values and values[0] == "!":
            values, negated = values[1:], True
        if not values or values[0] not in ("[", "[[", "test"):
            return None
        inner = [value for value in values[1:] if value not in ("]", "]]")]
        if inner and inner[0] == "!":
            inner, negated = inner[1:], not negated
        result = _compare(inner)
        return None if result is None else result != negated

    def _read_pattern(self, words: list[Word], ending: str) -> None:
        if words and words[0].raw == "esac":
            self._expects_pattern = False
            self._close()
            return
        self._patterns += [" ".join(self._expand(word)) for word in words]
        if ending == ")" and self._patterns and self._branches:
            branch = self._branches[-1]
            matches = any(_matches(branch.word or "", pattern) for pattern in self._patterns)
            outer = all(each.is_taken for each in self._branches[:-1])
            branch.is_taken = matches and not branch.is_done and outer
            branch.is_done = branch.is_done or branch.is_taken
            self._patterns, self._expects_pattern = [], False

    def _open(self, branch: _Branch) -> None:
        if len(self._branches) >= _MAX_DEPTH:
            raise ValueError(f"nested more than {_MAX_DEPTH} deep; expected a launch script")
        self._branches.append(branch)

    def _close(self) -> None:
        if self._branches:
            self._branches.pop()

    def _run(self, words: list[Word]) -> None:
        while words and words[0].raw in _KEYWORDS and words[0].array is None:
            words = words[1:]
        if not words:
            return
        head = words[0].raw
        if head == "else":
            if self._branches:
                self._branches[-1].is_taken = not self._branches[-1].is_done
            self._run(words[1:])
        elif head == "fi" or head == "esac":
            self._close()
        elif head == "case" and len(words) > 1:
            word = " ".join(self._expand(words[1]))
            self._open(_Branch(is_unsure="$" in word, word=word))
            if "$" in word:
                self._doubts.append(f"cannot tell what {word[:80]} is; no case of it is taken")
            self._expects_pattern = True
            if len(words) > 3:
                self._patterns = [word.raw for word in words[3:]]
        elif head == "for" and len(words) > 3 and self._is_on():
            self.variables[words[1].raw] = self._expand(words[3])[:1]
        elif self._is_on():
            self._execute(words)
        elif any(branch.is_unsure and not branch.is_taken for branch in self._branches):
            self._leave_out(words)

    def _leave_out(self, words: list[Word]) -> None:
        """Flags of a branch that may or may not be taken are open; the doubt is told once it matters."""
        texts = [word.raw for word in words] + [item.raw for word in words for item in word.array or ()]
        for word in words:
            match = _ASSIGNMENT.match(word.raw)
            if match and any("--" in text for text in (word.raw, *(item.raw for item in word.array or ()))):
                self.variables.setdefault(match[1], [])  # options, which are open one by one
        self.left_out |= {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
        if any(_ASSIGNMENT.match(word.raw) for word in words) or self.left_out:
            self.notes += self._doubts
            self._doubts = []

    def _execute(self, words: list[Word]) -> None:
        while words and (match := _ASSIGNMENT.match(words[0].raw)):
            self._assign(words[0], match[1], bool(match[2]))
            words = words[1:]
        expanded = [text for word in words for text in self._expand(word)]
        self._words += len(expanded)
        if self._words > _MAX_WORDS:
            raise ValueError(f"the script runs commands of more than {_MAX_WORDS} words; expected a launch script")
        if expanded:
            self.commands.append(tuple(expanded))

    def _assign(self, word: Word, name: str, appends: bool) -> None:
        if word.array is not None:
            values = [text for item in word.array for text in self._expand(item)]
            held = self.variables.get(name, []) if appends else []
            self.variables[name] = [*held, *values]
            return
        prefix = len(name) + 1 + appends
        parts, skipped = [], 0
        for text, quoted, literal in word.parts:
            cut = min(len(text), prefix - skipped)
            skipped += cut
            if text[cut:] or quoted:
                parts.append((text[cut:], True, literal))
        value = " ".join(self._expand(Word(parts)))
        held_text = " ".join(self.variables.get(name, [])) if appends else ""
        self.variables[name] = [f"{held_text}{value}"]

    def _expand(self, word: Word) -> list[str]:
        """The words that one becomes; an expansion outside quotes is split at blanks."""
        fields, is_open = [""], False
        for text, quoted, literal in word.parts:
            values = [text] if literal else self._expand_text(text)
            if quoted and not literal and not (len(values) > 1 and text.endswith("[@]}")):
                values = [" ".join(values)]
            elif not literal:
                values = [piece for value in values for piece in value.split()] if not quoted else values
            for index, value in enumerate(values):
                if index:
                    fields.append("")
                fields[-1] += value
            is_open = is_open or quoted or bool(values)
            self._spend(len(text))
        return fields if is_open else []

    def _expand_text(self, text: str) -> list[str]:
        pieces, position = [""], 0
        for match in _EXPANSION.finditer(text):
            values = self._value(match[0])
            pieces[-1] += text[position : match.start()] + (values[0] if values else "")
            pieces += values[1:]
            position = match.end()
            self._spend(sum(map(len, values)))
        pieces[-1] += text[position:]
        return [piece.replace("\\$", "$") for piece in pieces]

    def _spend(self, characters: int) -> None:
        """Variables that hold variables grow without end; a launch script does not."""
        self._characters += characters
        if self._characters > _MAX_CHARACTERS:
            raise ValueError("its variables grow beyond all bounds; expected a launch script")

    def _value(self, expansion: str) -> list[str]:
        """The values of one ``$...``; as it is written when nothing sets it."""
        if expansion.startswith("$(("):
            inner = " ".join(self._expand_text(re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"${\1}", expansion[3:-2])))
            number = _arithmetic(inner)
            return [expansion if number is None else str(number)]
        if expansion[:2] in ("$(", "$@", "$*", "$#", "$?", "$$", "$!") or expansion[0] == "`":
            return [expansion]
        body = expansion[2:-1] if expansion.startswith("${") else expansion[1:]
        match = re.match(r"(\w+)(\[[@*]\])?(?::?([-=+?])(.*))?$", body, re.DOTALL)
        if match is None:
            return [expansion]
        name, _, kind, word = match.groups()
        held = self.variables.get(name)
        is_set = held is not None and held != [""]
        if kind in ("-", "=") and not is_set:
            value = [" ".join(self._expand_text(word.strip("\"'")))]
            if kind == "=":
                self.variables[name] = value
            return value
        if kind == "+":
            return [" ".join(self._expand_text(word.strip("\"'")))] if is_set else []
        return [expansion if expansion.startswith("${") else f"${{{body}}}"] if held is None else held


def _matches(word: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern.strip("\"'")).replace(r"\*", ".*").replace(r"\?", "."), word) is not None


def _compare(words: list[str]) -> bool | None:
    # A variable that nothing in the script sets is empty in a fresh shell; an argument of the script is anybody's.
    if len(words) == 2 and words[0] in ("-z", "-n") and re.fullmatch(r"\$\{[A-Za-z_]\w*\}", words[1]):
        return words[0] == "-z"
    if any("$" in word or "`" in word for word in words):
        return None
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) == 1 and words[0] in ("-z", "-n"):
        return words[0] == "-z"
    if len(words) == 1:
        return words[0] != ""
    if len(words) != 3:
        return None
    left, test, right = words
    if test in ("==", "="):
        return _matches(left, right)
    if test == "!=":
        return not _matches(left, right)
    numeric = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
               "-le": operator.le}  # fmt: skip
    if test in numeric and all(re.fullmatch(r"-?\d{1,18}", each) for each in (left, right)):
        return bool(numeric[test](int(left), int(right)))
    return None


def _arithmetic(text: str) -> int | None:
    """A whole number of + - * / % and brackets; ``None`` for anything else."""
    operations = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
                  ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}  # fmt: skip

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 2**62:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in operations:
            result = int(operations[type(node.op)](value(node.left), value(node.right)))
            if abs(result) < 2**62:
                return result
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError

    if not re.fullmatch(r"[\d\s+*/%()-]{1,200}", text) or "**" in text:
        return None
    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None
