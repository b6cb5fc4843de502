"""The EAGLE-3 drafter against the published PyTorch reference: losses, gradients, every greedy decoding trace."""

import dataclasses
import json
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import dspark_jax
from dspark_jax.checkpoints import deepspec, deepspec_eagle3
from dspark_jax.checkpoints.target_files import CheckpointError
from dspark_jax.drafters.dspark import SharedWeights
from dspark_jax.drafters.eagle3 import Eagle3Drafter, Eagle3Model
from dspark_jax.generation import LoadedDrafter
from dspark_jax.records import BlockKV
from train import eagle3

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def folder(golden):
    return golden / "draft_qwen3_eagle3"


@pytest.fixture(scope="module")
def loaded(folder):
    config = deepspec.read_eagle3_config(json.loads((folder / "config.json").read_text()))
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    shared = SharedWeights(jnp.asarray(tensors["embed_tokens.weight"]), jnp.asarray(tensors["lm_head.weight"]), None)
    return config, deepspec_eagle3.params_from_tensors(config, tensors), shared


@pytest.mark.parametrize("layout", ["feature_major", "token_major"])
def test_training(folder, loaded, layout):
    config, params, shared = loaded
    recorded = np.load(folder / "train_golden.npz")
    tokens = jnp.asarray(recorded["input_ids"], jnp.int32)
    features = jnp.asarray(recorded["target_features"]).reshape(*tokens.shape, len(config.tapped_layers), -1)
    target_logits = jnp.asarray(recorded["target_last_hidden"]) @ shared.head.T
    response = jnp.asarray(recorded["loss_mask"]) > 0
    model = Eagle3Model(config, layout)

    @jax.jit
    def run(params):
        def total(params):
            logits = eagle3.step_logits(model, params, shared, tokens, features)
            value, steps = eagle3.loss(logits, target_logits, response, config.step_decay)
            return value, (steps, logits)

        return jax.value_and_grad(total, has_aux=True)(params)

    (value, (steps, logits)), gradients = run(params)
    # Sums of 56 float32 terms.
    np.testing.assert_allclose(value, recorded["loss"], rtol=1e-5)
    np.testing.assert_allclose(steps, recorded["step_losses"], rtol=1e-5)
    real = recorded["attention_mask"].sum(1)
    for step, ours in enumerate(logits):
        expected = recorded[f"draft_logits_{step}"]
        for row, length in enumerate(real):  # a position counts as long as the token it reads is there
            last = length - 1 - step
            np.testing.assert_allclose(ours[row, :last], expected[row, :last], atol=5e-5, rtol=0)  # of order 5

    ours = deepspec_eagle3.tensors_from_params(config, gradients)
    names = [name.removeprefix("grad/") for name in recorded.files if name.startswith("grad/")]
    assert set(names) == set(ours)
    for name in names:  # an entry is a sum with cancellation: compare with the tensor's largest one
        expected = recorded[f"grad/{name}"]
        np.testing.assert_allclose(ours[name], expected, atol=1e-4 * np.abs(expected).max(), rtol=0, err_msg=name)


@dataclasses.dataclass(frozen=True)
class Watched(Eagle3Drafter):
    """Shows every draft."""

    def draft(self, *args):
        draft = super().draft(*args)
        jax.debug.callback(lambda ids: DRAFTS.append(ids[0].tolist()), draft.token_ids, ordered=True)
        return draft


DRAFTS: list[list[int]] = []


def test_greedy_traces(folder, loaded, qwen3_folder):
    """The reference commits the first token at prefill, so its first cycle starts with that token as the anchor."""
    config, params, shared = loaded
    target = dspark_jax.load_target(qwen3_folder)
    drafter = Watched(Eagle3Model(config, target.layout), config.block_size)
    watched = LoadedDrafter(drafter, {"model": params, "shared": shared}, "eagle3")
    for record in json.loads((folder / "greedy_threshold_0.0.json").read_text()):
        start, new = len(record["prompt"]) + 1, sum(record["acceptance_lengths"])
        options = {"drafter": watched, "max_new_tokens": new, "stop_ids": (), "cache_slots": 128}
        DRAFTS.clear()
        (row,) = dspark_jax.generate(target, [record["output_ids"][:start]], **options).rows
        jax.effects_barrier()
        assert record["draft_tokens"] == DRAFTS
        assert row.accepted_lengths == record["acceptance_lengths"]
        assert row.verify_lengths == record["proposal_lengths"]
        assert (record["output_ids"][:start] + row.token_ids)[: len(record["output_ids"])] == record["output_ids"]


def test_a_config_without_its_fields_is_refused(folder):
    values = json.loads((folder / "config.json").read_text())
    for field in ("ttt_length", "target_layer_ids", "num_target_layers"):
        with pytest.raises(CheckpointError, match=field):
            deepspec.read_eagle3_config({k: v for k, v in values.items() if k != field})
    with pytest.raises(CheckpointError, match="num_hidden_layers = 2"):
        deepspec.read_eagle3_config(values | {"num_hidden_layers": 2})


@pytest.mark.parametrize("layout", ["feature_major", "token_major"])
def test_gemma4s_layer(golden, layout):
    """Scaled embeddings, keys as values, norms on both sides, layer scalar and capped logits, in one causal pass."""
    files = deepspec.read_folder(golden / "draft_gemma4_eagle3")
    recorded = np.load(golden / "draft_gemma4_eagle3" / "golden.npz")
    embed, head = (jnp.asarray(files.frozen[name].read()) for name in ("embed_tokens.weight", "lm_head.weight"))
    model, params = Eagle3Model(files.config, layout), files.params(jnp.float32)
    batch, size = recorded["token_ids"].shape
    own = files.config.decoder.attention(0)
    empty = jnp.zeros((batch, own.num_kv_heads, 1, own.head_dim))

    @jax.jit
    def run(token_ids, features):
        apply = lambda *args, **options: model.apply({"params": params}, *args, **options)  # noqa: E731
        features = features.reshape(batch, size, len(files.config.tapped_layers), -1)
        hidden = cast("jax.Array", apply(features, method="project_features"))
        positions = jnp.broadcast_to(jnp.arange(size), (batch, 1, size))
        context, visible = BlockKV(keys=(empty,), values=(empty,)), jnp.zeros((batch, 1), jnp.int32)
        causal = jnp.tril(jnp.ones((size, size), bool))
        args = (embed, token_ids[:, None], hidden[:, None], positions, context, visible, causal)
        hidden, _ = cast("tuple[jax.Array, BlockKV]", apply(*args))
        return hidden[:, 0], apply(head, hidden.reshape(batch * size, -1), method="logits")

    hidden, logits = run(recorded["token_ids"], recorded["features"])
    np.testing.assert_allclose(hidden, recorded["hidden"], atol=1e-4 * np.abs(recorded["hidden"]).max(), rtol=0)
    np.testing.assert_allclose(logits.reshape(recorded["logits"].shape), recorded["logits"], atol=5e-4, rtol=0)


def test_gemma4s_drafter_drafts_for_its_target(golden):
    """Loaded as a user would; the text is the target's."""
    target = dspark_jax.load_target(golden / "targets" / "gemma4")
    with pytest.warns(UserWarning, match="copy of .* differs from gemma4's"):  # both are random
        drafter = dspark_jax.load_drafter(golden / "draft_gemma4_eagle3", target)
    prompts = [[5, 9, 2], [7, 1, 1, 30, 4]]
    ours = dspark_jax.generate(target, prompts, drafter=drafter, max_new_tokens=12).rows
    plain = dspark_jax.generate(target, prompts, max_new_tokens=12).rows
    assert [row.token_ids for row in ours] == [row.token_ids for row in plain]
    assert any(n > 0 for row in ours for n in row.verify_lengths)
