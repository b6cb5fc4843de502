"""Tile statistics of logits that never leave a GPU's registers, by Mosaic GPU: matrix products of a warpgroup."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import backend
from pallas_kernels.lm_head_verify.reference import cap
from pallas_kernels.verify.tiles import Tiles, TileStats

STAGES = 4  # slices of the head that a block has in flight
ROWS = 64  # a warpgroup's product has 64 rows
LINES = 8  # rows of a swizzled tile in shared memory: copies begin at a multiple of it
DEPTH = 64  # columns of the head that one product takes: 128 bytes of bfloat16, a swizzled line
_INSIDE = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
_LAST = jnp.iinfo(jnp.int32).max


def refuses(vocab: int, width: int, dtype: Any) -> str:
    """Says why a head [V, D] can't be multiplied, "" if it can."""
    if dtype != jnp.bfloat16:
        return f"head is {dtype}: products of a warpgroup would round float32"
    if width % DEPTH:
        return f"a width of {width} is not a multiple of {DEPTH}"
    if vocab < 128:
        return f"a vocabulary of {vocab} tokens is less than a tile"
    if vocab % LINES:
        return f"a vocabulary of {vocab} tokens is not a multiple of {LINES}"
    return backend.no_wgmma()


def default_tiles(rows: int, vocab: int, width: int, itemsize: int) -> Tiles:
    """Returns 64 rows of 128 entries: 64 numbers per thread."""
    del rows, vocab, width, itemsize
    return Tiles(rows=ROWS, vocab=128)


def smem_bytes(tiles: Tiles) -> int:
    """Returns the shared memory of a block: slices in flight, numbers per row, barriers, scratch of reductions.

    Each array of numbers is aligned to 1024 bytes.
    """
    slices, numbers = STAGES * (tiles.rows + tiles.vocab) * DEPTH * 2, 4 * 1024
    return slices + numbers + (STAGES + 1) * 8 + plgpu.CompilerParams().reduction_scratch_bytes


def stats(
    hidden: jax.Array, head: jax.Array, temperature: jax.Array, softcap: float, tiles: Tiles, interpret: Any = False
) -> TileStats:
    """As `tpu.stats`; bfloat16, D is a multiple of 64, V a multiple of 8 and not less than a tile."""
    (rows, width), vocab = hidden.shape, head.shape[0]
    padded, count, steps = -(-rows // tiles.rows) * tiles.rows, tiles.count(vocab), width // DEPTH
    # The head's rows are the product's, so that neither operand is turned around in shared memory.
    hidden = jnp.pad(hidden, ((0, padded - rows), (0, 0))).T
    temperature = jnp.pad(temperature, (0, padded - rows), constant_values=1.0)
    stages = min(STAGES, steps)

    def kernel(hidden_ref, head_ref, temperature_ref, *refs):
        *results, x_ref, w_ref, by_ref, maximum_ref, total_ref, best_ref, arrived, by_arrived = refs
        # Blocks of the same tile follow each other, so that the head's rows come from the cache but once.
        tile, here = jax.lax.axis_index("tile"), pl.ds(jax.lax.axis_index("rows") * tiles.rows, tiles.rows)
        start = jnp.minimum(tile * tiles.vocab, vocab - tiles.vocab)  # the last tile begins early

        def fetch(step):
            slot, columns = jax.lax.rem(step, stages), pl.ds(step * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(hidden_ref.at[columns, here], x_ref.at[slot], arrived.at[slot])
            source = head_ref.at[pl.ds(start, tiles.vocab), columns]
            plgpu.copy_gmem_to_smem(source, w_ref.at[slot], arrived.at[slot])

        plgpu.copy_gmem_to_smem(temperature_ref.at[here], by_ref, by_arrived, oob_mode=_INSIDE)
        for step in range(stages):
            fetch(jnp.int32(step))

        def multiply(acc_ref):
            @pl.loop(0, steps)
            def _(step):
                slot = jax.lax.rem(step, stages)
                plgpu.barrier_wait(arrived.at[slot])
                plgpu.wgmma(acc_ref, w_ref.at[slot], x_ref.at[slot])
                plgpu.wgmma_wait(0)
                jax.lax.cond(step + stages < steps, lambda: fetch(step + stages), lambda: None)

            return acc_ref[...]

        logits = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((tiles.vocab, tiles.rows), jnp.float32))
        plgpu.barrier_wait(by_arrived)
        wide = lambda a: jax.lax.broadcast_in_dim(a, logits.shape, (1,))  # noqa: E731
        x = cap(logits, softcap) / wide(by_ref[...])
        ids = start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        x = jnp.where(ids < tile * tiles.vocab, -jnp.inf, x)
        maximum = jnp.max(x, axis=0)
        shift = jnp.where(maximum == -jnp.inf, 0.0, maximum)
        total = jnp.sum(jnp.exp(x - wide(shift)), axis=0)
        best = jnp.min(jnp.where(x == wide(maximum), ids, _LAST), axis=0)
        kept = (maximum_ref, total_ref, best_ref)
        for ref, found in zip(kept, (maximum, total, best)):
            ref[...] = found
        plgpu.commit_smem()
        for ref, result in zip(kept, results):
            plgpu.copy_smem_to_gmem(ref, result.at[tile, here])
        plgpu.wait_smem_to_gmem(0)

    results = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((count, padded), dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32)],
        scratch_types=[
            plgpu.SMEM((stages, DEPTH, tiles.rows), hidden.dtype),
            plgpu.SMEM((stages, tiles.vocab, DEPTH), head.dtype),
            *(plgpu.SMEM((tiles.rows,), dtype) for dtype in (jnp.float32, jnp.float32, jnp.float32, jnp.int32)),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(),
        ],
        grid=(count, padded // tiles.rows),
        grid_names=("tile", "rows"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name="lm_head_verify_stats",
    )(hidden, head, temperature)
    return TileStats(*(a.T[:rows] for a in results))
