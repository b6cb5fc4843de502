"""Block attention: the reference against the attention that decoding uses, every kernel against the reference."""

import dataclasses
import functools
import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from lowering import HOPPER_SMEM, assert_no_races, interpreter, lower, needs_native

from dspark_jax import attention
from pallas_kernels.backend import VARIABLE, KernelError
from pallas_kernels.block_attention import api, cpu, mosaic_gpu, reference, shapes, tpu, triton

pytestmark = pytest.mark.usefixtures("quick_compile")

RACES = pltpu.InterpretParams(detect_races=True)
NAMES = [str(shape) for shape in shapes.SHAPES]
# What mosaic_gpu takes.
HALF = [dataclasses.replace(shape, dtype="bfloat16", slots=shape.slots // 8 * 8) for shape in shapes.SHAPES]
# What cpu takes: up to 64 queries a group; a head that is no multiple of 64.
FLOAT = [dataclasses.replace(shape, dtype="float32", size=min(shape.size, 8)) for shape in shapes.SHAPES]
FLOAT.append(shapes.Shape(batch=2, size=3, heads=4, groups=2, dim=72, slots=40, dtype="float32"))
PALLAS = [name for name in api.KERNELS if name != "cpu"]
KERNELS = [*PALLAS, pytest.param("cpu", marks=needs_native)]
RUNS = [("tpu", True), ("tpu", RACES), ("triton", True)]
CASES = [(*run, shape) for run in RUNS for shape in shapes.SHAPES]
CASES += [("mosaic_gpu", None, shape) for shape in HALF] + [
    pytest.param("cpu", False, shape, marks=needs_native) for shape in FLOAT
]
# Float32: the same sums in another order. Bfloat16: the weights are rounded before and after the division by their sum,
# 2^-8 of values that reach 4.
TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2}


plainly = jax.jit(functools.partial(api.block_attention, backend="reference"), static_argnames="causal")


@functools.cache
def case(shape):
    """Arguments whose unseen slots hold what must not be seen, and the reference's result."""
    arguments = shapes.inputs(shape)
    unseen = (jnp.arange(shape.slots) >= arguments["visible"][:, None])[:, None, :, None]
    arguments["context_keys"] = jnp.where(unseen, jnp.nan, arguments["context_keys"])
    arguments["context_values"] = jnp.where(unseen, jnp.inf, arguments["context_values"])
    return arguments, np.asarray(plainly(**arguments), np.float32)


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
    if name == "cpu":
        return False, FLOAT
    return True, shapes.SHAPES


@pytest.mark.parametrize(("name", "interpret", "shape"), CASES, ids=lambda x: str(getattr(x, "slots", x))[:9])
def test_a_kernel_gives_the_reference(name, interpret, shape):
    arguments, expected = case(shape)
    interpret = how(name)[0] if interpret is None else interpret
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
    if name == "cpu":  # without tiles
        return jax.jit(functools.partial(cpu.block_attention, scale=0.3))
    kernel, tiles = options[name]
    return jax.jit(functools.partial(kernel, scale=0.3, tiles=tiles, interpret=interpret))


@pytest.mark.parametrize("name", KERNELS)
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


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_are_those_of_the_reference(name):
    interpret, (_, shape, *_) = how(name)
    arguments = shapes.inputs(shape)
    visible = arguments.pop("visible")

    def loss(arguments, **options):
        return jnp.sum(jnp.sin(api.block_attention(**arguments, visible=visible, **options)))

    ours = jax.jit(jax.grad(functools.partial(loss, backend=name, interpret=interpret)))(arguments)
    plain = jax.jit(jax.grad(functools.partial(loss, backend="reference")))(arguments)
    tolerance = 1e-5 if shape.dtype == "float32" else 2e-2
    jax.tree.map(lambda a, b: check(a, b, shape, tolerance), ours, plain)


@pytest.mark.parametrize("name", KERNELS)
def test_attend_takes_the_kernel(name, monkeypatch):
    """An unmasked block of a row goes through the kernel that is picked; masks, windows and more blocks don't."""
    interpret, (shape, *_) = how(name)
    arguments = {name: x if name.startswith("context") else x[:, None] for name, x in shapes.inputs(shape).items()}
    everything = jnp.ones((shape.size, shape.size), bool)
    monkeypatch.setenv(VARIABLE, "reference")
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


@pytest.mark.parametrize("name", PALLAS)
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


@needs_native
@pytest.mark.parametrize("shape", FLOAT, ids=str)
def test_a_causal_block(shape):
    arguments, _ = case(shape)
    assert api.implementation(**arguments, causal=True, backend="cpu") == "cpu"
    expected = plainly(**arguments, causal=True)
    ours = jax.jit(functools.partial(api.block_attention, causal=True, backend="cpu"))(**arguments)
    check(ours, expected, shape)
    one = {name: x if name.startswith("context") else x[:, None] for name, x in shapes.inputs(shape).items()}
    mask = jnp.tril(jnp.ones((shape.size, shape.size), bool))
    check(jax.jit(attention.attend)(**one, block_mask=mask)[:, 0], expected, shape)
    check(jax.jit(functools.partial(attention.attend, block_mask="causal"))(**one)[:, 0], ours, shape)


@needs_native
def test_a_query_of_a_cpu_does_not_depend_on_those_beside_it():
    """The last token of a step of one is, bit for bit, the token of a step of several that sees the same."""
    shape = shapes.Shape(batch=1, size=8, heads=6, groups=2, dim=64, slots=100, dtype="float32")
    arguments = shapes.inputs(shape) | {"visible": jnp.asarray([50])}
    together = cpu.block_attention(**arguments, scale=0.1, causal=True)
    cached = dict(arguments)
    for size in range(8):
        part = {name: x[:, size : size + 1] for name, x in arguments.items() if name.startswith(("q", "block"))}
        alone = cpu.block_attention(**cached | part, scale=0.1, causal=True)
        np.testing.assert_array_equal(alone[:, 0], together[:, size])
        for name in ("keys", "values"):
            moved = jnp.transpose(part[f"block_{name}"], (0, 2, 1, 3))
            cached[f"context_{name}"] = cached[f"context_{name}"].at[:, :, 50 + size : 51 + size].set(moved)
        cached["visible"] = cached["visible"] + 1


@needs_native
def test_a_cpu_takes_its_kernel_and_leaves_the_rest_without_a_word(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    inputs = lambda **changes: shapes.inputs(dataclasses.replace(FLOAT[0], **changes))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert api.implementation(**inputs()) == "cpu"
        assert api.implementation(**inputs(), causal=True) == "cpu"
        assert api.implementation(**inputs(dtype="bfloat16")) == "reference"
        assert api.implementation(**inputs(size=64)) == "reference"
        assert (
            api.implementation(**inputs() | {"context_keys": inputs()["context_keys"].astype(jnp.bfloat16)})
            == "reference"
        )
        (slots,) = jax.export.symbolic_shape("s")
        cached = {
            f"context_{name}": jax.ShapeDtypeStruct((3, 2, slots, 64), jnp.float32) for name in ("keys", "values")
        }
        assert api.implementation(**inputs() | cached) == "reference"
    monkeypatch.setenv(VARIABLE, "nonsense")
    with pytest.raises(KernelError, match="nonsense"):
        api.implementation(**inputs(dtype="bfloat16"))
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert api.implementation(**inputs(), causal=True) == "reference"


@needs_native
def test_numbers_that_are_none_stay_so():
    arguments, _ = case(FLOAT[0])
    poisoned = {**arguments, "block_keys": arguments["block_keys"].at[0, 2].set(jnp.nan)}
    ours = cpu.block_attention(**poisoned, scale=0.1, causal=True)
    assert bool(jnp.isfinite(ours[0, :2]).all() and jnp.isnan(ours[0, 2:]).all() and jnp.isfinite(ours[1:]).all())


def test_bytes_moved():
    # Four queries and results of two heads, four keys and values of one group, and two rows that see 0 and 10 slots.
    shape = shapes.Shape(batch=2, size=2, heads=2, groups=1, dim=8, slots=10, dtype="bfloat16")
    assert shapes.bytes_moved(shape) == 2 * 8 * (2 * 8 + 2 * 4 + 2 * 10) + 2 * 4


@pytest.mark.parametrize("name", KERNELS)
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
        ({"dtype": "bfloat16"}, "cpu", "dtype bfloat16, not float32"),
        ({"dtype": "float32", "dim": 20}, "cpu", "head dimension 20"),
        ({"dtype": "float32", "size": 17}, "cpu", "68 queries per group"),
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
        ("causal", lambda _: True, "7 queries and 6 keys of a causal block"),
    ],
)
def test_wrong_arguments(name, change, words):
    arguments = shapes.inputs(shapes.SHAPES[0])
    if name == "causal":
        arguments |= {part: arguments[part][:, 1:] for part in ("block_keys", "block_values")}
    with pytest.raises(KernelError, match=words):
        api.block_attention(**{**arguments, name: change(arguments.get(name))})
