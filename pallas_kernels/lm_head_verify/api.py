"""The op `lm_head_verify`: `verify` from hidden states and the LM head, without logits in memory."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backend as backends
from pallas_kernels.backend import KernelError
from pallas_kernels.lm_head_verify import mosaic_gpu, reference, shapes, tpu, triton
from pallas_kernels.precision import product_precision
from pallas_kernels.verify import api as verify_api
from pallas_kernels.verify import fused
from pallas_kernels.verify import reference as verify_reference
from pallas_kernels.verify.reference import Proposal
from pallas_kernels.verify.tiles import Tiles, combine

ARGUMENTS = (  # of every implementation, in this order
    "hidden",
    "head",
    "draft",
    "verify_len",
    "temperature",
    "accept_uniforms",
    "commit_uniforms",
    "verifier",
    "softcap",
)
_KERNELS = {"tpu": tpu, "mosaic_gpu": mosaic_gpu, "triton": triton}


def lm_head_verify(
    hidden: jax.Array,
    head: jax.Array,
    draft: Proposal,
    verify_len: jax.Array,
    temperature: jax.Array,
    accept_uniforms: jax.Array,
    commit_uniforms: jax.Array,
    verifier: str = "token",
    softcap: float = 0.0,
    backend: str = "auto",
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Accepts a prefix of each row's draft block and draws the token after it, from the target's last hidden states.

    The same as `verify` of logits head @ hidden. Top-k, top-p and min-p are not for this op: where they cut is not
    known before all logits are. With a full q the head is read a second time, for the one position that the added
    token is drawn at; with a list or a one-hot q only the rows of one tile are.

    Args:
      hidden: [B, L+1, D] float32 or bfloat16, what the LM head reads.
      head: [V, D], of the same dtype.
      draft, verify_len, temperature, accept_uniforms, commit_uniforms, verifier: as of `verify`.
      softcap: logits are softcap tanh(x / softcap) if above 0.
      backend: a name of `backend.BACKENDS`, or "auto".
      tiles: rows and vocabulary of a tile; None: the kernel's default for the shape.
      interpret: interpret the kernel (True, or parameters of the interpreter for its platform), on any platform;
        mosaic_gpu takes `InterpretGPUParams` alone.

    Returns:
      accepted [B] int32 and the added token [B] int32, as `verify`.

    Raises:
      KernelError: shapes that don't fit; tokens that can't have been drawn, where they are known before the launch.
    """
    if hidden.ndim != 3 or head.ndim != 2 or hidden.shape[2] != head.shape[1]:
        raise KernelError(f"hidden has shape {hidden.shape}, head {head.shape}: give [B, L+1, D] and [V, D]")
    if hidden.dtype != head.dtype:
        raise KernelError(f"hidden is {hidden.dtype}, head {head.dtype}: cast them to one dtype")
    if softcap < 0:
        raise KernelError(f"softcap = {softcap}: use 0 (none) or more")
    logits = jax.ShapeDtypeStruct((*hidden.shape[:2], head.shape[0]), jnp.float32)
    verify_api.check(logits, draft, verify_len, temperature, accept_uniforms, commit_uniforms, verifier, None)

    def refuses(name: str) -> str:
        if head.dtype not in (jnp.float32, jnp.bfloat16):
            return f"head is {head.dtype}, not float32 or bfloat16"
        if name == "mosaic_gpu":
            return mosaic_gpu.refuses(head.shape[0], head.shape[1], head.dtype)
        rows = hidden.shape[0] * hidden.shape[1]
        if _KERNELS[name].default_tiles(rows, *head.shape, head.dtype.itemsize) is None:
            return f"a head of {head.shape} takes too much of a core's memory"
        return ""

    name = backends.select("lm_head_verify", tuple(_KERNELS), backend, bool(interpret), refuses, _probe)
    arguments = (
        hidden, head, draft, verify_len, temperature, accept_uniforms, commit_uniforms, verifier, softcap
    )  # fmt: skip
    if name == "reference":
        return _verify_reference(*arguments)
    return _verify_fused(name, tiles, interpret, *arguments)


_verify_reference = jax.jit(reference.verify, static_argnums=(7, 8))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 10, 11))
def _verify_fused(
    name,
    tiles,
    interpret,
    hidden,
    head,
    draft,
    verify_len,
    temperature,
    accept_uniforms,
    commit_uniforms,
    verifier,
    softcap,
):
    batch, width, depth = hidden.shape
    vocab, kernel = head.shape[0], _KERNELS[name]
    tiles = tiles or kernel.default_tiles(batch * width, vocab, depth, head.dtype.itemsize)
    by = jnp.where(temperature > 0, temperature, 1.0)
    per_row = jnp.broadcast_to(by[:, None], (batch, width)).reshape(-1)
    stats = combine(kernel.stats(hidden.reshape(-1, depth), head, per_row, softcap, tiles, interpret))
    full = None
    if draft.logits is not None and draft.ids is None:
        full = fused.FullDraft(draft.logits, jax.nn.logsumexp(draft.logits, axis=-1))

    def at(ids, positions=None):
        if positions is None:
            here, scale = hidden[:, : ids.shape[1]], by[:, None, None]
        else:
            here, scale = verify_reference.at(hidden, positions), by[:, None]
        exact = product_precision(head.dtype)
        logits = jnp.einsum("...d,...md->...m", here, head[ids], preferred_element_type=jnp.float32, precision=exact)
        return reference.cap(logits, softcap) / scale

    def row(positions):
        return reference.logits_of(verify_reference.at(hidden, positions), head, softcap) / by[:, None]

    return fused.verify(
        stats,
        fused.Source(at, row),
        full,
        vocab,
        tiles.vocab,
        draft,
        verify_len,
        temperature,
        accept_uniforms,
        commit_uniforms,
        verifier,
    )


def _probe(name: str) -> bool:
    """Whether a kernel accepts and draws as the reference does."""
    for shape in shapes.PROBES:
        if name == "mosaic_gpu" and mosaic_gpu.refuses(shape.vocab, shape.width, jnp.dtype(shape.dtype)):
            continue
        inputs = shapes.inputs(shape)
        arguments = tuple(inputs[key] for key in ARGUMENTS)
        found = _verify_fused(name, None, False, *arguments)
        if not all(bool(jnp.array_equal(a, b)) for a, b in zip(_verify_reference(*arguments), found)):
            return False
    return True
