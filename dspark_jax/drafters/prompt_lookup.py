"""Prompt lookup: propose what followed the longest earlier match of the row's last tokens (Saxena, 2023).

No training, no weights, almost no cost: the baseline that every trained drafter has to beat. The proposal is
deterministic, so verification treats q as one-hot.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.records import Draft


@dataclasses.dataclass(frozen=True)
class PromptLookupDrafter:
    """Longest suffix match in the row's own tokens.

    Attributes:
      block_size: K, tokens proposed per cycle.
      max_ngram: longest suffix that is matched.
      min_ngram: shortest match that is used; with none, nothing is proposed.
      tapped_layers: none, it reads no features.
      always_full: see `base.Drafter`; a match near the end has a short continuation.
      confidence_reads_draft: there are no confidences.
    """

    block_size: int = 3
    max_ngram: int = 4
    min_ngram: int = 1
    tapped_layers: tuple[int, ...] = ()
    always_full: bool = False
    confidence_reads_draft: bool = False

    def init_state(self, batch: int, slots: int) -> tuple[()]:
        """Has no state: the row's tokens are all it needs."""
        del batch, slots
        return ()

    def draft(self, params, state, tokens, length, uniforms, sampler) -> Draft:
        """Proposes the continuation of the longest, then latest, earlier match; see `base.Drafter.draft`."""
        del params, state, uniforms, sampler
        slots = tokens.shape[1]
        ends = jnp.arange(slots)  # a match ends at slot e: tokens[e - i] == tokens[length - 1 - i] for i < match

        def row(tokens, length):
            match = jnp.zeros((slots,), jnp.int32)
            unbroken = ends < length - 1  # strictly before the suffix's own end
            for i in range(self.max_ngram):
                same = jnp.roll(tokens, i) == tokens[jnp.maximum(length - 1 - i, 0)]
                unbroken &= same & (ends >= i) & (length - 1 >= i)
                match += unbroken
            score = jnp.where(match >= self.min_ngram, match * slots + ends, -1)
            end = jnp.argmax(score)
            available = jnp.minimum(self.block_size, length - 1 - end)
            count = jnp.where(score[end] >= 0, available, 0)
            block = jax.lax.dynamic_slice_in_dim(jnp.pad(tokens, (0, self.block_size)), end + 1, self.block_size)
            return block, count.astype(jnp.int32)

        block, count = jax.vmap(row)(tokens, length)
        return Draft(token_ids=block, logits=None, confidence_logits=None, length=count)

    def commit(self, params, state, output, count, tokens) -> tuple[()]:
        """Needs nothing from the target."""
        del params, output, count, tokens
        return state
