"""Block attention for Mosaic GPU (Hopper): matrix products of a warpgroup, the cache streams in ahead of them.

One block of threads per row, group, 64 queries and split of the cache. The tokens of the drafted block are tile 0, the
tiles of the cache that the row needs follow, and splits take equal shares of them (Flash-Decoding, Dao et al., 2023);
the shares meet in plain jax. Scores, weights and sums never leave registers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import backend
from pallas_kernels.block_attention import tile
from pallas_kernels.block_attention.reference import MASKED

ROWS = 64  # a warpgroup's product has 64 rows
SLOTS = 64  # of a tile: a line of 128 bytes of weights, the least depth of a product
_WIDEST = 256  # columns of a product, and half of a thread's registers
_LINES = 8  # shared memory is swizzled by eight lines
_PROGRAMS = 264  # two per multiprocessor of a Hopper
_SPLIT_SLOTS = 128  # a split of fewer slots is not worth what combining costs
_SMEM = (112 * 1024, 227 * 1024)  # of a block of which a multiprocessor takes two, or one
_ALIGNED = 1024  # where a buffer in shared memory begins
_PAIRS = 65_535  # rows times groups: what CUDA launches along an axis that is not a grid's first


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut.

    Attributes:
      splits: blocks of threads that share a row's cache.
      stages: tiles that a block of threads has in flight.
    """

    splits: int
    stages: int

    @classmethod
    def for_shape(cls, pairs: int, rows: int, slots: int, dim: int) -> Tiles:
        """Returns enough splits to give a GPU something to do, and as many stages as let two blocks run side by side.

        Args:
          pairs: B G, rows times groups.
          rows: queries per group, K N / G.
          slots: S, slots of the cache.
          dim: H.
        """
        splits = max(min(_PROGRAMS // (pairs * pl.cdiv(rows, ROWS)), slots // _SPLIT_SLOTS), 1)
        choices = [cls(splits, stages) for stages in (4, 3, 2)]
        return next(tiles for limit in _SMEM for tiles in choices if smem_bytes(tiles, dim) <= limit)


def smem_bytes(tiles: Tiles, dim: int) -> int:
    """Returns the shared memory of a block: queries, tiles in flight, a number per row, barriers, scratch."""
    elements, numbers = ROWS * dim + tiles.stages * 2 * SLOTS * dim, _ALIGNED
    return elements * 2 + numbers + (tiles.stages + 1) * 8 + plgpu.CompilerParams().reduction_scratch_bytes


def refuses(pairs: int, own: int, slots: int, dim: int, dtype: Any) -> str:
    """Says why B G pairs of blocks of J tokens and caches of S slots of H numbers can't be taken, "" if they can."""
    if dtype != jnp.bfloat16:
        return f"dtype {dtype}: products of a warpgroup would round float32"
    if dim % 64 or dim > _WIDEST:
        return f"head dimension {dim}, not a multiple of 64 of at most {_WIDEST}"
    if own > SLOTS:
        return f"a block of {own} tokens is more than a tile of {SLOTS}"
    if slots % _LINES or slots < SLOTS:
        return f"a cache of {slots} slots, not a multiple of {_LINES} of at least {SLOTS}"
    if pairs > _PAIRS:
        return f"{pairs} rows times groups, more than the {_PAIRS} that one launch takes"
    return backend.no_wgmma()


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
    """Computes `api.block_attention` on a Hopper.

    The results of splits are rounded to bfloat16 before they are mixed, as the weights are.

    Args:
      queries, context_keys, context_values, visible, block_keys, block_values, scale: as of the api; bfloat16.
      tiles: how the work is cut; None = `Tiles.for_shape`.
      interpret: parameters of the interpreter: run on any platform; its copies read behind the end of a cache.

    Returns:
      [B, K, N, H].
    """
    batch, size, heads, dim = queries.shape
    groups, slots = context_keys.shape[1:3]
    own, real_rows = block_keys.shape[1], size * heads // groups
    tiles = tiles or Tiles.for_shape(batch * groups, real_rows, slots, dim)
    stages, splits = tiles.stages, tiles.splits
    rows = min(_up(real_rows), ROWS)  # what is copied; the other rows of a product are never looked at
    parts = pl.cdiv(real_rows, rows)

    def kernel(visible_ref, q, keys, values, own_keys, own_values, mixed, weight, *scratch):
        q_ref, k_ref, v_ref, weight_ref, arrived, q_arrived = scratch
        b, g, split, part = (jax.lax.axis_index(name) for name in ("row", "group", "split", "part"))
        here, length = pl.ds(part * rows, rows), visible_ref[b]
        needed = 1 + pl.cdiv(length, SLOTS)
        share = pl.cdiv(needed, splits)
        first = split * share
        mine = jnp.minimum(needed - first, share)

        def fetch(i):  # what lies behind the end of a cache is 0
            slot, source = jax.lax.rem(i, stages), (b, g, pl.ds((first + i - 1) * SLOTS, SLOTS))
            plgpu.copy_gmem_to_smem(keys.at[source], k_ref.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(values.at[source], v_ref.at[slot], arrived.at[slot])

        plgpu.copy_gmem_to_smem(q.at[b, g, here], q_ref.at[pl.ds(0, rows)], q_arrived)

        @pl.when(first == 0)
        def _():
            top = pl.ds(0, own_keys.shape[2])
            plgpu.copy_gmem_to_smem(own_keys.at[b, g], k_ref.at[0, top], arrived.at[0])
            plgpu.copy_gmem_to_smem(own_values.at[b, g], v_ref.at[0, top], arrived.at[0])

        for i in range(stages):
            pl.when((first + i > 0) & (i < mine))(lambda i=i: fetch(jnp.int32(i)))
        plgpu.barrier_wait(q_arrived)

        def step(i, seen):
            acc, top, total = seen
            t, slot = first + i, jax.lax.rem(i, stages)
            count = jnp.where(t == 0, own, length - (t - 1) * SLOTS)  # lines of the tile that are seen, or more
            inside = lambda shape, axis: jax.lax.broadcasted_iota(jnp.int32, shape, axis) < count  # noqa: E731
            plgpu.barrier_wait(arrived.at[slot])

            @pl.when((t == 0) | (t == needed - 1))
            def _():  # what is not seen may be NaN, and a weight of 0 would not help
                v_ref[slot] = jnp.where(inside((SLOTS, dim), 0), v_ref[slot], 0)
                plgpu.commit_smem()

            scores = _add_product(jnp.zeros((ROWS, SLOTS), jnp.float32), q_ref, k_ref.at[slot], True, interpret)
            scores = jnp.where(inside(scores.shape, 1), scores * scale, MASKED)
            larger = jnp.maximum(top, jnp.max(scores, axis=1))
            weights, kept = jnp.exp(scores - _wide(larger, SLOTS)), jnp.exp(top - larger)
            total = total * kept + jnp.sum(weights, axis=1)
            weights = weights.astype(v_ref.dtype)
            acc = _add_product(acc * _wide(kept, dim), weights, v_ref.at[slot], False, interpret)
            pl.when(i + stages < mine)(lambda: fetch(i + stages))
            return acc, larger, total

        nothing = jnp.zeros((ROWS, dim), jnp.float32), jnp.full(ROWS, MASKED, jnp.float32), jnp.zeros(ROWS, jnp.float32)
        acc, top, total = jax.lax.fori_loop(0, mine, step, nothing)
        total = jnp.where(total == 0.0, 1.0, total)  # of a split without a tile
        q_ref[...] = (acc / _wide(total, dim)).astype(q_ref.dtype)
        weight_ref[...] = top + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_ref.at[pl.ds(0, rows)], mixed.at[b, g, split, here])
        plgpu.copy_smem_to_gmem(weight_ref.at[pl.ds(0, rows)], weight.at[b, g, split, here])
        plgpu.wait_smem_to_gmem(0)

    dtype = queries.dtype
    mixed, weight = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((batch, groups, splits, parts * rows, dim), dtype),
            jax.ShapeDtypeStruct((batch, groups, splits, parts * rows), jnp.float32),
        ),
        scratch_types=[
            plgpu.SMEM((ROWS, dim), dtype),
            plgpu.SMEM((stages, SLOTS, dim), dtype),
            plgpu.SMEM((stages, SLOTS, dim), dtype),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(),
        ],
        grid=(batch, groups, splits, parts),
        grid_names=("row", "group", "split", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name="block_attention",
    )(
        jnp.clip(visible, 0, slots).astype(jnp.int32),
        tile.rows_of(queries, groups, parts * rows),
        context_keys,
        context_values,
        tile.block_of(block_keys, _up(own)),
        tile.block_of(block_values, _up(own)),
    )
    if splits > 1:
        mixed = mixed * jax.nn.softmax(weight, axis=2)[..., None]
    return tile.queries_of(mixed.sum(axis=2).astype(dtype), queries.shape)


def _add_product(acc: jax.Array, left: Any, right: Any, transposed: bool, interpret: Any) -> jax.Array:
    """Adds a product to numbers in registers: [M, N] + [M, D] @ [D, N], the right one [N, D] if it is transposed.

    The left matrix is in registers or in shared memory, the right one in shared memory. jax's interpreter knows no
    transposed references and no accumulators that begin with a value.
    """
    if interpret:
        left, right = left[...].astype(jnp.float32), right[...].astype(jnp.float32)
        plgpu.commit_smem()  # copies come after what was read here
        return acc + jax.lax.dot_general(left, right, (((1,), (int(transposed),)), ((), ())))

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, left, plgpu.transpose_ref(right, (1, 0)) if transposed else right)

    accumulator: Any = plgpu.WGMMAAccumulatorRef.init(acc)
    return pl.run_state(multiply)(accumulator)


def _wide(column: jax.Array, width: int) -> jax.Array:
    return jax.lax.broadcast_in_dim(column, (column.shape[0], width), (0,))


def _up(size: int) -> int:
    return pl.cdiv(size, _LINES) * _LINES
