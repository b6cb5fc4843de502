"""Time every op: its kernels beside plain XLA.

  python -m pallas_kernels.bench [--op verify ...] [--backend tpu ...] [--repeats 30] [--small]

Question: is a kernel faster than what XLA makes of the same maths, at which sizes, and how far is either from the least
time that its traffic takes?

Method: the reference under jit is plain XLA. It and every kernel that this platform runs share one process and the same
arrays: each is compiled and warmed up, then all are timed in turn, repeat by repeat in random order, so that noise hits
all alike. A sample is as many calls in a row as take about 10 ms, dispatched together and waited for once, so that a
device's queue never runs dry; medians and quartiles are over the samples. The share of the bandwidth is the least
traffic of the op (`bytes_moved` of its shapes) over the time, as a share of what x + 1 on a large array reaches
on this device; arrays that fit a cache can exceed it. The ratio is the reference's median over the implementation's:
above 1 the kernel is faster. A shape whose arguments would take more than a quarter of the device's memory (2 GiB where
jax does not know it) is skipped; a kernel that refuses a shape or does not compile is named and left out.

Prints a table for people; the last line is one JSON object. `--small` takes the tests' shapes: seconds on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backend import BACKENDS, platform_kernels

OPS = ("verify", "lm_head_verify", "markov_sample", "block_attention", "linear_losses", "skinny_matmul")
KERNELS = tuple(name for name in BACKENDS if name != "reference")
_SAMPLE_SECONDS = 0.01
_MOST_CALLS = 200
_UNKNOWN_MEMORY_LIMIT = 2 << 30


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark.

    Args:
      argv: command line arguments; None = those of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS, help="ops to time")
    parser.add_argument("--backend", nargs="+", choices=KERNELS, default=KERNELS, help="kernels to time")
    parser.add_argument("--repeats", type=int, default=30, help="samples of each implementation")
    parser.add_argument("--small", action="store_true", help="the small shapes of the tests")
    options = parser.parse_args(argv)
    if options.repeats < 2:
        parser.error(f"--repeats {options.repeats}: quartiles take at least 2")

    device = jax.devices()[0]
    bandwidth = copy_bandwidth(device.platform)
    print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}: {bandwidth / 1e9:.1f} GB/s copied")
    results, skipped = [], []
    for op in options.op:
        there = lambda module: importlib.util.find_spec(f"pallas_kernels.{module}") is not None  # noqa: E731
        if not there(op):
            print(f"{op}: not in this version")
            continue
        kernels = [name for name in options.backend if name in platform_kernels() and there(f"{op}.{name}")]
        done, left_out = time_op(op, kernels, options.repeats, options.small, bandwidth)
        results += done
        skipped += left_out
    if all(result["backend"] == "reference" for result in results):
        print(f"no kernel was timed: the reference alone runs on {device.platform} with these options")
    summary = {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "copy_bytes_per_second": bandwidth,
        "results": results,
        "skipped": skipped,
    }
    print(json.dumps(summary))


def copy_bandwidth(platform: str, repeats: int = 9) -> float:
    """Returns bytes per second, read and written, of x + 1 on a large float32 array: the median over repeats.

    In place: on a CPU the pages of a fresh result cost more than writing it.
    """
    size = (1 << 28) if platform == "cpu" else (1 << 30)
    array = jnp.ones((size // 4,), jnp.float32)
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)

    def again() -> jax.Array:
        nonlocal array
        array = increment(array)
        return array

    again()
    return 2 * size / statistics.median(_seconds(again, calls=3) for _ in range(repeats))


def time_op(
    op: str, backends: Sequence[str], repeats: int, small: bool, bandwidth: float
) -> tuple[list[dict], list[dict]]:
    """Times the implementations of an op at each of its shapes, and prints their rows.

    Args:
      op: a name of OPS.
      backends: kernels to time where they run.
      repeats: samples of each implementation.
      small: take SHAPES instead of REAL.
      bandwidth: bytes per second that the shares are of.

    Returns:
      the results, one per implementation and shape; what was skipped, with reasons.
    """
    function = getattr(importlib.import_module(f"pallas_kernels.{op}.api"), op)
    shapes = importlib.import_module(f"pallas_kernels.{op}.shapes")
    results, skipped = [], []
    print(f"\n{op}\n{'':12}{'median':>12}{'quartiles':>26}{'bandwidth':>11}{'ratio':>8}")
    for shape in shapes.SHAPES if small else shapes.REAL:
        print(f"  {shape}")
        case = {"op": op, "shape": dataclasses.asdict(shape)}

        def skip(reason: str, case: dict = case) -> None:
            print(f"    skipped: {reason}")
            skipped.append({**case, "reason": reason})

        needed, limit = _argument_bytes(functools.partial(shapes.inputs, shape)), _memory_limit()
        if needed > limit:
            skip(f"its arguments take {needed / 2**30:.2f} GiB, the limit is {limit / 2**30:.2f} GiB")
            continue
        arrays, options = split(shapes.inputs(shape))
        timed = {}
        for name in ("reference", *backends):
            call, reason = _prepare(functools.partial(function, **options, backend=name), arrays, name)
            if call:
                timed[name] = call
            else:
                skip(f"{name}: {reason}")
        samples = _alternate(timed, repeats)
        plain = statistics.median(samples["reference"]) if "reference" in samples else None
        moved = shapes.bytes_moved(shape)
        for name, seconds in samples.items():
            low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
            result = {
                "backend": name,
                "seconds": median,
                "quartiles": [low, high],
                "bytes": moved,
                "bandwidth_share": moved / median / bandwidth,
                "ratio": plain / median if plain else None,
            }
            results.append(case | result)
            spread = f"{low * 1e6:.1f} .. {high * 1e6:.1f} us"
            ratio = f"{result['ratio']:8.2f}" if plain else f"{'-':>8}"
            print(f"    {name:10}{median * 1e6:9.1f} us{spread:>26}{result['bandwidth_share']:11.1%}{ratio}")
    return results, skipped


def split(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits an op's arguments into those made of arrays and those that are static."""
    is_array = lambda x: bool(jax.tree.leaves(x)) and all(isinstance(a, jax.Array) for a in jax.tree.leaves(x))  # noqa: E731
    arrays = {name: value for name, value in arguments.items() if is_array(value)}
    return arrays, {name: value for name, value in arguments.items() if name not in arrays}


def has_kernel(program: str) -> bool:
    """Whether a printed jaxpr runs a kernel: Mosaic GPU's (`plgpu.kernel`) and C's are no `pallas_call` there."""
    return any(primitive in program for primitive in ("pallas_call", "mpmd_map", "ffi_call"))


def _argument_bytes(inputs: Callable[[], dict[str, Any]]) -> int:
    """Returns the bytes of an op's arguments without making them."""
    abstract = jax.eval_shape(lambda: split(inputs())[0])
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))


def _memory_limit() -> int:
    """Returns the bytes that arguments may take: results, copies and what XLA needs beside them must fit, too."""
    statistics_of_device = jax.devices()[0].memory_stats() or {}
    total = statistics_of_device.get("bytes_limit")
    return total // 4 if total else _UNKNOWN_MEMORY_LIMIT


def _prepare(function: Callable, arrays: dict[str, Any], name: str) -> tuple[Callable[[], Any] | None, str]:
    """Compiles an implementation and warms it up.

    Returns:
      a function that dispatches one call, or None and why.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a refusal is reported below, for each shape
            # A backend that refuses a shape runs the reference, which must not be timed under its name.
            if name != "reference" and not has_kernel(str(jax.make_jaxpr(function)(**arrays))):
                return None, "does not take this shape"
            compiled = jax.jit(function).lower(**arrays).compile()
        jax.block_until_ready(compiled(**arrays))
    except Exception as error:  # whatever a compiler or a device may raise: the other implementations go on
        return None, f"{type(error).__name__}: {str(error)[:300]}"
    return functools.partial(compiled, **arrays), ""


def _alternate(timed: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Returns seconds per call of each function, `repeats` samples each, in turn and in random order."""
    calls = {}
    for name, call in timed.items():
        once = min(_seconds(call, calls=1) for _ in range(3))
        calls[name] = min(max(round(_SAMPLE_SECONDS / once), 1), _MOST_CALLS)
    samples: dict[str, list[float]] = {name: [] for name in timed}
    shuffle = random.Random(0)
    for _ in range(repeats):
        for name in shuffle.sample(list(timed), len(timed)):
            samples[name].append(_seconds(timed[name], calls[name]))
    return samples


def _seconds(call: Callable[[], Any], calls: int) -> float:
    """Returns the seconds per call of `calls` calls, dispatched in a row and waited for."""
    start = time.perf_counter()
    results = None
    for _ in range(calls):
        results = call()  # a device runs them in order: the last one is done last
    jax.block_until_ready(results)
    return (time.perf_counter() - start) / calls


if __name__ == "__main__":
    main()
