"""SmolLM2-135M against the recorded reference, and speculative decoding against autoregressive decoding on it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import kv_cache, layers
from dspark_jax.checkpoints.target_params import target_params

pytestmark = pytest.mark.usefixtures("quick_compile")

SLOTS = 256  # one size for every call: each further shape of this model takes seconds to compile
WIDTHS = (4,)  # K = 3, one verify width; the ladder is tested on small models


@pytest.fixture(scope="module")
def target(smollm2_files) -> dspark_jax.Target:
    params = target_params(smollm2_files)
    layout = layers.default_layout()
    return dspark_jax.Target(
        smollm2_files.config, params, smollm2_files.tokenizer, smollm2_files.name, layout, jnp.float32
    )


@pytest.fixture(scope="module")
def records(smollm2_reference) -> list[dict]:
    return smollm2_reference["records"]


def decode(target, records, new_tokens, accepted=None, **options) -> list[list[int]]:
    """Returns what was said; accepted lengths are added to the list `accepted`."""
    prompts = [record["prompt_token_ids"] for record in records]
    options = {"max_new_tokens": new_tokens, "stop_ids": (), "cache_slots": SLOTS, **options}
    if options.get("drafter"):
        options["widths"] = WIDTHS
    rows = dspark_jax.generate(target, prompts, **options).rows
    assert all(sum(row.accepted_lengths) == new_tokens for row in rows)
    if accepted is not None:
        accepted += [length for row in rows for length in row.accepted_lengths]
    return [row.token_ids for row in rows]


def test_logits_and_residual_stream(target, records):
    """All five prompts in one call, padded on the right: nothing to the right is visible."""
    taps = sorted(int(layer) for layer in records[0]["layer_output_last_pos_l2"])
    lengths = [len(record["prompt_token_ids"]) for record in records]
    ids = np.zeros((len(records), max(lengths)), np.int32)
    for row, record in enumerate(records):
        ids[row, : lengths[row]] = record["prompt_token_ids"]
    cache = kv_cache.init_cache(target.config, len(records), 1)
    output = jax.jit(target.step(tuple(taps)))(target.params, jnp.asarray(ids), cache)
    for row, (record, length) in enumerate(zip(records, lengths)):
        logits = np.asarray(output.logits[row, length - 1])
        top = np.argsort(-logits)[:5]
        assert top.tolist() == record["top5_ids"]
        # Thirty layers in float32, summed in another order than the reference; logits reach 35.
        np.testing.assert_allclose(logits[top], record["top5_logits"], atol=1e-3, rtol=0)
        for place, layer in enumerate(taps):
            stream = np.asarray(output.features[row, length - 1, place])
            # The stream grows to a norm of 900: relative to it, float32 rounding of thirty layers stays below 1e-5.
            norm = record["layer_output_last_pos_l2"][str(layer)]
            np.testing.assert_allclose(np.linalg.norm(stream), norm, rtol=1e-5, err_msg=f"layer {layer}")
            np.testing.assert_allclose(
                stream[:8], record["layer_output_last_pos_first8"][str(layer)], atol=1e-5 * norm, rtol=0
            )


def test_greedy_tokens(target, records):
    """All 32 recorded tokens, going on past stop tokens: the smallest margin between two logits is 0.0045."""
    lookup = dspark_jax.prompt_lookup(3)
    for record in records:
        assert decode(target, [record], 32) == [record["greedy_token_ids"]]
        assert decode(target, [record], 32, drafter=lookup) == [record["greedy_token_ids"]]


def test_speculative_greedy_is_autoregressive(target, records):
    """The trained drafter of this repository, batch 4 and batch 1, 24 tokens, token for token.

    What autoregressive decoding gives is recorded, and `test_greedy_tokens` holds it to that. A load or a tap gone
    wrong would drop the drafter's accepted length to 1.
    """
    folder = Path(__file__).parents[1] / "drafters" / "smollm2_135m"
    drafter = dspark_jax.load_drafter(folder, target, block_size=3)
    four = records[:4]
    expected = [record["greedy_token_ids"][:24] for record in four]
    accepted = []
    assert decode(target, four, 24, accepted, drafter=drafter) == expected
    assert 4 * 24 / len(accepted) > 1.2  # 1.37 here
    for record, tokens in zip(four, expected):
        assert decode(target, [record], 24, drafter=drafter) == [tokens]
