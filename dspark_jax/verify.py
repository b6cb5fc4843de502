"""Verification inside a cycle: the target's logits and a draft in, how many tokens are kept and which one is added out.

The rules (rejection sampling token by token, block verification) are in `pallas_kernels.verify.reference`, arrays in,
arrays out; the functions that say how likely each outcome is are used from there. On accelerators a fused kernel does
the same without several passes over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dspark_jax import processors
from dspark_jax.records import Draft, Sampler
from pallas_kernels.lm_head_verify.api import lm_head_verify
from pallas_kernels.verify import api, reference


def verify_block(
    logits: jax.Array,
    draft: Draft,
    verify_len: jax.Array,
    sampler: Sampler,
    tokens: jax.Array,
    length: jax.Array,
    accept_uniforms: jax.Array,
    commit_uniforms: jax.Array,
    verifier: str = "token",
) -> tuple[jax.Array, jax.Array]:
    """Applies the processors, accepts a prefix of each row's draft block and draws the token after it.

    Args:
      logits: [B, L+1, V], the target's after the anchor and after each of L draft tokens.
      draft: a block of at least L tokens.
      verify_len: [B] int32 in 0..L, how many draft tokens count.
      sampler: settings of the rows.
      tokens: [B, S] committed tokens, garbage beyond the length.
      length: [B].
      accept_uniforms: [B, L] in [0, 1).
      commit_uniforms: [B, L+1] in [0, 1).
      verifier: "token" or "block".

    Returns:
      accepted [B] int32, and the added token [B] int32; -1: there is none, the target's logits for it are no numbers.
    """
    drafted = draft.token_ids[:, : logits.shape[1] - 1]
    if api.implementation(logits, draft) == "reference":
        usable = reference.usable_positions(logits)
        accepted, added = reference.verify_processed(
            processors.process_block(logits, sampler, tokens, length, drafted),
            draft,
            jnp.minimum(verify_len, usable),
            sampler.temperature,
            accept_uniforms,
            commit_uniforms,
            verifier,
        )
        return accepted, jnp.where(accepted == usable, -1, added)
    logits = processors.penalise_block(logits, sampler, tokens, length, drafted)
    cut = processors.cut(logits, sampler)
    temperature = sampler.temperature
    return api.verify(logits, draft, verify_len, temperature, accept_uniforms, commit_uniforms, verifier, cut)


def verify_hidden(
    hidden: jax.Array,
    lm_head: tuple[jax.Array, float],
    logits_of: Callable[[jax.Array], jax.Array],
    draft: Draft,
    verify_len: jax.Array,
    sampler: Sampler,
    tokens: jax.Array,
    length: jax.Array,
    accept_uniforms: jax.Array,
    commit_uniforms: jax.Array,
    verifier: str = "token",
) -> tuple[jax.Array, jax.Array]:
    """`verify_block` from what the LM head reads, so that logits need not exist in memory.

    Batches with a row that uses more than a temperature compute them: where its processors cut is known from all
    logits only.

    Args:
      hidden: [B, L+1, D].
      lm_head: its weights [V, D], and the cap of the logits (0 = none).
      logits_of: hidden -> logits [B, L+1, V], for those batches.
      draft, verify_len, sampler, tokens, length, accept_uniforms, commit_uniforms, verifier: as of `verify_block`.

    Returns:
      as `verify_block`.
    """
    head, softcap = lm_head
    uniforms = (accept_uniforms, commit_uniforms)

    def plain(hidden):
        return verify_block(logits_of(hidden), draft, verify_len, sampler, tokens, length, *uniforms, verifier=verifier)

    def fused(hidden):
        return lm_head_verify(hidden, head, draft, verify_len, sampler.temperature, *uniforms, verifier, softcap)

    return jax.lax.cond(jnp.any(processors.beyond_temperature(sampler)), plain, fused, hidden)
