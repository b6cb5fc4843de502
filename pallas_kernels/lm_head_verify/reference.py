"""The definition of the op in plain jax: logits of every position, then `verify`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.precision import product_precision
from pallas_kernels.verify import reference
from pallas_kernels.verify.reference import Proposal


def logits_of(hidden: jax.Array, head: jax.Array, softcap: float) -> jax.Array:
    """Returns the target's logits in float32: [..., D], [V, D] -> [..., V], capped if `softcap` is above 0."""
    logits = jnp.einsum(
        "...d,vd->...v", hidden, head, preferred_element_type=jnp.float32, precision=product_precision(head.dtype)
    )
    return cap(logits, softcap)


def cap(logits: jax.Array, softcap: float) -> jax.Array:
    """Returns softcap tanh(logits / softcap), or the logits if `softcap` is 0."""
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


def verify(
    hidden: jax.Array,
    head: jax.Array,
    draft: Proposal,
    verify_len: jax.Array,
    temperature: jax.Array,
    accept_uniforms: jax.Array,
    commit_uniforms: jax.Array,
    verifier: str = "token",
    softcap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """See `api.lm_head_verify`."""
    logits = logits_of(hidden, head, softcap)
    return reference.verify(logits, draft, verify_len, temperature, accept_uniforms, commit_uniforms, verifier)
