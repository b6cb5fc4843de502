"""Tensors of EAGLE-3 drafters, by their names in DeepSpec's `eagle3_*` checkpoints, and parameters of them and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints import target_files
from dspark_jax.checkpoints.target_params import layer_params, split_layer_params
from dspark_jax.config import Eagle3Config
from dspark_jax.records import Params

_LAYER = "layers.0."
_NORMS = {"hidden_norm": f"{_LAYER}hidden_norm.weight", "norm": "norm.weight"}


def expected_tensors(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Returns name and shape of every tensor that a drafter of this config has."""
    width = config.decoder.width
    tensors = {"fc.weight": (width, len(config.tapped_layers) * width), "norm.weight": (width,)}
    for name, shape in target_files.expected_tensors(config.decoder).items():
        if name.startswith("model.layers."):
            inputs = 2 if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else 1
            tensors[name.removeprefix("model.")] = (*shape[:-1], shape[-1] * inputs)
    return tensors | {f"{_LAYER}hidden_norm.weight": (width,)}


def params_from_tensors(config: Eagle3Config, tensors: Mapping[str, np.ndarray], dtype: Any = jnp.float32) -> Params:
    """Converts DeepSpec tensors to the parameters of `drafters.eagle3.Eagle3Model`."""
    get = lambda name: {"weight": jnp.asarray(np.asarray(tensors[name]), dtype)}  # noqa: E731
    layer = layer_params(tensors, _LAYER, config.decoder, dtype)
    return {**layer, "fc": get("fc.weight"), **{ours: get(theirs) for ours, theirs in _NORMS.items()}}


def tensors_from_params(config: Eagle3Config, params: Params) -> dict[str, np.ndarray]:
    """The inverse of `params_from_tensors` (also for gradients)."""
    tensors = split_layer_params(params, _LAYER, config.decoder)
    tensors["fc.weight"] = np.asarray(params["fc"]["weight"])
    return tensors | {theirs: np.asarray(params[ours]["weight"]) for ours, theirs in _NORMS.items()}
