"""The maths of one tile of positions x tokens, the same for every kernel; float32, per-row values as [rows, 1]."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.precision import product_precision

# Where a running maximum starts: smaller than any logit, but finite, so that no difference of two of them is NaN.
LOWEST = float(jnp.finfo(jnp.float32).min)


class RowGradient(NamedTuple):
    """What the backward pass knows of each position, [n, 1] float32 each but for `label`, int32.

    With g_ce and g_distance the cotangents, q the drafter's distribution and s = sign(q - p):

    Attributes:
      label: the label's row of the head, -1 = none.
      log_normalizer: of the target's logits.
      peak: the largest drafter logit.
      log_sum: log of sum_v exp(z_v - peak).
      at_label: g_ce, 0 without a label.
      of_sign: g_distance.
      constant: at_label - g_distance sum_v q_v s_v.
    """

    label: jax.Array
    log_normalizer: jax.Array
    peak: jax.Array
    log_sum: jax.Array
    at_label: jax.Array
    of_sign: jax.Array
    constant: jax.Array


def product(left: jax.Array, right: jax.Array, transposed: bool = False) -> jax.Array:
    """Multiplies matrices into float32: left @ right, or left @ right^T."""
    return jax.lax.dot_general(
        left,
        right,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=product_precision(left.dtype),
        preferred_element_type=jnp.float32,
    )


def capped(logits: jax.Array, cap: float) -> jax.Array:
    """cap tanh(logits / cap); 0 = no cap."""
    return cap * jnp.tanh(logits / cap) if cap else logits


def through_cap(gradient: jax.Array, base: jax.Array, cap: float) -> jax.Array:
    """Takes a gradient with respect to capped logits `base` to one with respect to the logits."""
    if not cap:
        return gradient
    level = base / cap
    return gradient * (1.0 - level) * (1.0 + level)


def columns(shape: tuple[int, ...], first: jax.Array) -> jax.Array:
    """Token indices of a tile [rows, tokens] that begins at `first`."""
    return first + jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def running_sum(logits: jax.Array, peak: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Takes a tile into (peak, sum of exp(z - peak)); -inf logits add nothing."""
    higher = jnp.maximum(peak, jnp.max(logits, axis=1, keepdims=True))
    added = jnp.sum(jnp.exp(logits - higher), axis=1, keepdims=True)
    return higher, total * jnp.exp(peak - higher) + added


def at_label(logits: jax.Array, column: jax.Array, label: jax.Array) -> jax.Array:
    """The label's logit where the tile has it, else 0: [rows, 1]."""
    return jnp.sum(jnp.where(column == label, logits, 0.0), axis=1, keepdims=True)


def probabilities(
    logits: jax.Array,
    target_logits: jax.Array,
    valid: jax.Array,
    peak: jax.Array,
    log_sum: jax.Array,
    log_normalizer: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """q and p of a tile, 0 where it is not valid."""
    q = jnp.where(valid, jnp.exp((logits - peak) - log_sum), 0.0)
    return q, jnp.where(valid, jnp.exp(target_logits - log_normalizer), 0.0)


def distance_terms(q: jax.Array, p: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums over a tile of |q - p|, q sign(q - p) and p: [rows, 1] each."""
    apart, agreed, weight = (jnp.sum(x, axis=1, keepdims=True) for x in differences(q, p))
    return apart, agreed, weight


def differences(q: jax.Array, p: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `distance_terms` sums up, entry by entry."""
    return jnp.abs(q - p), q * _sign(q, p), p


def logit_gradient(q: jax.Array, p: jax.Array, column: jax.Array, row: RowGradient) -> jax.Array:
    """The loss's gradient with respect to the drafter's logits, 0 where q and p are."""
    gradient = q * (row.constant + row.of_sign * _sign(q, p))
    return gradient - jnp.where(column == row.label, row.at_label, 0.0)


def _sign(q: jax.Array, p: jax.Array) -> jax.Array:
    """sign(q - p), by comparisons: Mosaic lowers `jnp.sign` only where it can see a TPU."""
    return jnp.where(q > p, 1.0, jnp.where(q < p, -1.0, 0.0))
