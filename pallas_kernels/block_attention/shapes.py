"""Shapes of block attention that tests and bench share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """One case.

    Attributes:
      batch: B, rows.
      size: K, queries and tokens of the block.
      heads: N, query heads.
      groups: G, heads of keys and values.
      dim: H.
      slots: S, slots of the cache.
      dtype: of queries, keys and values.
    """

    batch: int
    size: int
    heads: int
    groups: int
    dim: int
    slots: int
    dtype: str = "bfloat16"

    @property
    def lengths(self) -> list[int]:
        """Slots that each row sees, spread evenly from none to all; one row alone sees all."""
        return [self.slots * b // (self.batch - 1) for b in range(self.batch)] if self.batch > 1 else [self.slots]


SHAPES = (
    Shape(3, 7, 6, 2, 64, 200, "float32"),
    Shape(2, 1, 1, 1, 64, 128, "float32"),
    Shape(1, 16, 16, 2, 128, 1100, "bfloat16"),
    Shape(4, 4, 2, 2, 256, 96, "bfloat16"),
)

REAL = tuple(
    Shape(batch, size, heads, groups, dim, slots, dtype)
    for heads, groups, dim, size, slots, dtype in (
        (9, 3, 64, 3, 512, "float32"),  # SmolLM2-135M
        (32, 8, 128, 7, 2048, "bfloat16"),  # Qwen3-4B
        (32, 8, 128, 16, 4096, "bfloat16"),
        (8, 4, 256, 7, 4096, "bfloat16"),  # Gemma 3
    )
    for batch in (1, 8, 64)
)


def inputs(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Returns arguments of `api.block_attention`: standard normal values, lengths from none to all of the cache."""
    keys = jax.random.split(jax.random.key(seed), 5)
    draw = lambda key, *sizes: jax.random.normal(key, sizes, jnp.dtype(shape.dtype))  # noqa: E731
    return {
        "queries": draw(keys[0], shape.batch, shape.size, shape.heads, shape.dim),
        "context_keys": draw(keys[1], shape.batch, shape.groups, shape.slots, shape.dim),
        "context_values": draw(keys[2], shape.batch, shape.groups, shape.slots, shape.dim),
        "visible": jnp.asarray(shape.lengths, jnp.int32),
        "block_keys": draw(keys[3], shape.batch, shape.size, shape.groups, shape.dim),
        "block_values": draw(keys[4], shape.batch, shape.size, shape.groups, shape.dim),
    }


def bytes_moved(shape: Shape) -> int:
    """Returns the least traffic: H (2 B K N + 2 B K G + 2 G sum(visible)) elements and B lengths of 4 bytes.

    Queries are read and their results written; keys and values of the block and of the slots that are seen are read.
    """
    tokens = shape.batch * shape.size
    elements = 2 * tokens * shape.heads + 2 * tokens * shape.groups + 2 * shape.groups * sum(shape.lengths)
    return elements * shape.dim * jnp.dtype(shape.dtype).itemsize + 4 * shape.batch
