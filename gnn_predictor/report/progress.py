"""Signs of life on a terminal while something takes longer than a glance; silent where nobody watches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def working(description: str) -> Iterator[None]:
    """A spinner with the time passed, on standard error if that is a terminal; it leaves nothing behind."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(description, total=None)
        yield


@contextlib.contextmanager
def counting(description: str) -> Iterator[Callable[[int, int], None]]:
    """A bar to be told how many of how many are done, on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
