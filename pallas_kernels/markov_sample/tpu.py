"""The loop for a TPU, lowered by Mosaic: a step's logits stay in VMEM, the next row of W1 arrives by DMA.

The candidate form walks over (block of rows, step, row): the rows of W2 that each batch row's candidates name, gathered
by XLA beforehand, stream through; after the last one, the draw serves the whole block of rows. The vocabulary form
walks over (step, tile of the vocabulary): W2 streams once a step for all rows. In both, a step ends with tokens as
scalars in SMEM, and the next one begins by copying their rows of W1. A copy takes the aligned group of rows around the
token, since a single row of a tiled array can't be addressed; so V must be a multiple of that group.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.markov_sample import tile
from pallas_kernels.precision import product_precision

_VMEM = 15 * 2**20  # bytes that a kernel may ask for
_SCRATCH = 8 * 2**20  # of them for the logits of one step
_VOCAB_GROUP = 8 * 128  # entries of the map to target ids that one copy takes


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the logits of one step are cut.

    Attributes:
      rows: batch rows of a block: a multiple of 8, or all.
      width: entries of a tile: all candidates, or a multiple of 128.
    """

    rows: int
    width: int

    @classmethod
    def for_shape(cls, batch: int, size: int, candidates: bool) -> Tiles:
        """Takes 8 rows and whole lists of candidates, or all rows and tiles of the vocabulary."""
        if candidates:
            return cls(rows=min(batch, 8), width=size)
        return cls(rows=batch, width=min(1024, _up(size, 128)))


def vmem_bytes(
    kind: str, batch: int, size: int, candidates: bool, rank: int, itemsize: int, tiles: Tiles | None = None
) -> int:
    """Returns the VMEM that a grid step needs: input and output blocks twice, scratch once.

    Args:
      kind: the head.
      batch: B.
      size: m or V'.
      candidates: whether `size` counts candidates.
      rank: R.
      itemsize: bytes of an entry of W1, W2 and the head's weights.
      tiles: how it is cut; the default if None.
    """
    tiles = tiles or Tiles.for_shape(batch, size, candidates)
    rows, width, lanes = _up(tiles.rows, 8), _up(tiles.width, 128), _up(max(rank, 1), 128)
    parts, inputs, group = tile.PARTS[kind], tile.INPUTS[kind], 32 // itemsize
    blocks = rows * width * 4 * (3 if candidates else 2) + 3 * rows * 128 * 4  # base, result, ids; uniforms and such
    scratch = rows * width * 4 if candidates else rows * _up(size, tiles.width) * 4
    scratch += rows * _VOCAB_GROUP * 4
    if kind != "none":
        blocks += _up(tiles.width, group) * lanes * itemsize  # W2
        blocks += parts * (rows * lanes * 4 + inputs * _up(rank, group) * lanes * itemsize)
        scratch += rows * group * lanes * itemsize + 3 * rows * lanes * 4
    return 2 * blocks + scratch


def refuses(kind: str, batch: int, size: int, candidates: bool, rank: int, vocab_size: int, itemsize: int) -> str:
    """Says why this kernel can't take a shape, "" if it can; sizes as in `vmem_bytes`, `vocab_size` is V."""
    if kind != "none" and vocab_size % (32 // itemsize):
        return f"W1 has {vocab_size} rows, not a multiple of {32 // itemsize}"
    if not candidates and _up(batch, 8) * _up(size, 128) * 4 > _SCRATCH:
        return f"{batch} rows of {size} logits, more than {_SCRATCH >> 20} MiB (draft from a list of candidates)"
    needed = vmem_bytes(kind, batch, size, candidates, rank, itemsize)
    if needed > _VMEM:
        return f"it needs {needed} bytes of VMEM, more than {_VMEM}"
    return ""


def markov_sample(
    base_logits: jax.Array,
    anchor_ids: jax.Array,
    temperature: jax.Array,
    uniforms: jax.Array,
    *,
    kind: str,
    hidden: jax.Array | None = None,
    w1: jax.Array | None = None,
    w2: jax.Array | None = None,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    index: jax.Array | None = None,
    vocab: jax.Array | None = None,
    tiles: Tiles | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[jax.Array, jax.Array]:
    """Draws a block of tokens; see `api.markov_sample`."""
    batch, steps, size = base_logits.shape
    tiles = tiles or Tiles.for_shape(batch, size, index is not None)
    extra = -batch % tiles.rows  # rows that fill the last block
    rows, width = tiles.rows, tiles.width
    pad = lambda x: jnp.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1))  # noqa: E731
    if index is None:
        grid = (1, steps, pl.cdiv(size, width))
        whole = pl.BlockSpec((1, rows, width), lambda b, k, j, *_: (k, b, j))
    else:
        grid = ((batch + extra) // rows, steps, 1 if kind == "none" else rows)
        whole = pl.BlockSpec((1, rows, width), lambda b, k, j, *_: (k, b, 0))
    column = pl.BlockSpec((1, rows, 1), lambda b, k, j, *_: (k, b, 0))
    inputs = {
        "base": (pad(base_logits).swapaxes(0, 1), whole),
        "uniforms": (pad(uniforms).T[..., None], column),
        "temperature": (pad(temperature)[:, None], pl.BlockSpec((rows, 1), lambda b, k, j, *_: (b, 0))),
    }
    scratch: dict[str, Any] = {
        "logits_tiles": pltpu.VMEM((grid[2] if index is None else 1, rows, width), jnp.float32),
        "previous": pltpu.SMEM((rows,), jnp.int32),
    }
    if index is not None:
        ids = index if vocab is None else vocab[index]
        inputs["ids"] = (pad(ids).swapaxes(0, 1), whole)
    elif vocab is not None:
        groups = jnp.pad(vocab, (0, -size % _VOCAB_GROUP)).reshape(-1, 128)
        inputs["vocab"] = (groups, pl.BlockSpec(memory_space=pl.ANY))
        scratch["vocab_groups"] = pltpu.VMEM((rows, _VOCAB_GROUP // 128, 128), jnp.int32)
    if kind != "none":
        assert w1 is not None
        assert w2 is not None
        rank = w1.shape[1]
        inputs["w1"] = (w1, pl.BlockSpec(memory_space=pl.ANY))
        if index is None:
            inputs["w2"] = (w2, pl.BlockSpec((width, rank), lambda b, k, j, *_: (j, 0)))
        else:
            # Rows that fill the last block read the last row's again.
            last = batch - 1
            block = lambda b, k, j, *_: (jnp.minimum(b * rows + j, last), k, 0, 0)  # noqa: E731
            inputs["w2"] = (w2[index], pl.BlockSpec((1, 1, width, rank), block))
        scratch["w1_groups"] = pltpu.VMEM((rows, 32 // w1.dtype.itemsize, rank), w1.dtype)
        for name in ("embedded", "code", "state"):
            scratch[name] = pltpu.VMEM((rows, rank), jnp.float32)
        if tile.PARTS[kind]:
            assert hidden is not None
            assert weight is not None
            assert bias is not None
            fixed, weights = tile.split_head(kind, pad(hidden), weight, bias, rank)
            parts = tile.PARTS[kind]
            inputs["fixed"] = (fixed, pl.BlockSpec((1, parts, rows, rank), lambda b, k, j, *_: (k, 0, b, 0)))
            inputs["weights"] = (weights, pl.BlockSpec(weights.shape, lambda b, k, j, *_: (0, 0, 0, 0)))
    scratch["copied"] = pltpu.SemaphoreType.DMA
    names = ("anchors", *inputs, "tokens", "logits", *scratch)
    tokens, logits = pl.pallas_call(
        functools.partial(_kernel, names=names, kind=kind, size=size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=(column, whole),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((steps, batch + extra, 1), jnp.int32),
            jax.ShapeDtypeStruct((steps, batch + extra, size), jnp.float32),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="markov_sample",
    )(pad(anchor_ids), *(array for array, _ in inputs.values()))
    return tokens[:, :batch, 0].T, logits[:, :batch].swapaxes(0, 1)


def _kernel(*refs, names: tuple[str, ...], kind: str, size: int):
    """One grid step: a row's candidates, or a tile of the vocabulary for all rows."""
    ref = SimpleNamespace(**dict(zip(names, refs)))
    block, k, j = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    candidates = "ids" in names
    _, rows, width = ref.logits_tiles.shape
    sampled = ref.temperature[...] > 0
    divisor = jnp.where(sampled, ref.temperature[...], 1.0)

    if kind != "none":
        pl.when(j == 0)(lambda: _begin_step(ref, kind, block, k))

    if candidates:
        if kind != "none":
            code = ref.code[pl.ds(j, 1), :]
            ref.logits_tiles[0, pl.ds(j, 1), :] = _product(code.astype(ref.w2.dtype), ref.w2[0, 0])
    else:
        logits = ref.base[0].astype(jnp.float32)
        if kind != "none":
            logits += _product(ref.code[...].astype(ref.w2.dtype), ref.w2[...])
        lane = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        logits = jnp.where(lane < size - j * width, logits / divisor, -jnp.inf)  # the last tile may end beyond V'
        ref.logits[0] = logits
        ref.logits_tiles[j] = logits

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        if candidates:
            logits = ref.base[0].astype(jnp.float32)
            if kind != "none":
                logits += ref.logits_tiles[0]
            logits /= divisor
            ref.logits[0] = logits
            ref.logits_tiles[0] = logits
        chosen = jnp.minimum(_draw(ref.logits_tiles, ref.uniforms[0], sampled), size - 1)
        if candidates:
            lane = jax.lax.broadcasted_iota(jnp.int32, (rows, width), 1)
            tokens = jnp.sum(jnp.where(lane == chosen, ref.ids[0], 0), axis=1, keepdims=True)
        else:
            tokens = _target_ids(ref, chosen) if "vocab" in names else chosen
        ref.tokens[0] = tokens
        jax.lax.fori_loop(0, rows, lambda r, _: _put(ref.previous, r, _entry(tokens, r)), None)


def _begin_step(ref: SimpleNamespace, kind: str, block: jax.Array, k: jax.Array):
    """Copies W1[x_{k-1}] of all rows and computes the step's codes."""
    rows, group, _ = ref.w1_groups.shape
    row_of_group = jax.lax.broadcasted_iota(jnp.int32, (group, 1), 0)

    @pl.when(k == 0)
    def _():
        ref.state[...] = jnp.zeros(ref.state.shape, jnp.float32)
        jax.lax.fori_loop(0, rows, lambda r, _: _put(ref.previous, r, ref.anchors[block * rows + r]), None)

    def copy(r):
        start = pl.multiple_of(ref.previous[r] - jax.lax.rem(ref.previous[r], group), group)
        return pltpu.make_async_copy(ref.w1.at[pl.ds(start, group), :], ref.w1_groups.at[r], ref.copied)

    def select(r, _):
        rows_of_w1 = ref.w1_groups[r].astype(jnp.float32)
        mine = jnp.where(row_of_group == jax.lax.rem(ref.previous[r], group), rows_of_w1, 0.0)
        ref.embedded[pl.ds(r, 1), :] = jnp.sum(mine, axis=0, keepdims=True)

    _copy_all(copy, rows)
    jax.lax.fori_loop(0, rows, select, None)
    embedded, state = ref.embedded[...], ref.state[...]
    parts = []
    for part in range(tile.PARTS[kind]):
        total = ref.fixed[0, part]
        for i, vector in enumerate((state, embedded)[-tile.INPUTS[kind] :]):
            total += _product(vector, ref.weights[i, part].astype(jnp.float32))
        parts.append(total)
    ref.code[...], ref.state[...] = tile.step(kind, embedded, state, parts)


def _draw(logits_tiles, uniforms: jax.Array, sampled: jax.Array) -> jax.Array:
    """Draws from logits in VMEM, argmax for rows that are not sampled: [tiles, rows, width] -> [rows, 1] int32."""
    count, rows, width = logits_tiles.shape
    # What the loops carry starts from a value in memory: Mosaic lays a constant out in a way that results can't have.
    zeros = uniforms * 0.0
    start = zeros.astype(jnp.int32)

    def maximum(j, carry):
        top, first = carry
        tile_top, tile_first = tile.first_maximum(logits_tiles[j])
        better = tile_top > top
        return jnp.where(better, tile_top, top), jnp.where(better, tile_first + j * width, first)

    top, best = jax.lax.fori_loop(0, count, maximum, (zeros - jnp.inf, start))
    tile_weights = lambda j: jnp.exp(logits_tiles[j] - top)  # noqa: E731
    add = lambda j, total: total + jnp.sum(tile_weights(j), axis=1, keepdims=True)  # noqa: E731
    goal = uniforms * jax.lax.fori_loop(0, count, add, zeros)

    def locate(j, carry):
        # The first tile whose prefix sum exceeds the goal; the last of positive weight if rounding leaves none.
        before, found, start, rest, weights = carry
        here = tile_weights(j)
        total = jnp.sum(here, axis=1, keepdims=True)
        take = (found == 0.0) & (total > 0.0)
        start = jnp.where(take, j * width, start)
        rest = jnp.where(take, goal - before, rest)
        weights = jnp.where(take, here, weights)
        before += total
        return before, jnp.where(before > goal, 1.0, found), start, rest, weights

    nothing = jnp.zeros((rows, width), jnp.float32)
    _, _, start, rest, weights = jax.lax.fori_loop(0, count, locate, (zeros, zeros, start, goal, nothing))
    return jnp.where(sampled, start + tile.inverse_cdf(weights, rest), best)


def _target_ids(ref: SimpleNamespace, chosen: jax.Array) -> jax.Array:
    """Maps entries of the draft vocabulary to target ids, by copies from HBM: [rows, 1] -> [rows, 1]."""
    rows, sublanes, lanes = ref.vocab_groups.shape
    place = jax.lax.broadcasted_iota(jnp.int32, (sublanes, lanes), 0) * lanes
    place += jax.lax.broadcasted_iota(jnp.int32, (sublanes, lanes), 1)
    row = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)

    def copy(r):
        start = pl.multiple_of(jax.lax.div(_entry(chosen, r), _VOCAB_GROUP) * sublanes, sublanes)
        return pltpu.make_async_copy(ref.vocab.at[pl.ds(start, sublanes), :], ref.vocab_groups.at[r], ref.copied)

    def select(r, tokens):
        mine = jnp.where(place == jax.lax.rem(_entry(chosen, r), _VOCAB_GROUP), ref.vocab_groups[r], 0)
        return jnp.where(row == r, jnp.sum(mine), tokens)

    _copy_all(copy, rows)
    return jax.lax.fori_loop(0, rows, select, jnp.zeros((rows, 1), jnp.int32))


def _copy_all(copy, rows: int):
    """Starts one copy per row, then waits for all of them."""
    jax.lax.fori_loop(0, rows, lambda r, _: copy(r).start(), None)
    jax.lax.fori_loop(0, rows, lambda r, _: copy(r).wait(), None)


def _product(x: jax.Array, weights: jax.Array) -> jax.Array:
    """[n, in], [out, in] -> [n, out] float32."""
    return jax.lax.dot_general(
        x,
        weights,
        (((1,), (1,)), ((), ())),
        precision=product_precision(weights.dtype),
        preferred_element_type=jnp.float32,
    )


def _entry(column: jax.Array, r: jax.Array) -> jax.Array:
    """Takes one entry of [rows, 1] int32 as a scalar."""
    row = jax.lax.broadcasted_iota(jnp.int32, column.shape, 0)
    return jnp.sum(jnp.where(row == r, column, 0))


def _put(ref, r: jax.Array, value: jax.Array):
    """Writes one scalar of a loop's body, which has no result."""
    ref[r] = value


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
