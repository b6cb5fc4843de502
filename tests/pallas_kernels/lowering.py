"""Lowering a kernel for hardware that is not there."""

import contextlib

import jax
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh

TRITON = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")  # a call that export does not know as stable
HOPPER = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")


def lower(function, platform: str, *args, **kwargs) -> export.Exported:
    """Lowers `function` for "tpu" or "cuda" at abstract or real arguments."""
    # Since jax 0.12 Triton's lowering asks which GPU it is for.
    device = contextlib.nullcontext()
    if platform == "cuda":
        device = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=HOPPER))
    with device:
        exported = export.export(jax.jit(function), platforms=[platform], disabled_checks=[TRITON])(*args, **kwargs)
    name = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton"}[platform]
    assert name in exported.mlir_module(), "no kernel in it"
    return exported
