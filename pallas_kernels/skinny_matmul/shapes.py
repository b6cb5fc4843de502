"""Shapes of the product that tests and bench share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """One case.

    Attributes:
      features_out: rows of the weight.
      features_in: columns of the weight.
      columns: n, tokens carried.
    """

    features_out: int
    features_in: int
    columns: int


SHAPES = (
    Shape(300, 257, 1),  # no size that lanes, lines or chunks divide
    Shape(300, 257, 3),
    Shape(1024, 96, 8),
    Shape(9000, 40, 5),
)

REAL = tuple(
    Shape(features_out, features_in, columns)
    for features_out, features_in in (
        (960, 576),  # SmolLM2-135M: query, key and value; gate and up; down; LM head
        (3072, 576),
        (576, 1536),
        (49152, 576),
    )
    for columns in (1, 2, 4, 8)
)


def inputs(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Returns arguments of `api.skinny_matmul`: standard normal values."""
    of_weight, of_x = jax.random.split(jax.random.key(seed))
    return {
        "weight": jax.random.normal(of_weight, (shape.features_out, shape.features_in), jnp.float32),
        "x": jax.random.normal(of_x, (shape.features_in, shape.columns), jnp.float32),
    }


def bytes_moved(shape: Shape) -> int:
    """Returns the least traffic in bytes: weight and columns are read, results written, float32."""
    n, i, o = shape.columns, shape.features_in, shape.features_out
    return 4 * (o * i + n * (i + o))
