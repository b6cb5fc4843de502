"""The exact distribution of the text that a policy's cycles write, by enumeration; one row, a toy language.

Every cycle: all drafts, all outcomes of rejection sampling under the verify length that the policy decides on, all
added tokens; the policy's real state is carried along. No sampling, so that a bias shows as a number.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.records import BlockKV, Draft, TargetOutput
from dspark_jax.scheduler import Feedback, Policy


@dataclasses.dataclass(frozen=True)
class Toy:
    """A language and its drafter.

    Attributes:
      p: distribution of every token of the text.
      q: distribution of every draft token.
      confidence: (draft tokens before it, ...) -> its c.
      block_size: K.
    """

    p: tuple[float, ...]
    q: tuple[float, ...]
    confidence: Callable[[tuple[int, ...]], float]
    block_size: int = 2


def draft_of(token_ids, confidence, length=None) -> Draft:
    """A draft [B, K] with given confidences (probabilities; 0 and 1 are saturated sigmoids)."""
    token_ids, confidence = np.asarray(token_ids, np.int32), np.asarray(confidence, np.float64)
    with np.errstate(divide="ignore"):
        logits = np.clip(np.log(confidence) - np.log1p(-confidence), -200, 200)
    full = np.full(token_ids.shape[:1], token_ids.shape[1], np.int32)
    length = full if length is None else np.asarray(length, np.int32)
    return Draft(jnp.asarray(token_ids), None, jnp.asarray(logits, jnp.float32), jnp.asarray(length))


def output_of(entropy, spread) -> TargetOutput:
    """A target's output that holds only what policies look at, [B, T] each."""
    nothing = jnp.zeros((len(entropy), 0))
    measures = (jnp.asarray(entropy, jnp.float32), jnp.asarray(spread, jnp.float32))
    return TargetOutput(None, nothing, nothing, BlockKV((), ()), *measures)


@jax.jit
def _decide(policy: Policy, state, drafts: Draft):
    """Verify length of each draft [M, 1, K] in one state."""
    return jax.vmap(lambda draft: policy.verify_length(state, draft, jnp.ones(1, bool)))(drafts)[:, 0]


@jax.jit
def _learn(policy: Policy, state, feedbacks: Feedback):
    return jax.vmap(lambda feedback: policy.update(state, feedback))(feedbacks)


def text_distribution(policy: Policy, toy: Toy, depth: int) -> np.ndarray:
    """Returns the probability of every text of `depth` tokens, [V] * depth."""
    vocab, size = len(toy.p), toy.block_size
    p, q = np.asarray(toy.p), np.asarray(toy.q)
    residual = np.maximum(p - q, 0)
    residual = residual / residual.sum() if residual.sum() > 0 else p
    blocks = list(itertools.product(range(vocab), repeat=size))
    confidence = [[toy.confidence(block[:j]) for j in range(size)] for block in blocks]
    drafts = draft_of(np.asarray(blocks)[:, None].reshape(-1, size), np.asarray(confidence))
    drafts = jax.tree.map(lambda a: a[:, None], drafts)  # [M, 1, K]
    outcomes = [(m, n) for m in range(len(blocks)) for n in range(size + 1)]
    chosen = np.asarray([m for m, _ in outcomes])
    entropy = np.asarray([[0.1, *(0.2 + 0.6 * x for x in block)] for block in blocks])  # of what was read: prefixes
    result = np.zeros((vocab,) * depth)
    leaves, tree = jax.tree.flatten(policy.init_state(1, size))
    nodes = {((), tuple(np.asarray(leaf).tobytes() for leaf in leaves)): (1.0, [np.asarray(x) for x in leaves])}
    while nodes:
        following: dict = {}
        for (text, _), (probability, leaves) in nodes.items():
            if len(text) >= depth:
                result[text[:depth]] += probability
                continue
            state = jax.tree.unflatten(tree, leaves)
            lengths = np.asarray(_decide(policy, state, drafts))
            output = output_of(entropy[chosen][:, None], 1 - entropy[chosen][:, None])
            output = jax.tree.map(lambda a: a if a.ndim > 2 else jnp.zeros((len(outcomes), 1, 0)), output)
            feedback = Feedback(
                draft=jax.tree.map(lambda a: a[chosen], drafts),
                verify_len=jnp.asarray(lengths[chosen], jnp.int32)[:, None],
                accepted=jnp.asarray([n for _, n in outcomes], jnp.int32)[:, None],
                active=jnp.ones((len(outcomes), 1), bool),
                output=output,
            )
            after = [np.asarray(leaf) for leaf in jax.tree.leaves(_learn(policy, state, feedback))]
            for i, (m, n) in enumerate(outcomes):
                block, l = blocks[m], int(lengths[m])
                if n > l:
                    continue
                keep = [min(1.0, p[x] / q[x]) for x in block]
                chance = probability * np.prod([q[x] for x in block]) * np.prod(keep[:n])
                chance *= 1 - keep[n] if n < l else 1.0
                leaves_after = [leaf[i] for leaf in after]
                key = tuple(leaf.tobytes() for leaf in leaves_after)
                for token, share in enumerate(residual if n < l else p):
                    if chance * share > 0:
                        place = ((*text, *block[:n], token)[:depth], key)
                        before = following.get(place, (0.0, None))[0]
                        following[place] = (before + chance * share, leaves_after)
        nodes = following
    return result


def independent(p, depth: int) -> np.ndarray:
    """The target's own distribution of `depth` tokens, [V] * depth."""
    result = np.ones(())
    for _ in range(depth):
        result = result[..., None] * np.asarray(p)
    return result
