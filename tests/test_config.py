"""Configs: what is refused and why, and that nothing is lost on the way to a file and back."""

import dataclasses
import json
from pathlib import Path

import ml_collections
import pytest

from dspark_jax import config
from dspark_jax.config import ConfigError, DecoderConfig, DrafterConfig, RopeScaling

DECODER = DecoderConfig("qwen3", 97, 32, 48, 2, 4, 2, 8, 1e4, 1e-6, True, False, 512)


def drafter(**fields) -> DrafterConfig:
    return DrafterConfig(**{"decoder": DECODER, "target_layers": 6, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask_token_id": 97}, r"mask_token_id = 97: it must be a row of the embedding table, 0\.\.96"),
        ({"mask_token_id": -1}, "mask_token_id = -1"),
        ({"tapped_layers": (1, 5)}, r"tapped layer = 5: tap layers -1\.\.4"),
        ({"tapped_layers": (-2,)}, "tapped layer = -2"),
        ({"tapped_layers": ()}, "name at least one layer"),
        ({"block_size": 0}, "block_size = 0: use K >= 1"),
        ({"sequential_head": "lstm"}, "sequential_head = 'lstm': use one of none, vanilla, gated, rnn"),
        ({"anchor_layout": "other"}, "anchor_layout = 'other'"),
        ({"draft_vocab_size": 98}, "draft_vocab_size = 98"),
        ({"draft_vocab_size": -1}, "draft_vocab_size = -1"),
        ({"markov_rank": 0}, "markov_rank = 0: use a positive rank"),
    ],
)
def test_drafter_config_refuses(fields, message):
    with pytest.raises(ConfigError, match=message):
        drafter(**fields)


def test_drafter_config_takes_the_borders():
    config = drafter(mask_token_id=96, tapped_layers=(-1, 4), block_size=1, draft_vocab_size=97)
    assert config.vocab_out == 97
    assert drafter().vocab_out == 97
    assert drafter(block_size=5).block_slots == 5
    assert drafter(block_size=5, anchor_layout="anchor_only").block_slots == 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, "it must be a multiple of num_kv_heads=2"),
        ({"head_dim": 7}, "RoPE needs an even head_dim"),
        ({"width": 0}, "width = 0"),
        ({"num_layers": -1}, "num_layers = -1"),
        ({"activation": "relu"}, "decoder activation = 'relu': use one of silu, gelu_tanh"),
        ({"rope_share": 0.0}, "decoder rope_share = 0.0"),
        ({"sliding_layers": (0,)}, "decoder sliding_window = 0: sliding layers need one"),
        ({"sliding_layers": (1, 0), "sliding_window": 4}, r"sliding_layers = \(1, 0\): name layers 0.."),
        ({"sliding_layers": (99,), "sliding_window": 4}, r"sliding_layers = \(99,\): name layers 0.."),
        ({"sliding_head_dim": 7}, "sliding_head_dim = 7: RoPE needs an even head_dim"),
        ({"sliding_kv_heads": 3}, "it must be a multiple of sliding_kv_heads=3"),
    ],
)
def test_decoder_config_refuses(fields, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(DECODER, **fields)


NEW_FIELDS = {  # of DecoderConfig, each with a value that is not its default
    "qkv_bias": True,
    "activation": "gelu_tanh",
    "rope_scaling": RopeScaling("linear", 8.0),
    "rope_share": 0.25,
    "sliding_window": 8,
    "sliding_layers": (0,),
    "sliding_rope_theta": 1e4,
    "sliding_head_dim": 8,
    "sliding_kv_heads": 1,
    "attention_scale": 1.0,
    "keys_as_values": True,
    "value_norm": True,
    "norm_plus_one": True,
    "sandwich_norms": True,
    "layer_scalar": True,
    "scale_embeddings": True,
    "logit_softcap": 30.0,
}


def test_fingerprint_depends_on_every_field():
    names = [field.name for field in dataclasses.fields(DECODER)]
    values = ("llama", 98, 34, 50, 3, 6, 4, 10, 2e4, 1e-5, False, True, 256)
    assert names == [*names[: len(values)], *NEW_FIELDS], "a new field of DecoderConfig needs a value in this test"
    sliding = dataclasses.replace(DECODER, sliding_window=4)
    changed = {
        name: dataclasses.replace(sliding, **{name: other})
        for name, other in [*zip(names, values), *NEW_FIELDS.items()]
        if name not in ("num_heads", "num_kv_heads")
    }
    changed["heads"] = dataclasses.replace(sliding, num_heads=6)
    changed["kv_heads"] = dataclasses.replace(sliding, num_kv_heads=1)
    prints = {sliding.fingerprint(), DECODER.fingerprint()} | {c.fingerprint() for c in changed.values()}
    assert len(prints) == len(changed) + 2


def test_recorded_fingerprints():
    """Trained drafters store their target's fingerprint: fields that came later don't change it at their defaults."""
    assert DecoderConfig().fingerprint() == "823b13205ed33e7e"  # SmolLM2, in drafters/smollm2_135m/drafter.json
    qwen3 = DecoderConfig("qwen3", 97, 32, 48, 3, 4, 2, 8, 1e4, 1e-6, True, False, 512)
    assert qwen3.fingerprint() == "9277f8f4908a5189"
    saved = json.loads((Path(__file__).parent.parent / "drafters" / "smollm2_135m" / "drafter.json").read_text())
    assert config.drafter_config_from_dict(saved).target_fingerprint == DecoderConfig().fingerprint()


def test_attention_of_a_layer():
    body = dataclasses.replace(
        DECODER,
        rope_scaling=RopeScaling("linear", 8.0),
        keys_as_values=True,
        sliding_window=8,
        sliding_layers=(1,),
        sliding_rope_theta=1e3,
        sliding_head_dim=4,
        sliding_kv_heads=1,
    )
    full, sliding = body.attention(0), body.attention(1)
    assert (full.num_kv_heads, full.head_dim, full.window) == (DECODER.num_kv_heads, DECODER.head_dim, 0)
    assert (full.rope_theta, full.rope_scaling.factor, full.keys_as_values) == (DECODER.rope_theta, 8.0, True)
    assert (sliding.num_kv_heads, sliding.head_dim, sliding.window) == (1, 4, 8)
    assert (sliding.rope_theta, sliding.rope_scaling.kind, sliding.keys_as_values) == (1e3, "none", False)


def test_drafter_config_round_trip():
    original = drafter(tapped_layers=(-1, 2, 4), anchor_layout="anchor_only", target_name="x", chat_template_hash="h")
    text = json.dumps(config.drafter_config_to_dict(original))
    assert config.drafter_config_from_dict(json.loads(text)) == original


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(blocksize=7), "drafter: unknown field blocksize; known fields: .*block_size"),
        (lambda d: d["decoder"].update(depth=7), "drafter.decoder: unknown field depth"),
        (lambda d: d.update(block_size="7"), "drafter.block_size: expected int, got '7'"),
        (lambda d: d.update(block_size=True), "drafter.block_size: expected int, got True"),
        (lambda d: d.update(tapped_layers=3), "drafter.tapped_layers: expected a tuple of integers, got 3"),
        (lambda d: d.update(decoder=3), "drafter.decoder: expected a group of fields, got 3"),
        (lambda d: d.update(mask_token_id=1000), "mask_token_id = 1000"),
    ],
)
def test_drafter_file_refuses(change, message):
    values = json.loads(json.dumps(config.drafter_config_to_dict(drafter())))
    change(values)
    with pytest.raises(ConfigError, match=message):
        config.drafter_config_from_dict(values)


def test_recipe_round_trip():
    recipe = config.RecipeConfig(
        name="x",
        random_target=DECODER,
        drafter=config.DraftModelConfig(tapped_layers=(0, 2)),
        train=config.TrainConfig(learning_rate=1e-3),
    )
    assert config.from_config_dict(config.to_config_dict(recipe)) == recipe
    # As saved beside a checkpoint: through JSON.
    assert config.from_config_dict(json.loads(config.to_config_dict(recipe).to_json())) == recipe


def test_overrides_go_through_ml_collections():
    values = config.to_config_dict(config.RecipeConfig())
    values.update_from_flattened_dict(
        {"train.steps": 7, "drafter.tapped_layers": (1, 3), "decode.policy": "threshold", "train.learning_rate": 1}
    )
    recipe = config.from_config_dict(values)
    assert recipe.train.steps == 7
    assert recipe.drafter.tapped_layers == (1, 3)
    assert recipe.decode.policy == "threshold"
    assert recipe.train.learning_rate == 1.0
    assert isinstance(recipe.train.learning_rate, float)
    with pytest.raises(TypeError):  # ml_collections refuses another type before we see it
        values.train.steps = "seven"
    values.update_from_flattened_dict({"train.stepz": 7})
    with pytest.raises(ConfigError, match=r"config\.train: unknown field stepz"):
        config.from_config_dict(values)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("train.stepz", 1, "config.train: unknown field stepz"),
        ("surprise", 1, "config: unknown field surprise"),
        ("train.steps", 1.5, "config.train.steps: expected int, got 1.5"),
        ("train.learning_rate", "high", "config.train.learning_rate: expected float"),
        ("data.drop_loops", 1, "config.data.drop_loops: expected bool"),
        ("data.source", "web", "config.data.source"),
        ("data.source", "file", "config.data.prompts_path"),
        ("data.temperature", -1.0, "config.data.temperature = -1.0"),
        ("decode.policy", "best", "config.decode.policy = 'best': use one of full, threshold"),
        ("decode.policy", "full+full", "NAME.conservative_tokens"),
        ("decode.policy", "delayed", "config.decode.policy = 'delayed': it needs a measured table"),
        ("decode.policy", "threshold+conservative_tokens", "name the tokens in config.decode.conservative_tokens"),
        ("decode.threshold", 1.5, "config.decode.threshold = 1.5: use a probability"),
        ("decode.temperature", -0.5, "config.decode.temperature = -0.5"),
        ("decode.top_k", -1, "config.decode.top_k = -1: use 0"),
        ("decode.top_p", 0.0, "config.decode.top_p = 0.0: use a probability"),
        ("decode.min_p", 1.5, "config.decode.min_p = 1.5: use a share"),
        ("decode.repetition_penalty", 0.0, "config.decode.repetition_penalty = 0.0: use a positive"),
        ("decode.verifier", "tree", "config.decode.verifier"),
        ("decode.draft_sampling", "beam", "config.decode.draft_sampling"),
        ("decode.candidates", -1, "config.decode.candidates = -1: use 0"),
        ("decode.block_size", 8, "use at most the trained block size, 7"),
        ("drafter.sequential_head", "lstm", "config.drafter.sequential_head"),
        ("drafter.anchor_layout", "other", "config.drafter.anchor_layout"),
        ("drafter.block_size", 0, "config.drafter.block_size = 0"),
        ("train.steps", 0, "config.train.steps = 0"),
        ("train.batch_size", 0, "config.train.batch_size = 0"),
        ("train.loss_chunk", 48, "it must divide config.train.anchors=64"),
    ],
)
def test_recipe_refuses(field, value, message):
    values = config.to_config_dict(config.RecipeConfig()).to_dict()
    group, _, name = field.rpartition(".")
    (values[group] if group else values)[name] = value
    with pytest.raises(ConfigError, match=message):
        config.from_config_dict(values)
    with pytest.raises(ConfigError, match=message):
        config.from_config_dict(ml_collections.ConfigDict(values))


def test_policies_that_are_not_lossless_are_greedy_only():
    def read(policy: str, temperature: float, reads_markov: bool = True):
        decode = {"policy": policy, "temperature": temperature, "sps": "t.json", "conservative_tokens": (1,)}
        config.from_config_dict({"decode": decode, "drafter": {"confidence_reads_markov": reads_markov}})

    read("oracle", 0.0)
    read("global_maximum", 0.0)
    read("delayed", 1.0)
    read("global_maximum", 1.0, reads_markov=False)  # h_k alone knows no draft token
    refused = [("oracle", False), ("global_maximum", True), ("global_maximum+conservative_tokens", False)]
    for policy, reads_markov in refused:
        with pytest.raises(ConfigError, match=r"not lossless when sampling: use config\.decode\.temperature=0"):
            read(policy, 0.5, reads_markov)


def test_confidences_need_a_head():
    with pytest.raises(ConfigError, match=r"'threshold': it needs config\.drafter\.confidence_head"):
        config.from_config_dict({"decode": {"policy": "threshold"}, "drafter": {"confidence_head": False}})


def test_confidence_can_not_read_an_embedding_that_does_not_exist():
    with pytest.raises(ConfigError, match="without a sequential head there is no Markov embedding"):
        DrafterConfig(decoder=DecoderConfig(), sequential_head="none", confidence_reads_markov=True)
