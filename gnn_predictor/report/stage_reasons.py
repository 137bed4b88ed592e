"""The reasons of a refusal as people read them: of many stages the fullest in full, the others as figures in one line.

The reasons themselves (JSON, the library) keep the arithmetic of every stage.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_MOST_IN_FULL = 4
_STAGE = re.compile(r"memory: stage (\d+) needs ([\d.]+) GB")


def in_brief(reasons: Sequence[str]) -> list[str]:
    """The reasons, with one line for all stages but the fullest where they are many."""
    needs = {line: (int(found[1]), float(found[2])) for line in reasons if (found := _STAGE.search(line))}
    if len(needs) <= _MOST_IN_FULL:
        return list(reasons)
    fullest = max(needs, key=lambda line: needs[line][1])
    least, least_gigabytes = min(needs.values(), key=lambda need: need[1])
    # The search is not anchored: a printed line has its file's name before it.
    start = fullest[: fullest.index("memory: stage")]
    figures = ", ".join(f"{gigabytes:.1f}" for _, gigabytes in needs.values())
    others = (
        f"{start}memory: and {len(needs) - 1} others, the least stage {least} with {least_gigabytes:.1f} GB; "
        f"stages in order: {figures} GB"
    )
    first = next(index for index, line in enumerate(reasons) if line in needs)
    before, after = reasons[:first], [line for line in reasons[first:] if line not in needs]
    return [*before, fullest, others, *after]
