"""The kernel for CPUs, `cpu.c`, called through XLA's FFI.

XLA makes a dozen operations of a layer's attention, some of them batched products that are too small for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.native import build

SOURCE = Path(__file__).with_name("cpu.c")
_LANES = 8  # kLanes of job.h
_MOST_QUERIES = 64  # of a group: for more, products are what XLA does well


def refuses(queries_per_group: int, dim: int, dtype: jax.typing.DTypeLike) -> str:
    """Says why the kernel can't take a shape, "" if it can."""
    if dtype != jnp.float32:
        return f"dtype {jnp.dtype(dtype).name}, not float32"
    if dim % _LANES:
        return f"head dimension {dim}, not a multiple of {_LANES}"
    if queries_per_group > _MOST_QUERIES:
        return f"{queries_per_group} queries per group, more than {_MOST_QUERIES}"
    return ""


def block_attention(
    queries: jax.Array,
    context_keys: jax.Array,
    context_values: jax.Array,
    visible: jax.Array,
    block_keys: jax.Array,
    block_values: jax.Array,
    scale: float,
    causal: bool = False,
    interpret: Any = False,
) -> jax.Array:
    """Arguments and result as of `api.block_attention`; there is nothing to interpret.

    Raises:
      OSError: as `build.target`.
    """
    del interpret
    name = build.target(SOURCE, "block_attention_causal" if causal else "block_attention")
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(queries.shape, jnp.float32), vmap_method="sequential")
    visible = visible.astype(jnp.int32)
    return call(queries * scale, context_keys, context_values, visible, block_keys, block_values)
