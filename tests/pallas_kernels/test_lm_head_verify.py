"""Every implementation of `lm_head_verify` against its reference: shapes, a broken row, lowering, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from lowering import HOPPER_SMEM, assert_no_races, interpreter, lower

from pallas_kernels.backend import KernelError
from pallas_kernels.lm_head_verify import api, mosaic_gpu, shapes, tpu, triton
from pallas_kernels.lm_head_verify.shapes import REAL, SHAPES, Shape
from pallas_kernels.verify.tiles import Tiles

pytestmark = pytest.mark.usefixtures("quick_compile")

RACES = pltpu.InterpretParams(detect_races=True)
CASES = [(name, True, shape) for name in ("tpu", "triton") for shape in SHAPES]
CASES += [("tpu", RACES, SHAPES[1])]
CASES += [
    ("mosaic_gpu", interpreter, SHAPES[3]),
    ("mosaic_gpu", interpreter, Shape("72 rows, cap", 9, 7, 304, 320, dtype="bfloat16", softcap=3.0)),
]


@pytest.mark.parametrize(
    ("name", "interpret", "shape"), CASES, ids=lambda value: getattr(value, "name", str(value)[:9])
)
def test_equals_the_reference(name, interpret, shape):
    """The same tokens from the same uniforms. The seeds are such that no uniform lies within 1e-5 of a border."""
    inputs = shapes.inputs(shape)
    tiles = None if shape.vocab > 10_000 or name == "mosaic_gpu" else Tiles(16, 128)
    interpret = interpret() if interpret is interpreter else interpret
    found = api.lm_head_verify(**inputs, backend=name, tiles=tiles, interpret=interpret)
    wanted = api.lm_head_verify(**inputs, backend="reference")
    for ours, plain in zip(found, wanted):
        np.testing.assert_array_equal(ours, plain)
    assert_no_races()


@pytest.mark.parametrize("name", ["tpu", "mosaic_gpu", "triton"])
def test_a_broken_row_adds_nothing(name):
    gpu = name == "mosaic_gpu"
    inputs = shapes.inputs(Shape("", 4, 3, 304, 64, dtype="bfloat16") if gpu else Shape("", 4, 3, 300, 32))
    hidden = inputs["hidden"].at[0, 1].set(jnp.nan).at[1, 0].set(jnp.inf)
    inputs |= {"hidden": hidden, "verify_len": jnp.full(4, 3)}
    tiles, interpret = (None, interpreter()) if gpu else (Tiles(16, 128), True)
    found = api.lm_head_verify(**inputs, backend=name, tiles=tiles, interpret=interpret)
    wanted = api.lm_head_verify(**inputs, backend="reference")
    np.testing.assert_array_equal(found, wanted)
    assert found[1][1] == -1


@pytest.mark.parametrize("shape", [shape for shape in REAL if shape.batch in (1, 128)], ids=lambda shape: shape.name)
def test_lowers_without_the_hardware(shape):
    lower_stats(shape, ("tpu", "mosaic_gpu", "triton"))


@pytest.mark.parametrize("shape", [shapes.PROBES[1], Shape("no whole tiles", 1, 7, 50264, 768, dtype="bfloat16")])
def test_mosaic_gpu_lowers(shape):
    lower_stats(shape, ("mosaic_gpu",))


def lower_stats(shape, names):
    rows = shape.batch * (shape.size + 1)
    of = lambda dtype, *size: jax.ShapeDtypeStruct(size, dtype)  # noqa: E731
    arguments = of(shape.dtype, rows, shape.width), of(shape.dtype, shape.vocab, shape.width), of("float32", rows)
    for name in names:
        module = {"tpu": tpu, "mosaic_gpu": mosaic_gpu, "triton": triton}[name]
        tiles = module.default_tiles(rows, shape.vocab, shape.width, 2)
        lower(functools.partial(module.stats, softcap=shape.softcap, tiles=tiles), name, *arguments)


def test_a_block_fits_a_gpu_processor_and_what_mosaic_gpu_refuses():
    for shape in REAL:
        assert not mosaic_gpu.refuses(shape.vocab, shape.width, jnp.dtype(shape.dtype))
    assert mosaic_gpu.smem_bytes(mosaic_gpu.default_tiles(8, 1000, 64, 2)) <= HOPPER_SMEM
    assert "would round float32" in mosaic_gpu.refuses(300, 64, jnp.dtype("float32"))
    assert "not a multiple of 64" in mosaic_gpu.refuses(300, 100, jnp.dtype("bfloat16"))
    assert "less than a tile" in mosaic_gpu.refuses(100, 64, jnp.dtype("bfloat16"))
    assert "50257 tokens is not a multiple of 8" in mosaic_gpu.refuses(50257, 64, jnp.dtype("bfloat16"))


@pytest.mark.parametrize("shape", REAL, ids=lambda shape: shape.name)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_step_fits_a_tpu_core(shape, itemsize):
    tiles = tpu.default_tiles(shape.batch * (shape.size + 1), shape.vocab, shape.width, itemsize)
    assert tiles is not None
    assert tpu.vmem_bytes(shape.vocab, shape.width, itemsize, tiles) < 16 * 2**20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": jnp.zeros((4, 4, 31))}, r"hidden has shape \(4, 4, 31\), head \(300, 32\)"),
        ({"head": jnp.zeros((300, 32), jnp.bfloat16)}, "cast them to one dtype"),
        ({"softcap": -1.0}, "softcap = -1.0"),
        ({"verify_len": jnp.zeros(3, jnp.int32)}, "verify_len has shape"),
    ],
)
def test_arguments_that_do_not_fit(change, words):
    with pytest.raises(KernelError, match=words):
        api.lm_head_verify(**(shapes.inputs(Shape("", 4, 3, 300, 32)) | change))
