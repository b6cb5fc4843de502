"""Rotary position embeddings (Su et al., 2021), and the ways in which families stretch them to longer contexts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import RopeScaling


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, share: float = 1.0
) -> np.ndarray:
    """Returns by how many radians a position turns each pair of a head.

    Linear scaling divides the positions (Chen et al., 2023). Llama 3.1 leaves short waves as they are, divides the
    frequencies of long ones by the factor, and blends in between. YaRN does so by the number of turns within the
    original context (Peng et al., 2023, section 3.2).

    Args:
      head_dim: H.
      theta: base of the frequencies.
      scaling: how they are stretched; None = not at all.
      share: share of the pairs that turn at all, the fastest ones; the others stand still (proportional RoPE, Gemma 4).

    Returns:
      [H/2] float32.
    """
    half = head_dim // 2
    frequency = np.float32(theta) ** (-np.arange(half, dtype=np.float32) / np.float32(half))
    frequency[int(share * head_dim) // 2 :] = 0.0
    if scaling is None or scaling.kind == "none":
        return frequency
    stretched = frequency / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return stretched
    if scaling.kind == "llama3":
        turns = scaling.original_positions * frequency / (2 * math.pi)  # original context over wavelength
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        fast, slow = (_pair_with_turns(n, head_dim, theta, scaling) for n in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        fast, slow = max(fast, 0), min(slow, head_dim - 1)
        kept = 1 - (np.arange(half) - fast) / (slow - fast if slow != fast else 0.001)
    kept = np.clip(kept, 0, 1).astype(np.float32)
    return kept * frequency + (1 - kept) * stretched


def _pair_with_turns(turns: float, head_dim: int, theta: float, scaling: RopeScaling) -> float:
    """Returns the (fractional) pair that turns so many times within the original context."""
    return head_dim * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


def rotate(x: jax.Array, positions: jax.Array, inverse_frequency: np.ndarray, factor: float = 1.0) -> jax.Array:
    """Rotates queries or keys by their positions (rotate-half form).

    Frequencies and angles are float32 whatever the dtype of x: in bfloat16 positions beyond 256 collide.

    Args:
      x: [B, T, heads, H].
      positions: [B, T] int32.
      inverse_frequency: [H/2] float32, radians per position.
      factor: multiplies cosines and sines (YaRN's attention factor).
    """
    angle = positions.astype(jnp.float32)[:, :, None, None] * inverse_frequency  # [B, T, 1, H/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
