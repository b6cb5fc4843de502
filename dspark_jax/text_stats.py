"""Statistics of answers that training and evaluation share."""

from __future__ import annotations

from collections.abc import Sequence


def is_loop(answer: Sequence[int], ngram: int = 4, share: float = 0.5) -> bool:
    """Says whether an answer repeats itself: fewer than `share` of its n-grams are distinct.

    Repetition is easy to draft, so an accepted length measured on such answers is inflated.

    Args:
      answer: token ids of the answer.
      ngram: length of the n-grams.
      share: threshold on distinct / all.
    """
    grams = [tuple(answer[i : i + ngram]) for i in range(len(answer) - ngram + 1)]
    return len(grams) >= 8 and len(set(grams)) < share * len(grams)
