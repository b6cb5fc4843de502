"""The shape legend, and the frozen records that the stages hand on.

Letters, the same in every docstring and einsum of the project:

  B  requests (rows) of a batch          N  query heads
  T  query tokens of one call            G  key/value heads
  S  slots of a KV cache                 H  head dim
  D  width                               R  Markov rank
  V  vocabulary, V' a draft vocabulary   M  tapped target layers
  K  block size: draft tokens a cycle    A  anchors of a training sequence

Words: the *anchor* is the newest committed token, which the target has not read yet. The *verify length* l in
0..K is how many draft tokens the target checks, the *accepted draft length* n in 0..l how many of them it keeps,
and the *accepted length* tau = n + 1 counts the bonus token too (tokens cut by a stop token or a budget are not
counted).
"""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

Params = Any  # a nested dict of arrays


@struct.dataclass
class KVCache:
    """Keys and values of the tokens that were read, with a length per row.

    Slots at and beyond a row's length are garbage to be overwritten, never read: rollback is a length.

    Attributes:
      keys: one [B, G, S, H] per layer, after QK norm and RoPE.
      values: one [B, G, S, H] per layer.
      length: [B] int32, slots in use; also the position of the next token.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array


@struct.dataclass
class BlockKV:
    """Keys and values of one call's tokens, not in a cache yet.

    Attributes:
      keys: one [B, G, T, H] per layer.
      values: one [B, G, T, H] per layer.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


@struct.dataclass
class TargetOutput:
    """What the target returns for T tokens per row.

    Attributes:
      logits: [B, T, V] float32; at token t the distribution of position t + 1 (None once they are used up).
      features: [B, T, M, D] outputs of the tapped layers.
      last_hidden: [B, T, D], what the LM head read (after the final norm).
      block: keys and values of these tokens, for `kv_cache.append`.
      entropy: [B, T] float32, entropy of each distribution over log V, or None (`scheduler.Policy.reads_target`).
      attention_spread: [B, T] float32 in 0..1, how evenly each token's last attention layer looks over what it sees, or
        None (`attention.attention_spread`).
    """

    logits: jax.Array | None
    features: jax.Array
    last_hidden: jax.Array
    block: BlockKV
    entropy: jax.Array | None = None
    attention_spread: jax.Array | None = None


@struct.dataclass
class Sampler:
    """How each row's next token is chosen; values per row, so that changing them compiles nothing.

    The processors act in the order of Hugging Face's `generate`: repetition penalty,
    temperature, top-k, top-p, min-p (`processors`).

    Attributes:
      temperature: [B] float32, 0 = greedy.
      top_k: [B] int32, 0 = off.
      top_p: [B] float32 in (0, 1], 1 = off.
      min_p: [B] float32 in [0, 1], 0 = off.
      repetition_penalty: [B] float32 > 0, 1 = off; greedy rows obey it too.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array


@struct.dataclass
class Draft:
    """A proposed block and the distribution q that each token was drawn from.

    q_k = softmax(logits_k), after the processors, zero wherever `ids` names no token. Verification is exact for
    whatever q is, as long as it is this one.

    Attributes:
      token_ids: [B, K] int32, in the target's vocabulary.
      logits: [B, K, V'] float32, processed (`processors.process`), -inf for what could not be drawn; None for a
        deterministic proposal (q is one-hot). Rows at temperature 0 are deterministic whatever stands here.
      confidence_logits: [B, K] float32; sigmoid is c_k, or None if the drafter has no confidence head.
      length: [B] int32, how many of the K tokens are proposed (prompt lookup may find fewer, or none).
      ids: target ids of the last axis of `logits`. None: the whole vocabulary. [V'] ascending: a reduced vocabulary.
        [B, K, V']: a list of candidates per position, distinct except for padding, whose logits are -inf.
    """

    token_ids: jax.Array
    logits: jax.Array | None
    confidence_logits: jax.Array | None
    length: jax.Array
    ids: jax.Array | None = None
