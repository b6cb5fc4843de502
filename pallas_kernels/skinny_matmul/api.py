"""A weight matrix times the few columns of a decoding step: checks, and the choice of an implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backend as backends
from pallas_kernels.skinny_matmul import cpu, reference, shapes

KERNELS = {"cpu": cpu.skinny_matmul}
_LEAST_WEIGHTS = 1 << 16  # smaller ones lie in the cache, where there is nothing to gain


def skinny_matmul(weight: jax.Array, x: jax.Array, backend: str = "auto") -> jax.Array:
    """Multiplies a weight matrix by columns, one per token.

    For a CPU, where a decoding step is bound by reading the weights: the kernel reads them once for up to 8 columns.
    What "auto" gives it is float32 of that width; everything else is the reference's, without a word. Derivatives are
    the reference's. Under `vmap` the kernel runs once per example. To serialise a program with it (`jax.export`), name
    it in `disabled_checks`, or set DSPARK_KERNELS=reference.

    Args:
      weight: [out, in].
      x: [in, n].
      backend: "auto" or a name of `pallas_kernels.backend.BACKENDS`.

    Returns:
      [out, n].

    Raises:
      KernelError: shapes that don't fit each other, a backend that isn't there.
    """
    if implementation(weight, x, backend) == "reference":
        return reference.skinny_matmul(weight, x)
    return _by_kernel(weight, x)


def implementation(weight: jax.Array, x: jax.Array, backend: str = "auto") -> str:
    """Names the implementation that `skinny_matmul` takes for these arguments, after checking them.

    Args:
      weight, x, backend: as of `skinny_matmul`.

    Returns:
      a name of `pallas_kernels.backend.BACKENDS`.

    Raises:
      KernelError: as `skinny_matmul`.
    """
    if weight.ndim != 2 or x.ndim != 2 or weight.shape[1] != x.shape[0]:
        raise backends.KernelError(f"weight {weight.shape} and x {x.shape}: use [out, in] and [in, n]")
    refusal = _refuses(weight, x)
    if not refusal and backend == "auto" and weight.size < _LEAST_WEIGHTS:
        refusal = "a small matrix"
    return backends.select(
        "skinny_matmul", tuple(KERNELS), backend, False, lambda name: refusal, _probe, quiet=tuple(KERNELS)
    )


def _refuses(weight: jax.Array, x: jax.Array) -> str:
    if weight.dtype != jnp.float32 or x.dtype != jnp.float32:
        return f"dtypes {weight.dtype} and {x.dtype}, not float32"
    if not all(isinstance(size, int) for size in (*weight.shape, *x.shape)):
        return f"weight {weight.shape} and x {x.shape}: sizes that are not known"
    if not 1 <= x.shape[1] <= cpu.MOST_COLUMNS or not weight.size:
        return f"weight {weight.shape} and x {x.shape}, not 1 to {cpu.MOST_COLUMNS} columns"
    return ""


@jax.custom_jvp
def _by_kernel(weight: jax.Array, x: jax.Array) -> jax.Array:
    # A program that is lowered for another platform than this process' has the plain product.
    return jax.lax.platform_dependent(weight, x, cpu=cpu.skinny_matmul, default=reference.skinny_matmul)


@_by_kernel.defjvp
def _by_kernel_jvp(primals, tangents):
    (weight, x), (weight_dot, x_dot) = primals, tangents
    return _by_kernel(weight, x), reference.skinny_matmul(weight_dot, x) + reference.skinny_matmul(weight, x_dot)


def _probe(name: str) -> bool:
    """Runs a kernel on the small shapes."""
    for shape in shapes.SHAPES:
        arguments = shapes.inputs(shape)
        error = jnp.abs(KERNELS[name](**arguments) - reference.skinny_matmul(**arguments)).max()
        if not error < 1e-3:  # written so that NaN fails
            return False
    return True
