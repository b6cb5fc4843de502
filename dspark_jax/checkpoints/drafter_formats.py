"""Finds out what the name of a drafter means, reads it, and writes it in another format.

| format | files | holds |
|---|---|---|
| orbax | `drafter.json`, Orbax `checkpoints/` | everything |
| deepspec | config.json of `Qwen3DSparkModel` or Gemma 4's | every head, the whole vocabulary, anchor_predicts |
| zlab | config.json of `DFlashDraftModel`, safetensors | no head, the whole vocabulary, anchor_only |
| speculators | config.json with `speculators_model_type`, safetensors | everything but rnn with anchor_only |

All but orbax hold Qwen3 layers only, deepspec Gemma 4's too. EAGLE-3 drafters live in deepspec and orbax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.checkpoints import (
    deepspec,
    drafter_files,
    huggingface,
    orbax_drafter,
    speculators,
    zlab,
)
from dspark_jax.checkpoints.drafter_files import DrafterFiles
from dspark_jax.checkpoints.load import is_hub_id
from dspark_jax.checkpoints.safetensors_files import read_json
from dspark_jax.checkpoints.target_files import CheckpointError, TargetFiles
from dspark_jax.config import ConfigError, Eagle3Config

# Published drafters that are known and not supported.
_UNSUPPORTED = {
    "DFlash2DraftModel": "DFlash 2, with convolutions and a candidate selector",
}

FORMATS = (orbax_drafter.FORMAT, deepspec.FORMAT, zlab.FORMAT, speculators.FORMAT)


def read_drafter_files(name_or_path: str | Path) -> DrafterFiles:
    """Reads the drafter that `name_or_path` names: a folder in one of `FORMATS`, or a Hugging Face hub id of one.

    Raises:
      CheckpointError: it names nothing that exists, or what it names can't be read.
    """
    text = str(name_or_path)
    folder = Path(text).expanduser()
    if not text or not folder.is_dir():
        if not is_hub_id(name_or_path):
            raise CheckpointError(f"drafter {text!r}: there is no such folder; name a folder or a hub id org/name")
        try:
            fetched = huggingface.download(text)
        except CheckpointError as error:
            raise CheckpointError(f"drafter {text!r}: there is no such folder, and as a hub id: {error}") from error
        return dataclasses.replace(read_drafter_files(fetched), name=text)
    kind = format_of(folder)
    if kind == orbax_drafter.FORMAT:
        return orbax_drafter.read_folder(folder)
    if kind == speculators.FORMAT:
        return speculators.read_folder(folder)
    return zlab.read_folder(folder) if kind == zlab.FORMAT else deepspec.read_folder(folder)


def format_of(folder: Path) -> str:
    """Returns the format of a drafter's folder.

    Raises:
      CheckpointError: it is no drafter's, or one that isn't supported.
    """
    if (folder / orbax_drafter.CONFIG_FILE).exists():
        return orbax_drafter.FORMAT
    if not (folder / "config.json").exists():
        found = ", ".join(sorted(file.name for file in folder.iterdir())[:20]) or "nothing"
        raise CheckpointError(
            f"{folder} is no drafter folder: it has neither {orbax_drafter.CONFIG_FILE} (written by train.distill) nor"
            f" config.json (published drafters); it has {found}"
        )
    values = read_json(folder / "config.json")
    kind = format_of_values(values)
    if kind is None:
        architectures = values.get("architectures") or []
        known = "; ".join(_UNSUPPORTED[name] for name in architectures if name in _UNSUPPORTED)
        raise CheckpointError(
            f"{folder / 'config.json'}: architectures = {architectures!r} is no drafter that can be read"
            f"{f' ({known})' if known else ''}; supported are"
            f" {', '.join((*deepspec.ARCHITECTURES, *deepspec.EAGLE3_ARCHITECTURES))} (DeepSpec), {zlab.ARCHITECTURE}"
            " (z-lab), and dspark and dflash of speculators"
        )
    return kind


def format_of_values(values: Mapping[str, Any]) -> str | None:
    """Returns the published format that a config.json is of, None for a model that is no drafter of them."""
    if "speculators_model_type" in values:
        return speculators.FORMAT
    architectures = values.get("architectures")
    if architectures == [zlab.ARCHITECTURE] or (architectures is None and "dflash_config" in values):
        return zlab.FORMAT
    known = [[name] for name in (*deepspec.ARCHITECTURES, *deepspec.EAGLE3_ARCHITECTURES)]
    return deepspec.FORMAT if architectures in known else None


def is_drafter(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is a drafter's, readable or not."""
    return format_of_values(values) is not None or any(n in _UNSUPPORTED for n in values.get("architectures") or [])


def write_drafter(
    folder: str | Path, format_name: str, files: DrafterFiles, target: TargetFiles | None = None, force: bool = False
) -> None:
    """Writes a drafter in a format that loses nothing of it, bit for bit.

    Args:
      folder: must not exist.
      format_name: one of `FORMATS`.
      files: the drafter.
      target: its target; deepspec needs it, and speculators for a reduced vocabulary. The drafter is checked against
        it, and its number of layers is taken from it if the files don't say it.
      force: accept a target or chat template that the drafter was not trained for.

    Raises:
      CheckpointError: the format can't hold the drafter, the target is missing or another, or the folder exists.
      ConfigError: an unknown format.
    """
    if format_name not in FORMATS:
        raise ConfigError(f"format = {format_name!r}: use one of {', '.join(FORMATS)}")
    if isinstance(files.config, Eagle3Config) and format_name not in (orbax_drafter.FORMAT, deepspec.FORMAT):
        raise CheckpointError(f"{files.name} is an EAGLE-3 drafter: {format_name} can't hold it; use orbax or deepspec")
    if target is not None:
        drafter_files.check_target(files.config, target, force)
        if not files.config.target_layers:
            known = dataclasses.replace(files.config, target_layers=target.config.num_layers)
            files = dataclasses.replace(files, config=known)
    path = Path(folder).expanduser()
    if format_name == orbax_drafter.FORMAT:
        orbax_drafter.write_folder(path, files)
    elif format_name == deepspec.FORMAT:
        deepspec.write_folder(path, files, target)
    elif format_name == zlab.FORMAT:
        zlab.write_folder(path, files, target)
    else:
        speculators.write_folder(path, files, target)
