"""`markov_sample`: drafts a block left to right under a sequential head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backend as backends
from pallas_kernels.markov_sample import mosaic_gpu, reference, shapes, tpu, triton

KINDS = ("none", "vanilla", "gated", "rnn")
_KERNELS: dict[str, Any] = {"tpu": tpu, "mosaic_gpu": mosaic_gpu, "triton": triton}


def markov_sample(
    base_logits: jax.Array,
    anchor_ids: jax.Array,
    temperature: jax.Array,
    uniforms: jax.Array,
    *,
    kind: str,
    hidden: jax.Array | None = None,
    w1: jax.Array | None = None,
    w2: jax.Array | None = None,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    index: jax.Array | None = None,
    vocab: jax.Array | None = None,
    backend: str = "auto",
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Draws x_1..x_K, each from softmax((U_k + B_k) / temperature), where B_k depends on x_{k-1} (DSpark, section 3).

    B_k = W2 c_k, with the code c_k of the head:

      vanilla  c_k = W1[x_{k-1}]
      gated    c_k = W1[x_{k-1}] * sigmoid(weight [h_k; W1[x_{k-1}]] + bias)
      rnn      g, c, o = weight [s; W1[x_{k-1}]; h_k] + bias; s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), s_0 = 0;
               c_k = tanh(o)
      none     B_k = 0

    float32 throughout, but c_k is rounded to W2's dtype for their product, which accumulates in float32. Every token
    takes one uniform, by the inverse CDF (`sampling.sample_weights`): implementations draw the same tokens but where a
    uniform lies on a boundary of the CDF, to float32 rounding. A row of NaN draws some token of the vocabulary.

    Args:
      base_logits: U, [B, K, m] of a position's candidates, or [B, K, V'] of the whole draft vocabulary; float32.
      anchor_ids: x_0, [B] int32 target ids.
      temperature: [B] float32; 0 takes the first maximum and leaves the logits undivided.
      uniforms: [B, K] float32 in [0, 1).
      kind: the head, "none", "vanilla", "gated" or "rnn".
      hidden: h, [B, K, D] (gated, rnn).
      w1: [V, R], a row per target token (all but none).
      w2: [V', R], a row per entry of the draft vocabulary, of w1's dtype (all but none).
      weight: [R, D + R] (gated) or [3R, 2R + D] (rnn), out by in.
      bias: [R] or [3R].
      index: [B, K, m] int32, the candidates as entries of the draft vocabulary; None for the whole of it.
      vocab: [V'] int32 target ids of its entries; None where they are the target's.
      backend: which implementation, see `backend.select`.
      interpret: run the kernel in Pallas' interpreter (True, or an interpreter's parameters).

    Returns:
      target ids [B, K] int32; the logits that they were drawn from, temperature included, shaped as `base_logits`.

    Raises:
      KernelError: arguments that don't fit each other, or a backend that isn't there.
    """
    _check(base_logits, anchor_ids, temperature, uniforms, kind, hidden, w1, w2, weight, bias, index, vocab)
    name = pick(base_logits, kind=kind, w1=w1, index=index, backend=backend, interpret=interpret)
    arguments: dict[str, Any] = {
        "kind": kind,
        "hidden": hidden,
        "w1": w1,
        "w2": w2,
        "weight": weight,
        "bias": bias,
        "index": index,
        "vocab": vocab,
    }
    positional = (base_logits, anchor_ids, temperature, uniforms)
    if name != "reference":
        return _KERNELS[name].markov_sample(*positional, **arguments, interpret=interpret)
    return reference.markov_sample(*positional, **arguments)


def pick(
    base_logits: jax.Array,
    *,
    kind: str,
    w1: jax.Array | None = None,
    index: jax.Array | None = None,
    backend: str = "auto",
    interpret: Any = False,
) -> str:
    """Names the implementation that `markov_sample` would run; for callers that have a loop of their own.

    Args:
      base_logits: as there; only shapes and dtypes count.
      kind: as there.
      w1: as there.
      index: as there.
      backend: as there.
      interpret: as there.

    Returns:
      a name of `backend.BACKENDS`.

    Raises:
      KernelError: a backend that isn't there.
    """
    batch, steps, size = base_logits.shape
    (vocab_size, rank), itemsize = ((0, 0), 4) if w1 is None else (w1.shape, w1.dtype.itemsize)

    def refuses(name: str) -> str:
        if name == "tpu":
            return tpu.refuses(kind, batch, size, index is not None, rank, vocab_size, itemsize)
        candidates = None if index is None else size
        if name == "mosaic_gpu":
            return mosaic_gpu.refuses(kind, steps, candidates, rank, itemsize)
        return triton.refuses(kind, candidates, rank)

    return backends.select("markov_sample", tuple(_KERNELS), backend, bool(interpret), refuses=refuses, probe=_probe)


def _probe(name: str) -> bool:
    """Compares a kernel with the reference: every form it has, on a head that uses all it knows."""
    kernel = _KERNELS[name].markov_sample
    for case in shapes.PROBES[name]:
        arguments = shapes.inputs(case)
        tokens, logits = jax.jit(lambda arguments, kind=case.kind: kernel(**arguments, kind=kind))(
            {name: value for name, value in arguments.items() if name != "kind"}
        )
        expected_tokens, expected_logits = reference.markov_sample(**arguments)
        if not (tokens == expected_tokens).all() or not jnp.allclose(logits, expected_logits, atol=0.02):
            return False
    return True


def _check(base_logits, anchor_ids, temperature, uniforms, kind, hidden, w1, w2, weight, bias, index, vocab):
    """Raises KernelError at the first argument whose shape doesn't fit."""
    if kind not in KINDS:
        raise backends.KernelError(f"kind = {kind!r}: use {', '.join(KINDS)}")
    if base_logits.ndim != 3:
        raise backends.KernelError(f"base_logits {base_logits.shape}: use [B, K, m] or [B, K, V']")
    batch, steps, size = base_logits.shape
    expected: dict[str, tuple[jax.Array | None, tuple[int, ...]]] = {
        "anchor_ids": (anchor_ids, (batch,)),
        "temperature": (temperature, (batch,)),
        "uniforms": (uniforms, (batch, steps)),
    }
    if index is not None:
        expected["index"] = (index, (batch, steps, size))
    draft_size = size if index is None else None
    if vocab is not None:
        draft_size = len(vocab) if index is not None else size
        expected["vocab"] = (vocab, (draft_size,))
    if kind != "none":
        if w1 is None or w1.ndim != 2:
            raise backends.KernelError(f"w1 {_shape(w1)}: a {kind} head needs [V, R]")
        if draft_size is None:
            draft_size = len(w1)
        rank = w1.shape[1]
        expected["w2"] = (w2, (draft_size, rank))
        if w2 is not None and w2.dtype != w1.dtype:
            raise backends.KernelError(f"w2 is {w2.dtype}, w1 is {w1.dtype}: use one dtype")
    if kind in ("gated", "rnn"):
        if hidden is None or hidden.ndim != 3:
            raise backends.KernelError(f"hidden {_shape(hidden)}: a {kind} head needs [B, K, D]")
        width = hidden.shape[2]
        outs, ins = (rank, width + rank) if kind == "gated" else (3 * rank, 2 * rank + width)
        expected |= {
            "hidden": (hidden, (batch, steps, width)),
            "weight": (weight, (outs, ins)),
            "bias": (bias, (outs,)),
        }
    for name, (array, shape) in expected.items():
        if array is None or array.shape != shape:
            raise backends.KernelError(f"{name} {_shape(array)}: the other arguments need {list(shape)}")


def _shape(array: jax.Array | None) -> str:
    return "missing" if array is None else str(list(array.shape))
