"""markov_sample: kernels against the reference, the distribution of what they draw, lowering, bad arguments."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from lowering import HOPPER_SMEM, assert_no_races, interpreter, lower
from scipy import stats

from pallas_kernels import backend
from pallas_kernels.markov_sample import api, mosaic_gpu, reference, shapes, tile, tpu, triton

pytestmark = pytest.mark.usefixtures("quick_compile")

RACES = pltpu.InterpretParams(detect_races=True)
KERNELS = {
    "tpu": functools.partial(tpu.markov_sample, interpret=True),
    "tpu_races": functools.partial(tpu.markov_sample, interpret=RACES),
    "mosaic_gpu": lambda **arguments: mosaic_gpu.markov_sample(
        **arguments, tiles=mosaic_gpu.Tiles(rows=8, groups=1, vector=8), interpret=interpreter()
    ),
    "triton": functools.partial(triton.markov_sample, interpret=True),
}
# Every candidate's row is a copy of its own, which takes the interpreter of Mosaic GPU kernels 10 ms.
FEW = shapes.Shape("vanilla", 3, 2, 512, 16, 16, 512, candidates=22, reduced=False, dtype="bfloat16")
CASES = [(shape, "tpu") for shape in shapes.SHAPES]
CASES += [(shape, "triton") for shape in shapes.SHAPES if shape.candidates]
CASES += [(shape, "mosaic_gpu") for shape in (FEW, *shapes.SHAPES[1:4])]
CASES[0], CASES[4] = ((shapes.SHAPES[i], "tpu_races") for i in (0, 4))  # one of each form; slower to run


def run(function, arguments):
    """Runs it compiled; the head's kind and what is None are static."""
    kind = arguments["kind"]
    arrays = {name: value for name, value in arguments.items() if name != "kind"}
    return jax.jit(lambda arrays: function(**arrays, kind=kind))(arrays)


@functools.cache
def case(shape):
    arguments = shapes.inputs(shape)
    return arguments, run(reference.markov_sample, arguments)


def on_a_boundary(logits, uniform) -> bool:
    cdf = np.cumsum(np.asarray(jax.nn.softmax(logits), np.float64))
    return np.abs(cdf / cdf[-1] - uniform).min() < 1e-5


@pytest.mark.parametrize(("shape", "kernel"), CASES, ids=lambda value: getattr(value, "kind", value))
def test_a_kernel_draws_what_the_reference_draws(shape, kernel):
    arguments, (expected_tokens, expected_logits) = case(shape)
    tokens, logits = run(KERNELS[kernel], arguments)
    assert_no_races()
    assert logits.shape == expected_logits.shape
    # float32: other orders of summation, relative to base logits of that scale. bfloat16: the head's step in float32
    # may round to the neighbouring bfloat16 code, 2^-8 of one term of a product.
    tolerance = 0.02 if shape.dtype == "bfloat16" else 1e-5 * max(1.0, float(jnp.abs(expected_logits).max()))
    for b in range(shape.batch):
        for k in range(shape.steps):
            np.testing.assert_allclose(logits[b, k], expected_logits[b, k], atol=tolerance, rtol=0)
            if tokens[b, k] != expected_tokens[b, k]:
                # Only rounding at a boundary of the CDF may decide otherwise, and then the steps after it differ.
                assert arguments["temperature"][b] > 0
                assert on_a_boundary(expected_logits[b, k], arguments["uniforms"][b, k])
                break


@pytest.mark.parametrize("kernel", ["tpu", "mosaic_gpu", "triton"])
def test_ties_weights_of_zero_and_broken_rows(kernel):
    """First of equal maxima; nothing of weight zero, whatever the uniform; a row of NaN stays inside of its list."""
    arguments = dict(shapes.inputs(dataclasses.replace(FEW, kind="none", batch=4, reduced=True)))
    base = np.array(arguments["base_logits"])
    base[0, :, [7, 9, 21]] = 9.0
    base[1:3, :, 3:] = -np.inf
    base[3] = np.nan
    uniforms = np.array([[0.5, 0.5], [0.0, 0.9999999], [0.5, 0.9], [0.5, 0.0]], np.float32)
    temperature = jnp.asarray([0.0, 1.0, 0.7, 1.0])
    arguments |= {"base_logits": jnp.asarray(base), "uniforms": jnp.asarray(uniforms), "temperature": temperature}
    tokens = np.asarray(run(KERNELS[kernel], arguments)[0])
    ids = np.asarray(arguments["vocab"])[np.asarray(arguments["index"])]
    np.testing.assert_array_equal(tokens[:3], np.asarray(run(reference.markov_sample, arguments)[0])[:3])
    np.testing.assert_array_equal(tokens[0], ids[0, :, 7])
    assert all(tokens[b, k] in (ids[b, k, :3] if b < 3 else ids[b, k]) for b in (1, 2, 3) for k in range(2))


def test_the_draw_from_a_tile_skips_weights_of_zero():
    weights = jnp.asarray([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]])
    goals = {0.0: 1, 0.99: 1, 1.0: 3, 2.99: 3, 3.0: 4, 3.99: 4, 4.0: 4, 5.0: 4}  # at or beyond the sum: the last one
    for goal, expected in goals.items():
        assert tile.inverse_cdf(weights, jnp.full((1, 1), goal)) == expected


@pytest.mark.parametrize(
    ("kernel", "candidates"), [("tpu", True), ("tpu", False), ("triton", True)], ids=["tpu", "tpu_vocabulary", "triton"]
)
def test_draws_follow_the_distribution(kernel, candidates):
    # Many rows with the same logits; pairs of tokens, so that the second draw is seen to follow from the first.
    size, rows, vocab_size, temperature = 6, 4096, 64, 0.8
    rng = np.random.default_rng(0)
    base = rng.normal(size=(2, size)).astype(np.float32)
    base[:, 3] = -np.inf
    w1, w2 = rng.normal(size=(2, vocab_size, 16)).astype(np.float32)
    index = np.asarray([[5, 1, 9, 20, 30, 2], [7, 3, 5, 11, 0, 60]]) if candidates else np.tile(np.arange(size), (2, 1))
    repeat = lambda x: jnp.broadcast_to(jnp.asarray(x), (rows, *np.shape(x)))  # noqa: E731
    arguments = {
        "kind": "vanilla",
        "base_logits": repeat(base),
        "anchor_ids": jnp.full((rows,), 17),
        "temperature": jnp.full((rows,), temperature),
        "uniforms": jax.random.uniform(jax.random.key(1), (rows, 2)),
        "w1": jnp.asarray(w1),
        "w2": jnp.asarray(w2 if candidates else w2[:size]),
        "index": repeat(index.astype(np.int32)) if candidates else None,
    }
    tokens = np.asarray(run(KERNELS[kernel], arguments)[0])
    distribution = lambda k, token: np.asarray(  # noqa: E731
        jax.nn.softmax((base[k] + w2[index[k]] @ w1[token]) / temperature), np.float64
    )
    first = distribution(0, 17)
    pairs = np.stack([first[i] * distribution(1, index[0][i]) for i in range(size)])
    counts = np.zeros((size, size))
    places = [{token: i for i, token in enumerate(index[k])} for k in range(2)]
    for one, two in tokens:
        counts[places[0][one], places[1][two]] += 1
    assert counts[pairs == 0].sum() == 0
    common = pairs * rows >= 5  # cells that are rarer share one
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(pairs[common], pairs[~common].sum()) * rows
    assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


@pytest.mark.parametrize("shape", shapes.REAL, ids=lambda shape: f"{shape.kind}-{shape.candidates}")
def test_real_sizes_lower_and_fit(shape):
    specs = jax.eval_shape(lambda: {n: value for n, value in shapes.inputs(shape).items() if n != "kind"})
    size, itemsize = shape.candidates or shape.draft_size, jnp.dtype(shape.dtype).itemsize
    sizes = (shape.kind, shape.batch, size, bool(shape.candidates), shape.rank)
    assert tpu.vmem_bytes(*sizes, itemsize) < 16 * 2**20
    assert not tpu.refuses(*sizes, shape.vocab_size, itemsize)
    assert shapes.bytes_moved(shape) >= 8 * shape.batch * shape.steps * size
    modules = {"tpu": tpu}
    if shape.candidates:
        modules |= {"mosaic_gpu": mosaic_gpu, "triton": triton}
        small = (shape.kind, shape.steps, shape.candidates, shape.rank)
        assert not mosaic_gpu.refuses(*small, itemsize)
        assert not triton.refuses(shape.kind, shape.candidates, shape.rank)
        tiles = mosaic_gpu.Tiles.for_shape(*small, itemsize)
        assert tiles is not None
        assert mosaic_gpu.smem_bytes(*small, itemsize, tiles) <= HOPPER_SMEM
    for name, module in modules.items():
        exported = lower(functools.partial(module.markov_sample, kind=shape.kind), name, **specs)
        assert exported.out_avals[1].shape == (shape.batch, shape.steps, size)


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name in shapes.PROBES for shape in shapes.PROBES[name]])
def test_probes_lower(name, shape):
    arguments = {name: value for name, value in shapes.inputs(shape).items() if name != "kind"}
    module = {"tpu": tpu, "mosaic_gpu": mosaic_gpu, "triton": triton}[name]
    lower(functools.partial(module.markov_sample, kind=shape.kind), name, **arguments)


def test_shapes_that_kernels_refuse():
    assert "not a multiple of 8" in tpu.refuses("vanilla", 1, 256, True, 16, 1001, 4)
    assert "8 MiB" in tpu.refuses("none", 64, 151936, False, 0, 0, 4)
    assert "bytes of VMEM" in tpu.refuses("vanilla", 1, 8192, True, 512, 1024, 4)
    assert "whole draft vocabulary" in triton.refuses("none", None, 0)
    assert "8192 candidates" in triton.refuses("none", 8192, 0)
    assert "rank of 24" in triton.refuses("vanilla", 64, 24)
    assert "whole draft vocabulary" in mosaic_gpu.refuses("vanilla", 7, None, 128, 2)
    assert "8192 candidates" in mosaic_gpu.refuses("none", 7, 8192, 0, 4)
    assert "neither 128 nor a multiple of 256" in mosaic_gpu.refuses("vanilla", 7, 64, 64, 2)
    assert "shared memory" in mosaic_gpu.refuses("vanilla", 16, 4096, 256, 2)


def test_the_api_runs_the_backend_that_is_named():
    arguments, (expected, _) = case(shapes.SHAPES[3])
    for name in ("auto", "tpu", "mosaic_gpu", "triton"):
        interpret = interpreter() if name == "mosaic_gpu" else True
        tokens, _ = run(functools.partial(api.markov_sample, backend=name, interpret=interpret), arguments)
        assert (tokens == expected).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "lstm"}, "kind = 'lstm': use none, vanilla, gated, rnn"),
        ({"base_logits": jnp.zeros((3, 40))}, "base_logits .*use"),
        ({"uniforms": jnp.zeros((3, 2))}, r"uniforms \[3, 2\]: the other arguments need \[3, 3\]"),
        ({"index": jnp.zeros((3, 3, 41), jnp.int32)}, r"index \[3, 3, 41\]"),
        ({"w1": None}, r"w1 missing: a gated head needs \[V, R\]"),
        ({"w2": None}, r"w2 missing: the other arguments need \[200, 32\]"),
        ({"w2": jnp.zeros((200, 32), jnp.bfloat16)}, "use one dtype"),
        ({"hidden": None}, r"hidden missing: a gated head needs \[B, K, D\]"),
        ({"weight": jnp.zeros((32, 32))}, r"weight \[32, 32\]: the other arguments need \[32, 56\]"),
        ({"bias": None}, r"bias missing: the other arguments need \[32\]"),
    ],
)
def test_arguments_that_do_not_fit(changes, words):
    with pytest.raises(backend.KernelError, match=words):
        api.markov_sample(**(case(shapes.SHAPES[1])[0] | changes))
