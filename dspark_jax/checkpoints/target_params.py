"""From a target's files to the parameters of `target.TargetModel`, and to a drafter's decoder layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.target_files import TargetFiles
from dspark_jax.config import DecoderConfig
from dspark_jax.records import Params


def target_params(files: TargetFiles, dtype: Any = jnp.float32) -> Params:
    """Converts Hugging Face tensors to parameters, one layer at a time.

    Queries, keys and values become one matrix, gate and up another (`layers`): fewer and larger reads per step.
    """
    tensors = files.tensors
    convert = lambda name: jnp.asarray(np.asarray(tensors[name]), dtype)  # noqa: E731
    params: dict[str, Any] = {"embed": convert("model.embed_tokens.weight")}
    for i in range(files.config.num_layers):
        params[f"layers_{i}"] = layer_params(tensors, f"model.layers.{i}.", files.config, dtype)
    params["norm"] = {"weight": convert("model.norm.weight")}
    if not files.config.tie_embeddings:
        params["head"] = convert("lm_head.weight")
    return params


def layer_params(tensors: Mapping[str, np.ndarray], prefix: str, config: DecoderConfig, dtype: Any) -> Params:
    """Converts the tensors of one decoder layer (target or drafter: the names are the same)."""
    get = lambda name: np.asarray(tensors[prefix + name])  # noqa: E731
    join = lambda *names: jnp.asarray(np.concatenate([get(f"{n}.weight") for n in names]), dtype)  # noqa: E731
    attention: dict[str, Any] = {
        "qkv": {"weight": join("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
        "o": {"weight": join("self_attn.o_proj")},
    }
    if config.qk_norm:
        attention |= {"q_norm": join("self_attn.q_norm"), "k_norm": join("self_attn.k_norm")}
    return {
        "input_norm": {"weight": join("input_layernorm")},
        "attention": attention,
        "mlp_norm": {"weight": join("post_attention_layernorm")},
        "mlp": {
            "gate_up": {"weight": join("mlp.gate_proj", "mlp.up_proj")},
            "down": {"weight": join("mlp.down_proj")},
        },
    }


def split_layer_params(params: Params, prefix: str, config: DecoderConfig) -> dict[str, np.ndarray]:
    """The inverse of `layer_params`: parameters (or their gradients) by Hugging Face name."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = np.asarray(params["attention"]["qkv"]["weight"])
    gate, up = np.split(np.asarray(params["mlp"]["gate_up"]["weight"]), 2)
    tensors = {
        "input_layernorm": params["input_norm"]["weight"],
        "self_attn.q_proj": qkv[:queries],
        "self_attn.k_proj": qkv[queries : queries + keys],
        "self_attn.v_proj": qkv[queries + keys :],
        "self_attn.o_proj": params["attention"]["o"]["weight"],
        "post_attention_layernorm": params["mlp_norm"]["weight"],
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": params["mlp"]["down"]["weight"],
    }
    if config.qk_norm:
        tensors |= {
            "self_attn.q_norm": params["attention"]["q_norm"],
            "self_attn.k_norm": params["attention"]["k_norm"],
        }
    return {f"{prefix}{name}.weight": np.asarray(value) for name, value in tensors.items()}
