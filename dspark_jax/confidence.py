"""The confidence head: the chance that draft token k is accepted, given that those before it were.

c_k = sigmoid(w [h_k; W1[x_{k-1}]] + b), or of h_k alone. It is trained towards c*_k = 1 - ||q_k - p_k||_1 / 2, which is
the acceptance rate of rejection sampling at position k (Leviathan et al., 2023, Corollary 3.6).
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax.config import DrafterConfig


class ConfidenceHead(nn.Module):
    """One linear map to a logit."""

    config: DrafterConfig
    dtype: Any = jnp.float32

    def setup(self):
        """Declares the parameters."""
        c = self.config
        size = c.decoder.width + (c.markov_rank if c.confidence_reads_markov else 0)
        self.proj = layers.Linear(1, size, "token_major", use_bias=True, dtype=self.dtype)

    def __call__(self, hidden: jax.Array, embedded: jax.Array | None) -> jax.Array:
        """Returns confidence logits.

        Args:
          hidden: h_k, [n, D].
          embedded: W1[x_{k-1}], [n, R]; ignored by a head that doesn't read it.

        Returns:
          [n] float32.
        """
        inputs = hidden
        if self.config.confidence_reads_markov:
            assert embedded is not None
            inputs = jnp.concatenate([hidden, embedded], axis=-1)
        return self.proj(inputs)[..., 0].astype(jnp.float32)
