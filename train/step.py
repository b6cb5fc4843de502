"""One optimiser step: backbone once for all anchors, losses chunk by chunk, gradients of both joined.

Logits of all positions would be the largest array by far ([B * A * K, V']). The loss is therefore a scan over chunks of
blocks that computes, per chunk, the losses and their gradients with respect to the hidden states and the heads; only
these leave the chunk. The backbone's gradient follows from the hidden states' by its vector-Jacobian product. Nothing
is computed twice, unless a kernel is asked for the losses of a chunk (`pallas_kernels.linear_losses`): it computes
logits again rather than keep them.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import struct

from dspark_jax.drafters.dspark import DSparkModel, SharedWeights
from dspark_jax.records import Params
from pallas_kernels.linear_losses import api as linear_losses
from train import anchors as anchors_lib
from train import losses
from train.optimizer import HEADS


@struct.dataclass
class TrainState:
    """What an interrupted run needs to go on.

    Attributes:
      params: the drafter's parameters.
      optimizer: the optimiser's state.
      step: int32, steps taken.
    """

    params: Params
    optimizer: Any
    step: jax.Array


def loss_and_gradients(
    model: DSparkModel,
    shared: SharedWeights,
    params: Params,
    batch: dict[str, jax.Array],
    blocks: anchors_lib.Anchors,
    loss_weights: losses.LossWeights,
    decay: float,
    chunk: int,
    backend: str = "reference",
    interpret: bool = False,
) -> tuple[jax.Array, losses.LossSums, jax.Array, Params]:
    """Computes the loss of a batch and its gradient.

    Args:
      model: the drafter.
      shared: the target's frozen embedding and (reduced) head.
      params: the drafter's parameters.
      batch: as `train.data.make_batch` returns it.
      blocks: anchors and labels.
      loss_weights: weights of the three losses.
      decay: constant of the position weights.
      chunk: blocks per chunk; divides B * A.
      backend: what computes the losses of a chunk (`pallas_kernels.linear_losses.api`).
      interpret: run a kernel in an interpreter (tests).

    Returns:
      loss, sums, total position weight, gradients like `params`.
    """
    count, size = blocks.positions.size, blocks.label_ids.shape[-1]
    weights = losses.position_weights(blocks.weight_mask, decay)
    total_weight = weights.sum()
    heads = {name: params[name] for name in HEADS if name in params}
    body = {name: value for name, value in params.items() if name not in heads}

    def hidden_of(body):
        apply = functools.partial(cast("Any", model.apply), {"params": body})
        context = apply(
            batch["features"], jnp.arange(batch["tokens"].shape[1]) - batch["start"], method="project_context"
        )
        anchor_ids = jnp.take_along_axis(batch["tokens"], blocks.positions, axis=1)
        start = jnp.take_along_axis(batch["start"], blocks.positions, axis=1)
        arguments = (anchor_ids, blocks.positions - start, context, blocks.positions, start)
        return apply(shared.embed, *arguments, method="backbone").reshape(count, size, -1)

    hidden, hidden_vjp = jax.vjp(hidden_of, body)
    gather = lambda array: jnp.take_along_axis(  # noqa: E731
        array, blocks.source_positions.reshape(array.shape[0], -1, *(1,) * (array.ndim - 2)), axis=1
    )
    pieces = {
        "hidden": hidden,
        "target_hidden": gather(batch["last_hidden"]).reshape(count, size, -1),
        "log_normalizer": gather(batch["log_normalizer"]).reshape(count, size),
        "previous": blocks.previous_ids.reshape(count, size),
        "label": _label_index(shared, blocks.label_ids).reshape(count, size),
        "weights": weights.reshape(count, size),
    }
    pieces = jax.tree.map(lambda a: a.reshape(count // chunk, chunk, *a.shape[1:]), pieces)

    def chunk_loss(hidden, heads, piece):
        ce, distance, confidence = _position_losses(model, shared, heads, hidden, piece, backend, interpret)
        sums = losses.sum_losses(ce, distance, confidence, piece["weights"])
        return losses.combine(sums, loss_weights, total_weight), sums

    def scan_body(carry, piece):
        (_, sums), (d_hidden, d_heads) = jax.value_and_grad(chunk_loss, argnums=(0, 1), has_aux=True)(
            piece["hidden"], heads, piece
        )
        return jax.tree.map(jnp.add, carry, (sums, d_heads)), d_hidden

    zero = jnp.zeros((), jnp.float32)
    start = (losses.LossSums(ce=zero, l1=zero, confidence=zero, accept=zero), jax.tree.map(jnp.zeros_like, heads))
    (sums, d_heads), d_hidden = jax.lax.scan(scan_body, start, pieces)
    (d_body,) = hidden_vjp(d_hidden.reshape(hidden.shape))
    return losses.combine(sums, loss_weights, total_weight), sums, total_weight, {**d_body, **d_heads}


def train_step(
    model: DSparkModel,
    optimizer: optax.GradientTransformation,
    loss_weights: losses.LossWeights,
    decay: float,
    anchors: int,
    chunk: int,
    loss_kernel: str,
    shared: SharedWeights,
    state: TrainState,
    batch: dict[str, jax.Array],
    seed: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Samples anchors, computes gradients and takes one step; metrics are returned.

    The random stream is keyed by (seed, step): a resumed run draws what the uninterrupted one would have drawn.
    """
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    positions, keep = anchors_lib.sample_positions(key, batch["response"], anchors)
    blocks = anchors_lib.make_anchors(batch["tokens"], batch["response"], positions, keep, model.config.block_size)
    loss, sums, weight, gradients = loss_and_gradients(
        model, shared, state.params, batch, blocks, loss_weights, decay, chunk, loss_kernel
    )
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    safe = jnp.maximum(weight, 1e-6)
    metrics = {
        "loss": loss,
        "ce": sums.ce / safe,
        "l1": sums.l1 / safe,
        "confidence_loss": sums.confidence / safe,
        "expected_acceptance": sums.accept / safe,
        "gradient_norm": optax.global_norm(gradients),
    }
    return TrainState(params=params, optimizer=optimizer_state, step=state.step + 1), metrics


def _position_losses(
    model: DSparkModel,
    shared: SharedWeights,
    heads: Params,
    hidden: jax.Array,
    piece: dict[str, jax.Array],
    backend: str,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Cross-entropy, L1 distance and confidence logits (None without a head) of a chunk of blocks, [n, K] each."""
    cap, shape = model.config.decoder.logit_softcap, piece["label"].shape
    apply = functools.partial(cast("Any", model.apply), {"params": heads})
    rows = lambda x: x.reshape(piece["label"].size, *x.shape[2:])  # noqa: E731
    target_hidden = rows(piece["target_hidden"]).astype(model.dtype)
    arrays = (rows(hidden), target_hidden, shared.head, rows(piece["log_normalizer"]), rows(piece["label"]))
    codes, confidence = apply(hidden, piece["previous"], method="block_codes")
    bias = () if codes is None else (rows(codes), heads["sequential"]["w2"])
    chosen = linear_losses.choose(*arrays, *bias, backend=backend, interpret=interpret)
    if chosen != "reference":
        ce, distance = linear_losses.linear_losses(*arrays, *bias, softcap=cap, backend=chosen, interpret=interpret)
    else:  # the same definition, with products in the layout that suits the device
        logits = apply(shared.head, rows(hidden), bias[0] if bias else None, method="position_logits")
        log_p = apply(shared.head, target_hidden, method="base_logits") - rows(piece["log_normalizer"])[:, None]
        ce, distance = losses.position_losses(logits, jnp.exp(log_p), rows(piece["label"]))
    return ce.reshape(shape), distance.reshape(shape), confidence


def _label_index(shared: SharedWeights, label_ids: jax.Array) -> jax.Array:
    """Places of labels in the draft vocabulary, -1 for those outside."""
    if shared.vocab is None:
        return label_ids
    place = jnp.minimum(jnp.searchsorted(shared.vocab, label_ids), shared.vocab.shape[0] - 1)
    return jnp.where(shared.vocab[place] == label_ids, place, -1)
