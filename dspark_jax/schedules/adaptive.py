"""Adaptive threshold: threshold and block length of each row follow what became of its last blocks.

The outcome of a cycle of a row with verify length l and accepted draft length n:

  rejection   n < l: some verified token was refused
  acceptance  n = l >= 1: all of them were kept
  failure     n = 0 < l: nothing was kept (also a rejection)
  neither     l = 0: nothing was asked, nothing changes

Only the past decides about threshold and length, and c_1..c_k about l >= k: lossless.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax.config import ConfigError
from dspark_jax.records import Draft
from dspark_jax.scheduler import Feedback, Policy, confidences, confident_prefix


@struct.dataclass
class AdaptiveThreshold(Policy):
    """The constants of the rule; defaults are the method's where it names one.

    Attributes:
      start: first threshold.
      low, high: bounds of the threshold.
      down, up: factors of the threshold.
      rejections: rejections in a row after which it is multiplied by `down` (the count then starts again).
      acceptances: acceptances in a row after which it is multiplied by `up` (likewise).
      base_length: first block length. A rejection halves it (rounding down), an acceptance adds 1.
      shortest, longest: bounds of the block length. K bounds all three lengths.
      failures: failures in a row after which the row decodes conservatively.
      conservative_length, conservative_cycles: decoding conservatively means blocks of at most this length under the
        threshold `high`, for this many cycles. Nothing else is learned meanwhile. The way back: the block length
        starts again at `shortest`, all counts at 0, the threshold where it was.
    """

    start: Any = 0.9
    low: Any = 0.3
    high: Any = 0.98
    down: Any = 0.95
    up: Any = 1.05
    rejections: Any = 3
    acceptances: Any = 5
    base_length: Any = 5
    shortest: Any = 3
    longest: Any = 10
    failures: Any = 3
    conservative_length: Any = 1
    conservative_cycles: Any = 8
    name = "adaptive_threshold"

    def init_state(self, batch: int, block_size: int) -> AdaptiveState:
        """See `Policy.init_state`."""
        count = lambda: jnp.zeros((batch,), jnp.int32)  # noqa: E731
        return AdaptiveState(
            threshold=jnp.full((batch,), self.start, jnp.float32),
            length=jnp.full((batch,), min(int(self.base_length), block_size), jnp.int32),
            rejections=count(),
            acceptances=count(),
            failures=count(),
            conservative=count(),
        )

    def verify_length(self, state: AdaptiveState, draft: Draft, active: jax.Array) -> jax.Array:
        """See `Policy.verify_length`."""
        del active
        careful = state.conservative > 0
        threshold = jnp.where(careful, self.high, state.threshold)
        limit = jnp.where(careful, self.conservative_length, state.length)
        confident = confident_prefix(confidences(self, draft), threshold)
        return jnp.minimum(jnp.minimum(confident, limit), draft.length).astype(jnp.int32)

    def update(self, state: AdaptiveState, feedback: Feedback) -> AdaptiveState:
        """See `Policy.update`."""
        size = feedback.draft.token_ids.shape[1]
        n, l = feedback.accepted, feedback.verify_len
        rejected, accepted, failed, asked = n < l, (n == l) & (l > 0), (n == 0) & (l > 0), l > 0
        streak = lambda count, event: jnp.where(event, count + 1, jnp.where(asked, 0, count))  # noqa: E731
        rejections, acceptances = streak(state.rejections, rejected), streak(state.acceptances, accepted)
        failures = streak(state.failures, failed)
        lower, higher, give_up = (
            rejections >= self.rejections,
            acceptances >= self.acceptances,
            failures >= self.failures,
        )
        factor = jnp.where(lower, self.down, jnp.where(higher, self.up, 1.0))
        shortest, longest = jnp.minimum(self.shortest, size), jnp.minimum(self.longest, size)
        halved, grown = jnp.maximum(state.length // 2, shortest), jnp.minimum(state.length + 1, longest)
        learned = AdaptiveState(
            threshold=jnp.clip(state.threshold * factor, self.low, self.high),
            length=jnp.where(rejected, halved, jnp.where(accepted, grown, state.length)),
            rejections=jnp.where(lower, 0, rejections),
            acceptances=jnp.where(higher, 0, acceptances),
            failures=jnp.where(give_up, 0, failures),
            conservative=jnp.where(give_up, self.conservative_cycles, 0),
        )
        left = state.conservative - 1
        back = left == 0
        zero = jnp.zeros_like(left)
        waited = dataclasses.replace(
            state,
            length=jnp.where(back, shortest, state.length),
            rejections=jnp.where(back, zero, state.rejections),
            acceptances=jnp.where(back, zero, state.acceptances),
            failures=jnp.where(back, zero, state.failures),
            conservative=left,
        )
        choose = lambda old, new, wait: jnp.where(  # noqa: E731
            feedback.active, jnp.where(state.conservative > 0, wait, new), old
        ).astype(old.dtype)
        return jax.tree.map(choose, state, learned, waited)


@struct.dataclass
class AdaptiveState:
    """What the rule remembers of each row.

    Attributes:
      threshold: [B] float32.
      length: [B] int32, block length.
      rejections, acceptances, failures: [B] int32, how many in a row.
      conservative: [B] int32, cycles left of decoding conservatively; 0 = not so.
    """

    threshold: jax.Array
    length: jax.Array
    rejections: jax.Array
    acceptances: jax.Array
    failures: jax.Array
    conservative: jax.Array


_INTEGERS = (
    *("rejections", "acceptances", "base_length", "shortest", "longest"),
    *("failures", "conservative_length", "conservative_cycles"),
)


def adaptive_threshold(**constants: float) -> AdaptiveThreshold:
    """Makes the policy.

    Args:
      **constants: fields of `AdaptiveThreshold` that differ from their defaults.

    Raises:
      ConfigError: an unknown constant, or one that can't work.
    """
    known = {field.name: field.default for field in dataclasses.fields(AdaptiveThreshold)}
    unknown = sorted(set(constants) - set(known))
    if unknown:
        raise ConfigError(f"policy adaptive_threshold: unknown constant {unknown[0]}; use {', '.join(known)}")
    values = {**known, **constants}

    def require(condition: bool, name: str, fix: str) -> None:
        if not condition:
            raise ConfigError(f"policy adaptive_threshold with {name} = {values[name]}: {fix}")

    require(0 <= values["low"] <= 1, "low", "use a probability in 0..1")
    require(values["low"] <= values["high"] <= 1, "high", f"use a probability, at least low = {values['low']}")
    require(values["low"] <= values["start"] <= values["high"], "start", "it lies between low and high")
    require(0 < values["down"] <= 1, "down", "use a factor in (0, 1]")
    require(1 <= values["up"] < float("inf"), "up", "use a factor of 1 or more")
    for name in _INTEGERS:
        least = 0 if name == "conservative_length" else 1
        require(values[name] == int(values[name]) >= least, name, f"use a whole number, {least} or more")
    require(values["shortest"] <= values["base_length"] <= values["longest"], "base_length", "shortest..longest")
    kinds = {name: np.int32 if name in _INTEGERS else np.float32 for name in known}
    return AdaptiveThreshold(**{name: kinds[name](value) for name, value in values.items()})
