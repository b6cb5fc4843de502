"""The loop over lists of candidates for Mosaic GPU: one block per row, the rows of W2 stream in ahead of the draws.

Which rows of W2 a step needs is known before its token: copies, one per candidate's row, run through all steps without
waiting for a draw. Warpgroups share the candidates; the first one draws.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.markov_sample import tile

STAGES = 2  # tiles that a warpgroup has in flight
LANES = 128  # threads of a warpgroup
_SMEM = 220 * 1024
_INSIDE = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a row's candidates are cut.

    Attributes:
      rows: rows of W2 that a warpgroup takes at a time, a multiple of 4.
      groups: warpgroups.
      vector: candidates are filled up to a multiple of this, so that each thread has as many of them.
    """

    rows: int
    groups: int
    vector: int = LANES

    @classmethod
    def for_shape(cls, kind: str, steps: int, candidates: int, rank: int, itemsize: int) -> Tiles | None:
        """Returns the largest tiles that a block's shared memory takes, None if there are none."""
        groups = 1 if kind == "none" else 4
        for rows in (32, 16, 8):
            tiles = cls(rows, groups)
            if smem_bytes(kind, steps, candidates, rank, itemsize, tiles) <= _SMEM:
                return tiles
        return None

    def padded(self, candidates: int) -> int:
        """Returns how many candidates are looked at: whole tiles for every warpgroup, whole vectors for the draw."""
        multiple = math.lcm(self.rows * self.groups, self.vector)
        return -(-candidates // multiple) * multiple


def smem_bytes(kind: str, steps: int, candidates: int, rank: int, itemsize: int, tiles: Tiles) -> int:
    """Returns the shared memory of a block: tiles in flight, the row's indices, a step's products and vectors."""
    used = plgpu.CompilerParams().reduction_scratch_bytes + 1024
    if kind != "none":
        padded = tiles.padded(candidates)
        used += STAGES * tiles.groups * tiles.rows * rank * itemsize + (steps + 1) * padded * 4
        used += (3 + tile.PARTS[kind]) * rank * 4
    return used


def refuses(kind: str, steps: int, candidates: int | None, rank: int, itemsize: int) -> str:
    """Says why this kernel can't take a shape, "" if it can; `candidates` is None for the whole vocabulary."""
    if candidates is None:
        return "the whole draft vocabulary (draft from a list of candidates)"
    if candidates > 4096:
        return f"{candidates} candidates, more than the 4096 that fit the registers"
    if kind != "none" and rank != LANES and rank % (2 * LANES):
        return f"a rank of {rank}, neither {LANES} nor a multiple of {2 * LANES}"
    if Tiles.for_shape(kind, steps, candidates, rank, itemsize) is None:
        return f"{steps} steps of {candidates} candidates at rank {rank}: more than a block's shared memory"
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
    index: jax.Array,
    vocab: jax.Array | None = None,
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Draws a block of tokens; see `api.markov_sample`."""
    batch, steps, size = base_logits.shape
    rank, itemsize = (0, 4) if w1 is None else (w1.shape[1], w1.dtype.itemsize)
    tiles = tiles or Tiles.for_shape(kind, steps, size, rank, itemsize)
    assert tiles is not None
    padded = tiles.padded(size)
    fill = lambda x, value: jnp.pad(x, ((0, 0), (0, 0), (0, padded - size)), constant_values=value)  # noqa: E731
    operands = {
        "base": fill(base_logits.astype(jnp.float32), -jnp.inf),
        "anchor": anchor_ids.astype(jnp.int32),
        "temperature": temperature,
        "uniforms": uniforms,
        "ids": index if vocab is None else vocab[index],
    }
    scratch: dict[str, Any] = {}
    if kind != "none":
        assert w1 is not None
        assert w2 is not None
        operands |= {"index": fill(index, 0), "w1": w1, "w2": w2}
        scratch |= {
            "listed": plgpu.SMEM((steps, padded), jnp.int32),
            "rows": plgpu.SMEM((tiles.groups * STAGES * tiles.rows, rank), w2.dtype),
            "product": plgpu.SMEM((padded,), jnp.float32),
            "vectors": plgpu.SMEM((2, rank), jnp.float32),  # the state and W1[x_{k-1}]
            "code": plgpu.SMEM((rank,), jnp.float32),
            "arrived": plgpu.Barrier(num_arrivals=tiles.rows, num_barriers=tiles.groups * STAGES),
            "met": plgpu.Barrier(num_arrivals=tiles.groups),
        }
    if tile.PARTS[kind]:
        assert hidden is not None
        assert weight is not None
        assert bias is not None
        operands["fixed"], operands["weights"] = tile.split_head(kind, hidden, weight, bias, rank)
        scratch["parts"] = plgpu.SMEM((tile.PARTS[kind], rank), jnp.float32)
    names = (*operands, "tokens", "logits", *scratch)

    def kernel(*refs):
        _kernel(SimpleNamespace(**dict(zip(names, refs))), kind, size, tiles, bool(interpret))

    tokens, logits = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((batch, steps), jnp.int32),
            jax.ShapeDtypeStruct((batch, steps, padded), jnp.float32),
        ),
        scratch_types=list(scratch.values()),
        grid=(batch,),
        grid_names=("row",),
        num_threads=tiles.groups,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name="markov_sample",
    )(*operands.values())
    return tokens, logits[..., :size]


def _kernel(ref: SimpleNamespace, kind: str, size: int, tiles: Tiles, interpret: bool):
    """Walks through one row's block."""
    row, group = jax.lax.axis_index("row"), jax.lax.axis_index("group")
    _, steps, padded = ref.base.shape
    with_head = kind != "none"
    share = padded // (tiles.groups * tiles.rows)  # tiles of a warpgroup and step
    count = tiles.rows

    def together():
        plgpu.barrier_arrive(ref.met)
        plgpu.barrier_wait(ref.met)

    def first_of(j):
        return (j * tiles.groups + group) * count

    def slot_of(s):
        return group * STAGES + jax.lax.rem(s, STAGES)

    def fetch(s):
        k, first, slot = jax.lax.div(s, share), first_of(jax.lax.rem(s, share)), slot_of(s)

        def copy(i, _):
            source, target = ref.w2.at[pl.ds(ref.listed[k, first + i], 1)], ref.rows.at[pl.ds(slot * count + i, 1)]
            plgpu.copy_gmem_to_smem(source, target, ref.arrived.at[slot], oob_mode=_INSIDE)

        jax.lax.fori_loop(0, count, copy, None, unroll=8)

    if with_head:

        @pl.when(group == 0)
        def _():
            for k in range(steps):
                ref.listed[k] = ref.index[row, k]
            ref.vectors[0] = jnp.zeros(ref.code.shape, jnp.float32)

        together()
        for s in range(min(STAGES, steps * share)):
            fetch(jnp.int32(s))

    def body(k, previous):
        if with_head:
            pl.when(group == 0)(lambda: _put(ref.vectors, 1, ref.w1[previous].astype(jnp.float32)))
            if tile.PARTS[kind]:
                together()
                _activate(ref, kind, group, tiles, interpret)
                together()
            pl.when(group == 0)(lambda: _encode(ref, kind, row, k))
            together()

            def multiply(j, _):
                s = k * share + j
                slot = slot_of(s)
                plgpu.barrier_wait(ref.arrived.at[slot])
                total = _product(ref.rows.at[pl.ds(slot * count, count)], ref.code[...], interpret)
                ref.product[pl.ds(first_of(j), count)] = total
                plgpu.commit_smem()  # copies come after what was read here
                jax.lax.cond(s + STAGES < steps * share, lambda: fetch(s + STAGES), lambda: None)

            jax.lax.fori_loop(0, share, multiply, None)
            together()
        return jax.lax.cond(group == 0, lambda: _draw(ref, row, k, size), lambda: previous)

    jax.lax.fori_loop(0, steps, body, ref.anchor[row])


def _activate(ref: SimpleNamespace, kind: str, group: jax.Array, tiles: Tiles, interpret: bool):
    """Computes a warpgroup's share of the pre-activations of the head's parts."""
    rank = ref.code.shape[0]
    inputs = tile.INPUTS[kind]
    for part in range(tile.PARTS[kind]):

        def add(j, _, part=part):
            rows = pl.ds((j * tiles.groups + group) * tiles.rows, tiles.rows)
            total = None
            for i in range(inputs):
                found = _product(ref.weights.at[i, part, rows], ref.vectors[2 - inputs + i], interpret)
                total = found if total is None else total + found
            ref.parts[part, rows] = total

        jax.lax.fori_loop(0, rank // (tiles.groups * tiles.rows), add, None)


def _encode(ref: SimpleNamespace, kind: str, row: jax.Array, k: jax.Array):
    """Takes the head a step further: the code of the position's bias, rounded as W2 is, and the state."""
    parts = [ref.parts[part] + ref.fixed[k, part, row] for part in range(tile.PARTS[kind])]
    code, state = tile.step(kind, ref.vectors[1], ref.vectors[0], parts)
    ref.code[...] = code.astype(ref.w2.dtype).astype(jnp.float32)
    ref.vectors[0] = state


def _product(rows_ref, vector: jax.Array, interpret: bool) -> jax.Array:
    """Multiplies rows by a vector in float32: [n, R], [R] -> [n]. A warp takes a row at a time."""
    if interpret:
        rows = rows_ref[...]
    else:
        from jax.experimental.mosaic.gpu.fragmented_array import Tiling  # not public: where it is gone, the probe fails

        rank = rows_ref.shape[1]
        width = min(4, rank // 32)
        tiling = Tiling(((4, 32 * width), (width,)))
        layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
        whole = {"idx": ()} if "idx" in inspect.signature(plgpu.load).parameters else {}  # until jax 0.12
        rows = plgpu.load(rows_ref, **whole, layout=layout, optimized=False)
    return jnp.sum(rows.astype(jnp.float32) * jax.lax.broadcast_in_dim(vector, rows.shape, (1,)), axis=1)


def _draw(ref: SimpleNamespace, row, k, size: int) -> jax.Array:
    """Draws one token from the step's logits and stores both."""
    temperature = ref.temperature[row]
    sampled = temperature > 0
    logits = ref.base[row, k]
    if hasattr(ref, "product"):
        logits += ref.product[...]
    logits = logits / jnp.where(sampled, temperature, 1.0)
    ref.logits[row, k] = logits
    lane = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    top = jnp.max(logits)
    best = jnp.min(jnp.where(logits == top, lane, size))
    weights = jnp.exp(logits - top)
    goal = ref.uniforms[row, k] * jnp.sum(weights)
    below = jnp.int32(0)  # as `tile.inverse_cdf`
    for bit in reversed(range(logits.shape[0].bit_length())):
        tried = below + (1 << bit)
        below = jnp.where(jnp.sum(jnp.where(lane < tried, weights, 0.0)) <= goal, tried, below)
    last = jnp.max(jnp.where(weights > 0, lane, 0))
    chosen = jnp.minimum(jnp.where(sampled, jnp.minimum(below, last), best), size - 1)  # a row of NaN stays inside
    token = ref.ids[row, k, chosen]
    ref.tokens[row, k] = token
    return token


def _put(ref, place: int, value: jax.Array):
    """Writes in the body of a condition, which has no result."""
    ref[place] = value
