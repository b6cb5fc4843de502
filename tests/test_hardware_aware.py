"""Hardware-aware policies against plain loops written from the rule, and the worked example of bias, exactly."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import Toy, draft_of, independent, text_distribution

from dspark_jax import schedules, sps
from dspark_jax.config import ConfigError
from dspark_jax.scheduler import Feedback
from dspark_jax.schedules import hardware as ha

ROWS, SIZE = 4, 5


def table(values) -> sps.SpsTable:
    return sps.SpsTable(tuple(range(1, len(values) + 1)), tuple(values), "here", "toy", "abc")


def jagged(rng, count: int) -> np.ndarray:
    """Steps per second that fall on the whole and jump up here and there; multiples of 1/64, exact in float32."""
    fall, noise = rng.choice([0.02, 0.05, 0.2]), rng.choice([0.05, 0.3, 0.6])
    return np.maximum(np.round(64 * (4 / (1 + fall * np.arange(count)) + noise * rng.uniform(-1, 1, count))), 1) / 64


def quarters(rng, shape) -> np.ndarray:
    """Confidences with many ties, saturated ones among them; their products and sums are exact in float32."""
    return rng.choice([0.0, 0.25, 0.5, 0.75, 1.0, 1.0], shape)


def pairs_in_order(confidence, length, active):
    """(survival, row, place) in the order of admission: descending, smaller places first, then rows."""
    survival = np.cumprod(confidence, axis=1)
    pairs = [(survival[r, j], r, j) for r in range(len(survival)) if active[r] for j in range(min(length[r], SIZE))]
    return sorted(pairs, key=lambda pair: (-pair[0], pair[2], pair[1]))


def algorithm_1(confidence, length, active, speeds):
    """Admit while theta rises, stop at the first pair that does not raise it: a plain loop."""
    rows, committed, admitted = int(sum(active)), float(sum(active)), 0
    lengths = [0] * len(confidence)
    theta = committed * speeds[rows]
    for survival, r, j in pairs_in_order(confidence, length, active):
        candidate = (committed + survival) * speeds[rows + admitted + 1]
        if candidate <= theta:
            break
        theta, committed, admitted = candidate, committed + survival, admitted + 1
        assert lengths[r] == j  # always a prefix
        lengths[r] = j + 1
    return lengths


def thetas(confidence, length, active, speeds):
    """Theta after 0, 1, 2... admitted pairs."""
    rows = int(sum(active))
    committed = np.cumsum([float(rows), *(survival for survival, _, _ in pairs_in_order(confidence, length, active))])
    return committed * np.asarray(speeds)[rows : rows + len(committed)]


def global_total(confidence, length, active, speeds):
    rows, committed, best = int(sum(active)), float(sum(active)), 0
    theta = committed * speeds[rows]
    for number, (survival, _, _) in enumerate(pairs_in_order(confidence, length, active), start=1):
        committed += survival
        if committed * speeds[rows + number] > theta:
            theta, best = committed * speeds[rows + number], number
    return best


def first_pairs(confidence, length, active, total):
    lengths = [0] * len(confidence)
    for _, r, j in pairs_in_order(confidence, length, active)[:total]:
        assert lengths[r] == j
        lengths[r] = j + 1
    return lengths


@functools.cache
def decider(kind: type):
    """One compiled function per kind of policy."""
    del kind
    return jax.jit(lambda policy, state, draft, active: policy.verify_length(state, draft, active))


def decide(policy, state, draft, active):
    return decider(type(policy))(policy, state, draft, active)


@jax.jit
def learn(policy, state, feedback):
    return policy.update(state, feedback)


@jax.jit
def by_confidence(confidence, length, active, speeds):
    """What the policies do, from exact confidences: no sigmoid in between."""
    offered = ha.offered_survival(confidence, length, active)
    best = ha.best_total(offered, active, speeds)
    return ha.admit(offered, ha.first_fall(offered, active, speeds)), best, ha.admit(offered, best)


def situations(seed: int, count: int):
    """Random confidences, proposed lengths, done rows and jagged curves."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        active = rng.random(ROWS) < 0.75
        length = np.where(rng.random(ROWS) < 0.6, SIZE, rng.integers(0, SIZE + 1, ROWS))
        yield rng, quarters(rng, (ROWS, SIZE)), length, active, jagged(rng, ROWS * (SIZE + 1) + 1)


def test_algorithm_1_and_the_global_maximum_are_their_loops():
    """With ties, saturated confidences, done rows, short proposals and jagged curves."""
    seen, differ = set(), 0
    for _, confidence, length, active, speeds in situations(0, 400):
        admitted, best, most = by_confidence(confidence.astype(np.float32), length, active, speeds.astype(np.float32))
        np.testing.assert_array_equal(admitted, algorithm_1(confidence, length, active, speeds))
        assert int(best) == global_total(confidence, length, active, speeds)
        np.testing.assert_array_equal(most, first_pairs(confidence, length, active, int(best)))
        seen.add(int(admitted.sum()))
        differ += int(best) != int(admitted.sum())
    assert len(seen) > 8
    assert differ > 100  # jagged curves: the first fall is often not the maximum


def test_the_policies_are_those_rules_on_sigmoids():
    rng = np.random.default_rng(1)
    active, length, compared = jnp.ones(ROWS, bool), np.full(ROWS, SIZE), 0
    for _ in range(50):
        speeds = jagged(rng, ROWS * (SIZE + 1))
        draft = draft_of(np.zeros((ROWS, SIZE)), rng.uniform(0.05, 0.999, (ROWS, SIZE)))
        confidence = np.asarray(jax.nn.sigmoid(draft.confidence_logits), np.float64)
        dense = np.concatenate([speeds[:1], speeds])
        theta = np.sort(thetas(confidence, length, active, dense))
        if np.any(np.diff(theta) < 1e-5 * theta[1:]):
            continue  # too close for float32, whose sums depend on how they are compiled
        compared += 1
        ours = decide(schedules.hardware_aware(table(speeds)), (), draft, active)
        np.testing.assert_array_equal(ours, algorithm_1(confidence, length, active, dense))
        ours = decide(schedules.global_maximum(table(speeds)), (), draft, active)
        total = global_total(confidence, length, active, dense)
        np.testing.assert_array_equal(ours, first_pairs(confidence, length, active, total))
    assert compared > 40


def test_saturated_confidences_keep_the_smaller_place_first():
    """All survivals are 1: first tokens of all rows come before second ones."""
    draft = draft_of(np.zeros((3, 4)), np.ones((3, 4)))
    speeds = [1.0] * 3 + [1.0] * 4 + [0.1] * 8  # SPS falls beyond 7 tokens: 3 anchors and 4 drafts
    lengths = decide(schedules.hardware_aware(table(speeds)), (), draft, jnp.ones(3, bool))
    assert lengths.tolist() == [2, 1, 1]
    lengths = decide(schedules.hardware_aware(table(speeds)), (), draft, jnp.asarray([False, True, True]))
    assert lengths.tolist() == [0, 3, 2]


def test_survival_never_rises_along_a_row():
    rng = np.random.default_rng(2)
    confidence = (1 - rng.random((2000, 16)) * 1e-6).astype(np.float32)
    offered = np.asarray(jax.jit(ha.offered_survival)(confidence, np.full(2000, 16), np.ones(2000, bool)))
    assert (np.diff(offered, axis=1) <= 0).all()


def test_delayed_takes_its_total_from_two_cycles_ago():
    rng = np.random.default_rng(3)
    for _ in range(20):
        speeds = jagged(rng, ROWS * (SIZE + 1))
        policy, dense = schedules.delayed(table(speeds)), np.concatenate([speeds[:1], speeds])
        state, history, active = policy.init_state(ROWS, SIZE), [], np.ones(ROWS, bool)
        for cycle in range(6):
            length = rng.integers(1, SIZE + 1, ROWS)
            draft = draft_of(np.zeros((ROWS, SIZE)), rng.uniform(0.05, 0.999, (ROWS, SIZE)), length)
            confidence = np.asarray(jax.nn.sigmoid(draft.confidence_logits), np.float64)
            ours = decide(policy, state, draft, jnp.asarray(active))
            if cycle < 2:
                expected = algorithm_1(confidence, length, active, dense)
            else:
                then, length_then, active_then = history[cycle - 2]
                # Rows that have ended since do not count any more.
                total = global_total_of(then, length_then, active_then & active, active, dense)
                expected = first_pairs(confidence, length, active, total)
            np.testing.assert_array_equal(ours, expected)
            history.append((confidence, length, active.copy()))
            state = learn(policy, state, Feedback(draft, ours, ours, jnp.asarray(active), None))
            active &= rng.random(ROWS) < 0.9


def global_total_of(confidence, length, there, active, speeds):
    """`global_total` of an earlier draft with today's number of rows."""
    rows, committed, best = int(sum(active)), float(sum(active)), 0
    theta = committed * speeds[rows]
    for number, (survival, _, _) in enumerate(pairs_in_order(confidence, length, there), start=1):
        committed += survival
        if committed * speeds[rows + number] > theta:
            theta, best = committed * speeds[rows + number], number
    return best


# One row, K = 2, a_1 = 0.8; after A the second token looks good, after B hopeless; SPS falls steeply, then gently.
EXAMPLE = Toy((0.7, 0.3), (0.5, 0.5), lambda before: [0.8, 0.9 if before[:1] == (0,) else 0.0][len(before)])
EXAMPLE_SPEEDS = table([1.0, 0.5, 0.45])


def test_the_global_maximum_is_biased_where_the_other_two_are_not():
    text = text_distribution(schedules.global_maximum(EXAMPLE_SPEEDS), EXAMPLE, 1)
    np.testing.assert_allclose(text, [0.85, 0.15], atol=1e-7)
    for policy in (schedules.hardware_aware(EXAMPLE_SPEEDS), schedules.delayed(EXAMPLE_SPEEDS)):
        for depth in (1, 4):
            text = text_distribution(policy, EXAMPLE, depth)
            # Exact up to float64 sums.
            np.testing.assert_allclose(text, independent(EXAMPLE.p, depth), atol=1e-12)


def test_delayed_does_verify_in_the_example():
    """Its third cycle draws on the first: two tokens after A then, none after B, whatever is drafted today."""
    policy, today = schedules.delayed(EXAMPLE_SPEEDS), draft_of([[1, 1]], [[0.8, 0.0]])
    for second, expected in ((0.9, 2), (0.0, 0)):
        state = policy.init_state(1, 2)
        for confidence in (second, 0.5):
            draft = draft_of([[0, 0]], [[0.8, confidence]])
            assert decide(policy, state, draft, jnp.ones(1, bool)).tolist() == [0]
            state = learn(policy, state, Feedback(draft, jnp.zeros(1, int), jnp.zeros(1, int), jnp.ones(1, bool), None))
        assert decide(policy, state, today, jnp.ones(1, bool)).tolist() == [expected]


def test_the_global_maximum_is_lossless_when_no_confidence_reads_a_draft_token():
    blind = dataclasses.replace(EXAMPLE, confidence=lambda before: (0.8, 0.9)[len(before)])
    policy = schedules.global_maximum(EXAMPLE_SPEEDS)
    np.testing.assert_allclose(text_distribution(policy, blind, 3), independent(EXAMPLE.p, 3), atol=1e-12)
    assert policy.biased(False) == ""
    # A block that ends after certain draft tokens brings the dependence back.
    ended = schedules.conservative_tokens([1], policy)
    assert np.abs(text_distribution(ended, blind, 1) - EXAMPLE.p).max() > 0.05
    assert "draft tokens influence" in ended.biased(False)


@pytest.mark.parametrize("make", [schedules.hardware_aware, schedules.delayed, schedules.global_maximum])
def test_a_missing_or_short_table_is_refused(make):
    with pytest.raises(ConfigError, match="needs a measured SPS table"):
        make(None)
    policy = make(table([1.0] * 23))
    with pytest.raises(ConfigError, match=r"ends at 23 tokens, 4 rows with blocks of 5 need up to 24"):
        policy.init_state(4, 5)
    make(table([1.0] * 24)).init_state(4, 5)
