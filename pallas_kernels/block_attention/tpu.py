"""Block attention as a Pallas kernel for TPUs (Mosaic).

Grid (row, group, cache tile). The tiles beyond a row's length cost next to nothing: their index is clamped to the last
tile that is needed, so that nothing is copied, and their work is skipped. The block comes first: every query sees it,
so that the running maximum is a real score from then on.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_attention import tile

_ROWS = 16  # rows of products are padded to multiples: a register of bfloat16 holds 16
_LANES = 128
_TILE_BYTES = 1 << 19  # keys and values of a tile: long enough a copy to hide what a grid step costs


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes of the kernel.

    Attributes:
      slots: cache slots per grid step.
    """

    slots: int

    @classmethod
    def for_shape(cls, slots: int, dim: int, dtype: jax.typing.DTypeLike) -> Tiles:
        """Returns tiles of about half a mebibyte of keys and values.

        Args:
          slots: S, slots of the cache.
          dim: H.
          dtype: of the cache.
        """
        fitting = _TILE_BYTES // (2 * _up(dim, _LANES) * jnp.dtype(dtype).itemsize)
        return cls(slots=min(slots, max(fitting // _ROWS, 1) * _ROWS))


def vmem_bytes(tiles: Tiles, rows: int, own: int, dim: int, dtype: jax.typing.DTypeLike) -> int:
    """Returns the memory of a grid step: blocks in and out, each twice (one is copied meanwhile), and scratch.

    Args:
      tiles: block sizes.
      rows: queries per group, K N / G.
      own: J, tokens of the block.
      dim: H.
      dtype: of queries and cache.
    """
    rows, own, width = _up(rows, _ROWS), _up(own, _ROWS), _up(dim, _LANES)
    blocks = (2 * rows + 2 * own + 2 * _up(tiles.slots, _ROWS)) * width * jnp.dtype(dtype).itemsize
    return 2 * blocks + rows * (width + 2 * _LANES) * 4


def block_attention(
    queries: jax.Array,
    context_keys: jax.Array,
    context_values: jax.Array,
    visible: jax.Array,
    block_keys: jax.Array,
    block_values: jax.Array,
    scale: float,
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Computes `api.block_attention` on a TPU.

    Args:
      queries, context_keys, context_values, visible, block_keys, block_values, scale: as of the api.
      tiles: block sizes; None = `Tiles.for_shape`.
      interpret: True or a `pltpu.InterpretParams`: run on any platform.

    Returns:
      [B, K, N, H].
    """
    batch, size, heads, dim = queries.shape
    groups, slots = context_keys.shape[1:3]
    own = block_keys.shape[1]
    tiles = tiles or Tiles.for_shape(slots, dim, context_keys.dtype)
    steps = pl.cdiv(slots, tiles.slots)
    rows, own_rows = _up(size * heads // groups, _ROWS), _up(own, _ROWS)

    def at_row(b, g, t, visible):
        return b, g, 0, 0

    def at_tile(b, g, t, visible):
        last = jax.lax.div(jnp.maximum(visible[b], 1) - 1, tiles.slots)
        return b, g, jnp.minimum(t, last), 0

    per_row = lambda rows: pl.BlockSpec((None, None, rows, dim), at_row)  # noqa: E731
    per_tile = pl.BlockSpec((None, None, tiles.slots, dim), at_tile)
    mixed = pl.pallas_call(
        functools.partial(_kernel, own=own, scale=scale, steps=steps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, groups, steps),
            in_specs=[per_row(rows), per_tile, per_tile, per_row(own_rows), per_row(own_rows)],
            out_specs=per_row(rows),
            scratch_shapes=[
                pltpu.VMEM((rows, dim), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, groups, rows, dim), queries.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="block_attention",
    )(
        jnp.clip(visible, 0, slots).astype(jnp.int32),
        tile.rows_of(queries, groups, rows),
        context_keys,
        context_values,
        tile.block_of(block_keys, own_rows),
        tile.block_of(block_values, own_rows),
    )
    return tile.queries_of(mixed, queries.shape)


def _kernel(
    visible, queries, keys, values, block_keys, block_values, out, mixed, top, total, *, own: int, scale, steps: int
):
    """One tile of the cache for the queries of one row and group; `mixed`, `top` and `total` outlive the tiles."""
    row, step = pl.program_id(0), pl.program_id(2)

    def store(seen: tile.Partial) -> None:
        mixed[...], top[...], total[...] = seen

    @pl.when(step == 0)
    def _():
        before = tile.nothing(*queries.shape)
        store(tile.add(before, queries[...], block_keys[...], block_values[...], own, scale))

    count = visible[row] - step * keys.shape[0]

    @pl.when(count > 0)
    def _():
        before = tile.Partial(mixed[...], top[...], total[...])
        inside = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0) < count
        # Selected in float32: a mask of 32-bit comparisons has not the layout of 16-bit values.
        finite = jnp.where(inside, values[...].astype(jnp.float32), 0.0).astype(values.dtype)
        store(tile.add(before, queries[...], keys[...], finite, count, scale))

    @pl.when(step == steps - 1)
    def _():
        out[...] = (mixed[...] / total[...]).astype(out.dtype)


def _up(size: int, multiple: int) -> int:
    return pl.cdiv(size, multiple) * multiple
