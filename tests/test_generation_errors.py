"""Requests and drafters that can't be served: each a clear error, before anything is computed."""

import dataclasses

import numpy as np
import pytest

import dspark_jax
from dspark_jax import generation
from dspark_jax.checkpoints.target_files import CheckpointError
from dspark_jax.config import ConfigError, DrafterConfig
from dspark_jax.drafter_loading import check_block_size, check_target
from dspark_jax.drafters.dspark import DSparkDrafter
from dspark_jax.generation import GenerationError


class Template:
    """Stands in for a tokenizer: only its hash and special tokens are read."""

    chat_template_hash = "abc"
    pad_id = None
    eos_ids = ()


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompts: give at least one"),
        ([[]], {}, "empty prompt: give it at least one token"),
        ([[1], ""], {}, "empty prompt"),
        (["  \n"], {}, "empty prompt"),
        (["hello"], {}, "target random has no tokenizer: pass token ids"),
        ([[{"role": "user", "content": "hello"}]], {}, "has no tokenizer"),
        ([[5, 97]], {}, r"token id 97 is outside the vocabulary 0\.\.96"),
        ([[-1]], {}, "token id -1 is outside"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens = -1: use 1 or more"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens = 0: use 1 or more"),
        ([[1], [2]], {"max_new_tokens": [3, -2]}, "max_new_tokens = -2"),
        ([[1]], {"temperature": -0.1}, r"temperature = -0\.1"),
        ([[1]], {"temperature": float("nan")}, "temperature = nan"),
        ([[1]], {"temperature": float("inf")}, "temperature = inf"),
        ([[1]], {"temperature": 1e-9}, r"temperature = 1e-09: use 0 \(greedy\) or a positive number, 1e-06 at least"),
        ([[1], [2]], {"temperature": [1.0, float("inf")]}, "temperature = inf"),
        ([[1]], {"top_p": 0.0}, "top_p = 0: use a probability above 0"),
        ([[1]], {"top_p": 1.5}, r"top_p = 1\.5"),
        ([[1]], {"top_p": float("nan")}, "top_p = nan"),
        ([[1]], {"top_k": -1}, r"top_k = -1: use a whole number, 0 \(off\) or more"),
        ([[1]], {"top_k": 2.5}, r"top_k = 2\.5: use a whole number"),
        ([[1], [2]], {"min_p": [0.1, 1.1]}, r"min_p = 1\.1: use a share"),
        ([[1]], {"min_p": -0.1}, r"min_p = -0\.1"),
        ([[1]], {"repetition_penalty": 0.0}, "repetition_penalty = 0: use a positive number, 1 = off"),
        ([[1]], {"repetition_penalty": float("inf")}, "repetition_penalty = inf"),
        ([[1]], {"top_p": "most"}, "top_p = 'most': give a number"),
        ([[1]], {"verifier": "tree"}, "verifier = 'tree': use token or block"),
        ([[1]], {"stop_ids": [97]}, r"stop token 97 is outside the vocabulary 0\.\.96"),
        ([[1]], {"stop_ids": [3, -1]}, "stop token -1 is outside"),
        ([[1] * 100], {"cache_slots": 128}, r"a prompt of 100 tokens doesn't fit a cache of 128 slots"),
        ([[1] * 90], {"cache_slots": 128, "max_new_tokens": 20}, "need 142 cache slots of 128: lower max_new_tokens"),
        ([[1] * 500], {"max_new_tokens": 13}, "are 513 tokens, the target was trained for 512"),
    ],
)
@pytest.mark.parametrize("lookup", [False, True])
def test_requests_are_refused(tiny_target, prompts, options, message, lookup):
    drafter = dspark_jax.prompt_lookup(3) if lookup else None
    with pytest.raises(GenerationError, match=message):
        dspark_jax.generate(tiny_target, prompts, drafter=drafter, **options)
    if len(prompts) == 1:
        with pytest.raises(GenerationError, match=message):
            next(dspark_jax.stream(tiny_target, prompts[0], drafter=drafter, **options))


def test_settings_of_the_wrong_shape_are_refused(tiny_target):
    with pytest.raises(GenerationError, match=r"max_new_tokens has shape \[2\]: give one value, or one for each of 1"):
        dspark_jax.generate(tiny_target, [[1]], max_new_tokens=[3, 4])
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        with pytest.raises(GenerationError, match=rf"{name} has shape \[3\]: give one value, or one for each of 2"):
            dspark_jax.generate(tiny_target, [[1], [2]], **{name: [1, 1, 1]})
    with pytest.raises(GenerationError, match="give a list of prompts"):
        dspark_jax.generate(tiny_target, "hello")
    for widths in ((1, 2), (4, 2), (2, 2, 4)):
        with pytest.raises(GenerationError, match=r"use ascending widths that end at K \+ 1 = 4"):
            dspark_jax.generate(tiny_target, [[1]], drafter=dspark_jax.prompt_lookup(3), widths=widths)


def test_the_message_says_which_cache_would_do(tiny_target):
    with pytest.raises(GenerationError, match=r"use cache_slots >= (\d+)") as error:
        generation.prepare(tiny_target, [[1] * 100], max_new_tokens=20, cache_slots=64)
    slots = int(str(error.value).rpartition(">= ")[2])
    generation.prepare(tiny_target, [[1] * 100], max_new_tokens=20, cache_slots=slots)


def test_prompts_may_be_arrays(tiny_target):
    assert generation.prompt_ids(tiny_target, np.array([3, 4])) == [3, 4]


def test_a_threshold_needs_confidences(tiny_target):
    with pytest.raises(ConfigError, match="policy 'threshold' needs a drafter with a confidence head"):
        dspark_jax.generate(
            tiny_target,
            [[1, 2]],
            drafter=dspark_jax.prompt_lookup(2),
            policy=dspark_jax.schedules.threshold(0.5),
            max_new_tokens=4,
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "block_size = 0"), ((3, 2, 3), "min_ngram = 3, max_ngram = 2"), ((3, 2, 0), "= 0")],
)
def test_prompt_lookup_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        dspark_jax.prompt_lookup(*arguments)


def drafter_config(target, **fields) -> DrafterConfig:
    body = dataclasses.replace(target.config, num_layers=1)
    return DrafterConfig(**{"decoder": body, "block_size": 4, "tapped_layers": (0, 1), "markov_rank": 4, **fields})


def test_block_size(tiny_target):
    config = drafter_config(tiny_target)
    assert [check_block_size(config, k) for k in (0, 1, 4)] == [4, 1, 4]
    for k in (-1, 5):
        with pytest.raises(ConfigError, match=rf"block_size = {k}: this drafter was trained for 1\.\.4 draft tokens"):
            check_block_size(config, k)


def test_a_fitting_drafter_is_taken(tiny_target):
    check_target(drafter_config(tiny_target), tiny_target, force=False)
    check_target(drafter_config(tiny_target, target_fingerprint=tiny_target.config.fingerprint()), tiny_target, False)


@pytest.mark.parametrize("force", [False, True])
def test_another_shape_is_refused_always(tiny_target, force):
    for field in ("vocab_size", "width"):
        body = dataclasses.replace(tiny_target.config, num_layers=1, **{field: getattr(tiny_target.config, field) * 2})
        with pytest.raises(CheckpointError, match="the drafter belongs to a target of vocabulary"):
            check_target(drafter_config(tiny_target, decoder=body), tiny_target, force)
    with pytest.raises(CheckpointError, match="taps layer 2; random has 3 layers"):
        check_target(drafter_config(tiny_target, tapped_layers=(0, 2)), tiny_target, force)


def test_another_target_is_refused_unless_forced(tiny_target):
    config = drafter_config(tiny_target, target_fingerprint="0" * 16, target_name="another model")
    with pytest.raises(CheckpointError, match=r"was trained for another model .* pass force=True"):
        check_target(config, tiny_target, force=False)
    check_target(config, tiny_target, force=True)


def test_another_chat_template_is_refused_unless_forced(tiny_target):
    target = dataclasses.replace(tiny_target, tokenizer=Template())
    check_target(drafter_config(target, chat_template_hash="abc"), target, force=False)
    config = drafter_config(target, chat_template_hash="xyz")
    with pytest.raises(CheckpointError, match="was trained with chat template xyz, the target's is abc"):
        check_target(config, target, force=False)
    check_target(config, target, force=True)


def test_a_folder_without_a_drafter_is_refused(tiny_target, tmp_path):
    with pytest.raises(CheckpointError, match="is no drafter folder"):
        dspark_jax.load_drafter(tmp_path, tiny_target)
    (tmp_path / "drafter.json").write_text("{")
    with pytest.raises(CheckpointError, match="can't be read"):
        dspark_jax.load_drafter(tmp_path, tiny_target)


@pytest.mark.parametrize(("fields", "message"), [(("beam", 0), "draft_sampling = 'beam'"), (("greedy", -1), "= -1")])
def test_drafter_options_are_checked(fields, message):
    with pytest.raises(ConfigError, match=message):
        DSparkDrafter(None, 3, *fields)  # type: ignore[arg-type]
