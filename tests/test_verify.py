"""Verification by Monte Carlo: the joint distribution of the committed tokens is the target's; greedy rows by hand.

`test_enumeration.py` shows the same exactly; here `verify` itself draws, with both verifiers.
"""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import processors, sampling
from dspark_jax.config import VERIFIERS
from dspark_jax.records import Draft
from pallas_kernels.verify.reference import accepted_length, expected_length
from pallas_kernels.verify.reference import verify_processed as verify

ROWS = 50_000


@partial(jax.jit, static_argnames="verifier")
def verify_jit(target_logits, draft, verify_len, temperature, accept_uniforms, commit_uniforms, verifier="token"):
    """Processes both sides' logits, then verifies."""
    sampler = processors.make_sampler(temperature)
    if draft.logits is not None:
        draft = dataclasses.replace(draft, logits=processors.process(draft.logits, sampler))
    logits = processors.process(target_logits, sampler)
    return verify(logits, draft, verify_len, temperature, accept_uniforms, commit_uniforms, verifier)


@jax.jit
def sample_jit(logits, temperature, uniforms):
    return sampling.sample(processors.process(logits, processors.make_sampler(temperature)), temperature, uniforms)


def draft_of(token_ids, logits=None, ids=None) -> Draft:
    token_ids = jnp.asarray(token_ids, jnp.int32)
    length = jnp.full((len(token_ids),), token_ids.shape[1], jnp.int32)
    return Draft(token_ids=token_ids, logits=logits, confidence_logits=None, length=length, ids=ids)


def random_tables(rng, vocab: int, depth: int, draft_size: int):
    """Conditional logits of a random language and of a random drafter: one row per prefix, one table per position."""
    target = [rng.standard_normal((vocab**j, vocab)).astype(np.float32) * 1.5 for j in range(depth + 1)]
    drafter = [rng.standard_normal((vocab**j, draft_size)).astype(np.float32) * 1.5 for j in range(depth)]
    return target, drafter


def joint(target, depth: int, temperature: float) -> np.ndarray:
    """Exact probabilities of the first `depth` tokens, [vocab ** depth]."""
    probability = np.ones(1)
    for table in target[:depth]:
        conditional = np.asarray(jax.nn.softmax(table / temperature, -1), np.float64)
        probability = (probability[:, None] * conditional).reshape(-1)
    return probability


def commit_rows(target, drafter, depth, temperature, schedule=None, draft_vocab=None, seed=0, verifier="token"):
    """Drafts, verifies and completes ROWS sequences of `depth` + 1 tokens; returns them as [ROWS] prefix numbers.

    A row whose block was cut is completed from the target itself, so that every row has the same length.
    """
    vocab = target[0].shape[1]
    rng = np.random.default_rng(seed)
    uniform = lambda *shape: rng.random((ROWS, *shape)).astype(np.float32)  # noqa: E731
    temperatures = np.full((ROWS,), temperature, np.float32)
    prefix, tokens, draft_logits, target_logits = np.zeros(ROWS, np.int64), [], [], []
    for k in range(depth):
        target_logits.append(target[k][prefix])
        draft_logits.append(drafter[k][prefix])
        index = np.asarray(sample_jit(draft_logits[-1], temperatures, uniform()))
        tokens.append(index if draft_vocab is None else draft_vocab[index])
        prefix = prefix * vocab + tokens[-1]
    target_logits.append(target[depth][prefix])
    token_ids = np.stack(tokens, 1)
    verify_len = np.full((ROWS,), depth) if schedule is None else schedule(token_ids)
    accepted, added = verify_jit(
        jnp.asarray(np.stack(target_logits, 1)),
        draft_of(
            token_ids,
            jnp.asarray(np.stack(draft_logits, 1)),
            None if draft_vocab is None else jnp.asarray(draft_vocab),
        ),
        jnp.asarray(verify_len, jnp.int32),
        temperatures,
        uniform(depth),
        uniform(depth + 1),
        verifier=verifier,
    )
    accepted, added = np.asarray(accepted), np.asarray(added)
    assert (accepted <= verify_len).all()
    committed = np.zeros(ROWS, np.int64)
    for k in range(depth + 1):
        completion = np.asarray(sample_jit(target[k][committed], temperatures, uniform()))
        drafted = token_ids[:, k] if k < depth else added
        token = np.where(k < accepted, drafted, np.where(k == accepted, added, completion))
        committed = committed * vocab + token
    return committed


def largest_deviation(samples, probability) -> float:
    """Largest deviation of a frequency from its probability, in standard deviations."""
    counts = np.bincount(samples, minlength=len(probability))
    assert (counts[probability == 0] == 0).all()
    deviation = np.sqrt(len(samples) * np.maximum(probability * (1 - probability), 1e-9))
    return float((np.abs(counts - len(samples) * probability) / deviation).max())


# Five standard deviations of up to 27 frequencies: one run in 60000 fails by chance, and the seeds are fixed.
LIMIT = 5.0


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize(("depth", "temperature"), [(1, 1.0), (2, 1.0), (2, 0.6)])
def test_committed_tokens_have_the_targets_distribution(depth, temperature, verifier):
    target, drafter = random_tables(np.random.default_rng(depth), 3, depth, 3)
    samples = commit_rows(target, drafter, depth, temperature, verifier=verifier)
    assert largest_deviation(samples, joint(target, depth + 1, temperature)) < LIMIT
    # The test can tell: the same samples are far from another temperature's distribution.
    assert largest_deviation(samples, joint(target, depth + 1, temperature * 1.3)) > 2 * LIMIT


def test_a_length_decided_by_the_past_is_lossless():
    """The second token is verified after some first tokens only: the threshold policy's situation."""
    target, drafter = random_tables(np.random.default_rng(5), 3, 2, 3)
    samples = commit_rows(target, drafter, 2, 1.0, lambda tokens: np.where(tokens[:, 0] == 1, 1, 2))
    assert largest_deviation(samples, joint(target, 3, 1.0)) < LIMIT


def test_a_length_decided_by_the_token_itself_is_not_lossless():
    """p = (0.7, 0.3), q = (0.5, 0.5), verified after A only: comes out 0.85 / 0.15, and this file's check sees it."""
    p, q = np.log([[0.7, 0.3]]).astype(np.float32), np.log([[0.5, 0.5]]).astype(np.float32)
    target, drafter = [p, np.tile(p, (2, 1)), np.tile(p, (4, 1))], [q, np.tile(q, (2, 1))]
    samples = commit_rows(target, drafter, 2, 1.0, lambda tokens: np.where(tokens[:, 0] == 0, 2, 0))
    first = samples // 4
    assert np.mean(first == 0) == pytest.approx(0.85, abs=0.008)  # five deviations: sqrt(0.85 * 0.15 / 5e4) = 0.0016
    assert largest_deviation(samples, joint(target, 3, 1.0)) > 2 * LIMIT


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_reduced_draft_vocabulary(verifier):
    """Tokens that the drafter can't propose still appear as often as the target wants them."""
    vocab = np.array([0, 2])
    target, drafter = random_tables(np.random.default_rng(7), 3, 2, 2)
    samples = commit_rows(target, drafter, 2, 1.0, draft_vocab=vocab, verifier=verifier)
    assert largest_deviation(samples, joint(target, 3, 1.0)) < LIMIT


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_deterministic_proposal(verifier):
    """q is one-hot: the token is kept with probability p(token), else another one is drawn."""
    rng = np.random.default_rng(8)
    p = rng.standard_normal(3).astype(np.float32)
    tokens = np.full((ROWS, 1), 1)
    accepted, added = verify_jit(
        jnp.broadcast_to(p, (ROWS, 2, 3)),
        draft_of(tokens),
        jnp.ones(ROWS, jnp.int32),
        jnp.ones(ROWS),
        rng.random((ROWS, 1)).astype(np.float32),
        rng.random((ROWS, 2)).astype(np.float32),
        verifier=verifier,
    )
    accepted, added = np.asarray(accepted), np.asarray(added)
    first = np.where(accepted == 1, 1, added)
    probability = np.asarray(jax.nn.softmax(p), np.float64)
    assert largest_deviation(first, probability) < LIMIT
    assert (added[accepted == 0] != 1).all()  # the rejected token has nothing left
    assert largest_deviation(added[accepted == 1], probability) < LIMIT


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_equal_distributions_always_accept(verifier):
    logits = jnp.asarray(np.random.default_rng(9).standard_normal((50, 3, 7)), jnp.float32)
    tokens = np.random.default_rng(9).integers(0, 7, (50, 2))
    almost_one = np.full((50, 2), np.nextafter(np.float32(1), np.float32(0)))
    accepted, _ = verify_jit(
        logits,
        draft_of(tokens, logits[:, :2]),
        jnp.full(50, 2),
        jnp.ones(50),
        # log_softmax and softmax round apart by about 1e-7
        almost_one - 1e-6,
        np.full((50, 3), 0.5, np.float32),
        verifier=verifier,
    )
    assert accepted.tolist() == [2] * 50


GREEDY_BEST = np.array([[4, 1, 3, 0], [4, 1, 3, 0], [4, 1, 3, 0], [4, 1, 3, 0], [4, 1, 3, 0]])
GREEDY_DRAFT = np.array([[4, 1, 3], [4, 1, 0], [0, 1, 3], [4, 0, 3], [4, 1, 3]])
GREEDY_LENGTH = np.array([3, 3, 3, 2, 1])
GREEDY_EXPECTED = ([3, 2, 0, 1, 1], [0, 3, 4, 1, 1])


def greedy_logits() -> np.ndarray:
    noise = np.random.default_rng(0).random((5, 4, 5)).astype(np.float32)
    return noise + 2 * np.eye(5, dtype=np.float32)[GREEDY_BEST]


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_greedy_acceptance(verifier):
    """Whole block; last, first and middle token wrong; a block cut to one token."""
    accepted, added = verify_jit(
        greedy_logits(),
        draft_of(GREEDY_DRAFT),
        jnp.asarray(GREEDY_LENGTH),
        jnp.zeros(5),
        jnp.zeros((5, 3)),
        jnp.zeros((5, 4)),
        verifier=verifier,
    )
    assert (accepted.tolist(), added.tolist()) == GREEDY_EXPECTED


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_greedy_rows_beside_sampled_rows(verifier):
    """Greedy rows give what they give alone, whatever their uniforms; so do the sampled ones."""
    rng = np.random.default_rng(1)
    logits = np.concatenate([greedy_logits(), rng.standard_normal((5, 4, 5)).astype(np.float32)])
    tokens = np.concatenate([GREEDY_DRAFT, rng.integers(0, 5, (5, 3))])
    draft_logits = jnp.asarray(rng.standard_normal((10, 3, 5)), jnp.float32)
    lengths = np.concatenate([GREEDY_LENGTH, [3, 2, 1, 0, 3]])
    temperature = np.array([0] * 5 + [1, 1, 0.5, 2, 1], np.float32)
    accept, commit = rng.random((10, 3)).astype(np.float32), rng.random((10, 4)).astype(np.float32)
    order = rng.permutation(10)

    def run(rows):
        draft = draft_of(tokens[rows], draft_logits[rows])
        result = verify_jit(logits[rows], draft, lengths[rows], temperature[rows], accept[rows], commit[rows], verifier)
        return np.stack([np.asarray(r) for r in result])

    mixed = run(order)
    together = np.zeros_like(mixed)
    together[:, order] = mixed
    assert (together[0, :5].tolist(), together[1, :5].tolist()) == GREEDY_EXPECTED
    np.testing.assert_array_equal(together[:, 5:], run(np.arange(5, 10)))


def test_no_draft_at_all_is_plain_sampling():
    """Width 1: the added token is the one that autoregressive decoding draws with the same uniform."""
    rng = np.random.default_rng(2)
    logits, uniforms = rng.standard_normal((8, 1, 30)).astype(np.float32), rng.random((8, 1)).astype(np.float32)
    temperature = np.array([0, 1] * 4, np.float32)
    accepted, added = verify_jit(
        logits,
        draft_of(np.zeros((8, 2)), jnp.zeros((8, 2, 30))),
        jnp.zeros(8, jnp.int32),
        temperature,
        np.zeros((8, 0), np.float32),
        uniforms,
    )
    assert accepted.tolist() == [0] * 8
    np.testing.assert_array_equal(added, sample_jit(logits[:, 0], temperature, uniforms[:, 0]))


def test_block_verification_judges_the_whole_block():
    """p = (1/3, 2/3), q = (2/3, 1/3), two independent tokens: the example in section 2 of Sun et al. (2025).

    Token by token 10/9 tokens are kept on average, by blocks 11/9. All four drafts, with uniforms on a grid.
    """
    p, q = np.log([1 / 3, 2 / 3]), np.log([2 / 3, 1 / 3])
    grid = (np.arange(60) + 0.5) / 60  # no multiple of 1/60 falls on a border's wrong side: borders are sixtieths
    tokens = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    chance = np.exp(q)[tokens].prod(1)
    rows = np.array([(t, a, b) for t in range(4) for a in range(60) for b in range(60)])
    count = len(rows)
    expected = {}
    for verifier in VERIFIERS:
        accepted, _ = verify_jit(
            np.broadcast_to(p, (count, 3, 2)).astype(np.float32),
            draft_of(tokens[rows[:, 0]], jnp.broadcast_to(q, (count, 2, 2)).astype(jnp.float32)),
            jnp.full(count, 2),
            jnp.ones(count),
            grid[rows[:, 1:]].astype(np.float32),
            np.full((count, 3), 0.5, np.float32),
            verifier=verifier,
        )
        expected[verifier] = (np.asarray(accepted) * chance[rows[:, 0]]).sum() / 3600
    assert expected["token"] == pytest.approx(10 / 9, abs=1e-3)
    assert expected["block"] == pytest.approx(11 / 9, abs=1e-3)


@pytest.mark.parametrize("form", ["reduced", "candidates", "deterministic"])
def test_no_draft_distribution_over_the_whole_vocabulary(form):
    """[B, K, V] arrays exist for the target only: here K = 3 of its 4 rows are a slice, never a scatter."""
    size, vocab, few = 3, 1000, 5
    logits = None if form == "deterministic" else jnp.zeros((2, size, few))
    ids = {"reduced": jnp.arange(few), "candidates": jnp.zeros((2, size, few), jnp.int32), "deterministic": None}[form]
    draft = draft_of(jnp.zeros((2, size)), logits, ids)
    arguments = (jnp.zeros((2, size + 1, vocab)), draft, jnp.full(2, size), jnp.ones(2), jnp.zeros((2, 3)))
    for verifier in VERIFIERS:
        text = str(jax.make_jaxpr(partial(verify, verifier=verifier))(*arguments, jnp.zeros((2, 4))))
        scatters = [line for line in text.splitlines() if "scatter" in line and "= " in line]
        assert scatters
        assert not any(f"f32[2,{size},{vocab}]" in line.split("=")[0] for line in scatters)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_expected_length_is_the_mean_over_all_decisions(verifier):
    rng = np.random.default_rng(0)
    chance = rng.uniform(size=(5, 3))
    lengths = np.array([3, 2, 0, 1, 3])
    mean = np.zeros(5)
    for kept in itertools.product([0, 1], repeat=3):  # a uniform below or above its chance
        uniforms = np.where(np.array(kept) == 1, chance - 1e-3, chance + 1e-3)
        probability = np.prod(np.where(np.array(kept) == 1, chance, 1 - chance), axis=1)
        accepted = accepted_length(jnp.asarray(chance), jnp.asarray(lengths), jnp.asarray(uniforms), verifier)
        mean += probability * np.asarray(accepted)
    expected = expected_length(jnp.asarray(chance), jnp.asarray(lengths), verifier)
    np.testing.assert_allclose(expected, mean, atol=1e-6)  # float32
