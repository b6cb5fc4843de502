"""Logits processors: equal to Hugging Face's on recorded cases, per row, off by default, never everything dropped."""

import json

import jax
import numpy as np
import pytest

from dspark_jax import processors

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
process = jax.jit(processors.process)


def sampler(rows: int, **fields):
    values = {**OFF, **fields}
    return processors.make_sampler(np.broadcast_to(np.float32(values.pop("temperature")), (rows,)), **values)


@pytest.fixture(scope="module")
def recorded(golden):
    return json.loads((golden / "processors.json").read_text())


def test_hugging_face(recorded):
    """All recorded cases in one batch, each row with settings of its own."""
    records = recorded["records"]
    table = np.asarray([[-np.inf if v is None else v for v in row] for row in recorded["logits"]], np.float32)
    logits = table[[r["row"] for r in records]]
    settings = processors.make_sampler(*(np.asarray([r[name] for r in records]) for name in FIELDS))
    seen = np.zeros(logits.shape, bool)
    for row, record in enumerate(records):
        seen[row, record["seen"]] = True
    ours = np.asarray(jax.nn.softmax(process(logits, settings, seen), axis=-1))
    expected = np.asarray([r["probabilities"] for r in records])
    np.testing.assert_array_equal(ours > 0, expected > 0)  # the kept sets, ties included
    np.testing.assert_allclose(ours, expected, rtol=2e-5)  # recorded with seven digits; exp of logits up to 40 rounds
    alone = [r for r in records if sum(r[name] != OFF[name] for name in FIELDS) == 1]
    assert {name for r in alone for name in FIELDS if r[name] != OFF[name]} == set(FIELDS)


def nucleus(logits: np.ndarray, p: float) -> np.ndarray:
    """The kept set by a stable ascending sort in float64: what `keep_top_p` documents."""
    order = np.argsort(logits, kind="stable")
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    keep = np.zeros(logits.shape, bool)
    keep[order] = np.cumsum(weights) > (1 - p) * weights.sum()
    return keep


@pytest.mark.parametrize("size", [1, 2, 257, 4000])
def test_large_rows(size):
    """Real-sized rows, some of few distinct values: top-k against a sort, top-p against a stable sort."""
    rng = np.random.default_rng(size)
    logits = (rng.standard_normal((6, size)) * 4).astype(np.float32)
    logits[::2] = np.round(logits[::2])
    logits[5] /= 20  # flat: hundreds of tokens in the nucleus, beyond the few that are looked at first
    for k in (1, 2, 50, size - 1, size, size + 1, 2**31 - 1):
        kept = np.isfinite(process(logits, sampler(6, top_k=max(k, 0))))
        expected = logits >= np.sort(logits, axis=-1)[:, -min(k, size)][:, None] if k > 0 else np.ones(kept.shape, bool)
        np.testing.assert_array_equal(kept, expected)
    for p in (1e-6, 0.31, 0.9, 0.9973):
        kept = np.isfinite(process(logits, sampler(6, top_p=p)))
        for row in range(6):
            np.testing.assert_array_equal(kept[row], nucleus(logits[row], p))


def test_of_equal_tokens_top_p_keeps_the_last():
    logits = np.zeros((1, 10), np.float32)
    for p, count in ((0.01, 1), (0.35, 4), (0.95, 10)):
        kept = np.isfinite(process(logits, sampler(1, top_p=p)))[0]
        assert kept.tolist() == [False] * (10 - count) + [True] * count


def test_nothing_is_on_by_default():
    logits = np.random.default_rng(0).standard_normal((3, 2, 50)).astype(np.float32)
    np.testing.assert_array_equal(process(logits, sampler(3)), logits)
    edges = sampler(3, top_k=50, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    np.testing.assert_array_equal(process(logits, edges, np.ones((3, 1, 50), bool)), logits)


def test_rows_have_their_own_settings():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((6, 3, 40)).astype(np.float32)
    seen = rng.random((6, 1, 40)) < 0.3
    settings = [
        {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
        {"temperature": 0.7},
        {"top_k": 5, "repetition_penalty": 1.5},
        {"top_p": 0.6},
        {"temperature": 1.3, "min_p": 0.2, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 2.0},
    ]
    columns = [np.asarray([{**OFF, **s}[name] for s in settings]) for name in FIELDS]
    together = np.asarray(process(logits, processors.make_sampler(*columns), seen))
    for row, fields in enumerate(settings):
        alone = process(logits[row : row + 1], sampler(1, **fields), seen[row : row + 1])
        np.testing.assert_array_equal(together[row], alone[0])
    np.testing.assert_array_equal(together[0], logits[0])  # a greedy row is left whole ...
    assert (together[5] != logits[5]).any()  # ... except for the penalty
    assert np.isfinite(together).any(-1).all()
    assert np.isfinite(together[2]).sum(-1).tolist() == [5, 5, 5]


def test_one_token_stays_at_the_hardest_settings():
    logits = np.random.default_rng(2).standard_normal((2, 300)).astype(np.float32)
    for fields in ({"top_k": 1}, {"top_p": 1e-30}, {"min_p": 1.0}, {"top_k": 1, "top_p": 1e-30, "min_p": 1.0}):
        for temperature in (1e-6, 1.0, 50.0):
            kept = np.isfinite(process(logits, sampler(2, temperature=temperature, **fields)))
            assert kept.sum(-1).tolist() == [1, 1]
            assert kept.argmax(-1).tolist() == logits.argmax(-1).tolist()


def test_a_block_sees_its_own_drafts():
    """Row j is penalised for the committed tokens and x_1..x_j, as one call per position would do it."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((2, 4, 12)).astype(np.float32)
    tokens = np.asarray([[3, 5, 3, 11, 11, 11], [7, 0, 1, 2, 3, 4]])  # beyond the length: garbage
    length, drafted = np.asarray([3, 1]), np.asarray([[0, 3, 9], [7, 8, 8]])
    settings = sampler(2, repetition_penalty=[1.7, 0.6], top_k=[0, 4])
    block = np.asarray(jax.jit(processors.process_block)(logits, settings, tokens, length, drafted))
    for row in range(2):
        for j in range(4):
            seen = np.zeros((2, 12), bool)
            seen[row, [*tokens[row, : length[row]], *drafted[row, :j]]] = True
            np.testing.assert_array_equal(block[row, j], process(logits[:, j], settings, seen)[row])
    off = jax.jit(processors.process_block)(logits, sampler(2), tokens, length, drafted)
    np.testing.assert_array_equal(off, logits)


def test_nan_stays():
    """A filter must not hide that a model is broken."""
    logits = np.random.default_rng(4).standard_normal((4, 300)).astype(np.float32)
    logits[0, 7] = np.nan
    logits[1, 299] = -np.float32(np.nan)
    logits[2, :] = np.nan
    for fields in ({"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 20, "top_p": 0.9, "min_p": 0.1}):
        result = np.asarray(process(logits, sampler(4, **fields)))
        assert np.isnan(result.max(-1)).tolist() == [True, True, True, False]


def test_values_never_retrace():
    function = jax.jit(lambda logits, settings, seen: processors.process(logits, settings, seen))
    logits, seen = np.zeros((2, 9), np.float32), np.zeros((2, 9), bool)
    for fields in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.4, "min_p": 0.1}, {"repetition_penalty": 1.2}):
        function(logits, sampler(2, **fields), seen)
    assert function._cache_size() == 1
