"""Choose a reduced draft vocabulary: the tokens that the target really writes.

The drafter's head is most of its cost, and a target's text uses a small part of its vocabulary. Tokens are ordered by
how often the target wrote them plus how much probability it gave them (the sum of its next-token distributions over
the same positions): counts alone are noisy in the tail.
"""

from __future__ import annotations

import numpy as np

from dspark_jax.config import ConfigError


def token_counts(tokens: list[np.ndarray], prompt_lengths: list[int], vocab_size: int) -> np.ndarray:
    """Counts the answers' tokens, [V] float64."""
    counts = np.zeros((vocab_size,), np.float64)
    for row, prompt in zip(tokens, prompt_lengths):
        counts += np.bincount(row[prompt:], minlength=vocab_size)
    return counts


def choose(counts: np.ndarray, mass: np.ndarray, size: int, always: tuple[int, ...]) -> np.ndarray:
    """Returns the ids of a draft vocabulary, ascending int32.

    Args:
      counts: [V] how often the target wrote each token.
      mass: [V] summed probabilities that it gave each token.
      size: V', at most V.
      always: tokens that are included whatever their counts (stop tokens).

    Raises:
      ConfigError: the size can't work.
    """
    if not len(always) < size <= len(counts):
        raise ConfigError(f"config.drafter.draft_vocab_size = {size}: use {len(always) + 1}..{len(counts)}")
    score = counts + mass
    score[list(always)] = np.inf
    return np.sort(np.argsort(-score, kind="stable")[:size]).astype(np.int32)


def coverage(counts: np.ndarray, vocab: np.ndarray) -> float:
    """Returns the share of the written tokens that the vocabulary covers."""
    return float(counts[vocab].sum() / max(counts.sum(), 1.0))
