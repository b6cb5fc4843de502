"""Exact losslessness: every draft and every decision of the verifiers is enumerated, nothing is sampled.

A tiny random language: the target's logits and the drafter's depend on the whole prefix (the drafter's also on where
the cycle began). For every committed prefix, every possible draft block is a row of one batch; its probability under q,
the probability of each accepted length and the weights of the added token come from the functions that decoding itself
calls (`processors`, `reference.acceptance`, `reference.added_weights`). Cycles follow each other until three tokens are
committed. The sum over all ways must be the target's own processed distribution of those three tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import processors, sampling
from dspark_jax.config import VERIFIERS
from dspark_jax.records import Draft
from pallas_kernels.verify import reference

pytestmark = pytest.mark.usefixtures("quick_compile")

TOKENS = 3  # committed tokens whose joint distribution is compared
PROMPT = [1, 0, 1]  # what the repetition penalty has seen before
FORMS = ("full", "reduced", "candidates", "deterministic")
LENGTHS = ("full", "past", "own token")
SAMPLERS = {  # temperature, top_k, top_p, min_p, repetition_penalty of the rows of one batch
    "plain": (1.0, 0, 1.0, 0.0, 1.0),
    "top-k": (0.7, 2, 1.0, 0.0, 1.0),
    "top-p": (1.3, 0, 0.7, 0.0, 1.0),
    "min-p, penalty": (1.0, 0, 1.0, 0.3, 1.8),
    "everything": (0.9, 3, 0.9, 0.1, 0.6),
    "greedy": (0.0, 0, 1.0, 0.0, 1.0),
    "greedy, penalty": (0.0, 2, 0.5, 0.0, 2.5),
}
# Products of a few float32 probabilities, each right to 1e-7, summed over all ways to commit a text.
TOLERANCE = 1e-6


def number(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Numbers sequences [..., n] in base `vocab`."""
    result = np.zeros(tokens.shape[:-1], np.int64)
    for i in range(tokens.shape[-1]):
        result = result * vocab + tokens[..., i]
    return result


def sequences(vocab: int, length: int) -> np.ndarray:
    return np.indices((vocab,) * length).reshape(length, vocab**length).T


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One batch: every sampler, committed prefix and draft block. Rows are in that order.

    Attributes:
      vocab, size: V and K.
      committed: [R] number of the committed prefix, `count` [R] its length.
      sampler_index: [R].
      sampler: settings of the rows.
      log_p: [R, K+1, V] of the target after the prefix and each draft token, processed.
      draft: the block, with processed logits.
      drawn: [R] probability that the drafter proposes it.
      stop: [R, K, 2] random bits: a function of prefix and x_{<k}, and of x_{<=k}.
      reference: per sampler the target's own distribution, [V ** TOKENS].
    """

    vocab: int
    size: int
    committed: np.ndarray
    count: np.ndarray
    sampler_index: np.ndarray
    sampler: processors.Sampler
    log_p: jax.Array
    draft: Draft
    drawn: np.ndarray
    stop: np.ndarray
    reference: list[np.ndarray]


process_block = jax.jit(processors.process_block)
process = jax.jit(processors.process)


@functools.cache
def make_case(form: str, vocab: int, size: int, seed: int = 0) -> Case:
    rng = np.random.default_rng([seed, vocab, size, FORMS.index(form)])
    loud = lambda *shape: (rng.standard_normal(shape) * 1.5).astype(np.float32)  # noqa: E731
    target = [loud(vocab**n, vocab) for n in range(TOKENS + size)]
    blocks = sequences(vocab, size)
    width = {"full": vocab, "reduced": max(vocab - 1, 1), "candidates": 3, "deterministic": vocab}[form]
    parts = []
    for n in range(TOKENS):
        prefixes = sequences(vocab, n)
        texts = np.concatenate([np.repeat(prefixes, len(blocks), 0), np.tile(blocks, (len(prefixes), 1))], axis=1)
        before = [number(texts[:, : n + k], vocab) for k in range(size + 1)]  # prefix and x_{<k}
        ids = np.stack([rng.permuted(np.tile(np.arange(vocab), (vocab**n, 1)), axis=1) for _ in range(size)], axis=1)
        ids = np.concatenate([ids[..., :2], ids[..., :1]], axis=-1)  # two candidates, and padding that repeats one
        tokens = np.concatenate([np.tile(PROMPT, (len(texts), 1)), texts[:, :n]], axis=1)
        parts.append(
            {
                "committed": before[0],
                "count": np.full(len(texts), n),
                "tokens": np.pad(tokens, ((0, 0), (0, TOKENS - n))),
                "draft": texts[:, n:],
                "target": np.stack([target[n + k][before[k]] for k in range(size + 1)], axis=1),
                "logits": np.stack([loud(vocab ** (n + k), width)[before[k]] for k in range(size)], axis=1),
                "ids": ids[before[0]],
                "stop": np.stack(
                    [
                        np.stack([(rng.random(vocab ** (n + i)) < 0.4)[before[i]] for i in (k, k + 1)], axis=-1)
                        for k in range(size)
                    ],
                    axis=1,
                ),
            }
        )
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    count, kinds = len(rows["count"]), len(SAMPLERS)
    rows = {name: np.concatenate([value] * kinds) for name, value in rows.items()}
    index = np.repeat(np.arange(kinds), count)
    sampler = processors.make_sampler(*(np.asarray(list(SAMPLERS.values()))[index].T))
    length, drafted = len(PROMPT) + rows["count"], rows["draft"].astype(np.int32)
    log_p = jax.nn.log_softmax(process_block(rows["target"], sampler, rows["tokens"], length, drafted), axis=-1)
    draft, drawn = make_draft(form, rows, sampler, length, vocab)
    # The target alone: the first row of each block, one token after the other.
    p = np.asarray(jnp.exp(log_p[:, 0]), np.float64)
    greedy = np.asarray(sampler.temperature) == 0
    p[greedy] = np.eye(vocab)[p[greedy].argmax(-1)]
    reference = []
    for kind in range(kinds):
        mass = np.ones(1)
        for n in range(TOKENS):
            here = (index == kind) & (rows["count"] == n) & (number(rows["draft"], vocab) == 0)
            mass = (mass[:, None] * p[here] / p[here].sum(-1, keepdims=True)).reshape(-1)
        reference.append(mass)
    return Case(
        vocab, size, rows["committed"], rows["count"], index, sampler, log_p, draft, drawn, rows["stop"], reference
    )


def make_draft(form: str, rows: dict, sampler, length, vocab: int) -> tuple[Draft, np.ndarray]:
    """Processes the drafter's logits as the drafter does, and computes the probability of each block."""
    tokens, drafted, logits = rows["tokens"], rows["draft"], rows["logits"]
    size = drafted.shape[1]
    greedy = np.asarray(sampler.temperature)[:, None, None] == 0
    seen = [processors.seen_tokens(jnp.asarray(tokens), jnp.asarray(length), sampler, vocab)]
    for k in range(size - 1):
        seen.append(processors.mark(seen[-1], drafted[:, k]))
    seen = np.stack([np.asarray(s) for s in seen], axis=1)  # [R, K, V]
    ids = None
    if form == "reduced":
        ids = np.sort(np.random.default_rng(vocab).permutation(vocab)[: logits.shape[-1]])
        seen = seen[:, :, ids]
    elif form == "candidates":
        ids = rows["ids"]
        logits = np.where(np.arange(3) == 2, -np.inf, logits).astype(np.float32)
        seen = np.take_along_axis(seen, ids, axis=-1)
    logits = process(logits, sampler, seen)
    q = np.asarray(jax.nn.softmax(logits, axis=-1), np.float64)
    best = np.eye(q.shape[-1])[np.asarray(sampling.argmax(logits))]
    q = np.where(greedy | (form == "deterministic"), best, q / q.sum(-1, keepdims=True))
    names = np.broadcast_to(np.arange(vocab) if ids is None else ids, q.shape)
    drawn = np.where(names == drafted[..., None], q, 0.0).sum(-1).prod(-1)
    full = jnp.full(length.shape, size, jnp.int32)
    draft = Draft(
        token_ids=jnp.asarray(drafted, jnp.int32),
        logits=None if form == "deterministic" else logits,
        confidence_logits=None,
        length=full,
        ids=None if ids is None else jnp.asarray(ids),
    )
    return draft, drawn


def verify_lengths(case: Case, rule: str) -> np.ndarray:
    """Cuts the block where a random bit says so; the bit for token k is a function of x_{<k}, or (wrongly) of x_k."""
    if rule == "full":
        return np.full(len(case.count), case.size)
    return np.cumprod(~case.stop[:, :, LENGTHS.index(rule) - 1], axis=1).sum(1)


@functools.partial(jax.jit, static_argnames="verifier")
def decisions(log_p, draft, verify_len, greedy, verifier):
    """Returns what the verifier says: chance [R, K], and for each accepted length the added token's weights."""
    chance, scale = reference.acceptance(log_p, draft, verify_len, greedy, verifier)
    weigh = lambda n: reference.added_weights(log_p, draft, scale, jnp.full_like(verify_len, n), verify_len, greedy)  # noqa: E731
    return chance, jnp.stack([weigh(n) for n in range(log_p.shape[1])], axis=1)


def length_probabilities(chance: np.ndarray, verify_len: np.ndarray, verifier: str) -> np.ndarray:
    """Returns the distribution of the accepted length, [R, K] -> [R, K+1]; the rule of `reference.accepted_length`."""
    size = chance.shape[1]
    chance = np.where(np.arange(size) < verify_len[:, None], chance, 0.0)
    ones = np.ones((len(chance), 1))
    if verifier == "token":
        return np.concatenate([ones, np.cumprod(chance, 1)], 1) * np.concatenate([1 - chance, ones], 1)
    none_after = np.cumprod((1 - chance)[:, ::-1], axis=1)[:, ::-1]
    return np.concatenate([ones, chance], 1) * np.concatenate([none_after, ones], 1)


def ways(case: Case, verifier: str, rule: str, draft: Draft | None = None):
    """Returns per row the distribution of the accepted length [R, K+1] and of the added token [R, K+1, V]."""
    lengths = verify_lengths(case, rule)
    greedy = case.sampler.temperature == 0
    judged = case.draft if draft is None else draft
    chance, weights = decisions(case.log_p, judged, jnp.asarray(lengths, jnp.int32), greedy, verifier)
    weights = np.asarray(weights, np.float64)
    accepted = length_probabilities(np.asarray(chance, np.float64), lengths, verifier)
    return accepted, weights / weights.sum(-1, keepdims=True)


def committed_distribution(case: Case, accepted: np.ndarray, added: np.ndarray) -> list[np.ndarray]:
    """Sums over all ways: per sampler the distribution of the first TOKENS committed tokens."""
    vocab, blocks = case.vocab, np.asarray(case.draft.token_ids)
    results = []
    for kind in range(len(SAMPLERS)):
        mass = [np.zeros(vocab**n) for n in range(TOKENS + 1)]
        mass[0][0] = 1.0
        for n in range(TOKENS):
            rows = (case.sampler_index == kind) & (case.count == n)
            start = mass[n][case.committed[rows]] * case.drawn[rows]
            for kept in range(case.size + 1):
                text = case.committed[rows] * vocab ** min(kept, TOKENS - n)
                text += number(blocks[rows][:, : min(kept, TOKENS - n)], vocab)
                probability = start * accepted[rows, kept]
                if n + kept >= TOKENS:
                    np.add.at(mass[TOKENS], text, probability)
                else:
                    for token in range(vocab):
                        np.add.at(mass[n + kept + 1], text * vocab + token, probability * added[rows, kept, token])
        results.append(mass[TOKENS])
    return results


def deviation(case: Case, verifier: str, rule: str, draft: Draft | None = None) -> float:
    """Largest difference between a text's probability and the target's, over all samplers."""
    ours = committed_distribution(case, *ways(case, verifier, rule, draft))
    assert all(mass.sum() == pytest.approx(1, abs=1e-6) for mass in ours)
    return max(np.abs(mine - theirs).max() for mine, theirs in zip(ours, case.reference))


SIZES = [(2, 3), (3, 2), (4, 3)]


@pytest.mark.parametrize("rule", ["full", "past"])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize(("vocab", "size"), SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_committed_tokens_are_distributed_as_the_targets(form, vocab, size, verifier, rule):
    case = make_case(form, vocab, size)
    drawn = [case.drawn[(case.sampler_index == 0) & (case.count == n)].sum() for n in range(TOKENS)]
    np.testing.assert_allclose(drawn, [vocab**n for n in range(TOKENS)], rtol=1e-6)  # every block was enumerated
    difference = deviation(case, verifier, rule)
    assert difference < TOLERANCE


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("form", ["full", "reduced", "candidates"])
def test_the_check_sees_a_q_that_was_not_drawn_from(form, verifier):
    """Verified against q of another temperature; taken as one-hot, a drawn token is fine, but kept less often."""
    case = make_case(form, 3, 2)
    assert case.draft.logits is not None
    wrong = deviation(case, verifier, "full", dataclasses.replace(case.draft, logits=case.draft.logits * 0.7))
    assert wrong > 1e-3
    one_hot = dataclasses.replace(case.draft, logits=None)
    assert deviation(case, verifier, "full", one_hot) < TOLERANCE
    kept = [(ways(case, verifier, "full", d)[0] * np.arange(3)).sum(1) @ case.drawn for d in (one_hot, case.draft)]
    assert kept[0] < 0.9 * kept[1]


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_the_check_sees_a_greedy_proposal_verified_as_if_it_were_drawn(verifier):
    case = make_case("deterministic", 3, 2)
    uniform = dataclasses.replace(case.draft, logits=jnp.zeros((*case.draft.token_ids.shape, 3)))
    wrong = deviation(case, verifier, "full", uniform)
    assert wrong > 1e-3


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("form", ["full", "candidates"])
def test_the_check_sees_a_length_that_reads_its_own_token(form, verifier):
    wrong = deviation(make_case(form, 3, 2), verifier, "own token")
    assert wrong > 1e-3


def test_the_check_sees_a_verifier_that_is_wrong():
    """Block acceptance with token-wise residuals, and token-wise acceptance with block residuals."""
    case = make_case("full", 3, 2)
    token, block = (ways(case, verifier, "full") for verifier in VERIFIERS)
    for accepted, added in ((block[0], token[1]), (token[0], block[1])):
        ours = committed_distribution(case, accepted, added)
        assert max(np.abs(mine - theirs).max() for mine, theirs in zip(ours, case.reference)) > 1e-3


@pytest.mark.parametrize(("vocab", "size"), SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_block_verification_accepts_at_least_as_much(form, vocab, size):
    """For every prefix and every sampler, and more for some of them (Sun et al., 2025, Theorem 2)."""
    case = make_case(form, vocab, size)
    for rule in ("full", "past"):
        expected = []
        for verifier in VERIFIERS:
            kept = (ways(case, verifier, rule)[0] * np.arange(size + 1)).sum(1) * case.drawn
            place = case.sampler_index * 1000 + case.count * 100 + case.committed
            expected.append(np.bincount(place, kept))
        assert (expected[1] >= expected[0] - 1e-6).all()
        one_hot = form == "deterministic" or (form, vocab) == ("reduced", 2)  # there the two are the same
        gains = (expected[1] > expected[0] + 1e-3).any()
        assert gains != one_hot


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("form", FORMS)
def test_verify_draws_what_the_probabilities_say(form, verifier):
    """Monte Carlo on one block: accepted length and added token of `verify_processed` together, chi-square."""
    case, repeats = make_case(form, 3, 2), 20_000
    accepted, added = ways(case, verifier, "past")
    lengths = verify_lengths(case, "past")
    likely = (case.sampler_index == 0) & (lengths == 2) & (case.drawn > 0.02)
    row = int(np.flatnonzero(likely)[np.argmax(accepted[likely].min(-1))])  # every accepted length can happen
    many = lambda tree: jax.tree.map(lambda a: jnp.repeat(jnp.asarray(a)[row : row + 1], repeats, axis=0), tree)  # noqa: E731
    shared = case.draft.ids if form == "reduced" else None
    draft = many(dataclasses.replace(case.draft, ids=None if form == "reduced" else case.draft.ids))
    draft = dataclasses.replace(draft, ids=shared) if form == "reduced" else draft
    rng = np.random.default_rng(0)
    kept, token = jax.jit(reference.verify_processed, static_argnames="verifier")(
        many(case.log_p),
        draft,
        many(lengths.astype(np.int32)),
        many(case.sampler.temperature),
        rng.random((repeats, 2)).astype(np.float32),
        rng.random((repeats, 3)).astype(np.float32),
        verifier=verifier,
    )
    expected = (accepted[row][:, None] * added[row]).reshape(-1) * repeats
    counts = np.bincount(np.asarray(kept) * 3 + np.asarray(token), minlength=9)
    possible = expected > 5
    assert counts[expected < 1e-2].sum() == 0
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1e-9))[possible].sum()
    freedom = possible.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)
