"""`config.json` of the families: both dialects of RoPE, windows, nested text models, and what is refused by name."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoints.huggingface import decoder_config_from_hf, read_folder
from dspark_jax.checkpoints.target_files import CheckpointError
from dspark_jax.config import RopeScaling

# What published files of the families say (sizes cut down), in the older dialect.
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
SIZES = {key: LLAMA3[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
QWEN2 = SIZES | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 4}
QWEN2 |= {"max_window_layers": 2, "sliding_window": 16, "use_sliding_window": False, "rope_theta": 1e6}
MISTRAL = SIZES | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_hidden_layers": 2}
MISTRAL |= {"num_key_value_heads": 2}
GEMMA3 = {  # as in the 4B model, where most fields have their defaults
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 16},
}
GEMMA4 = SIZES | {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_hidden_layers": 7}
GEMMA4 |= {"hidden_size_per_layer_input": 0, "num_key_value_heads": 2, "head_dim": 16}


def test_llama3():
    config = decoder_config_from_hf(LLAMA3)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    newer = {key: value for key, value in LLAMA3.items() if key not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = LLAMA3["rope_scaling"] | {"rope_theta": 500000.0}
    assert decoder_config_from_hf(newer) == config


@pytest.mark.parametrize("dialect", ["rope_scaling", "rope_parameters"])
def test_yarn(dialect):
    values = QWEN2 | {"max_position_embeddings": 32768, dialect: {"type": "yarn", "factor": 4.0}}
    scaling = decoder_config_from_hf(values).rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_positions) == ("yarn", 4.0, 32768)
    assert scaling.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    given = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "truncate": False, "beta_fast": 16}
    scaling = decoder_config_from_hf(values | {dialect: given}).rope_scaling
    assert (scaling.attention_factor, scaling.truncate, scaling.beta_fast) == (1.5, False, 16.0)


def test_windows_of_qwen2():
    config = decoder_config_from_hf(QWEN2)
    assert (config.qkv_bias, config.sliding_layers, config.sliding_window) == (True, (), 0)
    config = decoder_config_from_hf(QWEN2 | {"use_sliding_window": True})
    assert (config.sliding_layers, config.sliding_window) == ((2, 3), 16)
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = decoder_config_from_hf(QWEN2 | {"use_sliding_window": True, "layer_types": kinds})
    assert config.sliding_layers == (1, 3)


def test_windows_of_mistral():
    assert decoder_config_from_hf(MISTRAL).sliding_window == 4096  # left out: the default
    assert decoder_config_from_hf(MISTRAL | {"sliding_window": 64}).sliding_layers == (0, 1)
    config = decoder_config_from_hf(MISTRAL | {"sliding_window": None})  # null: no window
    assert (config.sliding_layers, config.sliding_window) == ((), 0)


def test_gemma3():
    config = decoder_config_from_hf(GEMMA3)
    assert (config.family, config.vocab_size, config.num_heads, config.num_kv_heads) == ("gemma3", 262208, 8, 4)
    assert (config.head_dim, config.sliding_layers, config.sliding_window) == (256, (0, 1, 2, 3, 4, 6), 1024)
    assert (config.rope_theta, config.sliding_rope_theta, config.rope_scaling.factor) == (1e6, 1e4, 8.0)
    assert config.attention(0).rope_scaling.kind == "none"
    assert (config.attention_scale, config.tie_embeddings, config.norm_plus_one) == (256**-0.5, True, True)
    rope = {"rope_scaling": None, "rope_local_base_freq": 5e3, "rope_theta": 2e5}
    config = decoder_config_from_hf(GEMMA3 | {"text_config": GEMMA3["text_config"] | rope})
    assert (config.rope_theta, config.sliding_rope_theta, config.rope_scaling.kind) == (2e5, 5e3, "none")


def test_gemma4():
    config = decoder_config_from_hf(GEMMA4)
    assert (config.sliding_layers, config.sliding_window) == ((0, 1, 2, 3, 4), 512)  # the last layer never slides
    assert (config.head_dim, config.sliding_head_dim, config.num_kv_heads, config.sliding_kv_heads) == (512, 16, 2, 2)
    assert (config.rope_theta, config.rope_share, config.sliding_rope_theta) == (1e6, 0.25, 1e4)
    config = decoder_config_from_hf(GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1})
    assert (config.keys_as_values, config.num_kv_heads, config.sliding_kv_heads) == (True, 1, 2)
    # All layers alike, as in a drafter's body.
    config = decoder_config_from_hf(GEMMA4 | {"layer_types": ["full_attention"] * 7, "global_head_dim": 32})
    assert (config.head_dim, config.sliding_head_dim, config.sliding_window) == (32, 0, 0)


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (GEMMA4, {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input = 256 is not supported, only 0"),
        (GEMMA4, {"hidden_size_per_layer_input": "absent"}, "hidden_size_per_layer_input = 256 is not supported"),
        (GEMMA4, {"enable_moe_block": True}, "enable_moe_block = True is not supported"),
        (GEMMA4, {"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2 is not supported"),
        (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported"),
        (
            GEMMA4,
            {"hidden_activation": "silu"},
            "hidden_activation = 'silu' is not supported, only 'gelu_py",
        ),
        (GEMMA4, {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config = .* is not supported: it may give"),
        (GEMMA4, {"per_layer_config": {"5": {"mlp": 8}, "6": {"mlp": 8}}}, "per_layer_config = .*mlp.* is not support"),
        (
            GEMMA4,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters of sliding_attention = .*linear.* is not supported: only the default RoPE",
        ),
        (GEMMA3, {"text_config": 3}, "text_config = 3: the config must hold that of the language model"),
        (GEMMA3, {"architectures": ["Gemma3ForCausalLM"]}, r"architectures = \['Gemma3ForCausalLM'\] is not supported"),
        (GEMMA3, {"quantization_config": {"bits": 4}}, "quantization_config = .*only models without it"),
        (MISTRAL, {"layer_types": ["full_attention"] * 2}, "layer_types with 'full_attention' for 2 layers .* mistral"),
        (QWEN2, {"layer_types": ["full_attention"]}, "layer_types with 'full_attention' for 4 layers"),
        (QWEN2, {"layer_types": ["chunked_attention"] * 4}, "layer_types with 'chunked_attention' for 4 layers"),
        (
            QWEN2,
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
            "sliding_window = 0: sliding layers need one",
        ),
    ],
)
def test_refusals(values, changes, message):
    values = {key: value for key, value in (values | changes).items() if value != "absent"}
    with pytest.raises(CheckpointError, match=message):
        decoder_config_from_hf(values)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_multimodal_folder(tmp_path, golden, prefix):
    """A language model inside a multimodal one reads as the language model by itself."""
    source = golden / "targets" / "gemma3"
    text = json.loads((source / "config.json").read_text())
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = load_file(source / "model.safetensors")
    nested = {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    nested["vision_tower.embeddings.weight"] = np.ones((3, 4), np.float32)
    nested["model.multi_modal_projector.ids"] = np.ones(3, np.int64)
    save_file(nested, tmp_path / "model.safetensors")
    files, alone = read_folder(tmp_path), read_folder(source)
    assert files.config == alone.config
    assert set(files.tensors) == set(alone.tensors) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(files.tensors[name], tensor, err_msg=name)


def test_missing_and_unexpected_tensors_are_all_listed(tmp_path, golden):
    shutil.copytree(golden / "targets" / "gemma4", tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    del tensors["model.layers.0.layer_scalar"], tensors["model.layers.2.post_feedforward_layernorm.weight"]
    tensors["model.layers.1.self_attn.v_proj.weight"] = np.ones((32, 32), np.float32)  # its keys are its values
    tensors["model.vision_tower.x"] = np.ones(1, np.float32)  # a text model has none
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        read_folder(tmp_path / "m")
    message = str(raised.value)
    assert "missing: model.layers.0.layer_scalar, model.layers.2.post_feedforward_layernorm.weight;" in message
    assert "unexpected: model.layers.1.self_attn.v_proj.weight, model.vision_tower.x." in message
    assert "\n" not in message
