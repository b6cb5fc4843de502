"""Hugging Face folders and hub ids of the llama and qwen3 families."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors

from dspark_jax.checkpoints.safetensors_files import check_types, find_tensors, read_json
from dspark_jax.checkpoints.target_files import (
    CheckpointError,
    LazyTensors,
    TargetFiles,
    check_tensors,
    check_tokenizer,
    expected_tensors,
)
from dspark_jax.config import ConfigError, DecoderConfig
from dspark_jax.text import TextError, Tokenizer, tokenizer_from_folder

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model")


def decoder_config_from_hf(values: Mapping[str, Any]) -> DecoderConfig:
    """Returns the config that a Hugging Face `config.json` describes.

    Fields that a file leaves out have the default of its model type. The base of the rotary frequencies is read
    from `rope_theta` and from the newer `rope_parameters`.

    Raises:
      CheckpointError: a model type or feature that is not supported, or a missing field; it is named with its value.
    """
    family = values.get("model_type")
    architectures = values.get("architectures") or []
    if family not in _ARCHITECTURES or any(name != _ARCHITECTURES[family] for name in architectures):
        supported = ", ".join(f"{kind} ({name})" for kind, name in _ARCHITECTURES.items())
        raise CheckpointError(
            f"model_type = {family!r} with architectures = {architectures!r} is not supported;"
            f" supported are {supported}"
        )
    _refuse_features(values)

    def field(key: str, default: Any = None) -> Any:
        value = values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(f"{key} = {value!r}: the config must give a number; complete its config.json")
        return value

    width, num_heads = field("hidden_size"), field("num_attention_heads")
    qwen3 = family == "qwen3"
    try:
        return DecoderConfig(
            family=family,
            vocab_size=field("vocab_size"),
            width=width,
            mlp_width=field("intermediate_size"),
            num_layers=field("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=field("num_key_value_heads", num_heads),
            head_dim=field("head_dim", 128 if qwen3 else width // max(num_heads, 1)),
            rope_theta=_rope_theta(values),
            norm_eps=float(field("rms_norm_eps", 1e-6)),
            qk_norm=qwen3,
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            max_positions=field("max_position_embeddings", 32768 if qwen3 else 2048),
        )
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def read_folder(path: str | Path) -> TargetFiles:
    """Reads a target from a Hugging Face folder: `config.json`, safetensors (one file or shards), tokenizer.

    Tensors are read from disk when they are asked for, in the dtype of the file.

    Raises:
      CheckpointError: a file is missing or damaged, a feature is not supported, or tensors don't fit the config.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"no folder at {folder}: name a folder with config.json and model.safetensors")
    values = read_json(folder / "config.json")
    try:
        config = decoder_config_from_hf(values)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    stored = find_tensors(folder)
    check_types(stored.values())
    expected = expected_tensors(config)
    check_tensors({name: tensor.shape for name, tensor in stored.items()}, expected, str(folder))
    tokenizer = _read_tokenizer(folder)
    check_tokenizer(tokenizer, config, str(folder))

    read = lambda name: stored[name].read()  # noqa: E731
    return TargetFiles(config, LazyTensors(expected, read), tokenizer, folder.resolve().name)


def download(model_id: str) -> Path:
    """Fetches a model from the Hugging Face hub, or finds it in its cache.

    Returns:
      The folder, for `read_folder`.

    Raises:
      CheckpointError: no such model, no access to it, or no network.
    """
    elsewhere = "or download the model on another machine and pass its folder"
    page = f"https://huggingface.co/{model_id}"
    try:
        return Path(huggingface_hub.snapshot_download(model_id, allow_patterns=list(_DOWNLOADED)))
    except huggingface_hub.errors.HFValidationError as error:
        raise CheckpointError(f"{model_id!r} is not a hub id ({error}): write it as org/name") from error
    except huggingface_hub.errors.GatedRepoError as error:
        raise CheckpointError(
            f"{model_id!r} is gated: accept its licence at {page} and set HF_TOKEN to your access token, {elsewhere}"
        ) from error
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"the hub has no model {model_id!r} that you can see: check the spelling, set HF_TOKEN if it is private,"
            f" {elsewhere}"
        ) from error
    # The client's own errors, and those of whichever HTTP library it uses; not all of these are OSErrors.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{model_id!r} can't be fetched from the hub ({reason}): check the network and HF_HUB_OFFLINE, {elsewhere}"
        ) from error


# --- config --------------------------------------------------------------------------------------


def _refuse_features(values: Mapping[str, Any]) -> None:
    """Refuses what would change the output and is not implemented."""
    for key, accepted in {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "partial_rotary_factor": (1.0,),
        "quantization_config": (),
    }.items():
        value = values.get(key)
        if value is not None and value not in accepted:
            only = f"only {accepted[0]!r} is" if accepted else "only unquantised weights are"
            raise CheckpointError(f"{key} = {value!r} is not supported, {only}; use a model without it")
    layer_types = values.get("layer_types")
    others = sorted(set(layer_types or ()) - {"full_attention"})
    if others:
        raise CheckpointError(
            f"layer_types with {', '.join(map(repr, others))} (sliding_window = {values.get('sliding_window')!r})"
            " is not supported, only 'full_attention' is; use a model without it"
        )
    # Without layer_types, Qwen3 slides from layer max_window_layers on.
    if layer_types is None and values.get("use_sliding_window") and values.get("sliding_window") is not None:
        first = values.get("max_window_layers", 28)
        if first < values.get("num_hidden_layers", 0):
            raise CheckpointError(
                f"sliding_window = {values['sliding_window']!r} from layer {first} on is not supported;"
                " use a model without it"
            )


def _rope_theta(values: Mapping[str, Any]) -> float:
    """Returns the base of the rotary frequencies from either dialect, refusing scaled ones."""
    thetas = [values.get("rope_theta")]
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else None
        nested = isinstance(rope, Mapping) and any(isinstance(value, Mapping) for value in rope.values())
        if kind != "default" or nested or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(f"{key} = {rope!r} is not supported, only rope_type 'default' is; use another model")
        thetas.append(rope.get("rope_theta"))
    given = {float(theta) for theta in thetas if theta is not None}
    if len(given) > 1:
        raise CheckpointError(f"rope_theta is given as {' and as '.join(map(str, sorted(given)))}: keep the right one")
    return given.pop() if given else 10000.0


# --- files ---------------------------------------------------------------------------------------


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        return tokenizer_from_folder(folder)
    except TextError as error:
        raise CheckpointError(str(error)) from error
