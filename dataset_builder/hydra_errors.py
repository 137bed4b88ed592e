"""What Hydra says of wrong overrides, in one line as every other command would: the key and the nearest known one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from hydra.errors import HydraException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from dataset_builder.job.errors import suggestion


def told_in_one_line(error: HydraException | OmegaConfBaseException) -> str:
    """The key and what is wrong with it."""
    cause = error.__cause__
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key and cause.parent_node is not None:
        folder = cause.full_key.rpartition(".")[0]
        known = [f"{folder}.{key}" if folder else str(key) for key in cause.parent_node]
        return f"{cause.full_key}: unknown key{suggestion(cause.full_key, known)}"
    if isinstance(error, OmegaConfBaseException):
        return str(error).splitlines()[0]  # the others speak of OmegaConf's own types
    return " ".join(str(error).split())


def answering(main: Callable[[], object], command: str) -> None:
    """Runs what ``hydra.main`` made of a command; exit code 2, after one line, where it is given wrong overrides."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # or Hydra tells them itself, in many lines, and exits as after a bug
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        print(f"{command}: {told_in_one_line(error)}", file=sys.stderr)
        sys.exit(2)
