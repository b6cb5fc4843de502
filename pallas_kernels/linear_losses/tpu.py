"""Pallas for TPU: float32 running sums in VMEM over tiles of the vocabulary.

Forward: grid (row tiles, 2 sweeps, vocabulary tiles); the first sweep finds the normaliser of q and the label's logit,
the second sums what compares q with p. Backward: one kernel that adds up d hidden and d code over the vocabulary, and
one that adds up d w2 over the positions; both compute their tile of q and p again. The vocabulary's last tile may reach
beyond the head: what is read there is unknown, and is masked wherever it could reach a result.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.linear_losses import gradient, tile
from pallas_kernels.linear_losses.gradient import Inputs, Outputs
from pallas_kernels.linear_losses.tile import RowGradient

VMEM_BYTES = 14 * 2**20  # of the 16 MiB that a kernel gets by default


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes.

    Attributes:
      rows: positions per tile, a multiple of 16.
      vocab: tokens per tile, a multiple of 128.
    """

    rows: int
    vocab: int

    @classmethod
    def for_shape(cls, count: int, vocab: int, width: int, rank: int, itemsize: int) -> Tiles | None:
        """The tiles that move the fewest bytes among those that fit into VMEM; None if none do."""
        most = -(-count // 16) * 16
        candidates = [
            cls(min(rows, most), tokens) for rows in (512, 256, 128, 64, 32, 16) for tokens in (512, 256, 128)
        ]
        fitting = [tiles for tiles in candidates if vmem_bytes(tiles, width, rank, itemsize) <= VMEM_BYTES]
        return min(fitting, key=lambda tiles: tiles.traffic(count, vocab, width, rank, itemsize), default=None)

    def traffic(self, count: int, vocab: int, width: int, rank: int, itemsize: int) -> int:
        """Bytes that the three kernels read of head, w2 and positions, as `reference.py` derives them."""
        head = vocab * (width + rank) * itemsize
        positions = count * (2 * width + rank) * itemsize
        if not rank:
            return 3 * pl.cdiv(count, self.rows) * head
        return (3 * pl.cdiv(count, self.rows) + 1) * head + pl.cdiv(vocab, self.vocab) * positions


def vmem_bytes(tiles: Tiles, width: int, rank: int, itemsize: int) -> int:
    """Most VMEM that one grid step of the three kernels takes.

    Blocks that come and go are there twice; a column of per-row values takes whole rows of 128 lanes; seven float32
    arrays of the tile's size are counted for what is computed in between.

    Args:
      tiles: tile sizes.
      width: D.
      rank: R, 0 without a sequential head.
      itemsize: bytes of an entry of hidden, head, code and w2.
    """
    lanes = lambda size: pl.cdiv(size, 128) * 128  # noqa: E731
    column = tiles.rows * 128 * 4
    of_width, of_rank = (2 * tiles.rows + tiles.vocab) * lanes(width), (tiles.rows + tiles.vocab) * lanes(rank)
    forward = 2 * (2 + len(Outputs._fields)) * column + column
    rows = 2 * (len(RowGradient._fields) * column + tiles.rows * (lanes(width) + lanes(rank)) * 4)
    weight = 2 * (len(RowGradient._fields) * column + tiles.vocab * lanes(rank) * 4)
    return 2 * (of_width + of_rank) * itemsize + max(forward, rows, weight) + 7 * tiles.rows * tiles.vocab * 4


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
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results as `api.linear_losses`; `interpret` may be a `pltpu.InterpretParams`."""
    rank = 0 if code is None else code.shape[1]
    vocab, width = head.shape
    tiles = tiles or Tiles.for_shape(hidden.shape[0], vocab, width, rank, head.dtype.itemsize)
    assert tiles is not None, "the api sends such shapes elsewhere"
    options = {"softcap": softcap, "tiles": tiles, "interpret": interpret}
    passes = gradient.Passes(
        forward=functools.partial(_forward, **options),
        backward=gradient.in_two_passes(
            rows=functools.partial(_row_gradients, **options),
            weight=functools.partial(_weight_gradient, **options),
        ),
    )
    return gradient.run(passes, tiles.rows, hidden, target_hidden, head, log_normalizer, label, code, w2)


# --- the three calls ------------------------------------------------------------------------------


def _forward(inputs: Inputs, *, softcap: float, tiles: Tiles, interpret) -> Outputs:
    count, vocab = inputs.hidden.shape[0], inputs.head.shape[0]
    arrays, specs = _operands(inputs, (inputs.label, inputs.log_normalizer), tiles, lambda i, sweep, j: (i, j))
    column = pl.BlockSpec((tiles.rows, 1), lambda i, sweep, j: (i, 0))
    return Outputs(
        *pl.pallas_call(
            functools.partial(_forward_kernel, softcap=softcap, vocab=vocab),
            grid=(count // tiles.rows, 2, pl.cdiv(vocab, tiles.vocab)),
            in_specs=specs,
            out_specs=[column] * len(Outputs._fields),
            out_shape=[jax.ShapeDtypeStruct((count, 1), jnp.float32)] * len(Outputs._fields),
            scratch_shapes=[pltpu.VMEM((tiles.rows, 1), jnp.float32)],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
            interpret=interpret,
        )(*arrays)
    )


def _row_gradients(
    inputs: Inputs, row: RowGradient, *, softcap: float, tiles: Tiles, interpret
) -> tuple[jax.Array, jax.Array | None]:
    count, vocab = inputs.hidden.shape[0], inputs.head.shape[0]
    arrays, specs = _operands(inputs, row, tiles, lambda i, j: (i, j))
    widths = [x.shape[1] for x in (inputs.hidden, inputs.code) if x is not None]
    found = pl.pallas_call(
        functools.partial(_rows_kernel, softcap=softcap, vocab=vocab),
        grid=(count // tiles.rows, pl.cdiv(vocab, tiles.vocab)),
        in_specs=specs,
        out_specs=[pl.BlockSpec((tiles.rows, width), lambda i, j: (i, 0)) for width in widths],
        out_shape=[jax.ShapeDtypeStruct((count, width), jnp.float32) for width in widths],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(*arrays)
    return found[0], found[1] if len(found) > 1 else None


def _weight_gradient(inputs: Inputs, row: RowGradient, *, softcap: float, tiles: Tiles, interpret) -> jax.Array:
    assert inputs.w2 is not None
    count, (vocab, rank) = inputs.hidden.shape[0], inputs.w2.shape
    arrays, specs = _operands(inputs, row, tiles, lambda j, i: (i, j))
    return pl.pallas_call(
        functools.partial(_weight_kernel, softcap=softcap, vocab=vocab),
        grid=(pl.cdiv(vocab, tiles.vocab), count // tiles.rows),
        in_specs=specs,
        out_specs=pl.BlockSpec((tiles.vocab, rank), lambda j, i: (j, 0)),
        out_shape=jax.ShapeDtypeStruct((vocab, rank), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(*arrays)


def _operands(inputs: Inputs, columns, tiles: Tiles, place) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
    """Arrays and blocks in the kernels' order: per-row values, hidden, target, head, then code and w2 if there are any.

    `place` turns grid indices into (row tile, vocabulary tile).
    """
    rows = lambda width: pl.BlockSpec((tiles.rows, width), lambda *grid: (place(*grid)[0], 0))  # noqa: E731
    tokens = lambda width: pl.BlockSpec((tiles.vocab, width), lambda *grid: (place(*grid)[1], 0))  # noqa: E731
    width = inputs.hidden.shape[1]
    arrays = [*columns, inputs.hidden, inputs.target_hidden, inputs.head]
    specs = [*[rows(1)] * len(columns), rows(width), rows(width), tokens(width)]
    if inputs.code is not None and inputs.w2 is not None:
        arrays += [inputs.code, inputs.w2]
        specs += [rows(inputs.code.shape[1]), tokens(inputs.w2.shape[1])]
    return arrays, specs


# --- kernels --------------------------------------------------------------------------------------


def _logits(hidden, head, bias, softcap: float) -> tuple[jax.Array, jax.Array]:
    """The drafter's logits of a tile, and the capped base logits among them."""
    base = tile.capped(tile.product(hidden[...], head[...], transposed=True), softcap)
    if not bias:
        return base, base
    code, w2 = bias
    return base + tile.product(code[...], w2[...], transposed=True), base


def _forward_kernel(label, log_normalizer, hidden, target, head, *refs, softcap: float, vocab: int):
    *bias, ce, distance, peak, log_sum, agreement, mass = refs
    sweep, j = pl.program_id(1), pl.program_id(2)
    first, last = j == 0, j == pl.num_programs(2) - 1
    logits, _ = _logits(hidden, head, bias, softcap)
    column = tile.columns(logits.shape, j * head.shape[0])
    valid = column < vocab

    @pl.when((sweep == 0) & first)
    def start():
        peak[...] = jnp.full_like(peak, tile.LOWEST)
        for ref in (log_sum, ce, distance, agreement, mass):
            ref[...] = jnp.zeros_like(ref)

    @pl.when(sweep == 0)  # log_sum holds the sum and ce the label's logit until the sweep ends
    def normalise():
        peak[...], log_sum[...] = tile.running_sum(jnp.where(valid, logits, -jnp.inf), peak[...], log_sum[...])
        ce[...] += tile.at_label(logits, column, label[...])

    @pl.when((sweep == 0) & last)
    def finish_cross_entropy():
        log_sum[...] = jnp.log(log_sum[...])
        ce[...] = jnp.where(label[...] >= 0, (peak[...] - ce[...]) + log_sum[...], 0.0)

    @pl.when(sweep == 1)
    def compare():
        target_logits = tile.capped(tile.product(target[...], head[...], transposed=True), softcap)
        q, p = tile.probabilities(logits, target_logits, valid, peak[...], log_sum[...], log_normalizer[...])
        apart, agreed, weight = tile.distance_terms(q, p)
        distance[...] += apart
        agreement[...] += agreed
        mass[...] += weight

    @pl.when((sweep == 1) & last)
    def finish_distance():
        distance[...] += jnp.maximum(1.0 - mass[...], 0.0)


def _logit_gradient(row: RowGradient, hidden, target, head, bias, first, softcap: float, vocab: int):
    """A tile's gradient with respect to the logits, and to the base logits before the cap."""
    logits, base = _logits(hidden, head, bias, softcap)
    target_logits = tile.capped(tile.product(target[...], head[...], transposed=True), softcap)
    column = tile.columns(logits.shape, first)
    valid = column < vocab
    q, p = tile.probabilities(logits, target_logits, valid, row.peak, row.log_sum, row.log_normalizer)
    found = tile.logit_gradient(q, p, column, row)
    # Beyond the vocabulary base may be NaN, which 0 times it would keep.
    return found, jnp.where(valid, tile.through_cap(found, base, softcap), 0.0)


def _split(refs):
    """Per-row values, read; hidden, target and head; what follows."""
    size = len(RowGradient._fields)
    return RowGradient(*(ref[...] for ref in refs[:size])), refs[size : size + 3], refs[size + 3 :]


def _rows_kernel(*refs, softcap: float, vocab: int):
    row, (hidden, target, head), rest = _split(refs)
    bias, outputs = rest[: len(rest) // 2], rest[len(rest) // 2 :]  # two and two, or none and one
    first = pl.program_id(1) * head.shape[0]

    @pl.when(pl.program_id(1) == 0)
    def start():
        for ref in outputs:
            ref[...] = jnp.zeros_like(ref)

    of_logits, of_base = _logit_gradient(row, hidden, target, head, bias, first, softcap, vocab)
    for output, found, weight in zip(outputs, (of_base, of_logits), (head, *bias[1:])):
        known = weight[...]
        if vocab % head.shape[0]:
            place = first + jax.lax.broadcasted_iota(jnp.int32, known.shape, 0)
            known = jnp.where(place < vocab, known, jnp.zeros_like(known))
        output[...] += tile.product(found.astype(known.dtype), known)


def _weight_kernel(*refs, softcap: float, vocab: int):
    row, (hidden, target, head), (code, w2, output) = _split(refs)

    @pl.when(pl.program_id(1) == 0)
    def start():
        output[...] = jnp.zeros_like(output)

    first = pl.program_id(0) * head.shape[0]
    of_logits, _ = _logit_gradient(row, hidden, target, head, (code, w2), first, softcap, vocab)
    output[...] += tile.product(of_logits.T.astype(code.dtype), code[...])
