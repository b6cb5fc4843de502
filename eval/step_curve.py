"""Measure a step of the target against the tokens that it carries, and a draft beside it.

  python -m eval.step_curve [--target NAME] [--drafter DIR] [--widths 1,2,3,4,6,8,16] [--transformers]
  python -m eval.step_curve --sps=sps.json [--batch 1] [--widths 1,2,4,8,16]

Question: what does it cost to verify w tokens instead of decoding one, what does a draft cost, what does the loop add
to both, and how close is the one-token step to the memory limit? A curve that is flat up to some width is what makes
speculative decoding pay; on many devices it is jagged.

Method: every step runs inside one jitted loop (no host between steps), all loops in one process, in turn and in random
order, so that noise hits all alike; medians over the rounds; the cache holds half of its slots. `--transformers` also
times greedy decoding by Hugging Face transformers with the same weights (pip install 'dspark-jax[oracle]'). Ratios are
to the one-token step of the same run. The last line printed is one JSON object.

`--sps` also writes the table that hardware-aware policies need (`dspark_jax.sps`): steps per second at batch x width
tokens. Its widths are by default those that decoding compiles; with a K + 1 that is no power of two, name it too.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tqdm
from absl import app, flags

import dspark_jax
from dspark_jax import config, generation, kv_cache, processors, sampling, sps
from dspark_jax.checkpoints.load import read_target_files
from dspark_jax.checkpoints.target_files import CheckpointError
from dspark_jax.loading import Target
from dspark_jax.machine import describe_machine
from dspark_jax.records import BlockKV, TargetOutput
from eval import bandwidth

_TARGET = flags.DEFINE_string("target", "smollm2-135m-instruct", "What dspark_jax.load_target reads.")
_DRAFTER = flags.DEFINE_string("drafter", None, "Folder of a trained drafter, to time its draft and its whole cycle.")
_WIDTHS = flags.DEFINE_list("widths", ["1", "2", "3", "4", "5", "6", "8", "12", "16"], "Tokens per row and step.")
_LADDER = (1, 2, 4, 8, 16)
_BATCH = flags.DEFINE_integer("batch", 1, "Rows of the target's steps.", lower_bound=1)
_SPS = flags.DEFINE_string("sps", None, "Write the SPS table to this file; it must not exist.")
_SLOTS = flags.DEFINE_integer("slots", 256, "Slots of the KV cache.", lower_bound=64)
_STEPS = flags.DEFINE_integer("steps", 8, "Steps per timed loop.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Timed loops per width.", lower_bound=1)
_TRANSFORMERS = flags.DEFINE_bool("transformers", False, "Also time Hugging Face transformers with torch, float32.")


@dataclasses.dataclass(frozen=True, eq=False)
class Timed:
    """Something to time: `run` blocks, and does `steps` steps; `before` prepares it, untimed."""

    name: str
    run: Callable[[], Any]
    steps: int
    before: Callable[[], None] = lambda: None


def target_step(target: Target, width: int, slots: int, steps: int, batch: int = 1) -> Timed:
    """Makes a loop of `steps` greedy target steps of `width` tokens in each of `batch` rows."""
    model = target.step(())

    @jax.jit
    def loop(params, cache, ids):
        def body(_, carry):
            ids, cache = carry
            output = model(params, ids, cache)
            assert output.logits is not None
            best = sampling.argmax(output.logits)
            count = jnp.minimum(best[:, 0], 0)  # never moves on, as far as XLA knows it might
            return best, kv_cache.append(cache, output.block, count)

        return jax.lax.fori_loop(0, steps, body, (ids, cache))[0]

    cache = kv_cache.init_cache(target.config, batch, slots, target.dtype)
    cache = dataclasses.replace(cache, length=jnp.full((batch,), slots // 2, jnp.int32))
    ids = jnp.ones((batch, width), jnp.int32)
    return Timed(f"width {width}", lambda: jax.block_until_ready(loop(target.params, cache, ids)), steps)


def draft_step(target: Target, drafter: generation.LoadedDrafter, slots: int, steps: int) -> Timed:
    """Makes a loop of `steps` greedy drafts at batch 1.

    All of a drafter's work in a cycle: backbone, heads, and taking in the features of K + 1 tokens.
    """
    inner, size = drafter.drafter, drafter.drafter.block_size
    sampler = processors.make_sampler(jnp.zeros((1,)))
    features = jnp.ones((1, size + 1, len(inner.tapped_layers), target.config.width), target.dtype)

    @jax.jit
    def loop(params, state, tokens, features):
        def body(_, carry):
            tokens, total, state = carry
            draft = inner.draft(params, state, tokens, jnp.full((1,), slots // 2), jnp.zeros((1, size)), sampler)
            total += 0.0 if draft.confidence_logits is None else draft.confidence_logits.sum()
            tokens = jax.lax.dynamic_update_slice(tokens, draft.token_ids[:, -1:], (0, slots // 2 - 1))
            # Nothing moves on and the features stay what they are, but XLA must not know it.
            seen = TargetOutput(None, features + 1e-30 * total, features[:, :, 0], BlockKV((), ()))
            return tokens, total, inner.commit(params, state, seen, jnp.minimum(tokens[:, 0], 0), tokens)

        return jax.lax.fori_loop(0, steps, body, (tokens, jnp.zeros(()), state))[:2]

    state = dataclasses.replace(inner.init_state(1, slots), length=jnp.full((1,), slots // 2 - 1, jnp.int32))
    tokens = jnp.ones((1, slots), jnp.int32)
    run = lambda: jax.block_until_ready(loop(drafter.params, state, tokens, features))  # noqa: E731
    return Timed(f"draft K={size}", run, steps)


def whole_cycle(target: Target, drafter: generation.LoadedDrafter, slots: int, steps: int) -> Timed:
    """Makes the real speculative loop, `steps` cycles long, verifying full blocks."""
    size = drafter.drafter.block_size
    session = generation.prepare(
        target,
        [[1] * (slots // 2)],
        drafter=drafter,
        max_new_tokens=min(steps * (size + 1), slots // 2 - generation.PREFILL_CHUNK),
        stop_ids=(),
        cache_slots=slots,
        widths=(size + 1,),
    )
    copies = []

    def copy():  # the loop takes its state for itself
        copies.append(jax.block_until_ready(jax.tree.map(jnp.copy, session.state)))

    def run():
        return jax.block_until_ready(session.run(copies.pop(), steps))

    copy()
    cycles = max(int(run().cycle), 1)
    return Timed(f"cycle K={size}", run, cycles, before=copy)


def transformers_step(name: str, steps: int) -> Timed:
    """Makes greedy decoding by transformers, float32, the same weights."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise config.ConfigError(f"--transformers: {error}; pip install 'dspark-jax[oracle]'") from error
    files = read_target_files(name)
    c = files.config
    if c.family not in ("llama", "qwen3") or c.rope_scaling.kind != "none":
        what = f"{c.family} with rope_scaling {c.rope_scaling.kind!r}"
        raise config.ConfigError(f"--transformers: {what} is not set up here; use a plain llama or qwen3 target")
    made = transformers.LlamaConfig if not c.qk_norm else transformers.Qwen3Config
    model_config = made(
        vocab_size=c.vocab_size,
        hidden_size=c.width,
        intermediate_size=c.mlp_width,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tie_embeddings,
        max_position_embeddings=c.max_positions,
    )
    model = transformers.AutoModelForCausalLM.from_config(model_config).eval()
    weights = {key: torch.from_numpy(jax.device_get(jnp.asarray(files.tensors[key])).copy()) for key in files.tensors}
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    prompt = torch.ones((1, _SLOTS.value // 2), dtype=torch.long)
    with torch.no_grad():
        past = model(prompt, use_cache=True).past_key_values

    def run():
        token = torch.ones((1, 1), dtype=torch.long)
        with torch.no_grad():
            for _ in range(steps):
                output = model(token, past_key_values=past, use_cache=True)
                token = output.logits[:, -1:].argmax(-1)
            past.crop(-steps)

    return Timed("transformers", run, steps)


def measure(timed: list[Timed], rounds: int) -> dict[str, list[float]]:
    """Times everything in turn, in a new random order each round. Returns seconds per step, by name."""
    seconds: dict[str, list[float]] = {item.name: [] for item in timed}
    for item in timed:
        item.before()
        item.run()  # compiles
    order = random.Random(0)
    for _ in tqdm.trange(rounds, desc="rounds", dynamic_ncols=True):
        for item in order.sample(timed, len(timed)):
            item.before()
            start = time.perf_counter()
            item.run()
            seconds[item.name].append((time.perf_counter() - start) / item.steps)
    return seconds


def sps_table(target: Target, seconds: dict[int, float], batch: int) -> sps.SpsTable:
    """Makes the SPS table of steps of `batch` rows from seconds per step by width."""
    widths = sorted(seconds)
    return sps.SpsTable(
        tokens=tuple(batch * width for width in widths),
        steps_per_second=tuple(1 / seconds[width] for width in widths),
        device=describe_machine(),
        target=target.name,
        fingerprint=target.config.fingerprint(),
        batch=batch,
        dtype=jnp.dtype(target.dtype).name,
    )


def main(argv: list[str]) -> None:
    """Command line entry."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    try:
        result = run()
    except (config.ConfigError, CheckpointError, generation.GenerationError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(result))


def run() -> dict[str, Any]:
    """Measures, prints the table, returns the result."""
    slots, steps, batch = _SLOTS.value, _STEPS.value, _BATCH.value
    if batch > 1 and (_DRAFTER.value or _TRANSFORMERS.value):
        raise config.ConfigError(f"--batch = {batch}: drafts, cycles and transformers are timed at batch 1 only")
    if _SPS.value and Path(_SPS.value).exists():
        raise config.ConfigError(f"--sps = {_SPS.value}: the file exists; delete it first, or name another one")
    try:
        widths = sorted({1, *(int(w) for w in _WIDTHS.value)})
    except ValueError as error:
        raise config.ConfigError(f"--widths = {','.join(_WIDTHS.value)}: expected a comma list of numbers") from error
    if _SPS.value and not flags.FLAGS["widths"].present:
        widths = list(_LADDER)
    target = dspark_jax.load_target(_TARGET.value)
    timed = [target_step(target, width, slots, steps, batch) for width in widths]
    if _DRAFTER.value:
        drafter = dspark_jax.load_drafter(Path(_DRAFTER.value), target)
        timed += [draft_step(target, drafter, slots, steps), whole_cycle(target, drafter, slots, steps)]
    if _TRANSFORMERS.value:
        timed.append(transformers_step(_TARGET.value, steps))
    seconds = measure(timed, _ROUNDS.value)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    one = medians["width 1"]
    limit = bandwidth.weight_bytes(target.params) / bandwidth.read_bandwidth()
    print(describe_machine())
    print(
        f"target {target.name}, {target.layout}, {jnp.dtype(target.dtype).name}, {slots} cache slots, batch {batch}\n"
    )
    print(f"{'step':<14}{'ms':>9}{'p10':>9}{'p90':>9}{'ratio to width 1':>19}")
    for name, values in seconds.items():
        cut = statistics.quantiles(values, n=10) if len(values) > 1 else [values[0]] * 9
        print(f"{name:<14}{1e3 * medians[name]:9.2f}{1e3 * cut[0]:9.2f}{1e3 * cut[-1]:9.2f}{medians[name] / one:19.2f}")
    print(f"\nmemory limit of the one-token step: {1e3 * limit:.2f} ms; reached {limit / one:.0%}")
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "target": target.name,
        "slots": slots,
        "batch": batch,
        "milliseconds": {name: 1e3 * value for name, value in medians.items()},
        "ratio": {name: value / one for name, value in medians.items()},
        "memory_limit_ms": 1e3 * limit,
        "memory_limit_share": limit / one,
    }
    if _SPS.value:
        sps.save(sps_table(target, {width: medians[f"width {width}"] for width in widths}, batch), _SPS.value)
        print(f"wrote {_SPS.value}")
    cycle = next((name for name in medians if name.startswith("cycle")), None)
    if cycle:
        size = int(cycle.partition("=")[2])
        parts = medians[f"draft K={size}"] + medians.get(f"width {size + 1}", float("nan"))
        result["loop_share"] = 1 - parts / medians[cycle]
        print(f"outside of draft and target, the cycle spends {result['loop_share']:.1%}")
    return result


if __name__ == "__main__":
    app.run(main)
