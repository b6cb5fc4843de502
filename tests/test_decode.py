"""The decoding cycle on a tiny random target: the text is the target's own, whatever drafts it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import decode, generation, processors, sampling, schedules
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.dspark import DSparkDrafter, DSparkModel, shared_weights
from dspark_jax.generation import LoadedDrafter
from dspark_jax.records import Draft

pytestmark = pytest.mark.usefixtures("quick_compile")

SLOTS = 128  # one size for everything: prompt 40 + budget 30 + 32 spare
BUDGET = 30
VOCAB = 97


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter:
    """Proposes params["script"][row, position..] with the confidences of params["confidence"]: full control."""

    block_size: int
    tapped_layers: tuple[int, ...] = ()
    always_full: bool = True
    confidence_reads_draft: bool = True

    def init_state(self, batch, slots):
        del batch, slots
        return ()

    def draft(self, params, state, tokens, length, uniforms, sampler):
        del state, tokens, uniforms, sampler
        place = length[:, None] + jnp.arange(self.block_size)
        take = lambda table: jnp.take_along_axis(table, place, axis=1)  # noqa: E731
        full = jnp.full(length.shape, self.block_size, jnp.int32)
        return Draft(
            token_ids=take(params["script"]), logits=None, confidence_logits=take(params["confidence"]), length=full
        )

    def commit(self, params, state, output, count, tokens):
        del params, output, count, tokens
        return state


def scripted(rows: list[list[int]], block_size: int, confidence: np.ndarray | None = None) -> LoadedDrafter:
    """A drafter that knows each row's whole text (prompt included) in advance."""
    script = np.zeros((len(rows), SLOTS), np.int32)
    for b, row in enumerate(rows):
        script[b, : len(row)] = row
    confidence = np.zeros(script.shape, np.float32) if confidence is None else confidence
    params = {"script": jnp.asarray(script), "confidence": jnp.asarray(confidence)}
    return LoadedDrafter(ScriptedDrafter(block_size), params, "scripted")


def random_dspark(target, seed: int = 0, vocab: np.ndarray | None = None, text: list[int] = (), **fields):
    """A random DSpark drafter; where the head is a plain Markov one, it starts from the bigrams of `text`."""
    config = DrafterConfig(
        **{
            "decoder": dataclasses.replace(target.config, num_layers=1),
            "tapped_layers": (-1, 1),
            "mask_token_id": 5,
            "markov_rank": VOCAB,
            "target_layers": target.config.num_layers,
            "draft_vocab_size": 0 if vocab is None else len(vocab),
            **fields,
        }
    )
    model = DSparkModel(config, target.layout)
    shared = shared_weights(target.params, None if vocab is None else jnp.asarray(vocab))
    features = jnp.zeros((1, 1, len(config.tapped_layers), config.decoder.width))
    params = jax.jit(lambda key: model.init(key, shared, features, method="init_everything"))(jax.random.key(seed))
    params = params["params"]
    if config.sequential_head in ("vanilla", "gated"):
        counts = np.zeros((VOCAB, VOCAB), np.float32)
        np.add.at(counts, (text[1:], text[:-1]), 20.0)
        params["sequential"]["w1"] = jnp.eye(VOCAB)
        params["sequential"]["w2"] = jnp.asarray(counts if vocab is None else counts[vocab])
    return LoadedDrafter(DSparkDrafter(model, config.block_size), {"model": params, "shared": shared}, "dspark")


def run(target, prompts, **options):
    options = {"max_new_tokens": BUDGET, "cache_slots": SLOTS, **options}
    return dspark_jax.generate(target, prompts, **options).rows


@pytest.fixture(scope="module")
def baseline(tiny_target, tiny_prompts):
    """The four prompts decoded autoregressively and greedily, all at once."""
    rows = run(tiny_target, tiny_prompts)
    assert all(len(set(row.token_ids)) > 5 for row in rows)  # not one token over and over
    return rows


@pytest.fixture(scope="module")
def whole(tiny_prompts, baseline):
    """Prompt and greedy answer of every row."""
    return [prompt + row.token_ids for prompt, row in zip(tiny_prompts, baseline)]


def test_autoregressive_rows_are_alone_in_their_batch(tiny_target, tiny_prompts, baseline):
    for prompt, row in zip(tiny_prompts, baseline):
        (alone,) = run(tiny_target, [prompt])
        assert alone.token_ids == row.token_ids
        assert alone.accepted_lengths == [1] * BUDGET


DSPARK = {
    "none": {"sequential_head": "none", "block_size": 1, "confidence_head": False, "confidence_reads_markov": False},
    "vanilla": {"sequential_head": "vanilla", "block_size": 2},
    "gated": {"sequential_head": "gated", "block_size": 5, "confidence_reads_markov": False},
    "rnn": {"sequential_head": "rnn", "block_size": 4},
    "reduced": {"sequential_head": "vanilla", "block_size": 6, "vocab": np.arange(0, VOCAB, 2)},
    "anchor_only": {"sequential_head": "vanilla", "block_size": 7, "anchor_layout": "anchor_only"},
}


@pytest.mark.parametrize(
    ("name", "threshold"),
    [("none", None), ("vanilla", 0.5), ("gated", None), ("rnn", 0.5), ("reduced", None), ("anchor_only", None)],
)
def test_speculative_greedy_is_autoregressive(tiny_target, tiny_prompts, baseline, whole, name, threshold):
    """Every head, both layouts of the anchor, a reduced vocabulary; K from 1 to 7; batch 4 and 1."""
    text = [token for row in whole for token in row]
    drafter = random_dspark(tiny_target, text=text, **DSPARK[name])
    policy = dspark_jax.schedules.full() if threshold is None else dspark_jax.schedules.threshold(threshold)
    options = {"drafter": drafter, "policy": policy}
    if name == "rnn":
        options["widths"] = (2, 5)  # another ladder than the default one
    rows = run(tiny_target, tiny_prompts, **options)
    for row, expected in zip(rows, baseline):
        assert row.token_ids == expected.token_ids
        assert sum(row.accepted_lengths) == len(row.token_ids)
        size = drafter.drafter.block_size
        assert all(1 <= a <= v + 1 <= size + 1 for a, v in zip(row.accepted_lengths, row.verify_lengths))
    lengths = [v for row in rows for v in row.verify_lengths]
    if threshold is None:
        assert set(lengths) == {drafter.drafter.block_size}
    if name in ("vanilla", "gated", "anchor_only"):  # bigrams of the very text: some drafts must be right
        assert max(a for row in rows for a in row.accepted_lengths) > 1
    (alone,) = run(tiny_target, tiny_prompts[2:3], **options)
    assert alone.token_ids == baseline[2].token_ids


def test_prompt_lookup_greedy_is_autoregressive(tiny_target, tiny_prompts, baseline, whole):
    rows = run(tiny_target, tiny_prompts, drafter=dspark_jax.prompt_lookup(3))
    assert [r.token_ids for r in rows] == [r.token_ids for r in baseline]
    # A prompt that holds its own answer twice over: the lookup finds it.
    text = whole[1]
    repeated = text[: len(text) // 2] * 2
    (row,) = run(tiny_target, [repeated], drafter=dspark_jax.prompt_lookup(3))
    assert row.token_ids == run(tiny_target, [repeated])[0].token_ids


def test_prompt_lookup_proposes_the_longest_latest_match():
    drafter = dspark_jax.prompt_lookup(3, max_ngram=3).drafter
    cases = [
        ([1, 2, 3, 4, 9, 2, 3, 5, 2, 3], [5, 2, 3], 3),  # the later of two equal matches
        ([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], [4, 9, 2], 3),  # the longer one, though earlier
        ([7, 8, 7], [8, 7], 2),  # only two tokens follow
        ([7, 7], [7], 1),
        ([1, 2, 3], [], 0),  # no match
        ([4], [], 0),
    ]
    tokens = np.full((len(cases), 16), 3, np.int32)  # garbage beyond the length must not match
    for row, (prompt, _, _) in enumerate(cases):
        tokens[row, : len(prompt)] = prompt
    length = jnp.asarray([len(c[0]) for c in cases])
    draft = jax.jit(lambda t, n: drafter.draft((), (), t, n, None, None))(jnp.asarray(tokens), length)
    for row, (_, expected, count) in enumerate(cases):
        assert int(draft.length[row]) == count
        assert np.asarray(draft.token_ids)[row, :count].tolist() == expected


@pytest.fixture(scope="module")
def corrupted(whole):
    """The rows' true texts with about a third of the tokens wrong: accepted lengths of every size."""
    rng = np.random.default_rng(0)
    return [[t if rng.random() < 0.7 else (t + 1) % VOCAB for t in row] for row in whole]


def test_scripted_drafts(tiny_target, tiny_prompts, baseline, whole, corrupted):
    rows = run(tiny_target, tiny_prompts, drafter=scripted(corrupted, 4))
    seen = set()
    for prompt, row, expected, script, text in zip(tiny_prompts, rows, baseline, corrupted, whole):
        assert row.token_ids == expected.token_ids
        assert sum(row.accepted_lengths) == BUDGET
        place = len(prompt)
        for accepted in row.accepted_lengths:
            wrong = [i for i in range(4) if place + i < len(text) and script[place + i] != text[place + i]]
            assert accepted == min((wrong[0] if wrong else 4) + 1, len(text) - place)
            place += accepted
            seen.add(accepted)
    assert seen == {1, 2, 3, 4, 5}


def test_perfect_drafts_are_cut_at_the_budget(tiny_target, tiny_prompts, baseline, whole):
    """Budgets of 0 and 1, in the middle and at the end of a block, side by side; nothing beyond is counted."""
    drafter = scripted(whole, 4)
    for budgets in ([0, 1, 2, 5], [4, 6, 10, 0], [0, 0, 0, 0]):
        rows = run(tiny_target, tiny_prompts, drafter=drafter, max_new_tokens=budgets)
        for row, budget, expected in zip(rows, budgets, baseline):
            assert row.token_ids == expected.token_ids[:budget]
            assert row.accepted_lengths == [5] * (budget // 5) + [budget % 5] * (budget % 5 > 0)
            assert not row.stopped


def test_stop_tokens_at_every_place_of_a_block(tiny_target, tiny_prompts, baseline, whole):
    """The stop token ends the row wherever it stands in the block; it is kept, and nothing after it."""
    for place in range(5):
        stop = baseline[3].token_ids[place]
        rows = run(tiny_target, tiny_prompts, drafter=scripted(whole, 4), stop_ids=[stop])
        plain = run(tiny_target, tiny_prompts, stop_ids=[stop])
        for row, without, full in zip(rows, plain, baseline):
            end = full.token_ids.index(stop) + 1 if stop in full.token_ids else BUDGET
            assert row.token_ids == without.token_ids == full.token_ids[:end]
            assert row.stopped == without.stopped == (stop in full.token_ids)
            assert sum(row.accepted_lengths) == end
        assert rows[3].stopped


def test_a_drafted_stop_token_that_is_rejected_stops_nothing(tiny_target, tiny_prompts, baseline, whole):
    absent = next(t for t in range(VOCAB) if all(t not in row for row in whole))
    script = [row[:-3] + [absent] * 3 for row in whole]
    rows = run(tiny_target, tiny_prompts, drafter=scripted(script, 4), stop_ids=[absent])
    assert [r.token_ids for r in rows] == [r.token_ids for r in baseline]
    assert not any(r.stopped for r in rows)


def test_threshold_cuts_where_confidence_falls(tiny_target, tiny_prompts, baseline, whole):
    """Confidence below the threshold at some places: verify lengths follow it, the text does not change."""
    confidence = np.where(np.random.default_rng(1).random((4, SLOTS)) < 0.7, 2.0, -2.0).astype(np.float32)
    drafter = scripted(whole, 4, confidence)
    rows = run(tiny_target, tiny_prompts, drafter=drafter, policy=dspark_jax.schedules.threshold(0.5))
    seen = set()
    for b, (prompt, row, expected) in enumerate(zip(tiny_prompts, rows, baseline)):
        assert row.token_ids == expected.token_ids
        place = len(prompt)
        for accepted, length in zip(row.accepted_lengths, row.verify_lengths):
            low = np.flatnonzero(confidence[b, place : place + 4] < 0)
            assert length == (low[0] if len(low) else 4)
            assert accepted == min(length + 1, len(prompt) + BUDGET - place)
            place += accepted
            seen.add(length)
    assert seen == {0, 1, 2, 3, 4}


@pytest.fixture(scope="module")
def markov(tiny_target, whole):
    text = [token for row in whole for token in row]
    return random_dspark(tiny_target, text=text, sequential_head="vanilla", block_size=3)


def test_a_row_does_not_know_its_batch(tiny_target, tiny_prompts, markov, baseline):
    """Sampled rows beside greedy ones, keyed by their own number: the same text alone."""
    temperature = [0.0, 1.0, 0.0, 1.0]
    numbers = [7, 3, 11, 5]
    for drafter in (markov, None):
        rows = run(tiny_target, tiny_prompts, drafter=drafter, temperature=temperature, rows=numbers, seed=2)
        for b in range(4):
            alone = run(
                tiny_target,
                tiny_prompts[b : b + 1],
                drafter=drafter,
                temperature=temperature[b],
                rows=numbers[b : b + 1],
                seed=2,
            )[0]
            assert alone.token_ids == rows[b].token_ids
            assert alone.accepted_lengths == rows[b].accepted_lengths
        assert rows[0].token_ids == baseline[0].token_ids
        assert rows[2].token_ids == baseline[2].token_ids
        assert rows[1].token_ids != baseline[1].token_ids  # it does sample
    other = run(tiny_target, tiny_prompts, temperature=temperature, rows=numbers, seed=3)
    assert other[1].token_ids != rows[1].token_ids


def test_one_compile_per_shape(tiny_target, tiny_prompts, markov):
    """Other prompts, temperatures, budgets, seeds and weights of the same shape compile nothing."""
    run(tiny_target, tiny_prompts, drafter=markov)
    before = (decode.speculative_loop_jit._cache_size(), decode.prefill_jit._cache_size())
    other = LoadedDrafter(markov.drafter, jax.tree.map(lambda w: w * 1, markov.params), "dspark")
    run(
        tiny_target,
        [[3], [1, 2], [4] * 35, [5] * 20],
        drafter=other,
        temperature=[0.0, 1.0, 0.5, 0.0],
        max_new_tokens=[3, 9, 0, 7],
        top_k=[0, 5, 0, 1000],
        top_p=0.9,
        min_p=[0.0, 0.1, 0.0, 0.0],
        repetition_penalty=1.2,
        seed=9,
    )
    assert (decode.speculative_loop_jit._cache_size(), decode.prefill_jit._cache_size()) == before
    run(tiny_target, tiny_prompts[:3], drafter=markov, max_new_tokens=1)  # another batch does
    assert decode.speculative_loop_jit._cache_size() == before[0] + 1


OPTIONS = {  # options of the drafter, of the request
    "block": ({}, {"verifier": "block"}),
    "greedy drafts": ({"draft_sampling": "greedy"}, {"verifier": "block"}),
    "candidates": ({"candidates": 8}, {"verifier": "block"}),
    "one candidate": ({"candidates": 1}, {}),
    "fused head": ({}, {"fuse_lm_head": True}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_is_autoregressive_with_every_option(tiny_target, tiny_prompts, markov, baseline, name):
    """Also beside sampled rows with every processor on, and with a repetition penalty."""
    of_drafter, of_request = OPTIONS[name]
    drafter = dataclasses.replace(markov, drafter=dataclasses.replace(markov.drafter, **of_drafter))
    options = {"drafter": drafter, **of_request}
    rows = run(tiny_target, tiny_prompts, **options)
    assert [r.token_ids for r in rows] == [r.token_ids for r in baseline]
    if name != "one candidate":
        assert max(a for r in rows for a in r.accepted_lengths) > 1
    mixed = {"temperature": [0, 1, 0, 0.8], "top_k": [5, 0, 0, 9], "top_p": [1, 0.9, 0.5, 0.8], "min_p": 0.01}
    mixed["repetition_penalty"] = [1.0, 1.1, 1.4, 1.0]
    rows = run(tiny_target, tiny_prompts, **mixed, **options)
    plain = run(tiny_target, tiny_prompts, **mixed)
    assert rows[0].token_ids == plain[0].token_ids == baseline[0].token_ids
    assert rows[2].token_ids == plain[2].token_ids != baseline[2].token_ids  # the penalty changes greedy text
    (alone,) = run(
        tiny_target,
        tiny_prompts[1:2],
        rows=[1],
        temperature=1.0,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        **options,
    )
    assert alone.token_ids == rows[1].token_ids


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_verification_from_hidden_states_draws_the_same_tokens(tiny_target, tiny_prompts, markov, verifier):
    """Greedy beside sampled rows; a batch with more than temperatures has logits after all."""
    options = {"drafter": markov, "verifier": verifier, "seed": 4}
    for sampler in ({"temperature": [0.0, 1.0, 0.7, 1.3]}, {"temperature": 1.0, "top_k": [0, 5, 9, 3]}):
        plain = run(tiny_target, tiny_prompts, **sampler, **options)
        fused = run(tiny_target, tiny_prompts, **sampler, **options, fuse_lm_head=True)
        assert [r.token_ids for r in fused] == [r.token_ids for r in plain]
        assert [r.accepted_lengths for r in fused] == [r.accepted_lengths for r in plain]


def test_a_fused_head_has_no_logits_for_a_policy(tiny_target, tiny_prompts, markov):
    policy = schedules.context_complexity(base=0.3, coefficient=0.4, window=2)
    with pytest.raises(generation.GenerationError, match="fuse_lm_head with policy context_complexity"):
        run(tiny_target, tiny_prompts, drafter=markov, policy=policy, fuse_lm_head=True)


@pytest.mark.parametrize("candidates", [0, 6])
@pytest.mark.parametrize("vocab", [None, np.arange(0, VOCAB, 2)])
def test_drafts_are_drawn_from_the_q_that_they_report(tiny_target, whole, candidates, vocab):
    """Every token is what its position's uniform draws from softmax(Draft.logits), with every processor on."""
    loaded = random_dspark(tiny_target, vocab=vocab, text=whole[1], sequential_head="vanilla", block_size=3)
    drafter = dataclasses.replace(loaded.drafter, candidates=candidates)
    rows = 16
    rng = np.random.default_rng(0)
    tokens, length = jnp.asarray(rng.integers(0, VOCAB, (rows, 32))), jnp.asarray(rng.integers(1, 20, rows))
    state = dataclasses.replace(drafter.init_state(rows, 32), length=length - 1)
    uniforms = jnp.asarray(rng.random((rows, 3)), jnp.float32)
    settings = processors.make_sampler(np.linspace(0.0, 1.5, rows), [0, 9] * 8, 0.9, 0.01, [1.0, 1.5, 1.0, 0.7] * 4)
    draft = jax.jit(drafter.draft)(loaded.params, state, tokens, length, uniforms, settings)
    for k in range(3):
        index = sampling.sample(draft.logits[:, k], settings.temperature, uniforms[:, k])
        if candidates:
            index = np.take_along_axis(draft.ids[:, k], index[:, None], axis=1)[:, 0]
        elif vocab is not None:
            index = vocab[index]
        np.testing.assert_array_equal(draft.token_ids[:, k], index)
    assert draft.logits.shape == (rows, 3, candidates or (VOCAB if vocab is None else len(vocab)))
    if vocab is not None:
        assert np.isin(draft.token_ids, vocab).all()


@pytest.mark.parametrize(("backend", "candidates"), [("tpu", 0), ("triton", 6)])
@pytest.mark.filterwarnings("error:markov_sample")  # the reference does not step in
def test_the_fused_loop_drafts_what_the_plain_one_drafts(tiny_target, backend, candidates):
    decoder = dataclasses.replace(tiny_target.config, num_layers=1, vocab_size=104)  # W1 in whole groups of 8 rows
    vocab = np.arange(0, VOCAB, 2)
    fields = {"decoder": decoder, "sequential_head": "rnn", "markov_rank": 32, "block_size": 3}
    loaded = random_dspark(tiny_target, vocab=vocab, **fields)
    params, model, rows = loaded.params, loaded.drafter.model, 3
    params["model"]["sequential"] = jax.tree.map(lambda x: 30 * x, params["model"]["sequential"])  # a bias that counts
    context = dataclasses.replace(loaded.drafter.init_state(rows, 32), length=jnp.asarray([4, 9, 2]))
    anchors, uniforms = jnp.asarray([3, 7, 11]), jax.random.uniform(jax.random.key(0), (rows, 3))

    def draft(settings, **options):
        arguments = (params["shared"], anchors, context, 3, uniforms, settings, None, candidates)
        return model.apply({"params": params["model"]}, *arguments, method="draft_block", **options)

    fused = jax.jit(functools.partial(draft, backend=backend, interpret=True))
    plain = jax.jit(draft)
    for top_k in (0, 2):  # a processor that the kernel does not know takes the plain loop
        settings = processors.make_sampler([0.0, 0.7, 1.2], [0, 0, top_k])
        for one, other in zip(jax.tree.leaves(fused(settings)), jax.tree.leaves(plain(settings)), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)  # products are summed in another order


@dataclasses.dataclass(frozen=True)
class BreaksAt:
    """A target whose logits after the token `poison` are `value`."""

    step: Any
    poison: int
    value: float

    def __call__(self, params, token_ids, cache, with_logits=True):
        output = self.step(params, token_ids, cache, with_logits=with_logits)
        if not with_logits:
            return output
        bad = (token_ids == self.poison)[..., None]
        if np.isnan(self.value):
            bad &= jnp.arange(VOCAB) == 50  # one entry is enough
        return dataclasses.replace(output, logits=jnp.where(bad, self.value, output.logits))


@dataclasses.dataclass(frozen=True)
class Breaking(dspark_jax.Target):
    poison: int = 0
    value: float = float("nan")

    def step(self, *args, **options):
        return BreaksAt(super().step(*args, **options), self.poison, self.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_target_stops_the_row(tiny_target, tiny_prompts, whole, baseline, value, temperature):
    """No token is drawn from logits that are not numbers; the error names row and position, with any drafter."""
    first = {}
    for i, token in enumerate(baseline[1].token_ids):
        first.setdefault(token, i)
    poison = next(t for t, i in first.items() if 3 <= i < 20 and t not in tiny_prompts[1])
    fields = {f.name: getattr(tiny_target, f.name) for f in dataclasses.fields(tiny_target)}
    broken = Breaking(**fields, poison=poison, value=value)
    good = baseline[1].token_ids[: first[poison] + 1]
    for drafter in (None, scripted([whole[1]], 4)):
        options = {"drafter": drafter, "cache_slots": SLOTS, "max_new_tokens": BUDGET, "temperature": temperature}
        if temperature:
            options["top_k"] = 1  # the greedy text by way of sampling
        position = len(tiny_prompts[1]) + len(good)
        with pytest.raises(generation.GenerationError, match=f"row 0: the target's logits for position {position} are"):
            dspark_jax.generate(broken, tiny_prompts[1:2], **options)
        pieces = []
        stream = dspark_jax.stream(broken, tiny_prompts[1], **options)
        with pytest.raises(generation.GenerationError, match=f"position {position}"):
            pieces.extend(stream)  # keeps what came before the error
        assert [token for piece in pieces for token in piece] == good
        options["max_new_tokens"] = len(good)  # done before it matters
        assert dspark_jax.generate(broken, tiny_prompts[1:2], **options).rows[0].token_ids == good


def test_a_broken_drafter_proposes_nothing(tiny_target, tiny_prompts, markov, baseline):
    """NaN in its weights: the text is the target's all the same, one token a cycle."""
    params = jax.tree.map(lambda w: w, markov.params)
    params["model"]["sequential"]["w2"] = jnp.full_like(params["model"]["sequential"]["w2"], jnp.nan)
    drafter = dataclasses.replace(markov, params=params)
    for temperature in (0.0, 1.0):
        rows = run(tiny_target, tiny_prompts, drafter=drafter, temperature=temperature, top_k=3, top_p=0.9)
        assert all(r.accepted_lengths == [1] * BUDGET and r.verify_lengths == [0] * BUDGET for r in rows)
        plain = run(tiny_target, tiny_prompts, temperature=temperature, top_k=3, top_p=0.9)
        assert [r.token_ids for r in rows] == [r.token_ids for r in plain]


@pytest.mark.parametrize("cycles", [1, 3])
def test_stream_gives_what_generate_gives(tiny_target, tiny_prompts, markov, cycles):
    options = {"drafter": markov, "cache_slots": SLOTS, "max_new_tokens": BUDGET}
    (row,) = run(tiny_target, tiny_prompts[1:2], drafter=markov)
    pieces = list(dspark_jax.stream(tiny_target, tiny_prompts[1], cycles_per_piece=cycles, **options))
    assert [token for piece in pieces for token in piece] == row.token_ids
    grouped = [sum(row.accepted_lengths[i : i + cycles]) for i in range(0, len(row.accepted_lengths), cycles)]
    assert [len(piece) for piece in pieces] == grouped


@pytest.mark.parametrize(
    ("size", "ladder"), [(1, (1, 2)), (5, (1, 2, 4, 6)), (7, (1, 2, 4, 8)), (15, (1, 2, 4, 8, 16))]
)
def test_default_widths(size, ladder):
    drafter, full, threshold = ScriptedDrafter(size), dspark_jax.schedules.full(), dspark_jax.schedules.threshold(0.5)
    assert decode.default_widths(drafter, threshold) == ladder
    assert decode.default_widths(drafter, full) == ladder[-1:]
    assert decode.default_widths(dspark_jax.prompt_lookup(size).drafter, full) == ladder
