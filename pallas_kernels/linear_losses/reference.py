"""The definition: plain jax on whole logits, differentiated by jax.

Traffic on paper, for n positions, V' tokens, width D, rank R, forward and backward. Whole arrays of n V' float32:
the plain path writes three (base logits, bias, target's logits), reads two for the maximum, two for the sum, three for
the distance, three for sum_v q_v s_v, three for the gradient of the logits, writes that, and reads it in three
products:

  plain   80 n V' bytes; 48 n V' without a sequential head (no bias, one product of the gradient)

The kernels never write such an array, but read the head again for every tile of t positions, in both forward sweeps
and for the gradient of the rows, and the positions again for every tile of u tokens, for the gradient of w2. With s
bytes an entry:

  fused   (3 ceil(n / t) + 1) V' (D + R) s + ceil(V' / u) n (2 D + R) s; 3 ceil(n / t) V' D s without a sequential head

(`tpu.Tiles.traffic`). Two chunks of training, with the tiles that `tpu.Tiles.for_shape` picks:

  n = 896, V' = 12288, D = 576, R = 128, float32, t = 256, u = 512        0.88 GB plain, 0.56 GB fused
  n = 3584, V' = 151936, D = 2560, R = 256, bfloat16, t = 128, u = 512     44 GB plain,   84 GB fused

`mosaic_gpu` has no sweep of its own for w2, but writes the gradient of the logits, chunk by chunk, and reads it for
every product: 2 n V' s bytes, 4 n V' s with a sequential head, 5 n V' s with a cap, too, which makes it two gradients.

So the kernels can pay where D is small, or where repeated reads are served by a cache, as on a GPU. What they save
everywhere is memory: each of the arrays of the second case takes 2.2 GB.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def linear_losses(
    hidden: jax.Array,
    target_hidden: jax.Array,
    head: jax.Array,
    log_normalizer: jax.Array,
    label: jax.Array,
    code: jax.Array | None = None,
    w2: jax.Array | None = None,
    softcap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results as `api.linear_losses`."""
    head, target_hidden, log_normalizer = jax.lax.stop_gradient((head, target_hidden, log_normalizer))
    logits = _capped(_product(hidden, head), softcap)
    if code is not None and w2 is not None:
        logits = logits + _product(code, w2)
    log_q = jax.nn.log_softmax(logits, axis=-1)
    p = jnp.exp(_capped(_product(target_hidden, head), softcap) - log_normalizer[:, None])
    log_label = jnp.take_along_axis(log_q, jnp.maximum(label, 0)[:, None], axis=-1)[:, 0]
    distance = jnp.abs(jnp.exp(log_q) - p).sum(-1) + jnp.maximum(1.0 - p.sum(-1), 0.0)
    return jnp.where(label >= 0, -log_label, 0.0), distance


def _product(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """rows [n, d], weight [V', d] -> [n, V'] float32."""
    return jnp.matmul(rows.astype(jnp.float32), weight.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)


def _capped(logits: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(logits / cap) if cap else logits
