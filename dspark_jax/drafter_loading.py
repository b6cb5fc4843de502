"""Load a drafter for a target, and check that it belongs to it."""

from __future__ import annotations

import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints.drafter_files import EMBED, DrafterFiles, check_target
from dspark_jax.checkpoints.drafter_formats import read_drafter_files
from dspark_jax.checkpoints.target_files import CheckpointError
from dspark_jax.config import ConfigError, DrafterConfig, Eagle3Config
from dspark_jax.drafters.dspark import DSparkDrafter, DSparkModel, shared_weights
from dspark_jax.drafters.eagle3 import Eagle3Drafter, Eagle3Model
from dspark_jax.drafters.prompt_lookup import PromptLookupDrafter
from dspark_jax.generation import LoadedDrafter
from dspark_jax.loading import Target

_COMPARED_ROWS = 16
_ALIKE = 0.2  # relative; a target quantised to 4 bits is off by about half of this


def load_drafter(
    name_or_path: str | Path,
    target: Target,
    block_size: int = 0,
    force: bool = False,
    draft_sampling: str = "sample",
    candidates: int = 0,
) -> LoadedDrafter:
    """Loads a trained drafter.

    Args:
      name_or_path: the output folder of `train.distill`, or a folder or Hugging Face hub id of a drafter published by
        DeepSpec, z-lab (DFlash) or in the format of vLLM's speculators (`checkpoints.drafter_formats`).
      target: the target that it will draft for.
      block_size: K at decode, at most the trained one; 0 takes the trained one.
      force: load it even if it was trained for another target or chat template of the same shape.
      draft_sampling: at a temperature above 0, "sample" draws the draft tokens, "greedy" takes the likeliest ones.
      candidates: how many of a position's tokens the sequential head corrects; 0 = all (`DSparkDrafter`).

    Raises:
      CheckpointError: it can't be read, or it belongs to another target.
      ConfigError: an option that can't work.
    """
    files = read_drafter_files(name_or_path)
    config = files.config
    check_target(config, target, force)
    _check_copies(files, target)
    size = check_block_size(config, block_size)
    if isinstance(config, Eagle3Config):
        if draft_sampling != "sample" or candidates:
            raise ConfigError(
                f"draft_sampling = {draft_sampling!r}, candidates = {candidates}: EAGLE-3 drafters know 'sample' and 0"
            )
        model = Eagle3Model(config, target.layout, target.dtype)
        drafter, name = Eagle3Drafter(model, size), "eagle3"
    else:
        model = DSparkModel(config, target.layout, target.dtype)
        drafter, name = DSparkDrafter(model, size, draft_sampling, candidates), "dspark"
    params = files.params(target.dtype)
    shared = shared_weights(target.params, None if files.vocab is None else jnp.asarray(files.vocab))
    expected = jax.eval_shape(
        lambda: model.init(
            jax.random.key(0),
            shared,
            jnp.zeros((1, 1, len(config.tapped_layers), config.decoder.width), target.dtype),
            method="init_everything",
        )["params"]
    )
    shapes = lambda tree: {jax.tree_util.keystr(k): v.shape for k, v in jax.tree_util.tree_leaves_with_path(tree)}  # noqa: E731
    if shapes(expected) != shapes(params):
        wrong = sorted(set(shapes(expected).items()) ^ set(shapes(params).items()))
        raise CheckpointError(f"{files.name}: the weights don't fit its config: {wrong}")
    return LoadedDrafter(drafter, {"model": params, "shared": shared}, name)


def _check_copies(files: DrafterFiles, target: Target) -> None:
    """Refuses a drafter that was published with another embedding or head; the copies themselves are not kept."""
    embed = target.params["embed"]
    head = target.params.get("head", embed)
    for name, copy in files.frozen.items():
        whole = embed if name == EMBED else head
        ids = np.arange(len(whole)) if name == EMBED or files.vocab is None else files.vocab
        if copy.shape != (len(ids), *whole.shape[1:]):
            raise CheckpointError(
                f"{files.name} holds a copy of its target's {name} of shape {list(copy.shape)}, {target.name} has"
                f" {[len(ids), *whole.shape[1:]]}: it was trained for another target"
            )
        theirs = copy.read_rows(_COMPARED_ROWS).astype(np.float32)
        ours = np.asarray(whole[ids[:_COMPARED_ROWS]], np.float32)
        if np.linalg.norm(theirs - ours) > _ALIKE * np.linalg.norm(ours):
            warnings.warn(
                f"{files.name}: its copy of {name} differs from {target.name}'s, which is used instead: it was trained"
                " for another target, or with a copy that went its own way",
                stacklevel=3,
            )


def check_block_size(config: DrafterConfig | Eagle3Config, block_size: int) -> int:
    """Returns the block size to decode with, at most the trained one."""
    if not 0 <= block_size <= config.block_size:
        raise ConfigError(
            f"block_size = {block_size}: this drafter was trained for 1..{config.block_size} draft tokens"
        )
    return block_size or config.block_size


def prompt_lookup(block_size: int = 3, max_ngram: int = 4, min_ngram: int = 1) -> LoadedDrafter:
    """Returns the training-free baseline `drafters.prompt_lookup`."""
    if block_size < 1:
        raise ConfigError(f"block_size = {block_size}: use 1 or more")
    if not 1 <= min_ngram <= max_ngram:
        raise ConfigError(f"min_ngram = {min_ngram}, max_ngram = {max_ngram}: use 1 <= min_ngram <= max_ngram")
    return LoadedDrafter(PromptLookupDrafter(block_size, max_ngram, min_ngram), (), "prompt lookup")
