"""Statistics of rows of logits, tile by tile: what kernels hand on, and how tiles are put together.

A kernel reads each logit once and leaves, for every tile of the vocabulary, the maximum, the sum of exponentials below
it and the id of the maximum. Tiles are independent of each other, so that a GPU may compute them in any order, and the
sums of the tiles are the upper level of the inverse CDF that a token is drawn by: only one tile of one position per row
is looked at again.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

LANES = 128


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How rows of logits are cut.

    Attributes:
      rows: rows of one grid step.
      vocab: entries of the vocabulary of one tile, a power of two.
    """

    rows: int
    vocab: int

    def count(self, vocab: int) -> int:
        """Returns how many tiles a vocabulary takes."""
        return -(-vocab // self.vocab)


class TileStats(NamedTuple):
    """Statistics of each tile of each row, [n, tiles].

    Attributes:
      maximum: float32, -inf if nothing is kept.
      total: float32, sum of exp(x - maximum).
      best: int32, the id of the first maximum.
    """

    maximum: jax.Array
    total: jax.Array
    best: jax.Array


class RowStats(NamedTuple):
    """Statistics of whole rows.

    Attributes:
      maximum: [n] float32.
      total: [n] float32, sum of exp(x - maximum): the softmax's denominator.
      best: [n] int32, the argmax.
      mass: [n, tiles] float32, probability of each tile.
      good: [n] bool, the row is a distribution: numbers, and not all of them -inf.
    """

    maximum: jax.Array
    total: jax.Array
    best: jax.Array
    mass: jax.Array
    good: jax.Array


def tile_stats(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reduces one tile, in any memory: [rows, tile] float32 and int32 ids -> maximum, total, best, [rows, 1] each.

    NaN reaches the total, whatever the hardware's maximum does with it.
    """
    maximum = jnp.max(x, axis=1, keepdims=True)
    shift = jnp.where(maximum == -jnp.inf, 0.0, maximum)  # a tile of which nothing is kept sums up to 0, not to NaN
    total = jnp.sum(jnp.exp(x - shift), axis=1, keepdims=True)
    best = jnp.min(jnp.where(x == maximum, ids, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
    return maximum, total, best


def combine(stats: TileStats) -> RowStats:
    """Puts the tiles of each row together."""
    maximum = stats.maximum.max(-1)
    shift = jnp.where(jnp.isneginf(maximum), 0.0, maximum)
    weights = stats.total * jnp.exp(stats.maximum - shift[:, None])
    total = weights.sum(-1)
    best = jnp.where(stats.maximum == maximum[:, None], stats.best, jnp.iinfo(jnp.int32).max).min(-1)
    return RowStats(
        maximum=maximum,
        total=total,
        best=best,
        mass=weights / total[:, None],
        good=jnp.isfinite(maximum) & jnp.isfinite(total),
    )
