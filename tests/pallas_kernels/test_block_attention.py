"""Block attention: the reference against the attention that decoding uses, every kernel against the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from lowering import HOPPER_SMEM, assert_no_races, interpreter, lower

from dspark_jax import attention
from pallas_kernels.backend import KernelError
from pallas_kernels.block_attention import api, mosaic_gpu, reference, shapes, tpu, triton

pytestmark = pytest.mark.usefixtures("quick_compile")

RACES = pltpu.InterpretParams(detect_races=True)
NAMES = [str(shape) for shape in shapes.SHAPES]
# What mosaic_gpu takes.
HALF = [dataclasses.replace(shape, dtype="bfloat16", slots=shape.slots // 8 * 8) for shape in shapes.SHAPES]
RUNS = [("tpu", True), ("tpu", RACES), ("triton", True)]
CASES = [(*run, shape) for run in RUNS for shape in shapes.SHAPES]
CASES += [("mosaic_gpu", None, shape) for shape in HALF]
# Float32: the same sums in another order. Bfloat16: the weights are rounded before and after the division by their sum,
# 2^-8 of values that reach 4.
TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2}


@functools.cache
def case(shape):
    """Arguments whose unseen slots hold what must not be seen, and the reference's result."""
    arguments = shapes.inputs(shape)
    unseen = (jnp.arange(shape.slots) >= arguments["visible"][:, None])[:, None, :, None]
    arguments["context_keys"] = jnp.where(unseen, jnp.nan, arguments["context_keys"])
    arguments["context_values"] = jnp.where(unseen, jnp.inf, arguments["context_values"])
    return arguments, np.asarray(jax.jit(api.block_attention)(**arguments), np.float32)


def check(result, expected, shape, tolerance=None):
    result, expected = np.asarray(result, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_allclose(result, expected, atol=tolerance or TOLERANCE[shape.dtype], rtol=0)


@pytest.mark.parametrize("shape", shapes.SHAPES, ids=NAMES)
def test_the_reference_is_the_attention_of_decoding(shape):
    _, result = case(shape)
    one = {name: x if name.startswith("context") else x[:, None] for name, x in shapes.inputs(shape).items()}
    plain = jax.jit(attention.attend)(**one, block_mask=jnp.ones((shape.size, shape.size), bool))[:, 0]
    check(plain, result, shape)


def how(name):
    """What `interpret` of a kernel takes, and shapes of a dtype that it takes."""
    if name == "mosaic_gpu":
        return interpreter(out_of_bounds_reads="uninitialized"), HALF  # such reads give NaN
    return True, shapes.SHAPES


@pytest.mark.parametrize(("name", "interpret", "shape"), CASES, ids=lambda x: str(getattr(x, "slots", x))[:9])
def test_a_kernel_gives_the_reference(name, interpret, shape):
    arguments, expected = case(shape)
    interpret = interpret or how(name)[0]
    result = jax.jit(functools.partial(api.block_attention, backend=name, interpret=interpret))(**arguments)
    assert result.dtype == shape.dtype
    assert result.shape == arguments["queries"].shape
    check(result, expected, shape)
    assert_no_races()


def many_tiles(name, interpret):
    """A kernel with tiles so small that rows of 0, 100 and 200 slots take 0, 2 and 4 of them; a scale of its own."""
    options = {
        "tpu": (tpu.block_attention, tpu.Tiles(slots=64)),
        "mosaic_gpu": (mosaic_gpu.block_attention, mosaic_gpu.Tiles(splits=2, stages=2)),
        "triton": (triton.block_attention, triton.Tiles(slots=64, splits=3)),
    }
    kernel, tiles = options[name]
    return jax.jit(functools.partial(kernel, scale=0.3, tiles=tiles, interpret=interpret))


@pytest.mark.parametrize("name", api.KERNELS)
def test_tiles_and_huge_scores(name):
    """Scores of tens of thousands, other signs and sizes in other tiles: the maximum moves, nothing overflows."""
    interpret, (shape, *_) = how(name)
    arguments, _ = case(shape)
    kernel = many_tiles(name, interpret)
    for size in (1.0, 1e4):
        larger = {**arguments, "queries": arguments["queries"] * size}
        # Scores of 1e4 are off by 1e-3, and so are the weights of what is close to the maximum.
        expected = reference.block_attention(**larger, scale=0.3)
        check(kernel(**larger), expected, shape, tolerance=None if size == 1 else 2e-2)


@pytest.mark.parametrize("name", api.KERNELS)
def test_gradients_are_those_of_the_reference(name):
    interpret, (_, shape, *_) = how(name)
    arguments = shapes.inputs(shape)
    visible = arguments.pop("visible")

    def loss(arguments, **options):
        return jnp.sum(jnp.sin(api.block_attention(**arguments, visible=visible, **options)))

    ours = jax.jit(jax.grad(functools.partial(loss, backend=name, interpret=interpret)))(arguments)
    plain = jax.jit(jax.grad(loss))(arguments)
    tolerance = 1e-5 if shape.dtype == "float32" else 2e-2
    jax.tree.map(lambda a, b: check(a, b, shape, tolerance), ours, plain)


@pytest.mark.parametrize("name", api.KERNELS)
def test_attend_takes_the_kernel(name, monkeypatch):
    """An unmasked block of a row goes through the kernel that is picked; masks, windows and more blocks don't."""
    interpret, (shape, *_) = how(name)
    arguments = {name: x if name.startswith("context") else x[:, None] for name, x in shapes.inputs(shape).items()}
    everything = jnp.ones((shape.size, shape.size), bool)
    plain = jax.jit(attention.attend)(**arguments, block_mask=everything)
    without_kernel = jax.jit(attention.attend)(**arguments, block_mask=None)
    np.testing.assert_array_equal(without_kernel, plain)

    calls = []

    def counted(*args, **kwargs):
        calls.append(name)
        return api.block_attention(*args, **kwargs, backend=name, interpret=interpret)

    class Kernel:
        block_attention = staticmethod(counted)
        implementation = staticmethod(functools.partial(api.implementation, backend=name, interpret=interpret))

    monkeypatch.setattr(attention, "kernel", Kernel)
    kernel = jax.jit(lambda: attention.attend(**arguments, block_mask=None))()  # a new function: traced anew
    assert calls == [name]
    check(kernel, plain, shape)
    attend = lambda **others: jax.jit(lambda: attention.attend(**(arguments | others)))()  # noqa: E731
    attend(block_mask=everything)
    attend(block_mask=None, window=4)
    per_block = {"queries", "block_keys", "block_values", "visible"}
    twice = {key: jnp.concatenate([x, x], axis=1) if key in per_block else x for key, x in arguments.items()}
    both = attend(**twice, block_mask=None)
    assert calls == [name]
    check(both, jnp.concatenate([plain, plain], axis=1), shape)


@pytest.mark.parametrize("name", api.KERNELS)
def test_real_sizes_lower(name):
    for shape in (*shapes.REAL, *HALF):
        if name == "mosaic_gpu" and shape.dtype == "float32":
            continue
        arguments = jax.eval_shape(lambda shape=shape: shapes.inputs(shape))
        lowered = lower(functools.partial(api.KERNELS[name], scale=0.1), name, **arguments)
        assert lowered.out_avals[0].shape == arguments["queries"].shape


def test_real_sizes_fit():
    for shape in shapes.REAL:
        queries = shape.size * shape.heads // shape.groups
        tiles = tpu.Tiles.for_shape(shape.slots, shape.dim, shape.dtype)
        assert tpu.vmem_bytes(tiles, queries, shape.size, shape.dim, shape.dtype) < 16 << 20
        shared = triton.Tiles.for_shape(shape.batch * shape.groups, queries, shape.slots, shape.dim, shape.dtype)
        assert shared.slots, shape
        if shape.dtype != "float32":
            pairs, dtype = shape.batch * shape.groups, jnp.dtype(shape.dtype)
            assert not mosaic_gpu.refuses(pairs, shape.size, shape.slots, shape.dim, dtype)
        hopper = mosaic_gpu.Tiles.for_shape(shape.batch * shape.groups, queries, shape.slots, shape.dim)
        assert mosaic_gpu.smem_bytes(hopper, shape.dim) <= HOPPER_SMEM


def test_bytes_moved():
    # Four queries and results of two heads, four keys and values of one group, and two rows that see 0 and 10 slots.
    shape = shapes.Shape(batch=2, size=2, heads=2, groups=1, dim=8, slots=10, dtype="bfloat16")
    assert shapes.bytes_moved(shape) == 2 * 8 * (2 * 8 + 2 * 4 + 2 * 10) + 2 * 4


@pytest.mark.parametrize("name", api.KERNELS)
def test_the_probe_passes(name, monkeypatch):
    monkeypatch.setitem(api.KERNELS, name, functools.partial(api.KERNELS[name], interpret=how(name)[0]))
    assert api._probe(name)


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"dim": 96}, "tpu", "head dimension 96"),
        ({"dim": 96}, "triton", "head dimension 96"),
        ({"dim": 1024, "size": 64, "heads": 64}, "tpu", "too many"),
        ({"dim": 256, "size": 16, "heads": 16, "groups": 1}, "triton", "too many"),
        ({"dtype": "float16"}, "triton", "dtype float16"),
        ({"dtype": "float32"}, "mosaic_gpu", "would round float32"),
        ({"dim": 512}, "mosaic_gpu", "head dimension 512"),
        ({"size": 65}, "mosaic_gpu", "a block of 65 tokens"),
        ({"slots": 100}, "mosaic_gpu", "a cache of 100 slots"),
        ({"slots": 56}, "mosaic_gpu", "a cache of 56 slots"),
        ({"batch": 2**14, "groups": 4}, "mosaic_gpu", "65536 rows times groups"),
    ],
)
def test_what_a_kernel_refuses_the_reference_does(changes, name, words):
    shape = shapes.Shape(**({"batch": 1, "size": 4, "heads": 4, "groups": 1, "dim": 64, "slots": 128} | changes))
    arguments = jax.eval_shape(lambda: shapes.inputs(shape))
    with pytest.warns(RuntimeWarning, match=words):
        assert api.implementation(**arguments, backend=name, interpret=True) == "reference"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("visible", lambda x: x[:1], r"visible has shape \(1,\).* use \(3,\)"),
        ("visible", lambda x: x * 1.0, "visible is float32"),
        ("context_values", lambda x: x[:, :, :5], "context_values has shape"),
        ("block_keys", lambda x: x[..., :5], "block_keys has shape"),
        ("block_values", lambda x: x[:, :1], "block_values has shape"),
        ("queries", lambda x: x[:, :, :5], "5 query heads over 2 groups"),
        ("queries", lambda x: x[:, :0], "no size may be 0"),
        ("queries", lambda x: x[0], "four dimensions"),
    ],
)
def test_wrong_arguments(name, change, words):
    arguments = shapes.inputs(shapes.SHAPES[0])
    with pytest.raises(KernelError, match=words):
        api.block_attention(**{**arguments, name: change(arguments[name])})
