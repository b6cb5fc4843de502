"""Do the TPU kernels compile? Every op at its real sizes, by the TPU's own compiler, without a TPU.

Lowering (which the tests do) ends at Mosaic's input; what its compiler refuses shows here. libtpu compiles for a chip
that need not be there:

  pip install libtpu
  python -m pallas_kernels.compile_for_tpu --topology v5e:2x2

Prints a line per op and shape, and exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from pallas_kernels.bench import OPS, split


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns how many shapes did not compile."""
    parser = argparse.ArgumentParser(description="Compile every kernel for a TPU that need not be there.")
    parser.add_argument("--op", choices=OPS, help="one op; default: all")
    parser.add_argument("--topology", default="v5e:2x2", help="chip and mesh, as libtpu names them (%(default)s)")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu is not to look for the machine it would run on
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    try:
        device = topologies.get_topology_desc(arguments.topology, platform="tpu").devices[0]
    except Exception as error:
        raise SystemExit(f"no compiler for {arguments.topology!r} (pip install libtpu): {error}") from None
    print(f"compiling for {device.device_kind} with jax {jax.__version__}")
    failed = 0
    for op in OPS if arguments.op is None else (arguments.op,):
        function = getattr(importlib.import_module(f"pallas_kernels.{op}.api"), op)
        shapes = importlib.import_module(f"pallas_kernels.{op}.shapes")
        for shape in shapes.REAL:
            arrays, static = _abstract(functools.partial(shapes.inputs, shape), SingleDeviceSharding(device))
            compiled = jax.jit(functools.partial(function, **static, backend="tpu"))
            try:
                lowered = compiled.lower(**arrays)
                if "tpu_custom_call" not in lowered.as_text():
                    raise NotImplementedError("the kernel refuses this shape: the reference would run")
                lowered.compile()
            except Exception as error:
                failed += 1
                print(f"FAILED  {op}  {shape}\n{error}")
            else:
                print(f"ok      {op}  {shape}")
    return failed


def _abstract(inputs: Any, sharding: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits an op's inputs, without making them, into arrays (shapes on a device) and what is static."""
    import jax

    static: dict[str, Any] = {}

    def arrays():
        found, others = split(inputs())
        static.update(others)
        return found

    def place(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(place, jax.eval_shape(arrays)), static


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
