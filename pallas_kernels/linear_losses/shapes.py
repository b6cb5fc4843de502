"""The cases that tests and bench share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """One case.

    Attributes:
      name: for messages.
      count: n, positions.
      vocab: V', rows of the head.
      width: D.
      rank: R; 0 = no sequential head.
      softcap: 0 = none.
      dtype: of hidden, head, code and w2.
      lost: share of the target's mass that is outside of the head's rows.
    """

    name: str
    count: int
    vocab: int
    width: int
    rank: int
    softcap: float = 0.0
    dtype: str = "float32"
    lost: float = 0.1


# For interpreters on a CPU: edges of every kind.
SHAPES = (
    Shape("edges", 19, 300, 48, 20),
    Shape("no sequential head", 16, 256, 32, 0),
    Shape("capped", 33, 200, 40, 16, softcap=3.0),
    Shape("bfloat16", 17, 272, 48, 16, dtype="bfloat16"),
    Shape("two tiles of everything", 70, 304, 320, 64, softcap=3.0, dtype="bfloat16"),
    Shape("one position", 1, 130, 16, 1, lost=0.0),
)

# What a kernel has to reproduce on a device before it is used; with a sequential head.
PROBES = (SHAPES[0], SHAPES[4])

# A chunk of training, for lowering and bench.
REAL = (
    Shape("SmolLM2-135M", 64 * 3, 12288, 576, 128),
    Shape("SmolLM2-135M on a GPU", 128 * 7, 12288, 576, 128),
    Shape("Qwen3-4B", 512 * 7, 151936, 2560, 256, dtype="bfloat16"),
    Shape("capped, no head", 64 * 7, 262144, 3584, 0, softcap=30.0, dtype="bfloat16"),
    Shape("wide float32", 64 * 7, 32000, 4096, 256),
)


def inputs(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Random arguments of `api.linear_losses`; about one label in four is outside of the head's rows."""
    keys = jax.random.split(jax.random.key(seed), 6)
    dtype = jnp.dtype(shape.dtype)
    normal = lambda key, *size: jax.random.normal(key, size, jnp.float32)  # noqa: E731
    head = normal(keys[0], shape.vocab, shape.width).astype(dtype)
    hidden = normal(keys[1], shape.count, shape.width) * 2 * shape.width**-0.5
    # The target agrees with the drafter half way: q and p overlap without being alike.
    target = (hidden + normal(keys[2], shape.count, shape.width) * 2 * shape.width**-0.5).astype(dtype)
    logits = jnp.matmul(target.astype(jnp.float32), head.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)
    if shape.softcap:
        logits = shape.softcap * jnp.tanh(logits / shape.softcap)
    label = jax.random.randint(keys[3], (shape.count,), -(shape.vocab // 3) - 1, shape.vocab)
    arguments = {
        "hidden": hidden.astype(dtype),
        "target_hidden": target,
        "head": head,
        "log_normalizer": jax.nn.logsumexp(logits, axis=-1) - jnp.log1p(-shape.lost),
        "label": jnp.maximum(label, -1),
        "softcap": shape.softcap,
    }
    if shape.rank:
        arguments["code"] = normal(keys[4], shape.count, shape.rank).astype(dtype)
        arguments["w2"] = (normal(keys[5], shape.vocab, shape.rank) * shape.rank**-0.5).astype(dtype)
    return arguments


def abstract(shape: Shape) -> dict[str, Any]:
    """The arrays of `inputs` without values, for lowering."""
    dtype, rows = jnp.dtype(shape.dtype), (shape.count,)
    make = jax.ShapeDtypeStruct
    arrays = {
        "hidden": make((shape.count, shape.width), dtype),
        "target_hidden": make((shape.count, shape.width), dtype),
        "head": make((shape.vocab, shape.width), dtype),
        "log_normalizer": make(rows, jnp.float32),
        "label": make(rows, jnp.int32),
    }
    if shape.rank:
        arrays["code"] = make((shape.count, shape.rank), dtype)
        arrays["w2"] = make((shape.vocab, shape.rank), dtype)
    return arrays


def bytes_moved(shape: Shape) -> int:
    """Least traffic of the op with its gradient.

    Every array read once forward and once backward; ce, distance, their cotangents and three residuals of float32 per
    position written once and read once; the gradients of hidden, code and w2 written once:

      2 (s (2 n D + n R + V' D + V' R) + 8 n) + 56 n + s (n D + n R + V' R), s bytes an entry
    """
    n, vocab, width, rank = shape.count, shape.vocab, shape.width, shape.rank
    size = jnp.dtype(shape.dtype).itemsize
    read = size * (2 * n * width + n * rank + vocab * (width + rank)) + 8 * n
    return 2 * read + 7 * 2 * 4 * n + size * (n * width + n * rank + vocab * rank)
