"""Initial parameters of a drafter: sensible starts instead of noise, each one a config option.

layers   the target's last decoder layers, its final norm, and a feature projection that passes the deepest tapped
         layer through: the draft layers then see in their context what these layers saw in the target
Markov   W1, W2 from the target's bigram statistics: a truncated SVD of the positive pointwise mutual information of
         (previous token, token), which is what a transition bias should look like (Levy & Goldberg, 2014)
drafter  another drafter of the same target, already trained: what a smaller one keeps of it needn't be learnt again
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
import scipy.sparse.linalg

from dspark_jax.checkpoints import orbax_drafter
from dspark_jax.config import ConfigError, DrafterConfig
from dspark_jax.drafters.dspark import DSparkModel, SharedWeights
from dspark_jax.records import Params


def random_params(model: DSparkModel, shared: SharedWeights, seed: int) -> Params:
    """Draws random parameters."""
    config = model.config
    features = jnp.zeros((1, 1, len(config.tapped_layers), config.decoder.width), model.dtype)
    init = jax.jit(lambda key: model.init(key, shared, features, method="init_everything"))
    return init(jax.random.key(seed))["params"]


def layers_from_target(params: Params, config: DrafterConfig, target_params: Params, target_layers: int) -> Params:
    """Starts the draft layers from the target's last ones.

    Args:
      params: random parameters.
      config: the drafter's config; its layers must have the target's shapes.
      target_params: the target's parameters.
      target_layers: how many layers the target has.

    Raises:
      ConfigError: the draft layers are shaped differently.
    """
    count, width = config.decoder.num_layers, config.decoder.width
    if count > target_layers:
        raise ConfigError(f"config.drafter.num_layers = {count}: the target has {target_layers} layers to start from")
    params = dict(params)
    for i in range(count):
        source = target_params[f"layers_{target_layers - count + i}"]
        shapes = lambda tree: jax.tree.map(jnp.shape, tree)  # noqa: E731
        if shapes(source) != shapes(params[f"layers_{i}"]):
            raise ConfigError(
                "config.drafter.init_layers_from_target: the draft layers are shaped unlike the target's;"
                " use config.drafter.mlp_width=0, or start from random layers"
            )
        params[f"layers_{i}"] = jax.tree.map(jnp.array, source)
    params["norm"] = jax.tree.map(jnp.array, target_params["norm"])
    first = params["layers_0"]["input_norm"]["weight"]
    params["context_norm"] = {"weight": jnp.array(first)}
    deepest = int(np.argmax(config.tapped_layers))
    passing = jnp.zeros((width, len(config.tapped_layers), width), params["fc"]["weight"].dtype)
    passing = passing.at[:, deepest].set(jnp.eye(width))
    params["fc"] = {"weight": passing.reshape(width, -1)}
    return params


def markov_from_bigrams(
    params: Params, config: DrafterConfig, tokens: list[np.ndarray], vocab: np.ndarray | None, smoothing: float = 2.0
) -> Params:
    """Starts W1 and W2 from bigram statistics.

    Args:
      params: parameters with a sequential head.
      config: the drafter's config.
      tokens: the target's texts.
      vocab: ids of the reduced draft vocabulary, or None.
      smoothing: pseudo-counts per previous token.

    Returns:
      Parameters whose vanilla transition bias is a rank-R approximation of the positive pointwise mutual information.
    """
    size, rank = config.decoder.vocab_size, config.markov_rank
    ids = np.arange(size) if vocab is None else vocab
    place = np.full((size,), -1)
    place[ids] = np.arange(len(ids))
    previous = np.concatenate([row[:-1] for row in tokens])
    following = place[np.concatenate([row[1:] for row in tokens])]
    previous, following = previous[following >= 0], following[following >= 0]
    shape = (size, len(ids))
    counts = scipy.sparse.coo_matrix((np.ones(len(previous)), (previous, following)), shape).tocsr().tocoo()
    unigram = (np.bincount(following, minlength=len(ids)) + 1e-3) / max(len(following), 1)
    totals = np.bincount(previous, minlength=size)
    joint = (counts.data + smoothing * unigram[counts.col]) / (totals[counts.row] + smoothing)
    information = np.maximum(np.log(joint / unigram[counts.col]), 0.0)
    matrix = scipy.sparse.csr_matrix((information, (counts.row, counts.col)), shape)
    usable = min(rank, min(shape) - 1)
    start = np.random.default_rng(0).standard_normal(min(shape))
    left, values, right = (np.asarray(part) for part in scipy.sparse.linalg.svds(matrix, k=usable, v0=start))
    scale = np.sqrt(np.maximum(values, 0.0))
    w1, w2 = np.array(params["sequential"]["w1"]), np.array(params["sequential"]["w2"])
    w1[:, :usable], w2[:, :usable] = left * scale, right.T * scale
    head: dict[str, Any] = dict(params["sequential"])
    head |= {"w1": jnp.asarray(w1, head["w1"].dtype), "w2": jnp.asarray(w2, head["w2"].dtype)}
    return {**params, "sequential": head}


# What a drafter's parameters mean depends on these; block size, layers and draft vocabulary may differ.
_SAME_FIELDS = (
    "tapped_layers",
    "mask_token_id",
    "anchor_layout",
    "sequential_head",
    "markov_rank",
    "confidence_head",
    "confidence_reads_markov",
    "target_fingerprint",
    "chat_template_hash",
)


def check_drafter(config: DrafterConfig, folder: Path) -> None:
    """Refuses a drafter that a new one can't start from.

    Raises:
      CheckpointError: the folder holds no drafter.
      ConfigError: the two drafters differ in more than block size, number of layers and draft vocabulary.
    """
    source, _ = orbax_drafter.read_description(folder)
    differing = [name for name in _SAME_FIELDS if getattr(source, name) != getattr(config, name)]
    if dataclasses.replace(source.decoder, num_layers=config.decoder.num_layers) != config.decoder:
        differing.append("decoder")
    if differing:
        values = ", ".join(f"{name} = {getattr(source, name)} instead of {getattr(config, name)}" for name in differing)
        raise ConfigError(f"config.drafter.init_from = {folder}: a drafter with {values}; these have to agree")


def from_drafter(params: Params, config: DrafterConfig, vocab: np.ndarray | None, folder: Path, dtype: Any) -> Params:
    """Starts from a trained drafter's parameters.

    Args:
      params: parameters that stay where the other drafter has none: layers beyond its own, tokens that it can't draft.
      config: the new drafter's config.
      vocab: ids of its reduced draft vocabulary, or None.
      folder: the trained drafter's folder, which `check_drafter` accepts.
      dtype: dtype of the parameters.
    """
    _, source_vocab = orbax_drafter.read_description(folder)
    trained = orbax_drafter.read_params(folder, dtype)
    taken = {name: value for name, value in trained.items() if name in params}
    if "sequential" in taken:
        every = np.arange(config.decoder.vocab_size)
        ids, source_ids = (every if v is None else v for v in (vocab, source_vocab))
        _, here, there = np.intersect1d(ids, source_ids, return_indices=True)
        rows = params["sequential"]["w2"].at[here].set(trained["sequential"]["w2"][there])
        taken["sequential"] = {**trained["sequential"], "w2": rows}
    return {**params, **taken}
