"""The decoding cycle: draft, schedule, verify, commit; and the loops over it.

Row state: committed tokens x[0..p], where x[p] is the anchor. The target's cache and the drafter's context hold the
positions before p. One cycle reads the anchor and l draft tokens with the target, keeps n of them, adds one token of
the target's own and moves p by n + 1. The whole loop is one `lax.while_loop` with fixed-size buffers and no transfer to
the host; a caller that streams runs it a few cycles at a time. The models arrive as callables.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax import kv_cache, processors, sampling, scheduler, verify
from dspark_jax.drafters.base import Drafter, Observer
from dspark_jax.records import BlockKV, Draft, KVCache, Params, Sampler, TargetOutput
from pallas_kernels.verify.reference import usable_positions


class TargetFn(Protocol):
    """The target as a hashable callable (`target.TargetStep`)."""

    def __call__(self, params: Params, token_ids: jax.Array, cache: KVCache, with_logits: bool = True) -> TargetOutput:
        """Reads T tokens per row after the cache, [B, T]."""
        ...

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Applies the LM head to last hidden states: [B, T, D] -> [B, T, V]."""
        ...

    def lm_head(self, params: Params) -> tuple[jax.Array, float]:
        """Returns the LM head's weights [V, D] and the cap of its logits (0 = none)."""
        ...


@struct.dataclass
class RowSettings:
    """What a request asks for, one entry per row.

    Attributes:
      budget: [B] int32, new tokens allowed.
      sampler: how each row's tokens are chosen.
      stop_ids: [B, n] int32, tokens that end the row (-1 = unused entry).
      keys: [B] random keys (`sampling.row_keys`).
    """

    budget: jax.Array
    sampler: Sampler
    stop_ids: jax.Array
    keys: jax.Array


@struct.dataclass
class DecodeState:
    """Everything that a loop carries.

    Attributes:
      tokens: [B, S] int32, committed tokens; garbage beyond the length.
      length: [B] int32, committed tokens (p + 1).
      prompt_length: [B] int32.
      done: [B] bool, the row met a stop token or its budget, or failed.
      failed: [B] int32, -1, or the position for which the target's logits were not numbers: the row stopped before it.
      cache: the target's cache, positions < p.
      drafter: the drafter's state (or an observer's).
      cycle: int32, cycles run.
      accepted: [B, C] int32, accepted length tau of each cycle (0 = the row was done).
      verified: [B, C] int32, verify length l of each cycle.
      schedule: the policy's state.
    """

    tokens: jax.Array
    length: jax.Array
    prompt_length: jax.Array
    done: jax.Array
    failed: jax.Array
    cache: KVCache
    drafter: Any
    cycle: jax.Array
    accepted: jax.Array
    verified: jax.Array
    schedule: Any = ()


@struct.dataclass
class Cycle:
    """The parts of a speculative cycle: static and hashable but for the policy's constants.

    One compiled loop per value of the static parts and kind of policy; other constants of a policy compile nothing.

    Attributes:
      target: the target as a callable.
      drafter: the drafter.
      policy: verify-length policy.
      widths: ladder of verify widths (tokens read by the target), ascending, the last one K + 1.
      verifier: "token" or "block" (`verify`).
      fuse_lm_head: verify from hidden states without logits in memory (`verify.verify_hidden`).
    """

    target: TargetFn = struct.field(pytree_node=False)
    drafter: Drafter = struct.field(pytree_node=False)
    policy: scheduler.Policy
    widths: tuple[int, ...] = struct.field(pytree_node=False)
    verifier: str = struct.field(pytree_node=False, default="token")
    fuse_lm_head: bool = struct.field(pytree_node=False, default=False)


def default_widths(drafter: Drafter, policy: scheduler.Policy) -> tuple[int, ...]:
    """Returns the ladder of verify widths: 1, 2, 4, 8, ... up to K + 1, or K + 1 alone if no other can occur.

    Matrix products like powers of two; every width is compiled, so none is there for nothing.
    """
    longest = drafter.block_size + 1
    if policy.always_full and drafter.always_full:
        return (longest,)
    return (*(w for w in (1, 2, 4, 8, 16) if w < longest), longest)


def init_state(
    cache: KVCache,
    drafter_state: Any,
    prompts: jax.Array,
    prompt_length: jax.Array,
    settings: RowSettings,
    cycles: int,
    schedule: Any = (),
) -> DecodeState:
    """Returns the state before prefill.

    Args:
      cache: an empty cache.
      drafter_state: the drafter's (or an observer's) empty state.
      prompts: [B, S] int32, padded on the right with anything.
      prompt_length: [B], at least 1.
      settings: the rows' settings.
      cycles: C, how many cycles can be recorded (a budget of n tokens takes at most n).
      schedule: the policy's first state (`scheduler.Policy.init_state`).
    """
    batch = prompts.shape[0]
    return DecodeState(
        tokens=prompts,
        length=jnp.array(prompt_length),  # a copy: both are donated to the loop
        prompt_length=prompt_length,
        done=settings.budget <= 0,
        failed=jnp.full((batch,), -1, jnp.int32),
        cache=cache,
        drafter=drafter_state,
        cycle=jnp.zeros((), jnp.int32),
        accepted=jnp.zeros((batch, cycles), jnp.int32),
        verified=jnp.zeros((batch, cycles), jnp.int32),
        schedule=schedule,
    )


def prefill(
    target: TargetFn, observer: Observer, params: Params, observer_params: Params, state: DecodeState, chunk: int
) -> DecodeState:
    """Reads every prompt except its last token (the anchor), in chunks of `chunk` tokens.

    The cache needs `chunk` slots beyond the longest prompt: a row that has nothing left writes garbage there.
    """
    reads = state.prompt_length - 1

    def body(carry):
        offset, cache, observed = carry
        ids = jax.lax.dynamic_slice_in_dim(state.tokens, offset, chunk, axis=1)
        output = target(params, ids, cache, with_logits=False)
        count = jnp.clip(reads - offset, 0, chunk)
        observed = observer.commit(observer_params, observed, output, count, state.tokens)
        return offset + chunk, kv_cache.append(cache, output.block, count), observed

    _, cache, observed = jax.lax.while_loop(
        lambda carry: carry[0] < jnp.max(reads), body, (jnp.zeros((), jnp.int32), state.cache, state.drafter)
    )
    return dataclasses.replace(state, cache=cache, drafter=observed)


def draft_stage(cycle: Cycle, drafter_params: Params, settings: RowSettings, state: DecodeState):
    """Drafts and schedules. Returns the draft, the verify lengths [B] and the cycle's uniforms [B, K+1, 3]."""
    size = cycle.drafter.block_size
    uniforms = sampling.cycle_uniforms(settings.keys, state.length - 1, size + 1)
    draft = cycle.drafter.draft(
        drafter_params,
        state.drafter,
        state.tokens,
        state.length,
        uniforms[:, :size, sampling.DRAFT],
        settings.sampler,
    )
    if draft.logits is not None:
        # A drafter whose logits are not numbers proposes nothing from there on: the text stays the target's. The cut
        # is decided by the tokens before it, as a policy's.
        draft = dataclasses.replace(draft, length=jnp.minimum(draft.length, usable_positions(draft.logits)))
    return draft, schedule_stage(cycle, state, draft), uniforms


def schedule_stage(cycle: Cycle, state: DecodeState, draft: Draft) -> jax.Array:
    """Returns the verify lengths [B] that the policy decides on."""
    lengths = cycle.policy.verify_length(state.schedule, draft, ~state.done)
    return jnp.where(state.done, 0, lengths).astype(jnp.int32)


def verify_stage(
    cycle: Cycle, params: Params, settings: RowSettings, state: DecodeState, draft: Draft, verify_len, uniforms
):
    """Reads anchor and drafts with the target at the narrowest sufficient width, and verifies.

    Returns:
      accepted draft length n [B], the added token [B] (-1: there is none, the target's logits for it are not
      numbers), and the target's output for K+1 tokens (garbage beyond the width, and without the logits:
      they are used up).
    """
    size = cycle.drafter.block_size
    anchor = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    ids = jnp.concatenate([anchor, draft.token_ids], axis=1)  # [B, K+1]

    def at_width(width: int):
        pad = size + 1 - width

        def branch(ids):
            output = cycle.target(params, ids[:, :width], state.cache, with_logits=not cycle.fuse_lm_head)
            arguments = (
                draft,
                verify_len,
                settings.sampler,
                state.tokens,
                state.length,
                uniforms[:, : width - 1, sampling.ACCEPT],
                uniforms[:, :width, sampling.COMMIT],
                cycle.verifier,
            )
            if cycle.fuse_lm_head:
                logits_of = partial(cycle.target.logits, params)
                head = cycle.target.lm_head(params)
                accepted, added = verify.verify_hidden(output.last_hidden, head, logits_of, *arguments)
            else:
                assert output.logits is not None
                accepted, added = verify.verify_block(output.logits, *arguments)
            widen = lambda a: jnp.pad(a, ((0, 0), (0, 0), (0, pad), (0, 0)))  # noqa: E731
            block = BlockKV(keys=tuple(map(widen, output.block.keys)), values=tuple(map(widen, output.block.values)))
            wide = TargetOutput(
                logits=None,
                features=jnp.pad(output.features, ((0, 0), (0, pad), (0, 0), (0, 0))),
                last_hidden=jnp.pad(output.last_hidden, ((0, 0), (0, pad), (0, 0))),
                block=block,
            )
            if cycle.policy.reads_target:
                assert output.logits is not None
                assert output.attention_spread is not None
                measures = (scheduler.normalized_entropy(output.logits), output.attention_spread)
                entropy, spread = (jnp.pad(a, ((0, 0), (0, pad))) for a in measures)
                wide = dataclasses.replace(wide, entropy=entropy, attention_spread=spread)
            return accepted, added, wide

        return branch

    if len(cycle.widths) == 1:
        return at_width(cycle.widths[0])(ids)
    needed = jnp.max(verify_len) + 1
    index = jnp.sum(jnp.asarray(cycle.widths) < needed)
    return jax.lax.switch(index, [at_width(w) for w in cycle.widths], ids)


def commit_stage(
    cycle: Cycle, drafter_params: Params, settings: RowSettings, state: DecodeState, draft, verify_len, verified
) -> DecodeState:
    """Cuts the new tokens at the first stop token and at the budget, then counts and stores them."""
    accepted, added, output = verified
    size = cycle.drafter.block_size
    place = jnp.arange(size + 1)
    new = jnp.pad(draft.token_ids, ((0, 0), (0, 1)))
    new = jnp.where(place == accepted[:, None], added[:, None], new)  # [B, K+1]
    tokens, length, count, done, failed = _store(settings, state, new, accepted + 1, broken=added < 0)
    feedback = scheduler.Feedback(draft, verify_len, accepted, ~state.done, output)
    return dataclasses.replace(
        state,
        tokens=tokens,
        length=length,
        done=done,
        failed=failed,
        schedule=cycle.policy.update(state.schedule, feedback),
        cache=kv_cache.append(state.cache, output.block, count),
        drafter=cycle.drafter.commit(drafter_params, state.drafter, output, count, tokens),
        cycle=state.cycle + 1,
        accepted=jax.lax.dynamic_update_slice(state.accepted, count[:, None], (0, state.cycle)),
        verified=jax.lax.dynamic_update_slice(state.verified, verify_len[:, None], (0, state.cycle)),
    )


def speculative_cycle(
    cycle: Cycle, params: Params, drafter_params: Params, settings: RowSettings, state: DecodeState
) -> tuple[DecodeState, Draft]:
    """One whole cycle. Returns the new state and the draft (for inspection)."""
    draft, verify_len, uniforms = draft_stage(cycle, drafter_params, settings, state)
    if cycle.policy.sees_acceptance:
        verify_len, *_ = verify_stage(cycle, params, settings, state, draft, verify_len, uniforms)
    verified = verify_stage(cycle, params, settings, state, draft, verify_len, uniforms)
    return commit_stage(cycle, drafter_params, settings, state, draft, verify_len, verified), draft


def speculative_loop(
    cycle: Cycle, params: Params, drafter_params: Params, settings: RowSettings, state: DecodeState, max_cycles
) -> DecodeState:
    """Runs cycles until every row is done, or until `max_cycles` more have run."""
    last = state.cycle + max_cycles
    body = lambda s: speculative_cycle(cycle, params, drafter_params, settings, s)[0]  # noqa: E731
    return jax.lax.while_loop(lambda s: ~jnp.all(s.done) & (s.cycle < last), body, state)


def autoregressive_loop(
    target: TargetFn,
    observer: Observer,
    params: Params,
    observer_params: Params,
    settings: RowSettings,
    state: DecodeState,
    max_steps,
) -> DecodeState:
    """Decodes one token per step with the same target: the baseline, and the writer of training data."""
    last = state.cycle + max_steps

    def body(state: DecodeState) -> DecodeState:
        anchor = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
        output = target(params, anchor, state.cache)
        assert output.logits is not None
        none = jnp.zeros((len(anchor), 0), jnp.int32)
        logits = processors.process_block(output.logits, settings.sampler, state.tokens, state.length, none)[:, 0]
        uniforms = sampling.cycle_uniforms(settings.keys, state.length - 1, 1)[:, 0, sampling.COMMIT]
        token = sampling.sample(logits, settings.sampler.temperature, uniforms)
        broken = usable_positions(output.logits) == 0
        tokens, length, count, done, failed = _store(settings, state, token[:, None], jnp.ones_like(token), broken)
        return dataclasses.replace(
            state,
            tokens=tokens,
            length=length,
            done=done,
            failed=failed,
            cache=kv_cache.append(state.cache, output.block, count),
            drafter=observer.commit(observer_params, state.drafter, output, count, tokens),
            cycle=state.cycle + 1,
            accepted=jax.lax.dynamic_update_slice(state.accepted, count[:, None], (0, state.cycle)),
        )

    return jax.lax.while_loop(lambda s: ~jnp.all(s.done) & (s.cycle < last), body, state)


def _store(settings: RowSettings, state: DecodeState, new: jax.Array, available: jax.Array, broken: jax.Array):
    """Writes new tokens, cut at the first stop token (which is kept) and at the budget.

    Args:
      settings: the rows' settings.
      state: the state.
      new: [B, T] candidates, `available` [B] of them valid.
      available: how many candidates each row has.
      broken: [B] bool, the last of them is none: the row stops before it, unless it is done already.

    Returns:
      tokens, length, count [B] of tokens that were committed, done, failed.
    """
    available = available - broken
    place = jnp.arange(new.shape[1])
    is_stop = jnp.any(new[:, :, None] == settings.stop_ids[:, None, :], axis=-1) & (place < available[:, None])
    first_stop = jnp.where(is_stop.any(1), jnp.argmax(is_stop, axis=1), new.shape[1])
    left = settings.budget - (state.length - state.prompt_length)
    count = jnp.where(state.done, 0, jnp.minimum(jnp.minimum(available, first_stop + 1), left))
    write = jax.vmap(lambda row, piece, at: jax.lax.dynamic_update_slice(row, piece, (at,)))
    tokens = write(state.tokens, new.astype(jnp.int32), state.length)
    done = state.done | (first_stop < count) | (count >= left)
    length = state.length + count
    failed = jnp.where(broken & ~done, length, state.failed)
    return tokens, length, count, done | broken, failed


# Jitted entry points: static arguments are hashable (within a cycle too), buffers are donated.
prefill_jit = partial(jax.jit, static_argnames=("target", "observer", "chunk"), donate_argnames=("state",))(prefill)
speculative_loop_jit = partial(jax.jit, donate_argnames=("state",))(speculative_loop)
autoregressive_loop_jit = partial(jax.jit, static_argnames=("target", "observer"), donate_argnames=("state",))(
    autoregressive_loop
)
