"""DeepSpec's `eagle3_*` checkpoints: config and tensors to `drafters.eagle3` and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints import target_files
from dspark_jax.checkpoints.huggingface_config import decoder_config_from_hf
from dspark_jax.checkpoints.target_files import CheckpointError
from dspark_jax.checkpoints.target_params import layer_params, split_layer_params
from dspark_jax.config import Eagle3Config
from dspark_jax.records import Params

ARCHITECTURE = "Qwen3Eagle3Model"
_LAYER = "layers.0."
_NORMS = {"hidden_norm": f"{_LAYER}hidden_norm.weight", "norm": "norm.weight"}


def read_config(values: Mapping[str, Any]) -> Eagle3Config:
    """Returns the drafter's config from the fields of a config.json.

    Raises:
      CheckpointError: a field is missing, or the drafter has more than one layer.
    """
    for field in ("ttt_length", "target_layer_ids", "num_target_layers"):
        if field not in values:
            raise CheckpointError(f"DeepSpec config.json has no {field!r}: it can't be guessed, add it from the source")
    if int(values.get("num_hidden_layers", 1)) != 1:
        raise CheckpointError(f"num_hidden_layers = {values['num_hidden_layers']}: EAGLE-3 drafters have one layer")
    return Eagle3Config(
        decoder=decoder_config_from_hf(dict(values) | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}),
        block_size=int(values["ttt_length"]),
        tapped_layers=tuple(values["target_layer_ids"]),
        step_decay=float(values.get("step_loss_decay", 0.8)),
        target_layers=int(values["num_target_layers"]),
        target_name=str(values.get("target_model_name_or_path", "")),
    )


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
