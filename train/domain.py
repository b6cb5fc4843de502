"""Make the prompts of a narrow domain: a few templates, many fillers, some fillers held out.

A drafter trained on the target's answers about the training fillers is measured on fillers that it never saw, so a
gain there comes from the form of the answers and not from remembered texts.
"""

import dataclasses
import hashlib

from train import domain_fillers

SPLITS = ("train", "heldout")
_HELD_OUT_ONE_IN = 5


def _hash(text: str) -> int:
    """Hash a text to the same number in every process and Python version."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _split_words(words: str) -> tuple[str, ...]:
    """Split a wrapped, comma-separated list."""
    return tuple(word for word in (" ".join(part.split()) for part in words.split(",")) if word)


@dataclasses.dataclass(frozen=True)
class Domain:
    """Describe a narrow domain of prompts.

    Attributes:
        name: Key of the domain; it also salts the split of the fillers.
        templates: Questions of one style, each with one `{filler}` field.
        fillers: Words for that field; none of them contains another one.
    """

    name: str
    templates: tuple[str, ...]
    fillers: tuple[str, ...]

    def split_fillers(self, split: str) -> tuple[str, ...]:
        """Return the fillers of one split.

        A filler's side depends on its own hash alone: neither a seed nor a change elsewhere in the list moves it.

        Args:
            split: "train" (about four fifths of the fillers) or "heldout" (the rest).

        Returns:
            The fillers, in the order of the list.

        Raises:
            ValueError: If there is no such split.
        """
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
        held_out = split == "heldout"
        return tuple(f for f in self.fillers if (_hash(f"{self.name}/{f}") % _HELD_OUT_ONE_IN == 0) == held_out)

    def split_prompts(self, split: str) -> list[str]:
        """Return every prompt of one split: each template with each of its fillers."""
        return [template.format(filler=filler) for filler in self.split_fillers(split) for template in self.templates]


DOMAINS = {
    domain.name: domain
    for domain in (
        Domain(
            name="countries",
            templates=(
                "What is the capital of {filler}?",
                "Where is {filler} located?",
                "Which languages are spoken in {filler}?",
                "What is the climate of {filler} like?",
                "What is {filler} known for?",
                "Describe the geography of {filler} in three sentences.",
                "Tell me about {filler} in three sentences.",
                "List five places to visit in {filler}.",
            ),
            fillers=_split_words(domain_fillers.PLACES),
        ),
        Domain(
            name="recipes",
            templates=(
                "Give me a simple recipe for {filler}. List the ingredients, then the steps.",
                "How do I make {filler} at home? List the ingredients, then the steps.",
                "Write a short recipe for {filler}. List the ingredients, then the steps.",
                "I would like to make {filler} for four people. List the ingredients, then the steps.",
            ),
            fillers=_split_words(domain_fillers.DISHES),
        ),
        Domain(
            name="animals",
            templates=(
                "Describe the {filler}: where it lives, what it eats and how it behaves.",
                "Give me a short profile of the {filler}: habitat, diet and behavior.",
                "Tell me about the {filler}: what it looks like, where it lives and what it eats.",
                "Write a fact sheet about the {filler}. List its habitat, diet, size and lifespan.",
            ),
            fillers=_split_words(domain_fillers.ANIMALS),
        ),
    )
}


def domain_prompts(name: str, split: str, seed: int, count: int) -> list[str]:
    """Draw distinct prompts from one split of a domain.

    Args:
        name: A key of `DOMAINS`.
        split: "train" or "heldout"; the two share no filler, whatever the seed.
        seed: Chooses the order; a smaller count gives the beginning of the same list.
        count: How many prompts to return.

    Returns:
        The prompts, the same ones for the same arguments.

    Raises:
        ValueError: If the domain or the split is unknown, or if there are fewer than `count` prompts.
    """
    if name not in DOMAINS:
        raise ValueError(f"unknown domain {name!r}; choose one of {', '.join(DOMAINS)}")
    prompts = DOMAINS[name].split_prompts(split)
    if not 0 <= count <= len(prompts):
        raise ValueError(f"domain {name!r} has {len(prompts)} {split} prompts; cannot draw {count}")
    return sorted(prompts, key=lambda prompt: _hash(f"{seed}/{prompt}"))[:count]
