"""Published drafters: what is read, what is refused, and round trips that change no bit."""

import dataclasses
import functools
import json
import shutil
import warnings

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

import dspark_jax
from dspark_jax import convert, inspect
from dspark_jax.checkpoints import drafter_files, drafter_formats, huggingface
from dspark_jax.checkpoints.drafter_files import (
    DrafterFiles,
    check_target,
    expected_drafter_tensors,
    params_from_tensors,
)
from dspark_jax.checkpoints.drafter_formats import read_drafter_files, write_drafter
from dspark_jax.checkpoints.load import read_target_files
from dspark_jax.checkpoints.target_files import CheckpointError
from dspark_jax.config import ConfigError, DecoderConfig, DrafterConfig
from dspark_jax.drafters.dspark import DSparkModel
from dspark_jax.text import Tokenizer

pytestmark = pytest.mark.usefixtures("quick_compile")

BODY = DecoderConfig("qwen3", 160, 64, 48, 2, 4, 2, 24, 1e4, 1e-6, True, False, 512)
DSPARK = DrafterConfig(BODY, 5, (0, 2, 4), 159, "anchor_predicts", "vanilla", 16, True, True, 0, 6)
PARALLEL = dataclasses.replace(
    DSPARK, sequential_head="none", markov_rank=0, confidence_head=False, confidence_reads_markov=False
)
DFLASH = dataclasses.replace(PARALLEL, anchor_layout="anchor_only", tapped_layers=(-1, 1, 3))
SLIDING = dataclasses.replace(DFLASH, decoder=dataclasses.replace(BODY, sliding_layers=(0, 1), sliding_window=4))
GATED, RNN = (dataclasses.replace(DSPARK, sequential_head=head) for head in ("gated", "rnn"))
PLAIN_CONFIDENCE = dataclasses.replace(DSPARK, confidence_reads_markov=False)
REDUCED = dataclasses.replace(GATED, draft_vocab_size=96, target_fingerprint="0123456789abcdef", target_name="org/x")
BONUS = dataclasses.replace(DSPARK, anchor_layout="anchor_only", chat_template_hash="fedcba9876543210")
LLAMA = dataclasses.replace(
    REDUCED, decoder=dataclasses.replace(BODY, family="llama", qk_norm=False, tie_embeddings=True)
)

HELD = [
    *(("deepspec", config) for config in (DSPARK, PARALLEL, GATED, RNN, PLAIN_CONFIDENCE)),
    *(("zlab", config) for config in (DFLASH, SLIDING)),
    *(("speculators", config) for config in (DSPARK, PARALLEL, DFLASH, GATED, RNN, PLAIN_CONFIDENCE, REDUCED, BONUS)),
    *(("orbax", config) for config in (DSPARK, DFLASH, GATED, RNN, LLAMA)),
]


def make(config: DrafterConfig, dtype=np.float32) -> DrafterFiles:
    """A random drafter in memory; bfloat16 covers every bit pattern that is not NaN."""
    rng = np.random.default_rng(0)
    shapes = expected_drafter_tensors(config)
    tensors = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    vocab = None
    if config.draft_vocab_size:
        vocab = np.sort(rng.choice(config.decoder.vocab_size, config.draft_vocab_size, replace=False)).astype(np.int32)
    return DrafterFiles(
        format="orbax",
        config=config,
        vocab=vocab,
        tensors=tensors,
        params=functools.partial(params_from_tensors, config, tensors),
        dtypes=dict.fromkeys(tensors, "F32"),
        stored_parameters=sum(value.size for value in tensors.values()),
        frozen={},
        name="made",
    )


def assert_same(found: DrafterFiles, expected: DrafterFiles):
    assert found.config == expected.config
    assert (found.vocab is None) == (expected.vocab is None)
    if expected.vocab is not None:
        np.testing.assert_array_equal(found.vocab, expected.vocab)
    assert set(found.tensors) == set(expected.tensors)
    for name, value in expected.tensors.items():
        other = found.tensors[name]
        assert (other.dtype, other.shape) == (value.dtype, value.shape), name
        assert other.tobytes() == value.tobytes(), name


@pytest.fixture(scope="module")
def target_files(qwen3_folder):
    return read_target_files(qwen3_folder)


@pytest.fixture(scope="module")
def target(qwen3_folder):
    return dspark_jax.load_target(qwen3_folder)


@pytest.fixture
def published(tmp_path, target_files):
    """Writes a drafter as others publish it (nothing of ours in config.json) and returns its folder."""

    def write(kind="deepspec", config=DSPARK, drop=(), rename=None, **changes):
        folder = tmp_path / f"{kind}-{len(list(tmp_path.iterdir()))}"
        write_drafter(folder, kind, make(config), target_files, force=True)
        values = json.loads((folder / "config.json").read_text())
        del values["dspark_jax"]
        values |= changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))
        if drop or rename:
            tensors = load_file(folder / "model.safetensors")
            tensors = {(rename or {}).get(name, name): value for name, value in tensors.items() if name not in drop}
            save_file(tensors, folder / "model.safetensors")
        return folder

    return write


# --- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "config"), HELD, ids=[f"{k}-{c.sequential_head}-{i}" for i, (k, c) in enumerate(HELD)]
)
def test_round_trip(tmp_path, target_files, kind, config, dtype):
    made = make(config, dtype)
    write_drafter(tmp_path / "a", kind, made, target_files, force=True)
    first = read_drafter_files(tmp_path / "a")
    assert first.format == kind
    assert_same(first, made)
    write_drafter(tmp_path / "b", kind, first, target_files, force=True)
    second = read_drafter_files(tmp_path / "b")
    assert_same(second, first)
    if kind != "orbax":
        for file in ("config.json", "model.safetensors"):
            assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        write_drafter(tmp_path / "c", "orbax", second)
        assert_same(read_drafter_files(tmp_path / "c"), first)


def test_eagle3(golden, target, tmp_path):
    folder = golden / "draft_qwen3_eagle3"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafter = dspark_jax.load_drafter(folder, target, block_size=3)
    assert (drafter.name, drafter.drafter.block_size, drafter.drafter.tapped_layers) == ("eagle3", 3, (0, 1, 2, 3, 4))
    with pytest.raises(ConfigError, match="draft_sampling = 'greedy'"):
        dspark_jax.load_drafter(folder, target, draft_sampling="greedy")
    with pytest.raises(CheckpointError, match="taps layer 4; target_qwen3 has 5 layers"):
        dspark_jax.load_drafter(folder, with_target(target, num_layers=5))
    for kind in ("zlab", "speculators"):
        with pytest.raises(CheckpointError, match=f"is an EAGLE-3 drafter: {kind} can't hold it"):
            write_drafter(tmp_path / "out", kind, read_drafter_files(folder))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_eagle3_round_trips(golden, tmp_path, name, dtype):
    """deepspec -> orbax -> deepspec -> orbax, bit for bit, layers of both families."""
    original = read_drafter_files(golden / f"draft_{name}_eagle3")
    cast = {key: np.asarray(original.tensors[key]).astype(dtype) for key in original.tensors}
    params = functools.partial(drafter_files.params_from_tensors, original.config, cast)
    first = dataclasses.replace(original, tensors=cast, params=params)
    source = golden / ("target_qwen3" if name == "qwen3" else "targets/gemma4")
    target = read_target_files(source)
    write_drafter(tmp_path / "a", "orbax", first)
    assert_same(read_drafter_files(tmp_path / "a"), first)
    write_drafter(tmp_path / "b", "deepspec", read_drafter_files(tmp_path / "a"), target)
    again = read_drafter_files(tmp_path / "b")
    assert_same(again, first)
    write_drafter(tmp_path / "c", "orbax", again)
    assert_same(read_drafter_files(tmp_path / "c"), first)


def test_gemma4_layers_through_our_format(golden, tmp_path):
    original = read_drafter_files(golden / "draft_gemma4_vanilla")
    target = read_target_files(golden / "target_gemma4")
    write_drafter(tmp_path / "ours", "orbax", original)
    write_drafter(tmp_path / "back", "deepspec", read_drafter_files(tmp_path / "ours"), target)
    assert_same(read_drafter_files(tmp_path / "back"), original)
    with pytest.raises(CheckpointError, match="decoder family = 'gemma4': the format holds layers of qwen3 only"):
        write_drafter(tmp_path / "out", "speculators", original, target)


@pytest.mark.parametrize("other", ["deepspec", "speculators", "orbax"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "dflash"])
def test_golden_drafters_through_other_formats(tmp_path, golden, target_files, head, other):
    original = read_drafter_files(golden / f"draft_qwen3_{head}")
    write_drafter(tmp_path / "out", other, original, target_files)
    back = read_drafter_files(tmp_path / "out")
    assert_same(back, original)
    write_drafter(tmp_path / "back", "deepspec", back, target_files)
    assert_same(read_drafter_files(tmp_path / "back"), original)
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "back", golden / f"draft_qwen3_{head}"))
    assert set(ours) == set(theirs)  # with the copies of the target's embedding and head
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_configs_carry_both_rope_dialects(published):
    for kind, config in (("deepspec", DSPARK), ("zlab", DFLASH), ("speculators", DSPARK)):
        values = json.loads((published(kind, config) / "config.json").read_text())
        values = values.get("transformer_layer_config", values)
        assert values["rope_theta"] == 1e4
        assert values["rope_scaling"] is None
        assert values["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("deepspec", REDUCED, "draft_vocab_size = 96: .* use --format=speculators"),
        ("deepspec", DFLASH, "anchor_layout = 'anchor_only'"),
        ("zlab", GATED, "sequential_head = 'gated'"),
        ("zlab", dataclasses.replace(DFLASH, confidence_head=True), "confidence_head = True"),
        ("zlab", PARALLEL, "anchor_layout = 'anchor_predicts'"),
        ("zlab", dataclasses.replace(DFLASH, draft_vocab_size=96), "draft_vocab_size = 96"),
        ("zlab", dataclasses.replace(DFLASH, target_layers=0), "name the target"),
        ("speculators", dataclasses.replace(BONUS, sequential_head="rnn"), "sequential_head = 'rnn'"),
        ("speculators", REDUCED, "name the target"),
        ("deepspec", DSPARK, "name the target"),
        ("speculators", dataclasses.replace(LLAMA, draft_vocab_size=0), "decoder family = 'llama'"),
    ],
)
def test_what_a_format_cannot_hold(tmp_path, kind, config, message):
    with pytest.raises(CheckpointError, match=message):
        write_drafter(tmp_path / "out", kind, make(config))
    assert list(tmp_path.iterdir()) == []


def test_writing_refuses(tmp_path, target_files):
    with pytest.raises(ConfigError, match="format = 'gguf': use one of orbax, deepspec, zlab, speculators"):
        write_drafter(tmp_path / "out", "gguf", make(DSPARK))
    (tmp_path / "there").mkdir()
    for kind in drafter_formats.FORMATS:
        config = DFLASH if kind == "zlab" else DSPARK
        with pytest.raises(CheckpointError, match="there exists already"):
            write_drafter(tmp_path / "there", kind, make(config), target_files)
    mixed = make(DSPARK)
    mixed.tensors["layers.1.self_attn.k_proj.weight"] = np.zeros((48, 64), ml_dtypes.bfloat16)
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.k_proj.weight.*one dtype"):
        write_drafter(tmp_path / "mixed", "orbax", mixed)
    with pytest.raises(CheckpointError, match="fingerprint 0123456789abcdef"):
        write_drafter(tmp_path / "out", "speculators", make(REDUCED), target_files)
    assert [file.name for file in tmp_path.iterdir()] == ["there"]


# --- reading what others publish -----------------------------------------------------------------


def test_facts_of_each_format(published):
    files = read_drafter_files(published("zlab", DFLASH))
    assert (files.config.block_size, files.config.anchor_layout) == (5, "anchor_only")
    values = json.loads((published("zlab", DFLASH) / "config.json").read_text())
    assert values["block_size"] == 6  # the anchor is counted
    newer = published("zlab", DFLASH, block_size="absent", dflash_config=values["dflash_config"] | {"block_size": 6})
    assert read_drafter_files(newer).config == files.config

    folder = published("speculators", REDUCED)
    values = json.loads((folder / "config.json").read_text())
    assert values["aux_hidden_state_layer_ids"] == [1, 3, 5]  # ours plus one
    files = read_drafter_files(folder)
    assert files.config.target_name == "org/x"
    assert files.config.target_layers == 0
    tensors = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(tensors["d2t"] + np.arange(96), files.vocab)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), files.vocab)
    assert {name: copy.shape for name, copy in files.frozen.items()} == {"lm_head.weight": (96, 64)}
    old = published("speculators", DFLASH, sample_from_anchor="absent")
    assert read_drafter_files(old).config.anchor_layout == "anchor_only"
    assert read_drafter_files(published("speculators", PARALLEL)).config.anchor_layout == "anchor_predicts"


def test_load_drafter_takes_every_format(tmp_path, published, target, target_files):
    """The same weights through three formats: the same parameters, and none of the target's are kept twice."""
    loaded = [dspark_jax.load_drafter(published(kind), target) for kind in ("deepspec", "speculators")]
    write_drafter(tmp_path / "ours", "orbax", make(DSPARK))
    loaded.append(dspark_jax.load_drafter(tmp_path / "ours", target))
    for other in loaded[1:]:
        jax.tree.map(np.testing.assert_array_equal, other.params["model"], loaded[0].params["model"])
    for drafter in loaded:
        assert drafter.params["shared"].embed is target.params["embed"]
        assert set(drafter.params["model"]["layers_0"]["attention"]) == {"qkv", "o", "q_norm", "k_norm"}


def test_decoding_with_a_published_drafter(published, target):
    config = dataclasses.replace(REDUCED, anchor_layout="anchor_only")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # speculators' file names another target
        drafter = dspark_jax.load_drafter(published("speculators", config), target)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    with_it = dspark_jax.generate(target, prompts, drafter=drafter, max_new_tokens=12)
    alone = dspark_jax.generate(target, prompts, max_new_tokens=12)
    assert [row.token_ids for row in with_it.rows] == [row.token_ids for row in alone.rows]


def test_a_hub_id_is_downloaded(monkeypatch, published):
    monkeypatch.setattr(huggingface, "download", lambda name: published())
    assert read_drafter_files("org/name").name == "org/name"


def test_a_trained_window_is_kept(published):
    """A token sees itself and the window - 1 positions before it, across the block's start too."""
    files = read_drafter_files(published("zlab", SLIDING))
    config, params = files.config, files.params(np.float32)
    assert (config.decoder.sliding_layers, config.decoder.sliding_window) == ((0, 1), 4)
    model = DSparkModel(config, "token_major")
    rng = np.random.default_rng(0)
    embed, anchor = jax.numpy.asarray(rng.standard_normal((160, 64)), np.float32), jax.numpy.full((1, 1), 7)

    @jax.jit
    def hidden(features):
        apply = functools.partial(model.apply, {"params": params})
        context = apply(features, jax.numpy.arange(10)[None], method="project_context")
        return apply(embed, anchor, anchor, context, anchor, method="backbone")

    features = rng.standard_normal((1, 10, 3, 64)).astype(np.float32)
    changed = [np.where(np.arange(10)[None, :, None, None] == slot, 1.0, features) for slot in (3, 4, 7)]
    before = hidden(features)
    outside, edge, beyond_anchor = (hidden(f.astype(np.float32)) for f in changed)
    np.testing.assert_array_equal(outside, before)
    np.testing.assert_array_equal(beyond_anchor, before)
    assert np.abs(edge - before).max() > 1e-4


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("deepspec", {"mask_token_id": None}, "no 'mask_token_id': it can't be guessed"),
        ("deepspec", {"mask_token_id": 160}, "mask_token_id = 160: it must be a row of the embedding table, 0..159"),
        ("deepspec", {"mask_token_id": "<mask>"}, "mask_token_id = '<mask>', expected integer"),
        ("deepspec", {"target_layer_ids": [0, 5]}, "tapped layer = 5: tap layers -1..4"),
        ("deepspec", {"target_layer_ids": [0, 9]}, "tapped layer = 9: tap layers -1..4"),
        ("deepspec", {"target_layer_ids": [-2]}, "tapped layer = -2"),
        ("deepspec", {"target_layer_ids": []}, r"target_layer_ids = \[\], expected integers"),
        ("deepspec", {"block_size": 0}, "block_size = 0: use K >= 1"),
        ("deepspec", {"block_size": "absent"}, "no 'block_size'"),
        ("deepspec", {"markov_head_type": "lstm"}, "sequential_head = 'lstm'"),
        ("deepspec", {"markov_rank": "absent"}, "no 'markov_rank'"),
        ("deepspec", {"model_type": "gemma4_text"}, "model_type = 'gemma4_text'"),
        ("deepspec", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("deepspec", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 77}, "layers 1 .*77"),
        ("deepspec", {"architectures": ["Qwen3Eagle3Model"]}, "no 'ttt_length'"),
        ("deepspec", {"architectures": ["Gemma4Eagle3Model"]}, "no 'ttt_length'"),
        ("deepspec", {"architectures": ["BertModel"]}, "'BertModel'.* no drafter"),
        ("deepspec", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta is given as"),
        ("zlab", {"architectures": ["DFlash2DraftModel"]}, "DFlash 2"),
        ("zlab", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "is_causal": None}, "layers 0, 1 .*9"),
        ("zlab", {"block_size": 1}, "block_size = 1: it counts the anchor"),
        ("zlab", {"block_size": "absent"}, "no 'block_size'"),
        ("zlab", {"dflash_config": None}, "dflash_config = None"),
        ("zlab", {"dflash_config": {"target_layer_ids": [1]}}, "dflash_config has no 'mask_token_id'"),
        ("zlab", {"final_logit_softcapping": 20.0}, "final_logit_softcapping = 20.0"),
        ("zlab", {"num_target_layers": "absent"}, "no 'num_target_layers'"),
        ("speculators", {"speculators_model_type": "eagle3"}, "speculators_model_type = 'eagle3'"),
        ("speculators", {"sample_from_anchor": "absent"}, "no 'sample_from_anchor': it can't be guessed"),
        ("speculators", {"aux_hidden_state_layer_ids": None}, "no 'aux_hidden_state_layer_ids'"),
        ("speculators", {"mask_token_id": None}, "no 'mask_token_id'"),
        ("speculators", {"target_hidden_size": 128}, "target_hidden_size = 128"),
        ("speculators", {"transformer_layer_config": None}, "transformer_layer_config = None"),
        ("speculators", {"sample_from_anchor": False, "markov_head_type": "rnn"}, "markov_head_type = 'rnn'"),
        ("speculators", {"draft_vocab_size": 96}, "no d2t and no t2d"),
    ],
)
def test_bad_configs(published, kind, changes, message):
    folder = published(kind, DFLASH if kind == "zlab" else DSPARK, **changes)
    with pytest.raises(CheckpointError, match=message) as raised:
        read_drafter_files(folder)
    assert "config.json" in str(raised.value) or str(folder) in str(raised.value)


def test_all_missing_and_unexpected_tensors_are_listed(published):
    dropped = ("fc.weight", "layers.1.mlp.up_proj.weight")
    renamed = {"norm.weight": "final_norm.weight", "hidden_norm.weight": "layers.7.hidden_norm.weight"}
    for kind in ("deepspec", "speculators"):
        with pytest.raises(CheckpointError) as raised:
            read_drafter_files(published(kind, drop=dropped, rename=renamed))
        message = str(raised.value)
        assert "missing: fc.weight, hidden_norm.weight, norm.weight, layers.1.mlp.up_proj.weight;" in message
        assert "unexpected: final_norm.weight, layers.7.hidden_norm.weight" in message
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight is \[160, 64\], expected \[161, 64\]"):
        read_drafter_files(published(vocab_size=161))


def test_damaged_files(tmp_path, published, golden):
    folder = published()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a whole safetensors file"):
        read_drafter_files(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor"):
        read_drafter_files(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"neither drafter.json .* nor config.json .* it has nothing"):
        read_drafter_files(folder)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        read_drafter_files(tmp_path / "nowhere")
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_drafter_files(folder)
    folder = published("speculators", REDUCED)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"d2t": tensors["d2t"][::-1].copy()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="d2t and t2d disagree"):
        read_drafter_files(folder)
    write_drafter(tmp_path / "orbax", "orbax", make(DSPARK))
    values = json.loads((tmp_path / "orbax" / "drafter.json").read_text())
    (tmp_path / "orbax" / "drafter.json").write_text(json.dumps(values | {"sequential_head": "gated"}))
    with pytest.raises(CheckpointError, match="don't fit"):
        read_drafter_files(tmp_path / "orbax").tensors["fc.weight"]
    shutil.rmtree(tmp_path / "orbax" / "checkpoints")
    with pytest.raises(CheckpointError, match="has no checkpoints/"):
        read_drafter_files(tmp_path / "orbax")


# --- the target ----------------------------------------------------------------------------------


def with_target(target, **changes):
    return dataclasses.replace(target, config=dataclasses.replace(target.config, **changes))


def test_a_drafter_of_another_target(published, target):
    folder = published()
    for changes, message in (
        ({"vocab_size": 170}, "vocabulary 160 and width 64; target_qwen3 has 170 and 64"),
        ({"width": 96}, "target_qwen3 has 160 and 96"),
        ({"num_layers": 5}, "taps layer 4; target_qwen3 has 5 layers"),
    ):
        for force in (False, True):  # these can't work
            with pytest.raises(CheckpointError, match=message):
                dspark_jax.load_drafter(folder, with_target(target, **changes), force=force)
    with pytest.raises(CheckpointError, match=r"with 6 layers, target_qwen3 has 8; pass force=True \(--force\)"):
        dspark_jax.load_drafter(folder, with_target(target, num_layers=8))
    dspark_jax.load_drafter(folder, with_target(target, num_layers=8), force=True)
    bigger = dataclasses.replace(target, params=target.params | {"head": np.zeros((192, 64))})
    with pytest.raises(CheckpointError, match=r"lm_head.weight of shape \[160, 64\], target_qwen3 has \[192, 64\]"):
        dspark_jax.load_drafter(folder, bigger)
    other = dataclasses.replace(target, params=target.params | {"head": target.params["head"][::-1]})
    with pytest.warns(UserWarning, match="its copy of lm_head.weight differs from target_qwen3's"):
        dspark_jax.load_drafter(folder, other)


def test_what_travels_with_a_drafter_is_checked(tmp_path, target, target_files):
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), None, (7,), 8, "{{ messages }}")
    spoken = dataclasses.replace(target, tokenizer=tokenizer)
    known = {
        "target_fingerprint": target.config.fingerprint(),
        "chat_template_hash": tokenizer.chat_template_hash,
        "target_name": "org/target_qwen3",
    }
    for kind in ("deepspec", "speculators", "orbax"):
        write_drafter(tmp_path / kind, kind, make(dataclasses.replace(DSPARK, **known)), target_files)
        config = read_drafter_files(tmp_path / kind).config
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_target(config, spoken, force=False)
        changed = dataclasses.replace(tokenizer, chat_template="{{ other }}")
        with pytest.raises(CheckpointError, match="trained with chat template"):
            check_target(config, dataclasses.replace(spoken, tokenizer=changed), force=False)
        with pytest.raises(CheckpointError, match=r"trained for org/target_qwen3 \(fingerprint"):
            check_target(config, with_target(spoken, rope_theta=5.0), force=False)
        check_target(config, with_target(spoken, rope_theta=5.0), force=True)
    for mask, role in ((7, "end"), (8, "pad")):
        with pytest.warns(UserWarning, match=f"mask token {mask} is the target's {role} token"):
            check_target(dataclasses.replace(DSPARK, mask_token_id=mask), spoken, force=False)
    with pytest.warns(UserWarning, match="names 'org/x' as its target, this one is 'target_qwen3'"):
        check_target(dataclasses.replace(DSPARK, target_name="org/x"), target, force=False)


# --- commands ------------------------------------------------------------------------------------


def test_convert(tmp_path, capsys, golden, qwen3_folder):
    run = lambda *flags: (convert.main(["convert", *flags]), capsys.readouterr())  # noqa: E731
    source, out = f"--from={golden / 'draft_qwen3_gated'}", f"--to={tmp_path / 'out'}"
    code, text = run(source, out, "--format=speculators", f"--target={qwen3_folder}")
    assert (code, text.err) == (0, "")
    assert "draft_qwen3_gated (deepspec) written to" in text.out
    assert_same(read_drafter_files(tmp_path / "out"), read_drafter_files(golden / "draft_qwen3_gated"))
    for flags, message in (
        ((source, out, "--format=speculators"), "exists already"),
        ((source, f"--to={tmp_path / 'b'}", "--format=zlab"), "sequential_head = 'gated'"),
        ((source, f"--to={tmp_path / 'b'}", "--format=deepspec"), "name the target (--target)"),
        ((source, f"--to={tmp_path / 'b'}", "--format=onnx"), "format = 'onnx': use one of"),
        ((source, f"--to={tmp_path / 'b'}"), "--format is missing"),
        ((source, out, "--format=orbax", "extra"), "unexpected argument 'extra'"),
        (("--nonsense",), "nonsense"),
    ):
        code, text = run(*flags)
        assert (code, text.out) == (2, "")
        assert text.err.startswith("dspark_jax.convert: ")
        assert message in text.err
        assert text.err.count("\n") == 1
    assert run("--help")[0] == 0
    assert not (tmp_path / "b").exists()


def test_inspect(tmp_path, capsys, monkeypatch, golden, qwen3_folder, published):
    def run(*flags):
        code = inspect.main(["inspect", *flags])
        return code, capsys.readouterr()

    for kind, config in (("deepspec", RNN), ("zlab", DFLASH), ("speculators", REDUCED)):
        code, text = run(str(published(kind, config)), "--json")
        facts = json.loads(text.out)
        assert (code, facts["kind"], facts["format"]) == (0, "drafter", kind)
        assert facts["block_size"] == 5
        assert facts["anchor_layout"] == config.anchor_layout
        assert facts["tapped_layers"] == list(config.tapped_layers)
        assert facts["sequential_head"] == config.sequential_head
        assert facts["parameters"] == make(config).stored_parameters
        assert facts["bytes_in_bfloat16"] == 2 * facts["parameters"]
        assert facts["draft_vocab_size"] == config.vocab_out
        assert "vLLM" in facts["engines"]
    write_drafter(tmp_path / "ours", "orbax", make(REDUCED, ml_dtypes.bfloat16))
    facts = json.loads(run(str(tmp_path / "ours"), "--json")[1].out)
    assert (facts["dtypes"], facts["parameters"]) == (["BF16"], make(REDUCED).stored_parameters)
    code, text = run(str(qwen3_folder))
    assert code == 0
    assert "target_qwen3: target, format huggingface" in text.out
    assert "parameters              279,648 (0.6 MB in bfloat16)" in text.out
    assert "odd: no tokenizer" in text.out
    for name in ("draft_qwen3_eagle3", "draft_gemma4_eagle3"):
        code, text = run(str(golden / name))
        assert code == 0
        assert "method                  EAGLE-3" in text.out
    for flags, message in (((), "0 checkpoints named"), ((str(tmp_path / "no"),), "doesn't exist")):
        code, text = run(*flags)
        assert (code, text.out) == (2, "")
        assert message in text.err


def test_inspect_reads_no_weights(monkeypatch, golden, tmp_path):
    from dspark_jax.checkpoints import describe, orbax_drafter, safetensors_files

    write_drafter(tmp_path / "ours", "orbax", make(DSPARK))
    refuse = lambda *args: pytest.fail("weights were read")  # noqa: E731
    monkeypatch.setattr(safetensors_files.StoredTensor, "read", refuse)
    monkeypatch.setattr(orbax_drafter, "read_params", refuse)
    describe.describe(str(tmp_path / "ours"))
    describe.describe(str(golden / "draft_qwen3_rnn"))
    describe.describe(str(golden / "target_qwen3"))


def test_inspect_gguf(capsys, smollm2_path):
    assert inspect.main(["inspect", str(smollm2_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["format"], facts["family"]) == ("target", "gguf", "llama")
    assert facts["parameters"] == 134_515_008
