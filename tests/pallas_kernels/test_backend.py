"""Which implementation runs: platform, argument, environment, refusals and probes."""

import types
import warnings

import jax
import pytest

from pallas_kernels import backend


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    monkeypatch.setattr(backend, "_PROVEN", {})
    backend._say_once.cache_clear()


@pytest.fixture
def on_tpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.fixture
def on_gpu(monkeypatch):
    """Returns a function that pretends to be on a GPU of a compute capability."""

    def pretend(capability):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "device_count", lambda: 1)
        monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(compute_capability=capability)])

    return pretend


def test_a_cpu_takes_the_reference():
    assert backend.select("op", ["tpu", "triton"]) == "reference"


def test_the_platform_picks_its_kernel_once_it_is_proven(on_tpu):
    calls = []
    probe = lambda name: calls.append(name) or True  # noqa: E731
    assert backend.select("op", ["tpu"], probe=probe) == "tpu"
    assert backend.select("op", ["tpu"], probe=probe) == "tpu"
    assert calls == ["tpu"]
    assert backend.select("op", ["triton"]) == "reference"


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [
        ("8.9", ("triton",)),
        ("9.0", ("mosaic_gpu", "triton")),
        ("10.0", ("mosaic_gpu", "triton")),
        ("gfx942", ("triton",)),
    ],
)
def test_compute_capability_decides_about_mosaic_gpu(on_gpu, capability, kernels):
    on_gpu(capability)
    assert backend.platform_kernels() == kernels
    assert backend.select("op", ["tpu", "triton", "mosaic_gpu"]) == kernels[0]
    assert backend.select("op", ["triton"]) == "triton"
    assert bool(backend.no_wgmma()) == (capability in ("8.9", "10.0"))


def test_a_kernel_that_is_not_used_leaves_the_work_to_the_next(on_gpu):
    on_gpu("9.0")
    kernels = ["mosaic_gpu", "triton"]
    with pytest.warns(RuntimeWarning, match="mosaic_gpu kernel is not used.*triton is tried next"):
        assert backend.select("op", kernels, probe=lambda name: name == "triton") == "triton"
    refuses = lambda name: "too wide" if name == "mosaic_gpu" else ""  # noqa: E731
    with pytest.warns(RuntimeWarning, match="mosaic_gpu kernel does not take this: too wide; triton is tried next"):
        assert backend.select("op", kernels, refuses=refuses) == "triton"


def test_a_probe_runs_outside_of_a_trace(on_tpu):
    @jax.jit
    def traced(x):
        assert backend.select("op", ["tpu"], probe=lambda name: bool(jax.numpy.ones(()) == 1)) == "tpu"
        return x

    traced(1.0)


def broken(name):
    raise NotImplementedError("no such instruction")


@pytest.mark.parametrize(
    ("probe", "words"), [(lambda name: False, "does not reproduce the reference"), (broken, "no such instruction")]
)
def test_a_kernel_that_fails_its_probe_is_not_used_and_that_is_said_once(on_tpu, probe, words):
    with pytest.warns(RuntimeWarning, match=words):
        assert backend.select("op", ["tpu"], probe=probe) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend.select("op", ["tpu"], probe=probe) == "reference"


def test_a_shape_that_a_kernel_refuses_falls_back_and_says_why(on_tpu):
    with pytest.warns(RuntimeWarning, match="too wide"):
        assert backend.select("op", ["tpu"], refuses=lambda name: "too wide") == "reference"
    with pytest.warns(RuntimeWarning, match="there is no tpu kernel"):
        assert backend.select("op", ["triton"], asked="tpu") == "reference"


def test_several_devices_take_the_reference(on_tpu, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    with pytest.warns(RuntimeWarning, match="several devices"):
        assert backend.select("op", ["tpu"]) == "reference"
    assert backend.select("op", ["tpu"], asked="tpu") == "tpu"


def test_the_platform_s_own_name_says_nothing_of_ops_that_lack_it(on_tpu, monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "tpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend.select("op", ["triton"]) == "reference"
        monkeypatch.setenv(backend.VARIABLE, "auto")
        monkeypatch.setattr(jax, "device_count", lambda: 4)
        assert backend.select("op", ["triton"]) == "reference"


def test_argument_beats_environment_beats_platform(on_tpu, monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, "reference")
    assert backend.select("op", ["tpu"]) == "reference"
    assert backend.select("op", ["tpu"], asked="tpu") == "tpu"


def test_wrong_names_and_platforms(monkeypatch):
    with pytest.raises(backend.KernelError, match="backend = 'cuda'"):
        backend.select("op", ["tpu"], asked="cuda")
    monkeypatch.setenv(backend.VARIABLE, "fast")
    with pytest.raises(backend.KernelError, match="DSPARK_KERNELS = 'fast'"):
        backend.select("op", ["tpu"])
    monkeypatch.setenv(backend.VARIABLE, "tpu")
    with pytest.raises(backend.KernelError, match=r"DSPARK_KERNELS = 'tpu'.*does not run on cpu"):
        backend.select("op", ["tpu"])
    assert backend.select("op", ["tpu"], interpret=True) == "tpu"
    assert backend.select("op", ["tpu"], asked="tpu") == "tpu"  # to be compiled for elsewhere
