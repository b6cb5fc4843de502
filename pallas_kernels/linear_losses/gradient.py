"""The custom gradient that every kernel shares: what is kept between the passes, and which pass computes what."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.linear_losses.tile import RowGradient


class Inputs(NamedTuple):
    """The op's arrays; n is a multiple of the kernel's row tile.

    Attributes:
      hidden: [n, D].
      target_hidden: [n, D].
      head: [V', D].
      log_normalizer: [n, 1] float32.
      label: [n, 1] int32.
      code: [n, R], or None.
      w2: [V', R], or None.
    """

    hidden: jax.Array
    target_hidden: jax.Array
    head: jax.Array
    log_normalizer: jax.Array
    label: jax.Array
    code: jax.Array | None
    w2: jax.Array | None


class Outputs(NamedTuple):
    """The forward pass's results and what the backward pass needs, [n, 1] float32 each.

    Attributes:
      ce: -log q[label].
      distance: sum_v |q_v - p_v|, and the mass that p lacks.
      peak: the largest drafter logit.
      log_sum: log of sum_v exp(z_v - peak).
      agreement: sum_v q_v sign(q_v - p_v).
    """

    ce: jax.Array
    distance: jax.Array
    peak: jax.Array
    log_sum: jax.Array
    agreement: jax.Array


class Passes(NamedTuple):
    """A kernel's passes.

    Attributes:
      forward: the results.
      backward: float32 gradients of hidden [n, D], code [n, R] and w2 [V', R] (None without).
    """

    forward: Callable[[Inputs], Outputs]
    backward: Callable[[Inputs, RowGradient], tuple[jax.Array, jax.Array | None, jax.Array | None]]


def in_two_passes(
    rows: Callable[[Inputs, RowGradient], tuple[jax.Array, jax.Array | None]],
    weight: Callable[[Inputs, RowGradient], jax.Array],
) -> Callable[[Inputs, RowGradient], tuple[jax.Array, jax.Array | None, jax.Array | None]]:
    """Makes a backward pass of one for hidden and code and one for w2, which is not called without it."""

    def backward(inputs: Inputs, row: RowGradient):
        return *rows(inputs, row), None if inputs.w2 is None else weight(inputs, row)

    return backward


def run(
    passes: Passes,
    row_tile: int,
    hidden: jax.Array,
    target_hidden: jax.Array,
    head: jax.Array,
    log_normalizer: jax.Array,
    label: jax.Array,
    code: jax.Array | None,
    w2: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Runs a kernel on arguments as `api.linear_losses` takes them, with its gradients.

    Positions are padded to whole tiles (they are few beside the head), so that only the vocabulary has an edge.
    """
    count = hidden.shape[0]
    fill = lambda x: jnp.pad(x, ((0, -count % row_tile), (0, 0)))  # noqa: E731
    inputs = Inputs(
        hidden=fill(hidden),
        target_hidden=fill(target_hidden),
        head=head,
        log_normalizer=fill(log_normalizer.astype(jnp.float32)[:, None]),
        label=fill(label.astype(jnp.int32)[:, None]),
        code=None if code is None else fill(code),
        w2=w2,
    )
    ce, distance = _differentiable(passes)(inputs)
    return ce[:count, 0], distance[:count, 0]


def _differentiable(passes: Passes) -> Callable[[Inputs], tuple[jax.Array, jax.Array]]:
    @jax.custom_vjp
    def op(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        outputs = passes.forward(inputs)
        return outputs.ce, outputs.distance

    def forward(inputs: Inputs):
        outputs = passes.forward(inputs)
        return (outputs.ce, outputs.distance), (inputs, outputs)

    def backward(kept, cotangents):
        inputs, outputs = kept
        at_label = jnp.where(inputs.label >= 0, cotangents[0], 0.0)
        row = RowGradient(
            label=inputs.label,
            log_normalizer=inputs.log_normalizer,
            peak=outputs.peak,
            log_sum=outputs.log_sum,
            at_label=at_label,
            of_sign=cotangents[1],
            constant=at_label - cotangents[1] * outputs.agreement,
        )
        d_hidden, d_code, d_w2 = passes.backward(inputs, row)
        nothing = Inputs(None, None, None, None, None, None, None)  # pyright: ignore[reportArgumentType]
        gradients = nothing._replace(hidden=d_hidden.astype(inputs.hidden.dtype))
        if d_code is not None and d_w2 is not None and inputs.code is not None and inputs.w2 is not None:
            gradients = gradients._replace(code=d_code.astype(inputs.code.dtype), w2=d_w2.astype(inputs.w2.dtype))
        return (gradients,)

    op.defvjp(forward, backward)
    return op
