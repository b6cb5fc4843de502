"""The product of a decoding step: the kernel for CPUs against plain jax, and what is left to XLA."""

import warnings
from concurrent import futures

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import needs_native

from pallas_kernels import backend
from pallas_kernels.skinny_matmul import api, cpu, reference, shapes

pytestmark = needs_native


@pytest.fixture
def fresh(monkeypatch):
    """An op that has not been proven in this process, under no variable."""
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


@pytest.mark.parametrize("features_in", [7, 16, 23, 576])
def test_a_column_does_not_depend_on_those_beside_it(features_in):
    counts = range(1, cpu.MOST_COLUMNS + 1)
    parts = jax.jit(lambda weight, x: [cpu.skinny_matmul(weight, x[:, :n]) for n in counts])
    *narrow, whole = parts(**draw(200, features_in, cpu.MOST_COLUMNS))
    for columns, part in zip(counts, narrow):
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


def test_its_derivatives_are_the_reference_s():
    arguments = tuple(0.1 * array for array in draw(400, 200, 3).values())
    results = {}
    for name in ("cpu", "reference"):
        loss = lambda weight, x, name=name: jnp.sin(api.skinny_matmul(weight, x, backend=name)).sum()  # noqa: E731
        first = jax.grad(loss, (0, 1))
        second = jax.grad(lambda weight, x, first=first: jnp.square(first(weight, x)[1]).sum())
        results[name] = (*first(*arguments), second(*arguments), jax.jvp(loss, arguments, arguments)[1])
    for ours, plain in zip(results["cpu"], results["reference"]):
        np.testing.assert_allclose(ours, plain, rtol=1e-3, atol=1e-3)


def test_programs_for_other_platforms_have_the_plain_product():
    shapes_only = jax.eval_shape(lambda: draw(400, 200, 3))
    traced = jax.jit(lambda **a: api.skinny_matmul(**a, backend="cpu")).trace(**shapes_only)
    assert "dspark_jax_skinny_matmul" in traced.lower(lowering_platforms=("cpu",)).as_text()
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "dspark_jax_skinny_matmul" not in text
    assert "dot_general" in text


def test_symbolic_sizes_are_left_to_xla():
    (columns,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((200, columns), jnp.float32)
    exported = jax.export.export(jax.jit(api.skinny_matmul))(jax.ShapeDtypeStruct((400, 200), jnp.float32), x)
    assert exported.out_avals[0].shape == (400, columns)


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
