"""Every implementation of `verify` against its reference: shapes, extremes, distribution, lowering, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from lowering import HOPPER_SMEM, assert_no_races, interpreter, lower
from scipy import stats as scipy_stats

from pallas_kernels import backend
from pallas_kernels.backend import KernelError
from pallas_kernels.bench import has_kernel
from pallas_kernels.verify import api, mosaic_gpu, reference, shapes, tpu, triton
from pallas_kernels.verify.shapes import PROBES, REAL, SHAPES, Drafted, Shape
from pallas_kernels.verify.tiles import Tiles

pytestmark = pytest.mark.usefixtures("quick_compile")

RACES = pltpu.InterpretParams(detect_races=True)
WIDE = {"SmolLM2", "Qwen3", "Gemma"}
CASES = [("tpu", True, shape) for shape in SHAPES if shape.name not in WIDE]
CASES += [("tpu", RACES, shape) for shape in SHAPES if shape.name in {"bfloat16", "cut"}]
CASES += [("triton", True, shape) for shape in SHAPES if shape.name in {"many rows", "list, block"} | WIDE]
CASES += [("mosaic_gpu", interpreter, shape) for shape in SHAPES if shape.name in {"bfloat16", "list, block", "cut"}]
MODULES = {"tpu": tpu, "mosaic_gpu": mosaic_gpu, "triton": triton}


def small_tiles(name: str, shape: Shape) -> Tiles | None:
    """Several tiles for small vocabularies too; the kernel's own for the real ones."""
    if shape.vocab > 10_000:
        return None
    return {
        "tpu": Tiles(16, 128),
        "mosaic_gpu": Tiles(1, 256 if shape.vocab <= 1000 else 2048),
        "triton": Tiles(1, 64),
    }[name]


def check(inputs, found, tolerance=2e-5):
    """Same accepted lengths; same added tokens, except where a uniform lies on a border of the inverse CDF."""
    wanted = [np.asarray(a) for a in jax.jit(reference.verify, static_argnames="verifier")(**inputs)]
    accepted, added = (np.asarray(a) for a in found)
    np.testing.assert_array_equal(accepted, wanted[0])
    np.testing.assert_array_equal(added < 0, wanted[1] < 0)
    for row in np.flatnonzero(added != wanted[1]):
        assert inputs["temperature"][row] > 0
        weights = np.asarray(added_weights(inputs), np.float64)[row]
        upper = np.cumsum(weights) / weights.sum()
        uniform, token = float(inputs["commit_uniforms"][row, accepted[row]]), added[row]
        assert weights[token] > 0
        assert upper[token] - weights[token] / weights.sum() - tolerance < uniform < upper[token] + tolerance


@functools.partial(jax.jit, static_argnames="verifier")
def weights_and_accepted(target_logits, draft, verify_len, temperature, accept_uniforms, verifier, cut=None):
    log_p = jax.nn.log_softmax(reference.warp(target_logits, temperature, cut), axis=-1)
    greedy = temperature <= 0
    chance, scale = reference.acceptance(log_p, draft, verify_len, greedy, verifier)
    accepted = reference.accepted_length(chance, verify_len, accept_uniforms, verifier)
    return reference.added_weights(log_p, draft, scale, accepted, verify_len, greedy), accepted


def added_weights(inputs):
    return weights_and_accepted(**{k: v for k, v in inputs.items() if k != "commit_uniforms"})[0]


@pytest.mark.parametrize(
    ("name", "interpret", "shape"), CASES, ids=lambda value: getattr(value, "name", str(value)[:9])
)
def test_equals_the_reference(name, interpret, shape):
    inputs = shapes.inputs(shape)
    interpret = interpret() if interpret is interpreter else interpret
    found = api.verify(**inputs, backend=name, tiles=small_tiles(name, shape), interpret=interpret)
    check(inputs, found)
    assert_no_races()


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.q == "full"], ids=lambda shape: shape.name)
def test_statistics_of_tiles(shape):
    """What a kernel leaves of each row: what comes after it is the same for all of them."""
    inputs = shapes.inputs(shape)
    logits = inputs["target_logits"].reshape(-1, shape.vocab)
    cut = inputs.get("cut", reference.no_cut(shape.batch, shape.size + 1))
    keep = (jnp.full(len(logits), 0.7), cut.value.reshape(-1), cut.index.reshape(-1))
    place = np.arange(shape.vocab)
    raw = np.asarray(logits, np.float64)
    value, index = np.asarray(keep[1])[:, None], np.asarray(keep[2])[:, None]
    x = np.where((raw < value) | ((raw == value) & (place < index)), -np.inf, raw / np.float32(0.7))
    peak = x.max(-1)
    cases = [("tpu", True), ("tpu", RACES), ("triton", True)]
    if shape.name == "bfloat16":
        cases.append(("mosaic_gpu", interpreter()))
    for name, interpret in cases:
        tiles = small_tiles(name, shape) or MODULES[name].default_tiles(len(x), shape.vocab)
        found = api.row_stats(name, logits, *keep, tiles, interpret)
        np.testing.assert_allclose(found.maximum, peak, rtol=1e-6)
        np.testing.assert_allclose(found.total, np.exp(x - peak[:, None]).sum(-1), rtol=1e-5)
        np.testing.assert_array_equal(found.best, x.argmax(-1))
        edges = np.arange(0, shape.vocab, tiles.vocab)
        mass = np.add.reduceat(np.exp(x - peak[:, None]), edges, axis=-1)
        np.testing.assert_allclose(found.mass, mass / mass.sum(-1, keepdims=True), rtol=2e-5, atol=1e-7)


def test_mosaic_gpu_tiles_take_turns_in_shared_memory():
    """More tiles to a block than it holds at a time, the last span shorter: slots are filled again, without races."""
    logits = jax.random.normal(jax.random.key(0), (2, 2000)) * 3
    per_row = jnp.asarray([1.0, 0.5]), jnp.full(2, -jnp.inf), jnp.zeros(2, jnp.int32)
    tiles = Tiles(1, 256)
    at_once, in_turn = (mosaic_gpu.stats(logits, *per_row, tiles, interpreter(), span) for span in (1, 6))
    assert mosaic_gpu.STAGES < 6 < tiles.count(2000)
    jax.tree.map(np.testing.assert_array_equal, at_once, in_turn)
    assert_no_races()


def run_both(inputs):
    cases = (
        ("tpu", Tiles(16, 128), True),
        ("mosaic_gpu", Tiles(1, 256), interpreter()),
        ("triton", Tiles(1, 64), True),
    )
    for name, tiles, interpret in cases:
        arguments = {"cut": None} | inputs
        yield api._verify_fused(name, tiles, interpret, *(arguments[key] for key in api.ARGUMENTS))


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("q", ["full", "list"])
def test_broken_rows_ties_and_tokens_nobody_drew(q, verifier):
    """NaN, +inf, all -inf, partly -inf, ties at the top, ids out of range: the same, and -1 where there is nothing."""
    inputs = shapes.inputs(Shape("", 8, 3, 300, q=q, verifier=verifier), seed=1)
    logits = np.array(inputs["target_logits"])
    logits[0, 1, 7], logits[1, 2, 299], logits[2, 0] = np.nan, np.inf, -np.inf
    logits[3, :, 100:200] = -np.inf
    logits[4], logits[7, :, 5:9] = 1.0, 50.0  # a flat row, ties among the greedy row's best
    tokens = np.array(inputs["draft"].token_ids)
    tokens[5, 1], tokens[6, 0] = 300, -1
    draft = inputs["draft"]._replace(token_ids=jnp.asarray(tokens))
    length = jnp.full(8, 3)
    inputs |= {"target_logits": jnp.asarray(logits), "draft": draft, "verify_len": length}
    for found in run_both(inputs):
        check(inputs, found)
        assert found[1][2] == -1
        assert found[0][5] <= 1
        assert found[0][6] == 0


def test_p_equal_q_keeps_everything_and_disjoint_keeps_nothing():
    inputs = shapes.inputs(Shape("", 8, 4, 300), seed=2)
    same = (
        inputs["target_logits"][:, :4] / jnp.where(inputs["temperature"] > 0, inputs["temperature"], 1)[:, None, None]
    )
    best = jnp.argmax(same, -1).astype(jnp.int32)
    equal = inputs | {"draft": Drafted(best, same), "verify_len": jnp.full(8, 4)}
    half = jnp.arange(300) < 150
    apart = inputs | {
        "target_logits": jnp.where(half, inputs["target_logits"], -jnp.inf),
        "draft": Drafted(jnp.full((8, 4), 200, jnp.int32), jnp.where(half, -jnp.inf, same)),
        "verify_len": jnp.full(8, 4),
    }
    for both in zip(run_both(equal), run_both(apart)):
        assert (both[0][0] == 4).all()
        assert (both[1][0] == 0).all()
        assert (both[1][1] < 150).all()
        check(equal, both[0])
        check(apart, both[1])


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("q", ["full", "list", "one_hot"])
def test_added_tokens_are_distributed_as_the_reference_says(q, verifier):
    """Chi-square over 2,000 rows that differ in the uniform alone; the weights are the reference's."""
    count, vocab = 2_000, 40
    one = shapes.inputs(Shape("", 1, 2, vocab, q=q, verifier=verifier, candidates=8, spread=1.0), seed=5)
    many = jax.tree.map(lambda a: jnp.repeat(a, count, axis=0), {k: v for k, v in one.items() if k != "verifier"})
    many["verify_len"] = jnp.full(count, 2)
    many["accept_uniforms"] = jnp.tile(jnp.asarray([[0.0, 0.9999]]), (count, 1))  # keeps one of two, in most cases
    many["commit_uniforms"] = jax.random.uniform(jax.random.key(9), (count, 3))
    weights, accepted = weights_and_accepted(
        **{
            k: v[:1] if hasattr(v, "shape") else jax.tree.map(lambda a: a[:1], v)
            for k, v in many.items()
            if k != "commit_uniforms"
        },
        verifier=verifier,
    )
    found = jax.jit(
        functools.partial(api.verify, verifier=verifier, backend="triton", interpret=True, tiles=Tiles(1, 16))
    )(**many)
    assert (found[0] == accepted[0]).all()
    expected = np.asarray(weights[0], np.float64)
    expected *= count / expected.sum()
    counts = np.bincount(np.asarray(found[1]), minlength=vocab)
    assert counts[expected == 0].sum() == 0
    rare = (expected > 0) & (expected < 5)
    observed = [*counts[expected >= 5], counts[rare].sum()] if rare.any() else counts[expected >= 5]
    wanted = [*expected[expected >= 5], expected[rare].sum()] if rare.any() else expected[expected >= 5]
    assert scipy_stats.chisquare(observed, np.asarray(wanted) * count / np.sum(wanted)).pvalue > 1e-4


def launch(name, shape):
    """The kernel alone, and its abstract arguments at a shape."""
    module = MODULES[name]
    rows = shape.batch * (shape.size + 1)
    tiles = module.default_tiles(rows, shape.vocab)
    of = lambda dtype, *size: jax.ShapeDtypeStruct(size, dtype)  # noqa: E731
    arguments = of(shape.dtype, rows, shape.vocab), of("float32", rows), of("float32", rows), of("int32", rows)
    return functools.partial(module.stats, tiles=tiles), arguments


@pytest.mark.parametrize("shape", [s for s in REAL if s.batch in (1, 128)], ids=lambda s: s.name)
def test_lowers_without_the_hardware(shape):
    for name in MODULES:
        function, arguments = launch(name, shape)
        lower(function, name, *arguments)
        assert has_kernel(str(jax.make_jaxpr(function)(*arguments)))


@pytest.mark.parametrize("name", ["tpu", "mosaic_gpu"])
@pytest.mark.parametrize("shape", [Shape("", 2, 3, 5000, q="list", verifier="block"), *PROBES], ids=lambda s: s.name)
def test_the_whole_op_lowers(name, shape):
    inputs = shapes.inputs(shape)
    static = {"verifier": inputs.pop("verifier"), "backend": name}
    lower(functools.partial(api.verify, **static), name, **inputs)


def test_mosaic_gpu_has_rows_on_the_axis_of_a_grid_that_may_be_long():
    of = lambda dtype, *size: jax.ShapeDtypeStruct(size, dtype)  # noqa: E731
    arguments = of("bfloat16", 2**17, 49152), of("float32", 2**17), of("float32", 2**17), of("int32", 2**17)
    function = functools.partial(mosaic_gpu.stats, tiles=mosaic_gpu.default_tiles(2**17, 49152))
    assert "Mesh(grid=(2, 131072)" in str(jax.make_jaxpr(function)(*arguments))


@pytest.mark.parametrize("shape", REAL, ids=lambda s: s.name)
def test_a_block_fits_a_gpu_processor(shape):
    for itemsize in (2, 4):
        assert not mosaic_gpu.refuses(shape.vocab, itemsize)
        tiles = mosaic_gpu.default_tiles(shape.batch * (shape.size + 1), shape.vocab)
        assert mosaic_gpu.smem_bytes(itemsize, tiles) <= HOPPER_SMEM


def test_rows_that_mosaic_gpu_refuses():
    assert "not a multiple of 16 bytes" in mosaic_gpu.refuses(151, 4)
    assert "less than a tile" in mosaic_gpu.refuses(128, 4)
    backend._say_once.cache_clear()
    draft = Drafted(jnp.zeros((1, 1), jnp.int32), None)
    with pytest.warns(RuntimeWarning, match="601 logits are not a multiple"):
        assert api.implementation(jnp.zeros((1, 2, 601)), draft, "mosaic_gpu") == "reference"


@pytest.mark.parametrize("shape", REAL, ids=lambda s: s.name)
def test_a_step_fits_a_tpu_core(shape):
    tiles = tpu.default_tiles(shape.batch * (shape.size + 1), shape.vocab)
    assert tpu.vmem_bytes(shape.vocab, 4, tiles) < 16 * 2**20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"verifier": "tree"}, "verifier = 'tree': use token or block"),
        ({"target_logits": jnp.zeros((4, 300))}, r"target_logits have shape \(4, 300\)"),
        ({"verify_len": jnp.zeros(3, jnp.int32)}, r"verify_len has shape \(3,\).*\(4,\)"),
        ({"accept_uniforms": jnp.zeros((4, 4))}, "accept_uniforms"),
        ({"cut": reference.no_cut(4, 3)}, "cut.value"),
        ({"draft": Drafted(jnp.zeros((4, 2), jnp.int32), None)}, "token_ids have shape"),
        ({"draft": Drafted(jnp.zeros((4, 3), jnp.int32), jnp.zeros((4, 3, 10)))}, r"draft.logits.*\(4, 3, 300\)"),
        ({"draft": Drafted(jnp.zeros((4, 3), jnp.int32), None, jnp.arange(4))}, "ids without"),
        ({"draft": Drafted(jnp.full((4, 3), 300), None)}, "draft token 300 of row 0, place 0.*vocabulary of 300"),
        ({"draft": Drafted(jnp.full((4, 3), 7), jnp.zeros((4, 3, 9)), jnp.arange(0, 18, 2))}, "draft vocabulary"),
        (
            {"draft": Drafted(jnp.full((4, 3), 7), jnp.zeros((4, 3, 2)), jnp.zeros((4, 3, 2), jnp.int32))},
            "candidates of its position",
        ),
    ],
)
def test_arguments_that_do_not_fit(change, words):
    with pytest.raises(KernelError, match=words):
        api.verify(**(shapes.inputs(Shape("", 4, 3, 300)) | change))


def test_the_probe_passes_inside_of_a_trace(monkeypatch):
    """A choice is made while a caller is traced; what the probe runs must not end up in the caller's program."""
    run = api._verify_fused
    monkeypatch.setattr(api, "_verify_fused", lambda name, tiles, interpret, *rest: run(name, tiles, True, *rest))
    monkeypatch.setattr(shapes, "PROBES", shapes.PROBES[:1])
    monkeypatch.setattr(backend, "_PROVEN", {})
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)

    logits, draft = jnp.zeros((1, 2, 300)), Drafted(jnp.zeros((1, 1), jnp.int32), None)

    def caller(x):
        assert api.implementation(logits, draft) == "tpu"
        return x + 1

    assert len(jax.make_jaxpr(caller)(1.0).eqns) == 1
