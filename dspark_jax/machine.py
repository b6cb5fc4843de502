"""Name the machine that something was measured on."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def describe_machine() -> str:
    """Names the processor that JAX runs on."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{len(jax.devices())} x {device.device_kind}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = "CPU"
    return f"{model}, {os.cpu_count()} logical cores"
