"""Tile statistics of logits that never leave a GPU's registers: one program per block of rows and tile."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.lm_head_verify.reference import cap
from pallas_kernels.precision import product_precision
from pallas_kernels.verify.tiles import Tiles, TileStats, tile_stats

_DEPTH = 64  # columns of the head that one product takes


def default_tiles(rows: int, vocab: int, width: int, itemsize: int) -> Tiles:
    """Returns 16 to 64 rows (a product of Triton's takes 16 at least) of 128 entries."""
    del vocab, width, itemsize
    return Tiles(rows=min(max(pl.next_power_of_2(rows), 16), 64), vocab=128)


def stats(
    hidden: jax.Array, head: jax.Array, temperature: jax.Array, softcap: float, tiles: Tiles, interpret: Any = False
) -> TileStats:
    """As `tpu.stats`."""
    (rows, width), vocab = hidden.shape, head.shape[0]
    padded, count = -(-rows // tiles.rows) * tiles.rows, tiles.count(vocab)
    hidden = jnp.pad(hidden, ((0, padded - rows), (0, 0)))
    temperature = jnp.pad(temperature, (0, padded - rows), constant_values=1.0)

    def kernel(hidden_ref, head_ref, temperature_ref, *results):
        start = pl.program_id(1) * tiles.vocab
        inside = start + jax.lax.broadcasted_iota(jnp.int32, (tiles.vocab, _DEPTH), 0) < vocab

        def add(step, logits):
            first = step * _DEPTH  # neither rows beyond the vocabulary nor columns beyond the width are read
            depth = lambda size: first + jax.lax.broadcasted_iota(jnp.int32, (size, _DEPTH), 1) < width  # noqa: E731
            columns = pl.ds(first, _DEPTH)
            x = pltriton.load(hidden_ref.at[:, columns], mask=depth(tiles.rows), other=0)
            w = pltriton.load(
                head_ref.at[pl.ds(start, tiles.vocab), columns], mask=inside & depth(tiles.vocab), other=0
            )
            return logits + jax.lax.dot_general(
                x,
                w,
                (((1,), (1,)), ((), ())),
                precision=product_precision(head.dtype),
                preferred_element_type=jnp.float32,
            )

        logits = jnp.zeros((tiles.rows, tiles.vocab), jnp.float32)
        logits = jax.lax.fori_loop(0, -(-width // _DEPTH), add, logits)
        x = cap(logits, softcap) / temperature_ref[...]
        ids = start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        for ref, found in zip(results, tile_stats(jnp.where(ids < vocab, x, -jnp.inf), ids)):
            ref[...] = found

    per_tile = pl.BlockSpec((tiles.rows, 1), lambda i, t: (i, t))
    results = pl.pallas_call(
        kernel,
        grid=(padded // tiles.rows, count),
        in_specs=[
            pl.BlockSpec((tiles.rows, width), lambda i, t: (i, 0)),
            pl.BlockSpec((vocab, width), lambda i, t: (0, 0)),
            pl.BlockSpec((tiles.rows, 1), lambda i, t: (i, 0)),
        ],
        out_specs=[per_tile] * 3,
        out_shape=[jax.ShapeDtypeStruct((padded, count), dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32)],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="lm_head_verify_stats",
    )(hidden, head, temperature[:, None])
    return TileStats(*(a[:rows] for a in results))
