"""Argmax and the inverse CDF over a vocabulary, in plain jax: what every op's reference draws with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_BLOCK = 256  # entries per block of the two-level inverse CDF


def argmax(logits: jax.Array) -> jax.Array:
    """Index of the first maximum along the last axis, int32, by two vectorised reductions."""
    size = logits.shape[-1]
    top = logits.max(axis=-1, keepdims=True)
    index = jnp.where(logits == top, jnp.arange(size, dtype=jnp.int32), size)
    return jnp.minimum(index.min(axis=-1), size - 1)  # a row of NaN stays inside the vocabulary


def sample_weights(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Draws from unnormalised weights by the inverse CDF.

    Two levels (blocks, then inside the block) instead of one long cumulative sum: less work, and the sums stay short
    enough for float32. An entry of weight zero is never drawn.

    Args:
      weights: [..., V] non-negative float32, with a positive sum.
      uniforms: [...] in [0, 1).

    Returns:
      [...] int32.
    """
    size = weights.shape[-1]
    if size <= _BLOCK:
        sums = jnp.cumsum(weights, axis=-1)
        return first_above(sums, uniforms[..., None] * sums[..., -1:], weights > 0).astype(jnp.int32)
    padded = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, -size % _BLOCK)])
    blocks = padded.reshape(*weights.shape[:-1], -1, _BLOCK)
    totals = blocks.sum(-1)
    upper = jnp.cumsum(totals, axis=-1)  # [..., V/256]
    goal = uniforms[..., None] * upper[..., -1:]
    block = first_above(upper, goal, totals > 0)
    before = jnp.where(block > 0, jnp.take_along_axis(upper, jnp.maximum(block - 1, 0)[..., None], -1)[..., 0], 0.0)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]  # [..., 256]
    offset = first_above(jnp.cumsum(inside, axis=-1), goal - before[..., None], inside > 0)
    return (block * _BLOCK + offset).astype(jnp.int32)


def first_above(sums: jax.Array, goal: jax.Array, positive: jax.Array) -> jax.Array:
    """Returns the index of the first sum above the goal among entries of positive weight, else of the last such entry.

    Prefix sums computed in parallel are not exactly monotonic: without the second condition rounding could pick an
    entry of weight zero.
    """
    above = (sums > goal) & positive
    last = sums.shape[-1] - 1 - jnp.argmax(jnp.flip(positive, axis=-1), axis=-1)
    return jnp.where(above.any(-1), jnp.argmax(above, axis=-1), last)
