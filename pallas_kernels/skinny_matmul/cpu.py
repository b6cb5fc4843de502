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
import threading
from pathlib import Path

import jax
import jax.numpy as jnp

MOST_COLUMNS = 8  # kMostColumns of cpu.c
_SOURCE = Path(__file__).with_name("cpu.c")
_TARGET = "dspark_jax_skinny_matmul"
_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-shared", "-fPIC")
_FOR_THIS_CPU = (  # the first that the compiler takes
    # Tuned for some processors, gcc multiplies and adds in two steps where there is one column, and rounds otherwise.
    ("-march=native", "-mtune=generic", "--param=avoid-fma-max-bits=0"),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
_LOCK = threading.Lock()


def skinny_matmul(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Arguments and result as of `api.skinny_matmul`, in float32, with 1 to `MOST_COLUMNS` columns.

    Raises:
      OSError: no C compiler takes the source; says what each had against it and what to do.
    """
    with _LOCK:
        _register()
    y = jax.ShapeDtypeStruct((weight.shape[0], x.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(_TARGET, y, vmap_method="sequential")(weight, x)


@functools.cache
def _register() -> None:
    """Makes the handler known to XLA, after compiling it if that has not been done on this machine."""
    problems = []
    for compiler in _compilers():
        try:
            library = _load(compiler)
        except OSError as error:
            problems.append(f"{shlex.join(compiler)}: {error}")
        else:
            jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(library.skinny_matmul), platform="cpu")
            return
    found = "; ".join(problems) or "no C compiler"
    raise OSError(f"{found}. Install cc, gcc or clang, or `pip install ziglang`, or name a compiler in CC")


def _compilers() -> list[list[str]]:
    """Returns the commands of this machine's C compilers: $CC, cc, gcc, clang, and Zig's from PyPI."""
    commands = [shlex.split(name) for name in (os.environ.get("CC", ""), "cc", "gcc", "clang")]
    commands = [command for command in commands if command and shutil.which(command[0])]
    if importlib.util.find_spec("ziglang"):
        commands.append([sys.executable, "-m", "ziglang", "cc"])
    return commands


def _load(compiler: list[str]) -> ctypes.CDLL:
    """Loads the compiled source from the cache folder, compiling it if it is not there, or is broken."""
    include = Path(jax.ffi.include_dir())
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    files = (_SOURCE.read_bytes(), (include / "xla/ffi/api/c_api.h").read_bytes())
    flags = repr((compiler, _FLAGS, _FOR_THIS_CPU)).encode()
    key = hashlib.sha256(b"\0".join((*files, version, flags, _cpu()))).hexdigest()[:24]
    cache = Path(os.environ.get("DSPARK_CACHE") or "~/.cache/dspark_jax").expanduser() / "kernels"
    kept = cache / f"skinny_matmul_{key}.so"
    try:
        return ctypes.CDLL(str(kept))
    except OSError:  # not there, or a disk was full
        pass
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=cache)
    except OSError:  # nowhere to keep it: it is compiled for this process
        cache, scratch = None, tempfile.mkdtemp(prefix="dspark_jax_")
    try:
        made = Path(scratch) / kept.name
        _compile(compiler, include, made)
        if cache:
            made = made.replace(kept)  # atomic: other processes may do the same
        return ctypes.CDLL(str(made))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _compile(compiler: list[str], include: Path, made: Path) -> None:
    done = None
    for native in _FOR_THIS_CPU:
        command = [*compiler, *_FLAGS, *native, f"-I{include}", str(_SOURCE), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    lines = done.stderr.splitlines() if done else []
    errors = [line for line in lines if "error" in line] or lines or ["failed"]
    raise OSError(errors[0][-200:])


def _cpu() -> bytes:
    """Names this machine's processor: code made for it may not run on another that shares the cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    facts = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), *sorted(facts or lines)]).encode()
