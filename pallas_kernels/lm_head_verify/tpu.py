"""Tile statistics of logits that never leave a TPU's fast memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.lm_head_verify.reference import cap
from pallas_kernels.precision import product_precision
from pallas_kernels.verify.tiles import LANES, Tiles, TileStats, tile_stats

_ROWS = 16  # a register of bfloat16 holds 16 rows
_MOST_ROWS = 256  # the head is read once per that many rows
_BUDGET = 14 << 20  # of the 16 MiB that the compiler may use by default


def default_tiles(rows: int, vocab: int, width: int, itemsize: int) -> Tiles | None:
    """Returns the tiles that read the head least often and fit a core's memory, the widest of them; None if none do.

    Args:
      rows: n.
      vocab: V.
      width: D.
      itemsize: bytes of an entry of the head.
    """
    at_once = min(-(-rows // _ROWS) * _ROWS, _MOST_ROWS)
    while at_once >= _ROWS:
        for size in (1024, 512, 256, 128):
            tiles = Tiles(rows=at_once, vocab=size)
            if vmem_bytes(vocab, width, itemsize, tiles) <= _BUDGET:
                return tiles
        at_once = at_once // 2 // _ROWS * _ROWS
    return None


def vmem_bytes(vocab: int, width: int, itemsize: int, tiles: Tiles) -> int:
    """Returns the memory of one grid step: blocks twice (they are double-buffered), and three float32 tiles of work."""
    lanes = -(-width // LANES) * LANES
    blocks = (tiles.rows + tiles.vocab) * lanes * itemsize
    results = tiles.rows * (3 * _columns(vocab, tiles) + LANES) * 4
    return 2 * (blocks + results) + 3 * tiles.rows * tiles.vocab * 4


def stats(
    hidden: jax.Array, head: jax.Array, temperature: jax.Array, softcap: float, tiles: Tiles, interpret: Any = False
) -> TileStats:
    """Multiplies, caps, divides by the temperature and reduces, tile by tile.

    Args:
      hidden: [n, D].
      head: [V, D], of the same dtype.
      temperature: [n] float32 > 0.
      softcap: 0 = none.
      tiles: rows and vocabulary of one grid step.
      interpret: see `pallas_call`.
    """
    (rows, width), vocab = hidden.shape, head.shape[0]
    columns = _columns(vocab, tiles)

    def kernel(hidden_ref, head_ref, temperature_ref, *results):
        tile = pl.program_id(1)
        logits = jax.lax.dot_general(
            hidden_ref[...],
            head_ref[...],
            (((1,), (1,)), ((), ())),
            precision=product_precision(head.dtype),
            preferred_element_type=jnp.float32,
        )
        x = cap(logits, softcap) / temperature_ref[...]
        ids = tile * tiles.vocab + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        here = jax.lax.broadcasted_iota(jnp.int32, (tiles.rows, columns), 1) == tile
        for ref, found in zip(results, tile_stats(jnp.where(ids < vocab, x, -jnp.inf), ids)):
            ref[...] = jnp.where(here, found, ref[...])

    per_tile = pl.BlockSpec((tiles.rows, columns), lambda i, t: (i, 0))
    results = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, tiles.rows), tiles.count(vocab)),
        in_specs=[
            pl.BlockSpec((tiles.rows, width), lambda i, t: (i, 0)),
            pl.BlockSpec((tiles.vocab, width), lambda i, t: (t, 0)),
            pl.BlockSpec((tiles.rows, 1), lambda i, t: (i, 0)),
        ],
        out_specs=[per_tile] * 3,
        out_shape=[jax.ShapeDtypeStruct((rows, columns), dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="lm_head_verify_stats",
    )(hidden, head, temperature[:, None])
    return TileStats(*(a[:, : tiles.count(vocab)] for a in results))


def _columns(vocab: int, tiles: Tiles) -> int:
    """Lanes that hold one number per tile."""
    return -(-tiles.count(vocab) // LANES) * LANES
