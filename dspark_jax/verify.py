"""Verification: which draft tokens are kept, and which token the target adds. Arrays in, arrays out, no model.

Two verifiers; with either, the committed tokens are distributed as the target's, whatever q is.

  token   rejection sampling, token by token (Leviathan et al., 2023; Chen et al., 2023): keep x_k with probability
          min(1, p_k(x_k) / q_k(x_k)), stop at the first rejection, add a token from norm(max(p - q, 0)) there.
  block   block verification (Sun et al., 2025, "Block Verification Accelerates Speculative Decoding", Algorithm 2): one
          decision about the whole block, which keeps at least as many tokens on average. With a_0 = 1,
          a_i = min(a_{i-1} p_i(x_i) / q_i(x_i), 1), keep the longest prefix i whose own uniform is at most
            h_i = S_i / (S_i + 1 - a_i),  S_i = sum_x max(a_i p_{i+1}(x) - q_{i+1}(x), 0),   i < l,      h_l = a_l,
          and add a token from norm(max(a_i p_{i+1} - q_{i+1}, 0)).

After a block that was kept whole the token is drawn from p. A verify length l < K is fine as long as the decision to
go beyond token k reads no token after it. Greedy rows keep x_k while it is the target's argmax, and add the argmax.

q may be a full distribution, live on a reduced vocabulary or on a list of candidates per position, or be one-hot
(`records.Draft`); the last three are never spread out to [B, K, V].
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from dspark_jax import sampling
from dspark_jax.records import Draft

_TINY = 1e-37  # keeps divisions by a q or a sum that is zero for tokens nobody could have drawn


def verify(
    target_logits: jax.Array,
    draft: Draft,
    verify_len: jax.Array,
    temperature: jax.Array,
    accept_uniforms: jax.Array,
    commit_uniforms: jax.Array,
    verifier: str = "token",
) -> tuple[jax.Array, jax.Array]:
    """Accepts a prefix of each row's draft block and draws the token after it.

    Args:
      target_logits: [B, L+1, V], processed; row j is the target's distribution for draft token j (0-based), row
        `verify_len` the one after the block.
      draft: a block of at least L tokens.
      verify_len: [B] int32 in 0..L, how many draft tokens count.
      temperature: [B], only to tell the greedy rows (0).
      accept_uniforms: [B, L] in [0, 1).
      commit_uniforms: [B, L+1] in [0, 1), for the added token at each place it could have.
      verifier: "token" or "block".

    Returns:
      accepted [B] int32 in 0..verify_len, and the added token [B] int32.
    """
    batch, width, _ = target_logits.shape
    chex.assert_shape(verify_len, (batch,))
    greedy = temperature <= 0

    def all_greedy(_):
        best = sampling.argmax(target_logits)  # [B, L+1]
        matches = (draft.token_ids[:, : width - 1] == best[:, :-1]).astype(jnp.float32)
        accepted = accepted_length(matches, verify_len, accept_uniforms, "token")
        return accepted, jnp.take_along_axis(best, accepted[:, None], axis=1)[:, 0]

    def mixed(_):
        log_p = jax.nn.log_softmax(target_logits, axis=-1)
        chance, scale = acceptance(log_p, draft, verify_len, greedy, verifier)
        accepted = accepted_length(chance, verify_len, accept_uniforms, verifier)
        weights = added_weights(log_p, draft, scale, accepted, verify_len, greedy)
        uniforms = jnp.take_along_axis(commit_uniforms, accepted[:, None], axis=1)[:, 0]
        return accepted, sampling.sample_weights(weights, uniforms)

    return jax.lax.cond(jnp.all(greedy), all_greedy, mixed, None)


def acceptance(
    log_p: jax.Array, draft: Draft, verify_len: jax.Array, greedy: jax.Array, verifier: str
) -> tuple[jax.Array, jax.Array]:
    """Computes the probabilities that acceptance is decided by.

    Args:
      log_p: [B, L+1, V], normalised.
      draft: a block of at least L tokens.
      verify_len: [B].
      greedy: [B] bool.
      verifier: "token" or "block".

    Returns:
      chance [B, L]: of keeping x_k given that x_{<k} were kept (token), or h_k (block); see `accepted_length`.
      scale [B, L+1]: what p is multiplied by in the residual after 0..L kept tokens (all 1 for token).
    """
    size = log_p.shape[1] - 1
    tokens = draft.token_ids[:, :size]
    log_p = log_p[:, :size]
    p_token = jnp.exp(_pick(log_p, tokens))
    ratio = p_token / jnp.maximum(_drawn_probability(draft, size), _TINY)
    ratio = jnp.where(greedy[:, None], (tokens == sampling.argmax(log_p)).astype(ratio.dtype), ratio)
    if verifier == "token":
        return jnp.minimum(ratio, 1.0), jnp.ones((len(greedy), size + 1))
    scale = [jnp.ones(greedy.shape)]
    for i in range(size):
        scale.append(jnp.minimum(scale[-1] * ratio[:, i], 1.0))
    scale = jnp.stack(scale, axis=1)  # a_0..a_L, [B, L+1]
    rest = _residual_mass(log_p, draft, scale[:, :size], p_token)  # S_0..S_{L-1}
    rest = jnp.where(greedy[:, None], scale[:, :size] * (1.0 - ratio), rest)  # the same with a one-hot p and q
    below = 1.0 - scale[:, :size]
    inner = jnp.where(below > 0, rest / jnp.maximum(rest + below, _TINY), 1.0)
    inner = jnp.pad(inner, ((0, 0), (0, 1)))
    last = jnp.arange(size + 1) == verify_len[:, None]
    return jnp.where(last, scale, inner)[:, 1:], scale


def accepted_length(chance: jax.Array, verify_len: jax.Array, uniforms: jax.Array, verifier: str) -> jax.Array:
    """Decides how many draft tokens are kept.

    Args:
      chance: [B, L] from `acceptance`.
      verify_len: [B].
      uniforms: [B, L] in [0, 1).
      verifier: "token" keeps up to the first failure, "block" up to the last success.

    Returns:
      [B] int32 in 0..verify_len.
    """
    place = jnp.arange(chance.shape[1])
    success = (uniforms < chance) & (place < verify_len[:, None])
    if verifier == "token":
        return jnp.sum(jnp.cumprod(success.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    return jnp.max(jnp.where(success, place + 1, 0), axis=1, initial=0).astype(jnp.int32)


def expected_length(chance: jax.Array, verify_len: jax.Array, verifier: str) -> jax.Array:
    """Computes how many draft tokens are kept on average over the uniforms of `accepted_length`.

    Args:
      chance: [B, L] from `acceptance`.
      verify_len: [B].
      verifier: "token" or "block".

    Returns:
      [B] float32.
    """
    place = jnp.arange(chance.shape[1])
    chance = jnp.where(place < verify_len[:, None], chance, 0.0)
    if verifier == "token":
        return jnp.sum(jnp.cumprod(chance, axis=1), axis=1)
    failed_from = jnp.cumprod(jnp.flip(1.0 - chance, axis=1), axis=1)  # of the last 1, 2, ... L decisions
    return jnp.sum(1.0 - failed_from, axis=1)  # the sum over i of the chance that i tokens or more are kept


def added_weights(
    log_p: jax.Array, draft: Draft, scale: jax.Array, accepted: jax.Array, verify_len: jax.Array, greedy: jax.Array
) -> jax.Array:
    """Computes the weights that the added token is drawn with: the residual, or p after a block kept whole.

    Args:
      log_p: [B, L+1, V], normalised.
      draft: a block of at least L tokens.
      scale: [B, L+1] from `acceptance`.
      accepted: [B], tokens kept.
      verify_len: [B].
      greedy: [B] bool.

    Returns:
      [B, V] non-negative, not normalised.
    """
    size = log_p.shape[1] - 1
    here = _at(log_p, accepted)  # [B, V]
    weights = jnp.exp(here)
    if size:
        scaled = weights * _at(scale, accepted)[:, None]
        residual = _minus_draft(scaled, draft, jnp.minimum(accepted, size - 1))
        # p = q up to rounding leaves nothing: such a rejection has probability zero, any token of p will do.
        rejected = (accepted < verify_len) & (residual.sum(-1) > 0)
        weights = jnp.where(rejected[:, None], residual, weights)
    best = jnp.arange(here.shape[-1]) == sampling.argmax(here)[:, None]
    return jnp.where(greedy[:, None], best.astype(weights.dtype), weights)


def _drawn_probability(draft: Draft, size: int) -> jax.Array:
    """Returns q_k(x_k), [B, size]."""
    tokens = draft.token_ids[:, :size]
    if draft.logits is None:
        return jnp.ones(tokens.shape, jnp.float32)
    logits = draft.logits[:, :size]
    if draft.ids is not None and draft.ids.ndim == 3:  # a list per position; padding is -inf and adds nothing
        return jnp.sum(jnp.where(draft.ids[:, :size] == tokens[..., None], jax.nn.softmax(logits, axis=-1), 0.0), -1)
    index = tokens if draft.ids is None else _index_in(draft.ids, tokens)
    return jnp.exp(_pick(logits, index) - jax.nn.logsumexp(logits, axis=-1))


def _residual_mass(log_p: jax.Array, draft: Draft, scale: jax.Array, p_token: jax.Array) -> jax.Array:
    """Returns sum_x max(a p(x) - q(x), 0) of every position, [B, L].

    Outside of the tokens C that q lives on, the sum is a (1 - p(C)); only C is looked at.

    Args:
      log_p: [B, L, V].
      draft: the block.
      scale: a, [B, L].
      p_token: p_k(x_k), [B, L].
    """
    size = log_p.shape[1]
    if draft.logits is None:  # C = {x_k}, q = 1: nothing of it is left
        return scale * (1.0 - p_token)
    q = jax.nn.softmax(draft.logits[:, :size], axis=-1)
    a = scale[..., None]
    if draft.ids is None:
        return jnp.maximum(a * jnp.exp(log_p) - q, 0.0).sum(-1)
    if draft.ids.ndim == 1:
        p = jnp.exp(log_p[:, :, draft.ids])
    else:
        p = jnp.exp(jnp.take_along_axis(log_p, draft.ids[:, :size], axis=-1))
    p = jnp.where(jnp.isneginf(draft.logits[:, :size]), 0.0, p)  # not in C; padding may repeat a candidate
    outside = jnp.maximum(1.0 - p.sum(-1), 0.0)
    return scale * outside + jnp.maximum(a * p - q, 0.0).sum(-1)


def _minus_draft(weights: jax.Array, draft: Draft, place: jax.Array) -> jax.Array:
    """Returns max(weights - q, 0) with q of each row's position `place`, [B, V]."""
    rows = jnp.arange(len(place))
    if draft.logits is None:
        minus = weights.at[rows, _at(draft.token_ids, place)].add(-1.0)
    else:
        q = jax.nn.softmax(_at(draft.logits, place), axis=-1)  # [B, V']
        if draft.ids is None:
            minus = weights - q
        elif draft.ids.ndim == 1:
            minus = weights.at[:, draft.ids].add(-q)
        else:
            minus = weights.at[rows[:, None], _at(draft.ids, place)].add(-q)
    return jnp.maximum(minus, 0.0)


def _at(array: jax.Array, place: jax.Array) -> jax.Array:
    """Takes one position of each row: [B, T, ...], [B] -> [B, ...]."""
    return array[jnp.arange(len(place)), place]


def _pick(array: jax.Array, index: jax.Array) -> jax.Array:
    """Takes one entry along the last axis: [..., V], [...] -> [...]."""
    return jnp.take_along_axis(array, index[..., None], axis=-1)[..., 0]


def _index_in(ids: jax.Array, tokens: jax.Array) -> jax.Array:
    """Position of each token in an ascending list of ids (tokens are known to be members)."""
    return jnp.minimum(jnp.searchsorted(ids, tokens), ids.shape[0] - 1)
