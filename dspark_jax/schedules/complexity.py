"""Context complexity: the threshold of each row rises where its text is hard to foresee.

t = base + coefficient * complexity, and complexity in 0..1 is the weighted mean of three measures of a row's past:

  entropy    of the target's distributions at the last `window` committed positions, over log V
  attention  spread of the attention of the last three committed tokens that the target read: entropy of its last
             layer's weights over the log of how many tokens they see, mean over heads
  misfit     1 - running acceptance rate: rate += pace * (n / l - rate) after each cycle with l > 0, starting at 1

What has not been seen yet counts 0. Only the past decides about t, and c_1..c_k about l >= k: lossless.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax.config import ConfigError
from dspark_jax.records import Draft
from dspark_jax.scheduler import Feedback, Policy, confidences, confident_prefix

ATTENTION_TOKENS = 3


def context_complexity(
    base: float = 0.3,
    coefficient: float = 0.5,
    weights: tuple[float, float, float] = (1.0, 1.0, 1.0),
    pace: float = 0.1,
    window: int = 8,
) -> ContextComplexity:
    """Makes the policy.

    Args:
      base: threshold of the simplest context.
      coefficient: how much the most complex one adds; negative values verify more where the text is harder.
      weights: of entropy, attention and misfit.
      pace: of the running acceptance rate.
      window: distributions whose entropy counts.

    Raises:
      ConfigError: a constant that can't work.
    """
    name = "policy context_complexity with"
    if not 0 <= base <= 1:
        raise ConfigError(f"{name} base = {base}: use a probability in 0..1")
    if not 0 <= base + coefficient <= 1:
        raise ConfigError(f"{name} coefficient = {coefficient}: base + coefficient must lie in 0..1")
    if len(weights) != 3 or not all(0 <= w < float("inf") for w in weights) or sum(weights) <= 0:
        raise ConfigError(f"{name} weights = {weights}: use three numbers of 0 or more, not all 0")
    if not 0 < pace <= 1:
        raise ConfigError(f"{name} pace = {pace}: use a share in (0, 1]")
    if window < 1:
        raise ConfigError(f"{name} window = {window}: use 1 or more")
    shares = np.asarray(weights, np.float32) / np.float32(sum(weights))
    return ContextComplexity(np.float32(base), np.float32(coefficient), shares, np.float32(pace), window)


@struct.dataclass
class ContextComplexity(Policy):
    """t = base + coefficient * complexity; the constants of `context_complexity`.

    Attributes:
      base, coefficient, pace: float32.
      weights: [3] float32, their sum is 1.
      window: static, it is a size.
    """

    base: Any
    coefficient: Any
    weights: Any
    pace: Any
    window: int = struct.field(pytree_node=False, default=8)
    name = "context_complexity"
    reads_target = True

    def init_state(self, batch: int, block_size: int) -> ComplexityState:
        """See `Policy.init_state`."""
        del block_size
        return ComplexityState(
            entropy=jnp.zeros((batch, self.window)),
            attention=jnp.zeros((batch, ATTENTION_TOKENS)),
            acceptance=jnp.ones((batch,)),
            seen=jnp.zeros((batch,), jnp.int32),
        )

    def complexity(self, state: ComplexityState) -> jax.Array:
        """Returns each row's complexity, [B] in 0..1."""
        entropy, attention = _recent_mean(state.entropy, state.seen), _recent_mean(state.attention, state.seen)
        return jnp.stack([entropy, attention, 1 - state.acceptance], axis=1) @ self.weights

    def verify_length(self, state: ComplexityState, draft: Draft, active: jax.Array) -> jax.Array:
        """See `Policy.verify_length`."""
        del active
        threshold = self.base + self.coefficient * self.complexity(state)
        return jnp.minimum(confident_prefix(confidences(self, draft), threshold), draft.length)

    def update(self, state: ComplexityState, feedback: Feedback) -> ComplexityState:
        """See `Policy.update`."""
        output = feedback.output
        assert output.entropy is not None
        assert output.attention_spread is not None
        read = jnp.where(feedback.active, feedback.accepted + 1, 0)
        asked = feedback.active & (feedback.verify_len > 0)
        share = feedback.accepted / jnp.maximum(feedback.verify_len, 1)
        return ComplexityState(
            entropy=_push(state.entropy, output.entropy, read),
            attention=_push(state.attention, output.attention_spread, read),
            acceptance=state.acceptance + jnp.where(asked, self.pace * (share - state.acceptance), 0.0),
            seen=state.seen + read,
        )


@struct.dataclass
class ComplexityState:
    """What the rule remembers of each row; the newest entry is the last one.

    Attributes:
      entropy: [B, window] float32.
      attention: [B, 3] float32.
      acceptance: [B] float32, running acceptance rate.
      seen: [B] int32, committed tokens that the target has read in cycles.
    """

    entropy: jax.Array
    attention: jax.Array
    acceptance: jax.Array
    seen: jax.Array


def _push(buffer: jax.Array, new: jax.Array, count: jax.Array) -> jax.Array:
    """Appends the first count [B] of new [B, T] to buffers [B, W], keeping the last W."""
    index = count[:, None] + jnp.arange(buffer.shape[1])
    return jnp.take_along_axis(jnp.concatenate([buffer, new], axis=1), index, axis=1)


def _recent_mean(buffer: jax.Array, seen: jax.Array) -> jax.Array:
    """Mean over those entries of [B, W] that have been seen, 0 where there are none."""
    size = buffer.shape[1]
    filled = jnp.minimum(seen, size)[:, None]
    recent = jnp.where(jnp.arange(size) >= size - filled, buffer, 0.0)
    return recent.sum(1) / jnp.maximum(filled[:, 0], 1)
