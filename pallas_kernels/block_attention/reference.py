"""Block attention in plain jax: the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # a finite "minus infinity"


def block_attention(
    queries: jax.Array,
    context_keys: jax.Array,
    context_values: jax.Array,
    visible: jax.Array,
    block_keys: jax.Array,
    block_values: jax.Array,
    scale: float,
) -> jax.Array:
    """Computes `api.block_attention`: one softmax over the scores of context and block, side by side."""
    batch, size, heads, dim = queries.shape
    groups, slots = context_keys.shape[1:3]
    exact = product_precision(queries.dtype)
    seen = jnp.arange(slots) < visible[:, None]  # [B, S]
    values = jnp.where(seen[:, None, :, None], context_values, 0)  # nothing times infinity is not nothing
    grouped = queries.reshape(batch, size, groups, heads // groups, dim)

    def product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32, precision=exact)

    to_context = product("bkgrh,bgsh->bgrks", grouped, context_keys) * scale
    to_context = jnp.where(seen[:, None, None, None], to_context, MASKED)
    to_block = product("bkgrh,bjgh->bgrkj", grouped, block_keys) * scale
    weights = jax.nn.softmax(jnp.concatenate([to_context, to_block], axis=-1), axis=-1).astype(values.dtype)
    mixed = product("bgrks,bgsh->bkgrh", weights[..., :slots], values)
    mixed = mixed + product("bgrkj,bjgh->bkgrh", weights[..., slots:], block_values)
    return mixed.reshape(queries.shape).astype(queries.dtype)


def product_precision(dtype: jax.typing.DTypeLike) -> jax.lax.Precision:
    """Returns the precision of products of operands of a dtype: float32 means float32, on accelerators too."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
