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
(`Proposal`); the last three are never spread out to [B, K, V].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels import sampling

TINY = 1e-37  # keeps divisions by a q or a sum that is zero for tokens nobody could have drawn


class Proposal(Protocol):
    """A drafted block and what it was drawn from; q_k = softmax(logits_k), zero wherever `ids` names no token."""

    @property
    def token_ids(self) -> jax.Array:
        """Drafted tokens, [B, K] int32."""
        ...

    @property
    def logits(self) -> jax.Array | None:
        """[B, K, V'] float32, -inf for what could not be drawn; None: q is one-hot."""
        ...

    @property
    def ids(self) -> jax.Array | None:
        """Tokens of the last axis of `logits`: None = all, [V'] ascending, or [B, K, V'] a list per position."""
        ...


class Cut(NamedTuple):
    """What top-k, top-p and min-p leave of each distribution: a place in the order of its logits.

    A token stays if its logit is above `value`, or equal to it with an id of at least `index`. In logits before the
    temperature, because two compilers may round a quotient differently, and a comparison must not.

    Attributes:
      value: [B, T] float32, -inf keeps everything.
      index: [B, T] int32.
    """

    value: jax.Array
    index: jax.Array


def cut_of(logits: jax.Array, processed: jax.Array) -> Cut:
    """Reads the cut off processed logits (-inf for what is dropped): the last token that stays. [B, T, V] -> [B, T]."""
    place = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    logits = logits.astype(jnp.float32)
    kept = ~jnp.isneginf(processed)
    value = jnp.where(kept, logits, jnp.inf).min(-1)
    return Cut(value, jnp.where(kept & (logits == value[..., None]), place, logits.shape[-1]).min(-1))


def no_cut(batch: int, positions: int) -> Cut:
    """Returns the cut that keeps everything."""
    return Cut(jnp.full((batch, positions), -jnp.inf), jnp.zeros((batch, positions), jnp.int32))


def verify(
    target_logits: jax.Array,
    draft: Proposal,
    verify_len: jax.Array,
    temperature: jax.Array,
    accept_uniforms: jax.Array,
    commit_uniforms: jax.Array,
    verifier: str = "token",
    cut: Cut | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The definition of the op; see `api.verify`."""
    usable = usable_positions(target_logits)
    accepted, added = verify_processed(
        warp(target_logits, temperature, cut),
        draft,
        jnp.minimum(verify_len, usable),
        temperature,
        accept_uniforms,
        commit_uniforms,
        verifier,
    )
    return accepted, jnp.where(accepted == usable, -1, added)


def usable_positions(logits: jax.Array) -> jax.Array:
    """Counts the leading positions whose logits are numbers, at least one of them finite: [B, T, V] -> [B] int32."""
    # A maximum alone would not do: on some devices it skips a NaN among numbers.
    return leading(jnp.isfinite(logits.max(axis=-1)) & ~jnp.isnan(logits).any(axis=-1))


def leading(good: jax.Array) -> jax.Array:
    """Counts the True entries before the first False one: [B, T] -> [B] int32."""
    return jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def warp(logits: jax.Array, temperature: jax.Array, cut: Cut | None = None) -> jax.Array:
    """Divides by the temperature (greedy rows stay) and drops what is below the cut: [B, T, V] -> float32."""
    by = jnp.where(temperature > 0, temperature, 1.0)[:, None, None]
    logits = logits.astype(jnp.float32)
    if cut is None:
        return logits / by
    place = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    dropped = is_dropped(logits, place, cut.value[..., None], cut.index[..., None])
    return jnp.where(dropped & (temperature > 0)[:, None, None], -jnp.inf, logits / by)


def is_dropped(logits: jax.Array, ids: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    """Which tokens lie below a cut (`Cut`); NaN never does. All arguments broadcast."""
    return (logits < value) | ((logits == value) & (ids < index))


def verify_processed(
    target_logits: jax.Array,
    draft: Proposal,
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
    width = target_logits.shape[1]
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
    log_p: jax.Array, draft: Proposal, verify_len: jax.Array, greedy: jax.Array, verifier: str
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
    log_p = log_p[:, :size]
    tokens = draft.token_ids[:, :size]
    p_token = token_probability(log_p, tokens)
    ratio = acceptance_ratio(p_token, drawn_probability(draft, size), tokens == sampling.argmax(log_p), greedy)
    return chances(ratio, lambda scale: residual_mass(log_p, draft, scale, p_token), verify_len, greedy, verifier)


def acceptance_ratio(p_token: jax.Array, q_token: jax.Array, is_best: jax.Array, greedy: jax.Array) -> jax.Array:
    """Returns p_k(x_k) / q_k(x_k); for greedy rows 1 where x_k is the argmax, else 0.

    A token that could not have been drawn (q = 0: outside of the vocabulary or of the candidates) is rejected.

    Args:
      p_token, q_token: [B, L] float32.
      is_best: [B, L] bool.
      greedy: [B] bool.
    """
    ratio = jnp.where(q_token > 0, p_token / jnp.maximum(q_token, TINY), 0.0)
    return jnp.where(greedy[:, None], is_best.astype(ratio.dtype), ratio)


def chances(
    ratio: jax.Array,
    residual: Callable[[jax.Array], jax.Array],
    verify_len: jax.Array,
    greedy: jax.Array,
    verifier: str,
) -> tuple[jax.Array, jax.Array]:
    """Turns ratios into the chances and scales of `acceptance`.

    Args:
      ratio: [B, L] from `acceptance_ratio`.
      residual: scale a_0..a_{L-1} [B, L] -> S_0..S_{L-1} [B, L]; only block verification calls it.
      verify_len: [B].
      greedy: [B] bool.
      verifier: "token" or "block".
    """
    size = ratio.shape[1]
    if verifier == "token":
        return jnp.minimum(ratio, 1.0), jnp.ones((len(greedy), size + 1))
    scale = [jnp.ones(greedy.shape)]
    for i in range(size):
        scale.append(jnp.minimum(scale[-1] * ratio[:, i], 1.0))
    scale = jnp.stack(scale, axis=1)  # a_0..a_L, [B, L+1]
    rest = jnp.where(greedy[:, None], scale[:, :size] * (1.0 - ratio), residual(scale[:, :size]))  # one-hot p and q
    below = 1.0 - scale[:, :size]
    inner = jnp.where(below > 0, rest / jnp.maximum(rest + below, TINY), 1.0)
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
    log_p: jax.Array, draft: Proposal, scale: jax.Array, accepted: jax.Array, verify_len: jax.Array, greedy: jax.Array
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
    here = at(log_p, accepted)  # [B, V]
    weights = jnp.exp(here)
    if size:
        scaled = weights * at(scale, accepted)[:, None]
        residual = minus_draft(scaled, draft, jnp.minimum(accepted, size - 1))
        # p = q up to rounding leaves nothing: such a rejection has probability zero, any token of p will do.
        rejected = (accepted < verify_len) & (residual.sum(-1) > 0)
        weights = jnp.where(rejected[:, None], residual, weights)
    best = jnp.arange(here.shape[-1]) == sampling.argmax(here)[:, None]
    return jnp.where(greedy[:, None], best.astype(weights.dtype), weights)


def token_probability(log_p: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns p_k(x_k), 0 for ids outside of the vocabulary: [B, L, V], [B, L] -> [B, L]."""
    size = log_p.shape[-1]
    inside = (tokens >= 0) & (tokens < size)
    return jnp.where(inside, jnp.exp(pick(log_p, jnp.clip(tokens, 0, size - 1))), 0.0)


def drawn_probability(draft: Proposal, size: int) -> jax.Array:
    """Returns q_k(x_k), 0 for tokens that q does not know, [B, size]."""
    tokens = draft.token_ids[:, :size]
    if draft.logits is None:
        return jnp.ones(tokens.shape, jnp.float32)
    logits = draft.logits[:, :size]
    if draft.ids is not None and draft.ids.ndim == 3:  # a list per position; padding is -inf and adds nothing
        return jnp.sum(jnp.where(draft.ids[:, :size] == tokens[..., None], jax.nn.softmax(logits, axis=-1), 0.0), -1)
    index, known = index_in(draft.ids, logits.shape[-1], tokens)
    return jnp.where(known, jnp.exp(pick(logits, index) - jax.nn.logsumexp(logits, axis=-1)), 0.0)


def residual_mass(log_p: jax.Array, draft: Proposal, scale: jax.Array, p_token: jax.Array) -> jax.Array:
    """Returns sum_x max(a p(x) - q(x), 0) of every position, [B, L].

    Args:
      log_p: [B, L, V].
      draft: the block.
      scale: a, [B, L].
      p_token: p_k(x_k), [B, L].
    """
    size = log_p.shape[1]
    if draft.logits is None:  # q = 1 on x_k: nothing of it is left
        return scale * (1.0 - p_token)
    if draft.ids is None:
        q = jax.nn.softmax(draft.logits[:, :size], axis=-1)
        return jnp.maximum(scale[..., None] * jnp.exp(log_p) - q, 0.0).sum(-1)
    if draft.ids.ndim == 1:
        p = jnp.exp(log_p[:, :, draft.ids])
    else:
        p = jnp.exp(jnp.take_along_axis(log_p, draft.ids[:, :size], axis=-1))
    return listed_residual_mass(p, draft.logits[:, :size], scale)


def listed_residual_mass(p: jax.Array, logits: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns sum_x max(a p(x) - q(x), 0) when q lives on a list C: outside of it the sum is a (1 - p(C)).

    Args:
      p: [B, L, m], the target's probabilities of the listed tokens.
      logits: [B, L, m], the drafter's.
      scale: a, [B, L].
    """
    p = jnp.where(jnp.isneginf(logits), 0.0, p)  # not in C; padding may repeat a candidate
    outside = jnp.maximum(1.0 - p.sum(-1), 0.0)
    return scale * outside + jnp.maximum(scale[..., None] * p - jax.nn.softmax(logits, axis=-1), 0.0).sum(-1)


def minus_draft(weights: jax.Array, draft: Proposal, place: jax.Array) -> jax.Array:
    """Returns max(weights - q, 0) with q of each row's position `place`, [B, V]."""
    rows = jnp.arange(len(place))
    if draft.logits is None:
        tokens = at(draft.token_ids, place)
        tokens = jnp.where(tokens < 0, weights.shape[-1], tokens)  # what is outside of the vocabulary takes nothing
        minus = weights.at[rows, tokens].add(-1.0, mode="drop")
    else:
        q = jax.nn.softmax(at(draft.logits, place), axis=-1)  # [B, V']
        if draft.ids is None:
            minus = weights - q
        elif draft.ids.ndim == 1:
            minus = weights.at[:, draft.ids].add(-q)
        else:
            minus = weights.at[rows[:, None], at(draft.ids, place)].add(-q)
    return jnp.maximum(minus, 0.0)


def at(array: jax.Array, place: jax.Array) -> jax.Array:
    """Takes one position of each row: [B, T, ...], [B] -> [B, ...]."""
    return array[jnp.arange(len(place)), place]


def pick(array: jax.Array, index: jax.Array) -> jax.Array:
    """Takes one entry along the last axis: [..., V], [...] -> [...]."""
    return jnp.take_along_axis(array, index[..., None], axis=-1)[..., 0]


def index_in(ids: jax.Array | None, size: int, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Looks tokens up in an ascending list of ids (None: 0..size-1): their places, and whether they are there."""
    if ids is None:
        return jnp.clip(tokens, 0, size - 1), (tokens >= 0) & (tokens < size)
    index = jnp.minimum(jnp.searchsorted(ids, tokens), size - 1)
    return index, ids[index] == tokens
