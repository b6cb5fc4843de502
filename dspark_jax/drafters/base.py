"""The protocol of a drafter: draft a block, take in what was committed.

The second half, `Observer`, is also what autoregressive decoding offers to whoever wants to see the target's outputs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from dspark_jax.records import Draft, Params, Sampler, TargetOutput


class Observer(Protocol):
    """Sees the target's outputs for every token that becomes part of the context. Frozen and hashable."""

    def commit(self, params: Params, state: Any, output: TargetOutput, count: jax.Array, tokens: jax.Array) -> Any:
        """Takes in the target's outputs for tokens that are now part of the context.

        Args:
          params: the observer's weights.
          state: its state.
          output: the target's outputs for the T tokens per row that it just read.
          count: [B] in 0..T, how many of them count.
          tokens: [B, S], committed tokens of each row, the one after the last that counts included.

        Returns:
          The new state.
        """
        ...


@dataclasses.dataclass(frozen=True)
class NoObserver:
    """Looks away: the observer of plain autoregressive decoding."""

    def commit(self, params: Params, state: Any, output: TargetOutput, count: jax.Array, tokens: jax.Array) -> Any:
        """Returns the state as it is."""
        del params, output, count, tokens
        return state


class Drafter(Observer, Protocol):
    """What the decoding cycle asks of a drafter.

    Implementations are frozen and hashable: they are static arguments of the jitted loop. Weights arrive as `params`,
    everything that changes as `state`.

    Attributes:
      block_size: K, tokens proposed per cycle.
      tapped_layers: target layers whose outputs `commit` wants.
      always_full: every draft has K tokens; the verify width then depends on the policy alone.
      confidence_reads_draft: confidences depend on draft tokens; some policies are lossless only if they don't.
    """

    @property
    def block_size(self) -> int: ...  # noqa: D102

    @property
    def tapped_layers(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def always_full(self) -> bool: ...  # noqa: D102

    @property
    def confidence_reads_draft(self) -> bool: ...  # noqa: D102

    def init_state(self, batch: int, slots: int) -> Any:
        """Returns the state of `batch` rows that have read nothing, for sequences of up to `slots` tokens."""
        ...

    def draft(
        self,
        params: Params,
        state: Any,
        tokens: jax.Array,
        length: jax.Array,
        uniforms: jax.Array,
        sampler: Sampler,
    ) -> Draft:
        """Proposes a block after the anchor.

        Args:
          params: the drafter's weights.
          state: its state.
          tokens: [B, S] int32, committed tokens of each row (garbage beyond its length).
          length: [B], committed tokens; the anchor is tokens[length - 1].
          uniforms: [B, K] in [0, 1), one for each proposed token.
          sampler: settings of the rows; a proposal that is sampled goes through the same processors as the target.
        """
        ...
