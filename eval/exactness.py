"""Check that speculative decoding says what the target would have said.

  python -m eval.exactness --config configs/tiny.py                           # random target, training-free drafter
  python -m eval.exactness --drafter drafters/smollm2_135m --block_sizes 3
  python -m eval.exactness --drafter runs/mine --policies full,threshold,delayed --sps sps.json --samples 20000
  python -m eval.exactness --config configs/tiny.py --samplers "temperature=0.7 top_k=20;repetition_penalty=1.2"

Checks, for every drafter, block size, policy and verifier (see `eval.exact`):
  greedy   greedy text equals autoregressive text, token for token, at each batch size
  sampled  pairs of tokens drawn by the loop follow the target's own probabilities (chi-square, samplers side by side)
  batch    a row says the same alone and in a batch, beside rows that stop early
  cache    the next logits through the loop's cache equal those of a fresh pass over the committed tokens

Verdicts on p-values hold for all of them together (Holm's correction, --alpha). The last line printed is one JSON
object; the exit code is 1 if a check failed. Exactness does not depend on what a drafter has learned: a bad one is as
exact.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tqdm
from absl import flags

import dspark_jax
from dspark_jax import commands, config, requests, schedules
from dspark_jax.machine import describe_machine
from eval import exact, inputs

CHECKS = ("greedy", "sampled", "batch", "cache")
_SAMPLER = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_MARGIN = {"float32": 0.0, "bfloat16": 0.25}  # bfloat16 keeps 8 bits: logits around 30 move by as much
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}


def parse_flags(argv: Sequence[str]) -> flags.FlagValues:
    """Reads the command line (argv[0] is the program) into flag values of its own."""
    v = inputs.new_flags(argv)
    flags.DEFINE_list("checks", list(CHECKS), f"Of {', '.join(CHECKS)}.", v)
    flags.DEFINE_list("verifiers", list(config.VERIFIERS), f"Of {', '.join(config.VERIFIERS)}.", v)
    flags.DEFINE_string(
        "samplers",
        "temperature=1;temperature=0.7 top_k=50 top_p=0.9;temperature=1 min_p=0.05 repetition_penalty=1.2",
        f"Settings of the check 'sampled', a list with ';' of NAME=VALUE with ' '; names: {', '.join(_SAMPLER)}.",
        v,
    )
    flags.DEFINE_list("batches", ["1", "4"], "Batch sizes of the check 'greedy'.", v)
    flags.DEFINE_integer("samples", 2000, "Pairs of tokens per sampler.", flag_values=v)
    flags.DEFINE_integer("rows", 48, "Rows of a batch of the check 'sampled'.", flag_values=v)
    flags.DEFINE_integer("followed", 32, "First tokens whose second tokens are told apart.", flag_values=v)
    flags.DEFINE_float("alpha", 0.01, "Probability that exact decoding fails any check.", flag_values=v)
    flags.DEFINE_float("margin", None, "Of logits: greedy texts may part below it. 0 in float32.", flag_values=v)
    inputs.read_flags(v, argv)
    inputs.at_least_one(v, "samples", "rows", "followed")
    if not 0 < v.alpha < 1:
        raise config.ConfigError(f"--alpha = {v.alpha}: use a probability")
    for name, known in (("checks", CHECKS), ("verifiers", config.VERIFIERS)):
        wrong = [item for item in getattr(v, name) if item not in known]
        if wrong or not getattr(v, name):
            raise config.ConfigError(f"--{name} = {','.join(wrong)}: use {', '.join(known)}")
    return v


def read_samplers(text: str) -> list[dict[str, float]]:
    """Parses "temperature=1;temperature=0.7 top_k=50" into complete settings.

    Raises:
      ConfigError: an unknown name or no number.
    """
    samplers = []
    for item in text.split(";"):
        sampler = dict(_SAMPLER)
        for part in item.split():
            name, _, value = part.partition("=")
            if name not in sampler:
                raise config.ConfigError(f"--samplers = {part}: use {', '.join(sampler)}")
            (sampler[name],) = inputs.numbers([value], int if name == "top_k" else float, f"samplers {name}")
        requests.read_sampler(1, **sampler)  # complains about values out of range
        samplers.append(sampler)
    return samplers


def run(values: flags.FlagValues) -> tuple[dict[str, Any], list[exact.Check]]:
    """Loads, checks, and returns the facts of the run and its checks."""
    recipe = inputs.read_recipe(values)
    samplers = read_samplers(values.samplers)
    batches = inputs.numbers(values.batches, int, "batches")
    if min(batches) < 1:
        raise config.ConfigError(f"--batches = {','.join(values.batches)}: use 1 or more")
    load_methods = inputs.read_methods(values, recipe)
    target = inputs.load_target(recipe)
    prompts = [prompt for s in inputs.read_sets(values, target) for prompt in s.prompts]
    methods = [
        exact.Method(f"{m.name} {verifier}", m.drafter, m.policy, verifier, fuse_lm_head=recipe.decode.fuse_lm_head)
        for m in load_methods(target)
        if m.drafter is not None
        for verifier in values.verifiers
    ]
    dtype = jnp.dtype(target.dtype).name
    margin = _MARGIN[dtype] if values.margin is None else values.margin
    new_tokens = values.max_new_tokens or recipe.decode.max_new_tokens
    rows = -(-values.rows // len(samplers)) * len(samplers)
    checks: list[exact.Check] = []
    bar = tqdm.tqdm(total=len(methods) * len(values.checks), file=sys.stderr, unit="check", dynamic_ncols=True)
    with bar:
        baseline = distributions = None
        for method in methods:
            drafter, policy = method.drafter.drafter, method.policy or schedules.full()
            lossless = not policy.biased(drafter.confidence_reads_draft)
            for name in values.checks:
                bar.set_description(f"{method.name}: {name}")
                if name == "greedy":
                    if baseline is None:
                        options = {"cache_slots": exact.cache_slots(prompts, new_tokens), "max_new_tokens": new_tokens}
                        baseline = [dspark_jax.generate(target, [p], **options).rows[0].token_ids for p in prompts]
                    for batch in batches:
                        checks.append(
                            exact.greedy_identical(target, prompts, method, batch, new_tokens, baseline, margin)
                        )
                elif name == "sampled" and lossless:
                    if distributions is None:
                        distributions = [
                            exact.pair_distribution(target, prompts[0], s, values.followed) for s in samplers
                        ]
                    checks += exact.sampled_pairs(
                        target, prompts[0], method, samplers, values.samples, rows, values.seed, distributions
                    )
                elif name == "batch" and lossless and not policy.shares_budget:
                    checks.append(exact.batch_invariant(target, prompts[:5], method, min(new_tokens, 32)))
                elif name == "cache":
                    checks.append(
                        exact.cache_equivalent(target, prompts[:4], method, min(new_tokens, 32), _TOLERANCE[dtype])
                    )
                bar.update(1)
    facts = {
        "machine": describe_machine(),
        "jax": jax.__version__,
        "target": target.name,
        "drafter": values.drafter,
        "dtype": dtype,
        "date": datetime.date.today().isoformat(),
        "prompts": len(prompts),
        "max_new_tokens": new_tokens,
        "alpha": values.alpha,
        "margin": margin,
    }
    return facts, exact.judge(checks, values.alpha)


def render(facts: dict[str, Any], checks: Sequence[exact.Check]) -> str:
    """Renders the table for people."""
    header = ["check", "method", "samples", "statistic", "p", "verdict", "detail"]
    rows = [
        [
            check.name,
            check.method,
            str(check.samples),
            f"{check.statistic:.3g}",
            "-" if check.p_value is None else f"{check.p_value:.3g}",
            "exact" if check.passed else "FAILED",
            check.detail,
        ]
        for check in checks
    ]
    failed = sum(not check.passed for check in checks)
    return "\n".join(
        [
            f"machine  {facts['machine']}, jax {facts['jax']}, {facts['date']}",
            f"target   {facts['target']}, {facts['dtype']}",
            f"drafter  {facts['drafter'] or 'prompt lookup only (pass --drafter)'}",
            f"{facts['prompts']} prompts, {facts['max_new_tokens']} new tokens at most",
            "",
            inputs.render_table(header, rows, left=(0, 1, 5, 6)),
            "",
            f"{len(checks)} checks, {failed} failed" if failed else f"{len(checks)} checks, all exact",
        ]
    )


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    code = 0

    def command() -> None:
        nonlocal code
        values = parse_flags(argv)
        if values.help:
            print(f"{__doc__}\n{values.get_help()}")
            return
        facts, checks = run(values)
        code = int(not all(check.passed for check in checks))
        print(render(facts, checks))
        result = {**facts, "checks": [dataclasses.asdict(check) for check in checks], "passed": not code}
        print(json.dumps(result))

    return commands.run("eval.exactness", command) or code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
