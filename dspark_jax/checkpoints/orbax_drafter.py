"""Our own drafter checkpoints: an Orbax folder of parameters beside a JSON file of everything else.

A drafter folder holds `drafter.json` (the `DrafterConfig`: what must be true of the target), `draft_vocab.npy` if the
vocabulary is reduced, and `checkpoints/` with the training state of the latest steps. Only the parameters are
read here. Nothing of the target is kept.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from dspark_jax.checkpoints.drafter_files import (
    DrafterFiles,
    check_drafter_tensors,
    expected_drafter_tensors,
    tensors_from_params,
)
from dspark_jax.checkpoints.drafter_folder import refuse_existing
from dspark_jax.checkpoints.target_files import CheckpointError, LazyTensors
from dspark_jax.config import (
    ConfigError,
    DrafterConfig,
    Eagle3Config,
    drafter_config_from_dict,
    drafter_config_to_dict,
)
from dspark_jax.records import Params

FORMAT = "orbax"
CONFIG_FILE = "drafter.json"
VOCAB_FILE = "draft_vocab.npy"
CHECKPOINTS = "checkpoints"
_WORDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def write_description(folder: Path, config: DrafterConfig | Eagle3Config, vocab: np.ndarray | None) -> None:
    """Writes the config and the draft vocabulary (ascending ids, or None)."""
    folder.mkdir(parents=True, exist_ok=True)
    if vocab is not None:
        np.save(folder / VOCAB_FILE, vocab.astype(np.int32))
    (folder / CONFIG_FILE).write_text(json.dumps(drafter_config_to_dict(config), indent=2) + "\n")


def read_description(folder: Path) -> tuple[DrafterConfig | Eagle3Config, np.ndarray | None]:
    """Reads config and draft vocabulary.

    Raises:
      CheckpointError: the folder isn't a drafter's, or a file of it is damaged.
    """
    path = folder / CONFIG_FILE
    if not path.exists():
        raise CheckpointError(
            f"{folder} is no drafter folder: it has no {CONFIG_FILE}; pass the output of train.distill"
        )
    try:
        config = drafter_config_from_dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if isinstance(config, Eagle3Config) or not config.draft_vocab_size:
        return config, None
    try:
        vocab = np.load(folder / VOCAB_FILE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / VOCAB_FILE} can't be read, but the vocabulary is reduced: {error}") from error
    if len(vocab) != config.draft_vocab_size or np.any(np.diff(vocab) <= 0) or vocab[-1] >= config.decoder.vocab_size:
        raise CheckpointError(f"{folder / VOCAB_FILE}: not {config.draft_vocab_size} ascending ids of the vocabulary")
    return config, vocab


def manager(folder: Path, keep: int = 2) -> ocp.CheckpointManager:
    """Returns the Orbax manager of a drafter folder; saves are atomic, the last `keep` are kept."""
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
    return ocp.CheckpointManager((folder / CHECKPOINTS).resolve(), options=options)


def read_params(folder: Path, dtype: Any) -> Params:
    """Reads the parameters of the latest checkpoint; dtype None keeps each one's own.

    Raises:
      CheckpointError: there is none, or it is damaged.
    """
    shapes = read_shapes(folder)
    with manager(folder) as checkpoints:
        step = checkpoints.latest_step()
        try:
            # A target tree on this device: without one Orbax wants the device that the checkpoint was made on.
            here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), shapes)
            params = checkpoints.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(wanted)))[
                "params"
            ]
        except (ValueError, OSError, KeyError, ConfigError) as error:
            raise CheckpointError(f"{folder / CHECKPOINTS}: step {step} can't be read: {error}") from error
    return params if dtype is None else jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)


def read_shapes(folder: Path) -> Params:
    """Reads shapes and dtypes of the latest checkpoint's parameters, not the parameters.

    Raises:
      CheckpointError: there is none, or it is damaged.
    """
    if not (folder / CHECKPOINTS).is_dir():
        raise CheckpointError(f"{folder} has no {CHECKPOINTS}/: training has not saved yet")
    with manager(folder) as checkpoints:
        step = checkpoints.latest_step()
    if step is None:
        raise CheckpointError(f"{folder / CHECKPOINTS} holds no finished checkpoint: training has not saved yet")
    try:
        saved = ocp.StandardCheckpointHandler().metadata(
            epath.Path(folder / CHECKPOINTS / str(step) / "params").resolve()
        )
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved.tree)
    except (ValueError, OSError, KeyError, ConfigError) as error:
        raise CheckpointError(f"{folder / CHECKPOINTS}: step {step} can't be read: {error}") from error


def read_folder(path: str | Path) -> DrafterFiles:
    """Reads one of our folders; weights are read when they are asked for.

    Raises:
      CheckpointError: a file is missing or damaged, or parameters don't fit the config.
    """
    folder = Path(path)
    config, vocab = read_description(folder)
    kept = jax.tree.leaves(read_shapes(folder))
    expected = expected_drafter_tensors(config)
    dtypes = "+".join(sorted({_WORDS.get(str(leaf.dtype), str(leaf.dtype)) for leaf in kept}))

    @functools.cache
    def tensors() -> dict[str, np.ndarray]:
        try:
            found = tensors_from_params(config, read_params(folder, None))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}: the parameters don't fit {CONFIG_FILE} ({error!r})") from error
        check_drafter_tensors({name: value.shape for name, value in found.items()}, config, str(folder))
        return found

    return DrafterFiles(
        format=FORMAT,
        config=config,
        vocab=vocab,
        tensors=LazyTensors(expected, lambda name: tensors()[name]),
        params=functools.partial(read_params, folder),
        dtypes=dict.fromkeys(expected, dtypes),
        stored_parameters=sum(int(np.prod(leaf.shape)) for leaf in kept),
        frozen={},
        name=folder.resolve().name,
    )


def write_folder(folder: Path, files: DrafterFiles) -> None:
    """Writes a folder of ours, whole or not at all; weights keep their dtypes.

    Raises:
      CheckpointError: the folder exists, or a matrix that is one here has parts of several dtypes there.
    """
    refuse_existing(folder)
    params = files.params(None)
    back = tensors_from_params(files.config, params)
    changed = [name for name, value in back.items() if value.dtype != files.tensors[name].dtype]
    if changed:
        raise CheckpointError(
            f"{', '.join(changed)}: the dtype can't be kept here, neighbouring matrices or 64 bits are joined or cut;"
            " save the drafter in one dtype of at most 32 bits first"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        part = Path(scratch) / folder.name
        write_description(part, files.config, files.vocab)
        with manager(part) as checkpoints:
            checkpoints.save(0, args=ocp.args.Composite(params=ocp.args.StandardSave(params)))
        shutil.move(part, folder)
