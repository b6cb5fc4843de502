"""GGUF files (llama.cpp's format) of the llama, qwen2 and qwen3 architectures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np

from dspark_jax.checkpoints.target_files import (
    CheckpointError,
    LazyTensors,
    TargetFiles,
    check_tensors,
    check_tokenizer,
    expected_tensors,
)
from dspark_jax.config import ConfigError, DecoderConfig
from dspark_jax.text import TextError, Tokenizer, tokenizer_from_gguf

_ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Names outside the layers and inside `blk.N.`, without the final `.weight`.
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(path: str | Path) -> TargetFiles:
    """Reads a target from a GGUF file; tensors are dequantised to float32 when they are asked for.

    Raises:
      CheckpointError: a missing, truncated or corrupt file, an architecture, a quantisation type or a model
        feature that is not supported, or tensors that don't fit the metadata.
    """
    path = Path(path)
    reader = _open(path)
    try:
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError) as error:
        raise _corrupt(path, error) from error
    stored = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in stored.items()}
    config = _decoder_config(fields, shapes, path)
    expected = expected_tensors(config)
    check_tensors(shapes, expected, str(path))
    for name in expected:
        _check_quantisation(stored[name], path)
    tokenizer = _tokenizer(fields, path)
    check_tokenizer(tokenizer, config, str(path))

    def read(name: str) -> np.ndarray:
        values = gguf.quants.dequantize(stored[name].data, stored[name].tensor_type).astype(np.float32, copy=False)
        if config.family == "llama":
            if name.endswith("q_proj.weight"):
                return _unpermute(values, config.num_heads)
            if name.endswith("k_proj.weight"):
                return _unpermute(values, config.num_kv_heads)
        return values

    return TargetFiles(config, LazyTensors(expected, read), tokenizer, path.stem)


def _open(path: Path) -> gguf.GGUFReader:
    if not path.is_file():
        raise CheckpointError(f"no GGUF file at {path}: name a file that exists")
    try:
        return gguf.GGUFReader(path)
    except OSError as error:
        raise CheckpointError(f"{path} can't be opened ({error})") from error
    # Any garbage can stand where the reader expects a length, a type or a name.
    except (ValueError, LookupError, OverflowError, MemoryError, TypeError) as error:
        raise _corrupt(path, error) from error


def _corrupt(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} ({path.stat().st_size} bytes) is not a whole GGUF file, truncated or corrupt ({error}): fetch it again"
    )


def _hf_name(name: str) -> str:
    """Returns the Hugging Face name of a tensor, the name itself if there is none."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem = name.removesuffix(".weight")
    return f"{_TOP_NAMES[stem]}.weight" if stem != name and stem in _TOP_NAMES else name


def _decoder_config(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path) -> DecoderConfig:
    arch = fields.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture = {arch!r} is not supported; supported are {', '.join(_ARCHITECTURES)}"
        )

    def field(key: str, default: Any = None) -> Any:
        value = fields.get(f"{arch}.{key}", default)
        if value is None:
            raise CheckpointError(f"{path}: the metadata lacks {arch}.{key}: convert the model again")
        if isinstance(value, list):
            raise CheckpointError(f"{path}: {arch}.{key} = {value} differs per layer, which is not supported")
        return value

    width, num_heads = field("embedding_length"), field("attention.head_count")
    head_dim = field("attention.key_length", width // max(num_heads, 1))
    unsupported = {
        "rope.scaling.type": ("none", ""),
        "rope.scaling.factor": (1, 0),
        "rope.scale_linear": (1, 0),
        "rope.dimension_count": (head_dim,),
        "attention.value_length": (head_dim,),
        "attention.sliding_window": (0,),
        "expert_count": (0,),
    }
    for key, accepted in unsupported.items():
        value = field(key, accepted[0])
        if value not in accepted:
            raise CheckpointError(
                f"{path}: {arch}.{key} = {value!r} is not supported (only {accepted[0]!r}); use a model without it"
            )
    if "rope_freqs.weight" in shapes:
        raise CheckpointError(
            f"{path}: scaled RoPE frequencies (rope_freqs.weight) are not supported; use another model"
        )
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is None:
        raise CheckpointError(f"{path}: there is no token_embd.weight: it is not a whole model; fetch it again")
    try:
        return DecoderConfig(
            family=arch,
            vocab_size=embedding[0],
            width=width,
            mlp_width=field("feed_forward_length"),
            num_layers=field("block_count"),
            num_heads=num_heads,
            num_kv_heads=field("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rope_theta=_widen(field("rope.freq_base", 10000.0)),
            norm_eps=_widen(field("attention.layer_norm_rms_epsilon")),
            qk_norm=arch == "qwen3",
            qkv_bias=arch == "qwen2",
            tie_embeddings="lm_head.weight" not in shapes,
            max_positions=field("context_length"),
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _widen(value: float) -> float:
    """Returns the shortest decimal that a stored float32 stands for: 1e-5, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def _check_quantisation(tensor: gguf.ReaderTensor, path: Path) -> None:
    """Dequantises one block of zeros, the only public way to ask whether a type is supported."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), tensor.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{path}: tensor {tensor.name} has type {tensor.tensor_type.name}, which the gguf package can't dequantise;"
            " use a file quantised to F16, BF16, Q8_0, Q4_0, Q4_1 or a K type"
        ) from error


def _tokenizer(fields: Mapping[str, Any], path: Path) -> Tokenizer | None:
    if "tokenizer.ggml.model" not in fields:
        return None
    try:
        return tokenizer_from_gguf(fields)
    except TextError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Puts the rows of a llama q or k projection back into rotate-half order.

    The format stores the two halves of a head interleaved (pairs that RoPE turns together are neighbours).

    Args:
      rows: `[heads * H, D]`.
      heads: Query heads for q, key/value heads for k.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])  # [heads, H / 2, 2, D]
    return pairs.swapaxes(1, 2).reshape(rows.shape)
