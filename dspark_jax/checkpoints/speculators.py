"""Drafters of vLLM's speculators library (format of version 0.9.0): DSpark and DFlash over Qwen3 layers.

What differs from the other formats: the layers' config is an object of its own (`transformer_layer_config`); tapped
layers are numbered one higher (0 is the embedding); `sample_from_anchor` names the anchor layout, and without it
`block_size` counts the anchor; a reduced vocabulary comes as `d2t` (draft token j is target token j + d2t[j]) and `t2d`
(a mask of the target's tokens), with the rows of the head. Other frozen copies are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoints import drafter_folder
from dspark_jax.checkpoints.drafter_files import HEAD, DrafterFiles
from dspark_jax.checkpoints.drafter_folder import required
from dspark_jax.checkpoints.safetensors_files import StoredTensor
from dspark_jax.checkpoints.target_files import CheckpointError, TargetFiles
from dspark_jax.config import DrafterConfig

FORMAT = "speculators"
VERSION = "0.9.0"
_MAPS = ("d2t", "t2d")
# Copies of the target's weights that training tools of this format may leave in a file; nothing reads them.
_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight")


def read_config(values: Mapping[str, Any]) -> DrafterConfig:
    """Returns the drafter's config from the fields of a speculators config.json.

    Raises:
      CheckpointError: another algorithm, or a field that is missing, wrong or not supported.
    """
    kind = values.get("speculators_model_type")
    if kind not in ("dspark", "dflash"):
        raise CheckpointError(f"speculators_model_type = {kind!r}: 'dspark' and 'dflash' are supported")
    body_values = values.get("transformer_layer_config")
    if not isinstance(body_values, Mapping):
        raise CheckpointError(f"transformer_layer_config = {body_values!r}: the layers' sizes are missing")
    body = drafter_folder.body_from_values({**body_values, drafter_folder.OURS: values.get(drafter_folder.OURS)})
    if values.get("target_hidden_size") not in (None, body.width):
        raise CheckpointError(
            f"target_hidden_size = {values['target_hidden_size']} with a drafter of width {body.width} is not supported"
        )
    # Files of "dflash" are older than the field, and had one layout only.
    both = {"sample_from_anchor": False, **values} if kind == "dflash" else values
    from_anchor = required(both, "sample_from_anchor", "bool")
    slots = required(values, "block_size", "integer")
    if not from_anchor and slots < 2:
        raise CheckpointError(f"block_size = {slots} without sample_from_anchor counts the anchor: use 2 or more")
    rank = required(values, "markov_rank", "integer") if kind == "dspark" else 0
    head = required_head(values) if rank else "none"
    if head == "rnn" and not from_anchor:
        raise CheckpointError(
            "markov_head_type = 'rnn' with sample_from_anchor = false is not supported: that library starts the state"
            " one position earlier than decoding does; use a drafter with sample_from_anchor = true"
        )
    confidence = required(values, "enable_confidence_head", "bool") if kind == "dspark" else False
    draft_vocab = required(values, "draft_vocab_size", "integer")
    known = drafter_folder.travelling(values)
    name = _verifier(values).get("name_or_path")
    return DrafterConfig(
        decoder=body,
        block_size=slots if from_anchor else slots - 1,
        tapped_layers=tuple(layer - 1 for layer in required(values, "aux_hidden_state_layer_ids", "integers")),
        mask_token_id=required(values, "mask_token_id", "integer"),
        anchor_layout="anchor_predicts" if from_anchor else "anchor_only",
        sequential_head=head,
        markov_rank=rank,
        confidence_head=confidence,
        confidence_reads_markov=confidence and required(values, "confidence_head_with_markov", "bool"),
        draft_vocab_size=0 if draft_vocab == body.vocab_size else draft_vocab,
        **{**known, **({"target_name": str(name)} if name else {})},
    )


def required_head(values: Mapping[str, Any]) -> str:
    """Returns the kind of the sequential head.

    Raises:
      CheckpointError: it is missing or unknown.
    """
    head = values.get("markov_head_type")
    if head not in ("vanilla", "gated", "rnn"):
        raise CheckpointError(f"markov_head_type = {head!r}: 'vanilla', 'gated' and 'rnn' are known")
    return head


def write_config(config: DrafterConfig, architectures: list[str]) -> dict[str, Any]:
    """The inverse of `read_config`.

    Args:
      config: the drafter's.
      architectures: the target's, in Hugging Face's words; may be empty.
    """
    from_anchor = config.anchor_layout == "anchor_predicts"
    if config.sequential_head == "rnn" and not from_anchor:
        raise CheckpointError(
            "sequential_head = 'rnn' with anchor_layout = 'anchor_only': the speculators library would start the"
            " state one position earlier; use --format=orbax"
        )
    has_heads = config.sequential_head != "none" or config.confidence_head
    kind = "dspark" if has_heads else "dflash"
    heads = {
        "markov_rank": config.markov_rank if config.sequential_head != "none" else 0,
        "markov_head_type": config.sequential_head if config.sequential_head != "none" else "vanilla",
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head and config.confidence_reads_markov,
    }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.block_size,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["DSparkSpeculator" if has_heads else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": architectures, "name_or_path": config.target_name or None},
        },
        "transformer_layer_config": drafter_folder.body_to_values(config.decoder),
        "draft_vocab_size": config.vocab_out,
        "block_size": config.block_slots,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.tapped_layers],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": from_anchor,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        **(heads if has_heads else {}),
        drafter_folder.OURS: drafter_folder.own_fields_of(config),
    }


def read_folder(path: str | Path) -> DrafterFiles:
    """Reads a speculators folder; see `drafter_folder.read_folder`."""
    return drafter_folder.read_folder(path, FORMAT, read_config, _MAPS, _UNUSED, _read_vocab)


def write_folder(folder: Path, files: DrafterFiles, target: TargetFiles | None) -> None:
    """Writes a speculators folder, with the head's rows for a reduced vocabulary; see `drafter_folder.write_folder`."""
    families = {"qwen3": ["Qwen3ForCausalLM"], "llama": ["LlamaForCausalLM"]}
    values = write_config(files.config, families.get(target.config.family, []) if target else [])
    extra: dict[str, np.ndarray] = {}
    if files.vocab is not None:
        size = files.config.decoder.vocab_size
        extra[HEAD] = drafter_folder.cast_copies(files, target)[HEAD]
        extra["d2t"] = files.vocab.astype(np.int64) - np.arange(len(files.vocab))
        extra["t2d"] = np.isin(np.arange(size), files.vocab)
    drafter_folder.write_folder(folder, files, values, read_config, extra)


def _verifier(values: Mapping[str, Any]) -> Mapping[str, Any]:
    verifier = (values.get("speculators_config") or {}).get("verifier") or {}
    return verifier if isinstance(verifier, Mapping) else {}


def _read_vocab(config: DrafterConfig, stored: Mapping[str, StoredTensor]) -> np.ndarray | None:
    """Returns the ascending target ids of the draft vocabulary, None for the whole one."""
    if not config.draft_vocab_size:
        return None
    missing = [name for name in _MAPS if name not in stored]
    if missing:
        raise CheckpointError(
            f"draft_vocab_size = {config.draft_vocab_size} of {config.decoder.vocab_size}, but the file has no"
            f" {' and no '.join(missing)}: it can't be guessed which tokens these are; fetch it again"
        )
    offsets, mask = (stored[name].read() for name in _MAPS)
    shapes = (config.draft_vocab_size,), (config.decoder.vocab_size,)
    if (offsets.shape, mask.shape) != shapes:
        raise CheckpointError(
            f"d2t has shape {list(offsets.shape)} and t2d {list(mask.shape)}, expected {list(shapes[0])} and"
            f" {list(shapes[1])}; fetch the file again"
        )
    ids = np.arange(len(offsets)) + offsets.astype(np.int64)
    if not np.array_equal(ids, np.flatnonzero(mask)):
        raise CheckpointError(
            f"d2t and t2d disagree: d2t names {len(set(ids.tolist()))} tokens from {ids.min()} to {ids.max()}, t2d"
            f" {int(np.count_nonzero(mask))}, and they must be the same in ascending order; fetch the file again"
        )
    return ids.astype(np.int32)
