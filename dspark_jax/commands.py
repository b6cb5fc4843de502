"""What commands (`dspark_jax.convert`, `dspark_jax.inspect`, those of `train` and `eval`) share: flags and errors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

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


@contextlib.contextmanager
def config_errors() -> Iterator[None]:
    """Turns what a flag of a config file raises, as it is read, into an error that names it."""
    try:
        yield
    except (AttributeError, KeyError) as error:
        inner = error.args[0]
        raise ConfigError(f"--config: there is no such field: {' '.join(getattr(inner, 'args', [inner]))}") from error
    except TypeError as error:
        raise ConfigError(f"--config: an override goes below a plain value, or is of a wrong type: {error}") from error
    except OSError as error:
        raise ConfigError(f"--config: {error}") from error


def run(name: str, command: Callable[[], None], *known: type[Exception]) -> int:
    """Runs a command and returns its exit code: 2 with one line on stderr for an error that the user can mend.

    Args:
      name: the command's, for that line.
      command: what to run.
      *known: further errors that the user can mend.
    """
    try:
        command()
    except (*_KNOWN_ERRORS, *known) as error:
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0
