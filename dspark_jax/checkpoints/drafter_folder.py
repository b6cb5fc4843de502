"""What the published formats share: config.json and safetensors, Qwen3 layers, fields of ours beside theirs.

What a format has no field for (chat template, fingerprint of the target) travels as the object `dspark_jax` in its
config.json, which other programs ignore.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from dspark_jax.checkpoints.drafter_files import (
    EMBED,
    HEAD,
    DrafterFiles,
    check_drafter_tensors,
    expected_drafter_tensors,
    params_from_tensors,
)
from dspark_jax.checkpoints.huggingface_config import decoder_config_from_hf
from dspark_jax.checkpoints.safetensors_files import StoredTensor, check_types, find_tensors, read_json
from dspark_jax.checkpoints.target_files import CheckpointError, LazyTensors, TargetFiles
from dspark_jax.config import ConfigError, DecoderConfig, DrafterConfig, Eagle3Config

OURS = "dspark_jax"
_OWN_FIELDS = ("target_layers", "target_fingerprint", "target_name", "chat_template_hash")


def read_folder(
    path: str | Path,
    format_name: str,
    read_config: Callable[[Mapping[str, Any]], DrafterConfig | Eagle3Config],
    indices: tuple[str, ...] = (),
    ignored: tuple[str, ...] = (),
    read_vocab: Callable[[Any, Mapping[str, StoredTensor]], np.ndarray | None] = lambda config, stored: None,
) -> DrafterFiles:
    """Reads a drafter's folder; weights are read when they are asked for.

    Args:
      path: the folder.
      format_name: for `DrafterFiles.format`.
      read_config: the format's reading of config.json.
      indices: names of the format's tensors that are no weights.
      ignored: names of tensors that nobody reads.
      read_vocab: the format's reading of `indices`.

    Raises:
      CheckpointError: a file is missing or damaged, a feature is not supported, or tensors don't fit the config.
    """
    folder = Path(path)
    file = folder / "config.json"
    try:
        config = read_config(read_json(file))
    except (CheckpointError, ConfigError) as error:
        where = "" if str(file) in str(error) else f"{file}: "
        raise CheckpointError(f"{where}{error}") from error
    stored = find_tensors(folder)
    check_types((tensor for name, tensor in stored.items() if name not in ignored), indices)
    found = {name: tensor.shape for name, tensor in stored.items() if name not in indices + ignored}
    try:
        vocab = read_vocab(config, stored)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    check_drafter_tensors(found, config, str(folder))
    expected = expected_drafter_tensors(config)
    tensors = LazyTensors(expected, lambda name: stored[name].read())
    return DrafterFiles(
        format=format_name,
        config=config,
        vocab=vocab,
        tensors=tensors,
        params=functools.partial(params_from_tensors, config, tensors),
        dtypes={name: stored[name].dtype for name in expected},
        stored_parameters=sum(math.prod(found[name]) for name in expected),
        frozen={name: stored[name] for name in (EMBED, HEAD) if name in found},
        name=folder.resolve().name,
    )


def write_folder(
    folder: Path,
    files: DrafterFiles,
    values: Mapping[str, Any],
    read_config: Callable[[Mapping[str, Any]], DrafterConfig | Eagle3Config],
    extra: Mapping[str, np.ndarray],
) -> None:
    """Writes a drafter's folder, whole or not at all.

    Args:
      folder: must not exist.
      files: the drafter.
      values: its config.json in the format.
      read_config: the format's reader, which must find in `values` all that the drafter is.
      extra: tensors beside the drafter's own.

    Raises:
      CheckpointError: the folder exists, or the format can't hold the drafter.
    """
    refuse_existing(folder)
    _refuse_loss(files, read_config(values))
    tensors = {name: np.ascontiguousarray(files.tensors[name]) for name in files.tensors}
    tensors |= {name: np.ascontiguousarray(value) for name, value in extra.items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        part = Path(scratch) / folder.name
        part.mkdir()
        safetensors.numpy.save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        shutil.move(part, folder)


def refuse_existing(folder: Path) -> None:
    """Refuses to write over anything.

    Raises:
      CheckpointError: the path exists.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already: name a new folder, nothing is overwritten")


def body_from_values(values: Mapping[str, Any], kind: str = "qwen3", windows: bool = False) -> DecoderConfig:
    """Reads the draft layers from the fields of a Hugging Face config.

    Args:
      values: the fields.
      kind: the layers' model_type.
      windows: layers may slide: a token sees the sliding_window - 1 positions before it, and all of its block.

    Raises:
      CheckpointError: a body or a feature that is not supported.
    """
    if values.get("model_type", kind) != kind:
        raise CheckpointError(f"model_type = {values['model_type']!r}: expected {kind!r}; use such a drafter")
    sliding = [i for i, layer in enumerate(values.get("layer_types") or ()) if layer != "full_attention"]
    if sliding and not windows:
        raise CheckpointError(
            f"draft layers {', '.join(map(str, sliding))} were trained with a sliding window"
            f" (sliding_window = {values.get('sliding_window')!r}) of a kind that is not supported: without it they"
            " would draft badly; use a drafter whose layers see the whole context"
        )
    body = decoder_config_from_hf({**values, "model_type": kind, "architectures": []})
    tied = own_fields(values).get("tie_embeddings")
    return body if tied is None else dataclasses.replace(body, tie_embeddings=bool(tied))


def body_to_values(body: DecoderConfig, kinds: tuple[str, ...] = ("qwen3",)) -> dict[str, Any]:
    """The inverse of `body_from_values`, with the base of the rotary frequencies in both dialects.

    Raises:
      CheckpointError: the layers are of a family that the format doesn't know (`kinds`).
    """
    if body.family not in kinds:
        raise CheckpointError(
            f"decoder family = {body.family!r}: the format holds layers of {' and '.join(kinds)} only; keep the drafter"
            " in the format that it has"
        )
    gemma = _gemma4_values(body) if body.family == "gemma4" else {}
    return {
        "model_type": "qwen3",
        "vocab_size": body.vocab_size,
        "hidden_size": body.width,
        "intermediate_size": body.mlp_width,
        "num_hidden_layers": body.num_layers,
        "num_attention_heads": body.num_heads,
        "num_key_value_heads": body.num_kv_heads,
        "head_dim": body.head_dim,
        "rms_norm_eps": body.norm_eps,
        "max_position_embeddings": body.max_positions,
        "rope_theta": body.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": body.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_types": [
            "sliding_attention" if i in body.sliding_layers else "full_attention" for i in range(body.num_layers)
        ],
        "max_window_layers": body.num_layers,
        "sliding_window": body.sliding_window or None,
        "use_sliding_window": bool(body.sliding_layers),
        "tie_word_embeddings": False,
        "use_cache": True,
        **gemma,
    }


def _gemma4_values(body: DecoderConfig) -> dict[str, Any]:
    """What a Gemma 4 config has instead; its plain head fields are those of sliding layers, of which there are none."""
    full = {
        "rope_type": "proportional" if body.rope_share < 1 else "default",
        "rope_theta": body.rope_theta,
        "partial_rotary_factor": body.rope_share,
    }
    return {
        "model_type": "gemma4_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": body.head_dim,
        "num_global_key_value_heads": body.num_kv_heads,
        "attention_k_eq_v": body.keys_as_values,
        "final_logit_softcapping": body.logit_softcap or None,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "rope_theta": None,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def own_fields(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the object `dspark_jax` of a config.json, empty in files that others wrote."""
    ours = values.get(OURS) or {}
    if not isinstance(ours, Mapping):
        raise CheckpointError(f"{OURS} = {ours!r}: expected an object; remove it")
    return ours


def own_fields_of(config: DrafterConfig | Eagle3Config) -> dict[str, Any]:
    """The inverse of `own_fields`: what the formats have no field for."""
    fields = {name: getattr(config, name) for name in _OWN_FIELDS if getattr(config, name)}
    return {**fields, "tie_embeddings": config.decoder.tie_embeddings}


def travelling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is known of the target, as arguments of `DrafterConfig` or `Eagle3Config`."""
    ours = own_fields(values)
    return {name: ours[name] for name in _OWN_FIELDS if name in ours}


def required(values: Mapping[str, Any], name: str, kind: str, where: str = "config.json") -> Any:
    """Returns a field that can't be guessed: `kind` is "integer", "integers" or "bool".

    Raises:
      CheckpointError: it is missing, null or of another type.
    """
    value = values.get(name)
    if value is None:
        raise CheckpointError(f"{where} has no {name!r}: it can't be guessed, add it from the drafter's source")
    integer = lambda item: isinstance(item, int) and not isinstance(item, bool)  # noqa: E731
    good = {
        "integer": integer,
        "integers": lambda items: isinstance(items, list) and bool(items) and all(map(integer, items)),
        "bool": lambda item: isinstance(item, bool),
    }[kind]
    if not good(value):
        raise CheckpointError(f"{where}: {name} = {value!r}, expected {kind}; correct it from the drafter's source")
    return value


def cast_copies(files: DrafterFiles, target: TargetFiles | None) -> dict[str, np.ndarray]:
    """Returns the target's embedding and head (rows of the draft vocabulary), in the drafter's dtype.

    Raises:
      CheckpointError: no target is given.
    """
    if target is None:
        raise CheckpointError("this format carries the target's embedding and head: name the target (--target)")
    dtype = files.tensors["fc.weight"].dtype
    embed = np.asarray(target.tensors["model.embed_tokens.weight"])
    head = embed if target.config.tie_embeddings else np.asarray(target.tensors["lm_head.weight"])
    return {EMBED: embed.astype(dtype), HEAD: (head if files.vocab is None else head[files.vocab]).astype(dtype)}


def comparable(config: DrafterConfig | Eagle3Config) -> DrafterConfig | Eagle3Config:
    """Returns the config with fields that mean nothing for it set to one value."""
    if isinstance(config, Eagle3Config):
        return config
    if config.sequential_head == "none":
        config = dataclasses.replace(config, markov_rank=0)
    return config if config.confidence_head else dataclasses.replace(config, confidence_reads_markov=False)


def _refuse_loss(files: DrafterFiles, found: DrafterConfig | Eagle3Config) -> None:
    wanted, found = comparable(files.config), comparable(found)
    lost = [
        f"{prefix}{field.name} = {getattr(ours, field.name)!r} (would become {getattr(theirs, field.name)!r})"
        for prefix, ours, theirs in (("", wanted, found), ("decoder ", wanted.decoder, found.decoder))
        for field in dataclasses.fields(ours)
        if field.name != "decoder" and getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    if lost:
        raise CheckpointError(
            f"the format can't hold {', '.join(lost)}: keep the drafter in --format={files.format}, or train one"
            " without it"
        )
