"""The left-to-right loop in plain jax: the definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import sampling

_EXACT = jax.lax.Precision.HIGHEST


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
) -> tuple[jax.Array, jax.Array]:
    """Draws a block of tokens; see `api.markov_sample`."""
    batch, steps, _ = base_logits.shape
    divisor = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    state = None if w1 is None else jnp.zeros((batch, w1.shape[1]), jnp.float32)
    previous, tokens, logits = anchor_ids, [], []
    for k in range(steps):
        step_logits = base_logits[:, k].astype(jnp.float32)
        if kind != "none":
            assert w1 is not None
            assert w2 is not None
            embedded = w1[previous].astype(jnp.float32)
            code, state = _step(kind, None if hidden is None else hidden[:, k], embedded, state, weight, bias)
            rows = w2 if index is None else w2[index[:, k]]
            step_logits += jnp.einsum(
                "br,vr->bv" if index is None else "br,bvr->bv",
                code.astype(w2.dtype),
                rows,
                precision=_EXACT,
                preferred_element_type=jnp.float32,
            )
        step_logits /= divisor
        drawn = sampling.sample_weights(jax.nn.softmax(step_logits, axis=-1), uniforms[:, k])
        chosen = jnp.where(temperature > 0, drawn, sampling.argmax(step_logits))
        if index is not None:
            chosen = jnp.take_along_axis(index[:, k], chosen[:, None], axis=1)[:, 0]
        previous = chosen if vocab is None else vocab[chosen]
        tokens.append(previous)
        logits.append(step_logits)
    return jnp.stack(tokens, axis=1), jnp.stack(logits, axis=1)


def _step(kind, hidden, embedded, state, weight, bias):
    """One step of the head: [B, D], [B, R], [B, R] -> code [B, R], state [B, R]."""
    if kind == "vanilla":
        return embedded, state
    hidden = hidden.astype(jnp.float32)
    inputs = [hidden, embedded] if kind == "gated" else [state, embedded, hidden]
    joint = jnp.matmul(jnp.concatenate(inputs, axis=-1), weight.astype(jnp.float32).T, precision=_EXACT)
    joint += bias.astype(jnp.float32)
    if kind == "gated":
        return embedded * jax.nn.sigmoid(joint), state
    gate, candidate, output = jnp.split(joint, 3, axis=-1)
    keep = jax.nn.sigmoid(gate)
    return jnp.tanh(output), keep * state + (1.0 - keep) * jnp.tanh(candidate)
