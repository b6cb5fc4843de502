"""What every reader of a drafter's weights hands on, the tensors that a drafter has, and what must fit its target.

DeepSpec, z-lab and speculators files call the tensors of a drafter the same; these names are the common ground of all
formats. Queries, keys and values become one matrix, gate and up another only when parameters are made of them.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoints import deepspec_eagle3
from dspark_jax.checkpoints.safetensors_files import StoredTensor
from dspark_jax.checkpoints.target_files import CheckpointError, check_tensors, expected_tensors
from dspark_jax.checkpoints.target_params import layer_params, split_layer_params
from dspark_jax.config import DecoderConfig, DrafterConfig, Eagle3Config
from dspark_jax.records import Params
from dspark_jax.text import Tokenizer

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
_OWN_WEIGHTS = {"gated": "gate", "rnn": "joint"}  # a sequential head's weights beside W1 and W2


@dataclasses.dataclass(frozen=True, eq=False)
class DrafterFiles:
    """A drafter as its files hold it.

    Attributes:
      format: "orbax", "deepspec", "zlab" or "speculators".
      config: `DrafterConfig` (EAGLE-3: `Eagle3Config`): its shape, and what must be true of its target.
      vocab: ascending target ids [V'] of a reduced draft vocabulary, or None.
      tensors: weights by name, exactly those of `expected_drafter_tensors(config)`, read when they are asked for.
      params: makes parameters of the drafter's model of them, in a dtype or (None) each in its own.
      dtypes: dtype of each in the words of safetensors.
      stored_parameters: how many numbers of the drafter's own the files hold.
      frozen: copies of the target's weights in the files, by `EMBED` and `HEAD`; nothing is made of them.
      name: what the drafter was loaded from; informative.
    """

    format: str
    config: Any
    vocab: np.ndarray | None
    tensors: Mapping[str, np.ndarray]
    params: Callable[[Any], Params]
    dtypes: Mapping[str, str]
    stored_parameters: int
    frozen: Mapping[str, StoredTensor]
    name: str


class TargetLike(Protocol):
    """What the checks need of a target: `loading.Target` and `TargetFiles` have it."""

    @property
    def config(self) -> DecoderConfig: ...  # noqa: D102

    @property
    def tokenizer(self) -> Tokenizer | None: ...  # noqa: D102

    @property
    def name(self) -> str: ...  # noqa: D102


def expected_drafter_tensors(config: DrafterConfig | Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Returns name and shape of every tensor that a drafter of this config has."""
    if isinstance(config, Eagle3Config):
        return deepspec_eagle3.expected_tensors(config)
    body, rank = config.decoder, config.markov_rank
    width, reads_markov = body.width, config.confidence_head and config.confidence_reads_markov
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(config.tapped_layers) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    tensors |= {
        name.removeprefix("model."): shape
        for name, shape in expected_tensors(body).items()
        if name.startswith("model.layers.")
    }
    if config.sequential_head != "none":
        tensors["markov_head.markov_w1.weight"] = (body.vocab_size, rank)
        tensors["markov_head.markov_w2.weight"] = (config.vocab_out, rank)
    if config.sequential_head == "gated":
        tensors |= {"markov_head.gate_proj.weight": (rank, width + rank), "markov_head.gate_proj.bias": (rank,)}
    elif config.sequential_head == "rnn":
        joint = (3 * rank, 2 * rank + width)
        tensors |= {"markov_head.joint_proj.weight": joint, "markov_head.joint_proj.bias": (3 * rank,)}
    if config.confidence_head:
        tensors["confidence_head.proj.weight"] = (1, width + (rank if reads_markov else 0))
        tensors["confidence_head.proj.bias"] = (1,)
    return tensors


def check_drafter_tensors(
    found: Mapping[str, tuple[int, ...]], config: DrafterConfig | Eagle3Config, where: str
) -> None:
    """Checks that the tensors of a file are those of the config, and copies of the target's weights of its size.

    Raises:
      CheckpointError: lists every missing, unexpected and misshapen tensor.
    """
    width = config.decoder.width
    drafted = config.vocab_out if isinstance(config, DrafterConfig) else config.decoder.vocab_size
    copies = {EMBED: (config.decoder.vocab_size, width), HEAD: (drafted, width)}
    expected = expected_drafter_tensors(config) | {name: shape for name, shape in copies.items() if name in found}
    check_tensors(found, expected, where)


def params_from_tensors(
    config: DrafterConfig | Eagle3Config, tensors: Mapping[str, np.ndarray], dtype: Any = jnp.float32
) -> Params:
    """Converts tensors to the parameters of the drafter's model; dtype None keeps each tensor's own."""
    if isinstance(config, Eagle3Config):
        return deepspec_eagle3.params_from_tensors(config, tensors, dtype)
    get = lambda name: jnp.asarray(np.asarray(tensors[name]), dtype)  # noqa: E731
    params: dict[str, Any] = {
        "fc": {"weight": get("fc.weight")},
        "context_norm": {"weight": get("hidden_norm.weight")},
        "norm": {"weight": get("norm.weight")},
    }
    for i in range(config.decoder.num_layers):
        params[f"layers_{i}"] = layer_params(tensors, f"layers.{i}.", config.decoder, dtype, i)
    if config.sequential_head != "none":
        head: dict[str, Any] = {"w1": get("markov_head.markov_w1.weight"), "w2": get("markov_head.markov_w2.weight")}
        own = _OWN_WEIGHTS.get(config.sequential_head)
        if own:
            head[own] = {"weight": get(f"markov_head.{own}_proj.weight"), "bias": get(f"markov_head.{own}_proj.bias")}
        params["sequential"] = head
    if config.confidence_head:
        params["confidence"] = {
            "proj": {"weight": get("confidence_head.proj.weight"), "bias": get("confidence_head.proj.bias")}
        }
    return params


def tensors_from_params(config: DrafterConfig | Eagle3Config, params: Params) -> dict[str, np.ndarray]:
    """The inverse of `params_from_tensors` (also for gradients)."""
    if isinstance(config, Eagle3Config):
        return deepspec_eagle3.tensors_from_params(config, params)
    tensors = {
        "fc.weight": params["fc"]["weight"],
        "hidden_norm.weight": params["context_norm"]["weight"],
        "norm.weight": params["norm"]["weight"],
    }
    for i in range(config.decoder.num_layers):
        tensors |= split_layer_params(params[f"layers_{i}"], f"layers.{i}.", config.decoder, i)
    if config.sequential_head != "none":
        head = params["sequential"]
        tensors |= {"markov_head.markov_w1.weight": head["w1"], "markov_head.markov_w2.weight": head["w2"]}
        own = _OWN_WEIGHTS.get(config.sequential_head)
        if own:
            tensors[f"markov_head.{own}_proj.weight"] = head[own]["weight"]
            tensors[f"markov_head.{own}_proj.bias"] = head[own]["bias"]
    if config.confidence_head:
        tensors["confidence_head.proj.weight"] = params["confidence"]["proj"]["weight"]
        tensors["confidence_head.proj.bias"] = params["confidence"]["proj"]["bias"]
    return {name: np.asarray(value) for name, value in tensors.items()}


def check_target(config: DrafterConfig | Eagle3Config, target: TargetLike, force: bool) -> None:
    """Refuses a drafter of another target or chat template, and warns of a mask token that means something else.

    Raises:
      CheckpointError: it can't work, or (unless forced) was trained for something else.
    """
    ours = target.config
    if (config.decoder.vocab_size, config.decoder.width) != (ours.vocab_size, ours.width):
        raise CheckpointError(
            f"the drafter belongs to a target of vocabulary {config.decoder.vocab_size} and width"
            f" {config.decoder.width}; {target.name} has {ours.vocab_size} and {ours.width}"
        )
    wrong = [layer for layer in config.tapped_layers if not -1 <= layer < ours.num_layers - 1]
    if wrong:
        raise CheckpointError(
            f"the drafter taps layer {', '.join(map(str, wrong))}; {target.name} has {ours.num_layers} layers, of which"
            f" -1 (the embedding) to {ours.num_layers - 2} can be tapped: use the target that it was trained for"
        )
    if not force:
        _check_trained_for(config, target)
    if isinstance(config, Eagle3Config):
        return  # no mask token
    tokenizer = target.tokenizer
    roles = {"pad": [tokenizer.pad_id], "end": tokenizer.eos_ids} if tokenizer else {}
    for role, ids in roles.items():
        if config.mask_token_id in ids:
            warnings.warn(
                f"the drafter's mask token {config.mask_token_id} is the target's {role} token: right only if it was"
                " trained so; compare with the config that it was published with",
                stacklevel=3,
            )


def _check_trained_for(config: DrafterConfig | Eagle3Config, target: TargetLike) -> None:
    by_force = "pass force=True (--force) to use it all the same"
    name = config.target_name or "another target"
    if config.target_layers and config.target_layers != target.config.num_layers:
        raise CheckpointError(
            f"the drafter was trained for {name} with {config.target_layers} layers, {target.name} has"
            f" {target.config.num_layers}; {by_force}"
        )
    if config.target_fingerprint and config.target_fingerprint != target.config.fingerprint():
        raise CheckpointError(
            f"the drafter was trained for {name} (fingerprint {config.target_fingerprint}), not for {target.name}"
            f" ({target.config.fingerprint()}); {by_force}"
        )
    template = target.tokenizer.chat_template_hash if target.tokenizer else ""
    if config.chat_template_hash and template and config.chat_template_hash != template:
        raise CheckpointError(
            f"the drafter was trained with chat template {config.chat_template_hash}, the target's is {template}: it"
            f" would draft badly; {by_force}"
        )
    if config.target_name and not config.target_fingerprint and target.name != "random":
        last = lambda text: text.rstrip("/").rpartition("/")[2].lower()  # noqa: E731
        if last(config.target_name) != last(target.name):
            warnings.warn(
                f"the drafter names {config.target_name!r} as its target, this one is {target.name!r}: their sizes"
                " agree, but look whether they are the same model",
                stacklevel=4,
            )
