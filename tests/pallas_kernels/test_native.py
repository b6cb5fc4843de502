"""How kernels for CPUs are compiled, cached and registered."""

import fnmatch
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
from lowering import needs_native

from pallas_kernels import backend
from pallas_kernels.block_attention import cpu as block_attention
from pallas_kernels.native import build
from pallas_kernels.skinny_matmul import api, reference, shapes
from pallas_kernels.skinny_matmul.cpu import SOURCE

pytestmark = needs_native
ROOT = Path(__file__).parents[2]


def load(compiler):
    return build._load(SOURCE, SOURCE.read_bytes(), compiler, Path(jax.ffi.include_dir()))


@pytest.fixture
def compiler():
    return build._compilers()[0]


def test_without_a_compiler_xla_multiplies(monkeypatch):
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    monkeypatch.setattr(backend, "_PROVEN", {})
    backend._say_once.cache_clear()
    monkeypatch.setattr(build, "_compilers", list)
    monkeypatch.setattr(build, "_library", build._library.__wrapped__)
    monkeypatch.setattr(build, "_register", build._register.__wrapped__)
    arguments = shapes.inputs(shapes.Shape(400, 200, 4))
    with pytest.warns(RuntimeWarning, match="no C compiler. Install cc"):
        ours = api.skinny_matmul(**arguments)
    np.testing.assert_array_equal(ours, reference.skinny_matmul(**arguments))


def test_a_compiler_that_fails_is_quoted_and_the_next_one_tried(monkeypatch, compiler, tmp_path):
    bad = tmp_path / "bad-cc"
    bad.write_text("#!/bin/sh\necho 'fatal error: no headers' >&2\nexit 1\n")
    bad.chmod(0o755)
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_compilers", lambda: [[str(bad)], compiler])
    assert hasattr(build._library.__wrapped__(SOURCE), "skinny_matmul")
    monkeypatch.setattr(build, "_compilers", lambda: [[str(bad)]])
    with pytest.raises(OSError, match=r"bad-cc: fatal error: no headers\. Install cc"):
        build._library.__wrapped__(SOURCE)


def test_compilers_are_cc_first_and_zig_s_last(monkeypatch):
    monkeypatch.setenv("CC", f"{sys.executable} -O0")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: True)
    assert build._compilers() == [[sys.executable, "-O0"], [sys.executable, "-m", "ziglang", "cc"]]


def test_it_is_compiled_once_and_kept(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "new"))
    made = Path(load(compiler)._name)
    assert made.parent == tmp_path / "new" / "kernels"
    assert list(made.parent.iterdir()) == [made]
    with monkeypatch.context() as patch:
        patch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
        assert load(compiler)._name == str(made)
        with pytest.raises(BaseException, match="compiled again"):  # other flags, another file
            load([*compiler, "-g"])
    copy = tmp_path / "broken" / "kernels"
    copy.mkdir(parents=True)
    (copy / made.name).write_bytes(b"")  # a disk was full
    monkeypatch.setenv("DSPARK_CACHE", str(copy.parent))
    assert hasattr(load(compiler), "skinny_matmul")
    assert (copy / made.name).stat().st_size


def test_a_cache_folder_that_cannot_be_written(compiler, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    assert hasattr(load(compiler), "skinny_matmul")
    assert not list((tmp_path / "tmp").iterdir())


def test_what_is_compiled_is_installed():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    for path in (SOURCE, block_attention.SOURCE, build._HEADER):
        assert any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns), path


@pytest.mark.parametrize("source", [SOURCE, block_attention.SOURCE], ids=lambda source: source.parent.name)
def test_the_sources_have_no_warnings(source, compiler, tmp_path):
    command = [*compiler, *build._FLAGS, "-Wall", "-Wextra", "-Werror", "-Wno-psabi", f"-I{jax.ffi.include_dir()}"]
    subprocess.run([*command, str(source), "-o", str(tmp_path / "made.so")], check=True)
