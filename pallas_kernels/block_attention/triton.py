"""Block attention as a Pallas kernel for GPUs (Triton).

One program per row, group and split of the cache: a few rows alone would leave most of a GPU idle, so each program
takes an equal share of the tiles that its row needs (Flash-Decoding, Dao et al., 2023). The shares meet in plain jax.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.block_attention import tile

_LEAST = 16  # rows, columns and depth of a product of Triton's
_SHARED_BYTES = 1 << 16  # shared memory that one program may need: every GPU since 2018 has it
_PROGRAMS = 256  # about two per multiprocessor of a large GPU
_SPLIT_SLOTS = 128  # a split of fewer slots is not worth what combining costs


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes of the kernel.

    Attributes:
      slots: cache slots per product, a power of two of at least 16; 0 if none fits.
      splits: programs that share a row's cache.
      warps: per program.
      stages: of the software pipeline: how many tiles are in flight.
    """

    slots: int
    splits: int = 1
    warps: int = 4
    stages: int = 2

    @classmethod
    def for_shape(cls, pairs: int, rows: int, slots: int, dim: int, dtype: jax.typing.DTypeLike) -> Tiles:
        """Returns tiles that fit shared memory, and enough splits to give a GPU something to do.

        Args:
          pairs: B G, rows times groups.
          rows: queries per group, K N / G.
          slots: S, slots of the cache.
          dim: H.
          dtype: of queries and cache.
        """
        rows = padded(rows)
        splits = max(min(_PROGRAMS // pairs, slots // _SPLIT_SLOTS), 1)
        warps = 8 if rows * dim >= 1 << 14 else 4
        for size in (64, 32, 16):
            tiles = cls(slots=size, splits=splits, warps=warps)
            if shared_bytes(tiles, rows, dim, dtype) <= _SHARED_BYTES:
                return tiles
        return cls(slots=0)


def shared_bytes(tiles: Tiles, rows: int, dim: int, dtype: jax.typing.DTypeLike) -> int:
    """Estimates the shared memory of a program: queries, weights, and keys and values of the tiles in flight."""
    elements = padded(rows) * (dim + tiles.slots) + 2 * tiles.stages * tiles.slots * dim
    return elements * jnp.dtype(dtype).itemsize


def padded(size: int) -> int:
    """Returns the power of two, at least 16, that rows are padded to."""
    return max(pl.next_power_of_2(size), _LEAST)


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
    """Computes `api.block_attention` on a GPU.

    Args:
      queries, context_keys, context_values, visible, block_keys, block_values, scale: as of the api; H a power of two.
      tiles: block sizes; None = `Tiles.for_shape`.
      interpret: run on any platform.

    Returns:
      [B, K, N, H].
    """
    batch, size, heads, dim = queries.shape
    groups, slots = context_keys.shape[1:3]
    own = block_keys.shape[1]
    real_rows = size * heads // groups
    tiles = tiles or Tiles.for_shape(batch * groups, real_rows, slots, dim, queries.dtype)
    rows, own_rows, splits = padded(real_rows), padded(own), tiles.splits

    per_pair = lambda rows: pl.BlockSpec((None, None, rows, dim), lambda b, g, s: (b, g, 0, 0))  # noqa: E731
    per_split = lambda width: pl.BlockSpec((None, None, None, rows, width), lambda b, g, s: (b, g, s, 0, 0))  # noqa: E731
    partial = lambda width: jax.ShapeDtypeStruct((batch, groups, splits, rows, width), jnp.float32)  # noqa: E731
    mixed, top, total = pl.pallas_call(
        functools.partial(_kernel, own=own, scale=scale, tiles=tiles),
        grid=(batch, groups, splits),
        in_specs=[
            pl.BlockSpec((None,), lambda b, g, s: (b,)),
            per_pair(rows),
            per_pair(slots),
            per_pair(slots),
            per_pair(own_rows),
            per_pair(own_rows),
        ],
        out_specs=[per_split(dim), per_split(1), per_split(1)],
        out_shape=[partial(dim), partial(1), partial(1)],
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
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
    share = jnp.exp(top - top.max(axis=2, keepdims=True))
    mixed = (mixed * share).sum(axis=2) / (total * share).sum(axis=2)  # [B, G, rows, H]
    return tile.queries_of(mixed.astype(queries.dtype), queries.shape)


def _kernel(
    visible, queries, keys, values, block_keys, block_values, mixed, top, total, *, own: int, scale, tiles: Tiles
):
    """One split of the cache for the queries of one row and group; the first split sees the block too."""
    split, length, rows = pl.program_id(2), visible[...], queries[...]
    needed = pl.cdiv(length, tiles.slots)
    share = pl.cdiv(needed, tiles.splits)
    first = split * share

    def step(index, seen: tile.Partial) -> tile.Partial:
        start = index * tiles.slots
        shape = (tiles.slots, queries.shape[1])
        inside = start + jax.lax.broadcasted_iota(jnp.int32, shape, 0) < length  # a tile may end beyond the array
        load = lambda ref: plgpu.load(ref.at[pl.ds(start, tiles.slots), :], mask=inside, other=0)  # noqa: E731
        return tile.add(seen, rows, load(keys), load(values), length - start, scale)

    from_block = own * (1 - split)  # how many tokens of the block are seen: none (or less) by further splits
    seen = tile.add(tile.nothing(*queries.shape), rows, block_keys[...], block_values[...], from_block, scale)
    seen = jax.lax.fori_loop(first, jnp.minimum(first + share, needed), step, seen)
    mixed[...], top[...], total[...] = seen
