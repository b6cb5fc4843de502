"""Lowering a kernel for hardware that is not there, and interpreting one that is made for a GPU."""

import contextlib
import functools
import sys
from typing import Any

import jax
import pytest
from jax import export
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.native import build

CALLS = {"tpu": "tpu_custom_call", "triton": "__gpu$xla.gpu.triton", "mosaic_gpu": "mosaic_gpu_v2"}
UNSTABLE = [export.DisabledSafetyCheck.custom_call(CALLS[name]) for name in ("triton", "mosaic_gpu")]
HOPPER = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
HOPPER_SMEM = 227 * 1024  # what a block may have

needs_native = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not build._compilers(), reason="kernels in C run on CPUs and need a C compiler"
)


def lower(function, name: str, *args, **kwargs) -> export.Exported:
    """Lowers `function` for the platform of the backend `name` at abstract or real arguments; "cuda" is triton's."""
    name = "triton" if name == "cuda" else name
    # Since jax 0.12 Triton's lowering asks which GPU it is for.
    device = contextlib.nullcontext()
    if name == "triton":
        device = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=HOPPER))
    platform = "tpu" if name == "tpu" else "cuda"
    with device:
        exported = export.export(jax.jit(function), platforms=[platform], disabled_checks=UNSTABLE)(*args, **kwargs)
    assert f"@{CALLS[name]}(" in exported.mlir_module(), f"no {name} kernel in it"
    return exported


@functools.cache
def interpreter(**options) -> Any:
    """Returns what `interpret` of a Mosaic GPU kernel takes; skips the test where this jax does not offer it."""
    params = getattr(plgpu, "InterpretGPUParams", None)  # public since jax 0.12
    if params is None:
        try:
            from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as params
        except ImportError:
            pytest.skip(f"jax {jax.__version__} has no interpreter of Mosaic GPU kernels where it was looked for")
    return params(detect_races=True, **options)


def assert_no_races() -> None:
    """Fails if the interpreter of Mosaic GPU kernels has seen a race in what it ran last."""
    module = sys.modules.get("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    races = getattr(module, "_races", None)
    assert races is None or not races.races_found
