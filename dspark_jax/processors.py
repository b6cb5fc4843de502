"""Logits processors: repetition penalty, temperature, top-k, top-p, min-p; per row, in Hugging Face's order.

The same functions act on the target's logits and on the drafter's. What no row uses costs nothing (`lax.cond`). There
are no sorts, which take far too long over a vocabulary on a CPU. Top-k and top-p look at the largest few logits; where
that doesn't settle the threshold (a large k, a flat distribution) they find it by bisection over the bit patterns of
float32: a few dozen passes that only compare and sum. Both are exact.

Sources: temperature; top-k (Fan et al., 2018); top-p (Holtzman et al., 2020); min-p (Nguyen et al., 2024); repetition
penalty (Keskar et al., 2019, CTRL, section 4.1).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dspark_jax.records import Sampler
from pallas_kernels.verify.reference import Cut, cut_of, no_cut

_FEW = 128  # logits that top-k and top-p look at first


def make_sampler(
    temperature: ArrayLike,
    top_k: ArrayLike = 0,
    top_p: ArrayLike = 1.0,
    min_p: ArrayLike = 0.0,
    repetition_penalty: ArrayLike = 1.0,
) -> Sampler:
    """Returns the settings of B rows: temperature [B], the others [B] or one value for all rows."""
    temperature = jnp.asarray(temperature, jnp.float32)
    fill = lambda value, dtype: jnp.broadcast_to(jnp.asarray(value, dtype), temperature.shape)  # noqa: E731
    return Sampler(
        temperature=temperature,
        top_k=fill(top_k, jnp.int32),
        top_p=fill(top_p, jnp.float32),
        min_p=fill(min_p, jnp.float32),
        repetition_penalty=fill(repetition_penalty, jnp.float32),
    )


def process(logits: jax.Array, sampler: Sampler, seen: jax.Array | None = None) -> jax.Array:
    """Applies every processor; softmax of the result is the distribution that is sampled.

    Greedy rows only feel the repetition penalty: the others don't move the argmax.

    Args:
      logits: [B, ..., V].
      sampler: settings of the B rows.
      seen: bool, broadcasts against `logits`: tokens that the penalty is for; None leaves the penalty out.

    Returns:
      [B, ..., V] float32; -inf for dropped tokens, but never for all. NaN stays NaN.
    """
    logits = logits.astype(jnp.float32)
    if seen is not None:
        logits = _if_any(penalises(sampler), lambda x: penalise(x, seen, sampler.repetition_penalty), logits)
    return _if_any(sampler.temperature > 0, lambda x: _warp(x, sampler), logits)


def process_block(
    logits: jax.Array, sampler: Sampler, tokens: jax.Array, length: jax.Array, drafted: jax.Array
) -> jax.Array:
    """Applies every processor to a verified block: at row j the committed tokens and x_1..x_j have been seen.

    Args:
      logits: [B, T, V], the target's after the anchor and after each of T - 1 draft tokens.
      sampler: settings.
      tokens: [B, S] committed tokens, garbage beyond the length.
      length: [B].
      drafted: [B, T-1] draft tokens.

    Returns:
      [B, T, V] float32, as `process`.
    """
    return process(penalise_block(logits, sampler, tokens, length, drafted), sampler)


def penalise_block(
    logits: jax.Array, sampler: Sampler, tokens: jax.Array, length: jax.Array, drafted: jax.Array
) -> jax.Array:
    """Applies the repetition penalty alone to a verified block; arguments and result as `process_block`."""

    def penalised(logits):
        seen = [seen_tokens(tokens, length, sampler, logits.shape[-1])]
        for j in range(drafted.shape[1]):
            seen.append(mark(seen[-1], drafted[:, j]))
        return penalise(logits, jnp.stack(seen, axis=1), sampler.repetition_penalty)

    return _if_any(penalises(sampler), penalised, logits.astype(jnp.float32))


def cut(logits: jax.Array, sampler: Sampler) -> Cut:
    """Returns what top-k, top-p and min-p leave of each position, [B, T, V] -> [B, T]; free if no row uses them."""
    warps = (sampler.temperature > 0) & ((sampler.top_k > 0) | (sampler.top_p < 1.0) | (sampler.min_p > 0.0))
    everything = no_cut(*logits.shape[:2])
    return jax.lax.cond(jnp.any(warps), lambda x: cut_of(x, process(x, sampler)), lambda x: everything, logits)


def penalises(sampler: Sampler) -> jax.Array:
    """Which rows have a repetition penalty, [B] bool."""
    return sampler.repetition_penalty != 1.0


def beyond_temperature(sampler: Sampler) -> jax.Array:
    """Which rows need more than their temperature, [B] bool."""
    cut = (sampler.top_k > 0) | (sampler.top_p < 1.0) | (sampler.min_p > 0.0)
    return penalises(sampler) | ((sampler.temperature > 0) & cut)


def seen_tokens(tokens: jax.Array, length: jax.Array, sampler: Sampler, vocab_size: int) -> jax.Array:
    """Which tokens a row holds so far, prompt included: [B, S] tokens, [B] length -> [B, V] bool.

    All False, and free, if no row has a repetition penalty.
    """
    batch, slots = tokens.shape
    nothing = jnp.zeros((batch, vocab_size), bool)

    def scatter(seen):
        used = jnp.where(jnp.arange(slots) < length[:, None], tokens, vocab_size)  # out of range is dropped
        return seen.at[jnp.arange(batch)[:, None], used].set(True, mode="drop")

    return _if_any(penalises(sampler), scatter, nothing)


def mark(seen: jax.Array, token: jax.Array) -> jax.Array:
    """Adds one token per row: [B, V] bool, [B] -> [B, V]."""
    return seen | (jnp.arange(seen.shape[-1]) == token[:, None])


def penalise(logits: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """Divides positive logits of seen tokens by their row's penalty, multiplies negative ones: [B, ..., V] -> same."""
    by = _per_row(penalty, logits)
    return jnp.where(seen, jnp.where(logits < 0, logits * by, logits / by), logits)


def keep_top_k(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    """Drops what is below the k-th largest logit; ties with it stay.

    Args:
      logits: [B, ..., V].
      top_k: [B] int32; 0, or V and more, keep everything.
    """
    size = logits.shape[-1]
    goal = _per_row(jnp.where((top_k <= 0) | (top_k >= size), size, top_k), logits)[..., 0]
    image = _ordered_bits(logits)

    def probe(threshold):
        count = jnp.sum(image >= threshold[..., None], axis=-1)
        return count >= goal, count == goal  # exactly k: the set is settled, whatever else lies between

    lowest, highest = image.min(-1), image.max(-1)
    off, goal = jnp.broadcast_to(goal == size, lowest.shape), jnp.broadcast_to(goal, lowest.shape)
    largest = _largest(logits)
    few = ~off & (goal <= largest.shape[-1])
    settled = _pick(_ordered_bits(largest), jnp.minimum(goal, largest.shape[-1]) - 1)
    threshold = _bisect(probe, jnp.where(few, settled, lowest), highest + 1, settled=off | few)
    return jnp.where(image < threshold[..., None], -jnp.inf, logits)


def keep_top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keeps the smallest set of most likely tokens that holds probability p.

    A token stays while the mass before it is below p, in the order that Hugging Face's ascending sort gives: of equal
    tokens the one with the higher index comes first.

    Args:
      logits: [B, ..., V].
      top_p: [B] float32; 1 keeps everything.
    """
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    by_row = _per_row(top_p, logits)[..., 0]
    goal = by_row * weights.sum(-1)
    image = _ordered_bits(logits)
    mass_above = lambda threshold: jnp.sum(jnp.where(image > threshold[..., None], weights, 0.0), axis=-1)  # noqa: E731

    def probe(threshold):
        reached = mass_above(threshold) >= goal
        return reached, jnp.zeros_like(reached)

    lowest, highest = image.min(-1), image.max(-1)
    off = (by_row >= 1.0) | jnp.isnan(goal)
    largest = _largest(logits)
    mass = jnp.exp(largest - largest[..., :1])
    kept = jnp.cumsum(mass, axis=-1) - mass < goal[..., None]  # less than p before it
    few = ~off & ~kept[..., -1]
    settled = _pick(_ordered_bits(largest), jnp.maximum(jnp.sum(kept, axis=-1), 1) - 1)
    # The least likely logit that stays is the smallest with less than p above it: one beyond the last that has p.
    low = jnp.where(few, settled, lowest) - 1
    threshold = jnp.where(off, lowest, _bisect(probe, low, highest, settled=off | few) + 1)
    tie = image == threshold[..., None]
    ties = jnp.sum(tie, axis=-1)
    weight = jnp.max(jnp.where(tie, weights, 0.0), axis=-1)
    wanted = jnp.ceil((goal - mass_above(threshold)) / weight)
    wanted = jnp.where(off | (weight == 0), ties, jnp.clip(wanted, 1, ties)).astype(jnp.int32)
    tie = _if_any(wanted < ties, lambda tie: _last_of(tie, wanted), tie)
    return jnp.where((image > threshold[..., None]) | tie, logits, -jnp.inf)


def keep_min_p(logits: jax.Array, min_p: jax.Array) -> jax.Array:
    """Drops tokens less likely than `min_p` times the most likely one: [B, ..., V], [B] (0 keeps everything)."""
    ratio = jnp.exp(logits - logits.max(-1, keepdims=True))
    return jnp.where(ratio < _per_row(min_p, logits), -jnp.inf, logits)


def _warp(logits: jax.Array, sampler: Sampler) -> jax.Array:
    """Temperature, top-k, top-p, min-p of the sampled rows; greedy rows are left as they are."""
    sampled = sampler.temperature > 0
    logits = logits / _per_row(jnp.where(sampled, sampler.temperature, 1.0), logits)
    top_k = jnp.where(sampled, sampler.top_k, 0)
    top_p = jnp.where(sampled, sampler.top_p, 1.0)
    min_p = jnp.where(sampled, sampler.min_p, 0.0)
    active = (top_k > 0) & (top_k < logits.shape[-1])
    logits = _if_any(active, lambda x: keep_top_k(x, top_k), logits)
    logits = _if_any(top_p < 1.0, lambda x: keep_top_p(x, top_p), logits)
    return _if_any(min_p > 0.0, lambda x: keep_min_p(x, min_p), logits)


def _if_any(rows: jax.Array, function: Callable[[jax.Array], jax.Array], value: jax.Array) -> jax.Array:
    """Applies `function` if any row needs it."""
    return jax.lax.cond(jnp.any(rows), function, lambda x: x, value)


def _per_row(values: jax.Array, like: jax.Array) -> jax.Array:
    """[B] -> [B, 1, ..., 1], as many axes as `like`."""
    return values.reshape((-1,) + (1,) * (like.ndim - 1))


def _largest(logits: jax.Array) -> jax.Array:
    """Returns the largest few logits, descending: [..., V] -> [..., n]."""
    values, indices = jax.lax.top_k(logits, min(_FEW, logits.shape[-1]))
    return jnp.where(indices >= 0, values, -jnp.inf)  # always so, but without its indices XLA turns top_k into a sort


def _pick(array: jax.Array, index: jax.Array) -> jax.Array:
    """Takes one entry along the last axis: [..., V], [...] -> [...]."""
    return jnp.take_along_axis(array, index[..., None], axis=-1)[..., 0]


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Maps float32 to int32 so that the order stays: equal floats to equal integers, NaN above everything."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)  # -0 is 0
    return jnp.where(jnp.isnan(x), jnp.iinfo(jnp.int32).max - 1, jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


def _bisect(probe: Callable, low: jax.Array, high: jax.Array, settled: jax.Array) -> jax.Array:
    """Returns the last integer in [low, high) that a falling condition holds for.

    Args:
      probe: integers [...] -> (condition [...], True where this integer is as good as the last one [...]).
      low: [...] int32, the condition holds.
      high: [...] int32, it doesn't.
      settled: [...] bool, `low` is the answer already.
    """

    def body(carry):
        low, high, settled = carry
        middle = (low & high) + ((low ^ high) >> 1)  # the mean without overflow
        holds, enough = probe(middle)
        holds &= ~settled
        return (
            jnp.where(holds, middle, low),
            jnp.where(holds | settled, high, middle),
            settled | (holds & enough) | (middle == low),
        )

    return jax.lax.while_loop(lambda carry: ~jnp.all(carry[2]), body, (low, high, settled))[0]


def _last_of(mask: jax.Array, count: jax.Array) -> jax.Array:
    """Keeps the last `count` True entries along the last axis: [..., V], [...] -> [..., V]."""
    index = jnp.arange(mask.shape[-1], dtype=jnp.int32)

    def probe(start):
        left = jnp.sum(mask & (index >= start[..., None]), axis=-1)
        return left >= count, left == count

    low = jnp.zeros(mask.shape[:-1], jnp.int32)
    start = _bisect(probe, low, low + mask.shape[-1], settled=jnp.zeros(low.shape, bool))
    return mask & (index >= start[..., None])
