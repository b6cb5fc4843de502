"""Load a drafter for a target, and check that it belongs to it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

from dspark_jax.checkpoints import orbax_drafter
from dspark_jax.checkpoints.target_files import CheckpointError
from dspark_jax.config import ConfigError, DrafterConfig
from dspark_jax.drafters.dspark import DSparkDrafter, DSparkModel, shared_weights
from dspark_jax.drafters.prompt_lookup import PromptLookupDrafter
from dspark_jax.generation import LoadedDrafter
from dspark_jax.loading import Target


def load_drafter(
    path: str | Path,
    target: Target,
    block_size: int = 0,
    force: bool = False,
    draft_sampling: str = "sample",
    candidates: int = 0,
) -> LoadedDrafter:
    """Loads a trained DSpark drafter (the output folder of `train.distill`).

    Args:
      path: the folder.
      target: the target that it will draft for.
      block_size: K at decode, at most the trained one; 0 takes the trained one.
      force: load it even if it was trained for another target or chat template of the same shape.
      draft_sampling: at a temperature above 0, "sample" draws the draft tokens, "greedy" takes the likeliest ones.
      candidates: how many of a position's tokens the sequential head corrects; 0 = all (`DSparkDrafter`).

    Raises:
      CheckpointError: it can't be read, or it belongs to another target.
      ConfigError: an option that can't work.
    """
    folder = Path(path)
    config, vocab = orbax_drafter.read_description(folder)
    check_target(config, target, force)
    size = check_block_size(config, block_size)
    model = DSparkModel(config, target.layout, target.dtype)
    drafter = DSparkDrafter(model, size, draft_sampling, candidates)
    params = orbax_drafter.read_params(folder, target.dtype)
    shared = shared_weights(target.params, None if vocab is None else jnp.asarray(vocab))
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
        raise CheckpointError(f"{folder}: the weights don't fit {orbax_drafter.CONFIG_FILE}: {wrong}")
    return LoadedDrafter(drafter, {"model": params, "shared": shared}, "dspark")


def check_block_size(config: DrafterConfig, block_size: int) -> int:
    """Returns the block size to decode with, at most the trained one."""
    if not 0 <= block_size <= config.block_size:
        raise ConfigError(
            f"block_size = {block_size}: this drafter was trained for 1..{config.block_size} draft tokens"
        )
    return block_size or config.block_size


def check_target(config: DrafterConfig, target: Target, force: bool) -> None:
    """Refuses a drafter of another target or chat template.

    Raises:
      CheckpointError: it can't work, or (unless forced) was trained for something else.
    """
    if (config.decoder.vocab_size, config.decoder.width) != (target.config.vocab_size, target.config.width):
        raise CheckpointError(
            f"the drafter belongs to a target of vocabulary {config.decoder.vocab_size} and width"
            f" {config.decoder.width}; {target.name} has {target.config.vocab_size} and {target.config.width}"
        )
    deepest = max(config.tapped_layers)
    if deepest >= target.config.num_layers - 1:
        raise CheckpointError(f"the drafter taps layer {deepest}; {target.name} has {target.config.num_layers} layers")
    if force:
        return
    if config.target_fingerprint and config.target_fingerprint != target.config.fingerprint():
        raise CheckpointError(
            f"the drafter was trained for {config.target_name or 'another target'} (fingerprint"
            f" {config.target_fingerprint}), not for {target.name} ({target.config.fingerprint()}); pass force=True to"
            " use it all the same"
        )
    template = target.tokenizer.chat_template_hash if target.tokenizer else ""
    if config.chat_template_hash and template and config.chat_template_hash != template:
        raise CheckpointError(
            f"the drafter was trained with chat template {config.chat_template_hash}, the target's is {template}: it"
            " would draft badly; pass force=True to use it all the same"
        )


def prompt_lookup(block_size: int = 3, max_ngram: int = 4, min_ngram: int = 1) -> LoadedDrafter:
    """Returns the training-free baseline `drafters.prompt_lookup`."""
    if block_size < 1:
        raise ConfigError(f"block_size = {block_size}: use 1 or more")
    if not 1 <= min_ngram <= max_ngram:
        raise ConfigError(f"min_ngram = {min_ngram}, max_ngram = {max_ngram}: use 1 <= min_ngram <= max_ngram")
    return LoadedDrafter(PromptLookupDrafter(block_size, max_ngram, min_ngram), (), "prompt lookup")
