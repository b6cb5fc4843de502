"""Says what a checkpoint is, from headers and metadata: no weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.checkpoints import drafter_formats, huggingface, load, orbax_drafter
from dspark_jax.checkpoints.drafter_files import DrafterFiles, expected_drafter_tensors
from dspark_jax.checkpoints.safetensors_files import find_tensors, read_json
from dspark_jax.checkpoints.target_files import CheckpointError, TargetFiles, expected_tensors
from dspark_jax.config import DecoderConfig, DrafterConfig, Eagle3Config

# Which engines read a format, besides this library. Heads and vocabularies that they lack are theirs to refuse.
_ENGINES = {
    "orbax": [],
    "deepspec": ["vLLM"],
    "zlab": ["vLLM", "SGLang"],
    "speculators": ["vLLM"],
    "huggingface": ["vLLM", "SGLang"],
    "gguf": ["llama.cpp"],
}


def describe(name_or_path: str) -> dict[str, Any]:
    """Describes a target or a drafter.

    Args:
      name_or_path: what `load_target` or `load_drafter` takes. A hub id is downloaded whole.

    Returns:
      JSON-serialisable facts by name. `kind` is "target", "drafter" or "unknown"; of a Hugging Face folder that this
      library can't read there are fewer facts, and the reason in `odd`.

    Raises:
      CheckpointError: there is nothing, or it is damaged.
    """
    folder = Path(name_or_path).expanduser()
    if not folder.exists() and load.is_hub_id(name_or_path):
        folder = huggingface.download(name_or_path)
    if not folder.is_dir():
        files = load.read_target_files(name_or_path)
        stored = "gguf"
        return _describe_target(files, stored)
    if (folder / orbax_drafter.CONFIG_FILE).exists():
        return _describe_drafter(drafter_formats.read_drafter_files(folder))
    if not (folder / "config.json").exists():
        drafter_formats.format_of(folder)  # raises, and lists what is there
    values = read_json(folder / "config.json")
    try:
        if drafter_formats.is_drafter(values):
            return _describe_drafter(drafter_formats.read_drafter_files(folder))
        return _describe_target(load.read_target_files(folder), "huggingface")
    except CheckpointError as error:
        return _describe_unknown(folder, values, error)


def _describe_target(files: TargetFiles, stored: str) -> dict[str, Any]:
    config, tokenizer = files.config, files.tokenizer
    parameters = sum(math.prod(shape) for shape in expected_tensors(config).values())
    odd = [] if tokenizer else ["no tokenizer: prompts must be token ids"]
    if tokenizer and not tokenizer.chat_template:
        odd.append("no chat template")
    if tokenizer and tokenizer.vocab_size < config.vocab_size:
        odd.append(f"{config.vocab_size - tokenizer.vocab_size} rows of the embedding belong to no token")
    return {
        "kind": "target",
        "format": stored,
        "name": files.name,
        "family": config.family,
        "sizes": _sizes(config),
        "tied_embeddings": config.tie_embeddings,
        "fingerprint": config.fingerprint(),
        "chat_template_hash": tokenizer.chat_template_hash if tokenizer else "",
        "end_tokens": list(tokenizer.eos_ids) if tokenizer else [],
        **_memory(parameters),
        "engines": ["dspark_jax", *_ENGINES[stored]],
        "odd": odd,
    }


def _describe_drafter(files: DrafterFiles) -> dict[str, Any]:
    config = files.config
    expected = sum(math.prod(shape) for shape in expected_drafter_tensors(config).values())
    eagle3 = isinstance(config, Eagle3Config)
    return {
        "kind": "drafter",
        "format": files.format,
        "name": files.name,
        "method": "EAGLE-3" if eagle3 else "DFlash" if config.sequential_head == "none" else "DSpark",
        "family": config.decoder.family,
        "sizes": _sizes(config.decoder),
        "block_size": config.block_size,
        "tapped_layers": list(config.tapped_layers),
        **({} if eagle3 else _heads(config)),
        "target": {
            "name": config.target_name,
            "layers": config.target_layers,
            "fingerprint": config.target_fingerprint,
            "chat_template_hash": config.chat_template_hash,
        },
        "copies_of_the_target": {name: list(copy.shape) for name, copy in files.frozen.items()},
        "dtypes": sorted(set(files.dtypes.values())),
        **_memory(files.stored_parameters),
        "engines": ["dspark_jax", *([] if eagle3 else _ENGINES[files.format])],  # no server is known to read these
        "odd": _odd(config, files, expected),
    }


def _heads(config: DrafterConfig) -> dict[str, Any]:
    return {
        "anchor_layout": config.anchor_layout,
        "mask_token_id": config.mask_token_id,
        "sequential_head": config.sequential_head,
        "markov_rank": config.markov_rank if config.sequential_head != "none" else 0,
        "confidence_head": config.confidence_head,
        "confidence_reads_markov": config.confidence_head and config.confidence_reads_markov,
        "draft_vocab_size": config.vocab_out,
    }


def _odd(config: DrafterConfig | Eagle3Config, files: DrafterFiles, expected: int) -> list[str]:
    odd = []
    if files.stored_parameters != expected:
        odd.append(f"{files.stored_parameters:,} parameters are stored, its config has {expected:,}")
    if not config.target_layers:
        odd.append("the number of the target's layers is not recorded: tapped layers are checked when it is loaded")
    if not config.target_fingerprint:
        odd.append("the target's fingerprint is not recorded: another target of the same sizes can't be told apart")
    if not config.chat_template_hash:
        odd.append("the chat template that it was trained with is not recorded")
    if len(set(files.dtypes.values())) > 1:
        odd.append(f"mixed dtypes: {', '.join(sorted(set(files.dtypes.values())))}")
    if list(config.tapped_layers) != sorted(set(config.tapped_layers)):
        odd.append(f"tapped layers {list(config.tapped_layers)} are not in ascending order")
    return odd


def _describe_unknown(folder: Path, values: Mapping[str, Any], error: CheckpointError) -> dict[str, Any]:
    stored = find_tensors(folder)
    return {
        "kind": "drafter" if drafter_formats.is_drafter(values) else "unknown",
        "format": "huggingface",
        "name": folder.name,
        "architectures": values.get("architectures"),
        "model_type": values.get("model_type"),
        "dtypes": sorted({tensor.dtype for tensor in stored.values()}),
        **_memory(sum(math.prod(tensor.shape) for tensor in stored.values())),
        "engines": [],
        "odd": [f"this library can't read it: {error}"],
    }


def _sizes(config: DecoderConfig) -> dict[str, int]:
    return {
        "layers": config.num_layers,
        "width": config.width,
        "mlp_width": config.mlp_width,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "positions": config.max_positions,
    }


def _memory(parameters: int) -> dict[str, int]:
    return {"parameters": parameters, "bytes_in_bfloat16": 2 * parameters}
