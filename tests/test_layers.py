"""Layers against direct formulas, and the two layouts against each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import attention, layers, rope
from dspark_jax.config import DecoderConfig

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = DecoderConfig("qwen3", 40, 24, 40, 1, 6, 2, 8, 1e4, 1e-6, True, False, 128)
FREQUENCY = rope.inverse_frequencies(8, 1e4)


def attention_inputs(seed: int, batch: int, blocks: int, size: int, slots: int):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return (
        draw(batch, blocks, size, 6, 8),
        draw(batch, 2, slots, 8),
        draw(batch, 2, slots, 8),
        rng.integers(0, slots + 1, (batch, blocks)).astype(np.int32),
        draw(batch, blocks, size, 2, 8),
        draw(batch, blocks, size, 2, 8),
    )


def naive_attention(
    queries, context_keys, context_values, visible, block_keys, block_values, block_mask, scale=8**-0.5, window=10**6
):
    """One query at a time: softmax over what it sees, in float64."""
    mixed = np.zeros(queries.shape, np.float64)
    for b, a, i, n in np.ndindex(queries.shape[:4]):
        group = n // (queries.shape[3] // context_keys.shape[1])
        seen = np.array([j for j in np.flatnonzero(block_mask[i]) if i - j < window])
        context = slice(max(visible[b, a] + i - window + 1, 0), visible[b, a])
        keys = np.concatenate([context_keys[b, group, context], block_keys[b, a, seen, group]])
        values = np.concatenate([context_values[b, group, context], block_values[b, a, seen, group]])
        scores = keys.astype(np.float64) @ queries[b, a, i, n] * scale
        weights = np.exp(scores - scores.max())
        mixed[b, a, i, n] = weights / weights.sum() @ values
    return mixed


@pytest.mark.parametrize("options", [(), (0.5, 3)], ids=["plain", "scale and window"])
@pytest.mark.parametrize(
    ("batch", "blocks", "size", "causal"),
    [
        (2, 1, 5, True),  # a verify step
        (2, 3, 4, False),  # training blocks over one context
        (1, 1, 1, True),  # one token, the general path
        (6, 1, 1, True),  # one token of many rows, the path of its own
    ],
)
def test_attention(batch, blocks, size, causal, options):
    inputs = attention_inputs(batch + blocks, batch, blocks, size, 11)
    mask = np.tril(np.ones((size, size), bool)) if causal else np.ones((size, size), bool)
    ours = jax.jit(attention.attend, static_argnums=(7, 8))(*inputs, mask, *options)
    # Float32 sums of at most 16 terms of order 1.
    np.testing.assert_allclose(ours, naive_attention(*inputs, mask, *options), atol=5e-6, rtol=0)


def test_spread_of_windows():
    """Nothing to choose from is 0, equal weights are 1: over a window of 3, and over what there is at the start."""
    queries, keys, _, _, own, _ = attention_inputs(2, 2, 1, 4, 9)
    spread = attention.attention_spread(0 * queries[:, 0], keys, jnp.asarray([0, 5]), own[:, 0], window=3)
    np.testing.assert_allclose(spread, [[0, 1, 1, 1], [1, 1, 1, 1]], atol=1e-6)


def test_one_token_path_equals_the_general_path():
    """More than four rows take the multiply-and-sum form; four at a time take the general one."""
    inputs = attention_inputs(5, 8, 1, 1, 17)
    mask = np.ones((1, 1), bool)
    attend = jax.jit(attention.attend)
    together = attend(*inputs, mask)
    apart = np.concatenate([attend(*(x[i : i + 4] for x in inputs), mask) for i in (0, 4)])
    np.testing.assert_allclose(together, apart, atol=2e-6, rtol=0)  # the same float32 sums in another order


@pytest.mark.parametrize("batch", [2, 6])
def test_slots_beyond_the_visible_are_never_read(batch):
    queries, keys, values, visible, own_keys, own_values = attention_inputs(1, batch, 1, 1, 9)
    mask = np.ones((1, 1), bool)
    attend = jax.jit(attention.attend)
    before = attend(queries, keys, values, visible, own_keys, own_values, mask)
    hidden = np.arange(9) >= visible[:, :, None]  # [B, 1, S]
    garbage = np.where(hidden[..., None], np.float32(1e4), 0)
    after = attend(queries, keys + garbage, values + garbage, visible, own_keys, own_values, mask)
    np.testing.assert_array_equal(before, after)


def test_rope_is_a_rotation_of_pairs():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 4, 8)).astype(np.float32)
    positions = np.array([[0, 1, 7], [300, 301, 511]], np.int32)
    pairs = x[..., :4].astype(np.complex128) + 1j * x[..., 4:]
    angle = positions[:, :, None, None] * 1e4 ** (-np.arange(4) / 4)
    turned = pairs * np.exp(1j * angle)
    ours = rope.rotate(jnp.asarray(x), jnp.asarray(positions), FREQUENCY)
    # A float32 angle of 511 radians is off by up to 3e-5.
    np.testing.assert_allclose(ours, np.concatenate([turned.real, turned.imag], -1), atol=1e-4, rtol=0)


def test_rope_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 8)), jnp.float32) for _ in range(2))
    score = lambda i, j: float(  # noqa: E731
        jnp.sum(rope.rotate(q, jnp.full((1, 1), i), FREQUENCY) * rope.rotate(k, jnp.full((1, 1), j), FREQUENCY))
    )
    assert score(3, 0) == pytest.approx(score(103, 100), abs=1e-4)  # float32 angles
    assert abs(score(3, 0) - score(4, 0)) > 1e-2


def test_rope_angles_are_float32_in_bfloat16():
    """Positions 256 and 257 are the same number in bfloat16; their rotations must differ."""
    x = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    turned = np.asarray(rope.rotate(x, jnp.asarray([[256, 257]]), FREQUENCY), np.float32)
    assert np.abs(turned[0, 0] - turned[0, 1]).max() > 0.1


def test_rms_norm():
    rng = np.random.default_rng(2)
    x, scale = rng.standard_normal((5, 24)).astype(np.float32), rng.standard_normal(24).astype(np.float32)
    expected = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(layers.rms_norm(x, scale, 1e-6), expected, atol=2e-6, rtol=0)
    np.testing.assert_allclose(layers.rms_norm(x.T, scale, 1e-6, axis=0), expected.T, atol=2e-6, rtol=0)


GEMMA4 = dataclasses.replace(
    CONFIG,
    qk_norm=True,
    keys_as_values=True,
    value_norm=True,
    sandwich_norms=True,
    layer_scalar=True,
    attention_scale=1.0,
    rope_share=0.5,
    activation="gelu_tanh",
)
GEMMA3 = dataclasses.replace(
    CONFIG, sliding_layers=(0,), sliding_window=2, norm_plus_one=True, sandwich_norms=True, activation="gelu_tanh"
)
BODIES = {
    "qwen3": CONFIG,
    "llama": dataclasses.replace(CONFIG, qk_norm=False),
    "qwen2": dataclasses.replace(CONFIG, qk_norm=False, qkv_bias=True),
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
}


@pytest.mark.parametrize("config", BODIES.values(), ids=BODIES)
def test_layouts_are_equal(config):
    """A whole decoder layer and its injected context, feature-major and token-major, with the same weights."""
    rng = np.random.default_rng(4)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    x, keys, values = draw(2 * 2 * 3, config.width), draw(2, 2, 7, 8), draw(2, 2, 7, 8)
    positions = jnp.asarray(rng.integers(0, 50, (2, 2, 3)))
    visible = jnp.asarray([[0, 3], [7, 5]])
    mask = jnp.ones((3, 3), bool)
    results = {}
    params = None
    for layout in ("feature_major", "token_major"):
        layer = layers.DecoderLayer(config, layout)
        to = lambda a, layout=layout: layers.from_tokens(a, layout)  # noqa: E731
        back = lambda a, layout=layout: layers.to_tokens(a, layout)  # noqa: E731
        if params is None:
            params = jax.jit(layer.init)(jax.random.key(0), to(x), positions, keys, values, visible, mask)
            params = jax.tree.map(lambda w: w + 0.3 * draw(*w.shape), params)

        @jax.jit
        def run(params, layer=layer, to=to, back=back):
            y, k, v = layer.apply(params, to(x), positions, keys, values, visible, mask)
            context = layer.apply(params, to(x), positions.reshape(2, 6), method="project_context")
            return back(y), k, v, context

        results[layout] = run(params)
    # The same products in another orientation; outputs reach 10.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5),
        results["feature_major"],
        results["token_major"],
    )


@pytest.mark.parametrize("config", BODIES.values(), ids=BODIES)
def test_injected_context_is_what_the_layer_itself_would_cache(config):
    """`project_context` of normed activations gives the keys and values that the layer computes for them."""
    layer = layers.DecoderLayer(config, "token_major")
    rng = np.random.default_rng(6)
    x = jnp.asarray(rng.standard_normal((5, CONFIG.width)), jnp.float32)
    positions = jnp.arange(5)[None]
    empty = jnp.zeros((1, 2, 1, 8))
    arguments = (positions[:, None], empty, empty, jnp.zeros((1, 1), jnp.int32), jnp.tril(jnp.ones((5, 5), bool)))
    params = jax.jit(layer.init)(jax.random.key(0), x, *arguments)
    params = jax.tree.map(lambda w: w + 0.3 * jnp.asarray(rng.standard_normal(w.shape), jnp.float32), params)
    scale = params["params"]["input_norm"]["weight"]
    normed = layers.rms_norm(x, scale, config.norm_eps, plus_one=config.norm_plus_one)
    _, k, v = jax.jit(layer.apply)(params, x, *arguments)
    context = jax.jit(lambda p, x: layer.apply(p, x, positions, method="project_context"))
    keys, values = context(params, normed)
    # One product or a third of it; values are of order 1.
    np.testing.assert_allclose(keys, jnp.transpose(k, (0, 2, 1, 3)), atol=1e-5)
    np.testing.assert_allclose(values, jnp.transpose(v, (0, 2, 1, 3)), atol=1e-5)
