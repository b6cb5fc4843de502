"""The bench of the ops: its last line, what it skips, and that it times no reference under a kernel's name."""

import functools
import json

import jax
import pytest

from pallas_kernels import bench
from pallas_kernels.block_attention import api, shapes

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_the_last_line_is_json(capsys, monkeypatch):
    monkeypatch.setattr(shapes, "SHAPES", shapes.SHAPES[:2])
    monkeypatch.setattr(bench, "copy_bandwidth", lambda platform: 1e9)
    bench.main(["--op", "block_attention", "--backend", "tpu", "--small", "--repeats", "3"])
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    assert "no kernel was timed" in lines[-2]
    assert (summary["platform"], summary["jax"]) == (jax.default_backend(), jax.__version__)
    assert not summary["skipped"]
    assert [result["backend"] for result in summary["results"]] == ["reference"] * 2
    for shape, result in zip(shapes.SHAPES, summary["results"]):
        assert result["shape"]["slots"] == shape.slots
        assert result["quartiles"][0] <= result["seconds"] <= result["quartiles"][1]
        assert result["bandwidth_share"] == pytest.approx(result["bytes"] / result["seconds"] / 1e9)
        assert result["ratio"] == 1


def test_kernels_beside_the_reference(monkeypatch):
    """Interpreted, one kernel that runs, one that is broken, one shape that is refused: each is named."""

    def broken(*args, **kwargs):
        raise NotImplementedError("no such instruction")

    monkeypatch.setitem(api.KERNELS, "triton", broken)
    monkeypatch.setattr(api, "block_attention", functools.partial(api.block_attention, interpret=True))
    refused = shapes.Shape(batch=1, size=1, heads=1, groups=1, dim=24, slots=16, dtype="float32")
    monkeypatch.setattr(shapes, "SHAPES", (shapes.SHAPES[1], refused))
    results, skipped = bench.time_op("block_attention", ("tpu", "triton"), repeats=2, small=True, bandwidth=1e9)
    assert [(r["shape"]["dim"], r["backend"]) for r in results] == [(64, "reference"), (64, "tpu"), (24, "reference")]
    assert [s["reason"].split(":")[0] for s in skipped] == ["triton", "tpu", "triton"]
    assert "no such instruction" in skipped[0]["reason"]
    assert "does not take this shape" in skipped[1]["reason"]


def test_shapes_beyond_the_memory_are_skipped_without_making_them(monkeypatch, capsys):
    huge = shapes.Shape(batch=4096, size=16, heads=64, groups=64, dim=256, slots=1 << 16)
    monkeypatch.setattr(shapes, "REAL", (huge,))
    results, skipped = bench.time_op("block_attention", (), repeats=2, small=False, bandwidth=1e9)
    assert not results
    assert "GiB, the limit is 2.00 GiB" in skipped[0]["reason"]
    assert "skipped" in capsys.readouterr().out


def test_ops_that_are_not_there_are_named(capsys, monkeypatch):
    monkeypatch.setattr(bench, "OPS", ("another_op",))
    monkeypatch.setattr(bench, "copy_bandwidth", lambda platform: 1e9)
    bench.main(["--op", "another_op"])
    assert "another_op: not in this version" in capsys.readouterr().out


def test_the_copy_is_measured():
    assert bench.copy_bandwidth("cpu", repeats=1) > 0


@pytest.mark.parametrize("wrong", [["--repeats", "1"], ["--op", "attention"], ["--backend", "cuda"]])
def test_wrong_flags(wrong, capsys):
    with pytest.raises(SystemExit):
        bench.main(wrong)
    assert wrong[1] in capsys.readouterr().err
