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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import tqdm
from absl import flags

from dspark_jax import commands, config, generation, text
from dspark_jax.checkpoints.target_files import CheckpointError
from dspark_jax.machine import describe_machine
from eval import bandwidth, inputs, measure, plots

_HERE = Path(__file__).resolve().parent
_KNOWN_ERRORS = (config.ConfigError, CheckpointError, text.TextError, generation.GenerationError, flags.Error)


def parse_flags(argv: Sequence[str]) -> flags.FlagValues:
    """Reads the command line (argv[0] is the program) into flag values of its own."""
    v = inputs.new_flags(argv)
    flags.DEFINE_list("temperatures", ["0", "1"], "Temperatures; 0 is greedy.", v)
    flags.DEFINE_integer("top_k", None, "0 = off; it and the next four: config.decode's by default.", flag_values=v)
    flags.DEFINE_float("top_p", None, "1 = off.", flag_values=v)
    flags.DEFINE_float("min_p", None, "0 = off.", flag_values=v)
    flags.DEFINE_float("repetition_penalty", None, "1 = off.", flag_values=v)
    flags.DEFINE_string("verifier", None, "token or block.", v)
    flags.DEFINE_integer("repeats", 3, "Timed runs per prompt and method; their median counts.", flag_values=v)
    flags.DEFINE_string("json", None, "Also write the JSON object to this file.", v)
    flags.DEFINE_string("png", None, "Also plot acceptance by position into this file.", v)
    flags.DEFINE_bool("stages", True, "Also time draft, verify and commit on their own.", v)
    inputs.read_flags(v, argv)
    inputs.at_least_one(v, "repeats")
    for name in ("json", "png"):
        if getattr(v, name) and not Path(getattr(v, name)).absolute().parent.is_dir():
            raise config.ConfigError(f"--{name} = {getattr(v, name)}: there is no such folder; make it first")
    return v


def measure_everything(values: flags.FlagValues) -> tuple[dict[str, Any], list[measure.Section]]:
    """Loads, measures, and returns the facts of the run (JSON types) and its sections."""
    settings = measure.Settings(
        temperatures=tuple(inputs.numbers(values.temperatures, float, "temperatures")),
        repeats=values.repeats,
        seed=values.seed,
        stages=values.stages,
    )
    if not all(0 <= t < float("inf") for t in settings.temperatures) or not settings.temperatures:
        raise config.ConfigError(
            f"--temperatures = {','.join(values.temperatures)}: use 0 (greedy) or positive numbers"
        )
    recipe = inputs.read_recipe(values)
    from_flag = lambda name: getattr(recipe.decode if values[name].value is None else values, name)  # noqa: E731
    names = ("max_new_tokens", "top_k", "top_p", "min_p", "repetition_penalty", "verifier")
    decode = dataclasses.replace(recipe.decode, **{name: from_flag(name) for name in names})
    recipe = config.from_config_dict(config.to_config_dict(dataclasses.replace(recipe, decode=decode)))  # checks it
    settings = dataclasses.replace(settings, **{name: getattr(decode, name) for name in (*names, "fuse_lm_head")})
    load_methods = inputs.read_methods(values, recipe)
    if values.prompts:
        text.read_prompts(values.prompts)  # a malformed line should not wait for the target
    target = inputs.load_target(recipe)
    sets, methods = inputs.read_sets(values, target), load_methods(target)
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
            inputs.render_table(header, rows),
            f"* without the {section.looping} of {section.prompts} prompts whose autoregressive answer loops",
            *["rules: share of the stages that scheduling and verification take without drafter and target"] * stages,
            *[
                f"{m.method}: either verifier on the same drafts would accept"
                + ", ".join(f" {length:.3f} ({name})" for name, length in m.by_verifier.items())
                for m in section.methods
                if m.by_verifier
            ],
            "",
            inputs.render_table(["accepted, of those verified", *(f"k={k}" for k in range(1, size + 1))], shares),
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

    return commands.run("eval.speedup", command)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
