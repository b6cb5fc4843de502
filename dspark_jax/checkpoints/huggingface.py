"""Hugging Face folders and hub ids: config, safetensors and tokenizer of a target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors

from dspark_jax.checkpoints.huggingface_config import decoder_config_from_hf, is_wrapper
from dspark_jax.checkpoints.safetensors_files import StoredTensor, check_types, find_tensors, read_json
from dspark_jax.checkpoints.target_files import (
    CheckpointError,
    LazyTensors,
    TargetFiles,
    check_tensors,
    check_tokenizer,
    expected_tensors,
)
from dspark_jax.text import TextError, Tokenizer, tokenizer_from_folder

_DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model")

# Where multimodal models keep their language model, now and before; the rest of them is not read.
_LANGUAGE_MODEL = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHER_MODALITIES = ("vision_tower", "multi_modal_projector", "audio_tower", "embed_vision", "embed_audio")


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
    stored = _language_model(find_tensors(folder), is_wrapper(values))
    expected = expected_tensors(config)
    check_tensors({name: tensor.shape for name, tensor in stored.items()}, expected, str(folder))
    tokenizer = _read_tokenizer(folder)
    check_tokenizer(tokenizer, config, str(folder))

    return TargetFiles(
        config, LazyTensors(expected, lambda name: stored[name].read()), tokenizer, folder.resolve().name
    )


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


def _language_model(found: Mapping[str, StoredTensor], wrapper: bool) -> dict[str, StoredTensor]:
    """Returns the tensors of the language model under the names that it has by itself, refusing quantised ones."""
    tensors = {}
    for name, tensor in found.items():
        if wrapper and name.removeprefix("model.").startswith(_OTHER_MODALITIES):
            continue
        for prefix, own in _LANGUAGE_MODEL.items():
            if name.startswith(prefix):
                name = own + name.removeprefix(prefix)
        tensors[name] = tensor
    check_types(tensors.values())
    return tensors


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        return tokenizer_from_folder(folder)
    except TextError as error:
        raise CheckpointError(str(error)) from error
