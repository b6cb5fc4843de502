"""What the commands of this package share: flags, recipe, target, prompts, methods, tables, errors."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import config_flags

import dspark_jax
from dspark_jax import commands, config, generation, schedules, sps, text
from dspark_jax.checkpoints.drafter_formats import read_drafter_files
from dspark_jax.checkpoints.load import is_hub_id
from dspark_jax.checkpoints.target_files import CheckpointError
from dspark_jax.drafter_loading import check_block_size, load_drafter, prompt_lookup
from dspark_jax.drafters.dspark import DSparkDrafter
from dspark_jax.drafters.eagle3 import Eagle3Drafter
from dspark_jax.generation import LoadedDrafter
from dspark_jax.scheduler import Policy

_HERE = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True, eq=False)
class Method:
    """A way to decode.

    Attributes:
      name: for tables.
      drafter: None decodes autoregressively.
      policy: verify-length policy; None verifies whole blocks.
    """

    name: str
    drafter: LoadedDrafter | None = None
    policy: Policy | None = None


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """Prompts under one name, as token ids."""

    name: str
    prompts: list[list[int]]


def new_flags(argv: Sequence[str]) -> flags.FlagValues:
    """Returns flag values of a command's own, not absl's global ones, with the flags that all commands here share."""
    v = flags.FlagValues()
    default = str(_HERE.parent / "configs" / "smollm2_demo.py")
    with commands.config_errors():
        config_flags.DEFINE_config_file("config", default, "Recipe.", flag_values=v, sys_argv=list(argv))
    flags.DEFINE_string("drafter", None, "Folder of a trained drafter, or folder or hub id of a published one.", v)
    flags.DEFINE_string("prompts", None, "JSONL file of prompts, the set 'file'.", v)
    flags.DEFINE_list("sets", None, "Of heldout, general, file, random; all that there are by default.", v)
    flags.DEFINE_integer("num_prompts", 20, "Prompts per set, the first ones.", flag_values=v)
    flags.DEFINE_integer("max_new_tokens", None, "Tokens per answer; config.decode's by default.", flag_values=v)
    flags.DEFINE_list("block_sizes", None, "K's to draft with; config.decode's or the trained one by default.", v)
    known = f"Of {', '.join(config.POLICIES)}, NAME+conservative_tokens."
    flags.DEFINE_list("policies", None, f"{known} full, threshold and config.decode's by default.", v)
    flags.DEFINE_float("threshold", None, "Of that policy; config.decode's by default.", flag_values=v)
    flags.DEFINE_string("sps", None, "File of eval.step_curve --sps; config.decode's by default.", v)
    flags.DEFINE_list("conservative_tokens", None, "Token ids that end a block; config.decode's by default.", v)
    flags.DEFINE_integer("lookup_block_size", 3, "K of prompt lookup.", flag_values=v)
    flags.DEFINE_integer("seed", 0, "Seed of the random streams.", flag_values=v)
    flags.DEFINE_bool("help", False, "Show this help.", v, short_name="h")
    return v


def read_flags(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Reads the command line (argv[0] is the program).

    Raises:
      ConfigError: an unknown config field or argument, or a number that is too small.
    """
    with commands.config_errors():
        unexpected = values(list(argv))[1:]
    if unexpected:
        raise config.ConfigError(f"unexpected argument {unexpected[0]!r}: every option is a --flag")
    at_least_one(values, "num_prompts", "max_new_tokens", "lookup_block_size")


def at_least_one(values: flags.FlagValues, *names: str) -> None:
    """Refuses counts below 1.

    Raises:
      ConfigError: names the flag.
    """
    for name in names:
        if getattr(values, name) is not None and getattr(values, name) < 1:
            raise config.ConfigError(f"--{name} = {getattr(values, name)}: use 1 or more")


def read_recipe(values: flags.FlagValues) -> config.RecipeConfig:
    """Returns the recipe: --config's, or the one that the drafter was trained by, with the command line's overrides."""
    try:
        if values.drafter and not values["config"].present:
            path = Path(values.drafter) / "recipe.json"
            if path.exists():
                recipe = config.to_config_dict(config.from_config_dict(json.loads(path.read_text())))
                recipe.update_from_flattened_dict(config_flags.get_override_values(values["config"]))
                return config.from_config_dict(recipe)
        return config.from_config_dict(values.config)
    except OSError as error:  # the config flag puts off its own errors until the config is used
        raise config.ConfigError(f"--config: {error}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{values.drafter}/recipe.json is damaged ({error}): pass --config instead") from error


def load_target(recipe: config.RecipeConfig) -> dspark_jax.Target:
    """Loads the recipe's target, or makes the random one."""
    dtype = jnp.dtype(recipe.dtype)
    if recipe.target == "random":
        return dspark_jax.random_target(recipe.random_target, recipe.data.seed, dtype)
    return dspark_jax.load_target(recipe.target, dtype)


def read_methods(values: flags.FlagValues, recipe: config.RecipeConfig) -> Callable[[Any], list[Method]]:
    """Checks what is to be compared, and returns how to load it for a target (the slow part comes last)."""
    lookup = prompt_lookup(values.lookup_block_size)
    methods = [Method(f"prompt lookup K={values.lookup_block_size}", lookup)]
    if not values.drafter:
        for name in ("block_sizes", "policies", "threshold", "sps", "conservative_tokens"):
            if values[name].present:
                raise config.ConfigError(f"--{name} = {values[name].value}: it needs a --drafter")
        return lambda target: methods
    if not Path(values.drafter).is_dir() and not is_hub_id(values.drafter):
        raise CheckpointError(
            f"--drafter = {values.drafter}: there is no such folder; pass the output of train.distill"
        )
    description = read_drafter_files(values.drafter).config
    sizes = numbers(values.block_sizes, int, "block_sizes") if values.block_sizes else [recipe.decode.block_size]
    if values.block_sizes and min(sizes) < 1:
        raise config.ConfigError(f"--block_sizes = {','.join(values.block_sizes)}: use 1 or more")
    sizes = [check_block_size(description, size) for size in sizes]
    make_policies = read_policies(values, recipe.decode, description)
    make_policies("")  # complains now, not after the target is loaded

    def load(target: dspark_jax.Target) -> list[Method]:
        policies = make_policies(target.config.fingerprint())
        decode = recipe.decode
        loaded = load_drafter(
            values.drafter, target, draft_sampling=decode.draft_sampling, candidates=decode.candidates
        )
        assert isinstance(loaded.drafter, DSparkDrafter | Eagle3Drafter)
        for size in sizes:
            cut = dataclasses.replace(loaded, drafter=dataclasses.replace(loaded.drafter, block_size=size))
            methods.extend(Method(f"{loaded.name} K={size} {label}", cut, policies[label]) for label in policies)
        return methods

    return load


def read_policies(
    values: flags.FlagValues, decode: config.DecodeConfig, description: config.DrafterConfig
) -> Callable[[str], dict[str, schedules.Policy]]:
    """Checks the policies' names, and returns how to make them, by label, for a target's fingerprint."""
    default = ["full", *(["threshold"] if description.confidence_head else []), decode.policy]
    names = list(dict.fromkeys(values.policies or default))
    threshold = decode.threshold if values.threshold is None else values.threshold
    ids = decode.conservative_tokens
    if values.conservative_tokens:
        ids = numbers(values.conservative_tokens, int, "conservative_tokens")
    for name in names:
        config.check_policy_name(name, "--policies")
        if name.partition("+")[0] in config.CONFIDENCE_POLICIES and not description.confidence_head:
            raise config.ConfigError(f"--policies = {name}: this drafter has no confidence head; use full")

    def make(fingerprint: str) -> dict[str, schedules.Policy]:
        path = values.sps or decode.sps
        table = sps.load(path, fingerprint) if path else None
        label = {name: re.sub("^threshold", f"threshold {threshold:g}", name) for name in names}
        return {
            label[name]: schedules.from_name(name, confidence_threshold=threshold, table=table, conservative_ids=ids)
            for name in names
        }

    return make


def read_sets(values: flags.FlagValues, target: dspark_jax.Target) -> list[PromptSet]:
    """Reads the prompt sets as token ids."""
    heldout = Path(values.drafter) / "data" / "prompts.json" if values.drafter else None
    there = {
        "heldout": heldout is not None and heldout.exists(),
        "general": target.tokenizer is not None,
        "file": bool(values.prompts),
        "random": target.tokenizer is None and not values.drafter,
    }
    sets = []
    for name in values.sets or [name for name in there if there[name]]:
        if name not in there:
            raise config.ConfigError(f"--sets = {name}: use {', '.join(there)}")
        if name == "heldout":
            if heldout is None or not heldout.exists():
                raise CheckpointError(f"--sets = heldout: no {heldout or 'data/prompts.json without a --drafter'}")
            try:
                prompts = [[int(token) for token in prompt] for prompt in json.loads(heldout.read_text())["heldout"]]
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{heldout} is damaged ({error!r}); train.distill writes it") from error
        elif name == "random":  # a target without a tokenizer is a random one: random tokens are as good as any
            rng = np.random.default_rng(values.seed)
            sizes = rng.integers(1, 40, values.num_prompts)
            prompts = [rng.integers(0, target.config.vocab_size, size).tolist() for size in sizes]
        else:
            if name == "file" and not values.prompts:
                raise config.ConfigError("--sets = file: name the file with --prompts")
            chats = text.read_prompts(values.prompts if name == "file" else _HERE / "prompts" / "general.jsonl")
            prompts = [generation.prompt_ids(target, chat) for chat in chats[: values.num_prompts]]
        if not prompts:
            raise CheckpointError(f"{heldout}: no held-out prompts; train with config.data.num_heldout > 0")
        sets.append(PromptSet(name, prompts[: values.num_prompts]))
    if not sets:
        raise config.ConfigError("no prompts to measure on: pass --drafter (its held-out prompts) or --prompts")
    return sets


def numbers(items: Sequence[str], kind: Callable[[str], Any], flag: str) -> list[Any]:
    """Parses a comma list of numbers."""
    try:
        return [kind(item) for item in items]
    except ValueError as error:
        raise config.ConfigError(f"--{flag} = {','.join(items)}: expected a comma list of numbers") from error


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Renders rows of text: the columns `left` aligned left, the others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    align = lambda i, cell: cell.ljust(widths[i]) if i in left else cell.rjust(widths[i])  # noqa: E731
    return "\n".join("  ".join(align(i, cell) for i, cell in enumerate(row)).rstrip() for row in [header, *rows])
