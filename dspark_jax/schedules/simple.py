"""Policies without a state: the whole block, a fixed threshold, a set of tokens that end a block, the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax.config import ConfigError
from dspark_jax.records import Draft
from dspark_jax.scheduler import Feedback, Policy, confidences, confident_prefix


def full() -> Full:
    """Verifies the whole block."""
    return Full()


def threshold(threshold: float) -> Threshold:
    """Verifies the longest prefix with c_k >= threshold.

    Raises:
      ConfigError: a threshold that is no probability.
    """
    if not 0.0 <= threshold <= 1.0:
        raise ConfigError(f"policy threshold = {threshold}: use a probability in 0..1")
    return Threshold(np.float32(threshold))


def conservative_tokens(token_ids: Sequence[int], policy: Policy | None = None) -> ConservativeTokens:
    """Ends every block after its first draft token of a given set, and leaves the rest to another policy.

    Args:
      token_ids: tokens after which the text is hard to foresee (line ends, openings of a quotation, digits).
      policy: decides within what remains; None verifies all of it.

    Raises:
      ConfigError: no tokens, or a negative one.
    """
    ids = sorted({int(token) for token in token_ids})
    if not ids or ids[0] < 0:
        raise ConfigError(f"policy conservative_tokens with token_ids = {list(token_ids)}: name one or more token ids")
    return ConservativeTokens(np.asarray(ids, np.int32), policy or Full())


def oracle() -> Oracle:
    """Verifies exactly what will be accepted; for analysis of what a policy could gain, never for sampling."""
    return Oracle()


@struct.dataclass
class Full(Policy):
    """l = K. Lossless: a constant."""

    name = "full"
    always_full = True

    def verify_length(self, state: Any, draft: Draft, active: jax.Array) -> jax.Array:
        """See `Policy.verify_length`."""
        del state, active
        return draft.length


@struct.dataclass
class Threshold(Policy):
    """Longest prefix with c_k >= threshold. Lossless: c_1..c_k, which decide about l >= k, read x_{<k} alone.

    Attributes:
      threshold: float32 in 0..1.
    """

    threshold: Any
    name = "threshold"

    def verify_length(self, state: Any, draft: Draft, active: jax.Array) -> jax.Array:
        """See `Policy.verify_length`."""
        del state, active
        return jnp.minimum(confident_prefix(confidences(self, draft), self.threshold), draft.length)


@struct.dataclass
class ConservativeTokens(Policy):
    """The block ends after its first token of a set; within it another policy decides.

    Lossless if that policy is: l >= k + 1 is decided by x_{<=k}.

    Attributes:
      token_ids: [n] int32.
      policy: the policy that decides within the shortened block.
    """

    token_ids: Any
    policy: Policy

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Both rules' names."""
        return "conservative_tokens" if self.policy.always_full else f"{self.policy.name}+conservative_tokens"

    @property
    def reads_target(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the policy inside."""
        return self.policy.reads_target

    @property
    def sees_acceptance(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the policy inside."""
        return self.policy.sees_acceptance

    @property
    def shares_budget(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the policy inside."""
        return self.policy.shares_budget

    def init_state(self, batch: int, block_size: int) -> Any:
        """Returns the inner policy's state."""
        return self.policy.init_state(batch, block_size)

    def verify_length(self, state: Any, draft: Draft, active: jax.Array) -> jax.Array:
        """See `Policy.verify_length`."""
        return self.policy.verify_length(state, self._shortened(draft), active)

    def update(self, state: Any, feedback: Feedback) -> Any:
        """Updates the inner policy, which never saw more than the shortened block."""
        return self.policy.update(state, dataclasses.replace(feedback, draft=self._shortened(feedback.draft)))

    def biased(self, reads_draft: bool) -> str:
        """As the policy inside, to which the length of the block, at least, now depends on draft tokens."""
        del reads_draft
        return self.policy.biased(True)

    def _shortened(self, draft: Draft) -> Draft:
        ends = jnp.any(draft.token_ids[:, :, None] == self.token_ids, axis=-1)  # [B, K]
        first = jnp.where(ends.any(1), jnp.argmax(ends, axis=1) + 1, ends.shape[1])
        return dataclasses.replace(draft, length=jnp.minimum(draft.length, first).astype(jnp.int32))


@struct.dataclass
class Oracle(Policy):
    """l = n: the cycle runs the target on the whole block first, and then again on what it accepted.

    Not lossless: a token that would be rejected is never asked about, so that what follows the accepted ones is drawn
    from p instead of the residual. Greedy text is the target's. The time of a cycle means nothing.
    """

    name = "oracle"
    sees_acceptance = True

    def verify_length(self, state: Any, draft: Draft, active: jax.Array) -> jax.Array:
        """Returns the whole block, which the cycle cuts."""
        del state, active
        return draft.length

    def biased(self, reads_draft: bool) -> str:
        """See `Policy.biased`."""
        del reads_draft
        return "it knows which draft tokens will be accepted and asks about no others"
