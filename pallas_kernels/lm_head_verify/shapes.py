"""Cases of `lm_head_verify` that tests and bench share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.lm_head_verify import reference
from pallas_kernels.verify.shapes import Drafted


@dataclasses.dataclass(frozen=True)
class Shape:
    """One case.

    Attributes:
      name: what it is for.
      batch: B.
      size: K, tokens drafted and verified.
      vocab: V.
      width: D.
      q: "list" (candidates per position), "one_hot" or "full".
      dtype: of hidden states and head.
      candidates: m of a list.
      verifier: "token" or "block".
      softcap: 0 = none.
    """

    name: str
    batch: int
    size: int
    vocab: int
    width: int
    q: str = "list"
    dtype: str = "float32"
    candidates: int = 16
    verifier: str = "token"
    softcap: float = 0.0


SHAPES = (
    Shape("list", 4, 3, 601, 64),
    Shape("list, block, cap", 5, 4, 151, 100, verifier="block", softcap=3.0),
    Shape("one-hot", 3, 16, 300, 32, q="one_hot"),
    Shape("full, bfloat16", 3, 2, 1000, 128, q="full", dtype="bfloat16"),
    Shape("one row", 1, 1, 151, 32, q="one_hot", verifier="block"),
    Shape("SmolLM2's vocabulary", 1, 2, 49152, 64, dtype="bfloat16"),
)

REAL = tuple(
    Shape(f"{model}, {batch} rows", batch, 7, vocab, width, dtype="bfloat16", candidates=512, softcap=cap)
    for model, vocab, width, cap in (
        ("SmolLM2", 49152, 576, 0.0),
        ("Qwen3-4B", 151936, 2560, 0.0),
        ("Gemma4-12B", 262144, 3840, 30.0),
    )
    for batch in (1, 32, 128)
)

PROBES = (
    Shape("probe", 3, 3, 2000, 128, verifier="block"),
    Shape("probe, bfloat16", 3, 3, 2000, 128, dtype="bfloat16"),
)


def inputs(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Returns arguments of `api.lm_head_verify`: q near p, so that some tokens are kept; every third row is greedy."""
    return {**_arrays(shape, seed), "verifier": shape.verifier, "softcap": shape.softcap}


@functools.partial(jax.jit, static_argnums=0)
def _arrays(shape: Shape, seed: int) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    batch, size, vocab = shape.batch, shape.size, shape.vocab
    hidden = jax.random.normal(next(keys), (batch, size + 1, shape.width)).astype(shape.dtype)
    head = (2.0 * shape.width**-0.5 * jax.random.normal(next(keys), (vocab, shape.width))).astype(shape.dtype)
    temperature = jnp.where(jnp.arange(batch) % 3 == 2, 0.0, jax.random.uniform(next(keys), (batch,), minval=0.5))
    by = jnp.where(temperature > 0, temperature, 1.0)[:, None, None]
    noisy = reference.logits_of(hidden[:, :size], head, shape.softcap) / by
    noisy = noisy + 0.5 * jax.random.normal(next(keys), noisy.shape)
    ids = None
    if shape.q == "list":
        noisy, ids = jax.lax.top_k(noisy, shape.candidates)
    tokens = jax.random.categorical(next(keys), noisy, axis=-1)
    if ids is not None:
        tokens = jnp.take_along_axis(ids, tokens[..., None], -1)[..., 0]
    return {
        "hidden": hidden,
        "head": head,
        "draft": Drafted(tokens.astype(jnp.int32), None if shape.q == "one_hot" else noisy, ids),
        "verify_len": jax.random.randint(next(keys), (batch,), size // 2, size + 1),
        "temperature": temperature,
        "accept_uniforms": jax.random.uniform(next(keys), (batch, size)),
        "commit_uniforms": jax.random.uniform(next(keys), (batch, size + 1)),
    }


def bytes_moved(shape: Shape) -> int:
    """Returns the least traffic: the head once, hidden states once, and what is listed of q.

    V D s + B (K+1) D s, with s bytes per entry, plus B K m 8 for a list or B (K+1) V 4 for a full q.
    """
    itemsize = jnp.dtype(shape.dtype).itemsize
    rows = shape.batch * (shape.size + 1)
    moved = (shape.vocab + rows) * shape.width * itemsize
    if shape.q == "full":
        return moved + rows * shape.vocab * 4
    return moved + (shape.batch * shape.size * shape.candidates * 8 if shape.q == "list" else 0)
