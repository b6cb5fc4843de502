"""Fixtures of the checkpoint tests."""

import json
from pathlib import Path

import pytest

from dspark_jax.checkpoints.gguf_file import read_gguf
from dspark_jax.checkpoints.smollm2 import smollm2_gguf
from dspark_jax.checkpoints.target_files import CheckpointError, TargetFiles

GOLDEN = Path(__file__).parent.parent / "golden"


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


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    return GOLDEN / "target_qwen3"
