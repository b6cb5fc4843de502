"""Measure autoregressive decoding, prompt lookup and DSpark side by side.

  python -m eval.speedup                                            # no drafter: the two training-free methods
  python -m eval.speedup --drafter runs/smollm2_demo --block_sizes 3,7 --png acceptance.png
  python -m eval.speedup --config configs/smollm2_135m.py --prompts my_prompts.jsonl --temperatures 0

How it measures: see `eval.measure`. The target and the defaults come from --config, else from the drafter folder's
recipe.json, else from configs/smollm2_demo.py. The last line printed is one JSON object with everything.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tqdm
from absl import flags
from ml_collections import config_flags

import dspark_jax
from dspark_jax import config, generation, schedules, sps, text
from dspark_jax.checkpoints import orbax_drafter
from dspark_jax.checkpoints.target_files import CheckpointError
from dspark_jax.drafter_loading import check_block_size, load_drafter, prompt_lookup
from dspark_jax.drafters.dspark import DSparkDrafter
from dspark_jax.machine import describe_machine
from eval import bandwidth, measure, plots

_HERE = Path(__file__).resolve().parent
_KNOWN_ERRORS = (config.ConfigError, CheckpointError, text.TextError, generation.GenerationError, flags.Error)


def parse_flags(argv: Sequence[str]) -> flags.FlagValues:
    """Reads the command line (argv[0] is the program) into flag values of its own, not absl's global ones."""
    v = flags.FlagValues()
    try:
        default = str(_HERE.parent / "configs" / "smollm2_demo.py")
        config_flags.DEFINE_config_file("config", default, "Recipe.", flag_values=v, sys_argv=list(argv))
        flags.DEFINE_string("drafter", None, "Folder of a trained drafter.", v)
        flags.DEFINE_string("prompts", None, "JSONL file of prompts, measured as the set 'file'.", v)
        flags.DEFINE_list("sets", None, "Of heldout, general, file; all that there are by default.", v)
        flags.DEFINE_integer("num_prompts", 20, "Prompts per set, the first ones.", flag_values=v)
        flags.DEFINE_integer("max_new_tokens", None, "Tokens per answer; config.decode's by default.", flag_values=v)
        flags.DEFINE_list("block_sizes", None, "K's to draft with; config.decode's or the trained one by default.", v)
        flags.DEFINE_list("temperatures", ["0", "1"], "Temperatures; 0 is greedy.", v)
        flags.DEFINE_integer("top_k", None, "0 = off; it and the next four: config.decode's by default.", flag_values=v)
        flags.DEFINE_float("top_p", None, "1 = off.", flag_values=v)
        flags.DEFINE_float("min_p", None, "0 = off.", flag_values=v)
        flags.DEFINE_float("repetition_penalty", None, "1 = off.", flag_values=v)
        flags.DEFINE_string("verifier", None, "token or block.", v)
        known = f"Of {', '.join(config.POLICIES)}, NAME+conservative_tokens; a row each."
        flags.DEFINE_list("policies", None, f"{known} full, threshold and config.decode's by default.", v)
        flags.DEFINE_float("threshold", None, "Of that policy; config.decode's by default.", flag_values=v)
        flags.DEFINE_string("sps", None, "File of eval.step_curve --sps; config.decode's by default.", v)
        flags.DEFINE_list("conservative_tokens", None, "Token ids that end a block; config.decode's by default.", v)
        flags.DEFINE_integer("repeats", 3, "Timed runs per prompt and method; their median counts.", flag_values=v)
        flags.DEFINE_integer("lookup_block_size", 3, "K of prompt lookup.", flag_values=v)
        flags.DEFINE_string("json", None, "Also write the JSON object to this file.", v)
        flags.DEFINE_string("png", None, "Also plot acceptance by position into this file.", v)
        flags.DEFINE_bool("stages", True, "Also time draft, verify and commit on their own.", v)
        flags.DEFINE_integer("seed", 0, "Seed of the random streams.", flag_values=v)
        flags.DEFINE_bool("help", False, "Show this help.", v, short_name="h")
        unexpected = v(list(argv))[1:]
    except (AttributeError, KeyError) as error:  # what the config flag raises
        raise config.ConfigError(f"--config: there is no such field: {error.args[0]}") from error
    except OSError as error:
        raise config.ConfigError(f"--config: {error}") from error
    if unexpected:
        raise config.ConfigError(f"unexpected argument {unexpected[0]!r}: every option is a --flag")
    for name in ("num_prompts", "max_new_tokens", "repeats", "lookup_block_size"):
        if getattr(v, name) is not None and getattr(v, name) < 1:
            raise config.ConfigError(f"--{name} = {getattr(v, name)}: use 1 or more")
    for name in ("json", "png"):
        if getattr(v, name) and not Path(getattr(v, name)).absolute().parent.is_dir():
            raise config.ConfigError(f"--{name} = {getattr(v, name)}: there is no such folder; make it first")
    return v


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


def read_methods(values: flags.FlagValues, recipe: config.RecipeConfig) -> Callable[[Any], list[measure.Method]]:
    """Checks what is to be compared, and returns how to load it for a target (the slow part comes last)."""
    lookup = prompt_lookup(values.lookup_block_size)
    methods = [measure.Method(f"prompt lookup K={values.lookup_block_size}", lookup)]
    if not values.drafter:
        for name in ("block_sizes", "policies", "threshold", "sps", "conservative_tokens"):
            if values[name].present:
                raise config.ConfigError(f"--{name} = {values[name].value}: it needs a --drafter")
        return lambda target: methods
    folder = Path(values.drafter)
    if not folder.is_dir():
        raise CheckpointError(f"--drafter = {folder}: there is no such folder; pass the output of train.distill")
    description, _ = orbax_drafter.read_description(folder)
    sizes = numbers(values.block_sizes, int, "block_sizes") if values.block_sizes else [recipe.decode.block_size]
    if values.block_sizes and min(sizes) < 1:
        raise config.ConfigError(f"--block_sizes = {','.join(values.block_sizes)}: use 1 or more")
    sizes = [check_block_size(description, size) for size in sizes]
    make_policies = read_policies(values, recipe.decode, description)
    make_policies("")  # complains now, not after the target is loaded

    def load(target: dspark_jax.Target) -> list[measure.Method]:
        policies = make_policies(target.config.fingerprint())
        decode = recipe.decode
        loaded = load_drafter(folder, target, draft_sampling=decode.draft_sampling, candidates=decode.candidates)
        assert isinstance(loaded.drafter, DSparkDrafter)
        for size in sizes:
            cut = dataclasses.replace(loaded, drafter=dataclasses.replace(loaded.drafter, block_size=size))
            methods.extend(measure.Method(f"dspark K={size} {label}", cut, policies[label]) for label in policies)
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
        label = lambda name: name.replace("threshold", f"threshold {threshold:g}") if name[0] == "t" else name  # noqa: E731
        return {
            label(name): schedules.from_name(name, confidence_threshold=threshold, table=table, conservative_ids=ids)
            for name in names
        }

    return make


def read_sets(values: flags.FlagValues, target: dspark_jax.Target) -> list[measure.PromptSet]:
    """Reads the prompt sets as token ids."""
    heldout = Path(values.drafter) / "data" / "prompts.json" if values.drafter else None
    there = {
        "heldout": heldout is not None and heldout.exists(),
        "general": target.tokenizer is not None,
        "file": bool(values.prompts),
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
        else:
            if name == "file" and not values.prompts:
                raise config.ConfigError("--sets = file: name the file with --prompts")
            chats = text.read_prompts(values.prompts if name == "file" else _HERE / "prompts" / "general.jsonl")
            prompts = [generation.prompt_ids(target, chat) for chat in chats[: values.num_prompts]]
        if not prompts:
            raise CheckpointError(f"{heldout}: no held-out prompts; train with config.data.num_heldout > 0")
        sets.append(measure.PromptSet(name, prompts[: values.num_prompts]))
    if not sets:
        raise config.ConfigError("no prompts to measure on: pass --drafter (its held-out prompts) or --prompts")
    return sets


def numbers(items: Sequence[str], kind: Callable[[str], Any], flag: str) -> list[Any]:
    """Parses a comma list of numbers."""
    try:
        return [kind(item) for item in items]
    except ValueError as error:
        raise config.ConfigError(f"--{flag} = {','.join(items)}: expected a comma list of numbers") from error


def measure_everything(values: flags.FlagValues) -> tuple[dict[str, Any], list[measure.Section]]:
    """Loads, measures, and returns the facts of the run (JSON types) and its sections."""
    settings = measure.Settings(
        temperatures=tuple(numbers(values.temperatures, float, "temperatures")),
        repeats=values.repeats,
        seed=values.seed,
        stages=values.stages,
    )
    if not all(0 <= t < float("inf") for t in settings.temperatures) or not settings.temperatures:
        raise config.ConfigError(
            f"--temperatures = {','.join(values.temperatures)}: use 0 (greedy) or positive numbers"
        )
    recipe = read_recipe(values)
    from_flag = lambda name: getattr(recipe.decode if values[name].value is None else values, name)  # noqa: E731
    names = ("max_new_tokens", "top_k", "top_p", "min_p", "repetition_penalty", "verifier")
    decode = dataclasses.replace(recipe.decode, **{name: from_flag(name) for name in names})
    recipe = config.from_config_dict(config.to_config_dict(dataclasses.replace(recipe, decode=decode)))  # checks it
    settings = dataclasses.replace(settings, **{name: getattr(decode, name) for name in names})
    load_methods = read_methods(values, recipe)
    if values.prompts:
        text.read_prompts(values.prompts)  # a malformed line should not wait for the target
    if recipe.target == "random":
        target = dspark_jax.random_target(recipe.random_target, recipe.data.seed, jnp.dtype(recipe.dtype))
    else:
        target = dspark_jax.load_target(recipe.target, jnp.dtype(recipe.dtype))
    sets, methods = read_sets(values, target), load_methods(target)
    measure.check_methods(methods, settings)
    total = len(settings.temperatures) * sum(len(s.prompts) for s in sets)
    read_bandwidth = bandwidth.make_reader()
    with tqdm.tqdm(total=total, file=sys.stderr, unit="prompt") as bar:

        def progress(what: str, finished: int) -> None:
            bar.set_description(what)
            bar.update(finished)

        sections = measure.run(target, sets, methods, settings, read_bandwidth, progress)
    facts = {
        "machine": describe_machine(),
        "jax": jax.__version__,
        "target": target.name,
        "drafter": values.drafter,
        "dtype": recipe.dtype,
        "date": datetime.date.today().isoformat(),
        "prompts": {s.name: len(s.prompts) for s in sets},
        **dataclasses.asdict(settings),
        "weight_bytes": bandwidth.weight_bytes(target.params),
    }
    return facts, sections


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Renders rows of text: the first column aligned left, the others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))] for row in [header, *rows]]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def render_section(section: measure.Section) -> str:
    """Renders one set at one temperature; a dash stands for what there is nothing to measure of."""
    cell = lambda value, form=".2f": "-" if value is None else format(value, form)  # noqa: E731
    stages = any(m.stages_ms for m in section.methods)
    header = ["method", "tok/s", "speedup", "10-90 %", "accepted", "ms/cycle", "identical", "speedup*", "accepted*"]
    rows = []
    for m in section.methods:
        spread = f"{m.speedup_p10:.2f}-{m.speedup_p90:.2f}"
        row = [m.method, cell(m.tokens_per_second, ".1f"), cell(m.speedup), spread, cell(m.accepted_length)]
        row += [cell(m.cycle_ms), cell(m.identical, ".0%"), cell(m.clean_speedup), cell(m.clean_accepted_length)]
        split = m.stages_ms or {}
        share = split[measure.RULES] / sum(split[stage] for stage in measure.STAGES) if split else None
        rows.append(row + ([*(cell(split.get(s)) for s in measure.STAGES), cell(share, ".1%")] if stages else []))
    header += [*(f"{stage} ms" for stage in measure.STAGES), "rules"] if stages else []
    size = max(len(m.acceptance_by_position) for m in section.methods)
    shares = [
        [m.method, *(cell(s, ".0%") for s in m.acceptance_by_position), *[""] * (size - len(m.acceptance_by_position))]
        for m in section.methods[1:]
    ]
    title = f"{section.prompt_set}, temperature {section.temperature:g}, {section.prompts} prompts"
    return "\n".join(
        [
            f"== {title}",
            f"memory: {section.read_bandwidth / 1e9:.1f} GB/s allow {section.memory_limit:.1f} tokens/s one by one,"
            f" autoregressive decoding reaches {section.memory_limit_share:.0%} of that",
            render_table(header, rows),
            f"* without the {section.looping} of {section.prompts} prompts whose autoregressive answer loops",
            *["rules: share of the stages that scheduling and verification take without drafter and target"] * stages,
            "",
            render_table(["accepted, of those verified", *(f"k={k}" for k in range(1, size + 1))], shares),
        ]
    )


def render_report(facts: dict[str, Any], sections: Sequence[measure.Section]) -> str:
    """Renders everything for people."""
    lines = [
        f"machine  {facts['machine']}, jax {facts['jax']}, {facts['date']}",
        f"target   {facts['target']}, {facts['dtype']}, {facts['weight_bytes'] / 1e6:.1f} MB of weights a step",
        f"drafter  {facts['drafter'] or 'none (pass --drafter)'}",
        f"sampler  {render_sampler(facts)}",
        f"decoding batch 1, {facts['max_new_tokens']} new tokens at most, loop time only, median of {facts['repeats']}",
    ]
    return "\n\n".join(["\n".join(lines), *(render_section(section) for section in sections)])


def render_sampler(facts: dict[str, Any]) -> str:
    """Says how tokens are chosen in effect: greedy runs feel no processor but the repetition penalty."""
    penalty = "" if facts["repetition_penalty"] == 1 else f", repetition_penalty {facts['repetition_penalty']:g}"
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    on = "".join(f", {name} {facts[name]:g}" for name, value in off.items() if facts[name] != value)
    sampled = f"{on}{penalty}, verified by {facts['verifier']}"
    return "; ".join(f"temperature {t:g}{sampled}" if t else f"greedy{penalty}" for t in facts["temperatures"])


def report_errors(command: Callable[[], None]) -> int:
    """Runs a command and returns its exit code: 2 with one line on stderr for an error that the user can mend."""
    try:
        command()
    except _KNOWN_ERRORS as error:
        print(f"eval.speedup: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def main(argv: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""

    def command() -> None:
        values = parse_flags(argv)
        if values.help:
            print(__doc__, values.get_help(), sep="\n")
            return
        facts, sections = measure_everything(values)
        result = {**facts, "sections": [dataclasses.asdict(section) for section in sections]}
        if values.png:
            plots.acceptance_by_position(values.png, sections)
        if values.json:
            Path(values.json).write_text(json.dumps(result, indent=2) + "\n")
        print(render_report(facts, sections), end="\n\n")
        print(json.dumps(result))

    return report_errors(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
