"""Every target family and feature against tiny random models that transformers ran, and against its own cache.

`golden/targets/NAME` are written by `golden/record_targets.py`; `golden/target_gemma4` has the Gemma 4 of the published
drafter's target, at six layers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import kv_cache
from dspark_jax.checkpoints.huggingface import read_folder
from dspark_jax.checkpoints.target_params import target_params
from dspark_jax.target import TargetModel, TargetStep

pytestmark = pytest.mark.usefixtures("quick_compile")

NAMES = ("llama3", "llama_linear", "qwen2", "qwen3_yarn", "mistral", "gemma3", "gemma4", "gemma4_values")
LAYOUTS = ("feature_major", "token_major")
# Both sides compute in float32 but add in different orders.
TOLERANCE = 1e-4  # of the largest value of an array

jitted = jax.jit(lambda step, params, ids, cache: step(params, ids, cache), static_argnums=0)
append = jax.jit(kv_cache.append)


def assert_close(ours, expected, what=""):
    atol = TOLERANCE * np.abs(expected).max()
    np.testing.assert_allclose(ours, expected, atol=atol, rtol=0, err_msg=what)


@functools.cache
def load(golden, name):
    folder = golden / ("targets" if name in NAMES else "") / name
    files = read_folder(folder)
    return files.config, target_params(files), dict(np.load(folder / "golden.npz"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*NAMES, "target_gemma4"])
def test_logits_and_hidden_states(golden, name, layout):
    config, params, recorded = load(golden, name)
    taps = tuple(range(-1, config.num_layers - 1))
    step = TargetStep(TargetModel(config, layout, taps))
    ids = jnp.asarray(recorded["input_ids"], jnp.int32)
    assert ids.shape[1] > config.sliding_window
    output = jitted(step, params, ids, kv_cache.init_cache(config, len(ids), 1))
    for i, layer in enumerate(taps):
        assert_close(output.features[:, :, i], recorded[f"hidden_{layer + 1}"], f"layer {layer}")
    assert_close(output.last_hidden, recorded[f"hidden_{config.num_layers}"])
    assert_close(output.logits, recorded["logits"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3_yarn", "mistral", "gemma3", "gemma4"])
def test_reading_in_pieces(golden, name, layout):
    """Two pieces of 8, then token by token, through the cache, with rows at different lengths = one call."""
    config, params, recorded = load(golden, name)
    ids = np.asarray(recorded["input_ids"], np.int32)
    step = TargetStep(TargetModel(config, layout))
    # Row 1 starts a piece later: its first piece doesn't count, so its cache is 8 tokens behind.
    tokens = np.stack([ids[0, :20], np.concatenate([ids[1, :8], ids[1, :12]])])
    cache, logits, place = kv_cache.init_cache(config, 2, 24), [], 0
    for width in (8, 8, 1, 1, 1, 1):
        output = jitted(step, params, jnp.asarray(tokens[:, place : place + width]), cache)
        cache = append(cache, output.block, jnp.asarray([width, width if place else 0]))
        logits.append(np.asarray(output.logits))
        place += width
    logits = np.concatenate(logits, axis=1)
    assert_close(logits[0], recorded["logits"][0, :20])
    assert_close(logits[1, 8:], recorded["logits"][1, :12], "late row")


def test_speculative_text_is_greedy_text(golden):
    """Layers whose caches differ in shape, through the whole loop, beyond the window: every token is the likeliest."""
    config, params, recorded = load(golden, "gemma4")
    target = dspark_jax.load_target(golden / "targets" / "gemma4", layout="feature_major")
    prompts = [row[[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]].tolist() for row in recorded["input_ids"]]
    drafter = dspark_jax.prompt_lookup(block_size=3)
    rows = dspark_jax.generate(target, prompts, drafter=drafter, max_new_tokens=10, cache_slots=128).rows
    tokens = jnp.asarray([prompt + row.token_ids for prompt, row in zip(prompts, rows)])
    assert tokens.shape == (2, 21)
    step = TargetStep(TargetModel(config, "feature_major", tuple(range(-1, config.num_layers - 1))))
    logits = jitted(step, params, tokens, kv_cache.init_cache(config, 2, 1)).logits
    np.testing.assert_array_equal(jnp.argmax(logits, -1)[:, 10:-1], tokens[:, 11:])
