"""Fixed-size KV caches: init, append, a length per row.

A forward pass reads the cache and returns its own tokens' keys and values beside it; `append` writes them after the
pass, once it is known how many of them count. Nothing is ever moved or cleared.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.config import DecoderConfig
from dspark_jax.records import BlockKV, KVCache


def init_cache(config: DecoderConfig, batch: int, slots: int, dtype=jnp.float32) -> KVCache:
    """Returns an empty cache of `slots` slots per row; layers may differ in their heads.

    Sliding layers have all slots too: what lies before their window is masked.
    """
    layers = [config.attention(i) for i in range(config.num_layers)]
    shapes = [(batch, layer.num_kv_heads, slots, layer.head_dim) for layer in layers]
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for shape in shapes),
        values=tuple(jnp.zeros(shape, dtype) for shape in shapes),
        length=jnp.zeros((batch,), jnp.int32),
    )


def append(cache: KVCache, block: BlockKV, count: jax.Array) -> KVCache:
    """Writes a block at each row's length and advances the length by `count`.

    All T tokens are written, `count` of them count: the others are garbage that the next append overwrites.
    The caller keeps length + T within the slots (a start beyond S - T would be clamped and overwrite live slots).

    Args:
      cache: the cache.
      block: keys and values [B, G, T, H] per layer.
      count: [B] int32 in 0..T.
    """

    # The position is the length, but written so that it depends on `count`, which a decoding step knows only after its
    # last read of the cache: XLA then updates the cache in place instead of copying it first.
    start = jnp.minimum(cache.length, cache.length + count)

    def write(slots: jax.Array, new: jax.Array) -> jax.Array:
        new = new.astype(slots.dtype)
        return jax.lax.platform_dependent(slots, new, start, cpu=_write_in_turn, default=_write_together)

    return KVCache(
        keys=tuple(write(c, n) for c, n in zip(cache.keys, block.keys)),
        values=tuple(write(c, n) for c, n in zip(cache.values, block.values)),
        length=cache.length + count.astype(jnp.int32),
    )


def _write_in_turn(slots: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """One slice per row, in place inside a loop: a batched scatter is far slower on a CPU."""

    def row(b, slots):
        piece = jax.lax.dynamic_slice_in_dim(new, b, 1, axis=0)
        return jax.lax.dynamic_update_slice(slots, piece, (b, 0, start[b], 0))

    if slots.shape[0] == 1:
        return row(0, slots)
    return jax.lax.fori_loop(0, slots.shape[0], row, slots)


def _write_together(slots: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """All rows in one operation: on an accelerator a loop over rows would be a kernel launch per row."""
    return jax.vmap(lambda row, piece, at: jax.lax.dynamic_update_slice(row, piece, (0, at, 0)))(slots, new, start)
