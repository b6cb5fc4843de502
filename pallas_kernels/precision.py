"""The precision of matrix products: float32 means float32, on accelerators too."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def product_precision(dtype: jax.typing.DTypeLike = jnp.float32) -> jax.lax.Precision:
    """Returns the precision of products of operands of a dtype.

    Accelerators round the operands of float32 products unless told not to (to bfloat16 on TPU, to TensorFloat-32 on
    GPU), and then a block of tokens and single tokens may disagree about the argmax. Whoever prefers speed says so with
    `jax.default_matmul_precision`. Products of bfloat16 operands are not affected.
    """
    asked = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    exact = jnp.dtype(dtype) == jnp.float32 and asked in (None, "float32", "highest")
    return jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
