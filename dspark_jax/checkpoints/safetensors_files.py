"""What a Hugging Face folder holds, from the headers of its files: JSON and safetensors, one file or shards."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from dspark_jax.checkpoints.target_files import CheckpointError

_FLOAT_TYPES = ("F32", "F16", "BF16", "F64")
_INDEX_TYPES = ("I64", "I32", "BOOL", "U8")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not read yet.

    Attributes:
      file: the safetensors file.
      name: its name there.
      shape: its shape.
      dtype: its type in the format's words ("BF16").
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> np.ndarray:
        """Returns the tensor in the dtype of the file.

        Raises:
          CheckpointError: the file is missing or damaged.
        """
        # Opened for each tensor: what is mapped into memory counts as the process's own until the file is closed.
        with open_file(self.file) as tensors:
            return tensors.get_tensor(self.name)

    def read_rows(self, count: int) -> np.ndarray:
        """Returns the first rows only."""
        with open_file(self.file) as tensors:
            return tensors.get_slice(self.name)[:count]


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Finds the tensors of a folder (`model.safetensors`, or an index and its shards) by reading headers only.

    Raises:
      CheckpointError: a file is missing or damaged.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return _read_header(single)
    if not index.is_file():
        found = ", ".join(sorted(file.name for file in folder.iterdir())[:20])
        raise CheckpointError(
            f"{folder} has neither {single.name} nor {index.name} (it has {found}): save the model with"
            " save_pretrained(folder, safe_serialization=True)"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map = {weight_map!r}, expected file names by tensor; fetch it again")
    files = {name: folder / file for name, file in weight_map.items()}
    in_shard = {file: _read_header(file) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in in_shard[file]:
            raise CheckpointError(f"{index} puts {name} into {file.name}, which doesn't hold it; fetch both again")
    return {name: in_shard[file][name] for name, file in files.items()}


def check_types(stored: Iterable[StoredTensor], indices: Collection[str] = ()) -> None:
    """Refuses tensors that are neither plain floats nor, if named in `indices`, integers or masks.

    Raises:
      CheckpointError: a tensor of another type, such as quantised weights.
    """
    for tensor in stored:
        allowed = _INDEX_TYPES if tensor.name in indices else _FLOAT_TYPES
        if tensor.dtype not in allowed:
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} has type {tensor.dtype}, only {', '.join(allowed)} are supported;"
                " use the unquantised weights"
            )


def open_file(file: Path) -> Any:
    """Opens a safetensors file.

    Raises:
      CheckpointError: it is missing, truncated or damaged.
    """
    try:
        return safetensors.safe_open(file, framework="numpy")
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: fetch it again") from error
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file ({error}): fetch it again") from error


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      CheckpointError: the file is missing or isn't one.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} can't be read ({error}): the folder must hold a Hugging Face model") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON ({error}): fetch it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(values).__name__}; fetch it again")
    return values


def _read_header(file: Path) -> dict[str, StoredTensor]:
    with open_file(file) as tensors:
        views = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)
        return {n: StoredTensor(file, n, tuple(view.get_shape()), view.get_dtype()) for n, view in views.items()}
