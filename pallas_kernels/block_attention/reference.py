"""Block attention in plain jax: the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.precision import product_precision

MASKED = -1e30  # a finite "minus infinity"


def block_attention(
    queries: jax.Array,
    context_keys: jax.Array,
    context_values: jax.Array,
    visible: jax.Array,
    block_keys: jax.Array,
    block_values: jax.Array,
    scale: float,
    causal: bool = False,
) -> jax.Array:
    """Computes `api.block_attention`: one softmax over the scores of context and block, side by side."""
    batch, size, heads, dim = queries.shape
    groups, slots = context_keys.shape[1:3]
    exact = product_precision(queries.dtype)
    seen = jnp.arange(slots) < visible[:, None]  # [B, S]
    values = jnp.where(seen[:, None, :, None], context_values, 0)  # a weight of 0 times infinity would not be 0
    # The queries of a group's heads are rows of one product: [B, G, Q, H], Q = K N / G.
    grouped = jnp.transpose(queries.reshape(batch, size, groups, heads // groups, dim), (0, 2, 1, 3, 4))
    rows = grouped.reshape(batch, groups, size * heads // groups, dim)

    def product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32, precision=exact)

    to_context = product("bgqh,bgsh->bgqs", rows, context_keys) * scale
    to_context = jnp.where(seen[:, None, None], to_context, MASKED)
    to_block = product("bgqh,bjgh->bgqj", rows, block_keys) * scale
    if causal:
        token = jnp.arange(size * heads // groups) // (heads // groups)  # of each row
        to_block = jnp.where(jnp.arange(block_keys.shape[1]) <= token[:, None], to_block, MASKED)
    weights = jax.nn.softmax(jnp.concatenate([to_context, to_block], axis=-1), axis=-1).astype(values.dtype)
    mixed = product("bgqs,bgsh->bgqh", weights[..., :slots], values)
    mixed = mixed + product("bgqj,bjgh->bgqh", weights[..., slots:], block_values)
    mixed = jnp.transpose(mixed.reshape(grouped.shape), (0, 2, 1, 3, 4))
    return mixed.reshape(queries.shape).astype(queries.dtype)
