"""The kernel for CPUs: `cpu.c`, compiled on first use by the machine's C compiler, called through XLA's FFI.

XLA's product packs the weights before it multiplies them, which costs as much as the multiplication when there are four
columns. Nothing that XLA compiles itself was found to read them once (README), and Pallas has no CPU backend.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

MOST_COLUMNS = 8  # kMostColumns of cpu.c
_SOURCE = Path(__file__).with_name("cpu.c")
_TARGET = "dspark_jax_skinny_matmul"
_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-shared", "-fPIC")
_FOR_THIS_CPU = (("-march=native", "-mtune=generic"), ("-mcpu=native",), ())  # the first that the compiler takes


def skinny_matmul(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Arguments and result as of `api.skinny_matmul`, in float32, with 1 to `MOST_COLUMNS` columns.

    Raises:
      OSError: there is no C compiler, or it does not take the source; says which and what to do.
    """
    _register()
    y = jax.ShapeDtypeStruct((weight.shape[0], x.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(_TARGET, y, vmap_method="sequential")(weight, x)


@functools.cache
def _register() -> None:
    """Compiles the handler if that has not been done for this source, compiler and CPU; makes it known to XLA."""
    library = ctypes.CDLL(str(_library(_compiler())))
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(library.skinny_matmul), platform="cpu")


def _compiler() -> list[str]:
    """Returns the command of a C compiler: $CC, cc, gcc, clang, or Zig's from PyPI."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise FileNotFoundError("no C compiler: install cc, gcc or clang, or `pip install ziglang`, or name one in CC")


def _library(compiler: list[str]) -> Path:
    """Returns the compiled source, out of the cache folder if it is there."""
    include = Path(jax.ffi.include_dir())
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    files = (_SOURCE.read_bytes(), (include / "xla/ffi/api/c_api.h").read_bytes())
    parts = (*files, version, _cpu(), repr((_FLAGS, _FOR_THIS_CPU)).encode())
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
    cache = Path(os.environ.get("DSPARK_CACHE") or "~/.cache/dspark_jax").expanduser() / "kernels"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=cache)
    except OSError:  # nowhere to keep it: compiled once per process
        cache = Path(tempfile.mkdtemp(prefix="dspark_jax_"))
        scratch = tempfile.mkdtemp(dir=cache)
    try:
        file = cache / f"skinny_matmul_{key}.so"
        if not file.is_file():
            made = Path(scratch) / file.name
            _compile(compiler, include, made)
            os.replace(made, file)  # atomic: other processes may do the same
        return file
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _compile(compiler: list[str], include: Path, made: Path) -> None:
    for native in _FOR_THIS_CPU:
        command = [*compiler, *_FLAGS, *native, f"-I{include}", str(_SOURCE), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    raise OSError(f"{shlex.join(command)} failed: {done.stderr.strip()[-300:]}")


def _cpu() -> bytes:
    """Names this machine's processor: code made for it may not run on another that shares the cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    facts = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join(sorted(set(facts)) or [platform.machine(), platform.processor()]).encode()
