"""Policies: how many draft tokens of each row the target verifies.

A policy is a pure function of what is known before verification. It is lossless when the decision to verify token k
does not depend on token k itself or on later ones: the threshold on c_k is, because c_k reads the tokens before k only.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.config import ConfigError
from dspark_jax.records import Draft


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy and its constants (hashable, so that a jitted loop is compiled once per policy).

    Attributes:
      name: "full" verifies the whole block; "threshold" its longest prefix with c_k >= threshold.
      threshold: confidence threshold in [0, 1].
    """

    name: str = "full"
    threshold: float = 0.0

    def __post_init__(self):
        if self.name not in ("full", "threshold"):
            raise ConfigError(f"policy {self.name!r}: use full or threshold")
        if not 0.0 <= self.threshold <= 1.0:
            raise ConfigError(f"policy threshold = {self.threshold}: use a probability in 0..1")


def verify_length(policy: Policy, draft: Draft) -> jax.Array:
    """Returns the verify length l of each row, [B] int32 in 0..draft.length."""
    if policy.name == "full":
        return draft.length
    if draft.confidence_logits is None:
        raise ConfigError("policy 'threshold' needs a drafter with a confidence head; use policy 'full'")
    confident = jax.nn.sigmoid(draft.confidence_logits) >= policy.threshold
    prefix = jnp.sum(jnp.cumprod(confident.astype(jnp.int32), axis=1), axis=1)
    return jnp.minimum(prefix, draft.length).astype(jnp.int32)
