"""The cases that tests and benchmarks share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """One case.

    Attributes:
      kind: the sequential head.
      batch: B.
      steps: K.
      vocab_size: V, tokens of the target.
      rank: R.
      width: D.
      draft_size: V', entries of the draft vocabulary.
      candidates: m, or 0 for the whole draft vocabulary.
      reduced: whether the draft vocabulary has target ids of its own; else V' = V.
      dtype: of W1, W2, the head's weights and the hidden states.
      scale: standard deviation of the base logits.
    """

    kind: str
    batch: int
    steps: int
    vocab_size: int
    rank: int
    width: int
    draft_size: int
    candidates: int = 0
    reduced: bool = True
    dtype: str = "float32"
    scale: float = 2.0


SHAPES = (
    Shape("vanilla", 11, 2, 512, 16, 16, 512, candidates=130, reduced=False),  # more rows than a block, odd edges
    Shape("gated", 3, 3, 512, 32, 24, 200, candidates=40, scale=1e4),  # most weights underflow
    Shape("rnn", 3, 3, 512, 32, 16, 200, candidates=64, dtype="bfloat16"),
    Shape("none", 3, 2, 512, 16, 16, 200, candidates=40),
    Shape("gated", 3, 2, 2048, 32, 16, 1300),
    Shape("rnn", 2, 2, 1152, 32, 16, 1152, reduced=False, dtype="bfloat16"),
)

REAL = (
    Shape("vanilla", 1, 7, 151936, 256, 2560, 151936, candidates=512, reduced=False, dtype="bfloat16"),
    Shape("gated", 32, 7, 151936, 256, 2560, 32000, candidates=2048, dtype="bfloat16"),
    Shape("rnn", 8, 7, 151936, 256, 4096, 32000, candidates=2048, dtype="float32"),
    Shape("vanilla", 8, 7, 151936, 256, 2560, 151936, reduced=False, dtype="bfloat16"),
    Shape("rnn", 32, 7, 151936, 256, 4096, 32000, dtype="bfloat16"),
    Shape("none", 8, 7, 151936, 256, 4096, 32000, candidates=256),
)

# What a kernel has to reproduce on a device before it is used: every form that it has.
_LIST = Shape("rnn", 2, 2, 512, 128, 128, 384, candidates=256)
PROBES = {
    "tpu": (_LIST, Shape("rnn", 2, 2, 2048, 128, 128, 1280, dtype="bfloat16")),
    "mosaic_gpu": (_LIST, Shape("vanilla", 2, 2, 512, 256, 128, 384, candidates=200, dtype="bfloat16")),
    "triton": (_LIST,),
}


def inputs(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Returns arguments of `api.markov_sample`: random, every third row greedy."""
    s, dtype = shape, jnp.dtype(shape.dtype)
    keys = iter(jax.random.split(jax.random.key(seed), 12))
    normal = lambda *sizes: jax.random.normal(next(keys), sizes)  # noqa: E731
    size = s.candidates or s.draft_size
    arguments: dict[str, Any] = {
        "kind": s.kind,
        "base_logits": normal(s.batch, s.steps, size) * s.scale,
        "anchor_ids": jax.random.randint(next(keys), (s.batch,), 0, s.vocab_size),
        "temperature": jnp.where(jnp.arange(s.batch) % 3 == 2, 0.0, 0.5 + jax.random.uniform(next(keys), (s.batch,))),
        "uniforms": jax.random.uniform(next(keys), (s.batch, s.steps)),
    }
    if s.candidates:
        scores = jax.random.uniform(next(keys), (s.batch, s.steps, s.draft_size))
        arguments["index"] = jax.lax.top_k(scores, s.candidates)[1].astype(jnp.int32)
    if s.reduced:
        chosen = jax.random.permutation(next(keys), s.vocab_size)[: s.draft_size]
        arguments["vocab"] = jnp.sort(chosen).astype(jnp.int32)
    if s.kind == "none":
        return arguments
    arguments["w1"] = normal(s.vocab_size, s.rank).astype(dtype)
    arguments["w2"] = (normal(s.draft_size, s.rank) * 2 / s.rank**0.5).astype(dtype)
    if s.kind != "vanilla":
        outs, ins = (s.rank, s.width + s.rank) if s.kind == "gated" else (3 * s.rank, 2 * s.rank + s.width)
        arguments["hidden"] = normal(s.batch, s.steps, s.width).astype(dtype)
        arguments["weight"] = (normal(outs, ins) / ins**0.5).astype(dtype)
        arguments["bias"] = normal(outs).astype(dtype)
    return arguments


def bytes_moved(shape: Shape) -> int:
    """Returns the least traffic of the op.

    Base logits and result, B K size 4 each; with candidates, their indices as well. With a head, the rows of W2: those
    that the candidates name, B K m R, or all of them once a step, K V' R; and B K rows of W1. The head's own weights
    and hidden states are read once.
    """
    s, itemsize = shape, jnp.dtype(shape.dtype).itemsize
    entries = s.batch * s.steps * (s.candidates or s.draft_size)
    total = entries * 4 * (3 if s.candidates else 2)
    if s.kind == "none":
        return total
    rows = entries if s.candidates else s.steps * s.draft_size
    total += (rows + s.batch * s.steps) * s.rank * itemsize
    if s.kind == "vanilla":
        return total
    weights = s.rank * (s.width + s.rank) if s.kind == "gated" else 3 * s.rank * (2 * s.rank + s.width)
    return total + (weights + s.batch * s.steps * s.width) * itemsize
