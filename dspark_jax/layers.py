"""The layers of every model here: RMSNorm, linear maps, attention, gated MLP. One copy for all.

Activations are two-dimensional: all tokens of all rows are flattened into n = B * T, because matrix products do
not care about rows; only attention does. They come in two layouts, chosen once per model:

  feature_major  [D, n]: weight [out, in] @ x. On a CPU, where a step of a few tokens is bound by reading the weights,
                 each of them is then read about once: by `pallas_kernels.skinny_matmul` up to 8 tokens, else by XLA.
  token_major    [n, D]: x @ weight^T, the usual form on accelerators.

Only the functions at the top of this file know the difference. Weights are [out, in], as Hugging Face stores
them; queries, keys and values share one matrix, and so do gate and up: fewer, larger reads.
"""

from __future__ import annotations

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import rope
from dspark_jax.attention import BlockMask, attend, attention_spread
from dspark_jax.config import DecoderConfig
from pallas_kernels.precision import product_precision
from pallas_kernels.skinny_matmul.api import skinny_matmul

Layout = Literal["feature_major", "token_major"]


def default_layout() -> Layout:
    """Returns the layout that suits the default backend (see the module's docstring)."""
    return "feature_major" if jax.default_backend() == "cpu" else "token_major"


def linear(weight: jax.Array, x: jax.Array, layout: Layout) -> jax.Array:
    """Applies `weight` [out, in] to activations: [in, n] -> [out, n] or [n, in] -> [n, out]."""
    if layout == "feature_major":
        return skinny_matmul(weight, x)
    return jnp.matmul(x, weight.T, precision=product_precision())


def to_tokens(x: jax.Array, layout: Layout) -> jax.Array:
    """Returns activations as [n, D], whatever their layout."""
    # The barriers keep XLA from folding the transpose into the neighbouring product, which would change its form back.
    return jax.lax.optimization_barrier(x).T if layout == "feature_major" else x


def from_tokens(x: jax.Array, layout: Layout) -> jax.Array:
    """Turns [n, D] into activations of the layout."""
    return jax.lax.optimization_barrier(x.T) if layout == "feature_major" else x


def split_features(x: jax.Array, sizes: tuple[int, ...], layout: Layout) -> list[jax.Array]:
    """Splits activations along their features into pieces of the given sizes."""
    bounds = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return jnp.split(x, bounds, axis=0 if layout == "feature_major" else 1)


def join_features(first: jax.Array, second: jax.Array, layout: Layout) -> jax.Array:
    """Puts two activations of the same tokens beside each other."""
    return jnp.concatenate([first, second], axis=0 if layout == "feature_major" else 1)


def rms_norm(x: jax.Array, scale: jax.Array | None, eps: float, axis: int = -1, plus_one: bool = False) -> jax.Array:
    """Root-mean-square norm along `axis`, computed in float32 (Zhang & Sennrich, 2019).

    Args:
      x: any shape.
      scale: one factor for every entry along the axis, or None for none.
      eps: added to the mean square.
      axis: what is normed.
      plus_one: the factors are 1 + scale (Gemma 3).
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=axis, keepdims=True) + eps)
    if scale is not None:
        shape = [1] * x.ndim
        shape[axis] = -1
        factors = scale.astype(jnp.float32).reshape(shape)
        normed = normed * (factors + 1.0 if plus_one else factors)
    return normed.astype(x.dtype)


def embed(table: jax.Array, token_ids: jax.Array, config: DecoderConfig, layout: Layout) -> jax.Array:
    """Returns the embeddings of tokens [n] as activations, scaled if the family does so."""
    x = table[token_ids]
    if config.scale_embeddings:
        x = x * jnp.asarray(config.width**0.5, x.dtype)  # rounded to the weights' dtype, as Gemma was trained
    return from_tokens(x, layout)


def soft_cap(logits: jax.Array, cap: float) -> jax.Array:
    """Keeps logits within -cap..cap: cap tanh(logits / cap); 0 = no cap."""
    return cap * jnp.tanh(logits / cap) if cap else logits


class Linear(nn.Module):
    """A weight [out, in], and a bias [out] if asked for."""

    features_out: int
    features_in: int
    layout: Layout
    use_bias: bool = False
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        """Declares the parameters."""
        self.weight = self.param(
            "weight", nn.initializers.normal(0.02), (self.features_out, self.features_in), self.dtype
        )
        if self.use_bias:
            self.bias = self.param("bias", nn.initializers.zeros, (self.features_out,), self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to activations."""
        y = linear(self.weight, x, self.layout)
        if self.use_bias:
            y = y + (self.bias[:, None] if self.layout == "feature_major" else self.bias)
        return y


class RMSNorm(nn.Module):
    """RMSNorm over the features of activations; `plus_one` as in `rms_norm`."""

    width: int
    eps: float
    layout: Layout
    dtype: jnp.dtype = jnp.float32
    plus_one: bool = False

    def setup(self):
        """Declares the parameters."""
        self.weight = self.param("weight", nn.initializers.constant(1 - self.plus_one), (self.width,), self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to activations."""
        return rms_norm(x, self.weight, self.eps, 0 if self.layout == "feature_major" else 1, self.plus_one)


def decoder_norm(config: DecoderConfig, layout: Layout, dtype) -> RMSNorm:
    """Returns the norm over the residual stream that a decoder of this config has."""
    return RMSNorm(config.width, config.norm_eps, layout, dtype, config.norm_plus_one)


class Attention(nn.Module):
    """Grouped-query attention with RoPE over explicit context keys and values.

    Attributes:
      config: the decoder that the layer belongs to.
      layout: layout of the activations.
      dtype: dtype of the weights.
      index: which of the decoder's layers it is: some slide over a window, with heads and RoPE of their own.
      features_in: size of the activations that come in; 0 = the body's width.
    """

    config: DecoderConfig
    layout: Layout
    dtype: jnp.dtype = jnp.float32
    index: int = 0
    features_in: int = 0

    def setup(self):
        """Declares the parameters."""
        c, own = self.config, self.config.attention(self.index)
        self.own = own
        self.query_size = c.num_heads * own.head_dim
        self.kv_size = own.num_kv_heads * own.head_dim
        self.sizes = (self.query_size, self.kv_size) + (() if own.keys_as_values else (self.kv_size,))
        self.qkv = Linear(sum(self.sizes), self.features_in or c.width, self.layout, c.qkv_bias, self.dtype)
        self.o = Linear(c.width, self.query_size, self.layout, dtype=self.dtype)
        self.scale = c.attention_scale or own.head_dim**-0.5
        self.inverse_frequency = rope.inverse_frequencies(
            own.head_dim, own.rope_theta, own.rope_scaling, own.rope_share
        )
        if c.qk_norm:
            ones = nn.initializers.constant(1 - c.norm_plus_one)
            self.q_norm = self.param("q_norm", ones, (own.head_dim,), self.dtype)
            self.k_norm = self.param("k_norm", ones, (own.head_dim,), self.dtype)

    def _rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return rope.rotate(x, positions, self.inverse_frequency, self.own.rope_scaling.attention_factor)

    def _keys_values(self, k: jax.Array, v: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Splits flat keys and values into heads, norms both and rotates the keys: [n, G*H] -> [B, T, G, H]."""
        c, shape = self.config, (*positions.shape, self.own.num_kv_heads, self.own.head_dim)
        k, v = k.reshape(shape), v.reshape(shape)
        if c.qk_norm:
            k = rms_norm(k, self.k_norm, c.norm_eps, plus_one=c.norm_plus_one)
        if c.value_norm:
            v = rms_norm(v, None, c.norm_eps)
        return self._rotate(k, positions), v

    def project_context(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of injected context activations.

        Args:
          x: activations of B * T tokens.
          positions: [B, T].

        Returns:
          keys, values: [B, G, T, H] each.
        """
        flat = to_tokens(linear(self.qkv.weight[self.query_size :], x, self.layout), self.layout)
        if self.config.qkv_bias:
            flat = flat + self.qkv.bias[self.query_size :]
        k, v = (flat, flat) if self.own.keys_as_values else jnp.split(flat, 2, axis=1)
        keys, values = self._keys_values(k, v, positions)
        return jnp.transpose(keys, (0, 2, 1, 3)), jnp.transpose(values, (0, 2, 1, 3))

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of tokens, normed and rotated.

        Args:
          x: activations of B * T tokens.
          positions: [B, T].

        Returns:
          [B, T, N, H], [B, T, G, H], [B, T, G, H].
        """
        c = self.config
        q, k, *v = (to_tokens(part, self.layout) for part in split_features(self.qkv(x), self.sizes, self.layout))
        q = q.reshape(*positions.shape, c.num_heads, self.own.head_dim)
        if c.qk_norm:
            q = rms_norm(q, self.q_norm, c.norm_eps, plus_one=c.norm_plus_one)
        return self._rotate(q, positions), *self._keys_values(k, v[0] if v else k, positions)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        context_keys: jax.Array,
        context_values: jax.Array,
        visible: jax.Array,
        block_mask: BlockMask,
        first: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Mixes tokens with the context and with their own block.

        Args:
          x: activations of B * A * K tokens.
          positions: [B, A, K].
          context_keys: [B, G, S, H].
          context_values: [B, G, S, H].
          visible: [B, A], context slots each block sees.
          block_mask: as of `attention.attend`.
          first: [B, A], the first context slot each block sees; None = 0.

        Returns:
          Activations like x; the tokens' own keys and values [B, A*K, G, H].
        """
        own = self.own
        batch, blocks, size = positions.shape
        q, k, v = self.project(x, positions.reshape(batch, blocks * size))
        mixed = attend(
            q.reshape(batch, blocks, size, self.config.num_heads, own.head_dim),
            context_keys,
            context_values,
            visible,
            k.reshape(batch, blocks, size, own.num_kv_heads, own.head_dim),
            v.reshape(batch, blocks, size, own.num_kv_heads, own.head_dim),
            block_mask,
            self.scale,
            own.window,
            first,
        )
        mixed = from_tokens(mixed.reshape(batch * blocks * size, self.query_size), self.layout)
        return self.o(mixed), k, v

    def spread(self, x: jax.Array, positions: jax.Array, context_keys: jax.Array, visible: jax.Array) -> jax.Array:
        """How evenly tokens attend (`attention.attention_spread`).

        Args:
          x: activations of B * T tokens.
          positions: [B, T].
          context_keys: [B, G, S, H].
          visible: [B].

        Returns:
          [B, T] float32.
        """
        q, k, _ = self.project(x, positions)
        return attention_spread(q, context_keys, visible, k, self.scale, self.own.window)


class GatedMLP(nn.Module):
    """down(act(gate x) * up x) (Shazeer, 2020)."""

    config: DecoderConfig
    layout: Layout
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        """Declares the parameters."""
        c = self.config
        self.gate_up = Linear(2 * c.mlp_width, c.width, self.layout, dtype=self.dtype)
        self.down = Linear(c.width, c.mlp_width, self.layout, dtype=self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to activations."""
        gate, up = split_features(self.gate_up(x), (self.config.mlp_width,) * 2, self.layout)
        gate = jax.nn.silu(gate) if self.config.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return self.down(gate * up)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals; the same for targets and drafters. Attributes as of `Attention`."""

    config: DecoderConfig
    layout: Layout
    dtype: jnp.dtype = jnp.float32
    index: int = 0

    def setup(self):
        """Declares the parameters."""
        c = self.config
        norm = lambda: decoder_norm(c, self.layout, self.dtype)  # noqa: E731
        self.input_norm = norm()
        self.attention = Attention(c, self.layout, self.dtype, self.index)
        self.mlp_norm = norm()
        self.mlp = GatedMLP(c, self.layout, self.dtype)
        if c.sandwich_norms:
            self.attention_out_norm = norm()
            self.mlp_out_norm = norm()
        if c.layer_scalar:
            self.scalar = self.param("scalar", nn.initializers.ones, (1,), self.dtype)

    def project_context(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of injected context; see `Attention.project_context`."""
        return self.attention.project_context(x, positions)

    def __call__(self, x, positions, context_keys, context_values, visible, block_mask, first=None):
        """Arguments and results as `Attention.__call__`."""
        c = self.config
        x_norm = self.input_norm(x)
        mixed, k, v = self.attention(x_norm, positions, context_keys, context_values, visible, block_mask, first)
        x = x + (self.attention_out_norm(mixed) if c.sandwich_norms else mixed)
        added = self.mlp(self.mlp_norm(x))
        x = x + (self.mlp_out_norm(added) if c.sandwich_norms else added)
        return (x * self.scalar if c.layer_scalar else x), k, v
