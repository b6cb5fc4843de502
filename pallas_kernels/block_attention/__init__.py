"""Attention of a drafter's block: K queries per row over a cache of its own length and over the whole block."""
