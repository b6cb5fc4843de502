"""The measurement of memory at load, on a small model: what it writes is what it loads, and it prints JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from dspark_jax.checkpoints.huggingface import read_folder
from dspark_jax.checkpoints.target_files import expected_tensors
from eval import load_memory


@pytest.mark.parametrize("parameters", [100_000_000, 500_000_000, 2_000_000_000])
def test_size(parameters):
    assert load_memory.count(load_memory.model_of(parameters)) == pytest.approx(parameters, rel=0.1)


def test_shards(tmp_path):
    config = load_memory.DecoderConfig("llama", 64, 32, 64, 2, 4, 2, 8, 1e4, 1e-6, False, True, 2048)
    load_memory.write(tmp_path, config, jnp.dtype("bfloat16"), 10_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    files = read_folder(tmp_path)
    assert files.config == config
    assert set(files.tensors) == set(expected_tensors(config))


def test_command():
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-m", "eval.load_memory", "--gigabytes=0.2", "--shard_bytes=50000000"]
    environment = os.environ | {"PYTHONPATH": str(root)}
    process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=environment)
    result = json.loads(process.stdout.strip().splitlines()[-1])
    assert result["shards"] > 2
    assert result["size_gb"] == pytest.approx(0.2, rel=0.1)
    # Loading itself adds less than a second copy of the weights.
    assert result["before_gb"] < result["after_gb"] <= result["peak_gb"] < result["before_gb"] + 1.9 * result["size_gb"]
