"""Attention of a drafter's block to a cached context and to itself: checks, and the choice of an implementation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backend as backends
from pallas_kernels.block_attention import cpu, mosaic_gpu, reference, shapes, tpu, triton

KERNELS = {
    "tpu": tpu.block_attention,
    "mosaic_gpu": mosaic_gpu.block_attention,
    "triton": triton.block_attention,
    "cpu": cpu.block_attention,
}
_CAUSAL = ("cpu",)  # what takes a causal block
_VMEM_BYTES = 12 << 20  # of the 16 MiB that the compiler may use by default
_DTYPES = ("float32", "bfloat16")


def block_attention(
    queries: jax.Array,
    context_keys: jax.Array,
    context_values: jax.Array,
    visible: jax.Array,
    block_keys: jax.Array,
    block_values: jax.Array,
    scale: float | None = None,
    causal: bool = False,
    backend: str = "auto",
    interpret: Any = False,
) -> jax.Array:
    """Mixes values by attention: every query of a row sees the row's context and its whole block, in both directions.

    Softmax in float32 over context and block together. Head n reads group n // (N / G) (grouped-query attention). What
    lies in cache slots that are not seen has no influence, even if it is not a number. A kernel's derivatives are the
    reference's, computed anew. To serialise a program with the kernel for CPUs (`jax.export`), name it in
    `disabled_checks`, or set DSPARK_KERNELS=reference.

    Args:
      queries: [B, K, N, H].
      context_keys: [B, G, S, H].
      context_values: [B, G, S, H].
      visible: [B] int32; slots < visible are seen, none if it is 0.
      block_keys: [B, J, G, H].
      block_values: [B, J, G, H].
      scale: scores are multiplied by it; None = H ** -0.5.
      causal: query i sees keys 0..i of the block instead, and J = K. On CPUs alone there is a kernel for it.
      backend: "auto" or a name of `pallas_kernels.backend.BACKENDS`.
      interpret: interpret the kernel (True, or parameters of the interpreter for its platform), on any platform;
        mosaic_gpu takes `InterpretGPUParams` alone, with out_of_bounds_reads="uninitialized".

    Returns:
      [B, K, N, H] in the queries' dtype.

    Raises:
      KernelError: shapes that don't fit each other, a backend that isn't there.
    """
    arrays = (queries, context_keys, context_values, visible, block_keys, block_values)
    name = implementation(*arrays, causal=causal, backend=backend, interpret=interpret)
    scale = float(queries.shape[-1] ** -0.5 if scale is None else scale)
    plain = functools.partial(reference.block_attention, scale=scale, causal=causal)
    if name == "reference":
        return plain(*arrays)
    if name == "cpu":
        run = functools.partial(cpu.block_attention, scale=scale, causal=causal)
        # A program that is lowered for another platform than this process' has the plain form.
        kernel = functools.partial(jax.lax.platform_dependent, cpu=run, default=plain)
    else:
        kernel = functools.partial(KERNELS[name], scale=scale, interpret=interpret)
    return _with_gradient(kernel, plain)(*arrays)


def implementation(
    queries: jax.Array,
    context_keys: jax.Array,
    context_values: jax.Array,
    visible: jax.Array,
    block_keys: jax.Array,
    block_values: jax.Array,
    causal: bool = False,
    backend: str = "auto",
    interpret: Any = False,
) -> str:
    """Names the implementation that `block_attention` takes for these arguments, after checking them.

    For callers with a plain form of their own.

    Args:
      queries, context_keys, context_values, visible, block_keys, block_values, causal, backend, interpret: as
        of `block_attention`.

    Returns:
      a name of `pallas_kernels.backend.BACKENDS`.

    Raises:
      KernelError: as `block_attention`.
    """
    _check(queries, context_keys, context_values, visible, block_keys, block_values)
    batch, size, heads, dim = queries.shape
    groups, slots = context_keys.shape[1:3]
    rows, own, dtype = size * heads // groups, block_keys.shape[1], queries.dtype
    if causal and own != size:
        raise backends.KernelError(f"{size} queries and {own} keys of a causal block: use as many")
    kernels = tuple(name for name in KERNELS if not causal or name in _CAUSAL)
    known = all(isinstance(size, int) for size in (*queries.shape, *context_keys.shape, own))

    def refuses(name: str) -> str:
        found = {x.dtype.name for x in (queries, context_keys, context_values, block_keys, block_values)}
        if len(found) > 1 or dtype.name not in _DTYPES:
            return f"dtype {' beside '.join(sorted(found))}, not {' or '.join(_DTYPES)} throughout"
        if name == "tpu":
            if dim % 64:
                return f"head dimension {dim}, not a multiple of 64"
            if tpu.vmem_bytes(tpu.Tiles.for_shape(slots, dim, dtype), rows, own, dim, dtype) > _VMEM_BYTES:
                return f"{rows} queries of {dim} per group are too many"
        if name == "cpu":
            return cpu.refuses(rows, dim, dtype) if known else "sizes that are not known"
        if name == "mosaic_gpu":
            return mosaic_gpu.refuses(batch * groups, own, slots, dim, dtype)
        if name == "triton":
            if dim < 16 or dim & (dim - 1):
                return f"head dimension {dim}, not a power of two of at least 16"
            if own > 64 or not triton.Tiles.for_shape(batch * groups, rows, slots, dim, dtype).slots:
                return f"{rows} queries of {dim} in {dtype.name} per group over a block of {own} are too many"
        return ""

    # What the kernel for CPUs does not take, XLA does well.
    return backends.select("block_attention", kernels, backend, bool(interpret), refuses, _probe, quiet=("cpu",))


def _check(queries, context_keys, context_values, visible, block_keys, block_values) -> None:
    found = (queries.shape, context_keys.shape, block_keys.shape)
    if any(len(shape) != 4 for shape in found):
        raise backends.KernelError(f"queries, context_keys, block_keys of shapes {found}: four dimensions each")
    if any(0 in shape for shape in found):
        raise backends.KernelError(f"queries, context_keys, block_keys of shapes {found}: no size may be 0")
    batch, _, heads, dim = queries.shape
    groups, slots = context_keys.shape[1:3]
    expected = {
        "context_keys": (context_keys, (batch, groups, slots, dim)),
        "context_values": (context_values, (batch, groups, slots, dim)),
        "visible": (visible, (batch,)),
        "block_keys": (block_keys, (batch, block_keys.shape[1], groups, dim)),
        "block_values": (block_values, (batch, block_keys.shape[1], groups, dim)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise backends.KernelError(f"{name} has shape {array.shape}; with queries {queries.shape} use {shape}")
    if not jnp.issubdtype(visible.dtype, jnp.integer):
        raise backends.KernelError(f"visible is {visible.dtype}: use int32")
    if heads % groups:
        raise backends.KernelError(f"{heads} query heads over {groups} groups: use a multiple")


def _with_gradient(kernel: Callable, plain: Callable) -> Callable:
    """Returns a kernel whose derivatives are those of its plain form: kernels have none."""
    both = jax.custom_jvp(kernel)
    both.defjvp(lambda primals, tangents: (both(*primals), jax.jvp(plain, primals, tangents)[1]))
    return both


def _probe(name: str) -> bool:
    """Runs a kernel in its dtypes: several tiles, rows that see nothing and all, a cache that no tile divides, NaN."""
    cases = [(128, "bfloat16", 3e-2)]  # bfloat16: rounded weights
    cases.append((256, "bfloat16", 3e-2) if name == "mosaic_gpu" else (64, "float32", 1e-4))
    for dim, dtype, tolerance in cases[name == "cpu" :]:
        shape = shapes.Shape(batch=3, size=7, heads=4, groups=1, dim=dim, slots=1096, dtype=dtype)
        arguments = {**shapes.inputs(shape), "scale": dim**-0.5}
        seen = jnp.arange(shape.slots)[:, None] < arguments["visible"][:, None, None, None]
        for part in ("context_keys", "context_values"):
            arguments[part] = jnp.where(seen, arguments[part], jnp.nan)
        ours, plain = KERNELS[name](**arguments), reference.block_attention(**arguments)
        # Written so that NaN fails.
        if not jnp.abs(ours.astype(jnp.float32) - plain.astype(jnp.float32)).max() < tolerance:
            return False
    return True
