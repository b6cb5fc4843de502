"""Whatever was accepted and rejected on the way, the state is that of a fresh run over the committed tokens.

Hypothesis plans how many draft tokens each row accepts in each cycle, where stop tokens stand and where budgets end; a
scripted drafter that keeps a real DSpark context carries the plan out.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode import BUDGET, SLOTS, VOCAB, random_dspark

import dspark_jax
from dspark_jax import generation
from dspark_jax.drafters.dspark import DSparkDrafter
from dspark_jax.generation import LoadedDrafter
from dspark_jax.records import Draft

pytestmark = pytest.mark.usefixtures("quick_compile")

SIZE = 4  # K
CYCLES = 6
PLANS = st.lists(st.lists(st.integers(0, SIZE), min_size=CYCLES, max_size=CYCLES), min_size=4, max_size=4)


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Proposes params["script"][row, position..] and keeps the context of a DSpark drafter."""

    inner: DSparkDrafter
    block_size: int = SIZE
    always_full: bool = True
    confidence_reads_draft: bool = True

    @property
    def tapped_layers(self):
        return self.inner.tapped_layers

    def init_state(self, batch, slots):
        return self.inner.init_state(batch, slots)

    def draft(self, params, state, tokens, length, uniforms, sampler):
        del state, tokens, uniforms, sampler
        place = length[:, None] + jnp.arange(SIZE)
        ids = jnp.take_along_axis(params["script"], place, axis=1)
        return Draft(ids, None, None, jnp.full(length.shape, SIZE, jnp.int32))

    def commit(self, params, state, output, count, tokens):
        return self.inner.commit(params["inner"], state, output, count, tokens)


@pytest.fixture(scope="module")
def inner(tiny_target):
    return random_dspark(tiny_target, block_size=SIZE)


@pytest.fixture(scope="module")
def texts(tiny_target, tiny_prompts):
    """Prompt and autoregressive answer of every row."""
    rows = dspark_jax.generate(tiny_target, tiny_prompts, max_new_tokens=BUDGET, cache_slots=SLOTS).rows
    return [prompt + row.token_ids for prompt, row in zip(tiny_prompts, rows)]


def follow(plans, inner, prompts, texts) -> LoadedDrafter:
    """A drafter of which each row accepts what its plan says: the token after them is wrong."""
    script = np.zeros((len(texts), SLOTS), np.int32)
    for b, (plan, prompt, text) in enumerate(zip(plans, prompts, texts)):
        script[b, : len(text)] = text
        place = len(prompt)  # of the cycle's first draft token
        for accepted in plan:
            if accepted < SIZE:
                script[b, place + accepted] = (script[b, place + accepted] + 1) % VOCAB
            place += accepted + 1
    return LoadedDrafter(Scripted(inner.drafter), {"script": jnp.asarray(script), "inner": inner.params}, "scripted")


@settings(max_examples=25, deadline=None)
@given(plans=PLANS)
def test_caches_equal_a_fresh_run(plans, inner, tiny_target, tiny_prompts, texts):
    drafter = follow(plans, inner, tiny_prompts, texts)
    options = {"drafter": drafter, "cache_slots": SLOTS, "max_new_tokens": BUDGET}
    session = generation.prepare(tiny_target, tiny_prompts, **options)
    state = session.run(session.state, CYCLES)
    lengths = np.asarray(state.length)
    for b, plan in enumerate(plans):
        planned, left = [], BUDGET
        for accepted in plan:
            planned.append(min(accepted + 1, left))
            left -= planned[-1]
        assert np.asarray(state.accepted)[b, :CYCLES].tolist() == planned
    tokens = [np.asarray(state.tokens)[b, : lengths[b]].tolist() for b in range(4)]
    assert tokens == [text[:n] for text, n in zip(texts, lengths)]
    fresh = generation.prepare(tiny_target, tokens, **{**options, "max_new_tokens": 1}).state
    for ours, again in ((state.cache, fresh.cache), (state.drafter, fresh.drafter)):
        np.testing.assert_array_equal(ours.length, lengths - 1)
        np.testing.assert_array_equal(again.length, lengths - 1)
        for a, b in zip((*ours.keys, *ours.values), (*again.keys, *again.values)):
            a, b = np.asarray(a), np.asarray(b)
            for row in range(4):
                used = slice(0, lengths[row] - 1)
                # Float32 sums over calls of other widths; entries are of order 1 to 10.
                np.testing.assert_allclose(a[row, :, used], b[row, :, used], atol=1e-4, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    plans=PLANS,
    budgets=st.lists(st.integers(0, BUDGET), min_size=4, max_size=4),
    stops=st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=2),
    seen=st.integers(0, 4 * BUDGET - 1),
)
def test_text_ends_where_autoregressive_text_ends(plans, budgets, stops, seen, inner, tiny_target, tiny_prompts, texts):
    """Two stop tokens, one of them from the text itself, so that it does come; budgets from 0 on."""
    stops = [stops[0], texts[seen // BUDGET][len(tiny_prompts[seen // BUDGET]) + seen % BUDGET]]
    drafter = follow(plans, inner, tiny_prompts, texts)
    rows = dspark_jax.generate(
        tiny_target, tiny_prompts, drafter=drafter, cache_slots=SLOTS, max_new_tokens=budgets, stop_ids=stops
    ).rows
    for row, prompt, text, budget in zip(rows, tiny_prompts, texts, budgets):
        answer = text[len(prompt) :][:budget]
        end = next((i + 1 for i, token in enumerate(answer) if token in stops), len(answer))
        assert row.token_ids == answer[:end]
        assert sum(row.accepted_lengths) == end
        assert row.stopped == (end > 0 and answer[end - 1] in stops)


def test_a_prompt_may_fill_the_cache(tiny_target, inner, tiny_prompts, texts):
    """To the last slot: prompt, budget and the room that a last block and a last chunk of prefill need."""
    prompt, text = tiny_prompts[3], texts[3]
    slots = len(prompt) + BUDGET + generation.PREFILL_CHUNK
    options = {"max_new_tokens": BUDGET, "cache_slots": slots, "drafter": inner}
    (row,) = dspark_jax.generate(tiny_target, [prompt], **options).rows
    assert prompt + row.token_ids == text
    with pytest.raises(generation.GenerationError, match=f"need {slots} cache slots of {slots - 1}"):
        dspark_jax.generate(tiny_target, [prompt], **{**options, "cache_slots": slots - 1})
