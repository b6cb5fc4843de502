"""Our own drafter checkpoints: an Orbax folder of parameters beside a JSON file of everything else.

A drafter folder holds `drafter.json` (the `DrafterConfig`: what must be true of the target), `draft_vocab.npy` if the
vocabulary is reduced, and `checkpoints/` with the training state of the latest steps. Only the parameters are
read here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from dspark_jax.checkpoints.target_files import CheckpointError
from dspark_jax.config import ConfigError, DrafterConfig, drafter_config_from_dict, drafter_config_to_dict
from dspark_jax.records import Params

CONFIG_FILE = "drafter.json"
VOCAB_FILE = "draft_vocab.npy"
CHECKPOINTS = "checkpoints"


def write_description(folder: Path, config: DrafterConfig, vocab: np.ndarray | None) -> None:
    """Writes the config and the draft vocabulary (ascending ids, or None)."""
    folder.mkdir(parents=True, exist_ok=True)
    if vocab is not None:
        np.save(folder / VOCAB_FILE, vocab.astype(np.int32))
    (folder / CONFIG_FILE).write_text(json.dumps(drafter_config_to_dict(config), indent=2) + "\n")


def read_description(folder: Path) -> tuple[DrafterConfig, np.ndarray | None]:
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
    if not config.draft_vocab_size:
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
    """Reads the parameters of the latest checkpoint.

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
            # A target tree on this device: without one Orbax wants the device that the checkpoint was made on.
            saved = ocp.StandardCheckpointHandler().metadata(
                epath.Path(folder / CHECKPOINTS / str(step) / "params").resolve()
            )
            here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), saved.tree)
            params = checkpoints.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(shapes)))[
                "params"
            ]
        except (ValueError, OSError, KeyError, ConfigError) as error:
            raise CheckpointError(f"{folder / CHECKPOINTS}: step {step} can't be read: {error}") from error
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)
