"""Compiles a kernel for CPUs from C, with the machine's own compiler, and makes it known to XLA.

Pallas has no backend for CPUs, and some of what XLA compiles for them itself is far from what memory allows.
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

_HEADER = Path(__file__).with_name("job.h")
_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-shared", "-fPIC")
_FOR_THIS_CPU = (  # the first that the compiler takes
    # Tuned for some processors, gcc multiplies and adds in two steps where there is one column, and rounds otherwise.
    ("-march=native", "-mtune=generic", "--param=avoid-fma-max-bits=0"),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
_LOCK = threading.Lock()


def target(source: Path, symbol: str) -> str:
    """Returns the name by which `jax.ffi.ffi_call` finds a handler, compiled on first use.

    Args:
      source: a file in C that includes `job.h`.
      symbol: the handler's name in it.

    Raises:
      OSError: no C compiler takes the source; says what each had against it and what to do.
    """
    with _LOCK:
        return _register(source, symbol)


@functools.cache
def _register(source: Path, symbol: str) -> str:
    name = f"dspark_jax_{symbol}"
    handler = getattr(_library(source), symbol)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    return name


@functools.cache
def _library(source: Path) -> ctypes.CDLL:
    include, problems = Path(jax.ffi.include_dir()), []
    contents = b"\0".join(path.read_bytes() for path in (source, _HEADER, include / "xla/ffi/api/c_api.h"))
    for compiler in _compilers():
        try:
            return _load(source, contents, compiler, include)
        except OSError as error:
            problems.append(f"{shlex.join(compiler)}: {error}")
    found = "; ".join(problems) or "no C compiler"
    raise OSError(f"{found}. Install cc, gcc or clang, or `pip install ziglang`, or name a compiler in CC")


def _compilers() -> list[list[str]]:
    """Returns the commands of this machine's C compilers: $CC, cc, gcc, clang, and Zig's from PyPI."""
    commands = [shlex.split(name) for name in (os.environ.get("CC", ""), "cc", "gcc", "clang")]
    commands = [command for command in commands if command and shutil.which(command[0])]
    if importlib.util.find_spec("ziglang"):
        commands.append([sys.executable, "-m", "ziglang", "cc"])
    return commands


def _load(source: Path, contents: bytes, compiler: list[str], include: Path) -> ctypes.CDLL:
    """Loads the compiled source from the cache folder, compiling it if it is not there, or is broken."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    flags = repr((compiler, _FLAGS, _FOR_THIS_CPU)).encode()
    key = hashlib.sha256(b"\0".join((contents, version, flags, _cpu()))).hexdigest()[:24]
    cache = Path(os.environ.get("DSPARK_CACHE") or "~/.cache/dspark_jax").expanduser() / "kernels"
    kept = cache / f"{source.parent.name}_{key}.so"
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
        _compile(source, compiler, include, made)
        if cache:
            made = made.replace(kept)  # atomic: other processes may do the same
        return ctypes.CDLL(str(made))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _compile(source: Path, compiler: list[str], include: Path, made: Path) -> None:
    done = None
    for native in _FOR_THIS_CPU:
        command = [*compiler, *_FLAGS, *native, f"-I{include}", str(source), "-o", str(made)]
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
