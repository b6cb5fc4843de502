"""What the kernels share: the head's step with everything that knows no token hoisted out, and the draw from a tile."""

from __future__ import annotations

import jax
import jax.numpy as jnp

PARTS = {"none": 0, "vanilla": 0, "gated": 1, "rnn": 3}  # pre-activations of size R that a step of the head needs
INPUTS = {"none": 0, "vanilla": 0, "gated": 1, "rnn": 2}  # what they read that changes inside the loop


def split_head(
    kind: str, hidden: jax.Array, weight: jax.Array, bias: jax.Array, rank: int
) -> tuple[jax.Array, jax.Array]:
    """Takes the product with h_k, which no drafted token changes, out of the loop.

    Args:
      kind: "gated" or "rnn".
      hidden: [B, K, D].
      weight: [R, D + R], over (h_k, embedded), or [3R, 2R + D], over (state, embedded, h_k).
      bias: [R] or [3R].
      rank: R.

    Returns:
      what is added to the parts' pre-activations, [K, parts, B, R] float32; the weights of what is left,
      [inputs, parts, R, R] (out, in) of the weight's dtype, with inputs in the order state, embedded.
    """
    batch, steps, width = hidden.shape
    first = 0 if kind == "gated" else 2 * rank  # where h_k's columns begin
    ours = weight[:, first : first + width]
    fixed = jnp.einsum(
        "bkd,od->kbo", hidden.astype(jnp.float32), ours.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    fixed = (fixed + bias.astype(jnp.float32)).reshape(steps, batch, PARTS[kind], rank).swapaxes(1, 2)
    rest = weight[:, width:] if kind == "gated" else weight[:, : 2 * rank]
    return fixed, rest.reshape(PARTS[kind], rank, INPUTS[kind], rank).transpose(2, 0, 1, 3)


def step(kind: str, embedded: jax.Array, state: jax.Array, parts: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the code of one position's bias and the next state, float32 like its arguments, any shape [..., R]."""
    if kind == "vanilla":
        return embedded, state
    if kind == "gated":
        return embedded * jax.nn.sigmoid(parts[0]), state
    keep = jax.nn.sigmoid(parts[0])
    return jnp.tanh(parts[2]), keep * state + (1.0 - keep) * jnp.tanh(parts[1])


def first_maximum(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the maximum and where it comes first: [rows, width] -> [rows, 1] float32, [rows, 1] int32."""
    width = logits.shape[1]
    lane = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    top = jnp.max(logits, axis=1, keepdims=True)
    first = jnp.min(jnp.where(logits == top, lane, width), axis=1, keepdims=True)
    return top, jnp.minimum(first, width - 1)  # a row of NaN stays inside


def inverse_cdf(weights: jax.Array, goal: jax.Array) -> jax.Array:
    """Finds the first entry whose prefix sum exceeds the goal, the last of positive weight if none does.

    By bisection over masked sums, as neither route has a cumulative sum that both lower. A fixed tree of float32
    additions is monotonic in every operand, so the prefix sums are too, and no entry of weight zero is found.

    Args:
      weights: [rows, width] non-negative float32.
      goal: [rows, 1].

    Returns:
      [rows, 1] int32.
    """
    width = weights.shape[1]
    lane = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    below = jnp.zeros(goal.shape, jnp.int32)  # the most entries whose sum does not exceed the goal
    for bit in reversed(range(width.bit_length())):
        tried = below + (1 << bit)
        total = jnp.sum(jnp.where(lane < tried, weights, 0.0), axis=1, keepdims=True)
        below = jnp.where(total <= goal, tried, below)
    last = jnp.max(jnp.where(weights > 0, lane, 0), axis=1, keepdims=True)
    return jnp.minimum(below, last)
