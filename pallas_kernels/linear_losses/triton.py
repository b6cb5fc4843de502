"""Pallas for GPUs, by Triton: programs that share nothing, loops over tiles inside of them.

Forward: one kernel for the normaliser of q and the label's logit, one for the sums that compare q with p; a program
takes a tile of positions and a part of the vocabulary, and plain jax joins the parts. Backward: the same division for
d hidden and d code, with blocks of columns of d hidden beside it (its float32 sums have to stay in registers, and every
block computes q and p again); for d w2 a program takes a tile of the vocabulary and loops over all positions. Widths
are read in chunks, so that D and R need not be powers of two.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.linear_losses import gradient, tile
from pallas_kernels.linear_losses.gradient import Inputs, Outputs
from pallas_kernels.linear_losses.tile import RowGradient

MAX_RANK = 512  # d w2 of a tile of tokens stays in registers
_PROGRAMS = 256  # enough to fill a GPU
_ACCUMULATOR = 2**15  # float32 sums that a program can hold


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes, powers of two.

    Attributes:
      rows: positions per tile, at least 16.
      vocab: tokens per tile, at least 16.
      chunk: columns of hidden, head, code and w2 that are read at a time, at least 16.
      chunks: chunks of d hidden that a program adds up; any number.
      parts: pieces of the vocabulary for different programs; any number.
    """

    rows: int
    vocab: int
    chunk: int
    chunks: int
    parts: int

    @classmethod
    def for_shape(cls, count: int, vocab: int, width: int) -> Tiles:
        """Small tiles and as many parts of the vocabulary as fill the device."""
        rows, tokens, chunk = (32 if count > 16 else 16), 64, 64
        blocks = pl.cdiv(width, _ACCUMULATOR // rows)
        parts = min(pl.cdiv(_PROGRAMS, pl.cdiv(count, rows)), pl.cdiv(vocab, 8 * tokens))
        return cls(rows, tokens, chunk, pl.cdiv(pl.cdiv(width, blocks), chunk), parts)


def linear_losses(
    hidden: jax.Array,
    target_hidden: jax.Array,
    head: jax.Array,
    log_normalizer: jax.Array,
    label: jax.Array,
    code: jax.Array | None = None,
    w2: jax.Array | None = None,
    softcap: float = 0.0,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results as `api.linear_losses`."""
    vocab, width = head.shape
    tiles = tiles or Tiles.for_shape(hidden.shape[0], vocab, width)
    options = {"softcap": softcap, "tiles": tiles, "interpret": interpret}
    passes = gradient.Passes(
        forward=functools.partial(_forward, **options),
        backward=gradient.in_two_passes(
            rows=functools.partial(_row_gradients, **options),
            weight=functools.partial(_weight_gradient, **options),
        ),
    )
    return gradient.run(passes, tiles.rows, hidden, target_hidden, head, log_normalizer, label, code, w2)


# --- the calls ------------------------------------------------------------------------------------


def _forward(inputs: Inputs, *, softcap: float, tiles: Tiles, interpret: bool) -> Outputs:
    count = inputs.hidden.shape[0]
    grid = (count // tiles.rows, tiles.parts)
    parts = [jax.ShapeDtypeStruct((tiles.parts, count, 1), jnp.float32)] * 3
    call = functools.partial(_call, grid=grid, out_shape=parts, interpret=interpret)
    bias = [] if inputs.code is None else [inputs.code, inputs.w2]

    peaks, sums, at_label = call(
        functools.partial(_normaliser_kernel, softcap=softcap, tiles=tiles),
        inputs.label,
        inputs.hidden,
        inputs.head,
        *bias,
    )
    peak = peaks.max(0)
    log_sum = jnp.log((sums * jnp.exp(peaks - peak)).sum(0))
    ce = jnp.where(inputs.label >= 0, (peak - at_label.sum(0)) + log_sum, 0.0)

    apart, agreement, mass = call(
        functools.partial(_distance_kernel, softcap=softcap, tiles=tiles),
        inputs.log_normalizer,
        peak,
        log_sum,
        inputs.hidden,
        inputs.target_hidden,
        inputs.head,
        *bias,
    )
    distance = apart.sum(0) + jnp.maximum(1.0 - mass.sum(0), 0.0)
    return Outputs(ce=ce, distance=distance, peak=peak, log_sum=log_sum, agreement=agreement.sum(0))


def _row_gradients(
    inputs: Inputs, row: RowGradient, *, softcap: float, tiles: Tiles, interpret: bool
) -> tuple[jax.Array, jax.Array | None]:
    count, width = inputs.hidden.shape
    blocks = pl.cdiv(width, tiles.chunk * tiles.chunks)
    arrays, outputs = [*row, inputs.hidden, inputs.target_hidden, inputs.head], [width]
    if inputs.code is not None:
        arrays += [inputs.code, inputs.w2]
        outputs += [inputs.code.shape[1]]
    found = _call(
        functools.partial(_rows_kernel, softcap=softcap, tiles=tiles),
        *arrays,
        grid=(count // tiles.rows, tiles.parts, blocks),
        out_shape=[jax.ShapeDtypeStruct((tiles.parts, count, width), jnp.float32) for width in outputs],
        interpret=interpret,
    )
    return found[0].sum(0), found[1].sum(0) if len(found) > 1 else None


def _weight_gradient(inputs: Inputs, row: RowGradient, *, softcap: float, tiles: Tiles, interpret: bool) -> jax.Array:
    assert inputs.w2 is not None
    (found,) = _call(
        functools.partial(_weight_kernel, softcap=softcap, tiles=tiles),
        *row,
        inputs.hidden,
        inputs.target_hidden,
        inputs.head,
        inputs.code,
        inputs.w2,
        grid=(pl.cdiv(inputs.head.shape[0], tiles.vocab),),
        out_shape=[jax.ShapeDtypeStruct(inputs.w2.shape, jnp.float32)],
        interpret=interpret,
    )
    return found


def _call(kernel, *arrays, grid, out_shape, interpret: bool):
    whole = pl.BlockSpec(memory_space=pl.ANY) if interpret else pl.no_block_spec
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[whole] * len(arrays),
        out_specs=[whole] * len(out_shape),
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=2),
        interpret=interpret,
    )(*arrays)


# --- kernels --------------------------------------------------------------------------------------


def _inside(ref, first, rows: int, column, columns: int) -> jax.Array:
    """Which entries of a block [rows, columns] the array has."""
    shape = (rows, columns)
    place = first + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (place < ref.shape[0]) & (tile.columns(shape, column) < ref.shape[1])


def _block(ref, first, rows: int, column, columns: int) -> jax.Array:
    """A block [rows, columns] of a matrix in memory, 0 beyond its end."""
    mask = _inside(ref, first, rows, column, columns)
    return plt.load(ref.at[pl.ds(first, rows), pl.ds(column, columns)], mask=mask, other=0.0)


def _column(ref, first, rows: int) -> jax.Array:
    return plt.load(ref.at[pl.ds(first, rows), pl.ds(0, 1)])


def _chunks(ref, tiles: Tiles) -> list[jax.Array]:
    """First columns of all chunks of a matrix (as arrays: the last chunk may reach beyond the end)."""
    return [jnp.int32(column) for column in range(0, ref.shape[1], tiles.chunk)]


def _products(sides, weight, row, first, tiles: Tiles) -> tuple[jax.Array, ...]:
    """Tiles of side @ weight^T for all `sides`, [rows, vocab] each; a chunk of `weight` is read once for all."""

    def add(c, sums):
        column = c * tiles.chunk
        shared = _block(weight, first, tiles.vocab, column, tiles.chunk)
        blocks = (_block(side, row, tiles.rows, column, tiles.chunk) for side in sides)
        return tuple(total + tile.product(block, shared, transposed=True) for total, block in zip(sums, blocks))

    zero = jnp.zeros((tiles.rows, tiles.vocab), jnp.float32)
    return jax.lax.fori_loop(0, pl.cdiv(weight.shape[1], tiles.chunk), add, (zero,) * len(sides))


def _logits(sides, head, bias, row, first, softcap: float, tiles: Tiles):
    """The drafter's logits of a tile, the capped base logits among them, and the target's if `sides` has its states."""
    base, *target = (tile.capped(x, softcap) for x in _products(sides, head, row, first, tiles))
    logits = base + _products(bias[:1], bias[1], row, first, tiles)[0] if bias else base
    return logits, base, *target


def _over_part(head, tiles: Tiles, body, start):
    """Folds `body(first token of a tile, carry)` over the program's part of the vocabulary."""
    steps = pl.cdiv(pl.cdiv(head.shape[0], tiles.vocab), tiles.parts)
    begin = pl.program_id(1) * steps
    return jax.lax.fori_loop(0, steps, lambda t, carry: body((begin + t) * tiles.vocab, carry), start)


def _store_parts(outputs, values, row, tiles: Tiles) -> None:
    for output, value in zip(outputs, values):
        plt.store(output.at[pl.program_id(1), pl.ds(row, tiles.rows), pl.ds(0, 1)], value)


def _normaliser_kernel(label, hidden, head, *refs, softcap: float, tiles: Tiles):
    bias, outputs = refs[:-3], refs[-3:]
    row = pl.program_id(0) * tiles.rows
    labels = _column(label, row, tiles.rows)

    def add(first, carry):
        peak, total, at_label = carry
        logits, _ = _logits((hidden,), head, bias, row, first, softcap, tiles)
        column = tile.columns(logits.shape, first)
        peak, total = tile.running_sum(jnp.where(column < head.shape[0], logits, -jnp.inf), peak, total)
        return peak, total, at_label + tile.at_label(logits, column, labels)

    zero = jnp.zeros((tiles.rows, 1), jnp.float32)
    _store_parts(outputs, _over_part(head, tiles, add, (zero + tile.LOWEST, zero, zero)), row, tiles)


def _distance_kernel(log_normalizer, peak, log_sum, hidden, target, head, *refs, softcap: float, tiles: Tiles):
    bias, outputs = refs[:-3], refs[-3:]
    row = pl.program_id(0) * tiles.rows
    peaks, log_sums, normalizers = (_column(ref, row, tiles.rows) for ref in (peak, log_sum, log_normalizer))

    def add(first, carry):
        logits, _, target_logits = _logits((hidden, target), head, bias, row, first, softcap, tiles)
        valid = tile.columns(logits.shape, first) < head.shape[0]
        q, p = tile.probabilities(logits, target_logits, valid, peaks, log_sums, normalizers)
        return tuple(total + term for total, term in zip(carry, tile.distance_terms(q, p)))

    zero = jnp.zeros((tiles.rows, 1), jnp.float32)
    _store_parts(outputs, _over_part(head, tiles, add, (zero, zero, zero)), row, tiles)


def _logit_gradient(known: RowGradient, hidden, target, head, bias, row, first, softcap: float, tiles: Tiles):
    """A tile's gradient with respect to the logits, and to the base logits before the cap."""
    logits, base, target_logits = _logits((hidden, target), head, bias, row, first, softcap, tiles)
    column = tile.columns(logits.shape, first)
    valid = column < head.shape[0]
    q, p = tile.probabilities(logits, target_logits, valid, known.peak, known.log_sum, known.log_normalizer)
    found = tile.logit_gradient(q, p, column, known)
    return found, tile.through_cap(found, base, softcap)


def _split(refs):
    """Per-row values; hidden, target and head; what follows."""
    size = len(RowGradient._fields)
    return RowGradient(*refs[:size]), refs[size : size + 3], refs[size + 3 :]


def _rows_kernel(*refs, softcap: float, tiles: Tiles):
    row_refs, (hidden, target, head), rest = _split(refs)
    bias, outputs = rest[: len(rest) // 2], rest[len(rest) // 2 :]  # two and two, or none and one
    row, part, block = pl.program_id(0) * tiles.rows, pl.program_id(1), pl.program_id(2)
    known = RowGradient(*(_column(ref, row, tiles.rows) for ref in row_refs))
    hidden_columns = [(block * tiles.chunks + c) * tiles.chunk for c in range(tiles.chunks)]
    code_columns = _chunks(bias[0], tiles) if bias else []

    def grown(sums, weight, first, places, found):
        read = lambda column: _block(weight, first, tiles.vocab, column, tiles.chunk)  # noqa: E731
        found = found.astype(weight.dtype)
        return tuple(total + tile.product(found, read(column)) for total, column in zip(sums, places))

    def add(first, carry):
        of_logits, of_base = _logit_gradient(known, hidden, target, head, bias, row, first, softcap, tiles)
        d_hidden = grown(carry[0], head, first, hidden_columns, of_base)
        return d_hidden, grown(carry[1], bias[1], first, code_columns, of_logits) if bias else ()

    zero = jnp.zeros((tiles.rows, tiles.chunk), jnp.float32)
    start = (zero,) * len(hidden_columns), (zero,) * len(code_columns)
    d_hidden, d_code = _over_part(head, tiles, add, start)

    def store(output, sums, places):
        for value, column in zip(sums, places):
            mask = _inside(output.at[part], row, tiles.rows, column, tiles.chunk)
            plt.store(output.at[part, pl.ds(row, tiles.rows), pl.ds(column, tiles.chunk)], value, mask=mask)

    store(outputs[0], d_hidden, hidden_columns)
    if bias:

        @pl.when(block == 0)
        def store_code():
            store(outputs[1], d_code, code_columns)


def _weight_kernel(*refs, softcap: float, tiles: Tiles):
    row_refs, (hidden, target, head), (code, w2, output) = _split(refs)
    first = pl.program_id(0) * tiles.vocab
    places = _chunks(code, tiles)

    def add(i, sums):
        row = i * tiles.rows
        known = RowGradient(*(_column(ref, row, tiles.rows) for ref in row_refs))
        of_logits, _ = _logit_gradient(known, hidden, target, head, (code, w2), row, first, softcap, tiles)
        turned = of_logits.T.astype(code.dtype)
        blocks = (_block(code, row, tiles.rows, column, tiles.chunk) for column in places)
        return tuple(total + tile.product(turned, block) for total, block in zip(sums, blocks))

    zero = jnp.zeros((tiles.vocab, tiles.chunk), jnp.float32)
    sums = jax.lax.fori_loop(0, hidden.shape[0] // tiles.rows, add, (zero,) * len(places))
    for value, column in zip(sums, places):
        mask = _inside(output, first, tiles.vocab, column, tiles.chunk)
        plt.store(output.at[pl.ds(first, tiles.vocab), pl.ds(column, tiles.chunk)], value, mask=mask)
