"""The product in plain jax: the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.precision import product_precision


def skinny_matmul(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Arguments and result as of `api.skinny_matmul`."""
    return jnp.matmul(weight, x, precision=product_precision())
