"""Anchor sampling and labels of a training batch, as indices (DSpark, section 4; never a [T, T] mask).

An anchor a is a response position whose next token is in the response too. Its block predicts tokens a+1..a+K; only the
contiguous prefix of labels inside the response is supervised. Label k's target distribution is the target's output at
a+k-1, and the token before it is the true one, a+k-1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Anchors:
    """The blocks of a batch.

    Attributes:
      positions: [B, A] int32, anchor positions.
      keep: [B, A] bool, False for padding (a response with fewer than A anchors).
      label_ids: [B, A, K] int32, true tokens a+1..a+K (clamped to the sequence).
      previous_ids: [B, A, K] int32, true tokens a..a+K-1.
      source_positions: [B, A, K] int32, where the target's distribution of each label is, a..a+K-1.
      weight_mask: [B, A, K] bool, supervised labels.
    """

    positions: jax.Array
    keep: jax.Array
    label_ids: jax.Array
    previous_ids: jax.Array
    source_positions: jax.Array
    weight_mask: jax.Array


def sample_positions(key: jax.Array, response_mask: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Samples up to `count` anchors per sequence, without replacement, in ascending order.

    Args:
      key: random key.
      response_mask: [B, T] bool, tokens of the response.
      count: A.

    Returns:
      positions [B, A] int32 and keep [B, A] bool.
    """
    valid = response_mask[:, :-1] & response_mask[:, 1:]
    valid = jnp.pad(valid, ((0, 0), (0, 1)))
    scores = jnp.where(valid, jax.random.uniform(key, valid.shape), -1.0)
    pad = max(count - scores.shape[1], 0)
    scores = jnp.pad(scores, ((0, 0), (0, pad)), constant_values=-1.0)
    top, positions = jax.lax.top_k(scores, count)
    keep = top >= 0
    order = jnp.argsort(jnp.where(keep, positions, scores.shape[1]), axis=1)
    positions = jnp.where(keep, positions, 0)
    return jnp.take_along_axis(positions, order, 1).astype(jnp.int32), jnp.take_along_axis(keep, order, 1)


def make_anchors(
    tokens: jax.Array, response_mask: jax.Array, positions: jax.Array, keep: jax.Array, block_size: int
) -> Anchors:
    """Builds labels and masks for given anchor positions.

    Args:
      tokens: [B, T] int32.
      response_mask: [B, T] bool.
      positions: [B, A] int32.
      keep: [B, A] bool.
      block_size: K.
    """
    batch, size = tokens.shape
    offsets = positions[..., None] + jnp.arange(block_size + 1)  # [B, A, K+1]
    inside = offsets < size
    clamped = jnp.minimum(offsets, size - 1)
    flat = clamped.reshape(batch, -1)
    ids = jnp.take_along_axis(tokens, flat, axis=1).reshape(clamped.shape)
    supervised = jnp.take_along_axis(response_mask, flat, axis=1).reshape(clamped.shape) & inside
    prefix = jnp.cumprod(supervised[..., 1:].astype(jnp.int32), axis=-1) > 0
    return Anchors(
        positions=positions,
        keep=keep,
        label_ids=ids[..., 1:],
        previous_ids=ids[..., :-1],
        source_positions=clamped[..., :-1],
        weight_mask=prefix & keep[..., None],
    )
