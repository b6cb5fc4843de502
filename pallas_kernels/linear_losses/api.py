"""The op: arguments, checks, and which implementation runs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import backend as backends
from pallas_kernels.backend import KernelError
from pallas_kernels.linear_losses import mosaic_gpu, reference, shapes, tpu, triton

_KERNELS = {"tpu": tpu.linear_losses, "mosaic_gpu": mosaic_gpu.linear_losses, "triton": triton.linear_losses}


def linear_losses(
    hidden: jax.Array,
    target_hidden: jax.Array,
    head: jax.Array,
    log_normalizer: jax.Array,
    label: jax.Array,
    code: jax.Array | None = None,
    w2: jax.Array | None = None,
    softcap: float = 0.0,
    backend: str = "auto",
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Computes cross-entropy and L1 distance of a drafter's distribution q, per position.

      z = cap(head @ hidden) + w2 @ code, q = softmax(z), cap(x) = softcap tanh(x / softcap)
      p = exp(cap(head @ target_hidden) - log_normalizer)
      ce = -log q[label]                                        0 where label = -1
      distance = sum_v |q_v - p_v| + max(1 - sum_v p_v, 0)      over the head's rows

    Differentiable with respect to hidden, code and w2; head and target are constants (their gradient is zero). At a tie
    q_v = p_v the distance has gradient 0.

    Args:
      hidden: [n, D] float32 or bfloat16, the drafter's hidden states.
      target_hidden: [n, D], the target's, of the same dtype.
      head: [V', D], the shared head, its rows reduced to the draft vocabulary; of the same dtype.
      log_normalizer: [n], the target's logsumexp over its whole vocabulary.
      label: [n] integers, rows of the head, -1 = a label outside of it.
      code: [n, R], the sequential head's low-rank code, or None.
      w2: [V', R] of the same dtype as `code`, or None.
      softcap: bounds the base logits and the target's; 0 = no bound.
      backend: "auto", or a name of `backend.BACKENDS`.
      interpret: run the kernel in an interpreter (tests); mosaic_gpu takes `InterpretGPUParams` alone.

    Returns:
      ce [n] and distance [n], float32.

    Raises:
      KernelError: arguments that don't fit each other, or a backend that isn't there.
    """
    chosen = choose(hidden, target_hidden, head, log_normalizer, label, code, w2, backend, interpret)
    run = reference.linear_losses
    if chosen != "reference":
        run = functools.partial(_KERNELS[chosen], interpret=interpret)
    return run(hidden, target_hidden, head, log_normalizer, label, code, w2, softcap)


def choose(
    hidden: jax.Array,
    target_hidden: jax.Array,
    head: jax.Array,
    log_normalizer: jax.Array,
    label: jax.Array,
    code: jax.Array | None = None,
    w2: jax.Array | None = None,
    backend: str = "auto",
    interpret=False,
) -> str:
    """Checks the arguments and returns the implementation that `linear_losses` would run: a name of BACKENDS.

    For callers with a path of their own beside the kernels.
    """
    _check(hidden, target_hidden, head, log_normalizer, label, code, w2)
    rank = 0 if code is None else code.shape[1]
    bias_dtype = None if w2 is None else w2.dtype
    refuses = functools.partial(_refuses, hidden.shape[0], *head.shape, rank, head.dtype, bias_dtype=bias_dtype)
    return backends.select("linear_losses", tuple(_KERNELS), backend, bool(interpret), refuses, _probe)


def _check(hidden, target_hidden, head, log_normalizer, label, code, w2) -> None:
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1]:
        raise KernelError(f"hidden {hidden.shape}, head {head.shape}: give [n, D] and [V', D]")
    if target_hidden.shape != hidden.shape:
        raise KernelError(f"target_hidden {target_hidden.shape}: give it the shape of hidden, {hidden.shape}")
    if not hidden.size or not head.size:
        raise KernelError(f"hidden {hidden.shape}, head {head.shape}: give at least one position and one token")
    rows = hidden.shape[:1]
    if log_normalizer.shape != rows or label.shape != rows:
        raise KernelError(f"log_normalizer {log_normalizer.shape}, label {label.shape}: give one per position, {rows}")
    if not jnp.issubdtype(label.dtype, jnp.integer):
        raise KernelError(f"label is {label.dtype}: give integers")
    if not hidden.dtype == target_hidden.dtype == head.dtype:
        kinds = f"hidden {hidden.dtype}, target_hidden {target_hidden.dtype}, head {head.dtype}"
        raise KernelError(f"{kinds}: cast them to one dtype")
    if (code is None) != (w2 is None):
        raise KernelError("code without w2, or w2 without code: give both, or neither")
    if code is not None and w2 is not None:
        if code.ndim != 2 or code.shape[0] != rows[0] or not code.size or w2.shape != (head.shape[0], code.shape[1]):
            raise KernelError(
                f"code {code.shape}, w2 {w2.shape}: give [n, R] and [V', R], n, V' = {rows + head.shape[:1]}"
            )
        if code.dtype != w2.dtype:
            raise KernelError(f"code {code.dtype}, w2 {w2.dtype}: cast them to one dtype")


def _refuses(
    count: int, vocab: int, width: int, rank: int, dtype: jnp.dtype, name: str, bias_dtype: jnp.dtype | None = None
) -> str:
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"{dtype} (float32 and bfloat16 only)"
    if name == "tpu" and tpu.Tiles.for_shape(count, vocab, width, rank, dtype.itemsize) is None:
        return f"D = {width}, R = {rank} in {dtype}: not even the smallest tiles fit into VMEM"
    if name == "mosaic_gpu":
        return mosaic_gpu.refuses(vocab, width, rank, dtype, bias_dtype)
    if name == "triton" and rank > triton.MAX_RANK:
        return f"R = {rank} (at most {triton.MAX_RANK})"
    return ""


def _probe(name: str) -> bool:
    """Runs small cases with their gradients: one in float32 if the kernel takes it, one in bfloat16."""
    for shape in shapes.PROBES:
        dtype = jnp.dtype(shape.dtype)
        if _refuses(shape.count, shape.vocab, shape.width, shape.rank, dtype, name):
            continue
        # In bfloat16 the gradients of the logits are rounded before their products, and the results after them.
        if not _reproduces(name, shape, 1e-3 if dtype == jnp.float32 else 2**-6):
            return False
    return True


def _reproduces(name: str, shape: shapes.Shape, tolerance: float) -> bool:
    arguments = shapes.inputs(shape)
    trained = {key: arguments.pop(key) for key in ("hidden", "code", "w2")}

    def total(trained, run):
        ce, distance = run(**trained, **arguments)
        return ce.sum() + distance.sum()

    ours, expected = (jax.value_and_grad(total)(trained, run) for run in (_KERNELS[name], reference.linear_losses))
    close = lambda a, b: jnp.max(jnp.abs(a - b)) <= tolerance * jnp.max(jnp.abs(b))  # noqa: E731
    return all(map(bool, jax.tree.leaves(jax.tree.map(close, ours, expected))))
