"""Cases of `verify` that tests and bench share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.verify import reference


@dataclasses.dataclass(frozen=True)
class Shape:
    """One case.

    Attributes:
      name: what it is for.
      batch: B.
      size: K, tokens drafted and verified.
      vocab: V.
      q: "full", "reduced" (every third token), "list" (candidates per position) or "one_hot".
      dtype: of the target's logits.
      spread: standard deviation of the logits.
      candidates: m of a list.
      verifier: "token" or "block".
      cut: whether rows have top-k cuts.
    """

    name: str
    batch: int
    size: int
    vocab: int
    q: str = "full"
    dtype: str = "float32"
    spread: float = 2.0
    candidates: int = 64
    verifier: str = "token"
    cut: bool = False


class Drafted(NamedTuple):
    """A `reference.Proposal` of plain arrays."""

    token_ids: jax.Array
    logits: jax.Array | None
    ids: jax.Array | None = None


SHAPES = (
    Shape("small vocabulary", 5, 3, 151),
    Shape("one token", 1, 1, 151, q="one_hot"),
    Shape("sixteen tokens", 3, 16, 600, verifier="block"),
    Shape("bfloat16", 4, 7, 1000, dtype="bfloat16"),
    Shape("list", 4, 7, 1000, q="list", candidates=33),
    Shape("list, block", 4, 3, 1000, q="list", verifier="block", cut=True),
    Shape("reduced", 4, 4, 601, q="reduced"),
    Shape("reduced, block", 4, 4, 601, q="reduced", verifier="block"),
    Shape("one-hot, block", 4, 4, 601, q="one_hot", verifier="block"),
    Shape("cut", 6, 3, 5000, cut=True),
    Shape("huge logits", 4, 3, 151, spread=1e4),
    Shape("many rows", 37, 2, 300),
    Shape("SmolLM2", 2, 3, 49152),
    Shape("Qwen3", 1, 2, 151936, q="list", dtype="bfloat16"),
    Shape("Gemma", 1, 1, 262144, dtype="bfloat16", verifier="block"),
)

REAL = tuple(
    Shape(f"{model}, {batch} rows, {q}", batch, 7, vocab, q=q, dtype="bfloat16", candidates=512)
    for model, vocab in (("SmolLM2", 49152), ("Qwen3", 151936), ("Gemma", 262144))
    for batch in (1, 32, 128)
    for q in ("full", "list")
)

PROBES = (Shape("probe", 3, 3, 5000, verifier="block"), Shape("probe, list", 3, 3, 5000, q="list", dtype="bfloat16"))


def inputs(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Returns arguments of `api.verify`: q close enough to p that some tokens are kept, every fourth row greedy."""
    return {**_arrays(shape, seed), "verifier": shape.verifier}


@functools.partial(jax.jit, static_argnums=0)
def _arrays(shape: Shape, seed: int) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(seed), 10))
    batch, size, vocab = shape.batch, shape.size, shape.vocab
    logits = shape.spread * jax.random.normal(next(keys), (batch, size + 1, vocab))
    temperature = jnp.where(jnp.arange(batch) % 4 == 3, 0.0, jax.random.uniform(next(keys), (batch,), minval=0.5))
    by = jnp.where(temperature > 0, temperature, 1.0)[:, None, None]
    noisy = (logits[:, :size] + 0.3 * shape.spread * jax.random.normal(next(keys), (batch, size, vocab))) / by
    ids = None
    if shape.q == "reduced":
        ids = jnp.arange(0, vocab, 3)
        noisy = noisy[..., ids]
    elif shape.q == "list":
        noisy, ids = jax.lax.top_k(noisy, shape.candidates)
    index = jax.random.categorical(next(keys), noisy, axis=-1)
    tokens = index
    if ids is not None:
        tokens = ids[index] if ids.ndim == 1 else jnp.take_along_axis(ids, index[..., None], -1)[..., 0]
    draft = Drafted(tokens.astype(jnp.int32), None if shape.q == "one_hot" else noisy, ids)
    result = {
        "target_logits": logits.astype(shape.dtype),
        "draft": draft,
        "verify_len": jax.random.randint(next(keys), (batch,), size // 2, size + 1),
        "temperature": temperature,
        "accept_uniforms": jax.random.uniform(next(keys), (batch, size)),
        "commit_uniforms": jax.random.uniform(next(keys), (batch, size + 1)),
    }
    if shape.cut:
        rounded = result["target_logits"].astype(jnp.float32)
        least = jax.lax.top_k(rounded, 20)[0][..., -1:]
        result["cut"] = reference.cut_of(rounded, jnp.where(rounded < least, -jnp.inf, rounded))
    return result


def bytes_moved(shape: Shape) -> int:
    """Returns the least traffic: every target logit and every entry of q once, one position of p and q per row again.

    B (K+2) V s, with s bytes per logit, plus B (K+1) V 4 for a full q or B K m 8 for a list (a one-hot q is nothing).
    """
    again = shape.batch * (shape.size + 2) * shape.vocab * jnp.dtype(shape.dtype).itemsize
    if shape.q == "full":
        return again + shape.batch * (shape.size + 1) * shape.vocab * 4
    if shape.q == "reduced":
        return again + shape.batch * (shape.size + 1) * (-(-shape.vocab // 3)) * 4
    return again + (shape.batch * shape.size * shape.candidates * 8 if shape.q == "list" else 0)
