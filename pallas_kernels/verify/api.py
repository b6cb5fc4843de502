"""The op `verify`: which draft tokens are kept, and which token is added, from logits that are read once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from pallas_kernels import backend as backends
from pallas_kernels.backend import KernelError
from pallas_kernels.verify import fused, mosaic_gpu, reference, shapes, tpu, triton
from pallas_kernels.verify.reference import Cut, Proposal
from pallas_kernels.verify.tiles import RowStats, Tiles, combine

VERIFIERS = ("token", "block")
ARGUMENTS = (  # of every implementation, in this order
    "target_logits",
    "draft",
    "verify_len",
    "temperature",
    "accept_uniforms",
    "commit_uniforms",
    "verifier",
    "cut",
)
_KERNELS = {"tpu": tpu, "mosaic_gpu": mosaic_gpu, "triton": triton}


def verify(
    target_logits: jax.Array,
    draft: Proposal,
    verify_len: jax.Array,
    temperature: jax.Array,
    accept_uniforms: jax.Array,
    commit_uniforms: jax.Array,
    verifier: str = "token",
    cut: Cut | None = None,
    backend: str = "auto",
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Accepts a prefix of each row's draft block and draws the token after it.

    The committed tokens are distributed as the target's, whatever q is (`reference`: rejection sampling, Leviathan et
    al., 2023; block verification, Sun et al., 2025). Every backend draws the same tokens from the same uniforms, up to
    the rounding of float32.

    Args:
      target_logits: [B, L+1, V] float32 or bfloat16; position j is the target's distribution for draft token j
        (0-based), position L the one after the block.
      draft: a block of at least L tokens and its q (`reference.Proposal`): full, on a reduced vocabulary, on a list of
        candidates per position, or one-hot.
      verify_len: [B] int32 in 0..L, how many draft tokens count.
      temperature: [B] float32; 0 = greedy. The logits are divided by it here.
      accept_uniforms: [B, L] float32 in [0, 1).
      commit_uniforms: [B, L+1] float32 in [0, 1), for the added token at each place it could have.
      verifier: "token" or "block".
      cut: what top-k, top-p and min-p leave of each position (None: everything); greedy rows ignore it.
      backend: a name of `backend.BACKENDS`, or "auto".
      tiles: how rows are cut; None: the kernel's default for the shape.
      interpret: interpret the kernel (True, or parameters of the interpreter for its platform), on any platform;
        mosaic_gpu takes `InterpretGPUParams` alone.

    Returns:
      accepted [B] int32 in 0..verify_len, and the added token [B] int32: -1 where the logits are no distribution (NaN,
      infinite, or all -inf), which also ends what can be accepted.

    Raises:
      KernelError: shapes that don't fit; a draft token, known before the launch, outside of the vocabulary or of its
        list of candidates.
    """
    check(target_logits, draft, verify_len, temperature, accept_uniforms, commit_uniforms, verifier, cut)
    name = implementation(target_logits, draft, backend, bool(interpret))
    arguments = (target_logits, draft, verify_len, temperature, accept_uniforms, commit_uniforms, verifier, cut)
    if name == "reference":
        return _verify_reference(*arguments)
    return _verify_fused(name, tiles, interpret, *arguments)


def implementation(target_logits: Any, draft: Proposal, backend: str = "auto", interpret: bool = False) -> str:
    """Returns the name of the implementation that `verify` would run; arguments as there (shapes will do)."""

    def refuses(name: str) -> str:
        for what, array in (("target_logits", target_logits), ("draft.logits", draft.logits)):
            if array is not None and array.dtype not in (jnp.float32, jnp.bfloat16):
                return f"{what} are {array.dtype}, not float32 or bfloat16"
        if name == "tpu":
            vocab = target_logits.shape[-1]
            if tpu.vmem_bytes(vocab, 4, tpu.default_tiles(16, vocab)) > 14 * 2**20:
                return f"a vocabulary of {vocab} tokens takes too much of a core's memory"
        if name == "mosaic_gpu":
            full = [draft.logits] if draft.logits is not None and draft.ids is None else []
            for array in (target_logits, *full):
                if reason := mosaic_gpu.refuses(array.shape[-1], array.dtype.itemsize):
                    return reason
        return ""

    return backends.select("verify", tuple(_KERNELS), backend, interpret, refuses, _probe)


def row_stats(
    name: str,
    logits: jax.Array,
    temperature: jax.Array,
    value: jax.Array,
    index: jax.Array,
    tiles: Tiles,
    interpret: Any,
) -> RowStats:
    """Statistics of rows of logits by a kernel: [n, V] and [n] each (`tpu.stats`)."""
    return combine(_KERNELS[name].stats(logits, temperature, value, index, tiles, interpret))


_verify_reference = jax.jit(reference.verify, static_argnums=6)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 9))
def _verify_fused(
    name,
    tiles,
    interpret,
    target_logits,
    draft,
    verify_len,
    temperature,
    accept_uniforms,
    commit_uniforms,
    verifier,
    cut,
):
    batch, width, vocab = target_logits.shape
    tiles = tiles or _KERNELS[name].default_tiles(batch * width, vocab)
    by = jnp.where(temperature > 0, temperature, 1.0)
    cut = reference.no_cut(batch, width) if cut is None else cut
    cut = Cut(jnp.where((temperature > 0)[:, None], cut.value, -jnp.inf), cut.index)
    per_row = lambda a: jnp.broadcast_to(a[:, None], (batch, width)).reshape(-1)  # noqa: E731
    stats = row_stats(
        name,
        target_logits.reshape(-1, vocab),
        per_row(by),
        cut.value.reshape(-1),
        cut.index.reshape(-1),
        tiles,
        interpret,
    )
    full = None
    if draft.logits is not None and draft.ids is None:
        flat = draft.logits.reshape(-1, draft.logits.shape[-1])
        keep = reference.no_cut(1, len(flat))
        of_q = row_stats(name, flat, jnp.ones(len(flat)), keep.value[0], keep.index[0], tiles, interpret)
        full = fused.FullDraft(draft.logits, (of_q.maximum + jnp.log(of_q.total)).reshape(batch, -1))
    rows = jnp.arange(batch)

    def at(ids, positions=None):
        if positions is None:
            size = ids.shape[1]
            logits, value, index = target_logits[:, :size], cut.value[:, :size, None], cut.index[:, :size, None]
            picked, scale = jnp.take_along_axis(logits, ids, axis=-1), by[:, None, None]
        else:
            picked = target_logits[rows[:, None], positions[:, None], ids]
            value, index = reference.at(cut.value, positions)[:, None], reference.at(cut.index, positions)[:, None]
            scale = by[:, None]
        picked = picked.astype(jnp.float32)
        return jnp.where(reference.is_dropped(picked, ids, value, index), -jnp.inf, picked / scale)

    def row(positions):
        ids = jnp.arange(vocab, dtype=jnp.int32)
        logits = target_logits[rows, positions].astype(jnp.float32)
        value, index = reference.at(cut.value, positions)[:, None], reference.at(cut.index, positions)[:, None]
        return jnp.where(reference.is_dropped(logits, ids, value, index), -jnp.inf, logits / by[:, None])

    source = fused.Source(at, row)
    return fused.verify(
        stats,
        source,
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
        inputs = {"cut": None} | shapes.inputs(shape)
        arguments = tuple(inputs[key] for key in ARGUMENTS)
        found = _verify_fused(name, None, False, *arguments)
        if not all(bool(jnp.array_equal(a, b)) for a, b in zip(_verify_reference(*arguments), found)):
            return False
    return True


def check(target_logits, draft, verify_len, temperature, accept_uniforms, commit_uniforms, verifier, cut) -> None:
    """Raises KernelError for arguments of `verify` that don't fit; of the logits only shape and dtype count."""
    if verifier not in VERIFIERS:
        raise KernelError(f"verifier = {verifier!r}: use {' or '.join(VERIFIERS)}")
    if target_logits.ndim != 3 or 0 in target_logits.shape:
        raise KernelError(f"target_logits have shape {target_logits.shape}: give [B, L+1, V], none of them 0")
    batch, width, vocab = target_logits.shape
    size = width - 1
    wanted = {
        "verify_len": (verify_len, (batch,)),
        "temperature": (temperature, (batch,)),
        "accept_uniforms": (accept_uniforms, (batch, size)),
        "commit_uniforms": (commit_uniforms, (batch, width)),
    }
    if cut is not None:
        wanted |= {"cut.value": (cut.value, (batch, width)), "cut.index": (cut.index, (batch, width))}
    for what, (array, shape) in wanted.items():
        if array.shape != shape:
            raise KernelError(f"{what} has shape {array.shape}; target_logits {target_logits.shape} ask for {shape}")
    tokens, logits, ids = draft.token_ids, draft.logits, draft.ids
    if tokens.ndim != 2 or tokens.shape[0] != batch or tokens.shape[1] < size:
        raise KernelError(f"draft.token_ids have shape {tokens.shape}: give [{batch}, {size} or more]")
    if logits is not None:
        listed = vocab if ids is None else ids.shape[-1]
        if logits.shape != (*tokens.shape, listed):
            raise KernelError(f"draft.logits have shape {logits.shape}: give {(*tokens.shape, listed)}")
        if ids is not None and ids.ndim == 3 and ids.shape != logits.shape:
            raise KernelError(f"draft.ids have shape {ids.shape}: give [V'] or {logits.shape}, as draft.logits")
    elif ids is not None:
        raise KernelError("draft.ids without draft.logits: a one-hot proposal has neither")
    if not any(isinstance(array, Tracer) for array in (tokens, ids)):
        _check_tokens(tokens[:, :size], None if ids is None else ids, vocab)


def _check_tokens(tokens: jax.Array, ids: jax.Array | None, vocab: int) -> None:
    """Raises KernelError for draft tokens that could not have been drawn; values, so only outside of a trace."""
    known = (tokens >= 0) & (tokens < vocab)
    where = f"the vocabulary of {vocab} tokens"
    if ids is not None:
        where = "the draft vocabulary" if ids.ndim == 1 else "the candidates of its position"
        known &= (tokens[..., None] == (ids if ids.ndim == 1 else ids[:, : tokens.shape[1]])).any(-1)
    if not bool(known.all()):
        row, place = (int(i) for i in jnp.argwhere(~known)[0])
        raise KernelError(
            f"draft token {int(tokens[row, place])} of row {row}, place {place}, is not in {where}: it can't have been"
            " drawn; check the map from draft ids to target ids"
        )
