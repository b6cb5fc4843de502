"""Drafters against the published PyTorch reference: losses, gradients, and every greedy decoding trace."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from dspark_jax import decode, kv_cache, layers, processors, sampling, schedules
from dspark_jax.checkpoints import deepspec
from dspark_jax.checkpoints.drafter_files import tensors_from_params
from dspark_jax.checkpoints.huggingface import read_folder
from dspark_jax.checkpoints.target_params import target_params
from dspark_jax.drafters.dspark import DSparkDrafter, DSparkModel, SharedWeights
from dspark_jax.target import TargetModel, TargetStep
from train import anchors, losses, step

pytestmark = pytest.mark.usefixtures("quick_compile")

HEADS = ["vanilla", "gated", "rnn", "dflash", "gemma4"]
# Thresholds of the traces: dflash has no confidence, gemma4 one trace.
TRACES = {head: ("0.0",) if head in ("dflash", "gemma4") else ("0.0", "0.2") for head in HEADS}
SLOTS = 128


def folder_of(golden, head):
    return golden / ("draft_gemma4_vanilla" if head == "gemma4" else f"draft_qwen3_{head}")


def load(golden, head):
    files = deepspec.read_folder(folder_of(golden, head))
    copies = safetensors.numpy.load_file(folder_of(golden, head) / "model.safetensors")
    shared = SharedWeights(jnp.asarray(copies["embed_tokens.weight"]), jnp.asarray(copies["lm_head.weight"]), None)
    return files.config, files.params(jnp.float32), shared


def test_every_trace_is_compared(golden):
    paths = [p for p in golden.glob("draft_*/greedy_*.json") if "eagle3" not in p.parent.name]  # a test of its own
    expected = {(folder_of(golden, head).name, threshold) for head, those in TRACES.items() for threshold in those}
    assert {(p.parent.name, p.stem[-3:]) for p in paths} == expected


@pytest.mark.parametrize(
    ("head", "layout"),
    # Layouts are the layers' own affair: one is enough for another family.
    [(head, layout) for head in HEADS for layout in ("feature_major", "token_major")][:-1],
)
def test_training(golden, head, layout):
    config, params, shared = load(golden, head)
    recorded = np.load(folder_of(golden, head) / "train_golden.npz")
    model = DSparkModel(config, layout)
    tokens = jnp.asarray(recorded["input_ids"], jnp.int32)
    hidden = jnp.asarray(recorded["target_last_hidden"])
    batch = {
        "tokens": tokens,
        "features": jnp.asarray(recorded["target_features"]).reshape(*tokens.shape, len(config.tapped_layers), -1),
        "last_hidden": hidden,
        "start": jnp.zeros_like(tokens),
        "log_normalizer": jax.nn.logsumexp(layers.soft_cap(hidden @ shared.head.T, config.decoder.logit_softcap), -1),
    }
    blocks = anchors.make_anchors(
        tokens,
        jnp.asarray(recorded["loss_mask"]) > 0,
        jnp.asarray(recorded["anchor_positions"], jnp.int32),
        jnp.asarray(recorded["block_keep_mask"]),
        config.block_size,
    )
    mask = recorded["eval_mask"]
    np.testing.assert_array_equal(blocks.weight_mask, mask)
    np.testing.assert_array_equal(np.asarray(blocks.label_ids)[mask], recorded["target_ids"][mask])

    is_dflash = head == "dflash"
    weights = (
        losses.LossWeights(ce=1.0, l1=0.0, confidence=0.0)
        if is_dflash
        else losses.LossWeights(ce=0.1, l1=0.9, confidence=1.0)
    )

    @jax.jit
    def run(params):
        result = step.loss_and_gradients(model, shared, params, batch, blocks, weights, 4.0, 4)
        return *result, *block_logits(model, params, shared, batch, blocks)

    loss, sums, total_weight, gradients, logits, confidence = run(params)

    # Losses are sums of 60 float32 terms: 1e-5 relative is rounding.
    np.testing.assert_allclose(loss, recorded["loss"], rtol=1e-5)
    np.testing.assert_allclose(total_weight, recorded["term/ce_loss_den"], rtol=1e-5)
    np.testing.assert_allclose(sums.ce, recorded["term/ce_loss_num"], rtol=1e-5)
    if not is_dflash:
        np.testing.assert_allclose(sums.l1, recorded["term/l1_loss_num"], rtol=1e-5)
        np.testing.assert_allclose(sums.confidence, recorded["term/confidence_loss_num"], rtol=1e-5)
    # Logits are of order 1 and come out of two layers in float32.
    np.testing.assert_allclose(np.asarray(logits)[mask], recorded["draft_logits"][mask], atol=2e-5, rtol=0)
    if not is_dflash:
        np.testing.assert_allclose(np.asarray(confidence)[mask], recorded["confidence_logits"][mask], atol=2e-5, rtol=0)

    # A gradient entry is a sum with cancellation: compare with the tensor's largest one.
    ours = tensors_from_params(config, gradients)
    names = [name.removeprefix("grad/") for name in recorded.files if name.startswith("grad/")]
    # The reference keeps Gemma's layer scalars as they are.
    assert set(names) == {name for name in ours if not name.endswith("layer_scalar")}
    for name in names:
        expected = recorded[f"grad/{name}"]
        np.testing.assert_allclose(ours[name], expected, atol=1e-4 * np.abs(expected).max(), rtol=0, err_msg=name)


def block_logits(model, params, shared, batch, blocks):
    """Teacher-forced logits [B, A, K, V] and confidence logits [B, A, K] or None, as training computes them."""
    apply = lambda *args, method: model.apply({"params": params}, *args, method=method)  # noqa: E731
    place = jnp.broadcast_to(jnp.arange(batch["tokens"].shape[1]), batch["tokens"].shape)
    context = apply(batch["features"], place, method="project_context")
    ids = jnp.take_along_axis(batch["tokens"], blocks.positions, axis=1)
    hidden = apply(shared.embed, ids, blocks.positions, context, blocks.positions, method="backbone")
    flat = hidden.reshape(-1, *hidden.shape[2:])
    logits, confidence = apply(shared.head, flat, blocks.previous_ids.reshape(flat.shape[:2]), method="block_logits")
    shape = blocks.previous_ids.shape
    return logits.reshape(*shape, -1), None if confidence is None else confidence.reshape(shape)


@pytest.fixture(scope="module")
def targets(golden):
    def read(name):
        files = read_folder(golden / name)
        return files.config, target_params(files)

    return {name: read(f"target_{name}") for name in ("qwen3", "gemma4")}


@pytest.mark.parametrize("head", HEADS)
def test_greedy_traces(golden, targets, head):
    """The reference commits the first token at prefill, so its first cycle starts with that token as the anchor.

    Where a head has confidences, whole blocks are those of threshold 0: one compiled cycle for both traces.
    """
    target_config, target_weights = targets["gemma4" if head == "gemma4" else "qwen3"]
    config, params, shared = load(golden, head)
    drafter = DSparkDrafter(DSparkModel(config, "feature_major"), config.block_size)
    weights = {"model": params, "shared": shared}
    # The ladder once; every width costs a compilation.
    widths = (1, 3, config.block_size + 1) if head == "vanilla" else (config.block_size + 1,)
    model = TargetStep(TargetModel(target_config, "feature_major", config.tapped_layers))
    run_cycle = jax.jit(decode.speculative_cycle)
    records = []
    for threshold in TRACES[head]:
        policy = schedules.full() if head == "dflash" else schedules.threshold(float(threshold))
        cycle = decode.Cycle(model, drafter, policy, widths)
        path = folder_of(golden, head) / f"greedy_threshold_{threshold}.json"
        records += [(cycle, record) for record in json.loads(path.read_text())]
    assert len(records) == 3 * len(TRACES[head])
    for cycle, record in records:
        start = len(record["prompt"]) + 1
        tokens = jnp.zeros((1, SLOTS), jnp.int32).at[0, :start].set(jnp.asarray(record["output_ids"][:start]))
        settings = decode.RowSettings(
            budget=jnp.full((1,), 80),  # never met: the reference records the last cycle uncut
            sampler=processors.make_sampler(jnp.zeros((1,))),
            stop_ids=jnp.full((1, 1), -1),
            keys=sampling.row_keys(0, jnp.arange(1)),
        )
        cache = kv_cache.init_cache(target_config, 1, SLOTS)
        state = decode.init_state(cache, drafter.init_state(1, SLOTS), tokens, jnp.asarray([start]), settings, 80)
        state = decode.prefill_jit(model, drafter, target_weights, weights, state, 16)
        drafted, confidences = [], []
        for number in range(len(record["acceptance_lengths"])):
            state, draft = run_cycle(cycle, target_weights, weights, settings, state)
            length = int(state.verified[0, number])
            drafted.append(np.asarray(draft.token_ids)[0, :length].tolist())
            if draft.confidence_logits is not None:
                confidences.append(np.asarray(draft.confidence_logits)[0, :length])
        count = len(record["acceptance_lengths"])
        assert np.asarray(state.accepted)[0, :count].tolist() == record["acceptance_lengths"]
        assert np.asarray(state.verified)[0, :count].tolist() == record["proposal_lengths"]
        assert drafted == record["draft_tokens"]
        assert int(state.length[0]) == start + sum(record["acceptance_lengths"]) >= len(record["output_ids"])
        assert np.asarray(state.tokens)[0, : len(record["output_ids"])].tolist() == record["output_ids"]
        if head != "dflash":
            assert len(confidences) == len(record["confidence_logits"])
            for ours, expected in zip(confidences, record["confidence_logits"]):
                # Recorded with five decimals (half a unit is 5e-6), plus float32 rounding.
                np.testing.assert_allclose(ours, expected, atol=2e-5, rtol=0)
