"""Losses from hidden states: every kernel and its gradients against the reference, and lowering at real sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from lowering import HOPPER_SMEM, assert_no_races, interpreter, lower

from pallas_kernels.backend import KernelError
from pallas_kernels.linear_losses import api, mosaic_gpu, reference, shapes, tpu, triton

pytestmark = pytest.mark.usefixtures("quick_compile")

# Small tiles: several of everything, and edges.
KERNELS = {
    "tpu": functools.partial(tpu.linear_losses, tiles=tpu.Tiles(16, 128), interpret=True),
    "mosaic_gpu": lambda **arguments: mosaic_gpu.linear_losses(**arguments, interpret=interpreter()),
    "triton": functools.partial(triton.linear_losses, tiles=triton.Tiles(16, 64, 16, 2, 3), interpret=True),
    "races": functools.partial(
        tpu.linear_losses,
        tiles=tpu.Tiles(16, 128),
        interpret=pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
    ),
}
CASES = [
    *((name, shape) for name in ("tpu", "triton") for shape in shapes.SHAPES),
    ("races", shapes.SHAPES[0]),
    ("mosaic_gpu", shapes.SHAPES[4]),
    ("mosaic_gpu", shapes.Shape("no cap", 64, 136, 64, 64, dtype="bfloat16")),
    ("mosaic_gpu", shapes.Shape("no sequential head", 5, 256, 128, 0, dtype="bfloat16", lost=0.0)),
]


def results(run, arguments, cotangents=None):
    """ce, distance and the gradients of hidden, code and w2, for random cotangents unless they are given."""
    trained = {name: arguments[name] for name in ("hidden", "code", "w2") if name in arguments}
    frozen = {name: value for name, value in arguments.items() if name not in trained and name != "softcap"}

    @jax.jit
    def both(trained, frozen):
        losses, pull = jax.vjp(lambda t: run(**t, **frozen, softcap=arguments["softcap"]), trained)
        keys = jax.random.split(jax.random.key(5))
        drawn = tuple(jax.random.normal(key, loss.shape) for key, loss in zip(keys, losses))
        return losses, pull(cotangents or drawn)[0]

    return both(trained, frozen)


def assert_close(ours, expected, tolerance):
    """Differences are measured against the largest entry: these are sums with cancellation."""
    for (path, x), (_, y) in zip(*map(jax.tree_util.tree_leaves_with_path, (ours, expected))):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(
            x, y, atol=tolerance * np.abs(y).max() + 1e-6, rtol=0, err_msg=jax.tree_util.keystr(path)
        )


@functools.cache
def expected_of(shape):
    return results(reference.linear_losses, shapes.inputs(shape))


@pytest.mark.parametrize(("name", "shape"), CASES, ids=lambda x: getattr(x, "name", x))
def test_kernels_are_the_reference(name, shape, capsys):
    losses, gradients = results(KERNELS[name], shapes.inputs(shape))
    expected_losses, expected_gradients = expected_of(shape)
    # Sums in another order. In bfloat16 the gradient of the logits is rounded (2^-9) before its products.
    assert_close(losses, expected_losses, 1e-5)
    assert_close(gradients, expected_gradients, 1e-4 if shape.dtype == "float32" else 2**-7)
    assert "RACE" not in capsys.readouterr().out  # how the TPU's interpreter reports one
    assert_no_races()


def edge_rows(width, rank, dtype):
    """Rows: label outside, p equal to q, p and q apart, huge logits whose sums are exact."""
    arguments = shapes.inputs(shapes.Shape("edge rows", 16, 200, width, rank, dtype=dtype))
    names = ("head", "hidden", "target_hidden", "code")
    head, hidden, target, code = (np.array(arguments[name]) for name in names)
    label = np.arange(16) * 11
    label[:4] = -1
    head[:, 0] = np.where(np.arange(200) < 100, 1.0, -1.0)
    target[4:8] = hidden[4:8]
    code[4:8] = 0.0
    hidden[8:12], code[8:12], target[8:12] = 0.0, 0.0, 0.0
    hidden[8:12, 0], target[8:12, 0] = 64.0, -64.0
    hidden[12:], code[12:] = 0.0, 0.0
    hidden[12:, 0] = 2.0**14
    logits = target.astype(np.float64) @ head.T.astype(np.float64)
    normalizer = np.log(np.exp(logits).sum(-1))
    return {
        **arguments,
        **{name: jnp.asarray(array) for name, array in zip(names, (head, hidden, target, code))},
        "label": jnp.asarray(label),
        "log_normalizer": jnp.asarray(normalizer, jnp.float32),
    }


@pytest.mark.parametrize(("name", "softcap"), [("tpu", 0.0), ("triton", 0.0), ("tpu", 20.0), ("mosaic_gpu", 0.0)])
def test_rows_at_the_edge(name, softcap):
    """p equal to q is compared without its gradient: there the sign is a matter of rounding."""
    wide = name == "mosaic_gpu"
    arguments = edge_rows(64, 64, "bfloat16") if wide else edge_rows(32, 16, "float32")
    arguments["softcap"] = softcap
    apart = np.ones(16, bool)
    apart[4:8] = False
    cotangents = (jnp.linspace(-1, 1, 16), jnp.where(apart, 1.0, 0.0))
    (ce, distance), gradients = results(KERNELS[name], arguments, cotangents)
    expected, expected_gradients = results(reference.linear_losses, arguments, cotangents)
    assert_close((ce, distance), expected, 1e-5)
    assert_close(gradients, expected_gradients, 2**-7 if wide else 1e-4)
    assert not np.asarray(ce)[:4].any()
    if not softcap:
        assert np.abs(distance[4:8]).max() < 1e-5
        np.testing.assert_allclose(distance[8:12], 2.0, atol=1e-5)


def test_an_exact_tie_has_no_gradient():
    """Uniform q and p over a power of two: equal in every bit."""
    cases = [(name, shapes.Shape("tie", 16, 128, 16, 0)) for name in ("reference", "tpu", "triton")]
    for name, shape in (*cases, ("mosaic_gpu", shapes.Shape("tie", 16, 128, 64, 0, dtype="bfloat16"))):
        arguments = shapes.inputs(shape)
        zero = jnp.zeros_like(arguments["hidden"])
        arguments |= {"hidden": zero, "target_hidden": zero, "log_normalizer": jnp.full(16, np.log(np.float32(128.0)))}
        run = KERNELS.get(name, reference.linear_losses)
        (_, distance), gradients = results(run, arguments, (jnp.zeros(16), jnp.ones(16)))
        assert np.abs(distance).max() < 1e-6
        assert np.abs(gradients["hidden"]).max() < 1e-6


CAPPED = shapes.Shape("capped, with a head", 64 * 7, 50264, 2560, 256, softcap=30.0, dtype="bfloat16")
WIDE = [*(shape for shape in shapes.REAL if shape.dtype == "bfloat16"), CAPPED]


@pytest.mark.parametrize(
    ("platform", "shape"),
    [
        *((platform, shape) for platform in ("tpu", "triton") for shape in shapes.REAL),
        *(("mosaic_gpu", shape) for shape in (*WIDE, shapes.PROBES[1])),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_lowers_without_hardware(shape, platform):
    arrays = shapes.abstract(shape)
    trained = {name: arrays.pop(name) for name in ("hidden", "code", "w2") if name in arrays}
    run = api._KERNELS[platform]

    def both(trained, frozen):
        losses, pull = jax.vjp(lambda t: run(**t, **frozen, softcap=shape.softcap), trained)
        return losses, pull(losses)

    lower(both, platform, trained, arrays)


@pytest.mark.parametrize("shape", shapes.REAL, ids=lambda shape: shape.name)
def test_tiles_fit(shape):
    size = jnp.dtype(shape.dtype).itemsize
    tiles = tpu.Tiles.for_shape(shape.count, shape.vocab, shape.width, shape.rank, size)
    assert tiles is not None
    assert tiles.rows % 16 == tiles.vocab % 128 == 0
    assert tpu.vmem_bytes(tiles, shape.width, shape.rank, size) < 16 * 2**20
    assert shapes.bytes_moved(shape) > 3 * shape.vocab * shape.width * size // 2
    gpu = triton.Tiles.for_shape(shape.count, shape.vocab, shape.width)
    assert all(x & (x - 1) == 0 for x in (gpu.rows, gpu.vocab, gpu.chunk))
    assert gpu.rows * gpu.chunk * gpu.chunks <= 2**15


def test_a_block_of_mosaic_gpu_fits_and_chunks_are_whole_tiles():
    for sides, numbers in ((1, 1 + 3), (2, 3 + 3), (2, 7)):  # normaliser, distance, gradient
        assert mosaic_gpu.smem_bytes(sides, numbers) <= (HOPPER_SMEM + 1024) // 2 - 1024  # two blocks on a processor
    for shape in WIDE:
        size = mosaic_gpu.chunk_of(shape.count, shape.vocab)
        assert size % mosaic_gpu.VOCAB == 0
        assert size <= shape.vocab
        assert size * shape.count <= mosaic_gpu.CHUNK + mosaic_gpu.VOCAB * shape.count
        assert -(-shape.vocab // size) * size < 1.01 * shape.vocab  # tokens that are computed twice
    for vocab in range(128, 1024, 8):
        for count in (64, 2**16, 2**17, 2**20):
            size = mosaic_gpu.chunk_of(count, vocab)
            assert size % mosaic_gpu.VOCAB == 0
            assert size <= vocab


def test_the_api_picks_and_refuses(monkeypatch):
    monkeypatch.delenv("DSPARK_KERNELS", raising=False)
    arguments = shapes.inputs(shapes.SHAPES[-1])
    expected = reference.linear_losses(**arguments)
    assert_close(api.linear_losses(**arguments), expected, 0.0)
    assert_close(api.linear_losses(**arguments, backend="tpu", interpret=True), expected, 1e-5)
    assert not api._refuses(896, 151936, 4096, 256, jnp.dtype("float32"), "tpu")
    assert "VMEM" in api._refuses(896, 151936, 2**17, 256, jnp.dtype("bfloat16"), "tpu")
    assert "float16" in api._refuses(896, 151936, 4096, 256, jnp.dtype("float16"), "triton")
    assert "R = 1024" in api._refuses(896, 151936, 4096, 1024, jnp.dtype("bfloat16"), "triton")
    refusal = functools.partial(mosaic_gpu.refuses, dtype=jnp.dtype("bfloat16"))
    assert not refusal(151936, 4096, 256)
    assert not refusal(151936, 4096, 0)
    assert "head is float32" in mosaic_gpu.refuses(151936, 4096, 256, jnp.dtype("float32"))
    assert "w2 is float32" in refusal(151936, 4096, 256, bias_dtype=jnp.dtype("float32"))
    assert "D = 100 is not a multiple of 64" in refusal(151936, 100, 256)
    assert "R = 20 is not a multiple of 64" in refusal(151936, 4096, 20)
    assert "less than a tile" in refusal(120, 4096, 256)
    assert "not a multiple of 8" in refusal(50257, 4096, 256)


def test_the_probe_runs_what_a_kernel_takes(monkeypatch):
    run = []
    monkeypatch.setattr(api, "_reproduces", lambda name, shape, tolerance: run.append((name, shape.dtype)) or True)
    assert api._probe("mosaic_gpu")
    assert api._probe("triton")
    assert run == [("mosaic_gpu", "bfloat16"), ("triton", "float32"), ("triton", "bfloat16")]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"hidden": jnp.ones((19, 47))}, r"hidden \(19, 47\)"),
        ({"target_hidden": jnp.ones((18, 48))}, r"target_hidden \(18, 48\)"),
        ({"label": jnp.ones(18, jnp.int32)}, r"label \(18,\)"),
        ({"label": jnp.ones(19)}, "label is float32"),
        ({"head": jnp.ones((300, 48), jnp.bfloat16)}, "head bfloat16"),
        ({"head": jnp.ones((0, 48))}, r"head \(0, 48\)"),
        ({"code": None}, "code without w2"),
        ({"w2": jnp.ones((300, 21))}, r"w2 \(300, 21\)"),
        ({"code": jnp.ones((19, 20), jnp.bfloat16)}, "code bfloat16"),
        ({"backend": "cuda"}, "backend = 'cuda'"),
    ],
)
def test_bad_arguments(wrong, words):
    with pytest.raises(KernelError, match=words):
        api.linear_losses(**{**shapes.inputs(shapes.SHAPES[0]), **wrong})
