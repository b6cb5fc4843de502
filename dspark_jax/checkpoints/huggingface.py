"""Hugging Face folders and hub ids: config, safetensors and tokenizer of a target."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import numpy as np
import safetensors

from dspark_jax.checkpoints.huggingface_config import decoder_config_from_hf, is_wrapper
from dspark_jax.checkpoints.target_files import (
    CheckpointError,
    LazyTensors,
    TargetFiles,
    check_tensors,
    check_tokenizer,
    expected_tensors,
)
from dspark_jax.text import TextError, Tokenizer, tokenizer_from_folder

_FLOAT_TYPES = ("F32", "F16", "BF16", "F64")
_DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model")

# Where multimodal models keep their language model, now and before; the rest of them is not read.
_LANGUAGE_MODEL = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHER_MODALITIES = ("vision_tower", "multi_modal_projector", "audio_tower", "embed_vision", "embed_audio")


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Where a tensor is stored: file, name in it, shape and type of the header."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str


def read_folder(path: str | Path) -> TargetFiles:
    """Reads a target from a Hugging Face folder: `config.json`, safetensors (one file or shards), tokenizer.

    Tensors are read from disk when they are asked for, in the dtype of the file.

    Raises:
      CheckpointError: a file is missing or damaged, a feature is not supported, or tensors don't fit the config.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"no folder at {folder}: name a folder with config.json and model.safetensors")
    values = _read_json(folder / "config.json")
    try:
        config = decoder_config_from_hf(values)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    stored = _language_model(_find_tensors(folder), is_wrapper(values))
    expected = expected_tensors(config)
    check_tensors({name: tensor.shape for name, tensor in stored.items()}, expected, str(folder))
    tokenizer = _read_tokenizer(folder)
    check_tokenizer(tokenizer, config, str(folder))

    def read(name: str) -> np.ndarray:
        # Opened for each tensor: what is mapped into memory counts as the process's own until the file is closed.
        with _open(stored[name].file) as tensors:
            return tensors.get_tensor(stored[name].name)

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


# --- files ---------------------------------------------------------------------------------------


def _find_tensors(folder: Path) -> list[_Stored]:
    """Returns what a folder stores, from the files' headers only."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return _read_header(single)
    if not index.is_file():
        found = ", ".join(sorted(file.name for file in folder.iterdir())[:20])
        raise CheckpointError(
            f"{folder} has neither {single.name} nor {index.name} (it has {found}): save the model with"
            " save_pretrained(folder, safe_serialization=True)"
        )
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map = {weight_map!r}, expected file names by tensor; fetch it again")
    shards = {
        file: {tensor.name: tensor for tensor in _read_header(folder / file)} for file in set(weight_map.values())
    }
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise CheckpointError(f"{index} puts {name} into {file}, which doesn't hold it; fetch both again")
    return [shards[file][name] for name, file in weight_map.items()]


def _language_model(found: list[_Stored], wrapper: bool) -> dict[str, _Stored]:
    """Returns the tensors of the language model under the names that it has by itself, refusing quantised ones."""
    tensors = {}
    for tensor in found:
        name = tensor.name
        if wrapper and name.removeprefix("model.").startswith(_OTHER_MODALITIES):
            continue
        for prefix, own in _LANGUAGE_MODEL.items():
            if name.startswith(prefix):
                name = own + name.removeprefix(prefix)
        if tensor.kind not in _FLOAT_TYPES:
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} has type {tensor.kind}, only {', '.join(_FLOAT_TYPES)} are supported;"
                " use the unquantised weights"
            )
        tensors[name] = tensor
    return tensors


def _open(file: Path) -> Any:
    try:
        return safetensors.safe_open(file, framework="numpy")
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: fetch it again") from error
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file ({error}): fetch it again") from error


def _read_header(file: Path) -> list[_Stored]:
    with _open(file) as tensors:
        views = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)
        return [_Stored(file, name, tuple(view.get_shape()), view.get_dtype()) for name, view in views.items()]


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        return tokenizer_from_folder(folder)
    except TextError as error:
        raise CheckpointError(str(error)) from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} can't be read ({error}): the folder must hold a Hugging Face model") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON ({error}): fetch it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(values).__name__}; fetch it again")
    return values
