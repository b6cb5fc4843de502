"""Hardware-aware policies: how many tokens a step should carry, by the machine's measured speed.

With B active rows and prefix survival a_{r,j} = c_{r,1} ... c_{r,j}, a step that verifies a set of draft tokens commits
B + sum(a) tokens in expectation and carries B + |set|, so it is worth theta = (B + sum(a)) * SPS(B + |set|) tokens per
second. All (row, token) pairs of the batch compete; the best ones are prefixes of each row, since a falls along a row.

  hardware-aware (DSpark, Algorithm 1)  admit in descending order of a while theta rises; stop at the first step that
                                        does not raise it. Lossless: it never looks past the token in question.
  global maximum                        admit as many as maximise theta over the whole (jagged) curve. It looks past:
                                        with a confidence head that reads draft tokens, x_k can decide about l >= k.
  delayed                               as many as would have been the global maximum two cycles ago; which ones, by
                                        today's order. Lossless: the total is history, and the rank of (r, j) depends on
                                        no later token of r. In the first two cycles, without history, Algorithm 1.

SPS is per step of b tokens in all (`sps`): theta prices a step whose rows are packed. A loop that pads all rows to the
widest one pays for more than that as soon as rows differ.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax import sps
from dspark_jax.config import ConfigError
from dspark_jax.records import Draft
from dspark_jax.scheduler import Feedback, Policy, confidences


def hardware_aware(table: sps.SpsTable) -> HardwareAware:
    """Makes Algorithm 1's policy from a measured table.

    Raises:
      ConfigError: no table.
    """
    return HardwareAware(_speeds(table, "hardware_aware"))


def global_maximum(table: sps.SpsTable) -> GlobalMaximum:
    """Makes the policy that maximises theta over today's confidences; greedy decoding only, in general.

    Raises:
      ConfigError: no table.
    """
    return GlobalMaximum(_speeds(table, "global_maximum"))


def delayed(table: sps.SpsTable) -> Delayed:
    """Makes the policy that admits as many tokens as maximised theta two cycles ago.

    Raises:
      ConfigError: no table.
    """
    return Delayed(_speeds(table, "delayed"))


@struct.dataclass
class _Measured(Policy):
    """What policies share that weigh the rows of a batch against a measured speed.

    Attributes:
      sps: [n] float32, steps per second at 0..n-1 tokens (`sps.dense`).
    """

    sps: Any
    shares_budget = True

    def init_state(self, batch: int, block_size: int) -> Any:
        """Refuses a table that is too short; see `Policy.init_state`."""
        _check_length(self, batch, block_size)
        return ()


@struct.dataclass
class HardwareAware(_Measured):
    """Algorithm 1: admit by descending survival while theta rises."""

    name = "hardware_aware"

    def verify_length(self, state: Any, draft: Draft, active: jax.Array) -> jax.Array:
        """See `Policy.verify_length`."""
        del state
        offered = offered_survival(confidences(self, draft), draft.length, active)
        return admit(offered, first_fall(offered, active, self.sps))


@struct.dataclass
class GlobalMaximum(_Measured):
    """As many tokens as maximise theta today (the fewest of them, if several numbers do)."""

    name = "global_maximum"

    def verify_length(self, state: Any, draft: Draft, active: jax.Array) -> jax.Array:
        """See `Policy.verify_length`."""
        del state
        offered = offered_survival(confidences(self, draft), draft.length, active)
        return admit(offered, best_total(offered, active, self.sps))

    def biased(self, reads_draft: bool) -> str:
        """Lossless only if nothing that it weighs depends on a draft token; see `Policy.biased`."""
        if not reads_draft:
            return ""
        return "it weighs what draft tokens influence, so that a token can decide whether it is verified"


@struct.dataclass
class Delayed(_Measured):
    """The total of two cycles ago, admitted by today's order."""

    name = "delayed"

    def init_state(self, batch: int, block_size: int) -> DelayedState:
        """See `Policy.init_state`."""
        _check_length(self, batch, block_size)
        nothing = lambda: jnp.full((batch, block_size), NOT_OFFERED, jnp.float32)  # noqa: E731
        return DelayedState(cycles=jnp.zeros((), jnp.int32), last=nothing(), before_last=nothing())

    def verify_length(self, state: DelayedState, draft: Draft, active: jax.Array) -> jax.Array:
        """See `Policy.verify_length`."""
        offered = offered_survival(confidences(self, draft), draft.length, active)
        history = jnp.where(active[:, None], state.before_last, NOT_OFFERED)
        from_history = best_total(history, active, self.sps)
        return admit(offered, jnp.where(state.cycles < 2, first_fall(offered, active, self.sps), from_history))

    def update(self, state: DelayedState, feedback: Feedback) -> DelayedState:
        """See `Policy.update`."""
        offered = offered_survival(confidences(self, feedback.draft), feedback.draft.length, feedback.active)
        return DelayedState(cycles=state.cycles + 1, last=offered, before_last=state.last)


@struct.dataclass
class DelayedState:
    """Confidences of the last two cycles.

    Attributes:
      cycles: int32, cycles so far.
      last, before_last: [B, K] float32, what `offered_survival` gave then.
    """

    cycles: jax.Array
    last: jax.Array
    before_last: jax.Array


NOT_OFFERED = -1.0  # survival of what can't be verified: below every probability, so it comes last in every order


def offered_survival(confidence: jax.Array, length: jax.Array, active: jax.Array) -> jax.Array:
    """Returns a_{r,j}, and NOT_OFFERED for tokens that are not proposed or belong to rows that are done.

    Args:
      confidence: [B, K] float32.
      length: [B] int32, tokens proposed.
      active: [B] bool.

    Returns:
      [B, K] float32, not ascending along a row.
    """
    # Products computed in parallel may break the order by rounding; the running minimum restores it.
    survival = jax.lax.cummin(jnp.cumprod(confidence, axis=1), axis=1)
    proposed = jnp.arange(confidence.shape[1]) < length[:, None]
    return jnp.where(proposed & active[:, None], survival, NOT_OFFERED)


def first_fall(offered: jax.Array, active: jax.Array, speeds: jax.Array) -> jax.Array:
    """Returns how many tokens Algorithm 1 admits, int32: up to the first one that does not raise theta."""
    theta = _theta(offered, active, speeds)
    return jnp.sum(jnp.cumprod((theta[1:] > theta[:-1]).astype(jnp.int32)), dtype=jnp.int32)


def best_total(offered: jax.Array, active: jax.Array, speeds: jax.Array) -> jax.Array:
    """Returns the smallest number of tokens that maximises theta, int32."""
    return jnp.argmax(_theta(offered, active, speeds)).astype(jnp.int32)


def admit(offered: jax.Array, total: jax.Array) -> jax.Array:
    """Admits the `total` offered tokens that come first in the order. Returns each row's verify length, [B] int32."""
    by_place, order = _order(offered)
    admitted = (jnp.arange(by_place.size) < total) & (by_place[order] > NOT_OFFERED)
    chosen = jnp.zeros(by_place.shape, jnp.int32).at[order].set(admitted.astype(jnp.int32))
    return chosen.reshape(offered.shape[::-1]).sum(0)


def _order(offered: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the survivals token by token, [K * B], and the indices that sort them in descending order.

    First tokens of all rows come before second ones and so on; the sort is stable, so that ties (saturated sigmoids)
    keep the smaller j first and every row's admitted tokens are a prefix.
    """
    by_place = offered.T.reshape(-1)
    return by_place, jnp.argsort(-by_place, stable=True)


def _theta(offered: jax.Array, active: jax.Array, speeds: jax.Array) -> jax.Array:
    """Returns theta with the first 0, 1, ..., B * K tokens admitted, [B * K + 1]; -inf beyond those offered."""
    by_place, order = _order(offered)
    survival = by_place[order]
    there = survival > NOT_OFFERED
    rows = jnp.sum(active, dtype=jnp.int32)
    committed = rows + jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.where(there, survival, 0.0))])
    steps = jnp.asarray(speeds)[rows + jnp.arange(by_place.size + 1)]
    return jnp.where(jnp.concatenate([jnp.ones(1, bool), there]), committed * steps, -jnp.inf)


def _speeds(table: sps.SpsTable | None, name: str) -> Any:
    if table is None:
        raise ConfigError(
            f"policy {name} needs a measured SPS table (without one it would verify everything): write one with"
            " `python -m eval.step_curve --sps=FILE` and read it with dspark_jax.sps.load(FILE)"
        )
    return jnp.asarray(sps.dense(table))


def _check_length(policy: _Measured, batch: int, block_size: int) -> None:
    most, largest = batch * (block_size + 1), policy.sps.shape[0] - 1
    if largest < most:
        raise ConfigError(
            f"policy {policy.name}: the SPS table ends at {largest} tokens, {batch} rows with blocks of {block_size}"
            f" need up to {most}: measure wider steps (python -m eval.step_curve --sps=FILE --batch={batch})"
        )
