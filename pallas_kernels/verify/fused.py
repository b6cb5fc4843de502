"""Verification on top of tile statistics: what is left to do once every logit has been read.

Acceptance needs p and q of the drafted tokens, which are a few entries each. The added token is drawn by an inverse CDF
in two levels: the tiles' masses of the residual max(a p - q, 0) at the row's first rejected position, then that
residual inside of the tile that was hit. Where q is one-hot or lives on a list, the masses are p's, less what q takes
from the listed tokens; where q is spread over the whole vocabulary, that one position of p and q is read again. Block
verification also needs the residual's mass at every position, which takes another look at p and q if q is full.

Everything here is a few numbers per row, tile or candidate, left to XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import sampling
from pallas_kernels.verify import reference
from pallas_kernels.verify.reference import Proposal
from pallas_kernels.verify.tiles import RowStats

_LEAST = 1e-6  # a tile's residual below this share of its p is what rounding leaves of nothing


class Source(NamedTuple):
    """Access to single entries of the target's processed logits.

    Attributes:
      at: ids [B, T, m] -> logits of the first T positions [B, T, m] float32; with positions [B], ids [B, m] -> logits
        of that position of each row [B, m].
      row: positions [B] -> all logits of these positions [B, V] float32.
    """

    at: Callable[..., jax.Array]
    row: Callable[[jax.Array], jax.Array]


class FullDraft(NamedTuple):
    """A q that is spread over the whole vocabulary.

    Attributes:
      logits: [B, K, V].
      log_total: [B, K], their logsumexp.
    """

    logits: jax.Array
    log_total: jax.Array

    def q(self, place: jax.Array) -> jax.Array:
        """Returns q at one place of each row, [B] -> [B, V]."""
        return jnp.exp(reference.at(self.logits, place) - reference.at(self.log_total, place)[:, None])


def verify(
    stats: RowStats,
    source: Source,
    full: FullDraft | None,
    vocab: int,
    tile: int,
    draft: Proposal,
    verify_len: jax.Array,
    temperature: jax.Array,
    accept_uniforms: jax.Array,
    commit_uniforms: jax.Array,
    verifier: str,
) -> tuple[jax.Array, jax.Array]:
    """Accepts and draws from statistics of the rows; arguments and results as `api.verify`.

    Args:
      stats: of B * (L+1) rows of processed target logits.
      source: single entries of the same.
      full: the draft's logits with their statistics where they are full, else None.
      vocab: V.
      tile: entries per tile.
      draft: the block.
      verify_len: [B].
      temperature: [B].
      accept_uniforms: [B, L].
      commit_uniforms: [B, L+1].
      verifier: "token" or "block".
    """
    batch, width = commit_uniforms.shape
    size, greedy = width - 1, temperature <= 0
    by_row = jax.tree.map(lambda a: a.reshape(batch, width, *a.shape[1:]), stats)
    log_total = by_row.maximum + jnp.log(by_row.total)  # [B, L+1]
    usable = reference.leading(by_row.good)
    limit = jnp.minimum(verify_len, usable)

    tokens = draft.token_ids[:, :size]
    index, inside = reference.index_in(None, vocab, tokens)
    p_token = jnp.where(inside, jnp.exp(source.at(index[..., None])[..., 0] - log_total[:, :size]), 0.0)
    if full is None:
        q_token = reference.drawn_probability(draft, size)
    else:
        drawn = reference.pick(full.logits[:, :size], index) - full.log_total[:, :size]
        q_token = jnp.where(inside, jnp.exp(drawn), 0.0)
    ratio = reference.acceptance_ratio(p_token, q_token, tokens == by_row.best[:, :size], greedy)

    def residual(scale: jax.Array) -> jax.Array:
        if full is not None:
            return _full_residual_mass(source, full, scale, log_total)
        if draft.logits is None or draft.ids is None:
            return scale * (1.0 - p_token)
        ids = jnp.broadcast_to(draft.ids, draft.logits.shape)[:, :size]
        p = jnp.exp(source.at(ids) - log_total[:, :size, None])
        return reference.listed_residual_mass(p, draft.logits[:, :size], scale)

    chance, scale = reference.chances(ratio, residual, limit, greedy, verifier)
    accepted = reference.accepted_length(chance, limit, accept_uniforms, verifier)
    here = jax.tree.map(lambda a: reference.at(a, accepted), by_row)
    uniforms, scale = reference.at(commit_uniforms, accepted), reference.at(scale, accepted)
    added = _draw(here, source, draft, full, accepted, scale, accepted < limit, uniforms, vocab, tile)
    added = jnp.where(greedy, here.best, added)
    return accepted, jnp.where(accepted == usable, -1, added)


def _full_residual_mass(source: Source, full: FullDraft, scale: jax.Array, log_total: jax.Array) -> jax.Array:
    """sum_x max(a p(x) - q(x), 0) of every position, one at a time, so that no [B, L, V] array of p exists. [B, L]."""
    masses = []
    for i in range(scale.shape[1]):
        place = jnp.full(scale.shape[:1], i)
        p = jnp.exp(source.row(place) - log_total[:, i, None])
        masses.append(jnp.maximum(scale[:, i, None] * p - full.q(place), 0.0).sum(-1))
    return jnp.stack(masses, axis=1) if masses else scale


def _draw(
    here: RowStats,
    source: Source,
    draft: Proposal,
    full: FullDraft | None,
    position: jax.Array,
    scale: jax.Array,
    rejected: jax.Array,
    uniforms: jax.Array,
    vocab: int,
    tile: int,
) -> jax.Array:
    """Draws each row's added token, [B], from the residual if it is `rejected` [B], else from p.

    Args:
      here: statistics of each row's `position`.
      source, draft, full: as above.
      position: [B], accepted tokens.
      scale: [B], a.
      rejected: [B] bool.
      uniforms: [B].
      vocab, tile: V, entries per tile.
    """
    batch, count = here.mass.shape
    rows, place = jnp.arange(batch)[:, None], jnp.minimum(position, draft.token_ids.shape[1] - 1)
    log_total, scale = (here.maximum + jnp.log(here.total))[:, None], scale[:, None]
    ids, q = _listed(draft, place, vocab) if full is None else (None, full.q(place))
    if ids is None:
        residual = jnp.maximum(scale * jnp.exp(source.row(position) - log_total) - q, 0.0)
        left = jnp.pad(residual, ((0, 0), (0, count * tile - vocab))).reshape(batch, count, tile).sum(-1)
    else:
        mass = scale * here.mass
        taken = jnp.minimum(scale * jnp.exp(source.at(ids, position) - log_total), q)
        left = mass.at[rows, ids // tile].add(-taken)
        left = jnp.where(left > _LEAST * mass, left, 0.0)
    from_residual = rejected & (left.sum(-1) > 0)  # p = q up to rounding: such a rejection has probability zero
    masses = jnp.where(from_residual[:, None], left, here.mass)
    upper = jnp.cumsum(masses, axis=-1)
    goal = uniforms[:, None] * upper[:, -1:]
    chosen = sampling.first_above(upper, goal, masses > 0)
    before = jnp.where(chosen > 0, reference.pick(upper, jnp.maximum(chosen - 1, 0)), 0.0)
    share = (goal[:, 0] - before) / jnp.maximum(reference.pick(masses, chosen), reference.TINY)

    within = chosen[:, None] * tile + jnp.arange(tile)  # ids of the tile, [B, tile]
    clipped = jnp.minimum(within, vocab - 1)
    p = jnp.where(within < vocab, jnp.exp(source.at(clipped, position) - log_total), 0.0)
    if ids is None:
        q_here = jnp.take_along_axis(q, clipped, axis=1)
    else:
        offset = jnp.where(ids // tile == chosen[:, None], ids % tile, tile)  # other tiles' are dropped
        q_here = jnp.zeros((batch, tile)).at[rows, offset].add(q, mode="drop")
    weights = jnp.where(from_residual[:, None], jnp.maximum(scale * p - q_here, 0.0), p)
    weights = jnp.where(weights.sum(-1, keepdims=True) > 0, weights, p)
    sums = jnp.cumsum(weights, axis=-1)
    offset = sampling.first_above(sums, share[:, None] * sums[:, -1:], weights > 0)
    return jnp.minimum(chosen * tile + offset, vocab - 1).astype(jnp.int32)


def _listed(draft: Proposal, place: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
    """Tokens that q lives on at one place of each row, [B, m], and their q."""
    if draft.logits is None or draft.ids is None:
        ids = reference.at(draft.token_ids, place)[:, None]
        q = jnp.ones(ids.shape, jnp.float32)
    else:
        q = jax.nn.softmax(reference.at(draft.logits, place), axis=-1)
        ids = jnp.broadcast_to(draft.ids, q.shape) if draft.ids.ndim == 1 else reference.at(draft.ids, place)
    index, inside = reference.index_in(None, vocab, ids)
    return index, jnp.where(inside, q, 0.0)
