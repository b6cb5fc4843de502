"""Traffic on paper: what a cycle moves through memory in tensors as wide as the vocabulary, plain and fused.

  python -m pallas_kernels.traffic

Plain counts one write per array that XLA keeps and one read per reduction or product that it is needed for. With B
rows, K draft tokens, T = K + 1, V tokens, width D, rank R, m candidates; logits are float32, weights bfloat16:

  verify, plain    4 B T V (1 + 1 + 2 + 1 + 1): written, checked, read for maximum and sum, log p written, argmax
                   + 4 B K V (1 + 1 + 2): the same of a full q, whose log is never written; a list has 8 B K m instead
                   + 4 B V (1 or 2): one position of p (and of a full q) for the residual
  verify, fused    4 B T V (1 + 1) + 4 B K V (1 + 1) + 4 B V (1 or 2): written and read once, one position again
  head and verify  2 V D more, to which `lm_head_verify` adds no logits of the target at all: 2 V D + 8 B K m
                   + 2 B t D, the rows of one tile of t tokens per row
  markov, plain    2 K V R + 4 B K V (1 + 1 + 1 + 2): W2 once per step; base logits written, read, corrected ones
                   written, read for maximum and sum
  markov, m of V   4 B K V (1 + 1) + 3 * 2 B K m R: base logits written and searched once; rows of W2 read, laid out
                   and read again
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes that decide about traffic: V and D."""

    name: str
    vocab: int
    width: int


MODELS = (Model("Qwen3-4B", 151_936, 2560), Model("Gemma4-12B", 262_144, 3840))
BATCHES = (1, 32, 128)
BLOCK, RANK, CANDIDATES, TILE = 7, 256, 1024, 512


def plain_verify(batch: int, vocab: int, block: int = BLOCK, listed: int = 0) -> int:
    """Returns the bytes of verification by XLA, logits included; `listed` candidates, or 0 for a full q."""
    of_q = 8 * batch * block * listed if listed else 4 * batch * block * vocab * 4
    return 6 * 4 * batch * (block + 1) * vocab + of_q + 4 * batch * vocab * (1 if listed else 2)


def fused_verify(batch: int, vocab: int, block: int = BLOCK, listed: int = 0) -> int:
    """Returns the bytes of the op `verify`; arguments as `plain_verify`."""
    of_q = 8 * batch * block * listed if listed else 2 * 4 * batch * block * vocab
    return 2 * 4 * batch * (block + 1) * vocab + of_q + (0 if listed else 2 * 4 * batch * vocab)


def head(vocab: int, width: int) -> int:
    """Returns the bytes of the LM head, read once."""
    return 2 * vocab * width


def lm_head_verify(batch: int, vocab: int, width: int, block: int = BLOCK, listed: int = CANDIDATES) -> int:
    """Returns the bytes of the op `lm_head_verify` with a list of candidates."""
    return head(vocab, width) + 8 * batch * block * listed + 2 * batch * TILE * width


def plain_markov(batch: int, vocab: int, block: int = BLOCK, rank: int = RANK) -> int:
    """Returns the bytes of the sequential head over the whole vocabulary."""
    return 2 * block * vocab * rank + 5 * 4 * batch * block * vocab


def listed_markov(batch: int, vocab: int, block: int = BLOCK, rank: int = RANK, listed: int = CANDIDATES) -> int:
    """Returns the bytes of the op `markov_sample` with a list of candidates."""
    return 2 * 4 * batch * block * vocab + 3 * 2 * batch * block * listed * rank


def main() -> None:
    """Prints the table, in GB."""
    print(f"GB per cycle, K = {BLOCK}, R = {RANK}, m = {CANDIDATES}")
    print("| model | rows | verify, full q | verify, list | head + verify, list | sequential head |")
    print("|---|---|---|---|---|---|")
    for model in MODELS:
        for batch in BATCHES:
            both = (
                (plain_verify(batch, model.vocab), fused_verify(batch, model.vocab)),
                (
                    plain_verify(batch, model.vocab, listed=CANDIDATES),
                    fused_verify(batch, model.vocab, listed=CANDIDATES),
                ),
                (
                    head(model.vocab, model.width) + plain_verify(batch, model.vocab, listed=CANDIDATES),
                    lm_head_verify(batch, model.vocab, model.width),
                ),
                (plain_markov(batch, model.vocab), listed_markov(batch, model.vocab)),
            )
            cells = [f"{a / 1e9:.3f} → {b / 1e9:.3f}, {a / b:.1f}x" for a, b in both]
            print(f"| {model.name} | {batch} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
