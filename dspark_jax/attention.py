"""Attention of blocks of tokens to a cached context and to themselves: arrays only, no weights."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.block_attention import api as kernel
from pallas_kernels.precision import product_precision

BlockMask = jax.Array | Literal["causal"] | None
MASKED = -1e30  # a finite "minus infinity": a row that sees nothing stays free of NaN


def attend(
    queries: jax.Array,
    context_keys: jax.Array,
    context_values: jax.Array,
    visible: jax.Array,
    block_keys: jax.Array,
    block_values: jax.Array,
    block_mask: BlockMask,
    scale: float | None = None,
    window: int = 0,
    first: jax.Array | None = None,
) -> jax.Array:
    """Attention of blocks of tokens to a shared context and to their own block.

    A target step is one block (A = 1) with a causal mask; a drafter's training step is A blocks per row over one
    context. Softmax in float32 over context and block together. One block of a row is left to a kernel where there is
    one (`pallas_kernels.block_attention`).

    Args:
      queries: [B, A, K, N, H].
      context_keys: [B, G, S, H].
      context_values: [B, G, S, H].
      visible: [B, A] int32; block a sees context slots < visible.
      block_keys: [B, A, J, G, H].
      block_values: [B, A, J, G, H].
      block_mask: [K, J] bool, query i sees key j of its own block; "causal" = the keys up to its own (J = K); None =
        every query sees the whole block.
      scale: scores are multiplied by it; None = H ** -0.5.
      window: a token sees the window - 1 tokens before it only (0 = all of them): slot s holds position s, query i of
        block a is at position visible[a] + i, and J = K.
      first: [B, A] int32; block a sees no context slot before it (where its document begins); None = 0.

    Returns:
      [B, A, K, N, H].
    """
    batch, blocks, size, heads, dim = queries.shape
    groups, slots = context_keys.shape[1:3]
    ratio, exact = heads // groups, product_precision()
    scale = float(dim**-0.5 if scale is None else scale)
    own = block_keys.shape[2]
    causal = isinstance(block_mask, str)
    if blocks == 1 and (block_mask is None or causal) and not window and first is None:
        row = (queries[:, 0], context_keys, context_values, visible[:, 0], block_keys[:, 0], block_values[:, 0])
        if kernel.implementation(*row, causal=causal) != "reference":
            return kernel.block_attention(*row, scale=scale, causal=causal)[:, None]
    if isinstance(block_mask, str):
        block_mask = jnp.tril(jnp.ones((size, own), bool))
    if blocks * size * own == 1 and batch > 4 and first is None:
        return _attend_single(queries, context_keys, context_values, visible, block_keys, block_values, scale, window)
    grouped = queries.reshape(batch, blocks, size, groups, ratio, dim)
    grouped = jnp.transpose(grouped, (0, 3, 1, 4, 2, 5))  # [B, G, A, N/G, K, H]
    flat = grouped.reshape(batch, groups, blocks * ratio * size, dim)
    to_context = jnp.einsum("bgqh,bgsh->bgqs", flat, context_keys, preferred_element_type=jnp.float32, precision=exact)
    to_context = to_context.reshape(batch, groups, blocks, ratio * size, slots) * scale
    seen = jnp.arange(slots) < visible[:, :, None]
    if first is not None:
        seen = seen & (jnp.arange(slots) >= first[:, :, None])
    seen = seen[:, :, None]  # [B, A, 1, S]
    if window:
        seen = seen & (jnp.arange(slots) >= _first_seen(visible, size, window)[..., None])  # [B, A, K, S]
        seen = jnp.tile(seen, (1, 1, ratio, 1))
        near = jnp.arange(size)[:, None] - jnp.arange(size) < window
        block_mask = near if block_mask is None else block_mask & near
    to_context = jnp.where(seen[:, None], to_context, MASKED)
    keys = jnp.transpose(block_keys, (0, 3, 1, 2, 4))  # [B, G, A, K, H]
    values = jnp.transpose(block_values, (0, 3, 1, 2, 4))
    to_block = jnp.einsum("bgarkh,bgajh->bgarkj", grouped, keys, preferred_element_type=jnp.float32, precision=exact)
    to_block = to_block * scale if block_mask is None else jnp.where(block_mask, to_block * scale, MASKED)
    to_block = to_block.reshape(batch, groups, blocks, ratio * size, own)

    # One softmax over both parts, without concatenating them: shared maximum, shared sum.
    top = jnp.maximum(to_context.max(-1, keepdims=True), to_block.max(-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    weight_context, weight_block = jnp.exp(to_context - top), jnp.exp(to_block - top)
    total = weight_context.sum(-1, keepdims=True) + weight_block.sum(-1, keepdims=True)
    from_context = jnp.einsum(
        "bgqs,bgsh->bgqh",
        weight_context.reshape(batch, groups, blocks * ratio * size, slots).astype(context_values.dtype),
        context_values,
        preferred_element_type=jnp.float32,
        precision=exact,
    ).reshape(batch, groups, blocks, ratio * size, dim)
    from_block = jnp.einsum(
        "bgaqj,bgajh->bgaqh",
        weight_block.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
        precision=exact,
    )
    mixed = ((from_context + from_block) / total).astype(queries.dtype)
    mixed = mixed.reshape(batch, groups, blocks, ratio, size, dim)
    return jnp.transpose(mixed, (0, 2, 4, 1, 3, 5)).reshape(queries.shape)


def _first_seen(visible: jax.Array, size: int, window: int) -> jax.Array:
    """Returns the first context slot that each query of a block sees through its window: [..., K]."""
    return visible[..., None] + jnp.arange(size) - (window - 1)


def _attend_single(
    queries, context_keys, context_values, visible, block_keys, block_values, scale, window
) -> jax.Array:
    """`attend` for one token per row, as multiply-and-sum.

    A batch of products with one row each is bound by reading the cache; on a CPU it uses all cores in this form only.
    """
    batch, _, _, heads, dim = queries.shape
    groups, slots = context_keys.shape[1:3]
    q = queries.reshape(batch, groups, heads // groups, dim).astype(jnp.float32) * scale
    own_key = block_keys.reshape(batch, groups, 1, dim)
    own_value = block_values.reshape(batch, groups, 1, dim)
    to_context = jnp.sum(q[:, :, :, None] * context_keys[:, :, None], axis=-1)  # [B, G, N/G, S]
    seen = jnp.arange(slots) < visible[:, :, None, None]  # [B, 1, 1, S]
    if window:
        seen = seen & (jnp.arange(slots) >= _first_seen(visible, 1, window)[..., None])
    to_context = jnp.where(seen, to_context, MASKED)
    to_self = jnp.sum(q * own_key, axis=-1, keepdims=True)
    top = jnp.maximum(to_context.max(-1, keepdims=True), to_self)
    weight_context, weight_self = jnp.exp(to_context - top), jnp.exp(to_self - top)
    total = weight_context.sum(-1, keepdims=True) + weight_self
    mixed = jnp.sum(weight_context[..., None] * context_values[:, :, None], axis=-2) + weight_self * own_value
    return (mixed / total).astype(queries.dtype).reshape(queries.shape)


def attention_spread(
    queries: jax.Array,
    context_keys: jax.Array,
    visible: jax.Array,
    block_keys: jax.Array,
    scale: float | None = None,
    window: int = 0,
) -> jax.Array:
    """Says how evenly each token of a causal block attends: entropy of its weights over the log of what it sees.

    Args:
      queries: [B, T, N, H].
      context_keys: [B, G, S, H].
      visible: [B] int32; slots < visible are seen.
      block_keys: [B, T, G, H].
      scale, window: see `attend`.

    Returns:
      [B, T] float32 in 0..1, the mean over heads; 0 for a token that sees itself only.
    """
    batch, size, heads, dim = queries.shape
    groups, slots = context_keys.shape[1:3]
    grouped = queries.reshape(batch, size, groups, heads // groups, dim).astype(jnp.float32)
    grouped = grouped * (dim**-0.5 if scale is None else scale)
    to_context = jnp.einsum("btgrh,bgsh->btgrs", grouped, context_keys)
    to_block = jnp.einsum("btgrh,bjgh->btgrj", grouped, block_keys)
    seen = jnp.arange(slots) < visible[:, None, None, None, None]
    causal = jnp.tril(jnp.ones((size, size), bool))
    count = visible[:, None] + jnp.arange(1, size + 1)
    if window:
        seen = seen & (jnp.arange(slots) >= _first_seen(visible, size, window)[:, :, None, None, None])
        causal = causal & jnp.triu(jnp.ones((size, size), bool), 1 - window)
        count = jnp.minimum(count, window)
    causal = causal[:, None, None]
    scores = [jnp.where(seen, to_context, MASKED), jnp.where(causal, to_block, MASKED)]
    log_weights = jax.nn.log_softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    entropy = -jnp.sum(jnp.exp(log_weights) * log_weights, axis=-1).mean((2, 3))  # a masked entry adds 0 * -1e30 = 0
    return jnp.clip(entropy / jnp.log(jnp.maximum(count, 2)), 0.0, 1.0)
