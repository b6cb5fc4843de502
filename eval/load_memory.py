"""Measure how much memory loading a target takes.

  python -m eval.load_memory --gigabytes 4 [--dtype bfloat16] [--stored bfloat16]

Question: does loading stay near the model's own size, or are the weights held twice on the way from disk to device?

Method: a random Llama of about that size in the wanted dtype is saved as sharded safetensors in a temporary folder (it
needs that much room on disk). A process of its own loads it with `dspark_jax.load_target` and reports the most memory
that was ever resident in it, mapped files included, and what was resident before it began. The ratio is of the whole
peak, interpreter and libraries included, to the size in the wanted dtype; under 1.3 is the goal for models of some
gigabytes. On an accelerator the weights live elsewhere; this is about the CPU. The last line printed is JSON.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import app, flags
from safetensors.numpy import save_file

import dspark_jax
from dspark_jax.checkpoints.target_files import expected_tensors
from dspark_jax.config import DecoderConfig
from dspark_jax.machine import describe_machine
from eval import bandwidth

_GIGABYTES = flags.DEFINE_float(
    "gigabytes", 1.0, "Size of the model in the wanted dtype, in 10^9 bytes.", lower_bound=0.2
)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "The wanted dtype.")
_STORED = flags.DEFINE_enum("stored", None, ["float32", "bfloat16"], "Dtype of the files; default: the wanted one.")
_SHARD_BYTES = flags.DEFINE_integer("shard_bytes", 500_000_000, "Size of a shard.", lower_bound=1)
_LOAD = flags.DEFINE_string("load", None, "For the process of its own: the folder to load.")


def model_of(parameters: int) -> DecoderConfig:
    """Returns a Llama of about so many parameters, shaped like those of a few billion."""
    body = {"family": "llama", "vocab_size": 32768, "num_heads": 16, "num_kv_heads": 4, "head_dim": 128}
    for width in (2048, 1024, 512):
        config = DecoderConfig(**body, width=width, mlp_width=4 * width, num_layers=1)
        layer = count(config) - (rest := 32768 * width)
        if rest + layer <= parameters or width == 512:
            layers = max(round((parameters - rest) / layer), 1)
            return DecoderConfig(**body, width=width, mlp_width=4 * width, num_layers=layers)
    raise AssertionError("unreachable")


def count(config: DecoderConfig) -> int:
    """Returns the number of parameters."""
    return sum(int(np.prod(shape)) for shape in expected_tensors(config).values())


def write(folder: Path, config: DecoderConfig, dtype: Any, shard_bytes: int) -> None:
    """Saves random weights as a sharded Hugging Face folder, a shard at a time."""
    noise = (0.02 * np.random.default_rng(0).standard_normal(1 << 20)).astype(dtype)
    shard, held, weight_map = {}, 0, {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name)
        weight_map.update(dict.fromkeys(shard, name))

    for name, shape in expected_tensors(config).items():
        shard[name] = np.resize(noise, shape)
        held += shard[name].nbytes
        if held >= shard_bytes:
            flush()
            shard, held = {}, 0
    if shard:
        flush()
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tie_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def resident(kind: str) -> int:
    """Returns the memory resident in this process in bytes: now ("VmRSS"), or the most ever ("VmHWM")."""
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage calls the maximum includes that of the process that started this one
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines[kind].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def load(folder: str, dtype: str) -> dict[str, int]:
    """Loads a target and returns what this took, in bytes."""
    jnp.zeros(1).block_until_ready()  # what the device itself takes is there before
    before = resident("VmRSS")
    target = dspark_jax.load_target(folder, jnp.dtype(dtype))
    weights = bandwidth.weight_bytes(target.params)
    return {"peak": resident("VmHWM"), "before": before, "after": resident("VmRSS"), "weights": weights}


def run() -> dict[str, Any]:
    """Makes the model, loads it in a process of its own, prints and returns the result."""
    dtype, stored = _DTYPE.value, _STORED.value or _DTYPE.value
    config = model_of(int(_GIGABYTES.value * 1e9 / jnp.dtype(dtype).itemsize))
    with tempfile.TemporaryDirectory(prefix="load_memory-") as folder:
        write(Path(folder), config, jnp.dtype(stored), _SHARD_BYTES.value)
        shards = len(list(Path(folder).glob("*.safetensors")))
        command = [sys.executable, "-m", "eval.load_memory", f"--load={folder}", f"--dtype={dtype}"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"eval.load_memory: loading failed: {process.stderr.strip()[-2000:]}")
    found = json.loads(process.stdout.strip().splitlines()[-1])
    size = found["weights"]
    print(describe_machine())
    print(f"{count(config) / 1e6:.0f} million parameters in {shards} shards of {stored}, loaded as {dtype}\n")
    for name in ("weights", "peak", "before", "after"):
        print(f"{name:<8}{found[name] / 1e9:8.2f} GB{found[name] / size:8.2f}")
    return {
        "machine": describe_machine(),
        "dtype": dtype,
        "stored": stored,
        "shards": shards,
        "size_gb": size / 1e9,
        "peak_gb": found["peak"] / 1e9,
        "before_gb": found["before"] / 1e9,
        "after_gb": found["after"] / 1e9,
        "ratio": found["peak"] / size,
    }


def main(argv: list[str]) -> None:
    """Runs the command; the last line is JSON."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    print(json.dumps(load(_LOAD.value, _DTYPE.value) if _LOAD.value else run()))


if __name__ == "__main__":
    app.run(main)
