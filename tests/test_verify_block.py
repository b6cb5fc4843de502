"""What a cycle does with the target's logits: a kernel gives the plain path's tokens, whatever the samplers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import processors, verify
from dspark_jax.records import Draft
from pallas_kernels.verify import api, shapes
from pallas_kernels.verify.tiles import Tiles

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS, SIZE, VOCAB = 8, 3, 300


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("warps", [True, False], ids=["every processor", "temperature alone"])
def test_a_kernel_gives_the_same_tokens(monkeypatch, warps, verifier):
    inputs = shapes.inputs(shapes.Shape("", ROWS, SIZE, VOCAB, q="reduced"), seed=3)
    drafted = inputs["draft"]
    draft = Draft(drafted.token_ids, drafted.logits, None, jnp.full(ROWS, SIZE), drafted.ids)
    off = dict.fromkeys(("top_k", "min_p"), [0] * ROWS) | dict.fromkeys(("top_p", "repetition_penalty"), [1.0] * ROWS)
    settings = {
        "top_k": [0, 20, 0, 3, 0, 7, 0, 5],
        "top_p": [1.0, 1.0, 0.8, 1.0, 1.0, 0.9, 0.5, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.0, 0.1],
        "repetition_penalty": [1.0, 1.0, 1.3, 1.5, 1.0, 1.0, 1.0, 1.0],
    }
    sampler = processors.make_sampler(inputs["temperature"], **(settings if warps else off))
    tokens = jax.random.randint(jax.random.key(1), (ROWS, 40), 0, VOCAB)
    logits = jnp.round(inputs["target_logits"], 1)  # ties, on which top-k and top-p have to agree
    arguments = (
        logits,
        draft,
        inputs["verify_len"],
        sampler,
        tokens,
        jnp.arange(20, 20 + ROWS),
        inputs["accept_uniforms"],
        inputs["commit_uniforms"],
    )
    run = lambda *a: verify.verify_block(*a, verifier=verifier)  # noqa: E731
    plain = jax.jit(run)(*arguments)
    monkeypatch.setattr(api, "implementation", lambda *a, **k: "tpu")
    monkeypatch.setattr(api, "verify", functools.partial(api.verify, tiles=Tiles(16, 128), interpret=True))
    fused = jax.jit(lambda *a: run(*a))(*arguments)
    np.testing.assert_array_equal(plain[0], fused[0])
    np.testing.assert_array_equal(plain[1], fused[1])
    assert len(set(np.asarray(plain[0]).tolist())) > 1
