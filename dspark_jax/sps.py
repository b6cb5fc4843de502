"""Steps per second of the target against the tokens that a step carries: what hardware-aware policies decide by.

A table holds measured buckets. Between them there is no interpolation: a step of b tokens runs at the next measured
bucket (it is padded to it), so SPS(b) is the value of the smallest bucket >= b, and beyond the largest one there is
none. Measure the buckets that decoding compiles: batch x width for each width of its ladder (`decode.default_widths`).
Real curves are jagged: a wider step may well be the faster one.

`python -m eval.step_curve --sps=FILE` measures and writes a table.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from dspark_jax.config import ConfigError
from dspark_jax.machine import describe_machine

_MEASURE = "measure one with: python -m eval.step_curve --sps=FILE"


@dataclasses.dataclass(frozen=True)
class SpsTable:
    """A measured table.

    Attributes:
      tokens: measured buckets (tokens of a step, all rows together), ascending.
      steps_per_second: one value per bucket, positive.
      device: the machine (`machine.describe_machine`).
      target: the target's name.
      fingerprint: `DecoderConfig.fingerprint()` of the target.
      batch: rows of the measured steps.
      dtype: dtype of the target's weights.
    """

    tokens: tuple[int, ...]
    steps_per_second: tuple[float, ...]
    device: str
    target: str
    fingerprint: str
    batch: int = 1
    dtype: str = "float32"

    def __post_init__(self):
        if not self.tokens or len(self.tokens) != len(self.steps_per_second):
            raise ConfigError(
                f"SPS table with {len(self.tokens)} buckets and {len(self.steps_per_second)} values: it needs one value"
                f" per bucket, and at least one; {_MEASURE}"
            )
        if self.tokens[0] < 1 or list(self.tokens) != sorted(set(self.tokens)):
            raise ConfigError(f"SPS table buckets = {list(self.tokens)}: use ascending token counts from 1 on")
        for bucket, value in zip(self.tokens, self.steps_per_second):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"SPS({bucket}) = {value}: steps per second are positive and finite; {_MEASURE}")


def dense(table: SpsTable) -> np.ndarray:
    """Returns SPS(b) for b = 0..largest bucket, float32; entry 0 equals entry 1 and stands for no step at all."""
    wanted = np.arange(table.tokens[-1] + 1)
    return np.asarray(table.steps_per_second, np.float32)[np.searchsorted(table.tokens, wanted)]


def save(table: SpsTable, path: str | Path) -> None:
    """Writes a table as JSON.

    Raises:
      ConfigError: the file exists already, or its folder does not.
    """
    path = Path(path)
    if path.exists():
        raise ConfigError(f"SPS table {path} exists: delete it first, or name another file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"SPS table {path}: there is no such folder; make it first")
    path.write_text(json.dumps(dataclasses.asdict(table), indent=2) + "\n")


def load(path: str | Path, fingerprint: str = "", device: str = "") -> SpsTable:
    """Reads a table, and refuses one that was measured elsewhere.

    Args:
      path: a file that `save` wrote.
      fingerprint: of the target that it is for (`target.config.fingerprint()`); "" takes a table of any target.
      device: the machine that it must come from; "" is this one.

    Raises:
      ConfigError: no such file, a damaged one, or a table of another machine or target.
    """
    path, device = Path(path), device or describe_machine()
    if not path.is_file():
        raise ConfigError(f"SPS table {path}: there is no such file; {_MEASURE}")
    try:
        values = json.loads(path.read_text())
        values["tokens"] = tuple(int(bucket) for bucket in values["tokens"])
        values["steps_per_second"] = tuple(float(value) for value in values["steps_per_second"])
        table = SpsTable(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"SPS table {path} is damaged ({error!r}); {_MEASURE}") from error
    if table.device != device:
        raise ConfigError(f"SPS table {path} was measured on '{table.device}', this is '{device}': {_MEASURE}")
    if fingerprint and table.fingerprint != fingerprint:
        raise ConfigError(
            f"SPS table {path} was measured with {table.target} (fingerprint {table.fingerprint}), not with this target"
            f" ({fingerprint}): {_MEASURE} --target=NAME"
        )
    return table
