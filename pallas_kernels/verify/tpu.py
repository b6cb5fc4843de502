"""Tile statistics on a TPU: one sequential sweep over the vocabulary per block of rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.verify.reference import is_dropped
from pallas_kernels.verify.tiles import LANES, Tiles, TileStats, tile_stats


def default_tiles(rows: int, vocab: int) -> Tiles:
    """Returns tiles that keep a step's traffic well above its fixed cost: 16 rows (a bfloat16 tile) of 8192 entries."""
    del rows
    return Tiles(rows=16, vocab=min(8192, -(-vocab // LANES) * LANES))


def vmem_bytes(vocab: int, itemsize: int, tiles: Tiles) -> int:
    """Returns the memory of one grid step: blocks twice (they are double-buffered), and three float32 tiles of work."""
    settings = 3 * tiles.rows * LANES * 4  # [rows, 1] takes a whole tile of lanes
    results = 3 * tiles.rows * _columns(vocab, tiles) * 4
    block = tiles.rows * tiles.vocab * itemsize
    return 2 * (block + settings + results) + 3 * tiles.rows * tiles.vocab * 4


def stats(
    logits: jax.Array, temperature: jax.Array, value: jax.Array, index: jax.Array, tiles: Tiles, interpret: Any = False
) -> TileStats:
    """Reads each logit once and returns the statistics of every tile.

    Args:
      logits: [n, V] float32 or bfloat16.
      temperature: [n] float32 > 0.
      value: [n] float32, cut (`reference.Cut`).
      index: [n] int32, cut.
      tiles: how the rows are cut.
      interpret: see `pallas_call`.
    """
    rows, vocab = logits.shape
    columns = _columns(vocab, tiles)

    def kernel(logits_ref, temperature_ref, value_ref, index_ref, *results):
        tile = pl.program_id(1)
        logits = logits_ref[...].astype(jnp.float32)
        ids = tile * tiles.vocab + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        dropped = is_dropped(logits, ids, value_ref[...], index_ref[...]) | (ids >= vocab)
        here = jax.lax.broadcasted_iota(jnp.int32, (tiles.rows, columns), 1) == tile
        for ref, found in zip(results, tile_stats(jnp.where(dropped, -jnp.inf, logits / temperature_ref[...]), ids)):
            ref[...] = jnp.where(here, found, ref[...])

    per_row = pl.BlockSpec((tiles.rows, 1), lambda i, t: (i, 0))
    per_tile = pl.BlockSpec((tiles.rows, columns), lambda i, t: (i, 0))
    results = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, tiles.rows), tiles.count(vocab)),
        in_specs=[pl.BlockSpec((tiles.rows, tiles.vocab), lambda i, t: (i, t)), per_row, per_row, per_row],
        out_specs=[per_tile] * 3,
        out_shape=[jax.ShapeDtypeStruct((rows, columns), dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="verify_stats",
    )(logits, temperature[:, None], value[:, None], index[:, None])
    return TileStats(*(a[:, : tiles.count(vocab)] for a in results))


def _columns(vocab: int, tiles: Tiles) -> int:
    """Lanes that hold one number per tile."""
    return -(-tiles.count(vocab) // LANES) * LANES
