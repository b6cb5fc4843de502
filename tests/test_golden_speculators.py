"""Drafters of vLLM's speculators library: its logits and losses against ours, on its files and on ours.

`tests/golden/record_speculators.py` recorded them. Where that library is installed (`pip install -e .[speculators]`),
what this project exports is loaded and run there too.
"""

import contextlib
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoints.drafter_formats import read_drafter_files, write_drafter
from dspark_jax.checkpoints.target_files import TargetFiles
from dspark_jax.config import DecoderConfig
from dspark_jax.drafters.dspark import DSparkModel, SharedWeights
from train import losses

pytestmark = pytest.mark.usefixtures("quick_compile")

CASES = ["vanilla", "rnn", "gated_reduced", "vanilla_bonus_anchor", "dflash"]


@pytest.fixture(params=CASES)
def case(request, golden):
    folder = golden / "speculators" / request.param
    return folder, read_drafter_files(folder), np.load(folder / "golden.npz")


def test_config(case):
    folder, files, _ = case
    config, values = files.config, json.loads((folder / "config.json").read_text())
    bonus = folder.name in ("vanilla_bonus_anchor", "dflash")
    assert config.anchor_layout == ("anchor_only" if bonus else "anchor_predicts")
    assert config.block_size == values["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert config.tapped_layers == (-1, 1, 4)  # stored one higher: 0 is the embedding
    assert (config.mask_token_id, config.target_name) == (63, "tiny-verifier")
    assert (files.vocab is not None) == (folder.name == "gated_reduced")


def test_logits_and_losses(case):
    _, files, recorded = case
    config = files.config
    model, params = DSparkModel(config, "token_major"), files.params(jnp.float32)
    vocab = jnp.arange(config.decoder.vocab_size) if files.vocab is None else jnp.asarray(files.vocab)
    shared = SharedWeights(jnp.asarray(recorded["embed"]), jnp.asarray(recorded["head"])[vocab], None)
    tokens, anchors = jnp.asarray(recorded["tokens"]), jnp.asarray(recorded["anchors"])[None]
    first = config.block_slots - config.block_size  # slots that predict nothing

    @jax.jit
    def run(params):
        apply = lambda *args, method: model.apply({"params": params}, *args, method=method)  # noqa: E731
        features = jnp.asarray(recorded["features"]).reshape(*tokens.shape, len(config.tapped_layers), -1)
        context = apply(features, jnp.arange(tokens.shape[1])[None], method="project_context")
        hidden = apply(shared.embed, tokens[:, anchors[0]], anchors, context, anchors, method="backbone")[0]
        places = anchors[0][:, None] + jnp.arange(config.block_size)  # of the tokens before the labels
        logits, confidence = apply(shared.head, hidden, tokens[0][places], method="block_logits")
        targets = jnp.asarray(recorded["last_hidden"])[0][places] @ shared.head.T
        weights = losses.position_weights(jnp.ones(places.shape, bool), 4.0)
        labels = tokens[0][places + 1]
        sums = losses.block_losses(logits, confidence, jax.nn.softmax(targets), labels, weights)
        return logits, confidence, targets, sums

    logits, confidence, targets, sums = run(params)
    # Logits are of order 1 to 10 and come out of two layers in float32.
    np.testing.assert_allclose(logits, recorded["logits"][:, first:], atol=1e-4, rtol=1e-5)
    np.testing.assert_allclose(targets, recorded["targets"][:, first:], atol=1e-4, rtol=1e-5)
    if config.confidence_head:
        np.testing.assert_allclose(confidence, recorded["confidence"][:, first:, 0], atol=1e-4, rtol=1e-5)
    if files.vocab is not None:
        return  # it renormalises p over the draft vocabulary, here the mass outside counts
    # The library divides by the number of labels, here by their weights: compare sums. L1 = 2 TV.
    count = logits.shape[0] * logits.shape[1]
    np.testing.assert_allclose(sums.ce / count, recorded["ce"], rtol=1e-5)
    np.testing.assert_allclose(sums.l1 / 2 / count, recorded["tv"], rtol=1e-5)
    total = 0.1 * sums.ce + 0.9 * sums.l1
    if config.confidence_head:
        np.testing.assert_allclose(sums.confidence / count, recorded["confidence_loss"], rtol=1e-5)
        total += sums.confidence
    np.testing.assert_allclose(total / count, recorded["loss"], rtol=1e-5)


def export(case, folder: Path) -> None:
    _, files, recorded = case
    body = DecoderConfig("qwen3", 64, 16, 24, 6, 2, 1, 8, 1e4, 1e-6, True, False, 128)
    tensors = {"model.embed_tokens.weight": recorded["embed"], "lm_head.weight": recorded["head"]}
    write_drafter(folder, "speculators", files, TargetFiles(body, tensors, None, "tiny-verifier"))


def test_export_writes_what_the_library_wrote(case, tmp_path):
    """The same tensors bit for bit, and every field of the config that means something."""
    export(case, tmp_path / "out")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", case[0]))
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert (ours[name].dtype, ours[name].tobytes()) == (value.dtype, value.tobytes()), name
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", case[0]))
    named = {"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator"}  # the library writes its classes' names
    assert ours.pop("architectures") == [named[ours["speculators_model_type"]]]
    ours_body, their_body = ours.pop("transformer_layer_config"), theirs.pop("transformer_layer_config")
    del ours["dspark_jax"]
    assert ours == {key: theirs[key] for key in ours if key in theirs}
    assert set(theirs) - set(ours) == {"architectures", "auto_map", "dtype", "transformers_version"}
    shared_fields = set(ours_body) & set(their_body) - {"max_window_layers"}  # no meaning without sliding windows
    assert {key: ours_body[key] for key in shared_fields} == {key: their_body[key] for key in shared_fields}
    assert set(their_body) - set(ours_body) == {"bos_token_id", "eos_token_id", "pad_token_id"}


def test_the_library_runs_our_export(case, tmp_path, golden):
    pytest.importorskip("speculators")
    spec = importlib.util.spec_from_file_location("record_speculators", golden / "record_speculators.py")
    assert spec is not None
    assert spec.loader is not None
    recorder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recorder)
    with contextlib.chdir(tmp_path):
        recorder.write_verifier(Path(recorder.VERIFIER))
        export(case, tmp_path / "out")
        results = recorder.run(recorder.load(tmp_path / "out"), dict(case[2]))
    for name, value in results.items():
        np.testing.assert_allclose(value, case[2][name], rtol=1e-6, err_msg=name)  # the same sums in the same library
