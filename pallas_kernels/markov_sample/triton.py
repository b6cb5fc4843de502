"""The candidate form for the Triton route: one program per row, its step's logits in registers.

A program gathers the rows of W2 that its candidates name, by pointer. The whole vocabulary is not for this kernel: a
step needs all programs' results before the next can begin, and one program alone would stream W2 at a fraction of the
memory's speed.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.markov_sample import tile


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a program is cut.

    Attributes:
      columns: columns of a weight matrix that are read at a time, a power of two that divides R.
      warps: warps per program.
    """

    columns: int
    warps: int

    @classmethod
    def for_shape(cls, candidates: int) -> Tiles:
        """Keeps about 64 values of a [candidates, columns] piece in each thread's registers."""
        return cls(columns=16, warps=4 if candidates <= 512 else 8 if candidates <= 1024 else 16)


def refuses(kind: str, candidates: int | None, rank: int) -> str:
    """Says why this kernel can't take a shape, "" if it can; `candidates` is None for the whole vocabulary."""
    if candidates is None:
        return "the whole draft vocabulary (draft from a list of candidates)"
    if candidates > 4096:
        return f"{candidates} candidates, more than the 4096 that fit the registers"
    if kind != "none" and rank % 16:
        return f"a rank of {rank}, not a multiple of 16"
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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Draws a block of tokens; see `api.markov_sample`."""
    batch, steps, size = base_logits.shape
    operands = {
        "base": base_logits,
        "anchor": anchor_ids,
        "temperature": temperature,
        "uniforms": uniforms,
        "ids": index if vocab is None else vocab[index],
    }
    rank = 0
    if kind != "none":
        assert w1 is not None
        assert w2 is not None
        rank = w1.shape[1]
        operands |= {"index": index, "w1": w1, "w2": w2}
    if tile.PARTS[kind]:
        assert hidden is not None
        assert weight is not None
        assert bias is not None
        operands["fixed"], operands["weights"] = tile.split_head(kind, hidden, weight, bias, rank)
    tiles = Tiles.for_shape(size)
    kernel = functools.partial(_kernel, names=(*operands, "tokens", "logits"), kind=kind, rank=rank, tiles=tiles)
    tokens, logits = pl.pallas_call(
        kernel,
        grid=(batch,),
        out_shape=(
            jax.ShapeDtypeStruct((batch, steps), jnp.int32),
            jax.ShapeDtypeStruct((batch, steps, size), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=2),
        interpret=interpret,
        name="markov_sample",
    )(*operands.values())
    return tokens, logits


def _kernel(*refs, names: tuple[str, ...], kind: str, rank: int, tiles: Tiles):
    """Walks through one row's block."""
    ref = dict(zip(names, refs))
    row = pl.program_id(0)
    _, steps, size = ref["base"].shape
    lanes = jnp.arange(pl.next_power_of_2(size))
    inside = jnp.minimum(lanes, size - 1)  # beyond the list the last candidate is read again, and masked
    ranks = jnp.arange(pl.next_power_of_2(max(rank, 1)))
    within = jnp.minimum(ranks, max(rank - 1, 0))
    temperature = ref["temperature"][row]

    def product(weights_ref, leading: tuple[int, ...], rows: jax.Array, vector: jax.Array) -> jax.Array:
        """Multiplies rows of a matrix by a vector that lies in registers: [n], [R] -> [n]."""

        def piece(i, total):
            columns = i * tiles.columns + jnp.arange(tiles.columns)
            taken = jnp.sum(jnp.where(columns[:, None] == ranks[None, :], vector[None, :], 0.0), axis=1)
            matrix = weights_ref[(*leading, rows[:, None], columns[None, :])].astype(jnp.float32)
            return total + jnp.sum(matrix * taken[None, :], axis=1)

        return jax.lax.fori_loop(0, rank // tiles.columns, piece, jnp.zeros(rows.shape, jnp.float32))

    def body(k, carry):
        previous, state = carry
        logits = ref["base"][row, k, inside].astype(jnp.float32)
        if kind != "none":
            embedded = ref["w1"][previous, within].astype(jnp.float32)
            parts = []
            for part in range(tile.PARTS[kind]):
                total = ref["fixed"][k, part, row, within]
                for i, vector in enumerate((state, embedded)[-tile.INPUTS[kind] :]):
                    total += product(ref["weights"], (i, part), within, vector)
                parts.append(total)
            code, state = tile.step(kind, embedded, state, parts)
            code = code.astype(ref["w2"].dtype).astype(jnp.float32)
            logits += product(ref["w2"], (), ref["index"][row, k, inside], code)
        logits = jnp.where(lanes < size, logits / jnp.where(temperature > 0, temperature, 1.0), -jnp.inf)
        plgpu.store(ref["logits"].at[row, k, lanes], logits, mask=lanes < size)
        top, best = tile.first_maximum(logits[None, :])
        weights = jnp.exp(logits[None, :] - top)
        goal = ref["uniforms"][row, k] * jnp.sum(weights, axis=1, keepdims=True)
        chosen = jnp.sum(jnp.where(temperature > 0, tile.inverse_cdf(weights, goal), best))
        token = ref["ids"][row, k, jnp.minimum(chosen, size - 1)]
        ref["tokens"][row, k] = token
        return token, state

    jax.lax.fori_loop(0, steps, body, (ref["anchor"][row], jnp.zeros(ranks.shape, jnp.float32)))
