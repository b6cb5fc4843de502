"""`load_target`: dtype and placement of the weights, the thinking switch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import dspark_jax
from dspark_jax import generation
from dspark_jax.checkpoints.target_files import CheckpointError

REPO = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(golden):
    return golden / "targets" / "gemma4"


def test_dtype(folder):
    target, exact = dspark_jax.load_target(folder, jnp.bfloat16), dspark_jax.load_target(folder)
    for ours, reference in zip(jax.tree.leaves(target.params), jax.tree.leaves(exact.params), strict=True):
        assert (ours.dtype, reference.dtype) == (jnp.bfloat16, jnp.float32)
        np.testing.assert_array_equal(ours, reference.astype(jnp.bfloat16))


def test_text_of_a_model_on_several_devices(qwen3_folder):
    """In a process of its own, which is told to have four devices."""
    program = f"""
import dspark_jax, jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
place = lambda path, shape: NamedSharding(mesh, PartitionSpec(*["model"] * (len(shape) == 2 and shape[0] % 4 == 0)))
targets = [dspark_jax.load_target({str(qwen3_folder)!r}, sharding=s) for s in (None, place)]
texts = [dspark_jax.generate(t, [[1, 2, 1, 2], [5]], max_new_tokens=8, stop_ids=()).rows for t in targets]
assert [r.token_ids for r in texts[0]] == [r.token_ids for r in texts[1]]
print(len(targets[1].params["embed"].sharding.device_set))
"""
    settings = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | settings | quick, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "4"), done.stderr[-2000:]


def test_sharding(folder):
    mesh = jax.make_mesh((1,), ("model",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    target = dspark_jax.load_target(folder, sharding=everywhere)
    assert all(leaf.sharding == everywhere for leaf in jax.tree.leaves(target.params))
    seen = {}

    def choose(path, shape):
        seen[path] = shape
        return NamedSharding(mesh, PartitionSpec("model") if len(shape) == 2 else PartitionSpec())

    params = dspark_jax.load_target(folder, sharding=choose).params
    assert params["layers_1"]["attention"]["qkv"]["weight"].sharding.spec == PartitionSpec("model")
    paths = {".".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    assert seen == {path: leaf.shape for path, leaf in paths.items()}


def test_thinking_switch_reaches_the_tokenizer(tmp_path, folder):
    shutil.copytree(folder, tmp_path / "m")
    words = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(words))
    (tmp_path / "m" / "chat_template.jinja").write_text("{% if enable_thinking is false %}a{% else %}b{% endif %}")
    for switch, token in ((None, 1), (True, 1), (False, 0)):
        target = dspark_jax.load_target(tmp_path / "m", enable_thinking=switch)
        assert target.tokenizer is not None
        assert target.tokenizer.encode_chat("hi") == [token]
        assert generation.prompt_ids(target, "hi") == [token]


def test_errors_are_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in (tmp_path, tmp_path / "nowhere", "no such id"):
        with pytest.raises(CheckpointError) as raised:
            dspark_jax.load_target(name)
        assert "\n" not in str(raised.value)
