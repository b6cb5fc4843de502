"""Measure decoding methods side by side: batch 1, one process, the same prompts, back to back.

Question: how much faster than autoregressive decoding is a method, by whose merit, and is its text the same?

Method: every method is compiled and warmed up first. Then, prompt by prompt, all methods decode in turn, several times
and each time in another order, so that the machine's noise hits all of them alike; the median of the repeats counts.
Times are the decoding loop's: no prefill, no compilation. All calls share one cache size, hence one compiled loop per
method. Random streams are keyed by seed and prompt: every repeat decodes the same text.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import decode, generation, processors, schedules
from dspark_jax.config import VERIFIERS
from dspark_jax.loading import Target
from dspark_jax.records import BlockKV, Draft, TargetOutput
from dspark_jax.text_stats import is_loop
from eval import bandwidth
from eval.inputs import Method, PromptSet
from pallas_kernels.verify import reference

BASELINE = "autoregressive"
STAGES = ("draft", "verify", "commit")
RULES = "rules"  # the part of draft and verify that is neither drafter nor target

_SLOT_STEP = 128  # the shared cache size is a multiple of this
_WARM_UP_CYCLES = 4
_REQUEST = ("top_k", "top_p", "min_p", "repetition_penalty", "verifier", "fuse_lm_head")  # of a call of `generate`
_STAGE_PROMPTS, _STAGE_CYCLES = 3, 8  # prompts, and timed cycles of each, for the time split
_RULE_REPEATS = 8  # rounds of scheduling and verification per timed cycle

Progress = Callable[[str, int], None]  # (what is done now, how many prompts are finished)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
      max_new_tokens: budget of each answer.
      temperatures: every set is decoded at each of them; 0 = greedy.
      top_k, top_p, min_p, repetition_penalty: the other processors (`generation.prepare`), for all methods.
      verifier: "token" or "block".
      fuse_lm_head: verify without logits in memory (`generation.prepare`).
      repeats: timed runs per prompt and method.
      seed: seed of the random streams.
      stages: also time draft, verify and commit on their own.
    """

    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    verifier: str = "token"
    fuse_lm_head: bool = False
    repeats: int = 3
    seed: int = 0
    stages: bool = True


@dataclasses.dataclass(frozen=True)
class Trial:
    """One method's answer to one prompt.

    Attributes:
      token_ids: the answer.
      accepted_lengths: accepted length tau of each cycle.
      verify_lengths: verify length l of each cycle.
      seconds: time of the decoding loop, median of the repeats.
    """

    token_ids: list[int]
    accepted_lengths: list[int]
    verify_lengths: list[int]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Summary:
    """One method on one set of prompts; None where there is nothing to measure.

    Attributes:
      method: its name.
      tokens_per_second: all tokens over all seconds.
      speedup: median over prompts of its tokens per second over those of the baseline.
      speedup_p10, speedup_p90: spread of that ratio over prompts.
      accepted_length: all tokens over all cycles (the bonus token counts).
      cycle_ms: milliseconds per cycle of the fused loop (per step of the baseline).
      acceptance_by_position: see `acceptance_by_position`.
      identical: share of answers equal to the baseline's (greedy only).
      clean_speedup, clean_accepted_length: the same without prompts whose baseline answer loops.
      stages_ms: median milliseconds of draft, verify and commit, each jitted and blocked on by itself: their sum is a
        little above a cycle of the fused loop. Beside them `RULES`: scheduling and verification alone, with the
        target's output handed to them, in a loop of their own.
      by_verifier: accepted length that either verifier expects on the very same drafts, those of the timed stages,
        before stop tokens and budgets cut (above temperature 0 only).
    """

    method: str
    tokens_per_second: float
    speedup: float
    speedup_p10: float
    speedup_p90: float
    accepted_length: float
    cycle_ms: float
    acceptance_by_position: list[float | None]
    identical: float | None
    clean_speedup: float | None
    clean_accepted_length: float | None
    stages_ms: dict[str, float] | None
    by_verifier: dict[str, float] | None


@dataclasses.dataclass(frozen=True)
class Section:
    """All methods on one set at one temperature.

    Attributes:
      prompt_set: its name.
      temperature: 0 = greedy.
      prompts: how many there are.
      looping: how many of them have a baseline answer that repeats itself.
      read_bandwidth: bytes per second, measured beside every prompt; the median.
      memory_limit: tokens per second that reading every weight once per token allows.
      memory_limit_share: share of it that the baseline reaches.
      methods: the baseline first.
    """

    prompt_set: str
    temperature: float
    prompts: int
    looping: int
    read_bandwidth: float
    memory_limit: float
    memory_limit_share: float
    methods: list[Summary]


def run(
    target: Target,
    sets: Sequence[PromptSet],
    methods: Sequence[Method],
    settings: Settings,
    read_bandwidth: Callable[[], float],
    progress: Progress = lambda what, finished: None,
) -> list[Section]:
    """Measures autoregressive decoding and `methods` on every set at every temperature.

    Args:
      target: the target.
      sets: prompts.
      methods: what to compare with autoregressive decoding, which is always measured, by the same target code.
      settings: how to measure.
      read_bandwidth: measures bytes per second (`bandwidth.make_reader`).
      progress: is told what is going on.

    Raises:
      GenerationError: a prompt or a setting that can't be served, a policy that must not sample.
      ConfigError: a policy that a drafter can't follow.
    """
    check_methods(methods, settings)
    methods = [Method(BASELINE), *methods]
    options: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        **{name: getattr(settings, name) for name in _REQUEST},
        "cache_slots": shared_slots(sets, methods, settings.max_new_tokens),
    }
    for method in methods:
        progress(f"compiling {method.name}", 0)
        session = _prepare(target, method, sets[0].prompts[0], options)
        jax.block_until_ready(session.run(session.state, _WARM_UP_CYCLES))
    sections = []
    for prompt_set in sets:
        for temperature in settings.temperatures:
            at = {**options, "temperature": temperature}
            trials: list[list[Trial]] = [[] for _ in methods]
            rates = []
            for row, prompt in enumerate(prompt_set.prompts):
                progress(f"{prompt_set.name}, T={temperature:g}", 0)
                for column, trial in zip(trials, _decode_all(target, methods, prompt, row, settings.repeats, at)):
                    column.append(trial)
                rates.append(read_bandwidth())
                progress(f"{prompt_set.name}, T={temperature:g}", 1)
            split_prompts = prompt_set.prompts[:_STAGE_PROMPTS] if settings.stages else []
            stages = [_measure_stages(target, method, split_prompts, at) for method in methods]
            sizes = [method.drafter.drafter.block_size if method.drafter else 0 for method in methods]
            summaries = [
                summarize(method.name, column, trials[0], size, temperature == 0, split)
                for method, column, size, split in zip(methods, trials, sizes, stages)
            ]
            rate = statistics.median(rates)
            limit = rate / bandwidth.weight_bytes(target.params)
            share = summaries[0].tokens_per_second / limit
            looping = sum(is_loop(trial.token_ids) for trial in trials[0])
            sections.append(
                Section(prompt_set.name, temperature, len(prompt_set.prompts), looping, rate, limit, share, summaries)
            )
    return sections


def check_methods(methods: Sequence[Method], settings: Settings) -> None:
    """Refuses policies that must not sample at one of the temperatures.

    Raises:
      GenerationError: there is one.
    """
    for method in methods:
        if method.policy and method.drafter:
            generation.check_lossless(method.policy, method.drafter, max(settings.temperatures))


def shared_slots(sets: Sequence[PromptSet], methods: Sequence[Method], max_new_tokens: int) -> int:
    """Returns the cache size that every prompt and method fits into."""
    longest = max(len(prompt) for prompt_set in sets for prompt in prompt_set.prompts)
    blocks = [method.drafter.drafter.block_size + 1 for method in methods if method.drafter]
    needed = longest + max_new_tokens + max([generation.PREFILL_CHUNK, *blocks])
    return -(-needed // _SLOT_STEP) * _SLOT_STEP


def summarize(
    name: str,
    trials: Sequence[Trial],
    baseline: Sequence[Trial],
    block_size: int,
    greedy: bool,
    stages: Stages | None = None,
) -> Summary:
    """Compares a method's answers with the baseline's, prompt by prompt."""
    ratios = speedups(trials, baseline)
    clean = [i for i, trial in enumerate(baseline) if not is_loop(trial.token_ids)]
    seconds, cycles = sum(t.seconds for t in trials), sum(len(t.accepted_lengths) for t in trials)
    low, middle, high = np.percentile(ratios, (10, 50, 90)).tolist()
    return Summary(
        method=name,
        tokens_per_second=sum(len(t.token_ids) for t in trials) / seconds,
        speedup=middle,
        speedup_p10=low,
        speedup_p90=high,
        accepted_length=accepted_length(trials),
        cycle_ms=1e3 * seconds / cycles,
        acceptance_by_position=acceptance_by_position(trials, block_size),
        identical=statistics.fmean(t.token_ids == b.token_ids for t, b in zip(trials, baseline)) if greedy else None,
        clean_speedup=statistics.median(ratios[i] for i in clean) if clean else None,
        clean_accepted_length=accepted_length([trials[i] for i in clean]) if clean else None,
        stages_ms=stages.milliseconds if stages else None,
        by_verifier=stages.by_verifier if stages and not greedy else None,
    )


def speedups(trials: Sequence[Trial], baseline: Sequence[Trial]) -> list[float]:
    """Returns, per prompt, tokens per second over the baseline's tokens per second."""
    rate = lambda trial: len(trial.token_ids) / trial.seconds  # noqa: E731
    return [rate(trial) / rate(reference) for trial, reference in zip(trials, baseline)]


def accepted_length(trials: Sequence[Trial]) -> float:
    """Returns all tokens over all cycles."""
    return sum(sum(t.accepted_lengths) for t in trials) / sum(len(t.accepted_lengths) for t in trials)


def acceptance_by_position(trials: Sequence[Trial], block_size: int) -> list[float | None]:
    """Returns, for k = 1..K, in which share of the cycles that verified draft token k it was accepted.

    It falls with k: token k is accepted only if all before it were. The last cycle of an answer is left out: a stop
    token or the budget cuts it, so its accepted length does not say what was rejected.
    """
    pairs = [
        (accepted, verified)
        for trial in trials
        for accepted, verified in zip(trial.accepted_lengths[:-1], trial.verify_lengths[:-1])
    ]
    shares = []
    for k in range(1, block_size + 1):
        kept = [accepted > k for accepted, verified in pairs if verified >= k]  # accepted length = draft tokens + 1
        shares.append(statistics.fmean(kept) if kept else None)
    return shares


def _prepare(target: Target, method: Method, prompt: list[int], options: dict[str, Any]) -> generation.Session:
    return generation.prepare(target, [prompt], drafter=method.drafter, policy=method.policy, **options)


def _decode_all(
    target: Target, methods: Sequence[Method], prompt: list[int], row: int, repeats: int, options: dict[str, Any]
) -> list[Trial]:
    """Decodes one prompt by every method, `repeats` times, each time starting with another method."""
    answers: list[Any] = [None for _ in methods]
    seconds: list[list[float]] = [[] for _ in methods]
    for repeat in range(repeats):
        for step in range(len(methods)):
            i = (step + repeat) % len(methods)
            batch = generation.generate(
                target, [prompt], drafter=methods[i].drafter, policy=methods[i].policy, rows=[row], **options
            )
            answers[i] = batch.rows[0]
            seconds[i].append(batch.timings.decode)
    return [
        Trial(answer.token_ids, answer.accepted_lengths, answer.verify_lengths, statistics.median(times))
        for answer, times in zip(answers, seconds)
    ]


_draft = jax.jit(decode.draft_stage)
_verify = jax.jit(decode.verify_stage)
_commit = partial(jax.jit, donate_argnames="state")(decode.commit_stage)


def _replayed(output: TargetOutput, token_ids: jax.Array, cache: Any, with_logits: bool = True) -> TargetOutput:
    """Stands in for a target that has answered already: its weights are the output for the whole block."""
    del cache, with_logits
    cut = lambda a: a[:, : token_ids.shape[1]]  # noqa: E731
    across = lambda a: a[:, :, : token_ids.shape[1]]  # noqa: E731
    block = BlockKV(tuple(map(across, output.block.keys)), tuple(map(across, output.block.values)))
    return dataclasses.replace(jax.tree.map(cut, dataclasses.replace(output, block=())), block=block)


@jax.jit
def _rules(cycle: decode.Cycle, settings: decode.RowSettings, state: decode.DecodeState, draft, uniforms, output):
    """Schedules and verifies one block `_RULE_REPEATS` times in a loop, as a cycle does it: no dispatch between.

    Verification starts from logits: where a cycle fuses it with the LM head, the two can't be told apart.
    """
    replay = dataclasses.replace(cycle, target=_replayed, fuse_lm_head=False)

    def body(_, carry):
        # Behind the barrier every round is new work to XLA, though nothing changes.
        here_state, here_draft, here_output, carry = jax.lax.optimization_barrier((state, draft, output, carry))
        length = decode.schedule_stage(cycle, here_state, here_draft)
        accepted, added, _ = decode.verify_stage(
            replay, here_output, settings, here_state, here_draft, length, uniforms
        )
        return carry + accepted + added

    return jax.lax.fori_loop(0, _RULE_REPEATS, body, jnp.zeros_like(state.length))


@partial(jax.jit, static_argnames="step")
def _read(step: Any, params: Any, state: decode.DecodeState, draft_ids: jax.Array) -> TargetOutput:
    """Runs the target on the anchor and the whole block."""
    anchor = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    return step(params, jnp.concatenate([anchor, draft_ids], axis=1), state.cache)


@jax.jit
def _expected_lengths(settings: decode.RowSettings, state: decode.DecodeState, draft: Draft, length, logits: jax.Array):
    """Returns the accepted length that each verifier expects, [B] by name."""
    sampler = settings.sampler
    logits = processors.process_block(logits, sampler, state.tokens, state.length, draft.token_ids)
    log_p = jax.nn.log_softmax(logits, axis=-1)

    def expected(verifier: str) -> jax.Array:
        chance, _ = reference.acceptance(log_p, draft, length, sampler.temperature <= 0, verifier)
        return 1.0 + reference.expected_length(chance, length, verifier)

    return {verifier: expected(verifier) for verifier in VERIFIERS}


@dataclasses.dataclass(frozen=True)
class Stages:
    """What single cycles show: `Summary.stages_ms` and `Summary.by_verifier`."""

    milliseconds: dict[str, float]
    by_verifier: dict[str, float]


def _measure_stages(
    target: Target, method: Method, prompts: Sequence[list[int]], options: dict[str, Any]
) -> Stages | None:
    """Runs cycles stage by stage; None for the baseline and for answers of one cycle."""
    if method.drafter is None:
        return None
    drafter, params = method.drafter.drafter, method.drafter.params
    policy = method.policy or schedules.full()
    if policy.sees_acceptance:
        return None  # its cycle runs the target twice
    step = target.step(drafter.tapped_layers, with_attention_spread=policy.reads_target)
    widths = decode.default_widths(drafter, policy)
    cycle = decode.Cycle(step, drafter, policy, widths, options["verifier"], options["fuse_lm_head"])
    seconds, expected = [], []
    for prompt in prompts:
        session = _prepare(target, method, prompt, options)
        state, settings = session.state, session.settings
        for i in range(_STAGE_CYCLES + 1):
            if bool(state.done[0]):
                break
            marks = [time.perf_counter()]
            draft, length, uniforms = jax.block_until_ready(_draft(cycle, params, settings, state))
            marks.append(time.perf_counter())
            verified = jax.block_until_ready(_verify(cycle, target.params, settings, state, draft, length, uniforms))
            marks.append(time.perf_counter())
            output = jax.block_until_ready(_read(step, target.params, state, draft.token_ids))
            expected.append(_expected_lengths(settings, state, draft, length, output.logits))
            start = time.perf_counter()
            jax.block_until_ready(_rules(cycle, settings, state, draft, uniforms, output))
            rules = (time.perf_counter() - start) / _RULE_REPEATS
            start = time.perf_counter()
            state = jax.block_until_ready(_commit(cycle, params, settings, state, draft, length, verified))
            commit = time.perf_counter() - start
            if i:  # the first cycle compiles and warms up
                seconds.append([*np.diff(marks), commit, rules])
    if not seconds:
        return None
    milliseconds: dict[str, float] = dict(zip((*STAGES, RULES), (1e3 * np.median(seconds, axis=0)).tolist()))
    return Stages(milliseconds, {name: float(np.mean([e[name][0] for e in expected])) for name in VERIFIERS})
