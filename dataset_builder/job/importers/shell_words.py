"""Cuts a shell script into words and operators, as a shell does before it expands anything.

Comments, line continuations and here-documents are gone; quotes are kept as what they protect from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_OPERATORS = ("&&", "||", ";;", ";", "|", "&", "(", ")", "\n")
_PLAIN = re.compile(r"[^\s;|&()'\"\\$`]+")


@dataclass
class Word:
    """Parts of a word: text, and whether it stood in quotes (no splitting) or in single quotes (no expansion)."""

    parts: list[tuple[str, bool, bool]] = field(default_factory=list)
    array: list[Word] | None = None

    @property
    def raw(self) -> str:
        return "".join(text for text, _, _ in self.parts)


def tokens(text: str) -> Iterator[Word | str]:
    """Words and operators; comments, line continuations and here-documents are gone."""
    text = _without_here_documents(text.replace("\r\n", "\n"))
    position, end = 0, len(text)
    while position < end:
        if text[position] in " \t":
            position += 1
        elif text.startswith("\\\n", position):  # a line goes on; a comment that ends so does not
            position += 2
        elif text[position] == "#":
            position = _line_end(text, position)
        elif found := next((mark for mark in _OPERATORS if text.startswith(mark, position)), None):
            yield found
            position += len(found)
        else:
            word, position = _word(text, position)
            yield word


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _without_here_documents(text: str) -> str:
    kept, waiting = [], ""
    for line in text.split("\n"):
        if waiting:
            waiting = "" if line.strip() == waiting else waiting
            continue
        match = re.search(r"<<-?\s*[\"']?([A-Za-z_]\w*)[\"']?", line)
        waiting = match[1] if match and not line.lstrip().startswith("#") and "<<<" not in line else ""
        kept.append(line)
    return "\n".join(kept)


def _word(text: str, position: int) -> tuple[Word, int]:
    word, start = Word(), position
    while position < len(text):
        character = text[position]
        if character in " \t\n;|&)" or (character == "(" and not text[start:position].endswith("=")):
            if character == "(" and position == start:
                position += 1
            break
        if character == "(":
            word.array, position = _array(text, position + 1)
        elif character == "'":
            close = text.find("'", position + 1)
            close = len(text) if close < 0 else close
            word.parts.append((text[position + 1 : close], True, True))
            position = close + 1
        elif character == '"':
            inner, position = _quoted(text, position + 1)
            word.parts.append((inner, True, False))
        elif character == "\\":
            if text[position + 1 : position + 2] == "\n":
                break
            word.parts.append((text[position + 1 : position + 2], True, True))
            position += 2
        elif character in "$`":
            close = _expansion_end(text, position)
            word.parts.append((text[position:close], False, False))
            position = close
        else:
            plain = _PLAIN.match(text, position)
            close = plain.end() if plain else position + 1
            word.parts.append((text[position:close], False, True))
            position = close
    return word, position


def _array(text: str, position: int) -> tuple[list[Word], int]:
    items: list[Word] = []
    while position < len(text) and text[position] != ")":
        if text[position] in " \t\n;&|" or text.startswith("\\\n", position):
            position += 1
        elif text[position] == "#":
            position = _line_end(text, position)
        elif text[position] == "(":
            position += 1
        else:
            item, position = _word(text, position)
            items.append(item)
    return items, position + 1


def _quoted(text: str, position: int) -> tuple[str, int]:
    pieces: list[str] = []
    while position < len(text) and text[position] != '"':
        if text.startswith("\\\n", position):
            position += 2
        elif text[position] == "\\" and position + 1 < len(text) and text[position + 1] in '"\\$`':
            pieces.append(text[position : position + 2] if text[position + 1] == "$" else text[position + 1])
            position += 2
        elif text[position] in "$`":
            close = _expansion_end(text, position)
            pieces.append(text[position:close])
            position = close
        else:
            pieces.append(text[position])
            position += 1
    return "".join(pieces), position + 1


def _expansion_end(text: str, position: int) -> int:
    """Where an expansion that begins at ``position`` ends; brackets inside are matched."""
    if text[position] == "`":
        close = text.find("`", position + 1)
        return len(text) if close < 0 else close + 1
    opening = text[position + 1 : position + 2]
    if opening not in ("{", "("):
        match = re.compile(r"\$(\w+|[@*#?$!-])?").match(text, position)
        return match.end() if match else position + 1
    closing, depth, position = {"{": "}", "(": ")"}[opening], 0, position + 1
    while position < len(text):
        depth += (text[position] == opening) - (text[position] == closing)
        position += 1
        if depth == 0:
            break
    return position
