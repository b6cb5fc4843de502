"""Tile statistics on a GPU through Mosaic GPU: a block takes some tiles of one row, copies run ahead of the sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.verify.reference import is_dropped
from pallas_kernels.verify.tiles import Tiles, TileStats

STAGES = 4  # tiles that a block has in flight
SPAN = 8  # tiles of a block
LEAST = 256  # entries of a tile: two per thread
_LAST = jnp.iinfo(jnp.int32).max
_INSIDE = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


def refuses(vocab: int, itemsize: int) -> str:
    """Says why rows of a vocabulary can't be copied to shared memory, "" if they can."""
    if vocab * itemsize % 16:
        return f"rows of {vocab} logits are not a multiple of 16 bytes"
    return f"a vocabulary of {vocab} tokens is less than a tile" if vocab < LEAST else ""


def default_tiles(rows: int, vocab: int) -> Tiles:
    """Returns one row of 4096 entries (32 per thread), less where few rows would leave processors idle."""
    wanted = 4096
    while wanted > LEAST and (wanted > vocab or (wanted > 1024 and rows * -(-vocab // wanted) < 256)):
        wanted //= 2
    return Tiles(rows=1, vocab=wanted)


def smem_bytes(itemsize: int, tiles: Tiles) -> int:
    """Returns the shared memory of a block: tiles in flight, their barriers, the scratch of its reductions."""
    return STAGES * tiles.vocab * itemsize + STAGES * 8 + plgpu.CompilerParams().reduction_scratch_bytes


def stats(
    logits: jax.Array,
    temperature: jax.Array,
    value: jax.Array,
    index: jax.Array,
    tiles: Tiles,
    interpret: Any = False,
    span: int | None = None,
) -> TileStats:
    """As `tpu.stats`; V is not less than a tile, and a row is a multiple of 16 bytes.

    A block takes `span` tiles of a row (None: up to SPAN, fewer where few rows would leave processors idle).
    """
    rows, vocab = logits.shape
    count = tiles.count(vocab)
    span = span or min(SPAN, max(rows * count // 1024, 1))
    blocks = -(-count // span)
    stages = min(STAGES, span)

    def kernel(logits_ref, temperature_ref, value_ref, index_ref, maximum_ref, total_ref, best_ref, tile_ref, arrived):
        row, first = jax.lax.axis_index("row"), jax.lax.axis_index("block") * span
        mine = jnp.minimum(count - first, span)
        temperature, value, index = temperature_ref[row], value_ref[row], index_ref[row]

        def start_of(tile):  # the last tile begins early rather than to end behind the row
            return jnp.minimum(tile * tiles.vocab, vocab - tiles.vocab)

        def fetch(i):
            source = logits_ref.at[row, pl.ds(start_of(first + i), tiles.vocab)]
            slot = jax.lax.rem(i, stages)
            plgpu.copy_gmem_to_smem(source, tile_ref.at[slot], arrived.at[slot], oob_mode=_INSIDE)

        for i in range(stages):
            jax.lax.cond(i < mine, lambda i=i: fetch(jnp.int32(i)), lambda: None)

        @pl.loop(0, mine)
        def _(i):
            tile, slot = first + i, jax.lax.rem(i, stages)
            plgpu.barrier_wait(arrived.at[slot])
            logits = tile_ref[slot].astype(jnp.float32)
            ids = start_of(tile) + jax.lax.broadcasted_iota(jnp.int32, (tiles.vocab,), 0)
            dropped = is_dropped(logits, ids, value, index) | (ids < tile * tiles.vocab)
            x = jnp.where(dropped, -jnp.inf, logits / temperature)
            maximum = jnp.max(x)
            shift = jnp.where(maximum == -jnp.inf, 0.0, maximum)
            maximum_ref[row, tile] = maximum
            total_ref[row, tile] = jnp.sum(jnp.exp(x - shift))
            best_ref[row, tile] = jnp.min(jnp.where(x == maximum, ids, _LAST))
            plgpu.commit_smem()  # the next copy comes after what was read here
            jax.lax.cond(i + stages < mine, lambda: fetch(i + stages), lambda: None)

    results = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((rows, count), dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32)],
        scratch_types=[
            plgpu.SMEM((stages, tiles.vocab), logits.dtype),
            plgpu.Barrier(num_barriers=stages),
        ],
        grid=(blocks, rows),  # the last axis is the one that CUDA lets have more than 65,535 blocks
        grid_names=("block", "row"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name="verify_stats",
    )(logits, temperature, value, index)
    return TileStats(*results)
