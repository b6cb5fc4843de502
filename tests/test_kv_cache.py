"""The cache: writes land at each row's length, and rolling back is a length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import kv_cache
from dspark_jax.config import DecoderConfig
from dspark_jax.records import BlockKV

CONFIG = DecoderConfig("llama", 40, 32, 64, 2, 4, 2, 16)
SLOTS = 12


def random_block(seed: int, batch: int, size: int) -> BlockKV:
    rng = np.random.default_rng(seed)
    draw = lambda: jnp.asarray(rng.standard_normal((batch, 2, size, 16)), jnp.float32)  # noqa: E731
    return BlockKV(keys=(draw(), draw()), values=(draw(), draw()))


@pytest.fixture(scope="module")
def append():
    return jax.jit(kv_cache.append)


def test_starts_empty():
    cache = kv_cache.init_cache(CONFIG, 3, SLOTS, jnp.bfloat16)
    assert len(cache.keys) == len(cache.values) == CONFIG.num_layers
    assert {(k.shape, k.dtype) for k in (*cache.keys, *cache.values)} == {((3, 2, SLOTS, 16), jnp.dtype("bfloat16"))}
    assert cache.length.tolist() == [0, 0, 0]


@pytest.mark.parametrize("batch", [1, 4])
def test_appends_are_the_concatenation_of_what_counts(append, batch):
    """Random counts over several appends: each row holds exactly the tokens that counted, in order."""
    rng = np.random.default_rng(batch)
    cache = kv_cache.init_cache(CONFIG, batch, SLOTS)
    kept = [[] for _ in range(batch)]
    for number in range(3):
        block = random_block(number, batch, 4)
        count = rng.integers(0, 5, batch) if number else np.arange(batch) % 5  # a count of 0 is among them
        cache = append(cache, block, jnp.asarray(count))
        for b in range(batch):
            kept[b].append(np.asarray(block.keys[1][b, :, : count[b]]))
    for b in range(batch):
        expected = np.concatenate(kept[b], axis=1)
        assert int(cache.length[b]) == expected.shape[1]
        np.testing.assert_array_equal(cache.keys[1][b, :, : expected.shape[1]], expected)


def test_a_rejected_token_is_overwritten(append):
    cache = append(kv_cache.init_cache(CONFIG, 2, SLOTS), random_block(0, 2, 4), jnp.asarray([1, 4]))
    second = random_block(1, 2, 4)
    cache = append(cache, second, jnp.asarray([4, 4]))
    assert cache.length.tolist() == [5, 8]
    np.testing.assert_array_equal(cache.values[0][0, :, 1:5], second.values[0][0])
    np.testing.assert_array_equal(cache.values[0][1, :, 4:8], second.values[0][1])


def test_rows_are_apart(append):
    """Another row's block and count never touch a row's slots."""
    start = append(kv_cache.init_cache(CONFIG, 2, SLOTS), random_block(0, 2, 4), jnp.asarray([3, 2]))
    one, other = random_block(1, 2, 4), random_block(2, 2, 4)
    mixed = jax.tree.map(lambda a, b: jnp.stack([a[0], b[1]]), one, other)
    first, second = append(start, one, jnp.asarray([2, 4])), append(start, mixed, jnp.asarray([2, 1]))
    for a, b in zip((*first.keys, *first.values), (*second.keys, *second.values)):
        np.testing.assert_array_equal(a[0], b[0])
        assert not np.array_equal(a[1], b[1])


def test_keeps_its_dtype(append):
    cache = append(kv_cache.init_cache(CONFIG, 1, SLOTS, jnp.bfloat16), random_block(0, 1, 4), jnp.asarray([4]))
    assert {k.dtype for k in (*cache.keys, *cache.values)} == {jnp.dtype("bfloat16")}
