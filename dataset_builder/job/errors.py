"""The two ways a job fails: it is not valid (exit code 2), or it is valid but cannot run (exit code 4); near names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

MAX_REASONS = 100


class JobError(ValueError):
    """An invalid job. ``reasons`` holds every problem found, each naming key path, value and what would be right.

    Of hundreds only the first are kept: such a file is no job, and its author needs no megabytes to see it.
    """

    exit_code = 2

    def __init__(self, reasons: Sequence[str], source: str = "job") -> None:
        more = len(reasons) - MAX_REASONS
        self.reasons = (*reasons[: MAX_REASONS - 1], f"{more + 1} more problems") if more > 0 else tuple(reasons)
        self.source = source
        super().__init__("\n".join(f"{source}: {reason}" for reason in self.reasons))

    def __reduce__(self) -> tuple[type[JobError], tuple[tuple[str, ...], str]]:
        return type(self), (self.reasons, self.source)


class CannotRunError(JobError):
    """A valid job that its cluster cannot run: the layout does not divide, or the device lacks the format."""

    exit_code = 4


def suggestion(name: str, known: Sequence[str]) -> str:
    """`` (did you mean a, b?)``, or nothing when no known name is near."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f" (did you mean {', '.join(near)}?)" if near else ""
