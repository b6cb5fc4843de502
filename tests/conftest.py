"""Fixtures that several test files share: the real model, golden folders, and a tiny random target."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import dspark_jax
from dspark_jax.checkpoints.gguf_file import read_gguf
from dspark_jax.checkpoints.smollm2 import smollm2_gguf
from dspark_jax.checkpoints.target_files import CheckpointError, TargetFiles
from dspark_jax.config import DecoderConfig

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's GGUF file; the only tests that may need a network."""
    try:
        return smollm2_gguf()
    except CheckpointError as error:
        pytest.skip(f"SmolLM2 is neither in the cache nor can be fetched: {error}")


@pytest.fixture(scope="session")
def smollm2_files(smollm2_path) -> TargetFiles:
    return read_gguf(smollm2_path)


@pytest.fixture(scope="session")
def smollm2_reference() -> dict:
    return json.loads((GOLDEN / "smollm2_reference.json").read_text())


@pytest.fixture(scope="module")
def quick_compile():
    """For modules that compile many programs and run each for milliseconds: halves the time of compilation."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", autouse=True)
def forget_compiled_programs():
    """A process may hold only so many memory maps, and every compiled program takes some: too many crash XLA."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    return GOLDEN / "target_qwen3"


@pytest.fixture(scope="session")
def tiny_target() -> dspark_jax.Target:
    """Three random layers, loud enough (weights times 8) that the text depends on more than the last token."""
    config = DecoderConfig("qwen3", 97, 32, 48, 3, 4, 2, 8, 1e4, 1e-6, True, False, 512)
    target = dspark_jax.random_target(config, seed=1)
    for name, value in target.params.items():
        if name.startswith("layers_"):
            target.params[name] = jax.tree.map(lambda w: w * 8 if w.ndim == 2 else w, value)
    target.params["head"] = target.params["head"] * 30  # temperature 1 then samples from something far from uniform
    return target


@pytest.fixture(scope="session")
def tiny_prompts() -> list[list[int]]:
    """Four prompts of different lengths; the longest takes two chunks of prefill, the shortest none."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, 97, size).tolist() for size in (1, 9, 33, 40)]
