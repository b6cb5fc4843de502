"""What both kernels share: queries as rows of one product per group, and one tile of an online softmax.

The softmax over all keys is computed tile by tile (Milakov & Gimelshein, 2018; FlashAttention, Dao et al., 2022): a
larger maximum scales down what was summed before.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_attention.reference import MASKED
from pallas_kernels.precision import product_precision


class Partial(NamedTuple):
    """What R rows have seen so far.

    Attributes:
      mixed: [R, H] float32, the sum of exp(score - top) value.
      top: [R, 1] float32, the largest score.
      total: [R, 1] float32, the sum of exp(score - top).
    """

    mixed: jax.Array
    top: jax.Array
    total: jax.Array


def nothing(rows: int, dim: int) -> Partial:
    """Returns the state of rows that have seen no key."""
    column = jnp.zeros((rows, 1), jnp.float32)
    return Partial(mixed=jnp.zeros((rows, dim), jnp.float32), top=column + MASKED, total=column)


def add(
    seen: Partial, queries: jax.Array, keys: jax.Array, values: jax.Array, count: jax.Array | int, scale: float
) -> Partial:
    """Adds a tile of keys.

    Args:
      seen: the state before.
      queries: [R, H].
      keys: [T, H], the tile; what lies at `count` and beyond may be anything, NaN too.
      values: [T, H]; finite at `count` and beyond, where their weight is 0.
      count: how many keys of the tile are seen; may be negative or more than T.
      scale: scores are multiplied by it.
    """
    exact = product_precision(queries.dtype)
    scores = jax.lax.dot_general(
        queries, keys, (((1,), (1,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
    )
    inside = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1) < count
    scores = jnp.where(inside, scores * scale, MASKED)
    top = jnp.maximum(seen.top, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(inside, jnp.exp(scores - top), 0.0)
    added = jax.lax.dot_general(
        weights.astype(values.dtype),
        values,
        (((1,), (0,)), ((), ())),
        precision=exact,
        preferred_element_type=jnp.float32,
    )
    kept = jnp.exp(seen.top - top)
    total = seen.total * kept + jnp.sum(weights, axis=1, keepdims=True)
    return Partial(mixed=seen.mixed * kept + added, top=top, total=total)


def rows_of(queries: jax.Array, groups: int, rows: int) -> jax.Array:
    """Makes all queries of a group of heads rows of one matrix: [B, K, N, H] -> [B, G, rows, H], zeros at the end."""
    batch, size, heads, dim = queries.shape
    grouped = queries.reshape(batch, size, groups, heads // groups, dim)
    flat = jnp.transpose(grouped, (0, 2, 3, 1, 4)).reshape(batch, groups, size * heads // groups, dim)
    return _pad_rows(flat, rows)


def queries_of(flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undoes `rows_of`: [B, G, rows, H] -> [B, K, N, H], which is `shape`."""
    batch, size, heads, dim = shape
    groups = flat.shape[1]
    grouped = flat[:, :, : size * heads // groups].reshape(batch, groups, heads // groups, size, dim)
    return jnp.transpose(grouped, (0, 3, 1, 2, 4)).reshape(shape)


def block_of(block: jax.Array, rows: int) -> jax.Array:
    """Lays out a block's keys or values as the cache is: [B, J, G, H] -> [B, G, rows, H], zeros at the end."""
    return _pad_rows(jnp.transpose(block, (0, 2, 1, 3)), rows)


def _pad_rows(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, [(0, 0), (0, 0), (0, rows - x.shape[2]), (0, 0)])
