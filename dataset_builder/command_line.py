"""What every command line shares: examples under ``--help``, ``--version``, shell completion, nearest option names.

Light on purpose: ``--help`` and completion answer without loading anything but this and argparse.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dataset_builder import __version__
from dataset_builder.job.errors import suggestion

EXIT_CODES = "exit codes: 0 ok, 1 bug, 2 bad usage or invalid input, 3 checkpoint unusable, 4 the job cannot run"
VERSION = f"gnn-predictor {__version__}"


class CommandParser(argparse.ArgumentParser):
    """A parser with examples, ``--version`` and completion; ``module`` is what follows ``python -m``."""

    def __init__(self, module: str, summary: str, examples: Sequence[str]) -> None:
        lines = "\n".join(f"  python -m {module} {example}" for example in examples)
        super().__init__(
            prog=f"python -m {module}",
            description=summary,
            epilog=f"examples:\n{lines}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("--version", action="version", version=VERSION)

    def read(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """The options given (default: the process's own), after answering a shell that asks for completions."""
        if "_ARGCOMPLETE" in os.environ:
            import argcomplete

            argcomplete.autocomplete(self)
        return self.parse_args(arguments)

    def complete_settings(self, *actions: argparse.Action) -> None:
        """A shell offers key paths of a job, and their values, after these options."""

        def completions(prefix: str, **_: object) -> list[str]:
            from dataset_builder.job.completion import settings_starting_with

            return settings_starting_with(prefix)

        for action in actions:
            action.completer = completions  # type: ignore[attr-defined]  # where argcomplete looks for it

    def error(self, message: str) -> NoReturn:
        """Bad usage, with the nearest option of each one that is unknown."""
        head, separator, unknown = message.partition("unrecognized arguments: ")
        if separator:
            known = tuple(self._option_string_actions)
            named = [word + suggestion(word.split("=")[0], known) for word in unknown.split()]
            message = f"{head}{separator}{' '.join(named)}"
        super().error(message)


def answered_at_once(help_text: str, arguments: Sequence[str]) -> bool:
    """Prints help or version where a command that Hydra configures is asked for them; whether it was.

    The commands that take seconds to import ask it first.
    """
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(f"{help_text.strip()}\n\n{EXIT_CODES}\n")
    elif "--version" in arguments:
        sys.stdout.write(f"{VERSION}\n")
    else:
        return False
    return True
