"""The checks of `eval.exactness`: is what speculative decoding says what the target would have said?

Each check runs the jitted loop itself, through `dspark_jax.generate`, and compares with something that knows no
drafter: the target's own probabilities, autoregressive decoding, or a fresh forward pass over the committed tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from dspark_jax import generation, kv_cache, processors, sampling
from dspark_jax.generation import LoadedDrafter
from dspark_jax.loading import Target
from dspark_jax.records import Sampler
from dspark_jax.scheduler import Policy

_LEAST_EXPECTED = 5.0  # cells of a chi-square test with less are pooled (Cochran, 1954)
_SAMPLER_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclasses.dataclass(frozen=True)
class Method:
    """A way of decoding that has to be exact.

    Attributes:
      name: for the table.
      drafter: what proposes.
      policy: verify-length policy; None verifies whole blocks.
      verifier: "token" or "block".
      widths: ladder of verify widths; None takes `decode.default_widths`.
      fuse_lm_head: verify without logits in memory (`generation.prepare`).
    """

    name: str
    drafter: LoadedDrafter
    policy: Policy | None = None
    verifier: str = "token"
    widths: tuple[int, ...] | None = None
    fuse_lm_head: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        return {
            "drafter": self.drafter,
            "policy": self.policy,
            "verifier": self.verifier,
            "widths": self.widths,
            "fuse_lm_head": self.fuse_lm_head,
        }


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
      name: what was checked.
      method: on which way of decoding.
      samples: how many draws, tokens or rows it looked at.
      statistic: chi-square, or how many tokens differ, or the largest difference.
      p_value: of the statistic under the target's distribution, None where nothing is random.
      passed: the verdict; p-values are judged by `judge`, for all checks together.
      detail: degrees of freedom, or where the first difference is.
    """

    name: str
    method: str
    samples: int
    statistic: float
    p_value: float | None
    passed: bool
    detail: str = ""


def judge(checks: Sequence[Check], alpha: float = 0.01) -> list[Check]:
    """Gives a verdict on every p-value, by Holm's correction for the number of them (Holm, 1979).

    Args:
      checks: the checks.
      alpha: probability that any of them fails although all is exact.
    """
    tested = sorted((check for check in checks if check.p_value is not None), key=lambda check: check.p_value or 0.0)
    failed: set[int] = set()
    for rank, check in enumerate(tested):
        if (check.p_value or 0.0) >= alpha / (len(tested) - rank):
            break
        failed.add(id(check))
    return [
        check if check.p_value is None else dataclasses.replace(check, passed=check.passed and id(check) not in failed)
        for check in checks
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class PairDistribution:
    """The target's distribution of the next two tokens after a prompt, as far as it is spelled out.

    Attributes:
      first_ids: [m] the likeliest first tokens.
      first: [V] distribution of the first token.
      second: [m, V] distribution of the second one after each of `first_ids`.
    """

    first_ids: np.ndarray
    first: np.ndarray
    second: np.ndarray


def pair_distribution(target: Target, prompt: Sequence[int], sampler: dict[str, float], most: int) -> PairDistribution:
    """Computes the target's distribution of two tokens by two forward passes without a cache.

    Args:
      target: the target.
      prompt: token ids.
      sampler: fields of `records.Sampler`, by name.
      most: m, how many first tokens to follow.
    """
    (first,) = next_distribution(target, [list(prompt)], sampler)
    first_ids = np.argsort(-first, kind="stable")[:most]
    # As many rows whatever the sampler keeps: one compiled program for all.
    second = next_distribution(target, [[*prompt, int(token)] for token in first_ids], sampler)
    followed = min(len(first_ids), int(np.count_nonzero(first)))
    return PairDistribution(first_ids[:followed], first, second[:followed])


def next_distribution(target: Target, rows: Sequence[Sequence[int]], sampler: dict[str, float]) -> np.ndarray:
    """Returns the processed distribution of the token after each row, [B, V] float64; rows are of one length."""
    ids = jnp.asarray(rows, jnp.int32)
    batch, _ = ids.shape
    settings = processors.make_sampler(
        jnp.full((batch,), sampler["temperature"]), **{k: v for k, v in sampler.items() if k != "temperature"}
    )
    cache = kv_cache.init_cache(target.config, batch, 1, target.dtype)
    logits, log_p = _next(target.step(), target.params, ids, cache, settings)
    if sampler["temperature"] == 0:
        return np.eye(logits.shape[-1])[np.asarray(logits).argmax(-1)]
    weights = np.exp(np.asarray(log_p, np.float64))
    return weights / weights.sum(-1, keepdims=True)


@partial(jax.jit, static_argnames="step")
def _next(step: Any, params: Any, ids: jax.Array, cache: Any, settings: Sampler) -> tuple[jax.Array, jax.Array]:
    """Returns the processed logits after each row and their log-softmax, [B, V]."""
    logits = step(params, ids, cache).logits[:, -1]
    seen = processors.seen_tokens(ids, jnp.full((len(ids),), ids.shape[1]), settings, logits.shape[-1])
    logits = processors.process(logits, settings, seen)
    return logits, jax.nn.log_softmax(logits, axis=-1)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> tuple[float, int, float]:
    """Tests counts against expected counts; cells with few expected are pooled.

    Args:
      observed: [n] counts.
      expected: [n] expected counts, of the same sum.

    Returns:
      the statistic, its degrees of freedom, and the p-value (0 if something impossible was seen).
    """
    if np.any(observed[expected <= 0] > 0):
        return float("inf"), max(len(expected) - 1, 1), 0.0
    order = np.argsort(-expected)
    observed, expected = observed[order], expected[order]
    large = int(np.count_nonzero(expected >= _LEAST_EXPECTED))
    while large > 1 and 0 < expected[large:].sum() < _LEAST_EXPECTED:
        large -= 1  # the pool needs some more
    if expected[large:].sum() > 0:
        observed, expected = (np.append(a[:large], a[large:].sum()) for a in (observed, expected))
    else:
        observed, expected = observed[:large], expected[:large]
    if len(expected) < 2:
        return 0.0, 0, 1.0
    statistic = float(np.sum((observed - expected) ** 2 / expected))
    return statistic, len(expected) - 1, float(scipy.stats.chi2.sf(statistic, len(expected) - 1))


def sampled_pairs(
    target: Target,
    prompt: Sequence[int],
    method: Method,
    samplers: Sequence[dict[str, float]],
    samples: int,
    batch: int,
    seed: int,
    distributions: Sequence[PairDistribution],
) -> list[Check]:
    """Compares pairs of tokens drawn by the loop with the target's distribution, for each sampler.

    Rows of all samplers stand side by side in every batch, so mixed batches are what is tested.

    Args:
      target: the target.
      prompt: token ids; every row continues it.
      method: what is tested.
      samplers: settings, by name.
      samples: pairs per sampler.
      batch: rows of a batch, a multiple of the number of samplers.
      seed: seed of the rows' random streams.
      distributions: `pair_distribution` of each sampler.
    """
    kinds, size = len(samplers), len(distributions[0].first)
    pairs: list[list[np.ndarray]] = [[] for _ in samplers]
    fields = {name: [samplers[row % kinds][name] for row in range(batch)] for name in _SAMPLER_FIELDS}
    spare = max(generation.PREFILL_CHUNK, method.drafter.drafter.block_size + 1)
    session = generation.prepare(
        target,
        [list(prompt)] * batch,
        max_new_tokens=2,
        cache_slots=len(prompt) + 2 + spare,
        stop_ids=(),
        **fields,
        **method.options,
    )
    for start in range(0, samples * kinds, batch):  # the prompt is read once, every batch has streams of its own
        keys = sampling.row_keys(seed, jnp.arange(start, start + batch))
        state = jax.tree.map(jnp.copy, session.state)
        state = session.run(state, 2, dataclasses.replace(session.settings, keys=keys))
        tokens = np.asarray(state.tokens)[:, len(prompt) : len(prompt) + 2]
        for kind in range(kinds):
            pairs[kind].append(tokens[kind::kinds])
    checks = []
    for sampler, drawn, expected in zip(samplers, pairs, distributions):
        drawn = np.concatenate(drawn)[:samples]
        statistic, freedom, p_value = chi_square(*pair_counts(drawn, expected, size))
        name = f"two tokens, {describe_sampler(sampler)}"
        checks.append(Check(name, method.name, len(drawn), statistic, p_value, True, f"{freedom} degrees of freedom"))
    return checks


def pair_counts(drawn: np.ndarray, expected: PairDistribution, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns observed and expected counts of all cells: followed pairs, and the other first tokens."""
    place = np.full((vocab_size,), -1)
    place[expected.first_ids] = np.arange(len(expected.first_ids))
    row = place[drawn[:, 0]]
    followed = row >= 0
    observed = np.zeros(expected.second.shape)
    np.add.at(observed, (row[followed], drawn[followed, 1]), 1)
    other = np.bincount(drawn[~followed, 0], minlength=vocab_size).astype(float)
    rest = expected.first.copy()
    rest[expected.first_ids] = 0.0
    chances = expected.first[expected.first_ids][:, None] * expected.second
    return np.append(observed, other), np.append(chances, rest) * len(drawn)


def describe_sampler(sampler: dict[str, float]) -> str:
    """Names a sampler's settings, those that are off left out."""
    off = {"temperature": -1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    return " ".join(f"{name}={value:g}" for name, value in sampler.items() if value != off[name])


def greedy_identical(
    target: Target,
    prompts: Sequence[Sequence[int]],
    method: Method,
    batch: int,
    new_tokens: int,
    baseline: Sequence[Sequence[int]],
    margin: float,
) -> Check:
    """Compares greedy text with autoregressive text, token for token.

    Where they part, the target's two likeliest tokens are compared: a difference is a failure unless their logits are
    closer than `margin` (rounding decides there; 0 in float32 forgives nothing).

    Args:
      target: the target.
      prompts: token ids.
      method: what is tested.
      batch: rows decoded together.
      new_tokens: budget.
      baseline: the autoregressive continuations.
      margin: of logits.
    """
    rows: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        piece = [list(p) for p in prompts[start : start + batch]]
        filled = piece + [piece[0]] * (batch - len(piece))  # one compiled shape
        made = generation.generate(
            target, filled, max_new_tokens=new_tokens, cache_slots=cache_slots(prompts, new_tokens), **method.options
        )
        rows += [row.token_ids for row in made.rows[: len(piece)]]
    margins = []
    for prompt, said, expected in zip(prompts, rows, baseline):
        if said != list(expected):
            same = next((i for i, (a, b) in enumerate(zip(said, expected)) if a != b), min(len(said), len(expected)))
            margins.append(top_two_margin(target, [*prompt, *expected[:same]]))
    detail = "identical"
    if margins:
        detail = "margins of the top two logits where texts part: " + ", ".join(f"{m:.2g}" for m in sorted(margins))
    return Check(
        f"greedy = autoregressive, batch {batch}",
        method.name,
        sum(map(len, rows)),
        float(len(margins)),
        None,
        all(m < margin for m in margins),
        detail,
    )


def top_two_margin(target: Target, ids: Sequence[int]) -> float:
    """Returns the difference of the two largest logits after a text."""
    cache = kv_cache.init_cache(target.config, 1, 1, target.dtype)
    greedy = processors.make_sampler(jnp.zeros((1,)))
    logits, _ = _next(target.step(), target.params, jnp.asarray([ids], jnp.int32), cache, greedy)
    top = jax.lax.top_k(logits[0], 2)[0]
    return float(top[0] - top[1])


def cache_slots(prompts: Sequence[Sequence[int]], new_tokens: int) -> int:
    """Returns one cache size for all prompts, so that every call runs the same compiled loop."""
    return -(-(max(map(len, prompts)) + new_tokens + 64) // 128) * 128


def batch_invariant(target: Target, prompts: Sequence[Sequence[int]], method: Method, new_tokens: int) -> Check:
    """Compares rows decoded alone with the same rows in one batch, in reverse order and with different budgets.

    Greedy and sampled rows take turns. Policies that share a budget between rows can't be compared like this.
    """
    slots = cache_slots(prompts, new_tokens)
    order = list(range(len(prompts)))[::-1]
    temperature = [float(i % 2) for i in range(len(prompts))]
    budgets = [new_tokens - i % 3 for i in range(len(prompts))]
    common = {"cache_slots": slots, **method.options}
    together = generation.generate(
        target,
        [list(prompts[i]) for i in order],
        rows=order,
        temperature=[temperature[i] for i in order],
        max_new_tokens=[budgets[i] for i in order],
        **common,
    ).rows
    different = 0
    for i, row in zip(order, together):
        (alone,) = generation.generate(
            target,
            [list(prompts[i])],
            rows=[i],
            temperature=temperature[i],
            max_new_tokens=[budgets[i]],
            **common,
        ).rows
        different += alone.token_ids != row.token_ids
    detail = f"{different} rows differ" if different else "identical"
    return Check(
        f"alone = in a batch of {len(order)}", method.name, len(order), float(different), None, not different, detail
    )


def cache_equivalent(
    target: Target, prompts: Sequence[Sequence[int]], method: Method, new_tokens: int, tolerance: float
) -> Check:
    """Compares the next logits through the loop's cache with those of a fresh pass over the committed tokens.

    Args:
      target: the target.
      prompts: token ids, one row each.
      method: what is tested.
      new_tokens: budget.
      tolerance: largest difference allowed, as a share of the largest logit.
    """
    session = generation.prepare(
        target, [list(p) for p in prompts], max_new_tokens=new_tokens, stop_ids=(), **method.options
    )
    state = session.run(session.state, session.state.accepted.shape[1])
    anchor = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    step = jax.jit(target.step())
    used = step(target.params, anchor, state.cache).logits[:, 0]
    fresh = step(target.params, state.tokens, kv_cache.init_cache(target.config, len(prompts), 1, target.dtype)).logits
    fresh = jnp.take_along_axis(fresh, state.length[:, None, None] - 1, axis=1)[:, 0]
    worst = float(jnp.max(jnp.abs(used - fresh)) / jnp.max(jnp.abs(fresh)))
    return Check(
        "cache = fresh pass",
        method.name,
        int(state.length.sum()),
        worst,
        None,
        worst <= tolerance,
        "largest difference over largest logit",
    )
