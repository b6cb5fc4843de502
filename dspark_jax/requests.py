"""Checks of what a request asks for: one value or one per row, each in its range; and of how a batch ended."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from dspark_jax import processors
from dspark_jax.records import Sampler

_COLDEST = 1e-6  # dividing float32 logits by less than this leaves float32


class GenerationError(ValueError):
    """A request that can't be served; the message names the value and the fix."""


def read_sampler(batch: int, temperature: Any, top_k: Any, top_p: Any, min_p: Any, repetition_penalty: Any) -> Sampler:
    """Returns the sampler of a batch from values that are given once or per row.

    Raises:
      GenerationError: a value that is out of range, or not one per row.
    """
    temperature = per_row(temperature, np.float32, batch, "temperature")
    good = np.isfinite(temperature) & ((temperature == 0) | (temperature >= _COLDEST))
    _refuse(temperature, good, "temperature", f"0 (greedy) or a positive number, {_COLDEST} at least")
    top_k = per_row(top_k, np.float64, batch, "top_k")
    _refuse(top_k, (top_k >= 0) & (top_k == np.floor(top_k)), "top_k", "a whole number, 0 (off) or more")
    top_p = per_row(top_p, np.float32, batch, "top_p")
    _refuse(top_p, (top_p > 0) & (top_p <= 1), "top_p", "a probability above 0, up to 1 (off)")
    min_p = per_row(min_p, np.float32, batch, "min_p")
    _refuse(min_p, (min_p >= 0) & (min_p <= 1), "min_p", "a share in 0 (off)..1")
    penalty = per_row(repetition_penalty, np.float32, batch, "repetition_penalty")
    _refuse(penalty, np.isfinite(penalty) & (penalty > 0), "repetition_penalty", "a positive number, 1 = off")
    top_k = np.minimum(top_k, np.iinfo(np.int32).max).astype(np.int32)
    return processors.make_sampler(temperature, top_k, top_p, min_p, penalty)


def per_row(value: Any, dtype: Any, batch: int, name: str) -> np.ndarray:
    """Returns a setting as one value per row.

    Raises:
      GenerationError: no number, or neither one value nor one per row.
    """
    try:
        values = np.asarray(value, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise GenerationError(f"{name} = {value!r}: give a number, or one for each row") from error
    if values.shape not in ((), (batch,)):
        raise GenerationError(
            f"{name} has shape {list(values.shape)}: give one value, or one for each of {batch} prompts"
        )
    return np.broadcast_to(values, (batch,))


def refuse_failed_rows(failed: jax.Array) -> None:
    """Raises if a row of a finished batch met logits that are not numbers.

    Args:
      failed: [B] int32, `decode.DecodeState.failed`.

    Raises:
      GenerationError: names the first such row and the position.
    """
    positions = np.asarray(failed)
    broken = np.flatnonzero(positions >= 0)
    if len(broken):
        row = int(broken[0])
        raise GenerationError(
            f"row {row}: the target's logits for position"
            f" {positions[row]} are not finite numbers ({len(broken)} of {len(positions)} rows): its weights are"
            " damaged, or overflow in this dtype; load it again, or in float32"
        )


def _refuse(values: np.ndarray, good: np.ndarray, name: str, use: str) -> None:
    if not good.all():
        raise GenerationError(f"{name} = {values[~good][0]:g}: use {use}")
