"""The interface of policies: how many draft tokens of each row the target verifies.

A policy is a frozen record of constants (pytree leaves: another threshold or table compiles nothing) with pure
functions of one signature. Its state is explicit, lives in `decode.DecodeState.schedule` and holds the past only.

A policy is lossless when the decision to verify token k depends neither on token k itself nor on anything that token k
influences, which is the tokens and the confidences after it: rejection sampling (`verify`) is exact for every token
that it is asked about, provided that the question was not chosen by its answer. The policies are in `schedules/`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.config import ConfigError
from dspark_jax.records import Draft, TargetOutput


@struct.dataclass
class Feedback:
    """What a cycle has shown when it is over.

    Attributes:
      draft: the block.
      verify_len: [B] int32, verify length l.
      accepted: [B] int32, accepted draft length n in 0..l, before any cut by a stop token or the budget.
      active: [B] bool, False for rows that were done before the cycle: their other entries mean nothing.
      output: the target's output for the anchor and the draft tokens (the first n + 1 of each row are committed text).
    """

    draft: Draft
    verify_len: jax.Array
    accepted: jax.Array
    active: jax.Array
    output: TargetOutput


class Policy:
    """What the decoding cycle asks of a policy; the defaults are those of a policy without a state.

    Implementations are `flax.struct` dataclasses, made by the functions of `schedules`, which check the constants.

    Attributes:
      name: for tables, configs and messages.
      always_full: verifies every proposed token; one verify width is then enough.
      reads_target: wants `TargetOutput.entropy` and `attention_spread`; nobody else pays for them.
      sees_acceptance: the cycle cuts the verify length to what the target accepts (the oracle).
      shares_budget: the rows of a batch compete, so that a row's verify lengths depend on the rows beside it.
    """

    name = "policy"
    always_full = False
    reads_target = False
    sees_acceptance = False
    shares_budget = False

    def init_state(self, batch: int, block_size: int) -> Any:
        """Returns the state of `batch` rows before the first cycle with blocks of `block_size` tokens.

        Raises:
          ConfigError: the policy can't work for this many rows and tokens.
        """
        del batch, block_size
        return ()

    def verify_length(self, state: Any, draft: Draft, active: jax.Array) -> jax.Array:
        """Decides how many draft tokens are verified.

        Args:
          state: the policy's state.
          draft: the block.
          active: [B] bool; the other rows are done, verify nothing and must not influence the active ones.

        Returns:
          [B] int32 in 0..draft.length; entries of rows that are not active are ignored.
        """
        raise NotImplementedError

    def update(self, state: Any, feedback: Feedback) -> Any:
        """Returns the state after a cycle. A row that is not active keeps its own."""
        del feedback
        return state

    def biased(self, reads_draft: bool) -> str:
        """Says why sampling with this policy would not follow the target's distribution; "" if it is lossless.

        Args:
          reads_draft: do confidences depend on draft tokens (`drafters.base.Drafter.confidence_reads_draft`)?
        """
        del reads_draft
        return ""


def confidences(policy: Policy, draft: Draft) -> jax.Array:
    """Returns c, [B, K] float32.

    Raises:
      ConfigError: the drafter has no confidence head.
    """
    if draft.confidence_logits is None:
        raise ConfigError(f"policy '{policy.name}' needs a drafter with a confidence head; use policy 'full'")
    return jax.nn.sigmoid(draft.confidence_logits.astype(jnp.float32))


def confident_prefix(confidence: jax.Array, threshold: jax.Array) -> jax.Array:
    """Returns the length [B] int32 of each row's longest prefix with c_k >= threshold (a scalar or [B])."""
    confident = confidence >= jnp.reshape(threshold, (-1, 1))
    return jnp.sum(jnp.cumprod(confident.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def normalized_entropy(logits: jax.Array) -> jax.Array:
    """Returns the entropy of softmax(logits) over that of the uniform distribution: [..., V] -> [...] in 0..1."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    entropy = -jnp.sum(jnp.exp(log_p) * jnp.maximum(log_p, -1e4), axis=-1)  # a token masked out (-inf) adds 0, not NaN
    return entropy / jnp.log(float(logits.shape[-1]))
