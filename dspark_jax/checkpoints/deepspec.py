"""DeepSpec drafters: the published `dspark_*` and `dflash_*` checkpoints (safetensors and config.json)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from dspark_jax.checkpoints.huggingface import decoder_config_from_hf
from dspark_jax.checkpoints.target_files import CheckpointError
from dspark_jax.checkpoints.target_params import layer_params, split_layer_params
from dspark_jax.config import DrafterConfig
from dspark_jax.records import Params


def read_config(values: Mapping[str, Any]) -> DrafterConfig:
    """Returns the drafter's config from the fields of a DeepSpec config.json (Qwen3 bodies)."""
    for field in ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers"):
        if field not in values:
            raise CheckpointError(f"DeepSpec config.json has no {field!r}: it can't be guessed, add it from the source")
    rank = int(values.get("markov_rank") or 0)
    confidence = bool(values.get("enable_confidence_head", False))
    return DrafterConfig(
        decoder=decoder_config_from_hf(dict(values) | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}),
        block_size=int(values["block_size"]),
        tapped_layers=tuple(values["target_layer_ids"]),
        mask_token_id=int(values["mask_token_id"]),
        anchor_layout="anchor_predicts",
        sequential_head=values.get("markov_head_type", "vanilla") if rank else "none",
        markov_rank=rank,
        confidence_head=confidence,
        confidence_reads_markov=confidence and bool(values.get("confidence_head_with_markov", False)),
        target_layers=int(values["num_target_layers"]),
    )


def read_folder(path: str | Path) -> tuple[DrafterConfig, dict[str, np.ndarray]]:
    """Reads config and tensors of a DeepSpec folder."""
    folder = Path(path)
    try:
        values = json.loads((folder / "config.json").read_text())
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{folder}: not a readable DeepSpec drafter: {error}") from error
    return read_config(values), tensors


def params_from_tensors(config: DrafterConfig, tensors: Mapping[str, np.ndarray], dtype: Any = jnp.float32) -> Params:
    """Converts DeepSpec tensors to the parameters of `drafters.dspark.DSparkModel`."""
    get = lambda name: jnp.asarray(np.asarray(tensors[name]), dtype)  # noqa: E731
    params: dict[str, Any] = {
        "fc": {"weight": get("fc.weight")},
        "context_norm": {"weight": get("hidden_norm.weight")},
        "norm": {"weight": get("norm.weight")},
    }
    for i in range(config.decoder.num_layers):
        params[f"layers_{i}"] = layer_params(tensors, f"layers.{i}.", config.decoder, dtype)
    if config.sequential_head != "none":
        head: dict[str, Any] = {"w1": get("markov_head.markov_w1.weight"), "w2": get("markov_head.markov_w2.weight")}
        own = {"gated": "gate", "rnn": "joint"}.get(config.sequential_head)
        if own:
            head[own] = {
                "weight": get(f"markov_head.{own}_proj.weight"),
                "bias": get(f"markov_head.{own}_proj.bias"),
            }
        params["sequential"] = head
    if config.confidence_head:
        params["confidence"] = {
            "proj": {"weight": get("confidence_head.proj.weight"), "bias": get("confidence_head.proj.bias")}
        }
    return params


def tensors_from_params(config: DrafterConfig, params: Params) -> dict[str, np.ndarray]:
    """The inverse of `params_from_tensors` (also for gradients)."""
    tensors = {
        "fc.weight": params["fc"]["weight"],
        "hidden_norm.weight": params["context_norm"]["weight"],
        "norm.weight": params["norm"]["weight"],
    }
    for i in range(config.decoder.num_layers):
        tensors |= split_layer_params(params[f"layers_{i}"], f"layers.{i}.", config.decoder)
    if config.sequential_head != "none":
        head = params["sequential"]
        tensors |= {"markov_head.markov_w1.weight": head["w1"], "markov_head.markov_w2.weight": head["w2"]}
        for own in ("gate", "joint"):
            if own in head:
                tensors[f"markov_head.{own}_proj.weight"] = head[own]["weight"]
                tensors[f"markov_head.{own}_proj.bias"] = head[own]["bias"]
    if config.confidence_head:
        tensors["confidence_head.proj.weight"] = params["confidence"]["proj"]["weight"]
        tensors["confidence_head.proj.bias"] = params["confidence"]["proj"]["bias"]
    return {name: np.asarray(value) for name, value in tensors.items()}
