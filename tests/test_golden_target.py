"""The target against the recorded Qwen3 model: logits, hidden states, features, in both layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import kv_cache
from dspark_jax.checkpoints.huggingface import read_folder
from dspark_jax.checkpoints.target_params import target_params
from dspark_jax.target import TargetModel

# Both sides compute in float32 but add in different orders; values are of order 1 to 10.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def files(qwen3_folder):
    return read_folder(qwen3_folder)


@pytest.fixture(scope="module")
def recorded(qwen3_folder):
    return dict(np.load(qwen3_folder / "golden.npz"))


@pytest.mark.parametrize("layout", ["feature_major", "token_major"])
def test_logits_and_hidden_states(files, recorded, layout):
    taps = tuple(range(-1, files.config.num_layers - 1))  # the last recorded one is after the final norm
    model = TargetModel(files.config, layout, taps)
    params = target_params(files)
    ids = jnp.asarray(recorded["input_ids"], jnp.int32)
    cache = kv_cache.init_cache(files.config, len(ids), 4)
    output = jax.jit(lambda p, i, c: model.apply({"params": p}, i, c))(params, ids, cache)
    np.testing.assert_allclose(output.logits, recorded["logits"], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(output.last_hidden, recorded["last_hidden"], atol=TOLERANCE, rtol=0)
    for i, layer in enumerate(taps):
        np.testing.assert_allclose(
            output.features[:, :, i], recorded[f"hidden_{layer + 1}"], atol=TOLERANCE, rtol=0, err_msg=f"layer {layer}"
        )
    # A hidden state taken before the final norm, or one layer off, would not give the logits.
    head = params["head"] if "head" in params else params["embed"]
    np.testing.assert_allclose(output.last_hidden @ head.T, output.logits, atol=TOLERANCE, rtol=0)


def test_reading_in_pieces_gives_the_same_logits(files, recorded):
    """Prefill in two calls through the cache = one call."""
    model = TargetModel(files.config, "feature_major")
    params = target_params(files)
    apply = jax.jit(lambda p, i, c: model.apply({"params": p}, i, c))
    ids = jnp.asarray(recorded["input_ids"], jnp.int32)
    half = ids.shape[1] // 2
    cache = kv_cache.init_cache(files.config, len(ids), ids.shape[1])
    first = apply(params, ids[:, :half], cache)
    cache = kv_cache.append(cache, first.block, jnp.full((len(ids),), half))
    second = apply(params, ids[:, half : 2 * half], cache)
    logits = np.concatenate([first.logits, second.logits], axis=1)
    np.testing.assert_allclose(logits, recorded["logits"][:, : 2 * half], atol=TOLERANCE, rtol=0)
