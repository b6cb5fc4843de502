"""The three losses of distillation, as sums (DSpark, section 4.2); divide once, by the weight of the whole batch.

With w_k = exp(-(k-1)/decay) over supervised labels, p the target's distribution and q the drafter's:

  cross-entropy  -w_k log q(label)
  L1             w_k ||q - p||_1              (total variation: 1 - ||q - p||_1 / 2 is the acceptance rate)
  confidence     w_k BCE(c_k, c*_k), c*_k = 1 - ||q - p||_1 / 2 held constant

With a reduced draft vocabulary q lives on V' tokens: a label outside of it has no cross-entropy (its weight there is
zero), and p's mass outside of it counts fully in the L1 distance.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class LossWeights:
    """Weights of the three losses in their sum."""

    ce: float
    l1: float
    confidence: float


@struct.dataclass
class LossSums:
    """Weighted sums over positions, float32 scalars.

    Attributes:
      ce: cross-entropy.
      l1: L1 distance.
      confidence: binary cross-entropy of the confidence head.
      accept: expected acceptance rate 1 - ||q - p||_1 / 2, for metrics.
    """

    ce: jax.Array
    l1: jax.Array
    confidence: jax.Array
    accept: jax.Array


def position_weights(weight_mask: jax.Array, decay: float) -> jax.Array:
    """Returns w_k on supervised labels, 0 elsewhere: [..., K] bool -> [..., K] float32."""
    decayed = jnp.exp(-jnp.arange(weight_mask.shape[-1], dtype=jnp.float32) / decay)
    return weight_mask.astype(jnp.float32) * decayed


def block_losses(
    logits: jax.Array,
    confidence_logits: jax.Array | None,
    target_probs: jax.Array,
    label_index: jax.Array,
    weights: jax.Array,
) -> LossSums:
    """Sums the losses of some blocks.

    Args:
      logits: [n, K, V'] float32, the drafter's.
      confidence_logits: [n, K] float32, or None.
      target_probs: [n, K, V'] float32, the target's probabilities of the draft vocabulary (they need not sum to 1).
      label_index: [n, K] int32, the labels' places in the draft vocabulary, -1 = outside.
      weights: [n, K] float32, w_k, 0 for unsupervised labels.
    """
    return sum_losses(*position_losses(logits, target_probs, label_index), confidence_logits, weights)


def position_losses(logits: jax.Array, target_probs: jax.Array, label_index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes cross-entropy (0 for a label outside) and L1 distance by position.

    Args:
      logits: [..., V'] float32; see `block_losses`.
      target_probs: [..., V'] float32.
      label_index: [...] int32.

    Returns:
      [...] float32 each.
    """
    chex.assert_equal_shape([logits, target_probs])
    log_q = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    log_label = jnp.take_along_axis(log_q, jnp.maximum(label_index, 0)[..., None], axis=-1)[..., 0]
    distance = jnp.abs(jnp.exp(log_q) - target_probs).sum(-1) + jnp.maximum(1.0 - target_probs.sum(-1), 0.0)
    return jnp.where(label_index >= 0, -log_label, 0.0), distance


def sum_losses(ce: jax.Array, distance: jax.Array, confidence_logits: jax.Array | None, weights: jax.Array) -> LossSums:
    """Sums the losses of positions, given what `position_losses` returns, [n, K]; the others as of `block_losses`."""
    accept = jax.lax.stop_gradient(jnp.clip(1.0 - 0.5 * distance, 0.0, 1.0))
    if confidence_logits is None:
        confidence = jnp.zeros_like(distance)
    else:
        positive, negative = jax.nn.log_sigmoid(confidence_logits), jax.nn.log_sigmoid(-confidence_logits)
        confidence = -(accept * positive + (1.0 - accept) * negative)
    return LossSums(
        ce=jnp.sum(weights * ce),
        l1=jnp.sum(weights * distance),
        confidence=jnp.sum(weights * confidence),
        accept=jnp.sum(weights * accept),
    )


def combine(sums: LossSums, loss_weights: LossWeights, total_weight: jax.Array) -> jax.Array:
    """Returns the loss: the weighted sum of the three, divided by the batch's total position weight."""
    total = loss_weights.ce * sums.ce + loss_weights.l1 * sums.l1 + loss_weights.confidence * sums.confidence
    return total / jnp.maximum(total_weight, 1e-6)
