"""What every reader of a target's weights hands on, and the check that the weights fit the config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from dspark_jax.config import DecoderConfig
from dspark_jax.text import Tokenizer


class CheckpointError(ValueError):
    """Weights that can't be read; the message says what is wrong, the value seen and what to do."""


@dataclasses.dataclass(frozen=True, eq=False)
class TargetFiles:
    """A target as its files hold it.

    Attributes:
      config: Sizes and switches of the decoder.
      tensors: Weights by Hugging Face name (`model.layers.3.self_attn.q_proj.weight`), `[out, in]` for linear
        layers, exactly those of `expected_tensors(config)`; float32 or the file's dtype.
      tokenizer: None if the files hold none.
      name: What the target was loaded from; informative.
    """

    config: DecoderConfig
    tensors: Mapping[str, np.ndarray]
    tokenizer: Tokenizer | None
    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class LazyTensors(Mapping[str, np.ndarray]):
    """Tensors that are read one at a time, so that a model's weights are never held twice.

    Attributes:
      shapes: Shape of every tensor by name.
      read: Reads one tensor.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.shapes:
            raise KeyError(name)
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def number(values: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Returns a number out of a config, `default` if the field is missing or null.

    Raises:
      CheckpointError: it is not a number, or missing without a default.
    """
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CheckpointError(f"{key} = {value!r}: the config must give a number; complete its config.json")
    return value


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns name and shape of every tensor that a target of this config has."""
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.width)}
    for i in range(config.num_layers):
        tensors |= {f"model.layers.{i}.{name}": shape for name, shape in _layer_tensors(config, i).items()}
    tensors["model.norm.weight"] = (config.width,)
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, config.width)
    return tensors


def _layer_tensors(config: DecoderConfig, index: int) -> dict[str, tuple[int, ...]]:
    own, width = config.attention(index), config.width
    rows = {"q": config.num_heads * own.head_dim, "k": own.num_kv_heads * own.head_dim}
    if not own.keys_as_values:
        rows["v"] = rows["k"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    tensors: dict[str, tuple[int, ...]] = {f"{norm}.weight": (width,) for norm in norms}
    tensors |= {f"self_attn.{part}_proj.weight": (size, width) for part, size in rows.items()}
    if config.qkv_bias:
        tensors |= {f"self_attn.{part}_proj.bias": (size,) for part, size in rows.items()}
    tensors["self_attn.o_proj.weight"] = (width, rows["q"])
    if config.qk_norm:
        tensors |= {f"self_attn.{part}_norm.weight": (own.head_dim,) for part in "qk"}
    tensors |= {f"mlp.{part}_proj.weight": (config.mlp_width, width) for part in ("gate", "up")}
    tensors["mlp.down_proj.weight"] = (width, config.mlp_width)
    if config.layer_scalar:
        tensors["layer_scalar"] = (1,)
    return tensors


def check_tensors(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Checks that the tensors of a file are those of the config.

    Stored rotary frequencies are ignored (they follow from the config), and so is a copy of tied embeddings
    under the LM head's name.

    Args:
      found: Shapes of the file's tensors, by Hugging Face name.
      expected: `expected_tensors(config)`.
      where: Names the file in the error.

    Raises:
      CheckpointError: lists every missing, unexpected and misshapen tensor.
    """
    missing = [name for name in expected if name not in found]
    unexpected = [
        name
        for name in found
        if name not in expected and name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq")
    ]
    misshapen = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    problems = [
        f"{label}: {', '.join(names)}"
        for label, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshapen))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{where}: the tensors don't fit the config; {'; '.join(problems)}."
            " Use the config that belongs to these weights, and a model of a supported family"
        )


def check_tokenizer(tokenizer: Tokenizer | None, config: DecoderConfig, where: str) -> None:
    """Checks that every token has a row in the embedding table: a lookup beyond it would not fail, but be wrong.

    Raises:
      CheckpointError: the tokenizer has more tokens than the table has rows.
    """
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding table {config.vocab_size} rows;"
            " use the tokenizer that belongs to these weights"
        )
