"""Text in, text out: `generate` and `stream`, with a drafter or without one.

Prompts of one call are one batch. The buffers' size is rounded up, so that calls of similar length share one compiled
loop; a second call of the same shape compiles nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import decode, kv_cache, sampling, schedules
from dspark_jax.config import VERIFIERS
from dspark_jax.drafters.base import Drafter, NoObserver
from dspark_jax.loading import Target
from dspark_jax.requests import GenerationError, per_row, read_sampler, refuse_failed_rows
from dspark_jax.scheduler import Policy

PREFILL_CHUNK = 32
_SLOT_STEP = 128  # buffer sizes are multiples of this

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]  # a user turn, token ids, or chat messages


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedDrafter:
    """A drafter ready to use: the static part and its weights.

    Attributes:
      drafter: behind the drafter protocol.
      params: its weights, () for a drafter without any.
      name: for tables and messages.
    """

    drafter: Drafter
    params: Any
    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Generation:
    """One row's result.

    Attributes:
      text: the new tokens as text, stop token left out ("" without a tokenizer).
      token_ids: the new tokens, the stop token included.
      accepted_lengths: accepted length tau of each cycle (1 per step without a drafter); sums to len(token_ids).
      verify_lengths: verify length l of each cycle.
      prompt_tokens: length of the prompt.
      stopped: True if a stop token ended the row, False if the budget did.
    """

    text: str
    token_ids: list[int]
    accepted_lengths: list[int]
    verify_lengths: list[int]
    prompt_tokens: int
    stopped: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Timings:
    """Seconds of one call, compilation included the first time a shape is seen.

    Attributes:
      prefill: reading the prompts.
      decode: the loop.
      new_tokens: tokens of all rows.
    """

    prefill: float
    decode: float
    new_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows over the loop's time."""
        return self.new_tokens / max(self.decode, 1e-9)


@dataclasses.dataclass(frozen=True, eq=False)
class GenerationBatch:
    """Results of one call, in the prompts' order."""

    rows: list[Generation]
    timings: Timings


@dataclasses.dataclass(frozen=True, eq=False)
class Session:
    """A prefilled batch and the loop that continues it; what `generate` and `stream` share.

    Attributes:
      run: (state, max_cycles, settings) -> state, jitted; the state is donated, `settings` is the default.
      state: the state after prefill.
      settings: the rows' settings.
      prefill_seconds: time that prefill took.
    """

    run: Any
    state: decode.DecodeState
    settings: decode.RowSettings
    prefill_seconds: float


def prompt_ids(target: Target, prompt: Prompt) -> list[int]:
    """Returns a prompt's token ids: a string is a user turn in the chat template, integers are taken as they are.

    Raises:
      GenerationError: an empty prompt, a token outside the vocabulary, or text without a tokenizer.
    """
    if len(prompt) == 0 or (isinstance(prompt, str) and not prompt.strip()):
        raise GenerationError("empty prompt: give it at least one token")
    if not isinstance(prompt, str) and not isinstance(prompt[0], dict):
        ids = [int(token) for token in prompt]  # type: ignore[arg-type]
    elif target.tokenizer is None:
        raise GenerationError(f"target {target.name} has no tokenizer: pass token ids instead of text")
    elif target.tokenizer.chat_template is None and isinstance(prompt, str):
        ids = target.tokenizer.encode(prompt)
    else:
        ids = target.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
    outside = [token for token in ids if not 0 <= token < target.config.vocab_size]
    if outside:
        raise GenerationError(f"token id {outside[0]} is outside the vocabulary 0..{target.config.vocab_size - 1}")
    return ids


def prepare(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    drafter: LoadedDrafter | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    repetition_penalty: float | Sequence[float] = 1.0,
    verifier: str = "token",
    policy: Policy | None = None,
    stop_ids: Sequence[int] | None = None,
    seed: int = 0,
    rows: Sequence[int] | None = None,
    cache_slots: int = 0,
    widths: tuple[int, ...] | None = None,
    fuse_lm_head: bool = False,
) -> Session:
    """Checks a request, reads its prompts and returns the loop to run.

    Args:
      target: the target.
      prompts: user turns, chat messages or token ids; one row each.
      drafter: None decodes autoregressively.
      max_new_tokens: budget, for all rows or per row.
      temperature: 0 = greedy, for all rows or per row, as the four that follow.
      top_k: 0 = off.
      top_p: 1 = off.
      min_p: 0 = off.
      repetition_penalty: 1 = off.
      verifier: "token" or "block" (`verify`).
      policy: verify-length policy (`schedules`); None verifies whole blocks. It means nothing without a drafter.
      stop_ids: tokens that end a row; None takes the tokenizer's.
      seed: seed of the random streams.
      rows: numbers that key the rows' random streams; None counts from 0.
      cache_slots: S; 0 takes as many as needed.
      widths: ladder of verify widths; None takes `decode.default_widths`.
      fuse_lm_head: verify without logits in memory (`pallas_kernels.lm_head_verify`); rows with processors beyond a
        temperature have them. It means nothing without a drafter.

    Raises:
      GenerationError: a value that can't be served.
      ConfigError: a policy that can't serve this drafter or batch.
    """
    if not prompts:
        raise GenerationError("no prompts: give at least one")
    if isinstance(prompts, str):
        raise GenerationError(f"prompts = {prompts[:40]!r}: give a list of prompts, even for one")
    ids = [prompt_ids(target, prompt) for prompt in prompts]
    batch = len(ids)
    budgets = per_row(max_new_tokens, np.int32, batch, "max_new_tokens")
    sampler = read_sampler(batch, temperature, top_k, top_p, min_p, repetition_penalty)
    if budgets.min() < 0 or (np.ndim(max_new_tokens) == 0 and budgets.min() == 0):
        raise GenerationError(f"max_new_tokens = {budgets.min()}: use 1 or more (0 for single rows of a batch only)")
    if verifier not in VERIFIERS:
        raise GenerationError(f"verifier = {verifier!r}: use {' or '.join(VERIFIERS)}")
    policy = policy or schedules.full()
    if drafter is not None:
        check_lossless(policy, drafter, float(np.max(sampler.temperature)))
        if fuse_lm_head and policy.reads_target:
            raise GenerationError(f"fuse_lm_head with policy {policy.name}: it reads the target's logits; leave it off")
    size = drafter.drafter.block_size if drafter else 0
    longest = max(len(i) for i in ids)
    most = int(budgets.max())
    needed = max(len(i) + int(b) for i, b in zip(ids, budgets))
    spare = max(PREFILL_CHUNK, size + 1)  # the last block, and prefill's last chunk, may write past the end
    slots = cache_slots or -(-(needed + spare) // _SLOT_STEP) * _SLOT_STEP
    if longest + spare > slots:
        raise GenerationError(
            f"a prompt of {longest} tokens doesn't fit a cache of {slots} slots ({spare} are kept free):"
            f" shorten it or use cache_slots >= {longest + most + spare}"
        )
    if needed + spare > slots:
        raise GenerationError(
            f"prompt and budget need {needed + spare} cache slots of {slots}: lower max_new_tokens or raise cache_slots"
        )
    if needed > target.config.max_positions:
        raise GenerationError(
            f"prompt and budget are {needed} tokens, the target was trained for {target.config.max_positions}:"
            " shorten the prompt or lower max_new_tokens"
        )
    if stop_ids is None:
        stop_ids = target.tokenizer.eos_ids if target.tokenizer else ()
    outside = [token for token in stop_ids if not 0 <= token < target.config.vocab_size]
    if outside:
        raise GenerationError(
            f"stop token {outside[0]} is outside the vocabulary 0..{target.config.vocab_size - 1}: it would never come"
        )
    padded = np.zeros((batch, slots), np.int32)
    for row, prompt in enumerate(ids):
        padded[row, : len(prompt)] = prompt
    settings = decode.RowSettings(
        budget=jnp.asarray(budgets),
        sampler=sampler,
        stop_ids=jnp.tile(jnp.asarray(list(stop_ids) or [-1], jnp.int32), (batch, 1)),
        keys=sampling.row_keys(seed, jnp.asarray(rows if rows is not None else range(batch), jnp.int32)),
    )
    cycles = -(-max(most, 1) // _SLOT_STEP) * _SLOT_STEP
    lengths = jnp.asarray([len(i) for i in ids], jnp.int32)
    cache = kv_cache.init_cache(target.config, batch, slots, target.dtype)
    start = time.perf_counter()
    if drafter is None:
        step, observer, observer_params = target.step(), NoObserver(), ()
        state = decode.init_state(cache, (), jnp.asarray(padded), lengths, settings, cycles)
    else:
        step = target.step(drafter.drafter.tapped_layers, with_attention_spread=policy.reads_target)
        observer, observer_params = drafter.drafter, drafter.params
        schedule = policy.init_state(batch, size)
        state = decode.init_state(
            cache, observer.init_state(batch, slots), jnp.asarray(padded), lengths, settings, cycles, schedule
        )
    state = decode.prefill_jit(step, observer, target.params, observer_params, state, PREFILL_CHUNK)
    jax.block_until_ready(state.cache.length)
    prefill_seconds = time.perf_counter() - start
    if drafter is None:
        run = lambda state, n, settings=settings: decode.autoregressive_loop_jit(  # noqa: E731
            step, observer, target.params, observer_params, settings, state, n
        )
    else:
        ladder = tuple(widths or decode.default_widths(drafter.drafter, policy))
        if list(ladder) != sorted(set(ladder)) or ladder[-1] != size + 1:
            raise GenerationError(f"widths = {ladder}: use ascending widths that end at K + 1 = {size + 1}")
        cycle = decode.Cycle(step, drafter.drafter, policy, ladder, verifier, fuse_lm_head)
        run = lambda state, n, settings=settings: decode.speculative_loop_jit(  # noqa: E731
            cycle, target.params, drafter.params, settings, state, n
        )
    return Session(run, state, settings, prefill_seconds)


def check_lossless(policy: Policy, drafter: LoadedDrafter, temperature: float) -> None:
    """Refuses to sample with a policy that would change the target's distribution.

    Raises:
      GenerationError: the policy is not lossless with this drafter, and the temperature is above 0.
    """
    reason = policy.biased(drafter.drafter.confidence_reads_draft)
    if reason and temperature > 0:
        raise GenerationError(
            f"policy {policy.name} at temperature {temperature:g} would not keep the target's distribution: {reason};"
            " use temperature 0, or a lossless policy such as hardware_aware or delayed"
        )


def generate(target: Target, prompts: Sequence[Prompt], **options: Any) -> GenerationBatch:
    """Decodes prompts to their end.

    Args:
      target: the target.
      prompts: user turns, chat messages or token ids; one row each.
      **options: as `prepare`.

    Returns:
      text, tokens, accepted lengths and timings.

    Raises:
      GenerationError: a value that can't be served, or a target whose logits are not finite numbers.
    """
    session = prepare(target, prompts, **options)
    start = time.perf_counter()
    state = session.run(session.state, session.state.accepted.shape[1])
    jax.block_until_ready(state.tokens)
    seconds = time.perf_counter() - start
    refuse_failed_rows(state.failed)
    rows = _collect(target, state, session.settings)
    total = sum(len(row.token_ids) for row in rows)
    return GenerationBatch(rows, Timings(session.prefill_seconds, seconds, total))


def stream(target: Target, prompt: Prompt, cycles_per_piece: int = 1, **options: Any) -> Iterator[list[int]]:
    """Decodes one prompt, yielding the new token ids of every `cycles_per_piece` cycles as they are committed.

    Raises:
      GenerationError: as `generate`; a target that breaks down midway raises after its last good token.
    """
    session = prepare(target, [prompt], **options)
    state, sent = session.state, int(session.state.prompt_length[0])
    while not bool(state.done[0]):
        state = session.run(state, cycles_per_piece)
        length = int(state.length[0])
        if length > sent:
            yield np.asarray(state.tokens)[0, sent:length].tolist()
        sent = length
    refuse_failed_rows(state.failed)


def _collect(target: Target, state: decode.DecodeState, settings: decode.RowSettings) -> list[Generation]:
    tokens, lengths, prompts = np.asarray(state.tokens), np.asarray(state.length), np.asarray(state.prompt_length)
    accepted, verified = np.asarray(state.accepted), np.asarray(state.verified)
    stops = np.asarray(settings.stop_ids)
    rows = []
    for b in range(len(tokens)):
        new = tokens[b, prompts[b] : lengths[b]].tolist()
        stopped = bool(new) and new[-1] in stops[b]
        text = target.tokenizer.decode(new[:-1] if stopped else new) if target.tokenizer else ""
        used = accepted[b] > 0
        rows.append(
            Generation(text, new, accepted[b][used].tolist(), verified[b][used].tolist(), int(prompts[b]), stopped)
        )
    return rows
