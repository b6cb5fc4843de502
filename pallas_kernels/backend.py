"""Which implementation of an op runs: by platform, by an argument, or by the environment variable DSPARK_KERNELS.

  reference  plain jax, everywhere; the definition that the others are tested against
  tpu        Pallas, lowered by Mosaic
  mosaic_gpu Pallas, lowered by Mosaic GPU: GPUs of compute capability 9.0 (Hopper) or newer
  triton     Pallas, lowered by Triton; deprecated since jax 0.11, the one route that older GPUs than Hopper have
  cpu        C, compiled by the machine's own compiler: `skinny_matmul` and `block_attention`

"auto" (the default) takes the platform's first kernel that has reproduced the reference on this device: every op brings
a small probe for that, run once per process and kernel. A kernel that fails its probe, or can't take the shape it is
given, leaves the work to the platform's next one, the last of them to the reference, and says so once. A process with
several devices takes the reference: XLA's partitioner does not know how to split a kernel (name a backend where
everything lies on one of them).
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable, Sequence
from concurrent import futures

import jax

BACKENDS = ("reference", "tpu", "mosaic_gpu", "triton", "cpu")
VARIABLE = "DSPARK_KERNELS"

_GPU = ("mosaic_gpu", "triton")
_BY_PLATFORM = {"tpu": ("tpu",), "gpu": _GPU, "cuda": _GPU, "cpu": ("cpu",)}
_HOPPER = (9, 0)


class KernelError(ValueError):
    """Arguments that don't fit each other, or a backend that isn't there; the message says what to do."""


def select(
    op: str,
    available: Sequence[str],
    asked: str = "auto",
    interpret: bool = False,
    refuses: Callable[[str], str] = lambda name: "",
    probe: Callable[[str], bool] = lambda name: True,
    quiet: Sequence[str] = (),
) -> str:
    """Picks an implementation of an op.

    Args:
      op: the op's name, for messages.
      available: kernels that the op has beside the reference.
      asked: "auto", or the name of a backend; "auto" reads DSPARK_KERNELS first. A name may be one for another
        platform, because programs can be compiled for one (`jax.export`, `compile_for_tpu`).
      interpret: the kernel is to be interpreted, so that any platform will do.
      refuses: says why a backend can't take these arguments, "" if it can.
      probe: runs a backend on a small case and says whether it reproduced the reference.
      quiet: backends whose refusals are worth no word unless they were asked for by the argument.

    Returns:
      a name of BACKENDS.

    Raises:
      KernelError: an unknown name, or DSPARK_KERNELS names a kernel for another platform.
    """
    wanted = os.environ.get(VARIABLE, "auto") if asked == "auto" else asked
    if wanted not in ("auto", *BACKENDS):
        where = VARIABLE if asked == "auto" else "backend"
        raise KernelError(f"{where} = {wanted!r}: use auto, {', '.join(BACKENDS)}")
    here = platform_kernels()
    if wanted == "reference":
        return wanted
    names = [name for name in (here if wanted == "auto" else (wanted,)) if name in available]
    if wanted == "auto" and names and jax.device_count() > 1:
        _say_once(f"several devices: kernels are not used, they can't be partitioned ({VARIABLE}={names[0]} insists)")
        return "reference"
    for name, following in zip(names, [*names[1:], "reference"]):
        if asked == "auto" and wanted != "auto" and not interpret and name not in here:
            raise KernelError(
                f"{VARIABLE} = {wanted!r}: that kernel does not run on {jax.default_backend()}; unset the variable, or"
                " use reference"
            )
        reason = refuses(name)
        if reason and name in quiet and asked == "auto":
            continue
        if reason:
            _say_once(f"{op}: the {name} kernel does not take this: {reason}; {_instead(following)}")
        elif wanted != "auto" or _proven(op, name, probe, following):
            return name
    if wanted not in ("auto", *available) and (asked != "auto" or wanted not in here):
        _say_once(f"{op}: there is no {wanted} kernel; the reference runs instead")
    return "reference"


def platform_kernels() -> tuple[str, ...]:
    """Returns the kernels that run on this process' platform, the preferred one first."""
    names = _BY_PLATFORM.get(jax.default_backend(), ())
    if "mosaic_gpu" in names and compute_capability() < _HOPPER:
        return tuple(name for name in names if name != "mosaic_gpu")
    return names


def compute_capability() -> tuple[int, ...]:
    """Returns the compute capability of this process' NVIDIA GPU, (9, 0) for Hopper; () if it has none."""
    number = str(getattr(jax.devices()[0], "compute_capability", ""))
    return tuple(int(part) for part in number.split(".")) if re.fullmatch(r"\d+\.\d+", number) else ()


def no_wgmma() -> str:
    """Says why this GPU has no matrix products of warpgroups (`plgpu.wgmma`), "" if it has, or if there is no GPU."""
    capability = compute_capability()
    if capability and capability[0] != _HOPPER[0]:
        return f"its matrix products are Hopper's, this GPU has compute capability {capability[0]}.{capability[1]}"
    return ""


_PROVEN: dict[tuple[str, str], bool] = {}


def _instead(name: str) -> str:
    return "the reference runs instead" if name == "reference" else f"{name} is tried next"


def _proven(op: str, name: str, probe: Callable[[str], bool], following: str) -> bool:
    """Runs an op's probe once per process, in a thread of its own: this one may be in the middle of a trace."""
    if (op, name) not in _PROVEN:
        try:
            with futures.ThreadPoolExecutor(1) as aside:
                good = bool(aside.submit(probe, name).result())
            problem = "it does not reproduce the reference on this device"
        except Exception as error:  # whatever a compiler for unseen hardware may raise
            good, problem = False, f"it does not run on this device ({type(error).__name__}: {str(error)[:300]})"
        if not good:
            _say_once(f"{op}: the {name} kernel is not used: {problem}; {_instead(following)}")
        _PROVEN[op, name] = good
    return _PROVEN[op, name]


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)
