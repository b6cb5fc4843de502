"""Verification: which draft tokens are kept, and which token the target adds. Arrays in, arrays out, no model.

Token-wise rejection sampling (Leviathan et al., 2023; Chen et al., 2023): keep x_k with probability
min(1, p_k(x_k) / q_k(x_k)), stop at the first rejection, and draw one more token from norm(max(p - q, 0)) there, or
from the target's next distribution when everything was kept. Whatever q is, the committed tokens are distributed as the
target's. Greedy rows (temperature 0) keep x_k while it is the target's argmax, and add the argmax.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from dspark_jax import sampling
from dspark_jax.records import Draft


def verify(
    target_logits: jax.Array,
    draft: Draft,
    verify_len: jax.Array,
    temperature: jax.Array,
    accept_uniforms: jax.Array,
    commit_uniforms: jax.Array,
    draft_vocab: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Accepts a prefix of each row's draft block and draws the token after it.

    Args:
      target_logits: [B, L+1, V]; row j is the target's distribution for draft token j (0-based), row `verify_len` the
        one after the block.
      draft: a block of at least L tokens; `logits` None means a deterministic proposal (q is one-hot).
      verify_len: [B] int32 in 0..L, how many draft tokens count.
      temperature: [B], 0 = greedy; the draft tokens were drawn at the same temperature.
      accept_uniforms: [B, L] in [0, 1).
      commit_uniforms: [B, L+1] in [0, 1), for the added token at each place it could have.
      draft_vocab: [V'] target ids of a reduced draft vocabulary's entries, or None.

    Returns:
      accepted [B] int32 in 0..verify_len, and the added token [B] int32.
    """
    batch, width, _ = target_logits.shape
    size = width - 1
    chex.assert_shape(verify_len, (batch,))
    tokens = draft.token_ids[:, :size]
    in_block = jnp.arange(size) < verify_len[:, None]

    def accepted_length(keep: jax.Array) -> jax.Array:
        return jnp.sum(jnp.cumprod((keep & in_block).astype(jnp.int32), axis=1), axis=1)

    def greedy(_):
        best = sampling.argmax(target_logits)  # [B, L+1]
        accepted = accepted_length(tokens == best[:, :size])
        return accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]

    def sampled(_):
        log_p = jax.nn.log_softmax(sampling.scaled_logits(target_logits, temperature), axis=-1)
        p_token = jnp.exp(jnp.take_along_axis(log_p[:, :size], tokens[..., None], axis=-1)[..., 0])
        if draft.logits is None:
            q, q_token = None, jnp.ones_like(p_token)
        else:
            q = jax.nn.softmax(sampling.scaled_logits(draft.logits[:, :size], temperature), axis=-1)
            index = tokens if draft_vocab is None else _index_in(draft_vocab, tokens)
            q_token = jnp.take_along_axis(q, index[..., None], axis=-1)[..., 0]
        accepted = accepted_length(accept_uniforms * q_token < p_token)
        # Only the first rejected position is looked at again.
        at = lambda array: jnp.take_along_axis(array, accepted[:, None, None], axis=1)[:, 0]  # noqa: E731
        weights = jnp.exp(at(log_p))  # [B, V]
        rejected = accepted < verify_len
        if size:
            place = jnp.minimum(accepted, size - 1)
            if q is None:
                minus = jax.nn.one_hot(jnp.take_along_axis(tokens, place[:, None], 1)[:, 0], weights.shape[-1])
            else:
                minus = jnp.take_along_axis(q, place[:, None, None], axis=1)[:, 0]
                if draft_vocab is not None:
                    minus = jnp.zeros_like(weights).at[:, draft_vocab].set(minus)
            residual = jnp.maximum(weights - minus, 0.0)
            # p = q up to rounding leaves nothing: such a rejection has probability zero, any token of p will do.
            rejected &= residual.sum(-1) > 0
            weights = jnp.where(rejected[:, None], residual, weights)
        uniforms = jnp.take_along_axis(commit_uniforms, accepted[:, None], axis=1)[:, 0]
        drawn = sampling.sample_weights(weights, uniforms)
        greedy_accepted, greedy_next = greedy(None)
        is_greedy = temperature <= 0
        return jnp.where(is_greedy, greedy_accepted, accepted), jnp.where(is_greedy, greedy_next, drawn)

    return jax.lax.cond(jnp.any(temperature > 0), sampled, greedy, None)


def _index_in(draft_vocab: jax.Array, tokens: jax.Array) -> jax.Array:
    """Position of each token in an ascending list of ids (tokens are known to be members)."""
    return jnp.minimum(jnp.searchsorted(draft_vocab, tokens), draft_vocab.shape[0] - 1)
