"""What commands (`dspark_jax.convert`, `dspark_jax.inspect`, those of `eval`) share: flags and errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from absl import flags

from dspark_jax.checkpoints.target_files import CheckpointError
from dspark_jax.config import ConfigError
from dspark_jax.requests import GenerationError
from dspark_jax.text import TextError

_KNOWN_ERRORS = (ConfigError, CheckpointError, TextError, GenerationError, flags.Error)


def read_flags(values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """Reads the command line (argv[0] is the program) and returns its arguments that are no flags."""
    flags.DEFINE_bool("help", False, "Show this help.", values, short_name="h")
    return values(list(argv))[1:]


def run(name: str, command: Callable[[], None]) -> int:
    """Runs a command and returns its exit code: 2 with one line on stderr for an error that the user can mend."""
    try:
        command()
    except _KNOWN_ERRORS as error:
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
