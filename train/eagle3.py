"""EAGLE-3's loss: the drafter's own steps are simulated in training ("training-time test", Li et al., 2025, section 3).

Step s of position i reads token i+1+s and the layer's output of step s-1 (step 0: the projected target features of
token i), at position i+s; it attends to the step-0 keys of positions up to i and to its own steps. Its logits are
compared with the target's distribution of token i+2+s by cross-entropy. A position counts at step s if tokens i+s and
i+1+s are in the response; sums are divided by the number of positions, B * T, and weighted by decay^s.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp

from dspark_jax.drafters.dspark import SharedWeights
from dspark_jax.drafters.eagle3 import Eagle3Model
from dspark_jax.records import BlockKV, Params


def step_logits(
    model: Eagle3Model, params: Params, shared: SharedWeights, tokens: jax.Array, features: jax.Array
) -> list[jax.Array]:
    """Computes the logits of every step of the training-time test.

    Args:
      model: the drafter.
      params: its parameters.
      shared: the target's embedding and head.
      tokens: [B, T].
      features: [B, T, M, D].

    Returns:
      [B, T, V] float32 for each of the K steps.
    """
    batch, size = tokens.shape
    own, positions = model.config.decoder.attention(0), jnp.broadcast_to(jnp.arange(size), tokens.shape)
    apply = lambda *args, **options: model.apply({"params": params}, *args, **options)  # noqa: E731
    nothing = jnp.zeros((batch, own.num_kv_heads, 1, own.head_dim), model.dtype)
    # Step 0: one causal block of all positions. Later steps: one block per position, which sees the keys of step 0.
    context, visible = BlockKV(keys=(nothing,), values=(nothing,)), jnp.zeros((batch, 1), jnp.int32)
    causal = jnp.tril(jnp.ones((size, size), bool))
    hidden = cast("jax.Array", apply(features, method="project_features"))
    args = (_ahead(tokens, 1)[:, None], hidden[:, None], positions[:, None], context, visible, causal)
    hidden, block = cast("tuple[jax.Array, BlockKV]", apply(shared.embed, *args))
    context = jax.tree.map(lambda a: jnp.swapaxes(a[:, 0], 1, 2), block)
    hidden, earlier, logits = hidden[:, 0], None, []
    for step in range(model.config.block_size):
        if step:
            ids, place = _ahead(tokens, 1 + step)[:, :, None], (positions + step)[:, :, None]
            args = (ids, hidden[:, :, None], place, context, positions + 1, jnp.ones((1, step), bool), earlier)
            hidden, block = cast("tuple[jax.Array, BlockKV]", apply(shared.embed, *args))
            hidden = hidden[:, :, 0]
            join = lambda *a: jnp.concatenate(a, axis=2)  # noqa: E731
            earlier = block if earlier is None else jax.tree.map(join, earlier, block)
        flat = cast("jax.Array", apply(shared.head, hidden.reshape(batch * size, -1), method="logits"))
        logits.append(flat.reshape(batch, size, -1))
    return logits


def loss(
    logits: list[jax.Array], target_logits: jax.Array, response: jax.Array, decay: float
) -> tuple[jax.Array, jax.Array]:
    """Computes the weighted loss of all steps.

    Args:
      logits: [B, T, V] of each step (`step_logits`).
      target_logits: [B, T, V], the target's after each token.
      response: [B, T] bool, tokens of the answer.
      decay: weight of a step relative to the one before.

    Returns:
      the loss, and the unweighted one of each step [K].
    """
    target = jax.nn.softmax(target_logits.astype(jnp.float32), axis=-1)
    counts = response & _ahead(response, 1)
    steps = []
    for step, step_logits in enumerate(logits):
        cross_entropy = -jnp.sum(_ahead(target, 1 + step) * jax.nn.log_softmax(step_logits, axis=-1), axis=-1)
        steps.append(jnp.sum(jnp.where(_ahead(counts, step), cross_entropy, 0.0)) / counts.size)
    steps = jnp.stack(steps)
    return jnp.sum(steps * decay ** jnp.arange(len(logits))), steps


def _ahead(array: jax.Array, count: int) -> jax.Array:
    """Looks `count` positions ahead, zeros beyond the end: [B, T, ...] -> [B, T, ...]."""
    return jnp.pad(array[:, count:], ((0, 0), (0, count)) + ((0, 0),) * (array.ndim - 2))
