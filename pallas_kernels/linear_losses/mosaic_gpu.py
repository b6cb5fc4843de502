"""Pallas for GPUs, by Mosaic GPU: matrix products of a warpgroup, tiles that share nothing.

A block computes the logits of one tile of tokens and positions, as [tokens, positions], so that no operand is turned
around in shared memory. Forward: one kernel for the normaliser of q and the label's logit, one for the sums that
compare q with p; plain jax joins the tiles. Backward: sums as wide as D fit no registers, and computing q and p again
for every piece of D that does would cost several times the products. So a kernel writes the gradient of the logits, in
the head's dtype, for one chunk of the vocabulary at a time, and XLA multiplies it: by the head, w2 and the codes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import backend
from pallas_kernels.linear_losses import gradient, tile
from pallas_kernels.linear_losses.gradient import Inputs, Outputs
from pallas_kernels.linear_losses.tile import RowGradient

ROWS = 64  # positions of a tile
VOCAB = 128  # tokens of a tile: two products of a warpgroup, 64 numbers per thread
DEPTH = 64  # columns that one product takes: 128 bytes of bfloat16, a swizzled line
LINES = 8  # rows of a swizzled tile in shared memory: copies begin at a multiple of it, and the compiler must see that
CHUNK = 2**25  # entries of the gradient of the logits that exist at a time, about: 64 MiB
_INSIDE = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
_STAGES = {1: 4, 2: 3}  # slices in flight, by how many products share the head: two blocks fit a processor


def refuses(vocab: int, width: int, rank: int, dtype: Any, bias_dtype: Any = None) -> str:
    """Says why a head [V', D] of `dtype` and a w2 [V', R] of `bias_dtype` can't be multiplied, "" if they can."""
    for name, found in (("head", dtype), ("w2", bias_dtype or dtype)):
        if found != jnp.bfloat16:
            return f"{name} is {found}: products of a warpgroup would round float32"
    for name, size in (("D", width), ("R", rank)):
        if size % DEPTH:
            return f"{name} = {size} is not a multiple of {DEPTH}"
    if vocab < VOCAB:
        return f"a vocabulary of {vocab} tokens is less than a tile"
    if vocab % LINES:
        return f"a vocabulary of {vocab} tokens is not a multiple of {LINES}"
    return backend.no_wgmma()


def smem_bytes(sides: int, numbers: int) -> int:
    """Returns the shared memory of a block.

    Args:
      sides: matrices of positions that the head is multiplied by, 1 or 2.
      numbers: values per position, read or written; each array is aligned to 1024 bytes.
    """
    slices = _STAGES[sides] * (VOCAB + sides * ROWS) * DEPTH * 2
    return slices + numbers * 1024 + 3 * 1024 + plgpu.CompilerParams().reduction_scratch_bytes  # three of barriers


def chunk_of(count: int, vocab: int) -> int:
    """Returns how many tokens the gradient of the logits of `count` positions is computed of at a time."""
    pieces = max(pl.cdiv(vocab, max(CHUNK // count, VOCAB)), 2 if vocab % VOCAB else 1)  # of whole tiles
    return pl.cdiv(pl.cdiv(vocab, pieces), VOCAB) * VOCAB


def linear_losses(
    hidden: jax.Array,
    target_hidden: jax.Array,
    head: jax.Array,
    log_normalizer: jax.Array,
    label: jax.Array,
    code: jax.Array | None = None,
    w2: jax.Array | None = None,
    softcap: float = 0.0,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Arguments and results as `api.linear_losses`."""
    options = {"softcap": softcap, "interpret": interpret}
    passes = gradient.Passes(
        forward=functools.partial(_forward, **options),
        backward=functools.partial(_backward, **options),
    )
    return gradient.run(passes, ROWS, hidden, target_hidden, head, log_normalizer, label, code, w2)


# --- the passes -----------------------------------------------------------------------------------


def _forward(inputs: Inputs, *, softcap: float, interpret: Any) -> Outputs:
    count, vocab = inputs.hidden.shape[0], inputs.head.shape[0]
    tiles = pl.cdiv(vocab, VOCAB)
    parts = [jax.ShapeDtypeStruct((tiles, count), jnp.float32)] * 3
    sweep = functools.partial(
        _sweep, inputs=_turned(inputs), span=jnp.zeros(2, jnp.int32), tiles=tiles, softcap=softcap, interpret=interpret
    )

    peaks, sums, at_label = sweep(
        _normaliser, numbers=(inputs.label,), out_type=parts, sides=1, name="linear_losses_normaliser"
    )
    peak = peaks.max(0)
    log_sum = jnp.log((sums * jnp.exp(peaks - peak)).sum(0))
    ce = jnp.where(inputs.label[:, 0] >= 0, (peak - at_label.sum(0)) + log_sum, 0.0)

    numbers = (peak[:, None], log_sum[:, None], inputs.log_normalizer)
    apart, agreement, mass = sweep(
        _differences, numbers=numbers, out_type=parts, sides=2, name="linear_losses_distance"
    )
    distance = apart.sum(0) + jnp.maximum(1.0 - mass.sum(0), 0.0)
    return Outputs(*(x[:, None] for x in (ce, distance, peak, log_sum, agreement.sum(0))))


def _backward(
    inputs: Inputs, row: RowGradient, *, softcap: float, interpret: Any
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    count, vocab = inputs.hidden.shape[0], inputs.head.shape[0]
    size = chunk_of(count, vocab)
    turned = _turned(inputs)
    outputs = 2 if softcap and inputs.code is not None else 1  # both are the same without a cap
    of_tile = [jax.ShapeDtypeStruct((size, count), inputs.head.dtype)] * outputs

    def add(i, sums):
        d_hidden, d_code, d_w2 = sums
        begin = jnp.minimum(i * size, vocab - size)  # the last chunk begins early rather than to end behind the head
        of_base, *rest = _sweep(
            functools.partial(_gradients, softcap=softcap, outputs=outputs),
            numbers=row,
            out_type=of_tile,
            sides=2,
            name="linear_losses_gradient",
            inputs=turned,
            span=jnp.stack([begin // LINES, i * size]),
            tiles=size // VOCAB,
            softcap=softcap,
            interpret=interpret,
        )
        of_logits = rest[0] if rest else of_base
        here = lambda weight: jax.lax.dynamic_slice_in_dim(weight, begin, size)  # noqa: E731
        d_hidden += _product(of_base, here(inputs.head), 0)
        if inputs.code is not None:
            d_code += _product(of_logits, here(inputs.w2), 0)
            known = here(d_w2)
            d_w2 = jax.lax.dynamic_update_slice_in_dim(d_w2, known + _product(of_logits, inputs.code, 1), begin, 0)
        return d_hidden, d_code, d_w2

    start = [None if x is None else jnp.zeros(x.shape, jnp.float32) for x in (inputs.hidden, inputs.code, inputs.w2)]
    return jax.lax.fori_loop(0, pl.cdiv(vocab, size), add, tuple(start))


def _turned(inputs: Inputs) -> Inputs:
    """Positions last, as the right operands of products: [D, n], [R, n]. They are few beside the head."""
    code = None if inputs.code is None else inputs.code.T
    return inputs._replace(hidden=inputs.hidden.T, target_hidden=inputs.target_hidden.T, code=code)


def _product(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
    """Multiplies into float32 over the left's `axis` and the right's first."""
    return jax.lax.dot_general(left, right, (((axis,), (0,)), ((), ())), preferred_element_type=jnp.float32)


# --- what becomes of a tile of logits; [tokens, positions] ----------------------------------------


def _normaliser(ids, base, logits, target_logits, label):
    """Maximum, sum of exponentials and the label's logit, of each position: [positions]."""
    del base, target_logits
    seen = jnp.where(ids >= 0, logits, -jnp.inf)
    peak = jnp.maximum(jnp.max(seen, axis=0), tile.LOWEST)
    total = jnp.sum(jnp.exp(seen - _wide(peak)), axis=0)
    return peak, total, jnp.sum(jnp.where((ids == label()) & (ids >= 0), logits, 0.0), axis=0)


def _differences(ids, base, logits, target_logits, peak, log_sum, log_normalizer):
    """Sums that compare q with p, of each position: [positions]."""
    del base
    q, p = tile.probabilities(logits, target_logits, ids >= 0, peak(), log_sum(), log_normalizer())
    return tuple(jnp.sum(x, axis=0) for x in tile.differences(q, p))


def _gradients(ids, base, logits, target_logits, *numbers, softcap: float, outputs: int):
    """The gradient with respect to the logits before the cap, and to those after it where `outputs` is 2."""
    known = RowGradient(*(number() for number in numbers))
    q, p = tile.probabilities(logits, target_logits, ids >= 0, known.peak, known.log_sum, known.log_normalizer)
    found = tile.logit_gradient(q, p, ids, known)
    return (tile.through_cap(found, base, softcap), found)[:outputs]


def _wide(x: jax.Array) -> jax.Array:
    return jax.lax.broadcast_in_dim(x, (VOCAB, ROWS), (1,))


# --- the kernel -----------------------------------------------------------------------------------


def _sweep(
    finish: Callable[..., tuple[jax.Array, ...]],
    numbers: tuple[jax.Array, ...],
    out_type: list[jax.ShapeDtypeStruct],
    sides: int,
    name: str,
    inputs: Inputs,
    span: jax.Array,
    tiles: int,
    softcap: float,
    interpret: Any,
) -> list[jax.Array]:
    """Computes tiles of logits and what `finish` makes of each.

    Args:
      finish: takes the ids of a tile's tokens (-2 for those that another tile has), base logits after the cap, logits,
        the target's logits (None if `sides` is 1), and a function for each of `numbers` that reads it as wide as the
        tile. Returns values [64], or tiles [128, 64].
      numbers: [n, 1] each.
      out_type: of the results, [tiles, n] for values, [128 tiles, n] for tiles.
      sides: 2 with the target's logits.
      name: of the kernel.
      inputs: as `_turned` gives them.
      span: [2] int32: the first tile's first token, divided by LINES, and the first token that is not known yet.
      tiles: how many tiles.
      softcap: 0 = none.
      interpret: the interpreter's parameters.
    """
    vocab, count, stages = inputs.head.shape[0], inputs.hidden.shape[1], _STAGES[sides]
    of_values = [shape for shape in out_type if shape.shape[0] == tiles]
    positions = [inputs.hidden, inputs.target_hidden][:sides]
    bias = [] if inputs.code is None else [inputs.code, inputs.w2]

    def kernel(span_ref, head_ref, *refs):
        take = iter(refs)
        some = lambda like: [next(take) for _ in like]  # noqa: E731
        position_refs, bias_refs, number_refs, result_refs = map(some, (positions, bias, numbers, out_type))
        w_ref, x_ref, arrived, bias_arrived, numbers_arrived = some(range(5))
        known_refs, value_refs = some(numbers), some(of_values)
        # Blocks of the same tile follow each other, so that the head's rows come from the cache but once.
        place, here = jax.lax.axis_index("tile"), pl.ds(jax.lax.axis_index("rows") * ROWS, ROWS)
        first = span_ref[0] * LINES + place * VOCAB
        start = jnp.minimum(first, vocab - VOCAB)  # the last tile begins early

        def products(sides_refs, weight_ref, arrived):
            """weight @ side for every side, [tokens, positions] each; a slice of the weight is read once for all."""
            steps = weight_ref.shape[1] // DEPTH

            def fetch(step):
                slot, columns = jax.lax.rem(step, stages), pl.ds(step * DEPTH, DEPTH)
                source = weight_ref.at[pl.ds(start, VOCAB), columns]
                plgpu.copy_gmem_to_smem(source, w_ref.at[slot], arrived.at[slot])
                for i, side in enumerate(sides_refs):
                    plgpu.copy_gmem_to_smem(side.at[columns, here], x_ref.at[slot * sides + i], arrived.at[slot])

            for step in range(min(stages, steps)):
                fetch(jnp.int32(step))

            def multiply(*sums):
                @pl.loop(0, steps)
                def _(step):
                    slot, refill = jax.lax.rem(step, stages), step - 1 + stages
                    plgpu.barrier_wait(arrived.at[slot])
                    for i, total in enumerate(sums):
                        plgpu.wgmma(total, w_ref.at[slot], x_ref.at[slot * sides + i])
                    plgpu.wgmma_wait(len(sums))  # the step before is done with its slot
                    jax.lax.cond((step > 0) & (refill < steps), lambda: fetch(refill), lambda: None)

                return tuple(total[...] for total in sums)

            return pl.run_scoped(multiply, *[plgpu.WGMMAAccumulatorRef((VOCAB, ROWS), jnp.float32)] * len(sides_refs))

        for source, ref in zip(number_refs, known_refs):
            plgpu.copy_gmem_to_smem(source.at[here], ref, numbers_arrived, oob_mode=_INSIDE)
        # First: the compiler would keep halves of the cap's work in registers, and spill them, while this multiplies.
        added = products(bias_refs[:1], bias_refs[1], bias_arrived) if bias else ()
        base, *target = (tile.capped(x, softcap) for x in products(position_refs, head_ref, arrived))
        logits = base + added[0] if added else base
        ids = start + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
        ids = jnp.where(ids < jnp.maximum(span_ref[1], first), -2, ids)
        plgpu.barrier_wait(numbers_arrived)
        reads = [lambda ref=ref: _wide(ref[...]) for ref in known_refs]
        found = finish(ids, base, logits, target[0] if target else None, *reads)
        # A tile of gradients is as large as a slice of the weights, and those are done with.
        kept = value_refs or [w_ref.at[i] for i in range(len(found))]
        for ref, value in zip(kept, found):
            ref[...] = value.astype(ref.dtype)
        plgpu.commit_smem()
        for ref, result in zip(kept, result_refs):
            rows = place if value_refs else pl.ds(place * VOCAB, VOCAB)
            plgpu.copy_smem_to_gmem(ref, result.at[rows, here])
        plgpu.wait_smem_to_gmem(0)

    dtype = inputs.head.dtype
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=[
            plgpu.SMEM((stages, VOCAB, DEPTH), dtype),
            plgpu.SMEM((stages * sides, DEPTH, ROWS), dtype),
            plgpu.Barrier(num_arrivals=1 + sides, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=len(numbers)),
            *(plgpu.SMEM((ROWS,), x.dtype) for x in numbers),
            *(plgpu.SMEM((ROWS,), jnp.float32) for _ in of_values),
        ],
        grid=(tiles, count // ROWS),
        grid_names=("tile", "rows"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name=name,
    )(span, inputs.head, *positions, *bias, *(x[:, 0] for x in numbers))
