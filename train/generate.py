"""The target writes the training data: answers to prompts, and the prompts themselves if there are none.

Training on the target's own text is what makes a drafter good at drafting for it (on-policy data). While it writes, an
observer keeps what training will need of the target (tapped features, last hidden state, softmax normaliser), so the
text is never read a second time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax import decode, kv_cache, processors, sampling
from dspark_jax.drafters.base import NoObserver
from dspark_jax.loading import Target
from dspark_jax.records import TargetOutput
from dspark_jax.requests import refuse_failed_rows
from train.data import Answered

PREFILL_CHUNK = 16


@struct.dataclass
class Recording:
    """What the recorder has seen, by call: every call writes one slice of a buffer, for all rows at once.

    Attributes:
      prompt_features: [P/C, B, C, M, D] bfloat16, of prefill chunks of C tokens.
      prompt_hidden: [P/C, B, C, D] float16.
      features: [L, B, M, D] bfloat16, of decoding steps (row b's step i reads its token prompt_length - 1 + i).
      last_hidden: [L, B, D] float16.
      log_normalizer: [L, B] float32.
      mass: [V] float32, summed next-token probabilities of all rows.
      chunks: int32, prefill calls so far.
      steps: int32, decoding steps so far.
    """

    prompt_features: jax.Array
    prompt_hidden: jax.Array
    features: jax.Array
    last_hidden: jax.Array
    log_normalizer: jax.Array
    mass: jax.Array
    chunks: jax.Array
    steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Keeps what training reads of the target."""

    def init_state(self, target: Target, taps: int, batch: int, max_prompt: int, max_new: int) -> Recording:
        """Returns empty buffers."""
        width, chunks = target.config.width, -(-max_prompt // PREFILL_CHUNK)
        return Recording(
            prompt_features=jnp.zeros((chunks, batch, PREFILL_CHUNK, taps, width), jnp.bfloat16),
            prompt_hidden=jnp.zeros((chunks, batch, PREFILL_CHUNK, width), jnp.float16),
            features=jnp.zeros((max_new, batch, taps, width), jnp.bfloat16),
            last_hidden=jnp.zeros((max_new, batch, width), jnp.float16),
            log_normalizer=jnp.zeros((max_new, batch), jnp.float32),
            mass=jnp.zeros((target.config.vocab_size,), jnp.float32),
            chunks=jnp.zeros((), jnp.int32),
            steps=jnp.zeros((), jnp.int32),
        )

    def commit(self, params: Any, state: Recording, output: TargetOutput, count: jax.Array, tokens) -> Recording:
        """Writes one call's outputs; see `drafters.base.Observer`."""
        del params, tokens
        if output.last_hidden.shape[1] > 1:  # a prefill chunk
            return dataclasses.replace(
                state,
                prompt_features=_write(state.prompt_features, output.features, state.chunks),
                prompt_hidden=_write(state.prompt_hidden, output.last_hidden, state.chunks),
                chunks=state.chunks + 1,
            )
        assert output.logits is not None
        logits = output.logits[:, 0]
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        active = (count > 0).astype(jnp.float32)[:, None]
        return dataclasses.replace(
            state,
            features=_write(state.features, output.features[:, 0], state.steps),
            last_hidden=_write(state.last_hidden, output.last_hidden[:, 0], state.steps),
            log_normalizer=_write(state.log_normalizer, normalizer, state.steps),
            mass=state.mass + jnp.sum(jnp.exp(logits - normalizer[:, None]) * active, axis=0),
            steps=state.steps + 1,
        )

    def rows(self, state: Recording, prompt_length: np.ndarray, length: np.ndarray):
        """Yields each row's features, last hidden states and normalisers of all tokens it read, in order."""
        prompt_features = np.asarray(state.prompt_features)
        prompt_hidden = np.asarray(state.prompt_hidden)
        features, hidden = np.asarray(state.features), np.asarray(state.last_hidden)
        log = np.asarray(state.log_normalizer)
        join = lambda a, b: a[:, b].reshape(-1, *a.shape[3:])  # noqa: E731
        for b, (prompt, total) in enumerate(zip(prompt_length, length)):
            steps = total - prompt
            yield (
                np.concatenate([join(prompt_features, b)[: prompt - 1], features[:steps, b]]),
                np.concatenate([join(prompt_hidden, b)[: prompt - 1], hidden[:steps, b]]),
                np.concatenate([np.zeros((prompt - 1,), np.float32), log[:steps, b]]),
            )


def _write(buffer: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(buffer, new.astype(buffer.dtype), index, axis=0)


def pad_prompts(prompts: Sequence[Sequence[int]], slots: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompts as [B, slots] int32 padded on the right, and their lengths [B]."""
    padded = np.full((len(prompts), slots), pad_id, np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    return padded, np.asarray([len(p) for p in prompts], np.int32)


def answer(
    target: Target,
    tapped_layers: tuple[int, ...],
    prompts: Sequence[Sequence[int]],
    stop_ids: Sequence[int],
    max_prompt: int,
    max_new: int,
    temperatures: Sequence[float],
    seed: int,
    first_row: int,
    record: bool,
    pad_to: int = 0,
) -> tuple[list[Answered], np.ndarray | None]:
    """Decodes one batch autoregressively.

    Args:
      target: the target.
      tapped_layers: layers to record.
      prompts: B token lists of at most `max_prompt` tokens.
      stop_ids: tokens that end an answer.
      max_prompt: sets the buffers' size, so that every batch has the same shape.
      max_new: budget of new tokens.
      temperatures: per row.
      seed: seed of the run.
      first_row: number of the first row in the run (keys its random stream).
      record: whether to keep what training needs; without it the arrays of the answers are empty.
      pad_to: rows to fill the batch up to, with rows that are done from the start: one compiled shape for all batches.

    Returns:
      the answered sequences, and the target's probability mass per token [V] (None without recording).
    """
    count = len(prompts)
    fill = max(pad_to - count, 0)
    batch = count + fill
    slots = max_prompt + max_new + PREFILL_CHUNK
    padded, lengths = pad_prompts([*prompts, *[[0]] * fill], slots, 0)
    settings = decode.RowSettings(
        budget=jnp.asarray([max_new] * count + [0] * fill, jnp.int32),
        sampler=processors.make_sampler(jnp.asarray([*temperatures, *[0.0] * fill], jnp.float32)),
        stop_ids=jnp.tile(jnp.asarray(list(stop_ids) or [-1], jnp.int32), (batch, 1)),
        keys=sampling.row_keys(seed, first_row + jnp.arange(batch)),
    )
    observer = Recorder() if record else NoObserver()
    observed: Any = ()
    if isinstance(observer, Recorder):
        observed = observer.init_state(target, len(tapped_layers), batch, max_prompt, max_new)
    step = target.step(tapped_layers if record else ())
    cache = kv_cache.init_cache(target.config, batch, slots, target.dtype)
    state = decode.init_state(cache, observed, jnp.asarray(padded), jnp.asarray(lengths), settings, max_new)
    state = decode.prefill_jit(step, observer, target.params, (), state, PREFILL_CHUNK)
    state = decode.autoregressive_loop_jit(step, observer, target.params, (), settings, state, max_new)
    refuse_failed_rows(state.failed)
    tokens, ends = np.asarray(state.tokens), np.asarray(state.length)
    if isinstance(observer, NoObserver):
        none = np.zeros((0,))
        return [Answered(tokens[b, : ends[b]], int(lengths[b]), none, none, none) for b in range(count)], None
    answered = [
        Answered(tokens[b, : ends[b]], int(lengths[b]), *arrays)
        for b, arrays in enumerate(observer.rows(state.drafter, lengths[:count], ends))
    ]
    return answered, np.asarray(state.drafter.mass)


def write_prompts(target: Target, count: int, max_tokens: int, batch_size: int, seed: int, progress=None) -> list[str]:
    """Lets the target write user turns: it continues its own chat template from where a user would type.

    Args:
      target: a target with a chat template.
      count: prompts wanted.
      max_tokens: length limit of a prompt; longer ones are thrown away unfinished.
      batch_size: rows decoded together.
      seed: seed of the sampling.
      progress: called with the number of new prompts after each batch.

    Returns:
      `count` distinct prompts.

    Raises:
      ValueError: the target repeats itself so much that not enough distinct prompts come out.
    """
    tokenizer = target.tokenizer
    assert tokenizer is not None
    marker = "\u2063user\u2063"
    opening = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": marker}]).split(marker)[0])
    found: dict[str, None] = {}
    for batch in range(20 + 6 * count // batch_size):
        if len(found) >= count:
            break
        rows, _ = answer(
            target,
            (),
            [opening] * batch_size,
            tokenizer.eos_ids,
            len(opening),
            max_tokens,
            [1.0] * batch_size,
            seed,
            batch * batch_size,
            record=False,
        )
        before = len(found)
        for row in rows:
            ids = row.tokens[row.prompt_length :].tolist()
            if not ids or ids[-1] not in tokenizer.eos_ids:
                continue
            text = tokenizer.decode(ids[:-1], skip_special=True).strip()
            if len(text) >= 8:
                found.setdefault(text)
        if progress is not None:
            progress(min(len(found), count) - min(before, count))
    if len(found) < count:
        raise ValueError(f"the target wrote only {len(found)} distinct prompts of the {count} wanted; ask for fewer")
    return list(found)[:count]
