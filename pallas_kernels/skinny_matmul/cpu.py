"""The kernel for CPUs, `cpu.c`, called through XLA's FFI.

XLA's product packs the weights before it multiplies them, which costs as much as the multiplication when there are four
columns. Nothing that XLA compiles itself was found to read them once (README).
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.native import build

MOST_COLUMNS = 8  # kMostColumns of cpu.c
SOURCE = Path(__file__).with_name("cpu.c")


def skinny_matmul(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Arguments and result as of `api.skinny_matmul`, in float32, with 1 to `MOST_COLUMNS` columns.

    Raises:
      OSError: as `build.target`.
    """
    y = jax.ShapeDtypeStruct((weight.shape[0], x.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(build.target(SOURCE, "skinny_matmul"), y, vmap_method="sequential")(weight, x)
