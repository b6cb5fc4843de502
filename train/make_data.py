"""Make a recipe's data: prompts from its source, answers and features from the target, shard by shard."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dspark_jax import text
from dspark_jax.config import RecipeConfig
from dspark_jax.loading import Target
from train import data, domain, generate

PROMPTS_FILE = "prompts.json"

Progress = Callable[[str, int, int], None]  # (what, how many more are done, total)


def tapped_layers(recipe: RecipeConfig, target: Target) -> tuple[int, ...]:
    """Returns the recipe's tapped layers, or five spread from the second to the last but one."""
    if recipe.drafter.tapped_layers:
        return recipe.drafter.tapped_layers
    last = target.config.num_layers - 2
    count = min(5, last + 1)
    return tuple(sorted({int(i) for i in np.linspace(min(1, last), last, count).round()}))


def make_prompts(recipe: RecipeConfig, target: Target, progress: Progress) -> dict[str, list[list[int]]]:
    """Returns token ids of the training prompts ("train") and of the held-out prompts ("heldout").

    Raises:
      TextError: the prompt file is missing or has a malformed line.
      DataError: not enough prompts that are short enough.
    """
    cfg, tokenizer = recipe.data, target.tokenizer
    wanted = {"train": cfg.num_prompts, "heldout": cfg.num_heldout}
    if recipe.target == "random":  # no tokenizer: random tokens stand in for prompts
        rng = np.random.default_rng(cfg.seed)
        size = max(2, cfg.max_prompt_tokens // 2)
        draw = lambda: rng.integers(1, target.config.vocab_size, size).tolist()  # noqa: E731
        return {split: [draw() for _ in range(count)] for split, count in wanted.items()}
    if tokenizer is None or tokenizer.chat_template is None:
        raise data.DataError(f"target {target.name} has no chat template: prompts can't be rendered; use a chat model")
    if cfg.source.startswith("domain"):
        _, _, name = cfg.source.partition(":")
        texts = {split: domain.domain_prompts(name, split, cfg.seed, count) for split, count in wanted.items()}
        chats = {split: [tokenizer.encode_chat(t) for t in lines] for split, lines in texts.items()}
    else:
        if cfg.source == "file":
            conversations = text.read_prompts(cfg.prompts_path)
            random.Random(cfg.seed).shuffle(conversations)
            ids = [tokenizer.encode_chat(messages) for messages in conversations]
        else:
            # Prompts that are too long as a chat are dropped below: ask for a few more.
            spare = sum(wanted.values()) + sum(wanted.values()) // 8
            overhead = len(tokenizer.encode_chat("a"))
            lines = generate.write_prompts(
                target,
                spare,
                cfg.max_prompt_tokens - overhead,
                cfg.batch_size,
                cfg.seed,
                progress=lambda more: progress("prompts", more, spare),
            )
            ids = [tokenizer.encode_chat(line) for line in lines]
        ids = [chat for chat in ids if len(chat) <= cfg.max_prompt_tokens]
        if len(ids) < sum(wanted.values()):
            raise data.DataError(
                f"only {len(ids)} prompts of at most {cfg.max_prompt_tokens} tokens; {sum(wanted.values())} are wanted:"
                " lower config.data.num_prompts or raise config.data.max_prompt_tokens"
            )
        chats = {"heldout": ids[: cfg.num_heldout], "train": ids[cfg.num_heldout : sum(wanted.values())]}
    return {split: [chat for chat in lines if len(chat) <= cfg.max_prompt_tokens] for split, lines in chats.items()}


def manifest_of(recipe: RecipeConfig, target: Target, taps: tuple[int, ...]) -> dict:
    """Returns everything that the data depends on; data of another manifest is never mixed in."""
    return {
        "data": dataclasses.asdict(recipe.data),
        "target": target.name,
        "target_fingerprint": target.config.fingerprint(),
        "tapped_layers": list(taps),
        "chat_template_hash": target.tokenizer.chat_template_hash if target.tokenizer else "",
    }


def make_data(recipe: RecipeConfig, target: Target, folder: Path, progress: Progress) -> dict[str, list[list[int]]]:
    """Makes what is missing of the data in `folder`: prompts, then one shard per batch of answers.

    Returns:
      the prompts' token ids by split.

    Raises:
      DataError: the folder holds data of another recipe or target.
    """
    taps = tapped_layers(recipe, target)
    manifest, path = manifest_of(recipe, target, taps), folder / "manifest.json"
    if path.exists():
        found = json.loads(path.read_text())
        differing = sorted(key for key in manifest if found.get(key) != json.loads(json.dumps(manifest[key])))
        if differing:
            raise data.DataError(
                f"{folder} holds data made with another {', '.join(differing)};"
                " choose another --config.out or delete it"
            )
    else:
        data.write_json(path, manifest)
    prompts_path = folder / PROMPTS_FILE
    if prompts_path.exists():
        prompts = json.loads(prompts_path.read_text())
    else:
        prompts = make_prompts(recipe, target, progress)
        data.write_json(prompts_path, prompts)
    stop_ids = target.tokenizer.eos_ids if target.tokenizer else ()
    batch, lines = recipe.data.batch_size, prompts["train"]
    for index in range(-(-len(lines) // batch)):
        rows = lines[index * batch : (index + 1) * batch]
        if not data.shard_path(folder, index).exists():
            first = index * batch
            greedy = np.random.default_rng([recipe.data.seed, index]).random(len(rows)) < recipe.data.greedy_share
            temperatures = np.where(greedy, 0.0, recipe.data.temperature)
            answers, mass = generate.answer(
                target,
                taps,
                rows,
                stop_ids,
                recipe.data.max_prompt_tokens,
                recipe.data.max_new_tokens,
                temperatures.tolist(),
                recipe.data.seed,
                first,
                record=True,
                pad_to=batch,
            )
            assert mass is not None
            data.write_shard(folder, index, answers, {"mass": mass})
        progress("answers", len(rows), len(lines))
    return prompts
