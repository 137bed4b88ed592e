"""The two ways a job fails: it is not valid (exit code 2), or it is valid but cannot run (exit code 4)."""

from __future__ import annotations

from collections.abc import Sequence


class JobError(ValueError):
    """An invalid job. ``reasons`` holds every problem found, each naming key path, value and what would be right."""

    exit_code = 2

    def __init__(self, reasons: Sequence[str], source: str = "job") -> None:
        self.reasons = tuple(reasons)
        self.source = source
        super().__init__("\n".join(f"{source}: {reason}" for reason in self.reasons))

    def __reduce__(self) -> tuple[type[JobError], tuple[tuple[str, ...], str]]:
        return type(self), (self.reasons, self.source)


class CannotRunError(JobError):
    """A valid job that its cluster cannot run: the layout does not divide, or the device lacks the format."""

    exit_code = 4
