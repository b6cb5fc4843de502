"""Anchors, labels, losses and one training step: what training computes is what decoding will see."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dspark_jax import processors, text_stats
from dspark_jax.config import DecoderConfig, DrafterConfig, TrainConfig
from dspark_jax.drafters.dspark import DSparkModel, SharedWeights
from dspark_jax.records import KVCache
from train import anchors, data, losses, optimizer, step

pytestmark = pytest.mark.usefixtures("quick_compile")

BODY = DecoderConfig("qwen3", 50, 16, 24, 1, 2, 1, 8, 1e4, 1e-6, True, False, 128)
WEIGHTS = losses.LossWeights(ce=0.1, l1=0.9, confidence=1.0)
HEADS = ["none", "vanilla", "gated", "rnn"]


def make_model(head: str, layout="feature_major", vocab=None, **fields):
    """A loud random drafter (weights times 10): every input matters."""
    config = DrafterConfig(
        **{
            "decoder": BODY,
            "block_size": 4,
            "tapped_layers": (0, 1),
            "mask_token_id": 49,
            "sequential_head": head,
            "markov_rank": 6,
            "confidence_reads_markov": head != "none",
            "draft_vocab_size": 0 if vocab is None else len(vocab),
            **fields,
        }
    )
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    table = draw(50, 16)
    shared = SharedWeights(
        embed=draw(50, 16),
        head=table if vocab is None else table[vocab],
        vocab=None if vocab is None else jnp.asarray(vocab),
    )
    model = DSparkModel(config, layout)
    init = jax.jit(lambda key: model.init(key, shared, jnp.zeros((1, 1, 2, 16)), method="init_everything"))
    params = jax.tree.map(lambda w: w * 10 if w.ndim == 2 else w, init(jax.random.key(1))["params"])
    return model, shared, params, table


def make_batch(table, sizes=((4, 20), (7, 18))):
    """Two random sequences of up to 20 tokens with the target's normaliser of `table`."""
    rng = np.random.default_rng(2)
    batch, longest = len(sizes), 20
    hidden = jnp.asarray(rng.standard_normal((batch, longest, 16)), jnp.float32)
    return {
        "tokens": jnp.asarray(rng.integers(0, 49, (batch, longest)), jnp.int32),
        "features": jnp.asarray(rng.standard_normal((batch, longest, 2, 16)), jnp.float32),
        "last_hidden": hidden,
        "log_normalizer": jax.nn.logsumexp(hidden @ table.T, axis=-1),
        "start": jnp.zeros((batch, longest), jnp.int32),
        "response": jnp.asarray([[p <= t < n for t in range(longest)] for p, n in sizes]),
    }


# --- anchors --------------------------------------------------------------------------------------


def response_masks() -> np.ndarray:
    """Whole, short, one-token, empty, broken (two answers) and border-touching responses."""
    masks = np.zeros((6, 24), bool)
    masks[0, 3:20] = True
    masks[1, 10:14] = True
    masks[2, 5] = True
    masks[4, 2:7] = masks[4, 9:15] = True
    masks[5, :] = True
    return masks


def test_anchors_are_in_the_response():
    masks = response_masks()
    valid = masks & np.pad(masks[:, 1:], ((0, 0), (0, 1)))
    sample = jax.jit(anchors.sample_positions, static_argnums=2)
    seen = np.zeros_like(valid, int)
    for seed in range(40):
        positions, keep = map(np.asarray, sample(jax.random.key(seed), masks, 5))
        np.testing.assert_array_equal(keep.sum(1), np.minimum(valid.sum(1), 5))
        for b in range(len(masks)):
            chosen = positions[b, keep[b]]
            assert valid[b, chosen].all()
            assert (np.diff(chosen) > 0).all()  # ascending, none twice
            seen[b, chosen] += 1
    np.testing.assert_array_equal(seen > 0, valid)  # every place has its turn: the first and the last one too
    # Uniform: 40 draws of 5 out of 23 take each place 8.7 times, deviation 2.6.
    assert seen[5, :23].min() >= 1
    assert seen[5, :23].max() <= 8.7 + 5 * 2.6


def test_more_anchors_than_tokens():
    positions, keep = anchors.sample_positions(jax.random.key(0), response_masks(), 30)
    assert positions.shape == keep.shape == (6, 30)
    assert keep.sum(1).tolist() == [16, 3, 0, 0, 9, 23]


def test_labels_by_a_naive_loop():
    masks, block = response_masks(), 4
    tokens = np.random.default_rng(0).integers(0, 50, masks.shape)
    positions, keep = anchors.sample_positions(jax.random.key(1), masks, 6)
    result = anchors.make_anchors(jnp.asarray(tokens), jnp.asarray(masks), positions, keep, block)
    supervised = 0
    for b, a in np.ndindex(positions.shape):
        anchor, unbroken = int(positions[b, a]), bool(keep[b, a])
        for k in range(block):
            unbroken = unbroken and anchor + k + 1 < masks.shape[1] and bool(masks[b, anchor + k + 1])
            assert bool(result.weight_mask[b, a, k]) == unbroken
            if unbroken:
                assert int(result.label_ids[b, a, k]) == tokens[b, anchor + k + 1]
                assert int(result.previous_ids[b, a, k]) == tokens[b, anchor + k]
                assert int(result.source_positions[b, a, k]) == anchor + k
                supervised += 1
    assert supervised > 40
    assert np.asarray(result.weight_mask)[np.asarray(keep), 0].all()  # an anchor's first label is always supervised


# --- training sees what decoding sees -------------------------------------------------------------


def forward(model, shared, params, tokens, features, blocks):
    """Training's logits [B, A, K, V'] and confidence logits [B, A, K] (or None) of given blocks."""
    apply = lambda *args, method: model.apply({"params": params}, *args, method=method)  # noqa: E731
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    context = apply(features, place, method="project_context")
    ids = jnp.take_along_axis(tokens, blocks.positions, axis=1)
    hidden = apply(shared.embed, ids, blocks.positions, context, blocks.positions, method="backbone")
    flat = hidden.reshape(-1, *hidden.shape[2:])
    logits, confidence = apply(shared.head, flat, blocks.previous_ids.reshape(flat.shape[:2]), method="block_logits")
    shape = blocks.previous_ids.shape
    return logits.reshape(*shape, -1), None if confidence is None else confidence.reshape(shape)


def blocks_at(tokens, positions, block_size):
    everything = jnp.ones(tokens.shape, bool)
    positions = jnp.asarray(positions)
    return anchors.make_anchors(tokens, everything, positions, jnp.ones(positions.shape, bool), block_size)


@pytest.mark.parametrize(
    ("head", "fields"),
    [
        *((head, {}) for head in HEADS),
        ("vanilla", {"layout": "token_major"}),
        ("vanilla", {"anchor_layout": "anchor_only"}),
        ("rnn", {"vocab": np.arange(0, 50, 3)}),
        ("none", {"confidence_head": False}),
    ],
    ids=[*HEADS, "token_major", "anchor_only", "reduced", "no confidence"],
)
def test_training_logits_are_decoding_logits(head, fields):
    """Decode one block from a prefix, write the drafted tokens into the sequence, and train on it: the same logits."""
    model, shared, params, _ = make_model(head, **fields)
    rng = np.random.default_rng(3)
    size, anchor, block = 16, 6, 4
    tokens = rng.integers(0, 49, (1, size))
    features = jnp.asarray(rng.standard_normal((1, size, 2, 16)), jnp.float32)

    @jax.jit
    def decode(params, anchor_id, features):
        context = model.apply(
            {"params": params}, features, jnp.arange(size)[None], method="project_context"
        )  # slots from the anchor on are garbage, as in a cache that was rolled back
        cache = KVCache(keys=context.keys, values=context.values, length=jnp.full((1,), anchor))
        uniforms, sampler = jnp.full((1, block), 0.4), processors.make_sampler(jnp.ones((1,)))
        return model.apply({"params": params}, shared, anchor_id, cache, block, uniforms, sampler, method="draft_block")

    draft = decode(params, jnp.asarray(tokens[:, anchor]), features)
    tokens[0, anchor + 1 : anchor + 1 + block] = np.asarray(draft.token_ids)[0]
    tokens = jnp.asarray(tokens, jnp.int32)
    blocks = blocks_at(tokens, [[anchor, 9]], block)
    logits, confidence = jax.jit(lambda p: forward(model, shared, p, tokens, features, blocks))(params)
    # The same float32 numbers in products of other shapes; logits reach 50.
    np.testing.assert_allclose(draft.logits[0], logits[0, 0], atol=2e-4, rtol=1e-5)
    assert np.abs(np.asarray(draft.logits[0]) - logits[0, 1]).max() > 0.1  # another anchor's are not the same
    if model.config.confidence_head:
        np.testing.assert_allclose(draft.confidence_logits[0], confidence[0, 0], atol=2e-4, rtol=1e-5)
    else:
        assert draft.confidence_logits is None
        assert confidence is None


def test_a_shorter_block_is_a_prefix_of_the_whole_one():
    """The whole trained block runs through the backbone, whatever K decodes."""
    model, shared, params, _ = make_model("gated")
    features = jnp.asarray(np.random.default_rng(4).standard_normal((1, 8, 2, 16)), jnp.float32)

    def decode(block):
        context = model.apply({"params": params}, features, jnp.arange(8)[None], method="project_context")
        cache = KVCache(keys=context.keys, values=context.values, length=jnp.full((1,), 5))
        sampler = processors.make_sampler(jnp.zeros((1,)))
        arguments = (shared, jnp.asarray([3]), cache, block, jnp.zeros((1, block)), sampler)
        return model.apply({"params": params}, *arguments, method="draft_block")

    long, short = jax.jit(decode, static_argnums=0)(4), jax.jit(decode, static_argnums=0)(2)
    np.testing.assert_array_equal(long.token_ids[:, :2], short.token_ids)
    np.testing.assert_allclose(long.logits[:, :2], short.logits, atol=2e-4, rtol=1e-5)  # products of other shapes


@pytest.mark.parametrize("head", HEADS)
def test_causality(head):
    """Block position k sees true tokens up to a+k-1, and target features strictly below the anchor."""
    model, shared, params, _ = make_model(head)
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 49, (1, 16))
    features = rng.standard_normal((1, 16, 2, 16)).astype(np.float32)
    anchor, block = 6, 4

    @jax.jit
    def run(tokens, features):
        return forward(model, shared, params, tokens, features, blocks_at(tokens, [[anchor, 2]], block))[0][0, 0]

    def moved(tokens_=tokens, features_=features):
        other = np.asarray(run(jnp.asarray(tokens_, jnp.int32), jnp.asarray(features_)))
        return [bool((other[k] != original[k]).any()) for k in range(block)]

    original = np.asarray(run(jnp.asarray(tokens, jnp.int32), jnp.asarray(features)))
    for place in range(anchor, anchor + block + 1):
        changed = tokens.copy()
        changed[0, place] = (changed[0, place] + 7) % 49
        expected = {
            "none": [place == anchor] * block,
            "vanilla": [place == anchor or k == place - anchor for k in range(block)],
            "gated": [place == anchor or k == place - anchor for k in range(block)],
            "rnn": [k >= place - anchor for k in range(block)],  # its state remembers
        }[head]
        assert moved(tokens_=changed) == expected, f"token a+{place - anchor}"
    for place in range(16):
        changed = features.copy()
        changed[0, place] += 1
        assert moved(features_=changed) == [place < anchor] * block, f"feature {place}"


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduced", [False, True])
def test_losses_by_a_naive_loop(reduced):
    rng = np.random.default_rng(6)
    vocab, blocks, size = 11, 3, 4
    kept = np.array([0, 2, 3, 7, 10]) if reduced else np.arange(vocab)
    logits = rng.standard_normal((blocks, size, len(kept))).astype(np.float32)
    target = rng.standard_normal((blocks, size, vocab))
    p = np.exp(target) / np.exp(target).sum(-1, keepdims=True)
    label = rng.integers(0, vocab, (blocks, size))
    confidence = rng.standard_normal((blocks, size)).astype(np.float32)
    mask = rng.random((blocks, size)) < 0.7
    weights = losses.position_weights(jnp.asarray(mask), 4.0)
    index = np.array([[np.flatnonzero(kept == t)[0] if t in kept else -1 for t in row] for row in label])
    sums = losses.block_losses(logits, confidence, p[..., kept].astype(np.float32), index, weights)
    ce = l1 = bce = accept = 0.0
    for n, k in np.ndindex(blocks, size):
        w = np.exp(-k / 4.0) * mask[n, k]
        q = np.zeros(vocab)
        q[kept] = np.exp(logits[n, k].astype(np.float64)) / np.exp(logits[n, k].astype(np.float64)).sum()
        distance = np.abs(q - p[n, k]).sum()
        c = 1 / (1 + np.exp(-np.float64(confidence[n, k])))
        rate = np.minimum(q, p[n, k]).sum()
        ce -= w * np.log(q[label[n, k]]) if label[n, k] in kept else 0.0
        l1 += w * distance
        bce -= w * (rate * np.log(c) + (1 - rate) * np.log(1 - c))
        accept += w * rate
    for ours, expected in zip((sums.ce, sums.l1, sums.confidence, sums.accept), (ce, l1, bce, accept)):
        np.testing.assert_allclose(ours, expected, rtol=1e-5)  # a dozen float32 terms
    total = losses.combine(sums, WEIGHTS, weights.sum())
    np.testing.assert_allclose(total, (0.1 * ce + 0.9 * l1 + bce) / np.asarray(weights).sum(), rtol=1e-5)


def test_the_acceptance_rate_is_a_constant_of_the_confidence_loss():
    """The confidence head learns from the drafter, never the other way round."""
    rng = np.random.default_rng(7)
    p = jax.nn.softmax(jnp.asarray(rng.standard_normal((1, 2, 5))))
    arguments = (jnp.zeros((1, 2)), p, jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2)))
    logits = jnp.asarray(rng.standard_normal((1, 2, 5)), jnp.float32)
    of_logits = lambda name: jax.grad(lambda x: getattr(losses.block_losses(x, *arguments), name))(logits)  # noqa: E731
    assert not of_logits("confidence").any()
    assert of_logits("l1").any()


def test_chunks_do_not_matter_and_gradients_are_autodiff():
    """The scan over chunks and the joined gradients against plain differentiation of the loss in one piece."""
    vocab = np.arange(0, 50, 2)
    model, shared, params, table = make_model("rnn", vocab=vocab)
    batch = make_batch(table)
    positions, keep = anchors.sample_positions(jax.random.key(0), batch["response"], 6)
    blocks = anchors.make_anchors(batch["tokens"], batch["response"], positions, keep, 4)

    @jax.jit
    def plain(params):
        logits, confidence = forward(model, shared, params, batch["tokens"], batch["features"], blocks)
        hidden = jnp.take_along_axis(batch["last_hidden"][:, None], blocks.source_positions[..., None], axis=2)
        p = jax.nn.softmax(hidden @ table.T, axis=-1)[..., vocab]
        index = jnp.where(blocks.label_ids % 2 == 0, blocks.label_ids // 2, -1)
        weights = losses.position_weights(blocks.weight_mask, 4.0)
        flat = lambda x: x.reshape(12, *x.shape[2:])  # noqa: E731
        sums = losses.block_losses(*map(flat, (logits, confidence, p, index, weights)))
        return losses.combine(sums, WEIGHTS, weights.sum())

    expected, expected_gradients = jax.jit(jax.value_and_grad(plain))(params)
    for chunk in (3, 12):
        loss, _, _, gradients = jax.jit(
            lambda params, chunk=chunk: step.loss_and_gradients(
                model, shared, params, batch, blocks, WEIGHTS, 4.0, chunk
            )
        )(params)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert jax.tree.structure(gradients) == jax.tree.structure(expected_gradients)
        for ours, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients)):
            # Sums with cancellation: compare with the tensor's largest entry.
            np.testing.assert_allclose(ours, wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize(("head", "kernel"), [("rnn", "tpu"), ("none", "triton")])
def test_a_kernel_gives_the_losses_and_gradients_of_the_plain_path(head, kernel):
    vocab = np.arange(0, 50, 2)
    model, shared, params, table = make_model(head, vocab=vocab)
    model = model.clone(config=dataclasses.replace(model.config, decoder=dataclasses.replace(BODY, logit_softcap=5.0)))
    batch = make_batch(table)
    response = jnp.ones((2, 20), bool)
    positions, keep = anchors.sample_positions(jax.random.key(0), response, 3)
    blocks = anchors.make_anchors(batch["tokens"], response, positions, keep, 4)
    run = lambda backend: jax.jit(  # noqa: E731
        lambda params: step.loss_and_gradients(
            model, shared, params, batch, blocks, WEIGHTS, 4.0, 3, backend, backend != "reference"
        )
    )(params)
    expected = jax.tree.leaves(run("reference"))
    for ours, wanted in zip(jax.tree.leaves(run(kernel)), expected, strict=True):
        # Sums in another order, with cancellation: compare with the tensor's largest entry.
        np.testing.assert_allclose(ours, wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)


def test_a_training_step_learns():
    model, shared, params, table = make_model("gated")
    batch = make_batch(table)
    config = TrainConfig(steps=60, learning_rate=3e-3, heads_learning_rate=1e-2)
    optimiser = optimizer.make_optimizer(config)
    state = step.TrainState(params=params, optimizer=optimiser.init(params), step=jnp.zeros((), jnp.int32))
    run = jax.jit(
        lambda state: step.train_step(model, optimiser, WEIGHTS, 4.0, 8, 8, "reference", shared, state, batch, 0)
    )
    history = []
    for _ in range(60):
        state, metrics = run(state)
        history.append({name: float(value) for name, value in metrics.items()})
    assert int(state.step) == 60
    assert all(np.isfinite(list(row.values())).all() for row in history)
    mean = lambda name, rows: np.mean([row[name] for row in rows])  # noqa: E731
    assert mean("loss", history[-10:]) < 0.8 * mean("loss", history[:10])
    assert mean("expected_acceptance", history[-10:]) > mean("expected_acceptance", history[:10])
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), state.params, params)
    assert all(jax.tree.leaves(changed))  # every tensor is trained


def test_heads_have_a_learning_rate_of_their_own():
    _, _, params, _ = make_model("rnn")
    config = TrainConfig(steps=10, warmup_share=0.1, learning_rate=1e-4, heads_learning_rate=1e-2, clip_norm=1e9)
    optimiser = optimizer.make_optimizer(config)
    state, ones = optimiser.init(params), jax.tree.map(jnp.ones_like, params)
    _, state = optimiser.update(ones, state, params)
    updates, _ = optimiser.update(ones, state, params)  # the second step is at the peak
    for name, subtree in updates.items():
        rate = 1e-2 if name in optimizer.HEADS else 1e-4
        for leaf in jax.tree.leaves(subtree):
            np.testing.assert_allclose(leaf, -rate, rtol=1e-3)  # AdamW of a constant gradient moves by the rate


# --- data on disk ---------------------------------------------------------------------------------


def take_rows(seed: int, lengths: list[int], pack: bool, count: int) -> list[list[int]]:
    return list(itertools.islice(data.row_contents(seed, lengths, 100, pack), count))


def test_rows_are_permutations():
    for size in (10, 3):
        rows = take_rows(5, [40] * size, False, 3 * size)
        assert all(len(row) == 1 for row in rows)
        epochs = np.asarray(rows).reshape(3, size)
        np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(size), (3, 1)))
        assert len({tuple(epoch) for epoch in epochs.tolist()}) > 1  # every epoch another order
    assert take_rows(0, [40] * 50, False, 60) == take_rows(0, [40] * 50, False, 60)
    assert take_rows(0, [40] * 50, False, 60) != take_rows(1, [40] * 50, False, 60)


def test_packed_rows_hold_every_sequence_once_per_epoch_and_fit():
    lengths = np.random.default_rng(0).integers(5, 60, 200).tolist()
    lengths[7] = 250  # cut to a row of its own
    rows = take_rows(3, lengths, True, 200)
    used = [sum(min(lengths[i], 100) for i in row) for row in rows]
    assert max(used) <= 100
    assert np.mean(used) > 75  # an average sequence of 32 tokens alone would leave two thirds of a row empty
    assert [7] in rows
    ends = np.cumsum([len(row) for row in rows])
    assert 200 in ends  # a row never joins two epochs
    first = rows[: ends.tolist().index(200) + 1]
    assert sorted(i for row in first for i in row) == list(range(200))


def test_a_packed_batch_trains_as_its_sequences_alone(tmp_path):
    """The same losses and gradients: packed sequences do not see each other, nor does a block reach into the next."""
    sizes = [(3, 11), (2, 6), (4, 12)]
    sequences = [answered(i, p, n, width=16, vocab=49) for i, (p, n) in enumerate(sizes)]
    data.write_shard(tmp_path, 0, sequences, {"mass": np.zeros(4)})
    dataset = data.read_dataset(tmp_path, drop_loops=False)
    model, shared, params, _ = make_model("rnn")

    def sums_of(rows, size):
        batch = data.make_batch(dataset, rows, size)
        positions, keep = anchors.sample_positions(jax.random.key(0), batch["response"], 24)  # all there are
        blocks = anchors.make_anchors(batch["tokens"], batch["response"], positions, keep, 4)
        run = jax.jit(
            lambda params, batch: step.loss_and_gradients(model, shared, params, batch, blocks, WEIGHTS, 4.0, 24)
        )
        return run(params, batch)

    alone, packed = sums_of([[0], [1], [2]], 12), sums_of([[2, 0, 1]], 32)
    assert float(alone[2]) > 10  # weights of supervised positions
    for ours, wanted in zip(jax.tree.leaves(packed), jax.tree.leaves(alone), strict=True):
        # Sums in another order, with cancellation: compare with the tensor's largest entry.
        np.testing.assert_allclose(ours, wanted, atol=1e-4 * np.abs(wanted).max(), rtol=0)


def test_is_loop():
    assert text_stats.is_loop([1, 2, 3] * 10)
    assert text_stats.is_loop([7] * 11)
    assert not text_stats.is_loop(list(range(40)))
    assert not text_stats.is_loop([7] * 10)  # fewer than eight 4-grams: too short to tell
    assert not text_stats.is_loop([])


def answered(seed: int, prompt: int, size: int, width: int = 6, vocab: int = 1000) -> data.Answered:
    rng = np.random.default_rng(seed)
    return data.Answered(
        tokens=rng.integers(0, vocab, size).astype(np.int32),
        prompt_length=prompt,
        features=rng.standard_normal((size - 1, 2, width)).astype(ml_dtypes.bfloat16),
        last_hidden=rng.standard_normal((size - 1, width)).astype(np.float16),
        log_normalizer=rng.standard_normal(size - 1).astype(np.float32),
    )


def same(dataset: data.Dataset, place: int, expected: data.Answered) -> None:
    np.testing.assert_array_equal(dataset.tokens[place], expected.tokens)
    assert dataset.prompt_lengths[place] == expected.prompt_length
    np.testing.assert_array_equal(dataset.features[place].view(np.uint16), expected.features.view(np.uint16))
    np.testing.assert_array_equal(dataset.last_hidden[place], expected.last_hidden)
    np.testing.assert_array_equal(dataset.log_normalizer[place], expected.log_normalizer)


def test_shards_round_trip(tmp_path):
    sequences = [answered(i, p, n) for i, (p, n) in enumerate([(3, 20), (5, 7), (1, 9), (4, 30)])]
    looping = dataclasses.replace(answered(9, 2, 40), tokens=np.array([1, 2] + [3, 4] * 19, np.int32))
    mass = np.random.default_rng(0).random((2, 50)).astype(np.float32)
    data.write_shard(tmp_path, 0, [*sequences[:2], looping], {"mass": mass[0]})
    data.write_shard(tmp_path, 1, sequences[2:], {"mass": mass[1]})
    assert not list(tmp_path.glob("*.partial"))

    dataset = data.read_dataset(tmp_path, drop_loops=True)  # drops the loop, and the answer of two tokens
    assert len(dataset) == 3
    for place, number in enumerate((0, 2, 3)):
        same(dataset, place, sequences[number])
    np.testing.assert_allclose(dataset.mass, mass.sum(0), rtol=1e-6)  # summed in float64
    assert dataset.answer_tokens == 17 + 8 + 26

    everything = data.read_dataset(tmp_path, drop_loops=False, min_answer=0)
    assert len(everything) == 5
    for place, expected in enumerate([*sequences[:2], looping, *sequences[2:]]):
        same(everything, place, expected)


def test_batches_are_padded_and_cut(tmp_path):
    sequences = [answered(0, 3, 20), answered(1, 5, 9), answered(2, 14, 18)]
    data.write_shard(tmp_path, 0, sequences, {"mass": np.zeros(4)})
    batch = data.make_batch(data.read_dataset(tmp_path, drop_loops=False), [[2], [1], [0]], 12)
    # A cut that leaves no answer leaves no anchor.
    assert [np.flatnonzero(row).tolist() for row in batch["response"]] == [[], [5, 6, 7, 8], list(range(3, 12))]
    assert not batch["start"].any()
    for row, (number, length) in enumerate(((2, 12), (1, 9), (0, 12))):
        read = min(12, len(sequences[number].features))
        np.testing.assert_array_equal(batch["tokens"][row, :length], sequences[number].tokens[:12])
        assert not batch["tokens"][row, length:].any()
        np.testing.assert_array_equal(batch["last_hidden"][row, :read], sequences[number].last_hidden[:12])
        assert not batch["features"][row, read:].any()


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "text"])
def test_a_damaged_shard_is_named(tmp_path, damage):
    data.write_shard(tmp_path, 0, [answered(0, 3, 20)], {"mass": np.zeros(4)})
    data.write_shard(tmp_path, 1, [answered(1, 3, 20)], {"mass": np.zeros(4)})
    path = data.shard_path(tmp_path, 1)
    whole = bytearray(path.read_bytes())
    if damage == "flipped":
        place = whole.index(b"\x93NUMPY") + 140  # inside the first array
        whole[place] ^= 0xFF
    path.write_bytes({"truncated": whole[: len(whole) // 2], "empty": b"", "text": b"hello"}.get(damage, whole))
    with pytest.raises(data.DataError, match=r"shard_00001\.npz: damaged shard .* delete it and run again"):
        data.read_dataset(tmp_path, drop_loops=False)


def test_a_folder_without_data_is_refused(tmp_path):
    with pytest.raises(data.DataError, match="no training data"):
        data.read_dataset(tmp_path, drop_loops=False)
    data.write_shard(tmp_path, 0, [answered(0, 18, 20)], {"mass": np.zeros(4)})
    with pytest.raises(data.DataError, match="every answer was filtered out"):
        data.read_dataset(tmp_path, drop_loops=False)


def test_anchor_streams_differ_from_step_to_step():
    """(seed, step) keys the anchors: a resumed run draws what the uninterrupted one would have drawn."""
    masks = jnp.ones((1, 60), bool)
    draw = lambda number: anchors.sample_positions(jax.random.fold_in(jax.random.key(0), number), masks, 8)[0]  # noqa: E731
    assert draw(3).tolist() == draw(3).tolist() != draw(4).tolist()
