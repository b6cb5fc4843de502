"""z-lab's DFlash drafters: Qwen3 layers without embedding or head, no sequential head, no confidence.

Their block counts the anchor, whose slot predicts nothing: a block of 16 drafts 15 tokens. `block_size`,
`target_layer_ids` and `mask_token_id` are fields of `dflash_config`, `block_size` in older files of the config itself.
Sliding layers are causal inside the block unless `is_causal` is false; only the latter kind is supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.checkpoints import drafter_folder
from dspark_jax.checkpoints.drafter_files import DrafterFiles
from dspark_jax.checkpoints.drafter_folder import required
from dspark_jax.checkpoints.target_files import CheckpointError, TargetFiles
from dspark_jax.config import DrafterConfig

FORMAT = "zlab"
ARCHITECTURE = "DFlashDraftModel"
# Fields that change the output, and the values with which they don't.
_NEUTRAL = {
    "input_embedding_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None, 0.0),
    "is_causal": (None, False),
}


def read_config(values: Mapping[str, Any]) -> DrafterConfig:
    """Returns the drafter's config from the fields of a z-lab config.json.

    Raises:
      CheckpointError: another architecture, or a field that is missing, wrong or not supported.
    """
    architectures = values.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise CheckpointError(f"architectures = {architectures!r}: of z-lab's drafters {ARCHITECTURE} is supported")
    inner = values.get("dflash_config")
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"dflash_config = {inner!r}: tapped layers and mask token are missing; fetch it again")
    both = {**values, **inner}
    for name, neutral in _NEUTRAL.items():
        if both.get(name) not in neutral:
            raise CheckpointError(f"{name} = {both[name]!r} is not supported; use a drafter without it")
    slots = required(both, "block_size", "integer")
    if slots < 2:
        raise CheckpointError(f"block_size = {slots}: it counts the anchor, use 2 or more")
    known = drafter_folder.travelling(values)
    known["target_layers"] = required(values, "num_target_layers", "integer")
    return DrafterConfig(
        decoder=drafter_folder.body_from_values(values, windows=both.get("is_causal") is False),
        block_size=slots - 1,
        tapped_layers=tuple(required(inner, "target_layer_ids", "integers", "dflash_config")),
        mask_token_id=required(inner, "mask_token_id", "integer", "dflash_config"),
        anchor_layout="anchor_only",
        sequential_head="none",
        markov_rank=0,
        confidence_head=False,
        confidence_reads_markov=False,
        **known,
    )


def write_config(config: DrafterConfig) -> dict[str, Any]:
    """The inverse of `read_config`.

    Raises:
      CheckpointError: the format has no place for one of the drafter's heads, its vocabulary, layout or target.
    """
    for name, fits in (
        ("sequential_head", config.sequential_head == "none"),
        ("confidence_head", not config.confidence_head),
        ("draft_vocab_size", not config.draft_vocab_size),
        ("anchor_layout", config.anchor_layout == "anchor_only"),
    ):
        if not fits:
            raise CheckpointError(
                f"{name} = {getattr(config, name)!r}: z-lab's format holds drafters without heads, of the whole"
                " vocabulary, whose anchor predicts nothing; use --format=speculators"
            )
    if not config.target_layers:
        raise CheckpointError("the number of the target's layers is unknown: name the target (--target)")
    return {
        **drafter_folder.body_to_values(config.decoder),
        "architectures": [ARCHITECTURE],
        "num_target_layers": config.target_layers,
        "block_size": config.block_size + 1,
        "dflash_config": {"target_layer_ids": list(config.tapped_layers), "mask_token_id": config.mask_token_id},
        "is_causal": False,
        "tie_word_embeddings": config.decoder.tie_embeddings,
        drafter_folder.OURS: drafter_folder.own_fields_of(config),
    }


def read_folder(path: str | Path) -> DrafterFiles:
    """Reads a z-lab folder; see `drafter_folder.read_folder`."""
    return drafter_folder.read_folder(path, FORMAT, read_config)


def write_folder(folder: Path, files: DrafterFiles, target: TargetFiles | None) -> None:
    """Writes a z-lab folder, which needs nothing of the target; see `drafter_folder.write_folder`."""
    del target
    drafter_folder.write_folder(folder, files, write_config(files.config), read_config, {})
