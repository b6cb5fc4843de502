"""The product of a decoding step: the kernel for CPUs against plain jax, how it is compiled, what is left to XLA."""

import subprocess
import warnings
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.skinny_matmul import api, cpu, reference, shapes


@pytest.fixture(scope="module", autouse=True)
def compiler():
    if jax.default_backend() != "cpu":
        pytest.skip("the kernel runs on CPUs")
    try:
        return cpu._compiler()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def fresh(monkeypatch):
    """An op that has not been proven in this process, and a handler that has not been compiled."""
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    monkeypatch.setattr(backend, "_PROVEN", {})
    backend._say_once.cache_clear()


def draw(features_out, features_in, columns, seed=0):
    return shapes.inputs(shapes.Shape(features_out, features_in, columns), seed)


@pytest.mark.parametrize("shape", shapes.SHAPES, ids=str)
def test_the_kernel_is_the_reference(shape):
    arguments = shapes.inputs(shape)
    ours = jax.jit(lambda **a: api.skinny_matmul(**a, backend="cpu"))(**arguments)
    exact = np.asarray(arguments["weight"], np.float64) @ np.asarray(arguments["x"], np.float64)
    np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(reference.skinny_matmul(**arguments), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("features_in", [1, 7, 8, 16, 23, 576])
def test_a_column_does_not_depend_on_those_beside_it(features_in):
    arguments = draw(200, features_in, cpu.MOST_COLUMNS)
    for columns in range(1, cpu.MOST_COLUMNS + 1):
        part = cpu.skinny_matmul(arguments["weight"], arguments["x"][:, :columns])
        whole = cpu.skinny_matmul(**arguments)
        np.testing.assert_array_equal(part, whole[:, :columns])


def test_products_of_several_threads_at_once():
    weights = [draw(4000, 96, 1, seed)["weight"] for seed in range(4)]
    x = draw(1, 96, 4)["x"]
    expected = [np.asarray(cpu.skinny_matmul(weight, x)) for weight in weights]
    many = jax.jit(lambda weights, x: [cpu.skinny_matmul(weight, x) for _ in range(10) for weight in weights])
    many(weights, x)
    with futures.ThreadPoolExecutor(6) as threads:
        for results in threads.map(lambda _: many(weights, x), range(60)):
            for i, result in enumerate(results):
                np.testing.assert_array_equal(result, expected[i % 4])


def test_its_gradient_is_the_reference_s():
    arguments = draw(400, 200, 3)
    loss = lambda name: lambda weight, x: jnp.sin(api.skinny_matmul(weight, x, backend=name)).sum()  # noqa: E731
    ours = jax.grad(loss("cpu"), (0, 1))(*arguments.values())
    plain = jax.grad(loss("reference"), (0, 1))(*arguments.values())
    for a, b in zip(ours, plain):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_it_can_be_mapped():
    weight, x = draw(300, 250, 1)["weight"], jnp.stack([draw(1, 250, 3, seed)["x"] for seed in range(2)])
    ours = jax.vmap(lambda x: api.skinny_matmul(weight, x, backend="cpu"))(x)
    np.testing.assert_allclose(ours, jnp.einsum("oi,bin->bon", weight, x), rtol=1e-4, atol=1e-4)


def test_what_it_does_not_take_is_left_to_xla_without_a_word(fresh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert api.implementation(**draw(400, 200, 4)) == "cpu"
        assert api.implementation(**draw(400, 200, 9)) == "reference"
        assert api.implementation(**draw(40, 20, 4)) == "reference"
        halves = jax.tree.map(lambda a: a.astype(jnp.bfloat16), draw(400, 200, 4))
        assert api.implementation(**halves) == "reference"
        assert api.skinny_matmul(**halves).dtype == jnp.bfloat16
    with pytest.warns(RuntimeWarning, match="1 to 8 columns"):
        assert api.implementation(**draw(400, 200, 9), backend="cpu") == "reference"


def test_the_variable_turns_it_off(fresh, monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "reference")
    assert api.implementation(**draw(400, 200, 4)) == "reference"


@pytest.mark.parametrize(("weight", "x"), [((4, 5), (4, 1)), ((4,), (4, 1)), ((4, 5), (5,))])
def test_shapes_that_do_not_fit(weight, x):
    with pytest.raises(backend.KernelError, match=r"use \[out, in\] and \[in, n\]"):
        api.skinny_matmul(jnp.zeros(weight), jnp.zeros(x))


def test_the_handler_checks_what_xla_hands_it():
    with pytest.raises(Exception, match=r"x \[in, 1\.\.8\] in float32"):
        jax.block_until_ready(cpu.skinny_matmul(**draw(16, 16, 9)))


def test_without_a_compiler_xla_multiplies(fresh, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(cpu.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cpu, "_register", cpu._register.__wrapped__)
    arguments = draw(400, 200, 4)
    with pytest.warns(RuntimeWarning, match="no C compiler: install cc"):
        ours = api.skinny_matmul(**arguments)
    np.testing.assert_array_equal(ours, reference.skinny_matmul(**arguments))


def test_it_is_compiled_once_and_kept(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "new"))
    made = cpu._library(compiler)
    assert made.parent == tmp_path / "new" / "kernels"
    monkeypatch.setattr(cpu, "_compile", lambda *_: pytest.fail("compiled again"))
    assert cpu._library(compiler) == made
    assert [path.name for path in made.parent.iterdir()] == [made.name]


def test_a_cache_folder_that_cannot_be_written(compiler, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "file"))
    made = cpu._library(compiler)
    assert made.is_file()
    assert tmp_path not in made.parents


def test_a_compiler_that_fails_is_quoted(monkeypatch, compiler, tmp_path):
    source = tmp_path / "broken.c"
    source.write_text("int f( {")
    monkeypatch.setattr(cpu, "_SOURCE", source)
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    with pytest.raises(OSError, match=r"broken\.c.* failed: .*error"):
        cpu._library(compiler)


def test_the_source_has_no_warnings(compiler, tmp_path):
    command = [*compiler, *cpu._FLAGS, "-Wall", "-Wextra", "-Werror", "-Wno-psabi", f"-I{jax.ffi.include_dir()}"]
    subprocess.run([*command, str(cpu._SOURCE), "-o", str(tmp_path / "made.so")], check=True)
