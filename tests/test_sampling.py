"""Sampling: the inverse CDF exactly, frequencies, and streams that don't know their batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import sampling

BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))
draw = jax.jit(sampling.sample_weights)


@pytest.mark.parametrize("size", [1, 2, 97, 255, 256, 257, 600, 1024])
def test_inverse_cdf(size):
    """With integer weights every float32 sum is exact, and so is the answer, at the borders too."""
    rng = np.random.default_rng(size)
    weights = rng.integers(0, 4, size).astype(np.float32)  # a quarter of them zero
    weights[rng.integers(size)] = 3
    total = int(weights.sum())
    scale = 2 ** int(np.ceil(np.log2(total)))
    weights[np.flatnonzero(weights)[-1]] += scale - total  # a power of two: uniforms i / scale are exact
    cumulative = np.cumsum(weights)
    goals = np.arange(scale)
    uniforms = (goals / scale).astype(np.float32)
    drawn = np.asarray(draw(np.broadcast_to(weights, (scale, size)), uniforms))
    np.testing.assert_array_equal(drawn, np.searchsorted(cumulative, goals, side="right"))


@pytest.mark.parametrize("size", [97, 600, 1000])
def test_weight_zero_is_never_drawn(size):
    """Uniforms that fall on the borders between entries, give or take a few units in the last place."""
    rng = np.random.default_rng(size)
    rows = 20000
    weights = (rng.random((rows, size)) ** 4 * (rng.random((rows, size)) < 0.5)).astype(np.float32)
    weights[:, 0] += 1e-3
    cumulative = np.cumsum(weights.astype(np.float64), axis=-1)
    border = cumulative[np.arange(rows), rng.integers(0, size, rows)] / cumulative[:, -1]
    uniforms = np.clip(border + rng.integers(-3, 4, rows) * 2.0**-24, 0, BELOW_ONE).astype(np.float32)
    drawn = np.asarray(draw(weights, uniforms))
    assert (weights[np.arange(rows), drawn] > 0).all()
    # It is the inverse CDF up to rounding: the goal lies inside the drawn entry's interval, or 1e-5 beside it.
    goal = uniforms * cumulative[:, -1]
    upper = cumulative[np.arange(rows), drawn]
    lower = upper - weights[np.arange(rows), drawn]
    slack = 1e-5 * cumulative[:, -1]
    assert ((lower - slack <= goal) & (goal <= upper + slack)).all()


def test_ends_of_the_interval():
    weights = np.zeros((4, 700), np.float32)
    weights[0, 3] = weights[1, 300] = weights[2, 699] = 1e-20
    weights[3, [5, 600]] = 0.1, 0.7
    assert draw(weights, np.zeros(4, np.float32)).tolist() == [3, 300, 699, 5]
    assert draw(weights, np.full(4, BELOW_ONE)).tolist() == [3, 300, 699, 600]


def test_leading_axes():
    rng = np.random.default_rng(0)
    weights, uniforms = rng.random((2, 3, 300)).astype(np.float32), rng.random((2, 3)).astype(np.float32)
    flat = draw(weights.reshape(6, 300), uniforms.reshape(6))
    np.testing.assert_array_equal(draw(weights, uniforms), np.asarray(flat).reshape(2, 3))


def test_frequencies():
    """Chi-square of 40000 draws from softmax(logits), 300 tokens."""
    rows, size = 40000, 300
    logits = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    uniforms = jax.random.uniform(jax.random.key(0), (rows,))
    drawn = sampling.sample(jnp.broadcast_to(logits, (rows, size)), jnp.full((rows,), 0.7), uniforms)
    expected = rows * np.asarray(jax.nn.softmax(logits), np.float64)
    counts = np.bincount(np.asarray(drawn), minlength=size)
    statistic = ((counts - expected) ** 2 / expected).sum()
    # Mean 299, deviation sqrt(2 * 299) = 24; the seed is fixed, so five deviations never flake.
    assert statistic < 299 + 5 * 24.5
    wrong = rows * np.asarray(jax.nn.softmax(logits / 0.7), np.float64)  # another temperature: far outside
    assert ((counts - wrong) ** 2 / wrong).sum() > 1000


def test_greedy_rows_beside_sampled_rows():
    logits = np.random.default_rng(2).standard_normal((6, 50)).astype(np.float32)
    temperature = np.array([0, 1, 0, 2, 0, 1], np.float32)
    uniforms = np.full(6, 0.99, np.float32)
    mixed = np.asarray(sampling.sample(logits, temperature, uniforms))
    np.testing.assert_array_equal(mixed[::2], logits.argmax(-1)[::2])
    np.testing.assert_array_equal(sampling.sample(logits, np.zeros(6, np.float32), uniforms), logits.argmax(-1))
    alone = [int(sampling.sample(logits[i : i + 1], temperature[i : i + 1], uniforms[i : i + 1])[0]) for i in range(6)]
    assert mixed.tolist() == alone


def test_argmax_takes_the_first_of_equals():
    logits = jnp.asarray([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0], [jnp.nan, 0.0, 1.0]])
    assert sampling.argmax(logits).tolist()[:2] == [1, 0]
    assert 0 <= int(sampling.argmax(logits)[2]) < 3


def test_streams_are_keyed_by_row_anchor_and_slot():
    keys = sampling.row_keys(7, jnp.asarray([4, 0, 9]))
    anchors = jnp.asarray([10, 3, 10])
    uniforms = np.asarray(sampling.cycle_uniforms(keys, anchors, 4))
    assert uniforms.shape == (3, 4, 3)
    assert (uniforms >= 0).all()
    assert (uniforms < 1).all()
    # Alone, and in a longer block: the same numbers.
    alone = np.asarray(sampling.cycle_uniforms(sampling.row_keys(7, jnp.asarray([9])), jnp.asarray([10]), 9))
    np.testing.assert_array_equal(uniforms[2], alone[0, :4])
    # Other rows, anchors, slots, columns and seeds have numbers of their own.
    assert len(np.unique(uniforms)) == uniforms.size
    other = np.asarray(sampling.cycle_uniforms(sampling.row_keys(8, jnp.asarray([4, 0, 9])), anchors, 4))
    assert not np.isin(other, uniforms).any()


def test_every_cycle_draws_fresh_numbers():
    """The same token position, reached from another anchor, has other numbers: a rejection reuses none."""
    keys = jnp.broadcast_to(sampling.row_keys(0, jnp.asarray([0])), (8,))
    uniforms = np.asarray(sampling.cycle_uniforms(keys, jnp.arange(8), 8))  # anchor a, slot s: position a + 1 + s
    assert len(np.unique(uniforms)) == uniforms.size


def test_uniforms_are_uniform_and_independent():
    keys = sampling.row_keys(0, jnp.repeat(jnp.arange(100), 20))
    uniforms = np.asarray(sampling.cycle_uniforms(keys, jnp.tile(jnp.arange(20), 100), 5)).reshape(-1, 3)
    # 10000 draws: the mean deviates by 0.0029, a correlation by 0.01; five deviations.
    np.testing.assert_allclose(uniforms.mean(0), 0.5, atol=5 * 0.0029)
    np.testing.assert_allclose(np.corrcoef(uniforms.T), np.eye(3), atol=0.05)
    np.testing.assert_allclose(np.corrcoef(uniforms.reshape(2000, -1).T), np.eye(15), atol=5 * 0.0224)
