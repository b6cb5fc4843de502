"""Tile statistics on a GPU through Triton: one program per row and tile, in any order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.verify.reference import is_dropped
from pallas_kernels.verify.tiles import Tiles, TileStats, tile_stats


def default_tiles(rows: int, vocab: int) -> Tiles:
    """Returns one row of 4096 entries (16 to 32 per thread), less where few rows would leave processors idle."""
    wanted = 4096
    while wanted > 1024 and rows * -(-vocab // wanted) < 256:
        wanted //= 2
    return Tiles(rows=1, vocab=min(wanted, pl.next_power_of_2(vocab)))


def stats(
    logits: jax.Array, temperature: jax.Array, value: jax.Array, index: jax.Array, tiles: Tiles, interpret: Any = False
) -> TileStats:
    """As `tpu.stats`."""
    rows, vocab = logits.shape

    def kernel(logits_ref, temperature_ref, value_ref, index_ref, *results):
        ids = pl.program_id(1) * tiles.vocab + jax.lax.broadcasted_iota(jnp.int32, (1, tiles.vocab), 1)
        inside = ids < vocab
        # Nothing is read beyond the row.
        logits = pltriton.load(logits_ref, mask=inside, other=0.0).astype(jnp.float32)
        dropped = is_dropped(logits, ids, value_ref[...], index_ref[...]) | ~inside
        for ref, found in zip(results, tile_stats(jnp.where(dropped, -jnp.inf, logits / temperature_ref[...]), ids)):
            ref[...] = found

    per_row = pl.BlockSpec((1, 1), lambda i, t: (i, 0))
    per_tile = pl.BlockSpec((1, 1), lambda i, t: (i, t))
    count = tiles.count(vocab)
    return TileStats(
        *pl.pallas_call(
            kernel,
            grid=(rows, count),
            in_specs=[pl.BlockSpec((1, tiles.vocab), lambda i, t: (i, t)), per_row, per_row, per_row],
            out_specs=[per_tile] * 3,
            out_shape=[jax.ShapeDtypeStruct((rows, count), dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32)],
            compiler_params=pltriton.CompilerParams(num_warps=8 if tiles.vocab >= 4096 else 4),
            interpret=interpret,
            name="verify_stats",
        )(logits, temperature[:, None], value[:, None], index[:, None])
    )
