"""From a target's files to the parameters of `target.TargetModel`, and to a drafter's decoder layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.target_files import TargetFiles
from dspark_jax.config import DecoderConfig
from dspark_jax.records import Params

# Where a parameter lives: one place for all, or by its path ("layers_3.attention.qkv.weight") and shape.
Sharding = jax.sharding.Sharding | Callable[[str, tuple[int, ...]], jax.sharding.Sharding]


def target_params(files: TargetFiles, dtype: Any = jnp.float32, sharding: Sharding | None = None) -> Params:
    """Converts Hugging Face tensors to parameters, one at a time.

    Queries, keys and values become one matrix, gate and up another (`layers`): fewer and larger reads per step.

    Args:
      files: what a reader found.
      dtype: dtype of the parameters.
      sharding: where they live; None = on the default device.
    """

    def place(path: str, array: np.ndarray) -> jax.Array:
        where = sharding(path, array.shape) if callable(sharding) else sharding
        return jnp.asarray(array) if where is None else jax.device_put(array, where)

    tensors = files.tensors
    params: dict[str, Any] = {"embed": place("embed", _join(tensors, ["model.embed_tokens.weight"], dtype))}
    if not files.config.tie_embeddings:  # the largest ones first, while there is room for a second copy
        params["head"] = place("head", _join(tensors, ["lm_head.weight"], dtype))
    for i in range(files.config.num_layers):
        layer = layer_params(tensors, f"model.layers.{i}.", files.config, dtype, i, place, f"layers_{i}.")
        params[f"layers_{i}"] = layer
    params["norm"] = {"weight": place("norm.weight", _join(tensors, ["model.norm.weight"], dtype))}
    return params


def layer_params(
    tensors: Mapping[str, np.ndarray],
    prefix: str,
    config: DecoderConfig,
    dtype: Any,
    index: int = 0,
    place: Callable[[str, np.ndarray], jax.Array] = lambda path, array: jnp.asarray(array),
    path: str = "",
) -> Params:
    """Converts the tensors of one decoder layer (target or drafter: the names are the same).

    Args:
      tensors: by Hugging Face name.
      prefix: what stands before the layer's own names.
      config: the decoder.
      dtype: dtype of the parameters, None keeps that of the tensors.
      index: which of the decoder's layers it is.
      place: puts a parameter, given its path, onto devices.
      path: what stands before the layer's own paths.
    """
    params: dict[str, Any] = {}
    for name, sources in layer_sources(config, index).items():
        *groups, leaf = name.split(".")
        group = params
        for step in groups:
            group = group.setdefault(step, {})
        group[leaf] = place(path + name, _join(tensors, [prefix + source for source in sources], dtype))
    return params


def split_layer_params(params: Params, prefix: str, config: DecoderConfig, index: int = 0) -> dict[str, np.ndarray]:
    """The inverse of `layer_params`: parameters (or their gradients) by Hugging Face name."""
    own = config.attention(index)
    queries, keys = config.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    tensors = {}
    for name, sources in layer_sources(config, index).items():
        value: Any = params
        for step in name.split("."):
            value = value[step]
        bounds = [queries, queries + keys] if name.startswith("attention.qkv") else [config.mlp_width]
        for source, part in zip(sources, np.split(np.asarray(value), bounds[: len(sources) - 1])):
            tensors[prefix + source] = part
    return tensors


def layer_sources(config: DecoderConfig, index: int = 0) -> dict[str, list[str]]:
    """Returns, for each parameter of a layer, the tensors that it is made of, one below the other."""
    parts = [f"self_attn.{part}_proj" for part in ("qk" if config.attention(index).keys_as_values else "qkv")]
    sources = {
        "input_norm.weight": ["input_layernorm.weight"],
        "attention.qkv.weight": [f"{part}.weight" for part in parts],
        "attention.o.weight": ["self_attn.o_proj.weight"],
        "mlp_norm.weight": ["post_attention_layernorm.weight"],
        "mlp.gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "mlp.down.weight": ["mlp.down_proj.weight"],
    }
    if config.qkv_bias:
        sources["attention.qkv.bias"] = [f"{part}.bias" for part in parts]
    if config.qk_norm:
        sources |= {f"attention.{part}_norm": [f"self_attn.{part}_norm.weight"] for part in "qk"}
    if config.sandwich_norms:  # the same name stands for the norm before the MLP elsewhere
        sources["attention_out_norm.weight"] = ["post_attention_layernorm.weight"]
        sources["mlp_norm.weight"] = ["pre_feedforward_layernorm.weight"]
        sources["mlp_out_norm.weight"] = ["post_feedforward_layernorm.weight"]
    if config.layer_scalar:
        sources["scalar"] = ["layer_scalar"]
    return sources


def _join(tensors: Mapping[str, np.ndarray], names: list[str], dtype: Any) -> np.ndarray:
    """Returns tensors one below the other in the wanted dtype (None: their own), reading one at a time."""
    cast = lambda array: array if dtype is None else array.astype(dtype, copy=False)  # noqa: E731
    parts = (cast(np.asarray(tensors[name])) for name in names)
    return next(parts) if len(names) == 1 else np.concatenate(list(parts))
