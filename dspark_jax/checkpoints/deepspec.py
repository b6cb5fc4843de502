"""DeepSpec drafters (`dspark_*`, `dflash_*`): Qwen3 or Gemma 4 layers, copies of the target's embedding and head.

The classes `Qwen3DSparkModel` and `Gemma4DSparkModel` predict from the anchor's slot on, with or without a sequential
head (`markov_rank` 0 is DFlash's parallel drafter, trained in DSpark's layout). The whole vocabulary is drafted.
`Qwen3Eagle3Model` and `Gemma4Eagle3Model` are EAGLE-3's, with tensors of their own (`deepspec_eagle3`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.checkpoints import drafter_folder
from dspark_jax.checkpoints.drafter_files import DrafterFiles
from dspark_jax.checkpoints.drafter_folder import required
from dspark_jax.checkpoints.safetensors_files import read_json
from dspark_jax.checkpoints.target_files import CheckpointError, TargetFiles
from dspark_jax.config import DrafterConfig, Eagle3Config

FORMAT = "deepspec"
ARCHITECTURES = {"Qwen3DSparkModel": "qwen3", "Gemma4DSparkModel": "gemma4_text"}  # and their model_type
EAGLE3_ARCHITECTURES = {"Qwen3Eagle3Model": "qwen3", "Gemma4Eagle3Model": "gemma4_text"}


def read_config(values: Mapping[str, Any]) -> DrafterConfig:
    """Returns the drafter's config from the fields of a DeepSpec config.json.

    Raises:
      CheckpointError: another architecture, or a field that is missing, wrong or not supported.
    """
    architectures = values.get("architectures")
    if architectures not in [[name] for name in ARCHITECTURES]:
        raise CheckpointError(f"architectures = {architectures!r}: supported are {', '.join(ARCHITECTURES)}")
    rank = required(values, "markov_rank", "integer")
    confidence = required(values, "enable_confidence_head", "bool")
    return DrafterConfig(
        decoder=drafter_folder.body_from_values(values, ARCHITECTURES[architectures[0]]),
        block_size=required(values, "block_size", "integer"),
        tapped_layers=tuple(required(values, "target_layer_ids", "integers")),
        mask_token_id=required(values, "mask_token_id", "integer"),
        anchor_layout="anchor_predicts",
        sequential_head=values.get("markov_head_type", "vanilla") if rank else "none",
        markov_rank=rank,
        confidence_head=confidence,
        confidence_reads_markov=confidence and required(values, "confidence_head_with_markov", "bool"),
        **_target_of(values),
    )


def read_eagle3_config(values: Mapping[str, Any]) -> Eagle3Config:
    """Returns an EAGLE-3 drafter's config from the fields of a DeepSpec config.json.

    Raises:
      CheckpointError: a field is missing, wrong or not supported, or the drafter has more than one layer.
    """
    steps = required(values, "ttt_length", "integer")
    if int(values.get("num_hidden_layers", 1)) != 1:
        raise CheckpointError(f"num_hidden_layers = {values['num_hidden_layers']}: EAGLE-3 drafters have one layer")
    kind = EAGLE3_ARCHITECTURES[values["architectures"][0]]
    # Its one layer sees everything, whatever the layer types that the config has from the target's.
    return Eagle3Config(
        decoder=drafter_folder.body_from_values({**values, "layer_types": ["full_attention"]}, kind),
        block_size=steps,
        tapped_layers=tuple(required(values, "target_layer_ids", "integers")),
        step_decay=float(values.get("step_loss_decay", 0.8)),
        **_target_of(values),
    )


def _target_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the target, by DeepSpec's fields and by ours."""
    known = drafter_folder.travelling(values)
    if not known.get("target_name") and values.get("target_model_name_or_path"):
        known["target_name"] = str(values["target_model_name_or_path"])
    return {**known, "target_layers": required(values, "num_target_layers", "integer")}


def write_config(config: DrafterConfig) -> dict[str, Any]:
    """The inverse of `read_config`.

    Raises:
      CheckpointError: the format has no place for the drafter's vocabulary, layout or target.
    """
    if config.draft_vocab_size:
        raise CheckpointError(
            f"draft_vocab_size = {config.draft_vocab_size}: DeepSpec's format has no reduced vocabulary; use"
            " --format=speculators"
        )
    if config.anchor_layout != "anchor_predicts":
        raise CheckpointError(
            f"anchor_layout = {config.anchor_layout!r}: DeepSpec's drafters predict from the anchor's slot on; use"
            " --format=zlab or speculators"
        )
    if not config.target_layers:
        raise CheckpointError("the number of the target's layers is unknown: name the target (--target)")
    head = config.sequential_head
    architecture = "Gemma4DSparkModel" if config.decoder.family == "gemma4" else "Qwen3DSparkModel"
    return {
        **drafter_folder.body_to_values(config.decoder, ("qwen3", "gemma4")),
        "architectures": [architecture],
        "num_target_layers": config.target_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.tapped_layers),
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head and config.confidence_reads_markov,
        "markov_rank": config.markov_rank if head != "none" else 0,
        "markov_head_type": head if head != "none" else "vanilla",
        drafter_folder.OURS: drafter_folder.own_fields_of(config),
    }


def write_eagle3_config(config: Eagle3Config) -> dict[str, Any]:
    """The inverse of `read_eagle3_config`.

    Raises:
      CheckpointError: the format has no place for the drafter's layer or target.
    """
    if not config.target_layers:
        raise CheckpointError("the number of the target's layers is unknown: name the target (--target)")
    return {
        **drafter_folder.body_to_values(config.decoder, ("qwen3", "gemma4")),
        "architectures": ["Gemma4Eagle3Model" if config.decoder.family == "gemma4" else "Qwen3Eagle3Model"],
        "num_target_layers": config.target_layers,
        "ttt_length": config.block_size,
        "step_loss_decay": config.step_decay,
        "target_layer_ids": list(config.tapped_layers),
        drafter_folder.OURS: drafter_folder.own_fields_of(config),
    }


def read_folder(path: str | Path) -> DrafterFiles:
    """Reads a DeepSpec folder; see `drafter_folder.read_folder`."""
    values = read_json(Path(path) / "config.json")
    if values.get("architectures") in [[name] for name in EAGLE3_ARCHITECTURES]:
        return drafter_folder.read_folder(path, FORMAT, read_eagle3_config)
    return drafter_folder.read_folder(path, FORMAT, read_config)


def write_folder(folder: Path, files: DrafterFiles, target: TargetFiles | None) -> None:
    """Writes a DeepSpec folder, with copies of the target's embedding and head; see `drafter_folder.write_folder`."""
    eagle3 = isinstance(files.config, Eagle3Config)
    values = write_eagle3_config(files.config) if eagle3 else write_config(files.config)
    reader = read_eagle3_config if eagle3 else read_config
    drafter_folder.write_folder(folder, files, values, reader, drafter_folder.cast_copies(files, target))
