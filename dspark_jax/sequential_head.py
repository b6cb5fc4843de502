"""The sequential head: a light left-to-right correction of the parallel backbone's logits (DSpark, section 3).

The backbone's K base logits are independent of each other; a head adds a transition bias B_k that depends on the
tokens drafted before, at the price of one low-rank product per token:

  vanilla  B_k = W2 W1[x_{k-1}]                                        (Markov)
  gated    B_k = W2 (W1[x_{k-1}] * sigmoid(gate([h_k; W1[x_{k-1}]])))
  rnn      z = [s; W1[x_{k-1}]; h_k], one linear -> gate g, candidate c, output o;
           s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), B_k = W2 tanh(o), s_0 = 0
  none     B_k = 0: a purely parallel drafter (DFlash)

x_0 is the anchor. W1 has a row for every token of the target, W2 one for every token that can be drafted.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax.config import DrafterConfig


class SequentialHead(nn.Module):
    """W1, W2 and the head's own weights; `step` is one position, `teacher_forced` a whole block."""

    config: DrafterConfig
    layout: layers.Layout
    dtype: Any = jnp.float32

    def setup(self):
        """Declares the parameters."""
        c = self.config
        rank, width, kind = c.markov_rank, c.decoder.width, c.sequential_head
        if kind == "none":
            return
        self.w1 = self.param("w1", nn.initializers.normal(0.02), (c.decoder.vocab_size, rank), self.dtype)
        self.w2 = self.param("w2", nn.initializers.normal(0.02), (c.vocab_out, rank), self.dtype)
        if kind == "gated":
            self.gate = layers.Linear(rank, width + rank, "token_major", use_bias=True, dtype=self.dtype)
        elif kind == "rnn":
            self.joint = layers.Linear(3 * rank, 2 * rank + width, "token_major", use_bias=True, dtype=self.dtype)

    def weights(self) -> dict[str, jax.Array]:
        """Returns its weights under the names that `pallas_kernels.markov_sample` has for them."""
        kind = self.config.sequential_head
        if kind == "none":
            return {}
        weights = {"w1": self.w1, "w2": self.w2}
        if kind != "vanilla":
            linear = self.gate if kind == "gated" else self.joint
            weights |= {"weight": linear.weight, "bias": linear.bias}
        return weights

    def init_state(self, count: int) -> jax.Array:
        """Returns s_0 for `count` blocks, [count, R] (unused by the stateless heads)."""
        return jnp.zeros((count, max(self.config.markov_rank, 1)), self.dtype)

    def embed_previous(self, previous_ids: jax.Array) -> jax.Array | None:
        """Returns W1[x_{k-1}], [..., R], or None without a head."""
        return None if self.config.sequential_head == "none" else self.w1[previous_ids]

    def step(self, hidden: jax.Array, embedded: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes the low-rank code of one position's bias.

        Args:
          hidden: h_k, [n, D].
          embedded: W1[x_{k-1}], [n, R].
          state: s_{k-1}, [n, R].

        Returns:
          code [n, R] (the bias is `bias(code)`) and s_k [n, R].
        """
        kind = self.config.sequential_head
        if kind == "vanilla":
            return embedded, state
        if kind == "gated":
            return embedded * jax.nn.sigmoid(self.gate(jnp.concatenate([hidden, embedded], axis=-1))), state
        joint = self.joint(jnp.concatenate([state, embedded, hidden], axis=-1))
        gate, candidate, output = jnp.split(joint, 3, axis=-1)
        keep = jax.nn.sigmoid(gate)
        state = keep * state + (1 - keep) * jnp.tanh(candidate)
        return jnp.tanh(output), state

    def bias(self, code: jax.Array, only: jax.Array | None = None) -> jax.Array:
        """Returns the transition bias W2 code, [n, R] -> [n, V'], or its entries `only` [n, m] -> [n, m]."""
        if only is not None:
            return jnp.einsum("nr,nmr->nm", code, self.w2[only])
        x = layers.from_tokens(code, self.layout)
        return layers.to_tokens(layers.linear(self.w2, x, self.layout), self.layout)

    def teacher_forced(self, hidden: jax.Array, previous_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes the codes of whole blocks whose previous tokens are known (training).

        Args:
          hidden: [n, K, D].
          previous_ids: [n, K], the true tokens before each position (the first is the anchor).

        Returns:
          codes and W1[x_{k-1}], [n, K, R] each.
        """
        embedded = self.w1[previous_ids]
        state, codes = self.init_state(hidden.shape[0]), []
        for k in range(hidden.shape[1]):
            code, state = self.step(hidden[:, k], embedded[:, k], state)
            codes.append(code)
        return jnp.stack(codes, axis=1), embedded
