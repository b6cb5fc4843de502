"""Random numbers and sampling; greedy rows beside sampled rows.

A row's random stream is keyed by (row key, position of the anchor, slot in the block), never by the step or the batch,
so a row's text does not depend on the rows beside it. Each slot owns three uniforms: one draws the draft token, one
decides about its acceptance, one draws the token that the target adds there.

Why the anchor and not the position of the token itself: the anchor moves by at least one token a cycle, so every cycle
draws fresh numbers. Keyed by token position, a cycle that rejects token k would hand the uniforms of the slots after k,
already used to draft and judge tokens that were thrown away, to the next cycle. What is committed may depend on those
(block verification accepts token k by looking at the tokens after it, an adaptive policy remembers how many were kept),
so that the next cycle's numbers would no longer be independent of the text, and the text no longer the target's.
Autoregressive decoding is the same scheme with one slot per cycle.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.sampling import argmax, sample_weights

DRAFT, ACCEPT, COMMIT = 0, 1, 2  # columns of `cycle_uniforms`


def row_keys(seed: int | jax.Array, rows: jax.Array) -> jax.Array:
    """Returns one random key per row: [B] row numbers (of the request, not of the batch) -> [B] keys."""
    base = jax.random.key(seed)
    return jax.vmap(lambda row: jax.random.fold_in(base, row))(rows)


def cycle_uniforms(keys: jax.Array, anchors: jax.Array, slots: int) -> jax.Array:
    """Returns the uniforms of one cycle.

    Args:
      keys: [B] row keys.
      anchors: [B] int32, position of each row's anchor (its committed tokens less one).
      slots: draft tokens and the one that is added, K + 1; more slots don't change the first ones.

    Returns:
      [B, slots, 3] float32 in [0, 1): draft, accept, commit.
    """

    def row(key: jax.Array, anchor: jax.Array) -> jax.Array:
        key = jax.random.fold_in(key, anchor)
        return jax.vmap(lambda slot: jax.random.uniform(jax.random.fold_in(key, slot), (3,)))(jnp.arange(slots))

    return jax.vmap(row)(keys, anchors)


def sample(logits: jax.Array, temperature: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Draws a token per row: argmax at temperature 0, else from softmax(logits).

    Args:
      logits: [B, V], processed: the temperature is in them already (`processors.process`).
      temperature: [B], only to tell the greedy rows.
      uniforms: [B].

    Returns:
      [B] int32.
    """

    def sampled(logits):
        return jnp.where(temperature > 0, sample_weights(jax.nn.softmax(logits, axis=-1), uniforms), argmax(logits))

    return jax.lax.cond(jnp.any(temperature > 0), sampled, argmax, logits)
