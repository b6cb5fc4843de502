"""The distill command on random weights: a whole run, interruptions, refusals."""

import csv
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import qwen3_4b, smollm2_135m, smollm2_135m_gpu, smollm2_demo, tiny
from dspark_jax import config, load_drafter, random_target
from dspark_jax.checkpoints import orbax_drafter
from dspark_jax.config import ConfigError
from dspark_jax.drafters.dspark import DSparkModel, SharedWeights
from dspark_jax.target import TargetModel
from train import data, distill

REPO = Path(__file__).resolve().parents[2]


def recipe_in(folder: Path, **train) -> config.RecipeConfig:
    recipe = config.from_config_dict(tiny.get_config())
    return dataclasses.replace(recipe, out=str(folder), train=dataclasses.replace(recipe.train, **train))


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with open(folder / f"{name}.csv", newline="") as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, quick_compile) -> Path:
    del quick_compile
    folder = tmp_path_factory.mktemp("runs") / "finished"
    distill.run(recipe_in(folder), resume=False)
    return folder


def test_run_leaves_everything_that_is_needed(finished):
    recipe = json.loads((finished / "recipe.json").read_text())
    assert recipe["train"]["steps"] == 20
    manifest = json.loads((finished / "data" / "manifest.json").read_text())
    assert manifest["tapped_layers"] == [1, 2]
    assert {"chat_template_hash", "target_fingerprint", "data"} <= set(manifest)
    assert [row["step"] for row in rows(finished, "metrics")] == ["5", "10", "15", "20"]
    assert [row["step"] for row in rows(finished, "eval")] == ["10", "20"]
    assert float(rows(finished, "eval")[-1]["accepted_length"]) >= 1.0
    assert list((finished / "tensorboard").iterdir())


def test_trained_drafter_loads_and_keeps_the_output(finished):
    recipe = recipe_in(finished)
    target = random_target(recipe.random_target, recipe.data.seed)
    drafter = load_drafter(finished, target)
    from dspark_jax import generate

    prompts = json.loads((finished / "data" / "prompts.json").read_text())["heldout"]
    plain = generate(target, prompts, max_new_tokens=24)
    drafted = generate(target, prompts, max_new_tokens=24, drafter=drafter)
    assert [r.token_ids for r in plain.rows] == [r.token_ids for r in drafted.rows]


def test_drafter_trained_on_another_kind_of_device_loads(finished, tmp_path):
    folder = tmp_path / "from_gpu"
    shutil.copytree(finished, folder)
    for path in folder.glob("checkpoints/*/params/_sharding"):
        path.write_text(path.read_text().replace("cpu:0", "cuda:0"))
    recipe = recipe_in(finished)
    target = random_target(recipe.random_target, recipe.data.seed)
    here, there = (load_drafter(path, target).params["model"] for path in (finished, folder))
    jax.tree.map(np.testing.assert_array_equal, here, there)


def test_a_smaller_drafter_starts_from_a_trained_one(finished, tmp_path):
    recipe = recipe_in(tmp_path / "small", steps=1, eval_every=0, learning_rate=0.0, heads_learning_rate=0.0)
    smaller = dataclasses.replace(recipe.drafter, block_size=3, draft_vocab_size=64, init_from=str(finished))
    distill.run(dataclasses.replace(recipe, drafter=smaller), resume=False)
    (_, before), (_, after) = (orbax_drafter.read_description(f) for f in (finished, tmp_path / "small"))
    old, new = (orbax_drafter.read_params(f, np.float32) for f in (finished, tmp_path / "small"))
    assert before is not None
    assert after is not None
    assert len(after) == 64
    for name in set(old) - {"sequential"}:
        jax.tree.map(np.testing.assert_array_equal, old[name], new[name])
    np.testing.assert_array_equal(old["sequential"]["w1"], new["sequential"]["w1"])
    old_rows = {int(token): row for token, row in zip(before, old["sequential"]["w2"])}
    compared = [(old_rows[int(t)], row) for t, row in zip(after, new["sequential"]["w2"]) if int(t) in old_rows]
    assert len(compared) > 32
    for expected, row in compared:
        np.testing.assert_array_equal(expected, row)


def test_a_start_from_an_unlike_drafter_is_refused_before_any_work(finished, tmp_path):
    recipe = recipe_in(tmp_path / "other")
    unlike = dataclasses.replace(recipe.drafter, markov_rank=8, init_from=str(finished))
    with pytest.raises(ConfigError, match=r"init_from = .*: a drafter with markov_rank = 16 instead of 8"):
        distill.run(dataclasses.replace(recipe, drafter=unlike), resume=False)
    assert not (tmp_path / "other").exists()


def test_recorded_features_are_the_targets(finished):
    # The observer wrote them during batched decoding; a fresh pass over one row must give the same numbers.
    recipe = recipe_in(finished)
    target = random_target(recipe.random_target, recipe.data.seed)
    dataset = data.read_dataset(finished / "data", drop_loops=False)
    step = target.step((1, 2))
    from dspark_jax import kv_cache

    for i in (0, len(dataset) - 1):
        tokens = dataset.tokens[i]
        output = step(target.params, tokens[None, :-1], kv_cache.init_cache(target.config, 1, 1))
        # bfloat16 keeps 8 bits: half a unit in the last place is 2^-9 relative; float16 keeps 11.
        np.testing.assert_allclose(dataset.features[i].astype(np.float32), output.features[0], rtol=2**-7, atol=1e-4)
        np.testing.assert_allclose(
            dataset.last_hidden[i].astype(np.float32), output.last_hidden[0], rtol=2**-9, atol=2e-3
        )
        answer = slice(dataset.prompt_lengths[i] - 1, None)
        normalizer = jax.nn.logsumexp(output.logits[0], axis=-1)
        np.testing.assert_allclose(dataset.log_normalizer[i][answer], normalizer[answer], rtol=1e-5, atol=1e-4)


def command(folder: Path, *extra: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "train.distill",
        f"--config={REPO / 'configs' / 'tiny.py'}",
        f"--config.out={folder}",
        *extra,
    ]


def environment() -> dict[str, str]:
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # as this process compiles: the same losses to the last bit
    return {**os.environ, "PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu", **quick}


@pytest.mark.parametrize("moment", ["during a step", "during a save"])
def test_killed_run_resumes_to_the_same_losses(finished, tmp_path, moment):
    folder = tmp_path / "killed"
    shutil.copytree(finished / "data", folder / "data")
    checkpoints = folder / "checkpoints"

    def reached() -> bool:
        names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
        # Orbax writes a step under a temporary name and renames it at the end.
        return any(name.isdigit() for name in names) if moment == "during a step" else any("tmp" in n for n in names)

    process = subprocess.Popen(
        command(folder, "--config.train.save_every=1"), cwd=REPO, env=environment(), stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 300
        while not reached():
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, "no checkpoint in five minutes"
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (checkpoints / "20").exists()
    distill.run(recipe_in(folder, save_every=1), resume=True)
    assert rows(folder, "metrics") == rows(finished, "metrics")
    assert rows(folder, "eval") == rows(finished, "eval")


def test_interrupted_data_continues(finished, tmp_path):
    folder = tmp_path / "data_only"
    (folder / "data").parent.mkdir(parents=True)
    shutil.copytree(finished / "data", folder / "data")
    lost = data.shard_path(folder / "data", 1)
    before = dict(np.load(lost))
    lost.unlink()
    distill.run(recipe_in(folder, steps=1, eval_every=0), resume=False)
    after = dict(np.load(lost))
    np.testing.assert_array_equal(before["tokens"], after["tokens"])
    np.testing.assert_array_equal(before["features"], after["features"])


def test_a_run_from_before_a_field_was_added_is_the_same_run(tmp_path):
    recipe = recipe_in(tmp_path, pack=False)
    distill.claim_folder(recipe, resume=False)
    stored = json.loads((tmp_path / "recipe.json").read_text())
    del stored["train"]["pack"]
    (tmp_path / "recipe.json").write_text(json.dumps(stored))
    distill.claim_folder(recipe, resume=True)
    with pytest.raises(ConfigError, match=r"another train\.pack"):
        distill.claim_folder(recipe_in(tmp_path, pack=True), resume=True)


def test_folder_of_another_run_is_refused(finished):
    with pytest.raises(ConfigError, match="holds a run already; pass --resume"):
        distill.run(recipe_in(finished), resume=False)
    with pytest.raises(ConfigError, match=r"another train\.learning_rate"):
        distill.run(recipe_in(finished, learning_rate=1.0), resume=True)


def test_data_of_another_recipe_is_refused(finished, tmp_path):
    shutil.copytree(finished / "data", tmp_path / "data")
    recipe = recipe_in(tmp_path)
    other = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, max_new_tokens=8))
    with pytest.raises(data.DataError, match="made with another data"):
        distill.run(other, resume=False)


def test_drafter_of_another_target_is_refused(finished):
    recipe = recipe_in(finished)
    other = random_target(dataclasses.replace(recipe.random_target, rope_theta=5e4))
    with pytest.raises(orbax_drafter.CheckpointError, match="pass force=True"):
        load_drafter(finished, other)
    assert load_drafter(finished, other, force=True).name == "dspark"
    wider = random_target(dataclasses.replace(recipe.random_target, width=64))
    with pytest.raises(orbax_drafter.CheckpointError, match="belongs to a target of vocabulary 199 and width 48"):
        load_drafter(finished, wider, force=True)
    with pytest.raises(ConfigError, match=r"trained for 1\.\.4"):
        load_drafter(finished, random_target(recipe.random_target, recipe.data.seed), block_size=5)


def test_folder_without_drafter_is_refused(tmp_path):
    with pytest.raises(orbax_drafter.CheckpointError, match="no drafter folder"):
        load_drafter(tmp_path, random_target(config.from_config_dict(tiny.get_config()).random_target))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--config.train.stepz=3", "train.distill: --config: there is no such field: 'stepz' Did you mean"),
        ("--config.target.dtype=x", "train.distill: --config: an override goes below a plain value"),
        ("steps=3", "unexpected argument 'steps=3'"),
        ("--config.train.steps=0", r"config.train.steps = 0: use 1 or more"),
        ("--config.decode.temperature=-1.0", "config.decode.temperature = -1.0: use 0 or more"),
    ],
)
def test_command_refuses_bad_fields(tmp_path, extra, message):
    done = subprocess.run(
        command(tmp_path / "out", extra), cwd=REPO, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", [tiny, smollm2_demo, smollm2_135m, smollm2_135m_gpu, qwen3_4b])
def test_every_config_is_valid(module):
    recipe = config.from_config_dict(module.get_config())
    assert recipe.name == module.__name__.split(".")[-1]


def test_published_recipe_builds_without_weights():
    recipe = config.from_config_dict(qwen3_4b.get_config())
    body = config.DecoderConfig(
        family="qwen3",
        vocab_size=151936,
        width=2560,
        mlp_width=9728,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1e6,
        norm_eps=1e-6,
        qk_norm=True,
        max_positions=40960,
    )
    from dspark_jax import kv_cache
    from dspark_jax.loading import Target

    target = Target(body, None, None, "Qwen/Qwen3-4B", "token_major", jax.numpy.bfloat16)
    drafter = distill.drafter_config(recipe, target)
    model = DSparkModel(drafter, "token_major", jax.numpy.bfloat16)
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jax.numpy.bfloat16)  # noqa: E731
    shared = SharedWeights(embed=struct(151936, 2560), head=struct(151936, 2560), vocab=None)
    params = jax.eval_shape(
        lambda key, shared, features: model.init(key, shared, features, method="init_everything"),
        jax.random.key(0),
        shared,
        struct(1, 1, 5, 2560),
    )["params"]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    layer = 2560 * (32 + 2 * 8) * 128 + 32 * 128 * 2560 + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
    heads = 2 * 151936 * 256 + (2560 + 256 + 1)
    assert count == 5 * layer + 5 * 2560 * 2560 + 2 * 2560 + heads
    cache = kv_cache.init_cache(body, 1, 8, jax.numpy.bfloat16)
    whole = jax.eval_shape(
        TargetModel(body, "token_major", (1,), jax.numpy.bfloat16).init,
        jax.random.key(0),
        jax.ShapeDtypeStruct((1, 1), jax.numpy.int32),
        cache,
    )
    assert 3.9e9 < sum(leaf.size for leaf in jax.tree.leaves(whole)) < 4.1e9
