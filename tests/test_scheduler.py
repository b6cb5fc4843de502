"""Policies: their rules step by step, what they may know, and the text that they leave alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import Toy, draft_of, independent, output_of, text_distribution
from flax import struct
from test_decode import BUDGET, SLOTS, VOCAB, random_dspark, scripted

import dspark_jax
from dspark_jax import attention, config, decode, generation, schedules, sps
from dspark_jax.config import ConfigError
from dspark_jax.generation import GenerationError
from dspark_jax.scheduler import Feedback, Policy, normalized_entropy

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS, SIZE = 3, 7


def table(values) -> sps.SpsTable:
    return sps.SpsTable(tuple(range(1, len(values) + 1)), tuple(values), "here", "toy", "abc")


JAGGED = table([1.0, 0.9, 0.7, 0.75, 0.6, 0.58, 0.5, 0.52, *(0.5 - 0.01 * i for i in range(24))])
LOSSLESS = {
    "full": schedules.full(),
    "threshold": schedules.threshold(0.6),
    "adaptive_threshold": schedules.adaptive_threshold(start=0.5, failures=2, conservative_cycles=2),
    "context_complexity": schedules.context_complexity(base=0.2, coefficient=0.6, window=2),
    "conservative_tokens": schedules.conservative_tokens([1]),
    "hardware_aware": schedules.hardware_aware(JAGGED),
    "delayed": schedules.delayed(JAGGED),
    "threshold+conservative_tokens": schedules.conservative_tokens([1], schedules.threshold(0.4)),
    "hardware_aware+conservative_tokens": schedules.conservative_tokens([1], schedules.hardware_aware(JAGGED)),
    "delayed+conservative_tokens": schedules.conservative_tokens([1], schedules.delayed(JAGGED)),
}
BIASED = {"global_maximum": schedules.global_maximum(JAGGED), "oracle": schedules.oracle()}
EVERY = {**LOSSLESS, **BIASED}


@jax.jit
def decide(policy, state, draft, active):
    return policy.verify_length(state, draft, active)


@jax.jit
def learn(policy, state, feedback):
    return policy.update(state, feedback)


def feedback_of(accepted, verified, active=None, draft=None, output=None) -> Feedback:
    rows = len(accepted)
    active = np.ones(rows, bool) if active is None else active
    draft = draft_of(np.zeros((rows, SIZE)), np.full((rows, SIZE), 0.5)) if draft is None else draft
    return Feedback(
        draft, jnp.asarray(verified, jnp.int32), jnp.asarray(accepted, jnp.int32), jnp.asarray(active), output
    )


def random_draft(rng, rows=ROWS, size=SIZE):
    return draft_of(rng.integers(0, 4, (rows, size)), rng.uniform(0.02, 0.999, (rows, size)))


def random_feedback(rng, draft, lengths, active=None) -> Feedback:
    lengths = np.asarray(lengths)
    output = output_of(rng.random((len(lengths), SIZE + 1)), rng.random((len(lengths), SIZE + 1)))
    return feedback_of(rng.integers(0, lengths + 1), lengths, active, draft, output)


def prefix(confident) -> int:
    """Length of the longest prefix of true entries."""
    for place, entry in enumerate(confident):
        if not entry:
            return place
    return len(confident)


# --- the rules ---------------------------------------------------------------------------------------------------


def test_full_threshold_and_conservative_tokens():
    rng, active = np.random.default_rng(0), jnp.ones(ROWS, bool)
    for _ in range(50):
        draft = random_draft(rng)
        draft = dataclasses.replace(draft, length=jnp.asarray(rng.integers(0, SIZE + 1, ROWS), jnp.int32))
        confidence, length = np.asarray(jax.nn.sigmoid(draft.confidence_logits)), np.asarray(draft.length)
        t = np.float32(rng.random())
        confident = [min(prefix(row >= t), l) for row, l in zip(confidence, length)]
        ends = [prefix(~np.isin(row, [1, 3])) + 1 for row in np.asarray(draft.token_ids)]
        assert decide(schedules.full(), (), draft, active).tolist() == length.tolist()
        assert decide(schedules.threshold(t), (), draft, active).tolist() == confident
        cut = decide(schedules.conservative_tokens([3, 1]), (), draft, active)
        assert cut.tolist() == [min(e, l) for e, l in zip(ends, length)]
        both = decide(schedules.conservative_tokens([1, 3], schedules.threshold(t)), (), draft, active)
        assert both.tolist() == [min(e, l) for e, l in zip(ends, confident)]
        assert decide(schedules.oracle(), (), draft, active).tolist() == length.tolist()  # the cycle cuts it


def test_a_threshold_includes_confidence_equal_to_it():
    draft = draft_of([[0, 0, 0]], [[1.0, 0.5, 0.4]])
    assert decide(schedules.threshold(0.5), (), draft, jnp.ones(1, bool)).tolist() == [2]
    assert decide(schedules.threshold(1.0), (), draft, jnp.ones(1, bool)).tolist() == [1]  # a saturated sigmoid
    assert decide(schedules.threshold(0.0), (), draft, jnp.ones(1, bool)).tolist() == [3]


class PlainAdaptive:
    """One row of the adaptive threshold, from the rule."""

    def __init__(self, size, **constants):
        c = {"start": 0.9, "low": 0.3, "high": 0.98, "rejections": 3, "acceptances": 5, "failures": 3, **constants}
        self.c, self.size, self.t = c, size, c["start"]
        self.length, self.shortest, self.longest = min(5, size), min(3, size), min(10, size)
        self.rejected = self.accepted = self.failed = self.wait = 0

    def verify_length(self, confidence):
        t, limit = (self.c["high"], 1) if self.wait else (self.t, self.length)
        return min(prefix(confidence >= np.float32(t)), limit)

    def update(self, n, l):
        if self.wait:
            self.wait -= 1
            if not self.wait:
                self.length, self.rejected, self.accepted, self.failed = self.shortest, 0, 0, 0
            return
        if l == 0:
            return
        if n < l:
            self.rejected, self.accepted = self.rejected + 1, 0
            self.length = max(self.length // 2, self.shortest)
        else:
            self.rejected, self.accepted = 0, self.accepted + 1
            self.length = min(self.length + 1, self.longest)
        self.failed = self.failed + 1 if n == 0 else 0
        if self.rejected == self.c["rejections"]:
            self.t, self.rejected = self.t * 0.95, 0
        if self.accepted == self.c["acceptances"]:
            self.t, self.accepted = self.t * 1.05, 0
        self.t = min(max(self.t, self.c["low"]), self.c["high"])
        if self.failed == self.c["failures"]:
            self.wait, self.failed = 8, 0


@pytest.mark.parametrize(("size", "constants"), [(7, {}), (2, {"failures": 2}), (16, {"low": 0.8, "rejections": 1})])
def test_adaptive_threshold_is_its_plain_loop(size, constants):
    rng = np.random.default_rng(size)
    policy = schedules.adaptive_threshold(**constants)
    rows = [PlainAdaptive(size, **constants) for _ in range(8)]
    state, seen = policy.init_state(8, size), set()
    for _ in range(150):
        draft = draft_of(np.zeros((8, size)), rng.random((8, size)) ** 0.02)  # most of them above 0.9
        active = rng.random(8) < 0.9
        lengths = np.asarray(decide(policy, state, draft, jnp.asarray(active)))
        confidence = np.asarray(jax.nn.sigmoid(draft.confidence_logits))
        n = np.asarray([rng.choice([0, l, rng.integers(0, l + 1)]) for l in lengths])
        for row, one, conf, ours, kept in zip(range(8), rows, confidence, lengths, n):
            assert one.verify_length(conf) == ours
            if active[row]:
                seen.add((one.length, one.wait > 0))
                one.update(int(kept), int(ours))
        state = learn(policy, state, feedback_of(n, lengths, active, draft))
        # The threshold is a product of float32 factors here, of float64 ones there.
        np.testing.assert_allclose(state.threshold, [one.t for one in rows], rtol=1e-5)
        assert state.conservative.tolist() == [one.wait for one in rows]
        assert state.length.tolist() == [one.length for one in rows]
        for one, t in zip(rows, np.asarray(state.threshold)):
            one.t = float(t)  # so that rounding does not add up
    assert {wait for _, wait in seen} == {False, True}


def test_adaptive_threshold_step_by_step():
    policy = schedules.adaptive_threshold()
    state = policy.init_state(1, SIZE)

    def after(*outcomes):
        nonlocal state
        for n, l in outcomes:
            state = learn(policy, state, feedback_of([n], [l]))
        return pytest.approx(float(state.threshold[0])), int(state.length[0]), int(state.conservative[0])

    assert after() == (0.9, 5, 0)
    assert after((1, 2)) == (0.9, 3, 0)  # a rejection: 5 // 2 = 2, but not below 3
    assert after((0, 0), (0, 0)) == (0.9, 3, 0)  # nothing asked, nothing learned, no streak broken
    assert after((1, 2), (1, 2)) == (0.9 * 0.95, 3, 0)  # the third rejection in a row
    assert after((1, 2), (1, 2)) == (0.9 * 0.95, 3, 0)  # the count starts again
    assert after(*[(3, 3)] * 4) == (0.9 * 0.95, 7, 0)  # acceptances lengthen the block, up to K = 7
    assert after((7, 7)) == (0.9 * 0.95 * 1.05, 7, 0)  # the fifth in a row
    assert after((0, 7), (0, 3)) == (0.9 * 0.95 * 1.05, 3, 0)
    assert after((0, 3)) == (0.9 * 0.95 * 1.05 * 0.95, 3, 8)  # three failures: conservative for 8 cycles
    careful = draft_of(np.zeros((1, SIZE)), np.full((1, SIZE), 0.99))
    assert decide(policy, state, careful, jnp.ones(1, bool)).tolist() == [1]
    assert decide(policy, state, draft_of([[0]], [[0.95]]), jnp.ones(1, bool)).tolist() == [0]
    t = 0.9 * 0.95 * 1.05 * 0.95
    assert after(*[(1, 1)] * 7) == (t, 3, 1)  # neither threshold nor length learns meanwhile
    assert after((0, 1)) == (t, 3, 0)  # the way back: shortest block, the old threshold, no streaks
    assert decide(policy, state, careful, jnp.ones(1, bool)).tolist() == [3]
    assert after((3, 3)) == (t, 4, 0)
    assert [int(state.rejections[0]), int(state.acceptances[0]), int(state.failures[0])] == [0, 1, 0]
    assert after(*[(1, 2)] * 200)[0] == pytest.approx(0.3)  # bounds
    assert after(*[(2, 2)] * 400)[0] == pytest.approx(0.98)


def test_adaptive_block_length_never_exceeds_k():
    policy = schedules.adaptive_threshold(start=0.3)
    for size in (1, 2, 4):
        state = policy.init_state(1, size)
        draft = draft_of(np.zeros((1, size)), np.full((1, size), 0.9))
        for _ in range(6):
            assert decide(policy, state, draft, jnp.ones(1, bool)).tolist() == [size]
            state = learn(policy, state, feedback_of([size], [size], draft=draft))
            assert int(state.length[0]) == size


def test_context_complexity_is_its_plain_loop():
    rng = np.random.default_rng(4)
    weights, window = (2.0, 1.0, 3.0), 5
    policy = schedules.context_complexity(0.3, 0.5, weights, 0.25, window)
    state = policy.init_state(ROWS, SIZE)
    entropies, spreads, rate = [[] for _ in range(ROWS)], [[] for _ in range(ROWS)], [1.0] * ROWS
    mean = lambda values: sum(values) / len(values) if values else 0.0  # noqa: E731
    for _ in range(30):
        draft, active = random_draft(rng), rng.random(ROWS) < 0.8
        lengths = np.asarray(decide(policy, state, draft, jnp.asarray(active)))
        thresholds = []
        for r in range(ROWS):
            parts = (mean(entropies[r][-window:]), mean(spreads[r][-3:]), 1 - rate[r])
            thresholds.append(0.3 + 0.5 * sum(w * part for w, part in zip(weights, parts)) / sum(weights))
        np.testing.assert_allclose(0.3 + 0.5 * policy.complexity(state), thresholds, rtol=1e-5)  # float32
        confidence = np.asarray(jax.nn.sigmoid(draft.confidence_logits))
        assert lengths.tolist() == [prefix(row >= t) for row, t in zip(confidence, thresholds)]
        feedback = random_feedback(rng, draft, lengths, active)
        state = learn(policy, state, feedback)
        for r in np.flatnonzero(active):
            n = int(feedback.accepted[r])
            entropies[r] += np.asarray(feedback.output.entropy)[r, : n + 1].tolist()
            spreads[r] += np.asarray(feedback.output.attention_spread)[r, : n + 1].tolist()
            rate[r] += 0.25 * (n / lengths[r] - rate[r]) if lengths[r] else 0.0


def test_normalized_entropy():
    assert normalized_entropy(jnp.zeros((2, 5))).tolist() == pytest.approx([1.0, 1.0])
    one_hot = jnp.asarray([0.0, -jnp.inf, -jnp.inf])
    assert float(normalized_entropy(one_hot)) == 0.0
    assert float(normalized_entropy(jnp.log(jnp.asarray([0.5, 0.5, 0.0, 0.0])))) == pytest.approx(0.5)


def test_attention_spread_is_the_entropy_of_the_weights():
    rng = np.random.default_rng(7)
    queries, keys = rng.normal(0, 2, (2, 3, 4, 8)), rng.normal(0, 2, (2, 2, 6, 8))  # [B, T, N, H], [B, G, S, H]
    own, visible = rng.normal(0, 2, (2, 3, 2, 8)), [4, 0]
    spread = attention.attention_spread(*map(jnp.asarray, (queries, keys, visible, own)))
    for b in range(2):
        for t in range(3):
            entropies = []
            for head in range(4):
                group = head // 2
                seen = [*keys[b, group, : visible[b]], *own[b, : t + 1, group]]
                scores = np.asarray([queries[b, t, head] @ key / np.sqrt(8) for key in seen])
                weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
                entropies.append(-(weights * np.log(weights)).sum())
            expected = np.mean(entropies) / np.log(max(len(seen), 2))
            assert float(spread[b, t]) == pytest.approx(expected, abs=1e-5)  # float32


# --- what a policy may know --------------------------------------------------------------------------------------


def histories(policy, rng, cycles):
    """Yields states that a policy comes to, with every row active."""
    state = policy.init_state(ROWS, SIZE)
    for _ in range(cycles):
        yield state
        draft = random_draft(rng)
        lengths = decide(policy, state, draft, jnp.ones(ROWS, bool))
        state = learn(policy, state, random_feedback(rng, draft, lengths))


def influenced(rng, draft, row, k):
    """The same draft up to token k - 1 of a row; token k (1-based) and all that it can influence are others."""
    tokens, confidence = np.array(draft.token_ids), np.array(draft.confidence_logits)
    tokens[row, k - 1 :] = rng.integers(0, 4, SIZE - k + 1)
    confidence[row, k:] = rng.normal(0, 4, SIZE - k)
    return dataclasses.replace(draft, token_ids=jnp.asarray(tokens), confidence_logits=jnp.asarray(confidence))


def changed_decisions(policy, seed: int) -> int:
    """How often token k of a row and what follows from it change whether it is verified."""
    rng, changed, active = np.random.default_rng(seed), 0, jnp.ones(ROWS, bool)
    for state in histories(policy, rng, 6):
        draft = random_draft(rng)
        lengths = np.asarray(decide(policy, state, draft, active))
        for row in range(ROWS):
            for k in range(1, SIZE + 1):
                for _ in range(3):
                    other = np.asarray(decide(policy, state, influenced(rng, draft, row, k), active))
                    changed += (lengths[row] >= k) != (other[row] >= k)
    return changed


@pytest.mark.parametrize("name", LOSSLESS)
def test_no_token_decides_whether_it_is_verified(name):
    assert changed_decisions(LOSSLESS[name], 0) == 0
    assert LOSSLESS[name].biased(True) == ""


def test_that_check_can_fail():
    assert changed_decisions(BIASED["global_maximum"], 0) > 0
    assert BIASED["global_maximum"].biased(True)


TOY = Toy((0.6, 0.3, 0.1), (0.2, 0.5, 0.3), lambda before: (0.9, *((0.95, 0.35, 0.6)[x] for x in before))[len(before)])


@pytest.mark.parametrize("name", LOSSLESS)
def test_the_text_has_the_targets_distribution(name):
    """Exact, by enumeration over several cycles: a state that leaked today's draft would show."""
    text = text_distribution(LOSSLESS[name], TOY, 4)
    np.testing.assert_allclose(text, independent(TOY.p, 4), atol=1e-12)  # float64 sums


@struct.dataclass
class Leaky(Policy):
    """Decides by the second draft token whether the first is verified."""

    name = "leaky"

    def verify_length(self, state, draft, active):
        del state, active
        return jnp.where(draft.token_ids[:, 0] == 0, 2, 0)


def test_the_enumeration_can_fail():
    text = text_distribution(Leaky(), TOY, 2)
    assert text.sum() == pytest.approx(1)
    assert np.abs(text - independent(TOY.p, 2)).max() > 0.02


@pytest.mark.parametrize("name", EVERY)
def test_rows_that_are_done_influence_nobody(name):
    """Neither today's nor the state's entries of such a row matter, and it keeps what it knew."""
    policy, rng = EVERY[name], np.random.default_rng(5)
    active = np.asarray([True, False, True])
    for state in histories(policy, rng, 5):
        draft = random_draft(rng)
        garbage = jax.tree.map(lambda a, b: jnp.asarray(np.where(expand(active, a), a, b)), draft, random_draft(rng))
        lengths, again = (np.asarray(decide(policy, state, d, jnp.asarray(active))) for d in (draft, garbage))
        assert lengths[active].tolist() == again[active].tolist()
        states = [
            learn(policy, state, random_feedback(np.random.default_rng(1), d, lengths, active))
            for d in (draft, garbage)
        ]
        for old, one, two in zip(*map(jax.tree.leaves, (state, *states))):
            np.testing.assert_array_equal(one, two)
            if name.startswith(("adaptive", "context")):
                np.testing.assert_array_equal(old[1], one[1])


def expand(mask, array):
    return mask.reshape(-1, *[1] * (array.ndim - 1))


@pytest.mark.parametrize(
    "name", ["full", "threshold", "adaptive_threshold", "context_complexity", "conservative_tokens"]
)
def test_a_row_does_not_know_the_others(name):
    policy, rng = LOSSLESS[name], np.random.default_rng(6)
    state, alone = policy.init_state(ROWS, SIZE), policy.init_state(1, SIZE)
    for _ in range(12):
        draft = random_draft(rng)
        lengths = decide(policy, state, draft, jnp.ones(ROWS, bool))
        first = lambda tree: jax.tree.map(lambda a: a[1:2], tree)  # noqa: E731
        assert decide(policy, alone, first(draft), jnp.ones(1, bool)).tolist() == [int(lengths[1])]
        feedback = random_feedback(rng, draft, lengths)
        state, alone = learn(policy, state, feedback), learn(policy, alone, first(feedback))


# --- in the loop -------------------------------------------------------------------------------------------------

K = 4


def run(target, prompts, **options):
    options = {"max_new_tokens": [BUDGET, 7, BUDGET, 19], "cache_slots": SLOTS, **options}
    return dspark_jax.generate(target, prompts, **options).rows


@pytest.fixture(scope="module")
def baseline(tiny_target, tiny_prompts):
    return run(tiny_target, tiny_prompts)


@pytest.fixture(scope="module")
def drafter(tiny_prompts, baseline):
    """Drafts the greedy text with seven of ten tokens right, and claims random confidences."""
    rng = np.random.default_rng(0)
    text = [prompt + row.token_ids for prompt, row in zip(tiny_prompts, baseline)]
    script = [[t if rng.random() < 0.7 else (t + 1) % VOCAB for t in row] for row in text]
    return scripted(script, K, rng.normal(1, 2, (len(text), SLOTS)).astype(np.float32))


@pytest.mark.parametrize("name", EVERY)
def test_greedy_text_is_autoregressive(tiny_target, tiny_prompts, baseline, drafter, name):
    rows = run(tiny_target, tiny_prompts, drafter=drafter, policy=EVERY[name], widths=(2, K + 1))
    lengths = [l for row in rows for l in row.verify_lengths]
    for row, expected in zip(rows, baseline):
        assert row.token_ids == expected.token_ids
        assert all(1 <= a <= l + 1 <= K + 1 for a, l in zip(row.accepted_lengths, row.verify_lengths))
        if name == "oracle":  # nothing is rejected; the last cycle may be cut by the budget
            assert all(a == l + 1 for a, l in zip(row.accepted_lengths[:-1], row.verify_lengths[:-1]))
    assert len(set(lengths)) > (1 if name != "full" else 0)


def test_other_constants_and_states_compile_nothing(tiny_target, tiny_prompts, drafter):
    go = functools.partial(run, tiny_target, tiny_prompts, drafter=drafter, widths=(2, K + 1))
    changes = [
        (schedules.threshold(0.6), schedules.threshold(1)),
        (LOSSLESS["adaptive_threshold"], schedules.adaptive_threshold(start=1, high=1.0, shortest=1)),
        (LOSSLESS["delayed"], schedules.delayed(table([3.0 - 0.05 * i for i in range(len(JAGGED.tokens))]))),
    ]
    for first, second in changes:
        go(policy=first)
        before = (decode.speculative_loop_jit._cache_size(), decode.prefill_jit._cache_size())
        go(policy=second)
        assert (decode.speculative_loop_jit._cache_size(), decode.prefill_jit._cache_size()) == before


@struct.dataclass
class Spy(Policy):
    """Verifies everything; its state is what it was told last."""

    name = "spy"

    def init_state(self, batch, block_size):
        del block_size
        return tuple(jnp.full((batch,), -1) + i for i in range(3))

    def verify_length(self, state, draft, active):
        del state, active
        return draft.length

    def update(self, state, feedback):
        new = (feedback.accepted, feedback.verify_len, feedback.active.astype(jnp.int32))
        return tuple(jnp.where(feedback.active, a, b) for a, b in zip(new, state))


def test_policies_learn_what_was_accepted_before_any_cut(tiny_target, tiny_prompts, baseline):
    """A perfect draft, cut by a budget of 2 and by a stop token: four draft tokens were accepted all the same."""
    text = [prompt + row.token_ids for prompt, row in zip(tiny_prompts, baseline)]
    options = {"drafter": scripted(text, K), "cache_slots": SLOTS, "policy": Spy()}
    session = generation.prepare(tiny_target, tiny_prompts, max_new_tokens=[2, 2, 0, 7], **options)
    state = session.run(session.state, 10)
    assert (np.asarray(state.length) - np.asarray(state.prompt_length)).tolist() == [2, 2, 0, 7]
    assert [leaf.tolist() for leaf in state.schedule] == [[4, 4, -1, 4], [4, 4, 0, 4], [1, 1, 1, 1]]
    stop = baseline[3].token_ids[1]
    session = generation.prepare(tiny_target, tiny_prompts, max_new_tokens=7, stop_ids=[stop], **options)
    state = session.run(session.state, 1)
    assert state.schedule[0].tolist() == [4] * 4


def test_only_policies_that_ask_pay_for_the_targets_measures(tiny_target):
    cache = generation.kv_cache.init_cache(tiny_target.config, 2, 16)
    ids = jnp.asarray([[1, 2, 3], [4, 5, 6]])
    plain, measured = (
        jax.jit(tiny_target.step((1,), with_attention_spread=asked))(tiny_target.params, ids, cache)
        for asked in (False, True)
    )
    assert plain.attention_spread is None
    np.testing.assert_allclose(plain.logits, measured.logits, rtol=1e-5)
    assert measured.attention_spread.shape == (2, 3)
    assert np.asarray(measured.attention_spread)[:, 0].tolist() == [0, 0]  # the first token sees itself only
    assert [policy.reads_target for policy in EVERY.values()].count(True) == 1


# --- the gate ----------------------------------------------------------------------------------------------------


def test_sampling_with_a_biased_policy_is_refused(tiny_target, tiny_prompts, drafter):
    for policy, why in ((schedules.oracle(), "it knows which"), (BIASED["global_maximum"], "draft tokens influence")):
        with pytest.raises(
            GenerationError, match=f"policy {policy.name} at temperature 0.7 .*{why}.*use temperature 0"
        ):
            run(tiny_target, tiny_prompts, drafter=drafter, policy=policy, temperature=[0.0, 0.0, 0.7, 0.0])
        generation.check_lossless(policy, drafter, 0.0)
    blind = dataclasses.replace(drafter, drafter=dataclasses.replace(drafter.drafter, confidence_reads_draft=False))
    generation.check_lossless(BIASED["global_maximum"], blind, 0.7)
    with pytest.raises(GenerationError):
        generation.check_lossless(schedules.conservative_tokens([1], BIASED["global_maximum"]), blind, 0.7)
    with pytest.raises(GenerationError):
        generation.check_lossless(schedules.oracle(), blind, 0.7)
    for policy in LOSSLESS.values():
        generation.check_lossless(policy, drafter, 0.7)


def test_drafters_say_whether_confidences_read_the_draft(tiny_target):
    reads = lambda **fields: random_dspark(tiny_target, text=[1, 2], **fields).drafter.confidence_reads_draft  # noqa: E731
    assert reads()
    assert not reads(confidence_reads_markov=False)
    assert not dspark_jax.prompt_lookup(2).drafter.confidence_reads_draft


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.threshold(-0.1), r"policy threshold = -0\.1: use a probability"),
        (lambda: schedules.threshold(float("nan")), "policy threshold = nan"),
        (lambda: schedules.conservative_tokens([]), "name one or more token ids"),
        (lambda: schedules.conservative_tokens([3, -1]), "name one or more token ids"),
        (lambda: schedules.adaptive_threshold(strat=0.9), "unknown constant strat; use start"),
        (lambda: schedules.adaptive_threshold(low=0.95), "start = 0.9: it lies between low and high"),
        (lambda: schedules.adaptive_threshold(high=1.5), "high = 1.5"),
        (lambda: schedules.adaptive_threshold(up=float("inf")), "up = inf"),
        (lambda: schedules.adaptive_threshold(rejections=2.5), "rejections = 2.5: use a whole number"),
        (lambda: schedules.adaptive_threshold(base_length=2), "base_length = 2: shortest..longest"),
        (lambda: schedules.context_complexity(base=2), "base = 2"),
        (lambda: schedules.context_complexity(coefficient=0.9), r"base \+ coefficient must lie in 0..1"),
        (lambda: schedules.context_complexity(weights=(0, 0, 0)), "not all 0"),
        (lambda: schedules.context_complexity(pace=0), "pace = 0"),
        (lambda: schedules.context_complexity(window=0), "window = 0"),
        (lambda: schedules.from_name("best"), "policy = 'best': use one of full, threshold"),
        (lambda: schedules.from_name("delayed"), "policy delayed needs a measured SPS table"),
        (lambda: schedules.from_name("full+conservative_tokens"), "name one or more token ids"),
        (lambda: schedules.from_name("full+threshold"), "NAME.conservative_tokens"),
    ],
)
def test_constants_that_cant_work_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_every_name_makes_its_policy():
    for name in config.POLICIES:
        for wanted in {name, f"{name.replace('conservative_tokens', 'full')}+conservative_tokens"}:
            policy = schedules.from_name(wanted, table=JAGGED, conservative_ids=[1])
            assert policy.name == wanted.removeprefix("full+")


def test_policies_that_read_confidences_need_them(tiny_target):
    for name in config.CONFIDENCE_POLICIES:
        with pytest.raises(ConfigError, match=f"policy '{name}' needs a drafter with a confidence head"):
            dspark_jax.generate(tiny_target, [[1]], drafter=dspark_jax.prompt_lookup(2), policy=EVERY[name])


def test_a_table_too_short_for_the_batch_is_refused(tiny_target, drafter):
    policy = schedules.hardware_aware(table([1.0] * 8))
    with pytest.raises(ConfigError, match="ends at 8 tokens, 2 rows with blocks of 4 need up to 10"):
        dspark_jax.generate(tiny_target, [[1], [2]], drafter=drafter, policy=policy)
