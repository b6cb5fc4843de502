"""Measure how fast the device reads memory: the ceiling of batch-1 decoding.

A decoding step of one token reads every weight once and computes little, so weight bytes over read bandwidth is the
least time that a step can take. The bandwidth is measured, not taken from a data sheet: a jitted sum over an array much
larger than the caches, which XLA spreads over all cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_ROWS = (1024, 16384, 262144)  # ways to cut the array into sums; which one is read fastest depends on the device


def read_bandwidth(num_bytes: int = 1 << 30, repeats: int = 9) -> float:
    """Returns the read bandwidth in bytes per second, the median over repeats; see `make_reader`."""
    read = make_reader(num_bytes)
    return statistics.median(read() for _ in range(repeats))


def make_reader(num_bytes: int = 1 << 30, repeats: int = 7) -> Callable[[], float]:
    """Returns a function that reads a large array once and returns the bandwidth in bytes per second.

    Call it beside what is measured and take the median: on a machine that others use too, a ceiling measured at another
    time is another machine's. Of several ways to cut the sum the one with the best median over `repeats` is used: a
    ceiling that is too low would flatter whoever is compared with it.

    Args:
      num_bytes: size of the array, a multiple of 1 MiB, much larger than the last-level cache; it is kept in memory.
      repeats: timed reads for each way, to choose one.
    """
    array = jnp.ones((num_bytes // 4,), jnp.float32)

    def reader(rows: int) -> Callable[[], float]:
        total = jax.jit(lambda a: a.reshape(rows, -1).sum(axis=1))

        def read() -> float:
            start = time.perf_counter()
            jax.block_until_ready(total(array))
            return num_bytes / (time.perf_counter() - start)

        read()  # compiles
        return read

    readers = [reader(rows) for rows in _ROWS]
    return max(readers, key=lambda read: statistics.median(read() for _ in range(repeats)))


def weight_bytes(params: Any) -> int:
    """Returns the bytes of weights that one decoding step reads.

    A tied embedding table is the LM head and counts once. Beside a head of its own the table does not count: a step
    reads one row of it.
    """
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return total - params["embed"].nbytes if "head" in params else total
