"""The layers of every model here: RMSNorm, linear maps, RoPE, attention, gated MLP. One copy for all.

Activations are two-dimensional: all tokens of all rows are flattened into n = B * T, because matrix products do
not care about rows; only attention does. They come in two layouts, chosen once per model:

  feature_major  [D, n]: weight [out, in] @ x. On a CPU, where a step of a few tokens is bound by reading the weights,
                 XLA then reads each of them about once, however few the tokens.
  token_major    [n, D]: x @ weight^T, the usual form on accelerators.

Only the six functions at the top of this file know the difference. Weights are [out, in], as Hugging Face stores
them; queries, keys and values share one matrix, and so do gate and up: fewer, larger reads.
"""

from __future__ import annotations

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax.config import DecoderConfig

Layout = Literal["feature_major", "token_major"]

MASKED = -1e30  # a finite "minus infinity": a row that sees nothing stays free of NaN


def default_layout() -> Layout:
    """Returns the layout that suits the default backend (see the module's docstring)."""
    return "feature_major" if jax.default_backend() == "cpu" else "token_major"


def product_precision() -> jax.lax.Precision | None:
    """Returns the precision of matrix products: float32 means float32.

    Accelerators round the operands of float32 products unless told not to (to bfloat16 on TPU, to TensorFloat-32 on
    GPU), and then a block of tokens and single tokens may disagree about the argmax. Whoever prefers speed says so with
    `jax.default_matmul_precision`. Products of bfloat16 operands are not affected.
    """
    asked = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    return None if asked else jax.lax.Precision.HIGHEST


def linear(weight: jax.Array, x: jax.Array, layout: Layout) -> jax.Array:
    """Applies `weight` [out, in] to activations: [in, n] -> [out, n] or [n, in] -> [n, out]."""
    if layout == "feature_major":
        return jnp.matmul(weight, x, precision=product_precision())
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


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, axis: int = -1) -> jax.Array:
    """Root-mean-square norm along `axis`, computed in float32 (Zhang & Sennrich, 2019)."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=axis, keepdims=True) + eps)
    shape = [1] * x.ndim
    shape[axis] = -1
    return (normed * scale.astype(jnp.float32).reshape(shape)).astype(x.dtype)


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
    """RMSNorm over the features of activations."""

    width: int
    eps: float
    layout: Layout
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        """Declares the parameters."""
        self.weight = self.param("weight", nn.initializers.ones, (self.width,), self.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to activations."""
        return rms_norm(x, self.weight, self.eps, axis=0 if self.layout == "feature_major" else 1)


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates queries or keys by their positions (Su et al., 2021; rotate-half form).

    Frequencies and angles are float32 whatever the dtype of x: in bfloat16 positions beyond 256 collide.

    Args:
      x: [B, T, heads, H].
      positions: [B, T] int32.
      theta: base of the frequencies.
    """
    half = x.shape[-1] // 2
    inverse_frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)  # [H/2]
    angle = positions.astype(jnp.float32)[:, :, None, None] * inverse_frequency  # [B, T, 1, H/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend(
    queries: jax.Array,
    context_keys: jax.Array,
    context_values: jax.Array,
    visible: jax.Array,
    block_keys: jax.Array,
    block_values: jax.Array,
    block_mask: jax.Array,
) -> jax.Array:
    """Attention of blocks of tokens to a shared context and to their own block.

    A target step is one block (A = 1) with a causal mask; a drafter's training step is A blocks per row over one
    context. Softmax in float32 over context and block together.

    Args:
      queries: [B, A, K, N, H].
      context_keys: [B, G, S, H].
      context_values: [B, G, S, H].
      visible: [B, A] int32; block a sees context slots < visible.
      block_keys: [B, A, J, G, H].
      block_values: [B, A, J, G, H].
      block_mask: [K, J] bool, query i sees key j of its own block.

    Returns:
      [B, A, K, N, H].
    """
    batch, blocks, size, heads, dim = queries.shape
    groups, slots = context_keys.shape[1:3]
    ratio, exact = heads // groups, product_precision()
    own = block_keys.shape[2]
    if blocks * size * own == 1 and batch > 4:
        return _attend_single(queries, context_keys, context_values, visible, block_keys, block_values)
    grouped = queries.reshape(batch, blocks, size, groups, ratio, dim)
    grouped = jnp.transpose(grouped, (0, 3, 1, 4, 2, 5))  # [B, G, A, N/G, K, H]
    scale = dim**-0.5
    flat = grouped.reshape(batch, groups, blocks * ratio * size, dim)
    to_context = jnp.einsum("bgqh,bgsh->bgqs", flat, context_keys, preferred_element_type=jnp.float32, precision=exact)
    to_context = to_context.reshape(batch, groups, blocks, ratio * size, slots) * scale
    seen = jnp.arange(slots) < visible[:, :, None]  # [B, A, S]
    to_context = jnp.where(seen[:, None, :, None, :], to_context, MASKED)
    keys = jnp.transpose(block_keys, (0, 3, 1, 2, 4))  # [B, G, A, K, H]
    values = jnp.transpose(block_values, (0, 3, 1, 2, 4))
    to_block = jnp.einsum("bgarkh,bgajh->bgarkj", grouped, keys, preferred_element_type=jnp.float32, precision=exact)
    to_block = jnp.where(block_mask, to_block * scale, MASKED).reshape(batch, groups, blocks, ratio * size, own)

    # One softmax over both parts, without concatenating them: shared maximum, shared sum.
    top = jnp.maximum(to_context.max(-1, keepdims=True), to_block.max(-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    weight_context, weight_block = jnp.exp(to_context - top), jnp.exp(to_block - top)
    total = weight_context.sum(-1, keepdims=True) + weight_block.sum(-1, keepdims=True)
    from_context = jnp.einsum(
        "bgqs,bgsh->bgqh",
        weight_context.reshape(batch, groups, blocks * ratio * size, slots).astype(context_values.dtype),
        context_values,
        preferred_element_type=jnp.float32,
        precision=exact,
    ).reshape(batch, groups, blocks, ratio * size, dim)
    from_block = jnp.einsum(
        "bgaqj,bgajh->bgaqh",
        weight_block.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
        precision=exact,
    )
    mixed = ((from_context + from_block) / total).astype(queries.dtype)
    mixed = mixed.reshape(batch, groups, blocks, ratio, size, dim)
    return jnp.transpose(mixed, (0, 2, 4, 1, 3, 5)).reshape(queries.shape)


def _attend_single(queries, context_keys, context_values, visible, block_keys, block_values) -> jax.Array:
    """`attend` for one token per row, as multiply-and-sum.

    A batch of products with one row each is bound by reading the cache; on a CPU it uses all cores in this form only.
    """
    batch, _, _, heads, dim = queries.shape
    groups, slots = context_keys.shape[1:3]
    q = queries.reshape(batch, groups, heads // groups, dim).astype(jnp.float32) * dim**-0.5
    own_key = block_keys.reshape(batch, groups, 1, dim)
    own_value = block_values.reshape(batch, groups, 1, dim)
    to_context = jnp.sum(q[:, :, :, None] * context_keys[:, :, None], axis=-1)  # [B, G, N/G, S]
    to_context = jnp.where(jnp.arange(slots) < visible[:, :, None, None], to_context, MASKED)
    to_self = jnp.sum(q * own_key, axis=-1, keepdims=True)
    top = jnp.maximum(to_context.max(-1, keepdims=True), to_self)
    weight_context, weight_self = jnp.exp(to_context - top), jnp.exp(to_self - top)
    total = weight_context.sum(-1, keepdims=True) + weight_self
    mixed = jnp.sum(weight_context[..., None] * context_values[:, :, None], axis=-2) + weight_self * own_value
    return (mixed / total).astype(queries.dtype).reshape(queries.shape)


def attention_spread(
    queries: jax.Array, context_keys: jax.Array, visible: jax.Array, block_keys: jax.Array
) -> jax.Array:
    """Says how evenly each token of a causal block attends: entropy of its weights over the log of what it sees.

    Args:
      queries: [B, T, N, H].
      context_keys: [B, G, S, H].
      visible: [B] int32; slots < visible are seen.
      block_keys: [B, T, G, H].

    Returns:
      [B, T] float32 in 0..1, the mean over heads; 0 for a token that sees itself only.
    """
    batch, size, heads, dim = queries.shape
    groups, slots = context_keys.shape[1:3]
    grouped = queries.reshape(batch, size, groups, heads // groups, dim).astype(jnp.float32) * dim**-0.5
    to_context = jnp.einsum("btgrh,bgsh->btgrs", grouped, context_keys)
    to_block = jnp.einsum("btgrh,bjgh->btgrj", grouped, block_keys)
    seen = jnp.arange(slots) < visible[:, None, None, None, None]
    causal = jnp.tril(jnp.ones((size, size), bool))[:, None, None]
    scores = [jnp.where(seen, to_context, MASKED), jnp.where(causal, to_block, MASKED)]
    log_weights = jax.nn.log_softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    entropy = -jnp.sum(jnp.exp(log_weights) * log_weights, axis=-1).mean((2, 3))  # a masked entry adds 0 * -1e30 = 0
    count = visible[:, None] + jnp.arange(1, size + 1)
    return jnp.clip(entropy / jnp.log(jnp.maximum(count, 2)), 0.0, 1.0)


class Attention(nn.Module):
    """Grouped-query attention with RoPE and optional QK norm, over explicit context keys and values.

    Attributes:
      config: the body's shape.
      layout: layout of the activations.
      dtype: dtype of the weights.
      features_in: size of the activations that come in; 0 = the body's width.
    """

    config: DecoderConfig
    layout: Layout
    dtype: jnp.dtype = jnp.float32
    features_in: int = 0

    def setup(self):
        """Declares the parameters."""
        c = self.config
        self.query_size = c.num_heads * c.head_dim
        self.kv_size = c.num_kv_heads * c.head_dim
        features_in = self.features_in or c.width
        self.qkv = Linear(self.query_size + 2 * self.kv_size, features_in, self.layout, dtype=self.dtype)
        self.o = Linear(c.width, self.query_size, self.layout, dtype=self.dtype)
        if c.qk_norm:
            self.q_norm = self.param("q_norm", nn.initializers.ones, (c.head_dim,), self.dtype)
            self.k_norm = self.param("k_norm", nn.initializers.ones, (c.head_dim,), self.dtype)

    def _keys(self, k: jax.Array, positions: jax.Array) -> jax.Array:
        """Splits flat keys into heads, norms and rotates them: [n, G*H] -> [B, T, G, H]."""
        k = k.reshape(*positions.shape, self.config.num_kv_heads, self.config.head_dim)
        if self.config.qk_norm:
            k = rms_norm(k, self.k_norm, self.config.norm_eps)
        return rope(k, positions, self.config.rope_theta)

    def project_context(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of injected context activations.

        Args:
          x: activations of B * T tokens.
          positions: [B, T].

        Returns:
          keys, values: [B, G, T, H] each.
        """
        flat = to_tokens(linear(self.qkv.weight[self.query_size :], x, self.layout), self.layout)
        k, v = jnp.split(flat, 2, axis=1)
        keys = self._keys(k, positions)
        values = v.reshape(*positions.shape, self.config.num_kv_heads, self.config.head_dim)
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
        q, k, v = split_features(self.qkv(x), (self.query_size, self.kv_size, self.kv_size), self.layout)
        q = to_tokens(q, self.layout).reshape(*positions.shape, c.num_heads, c.head_dim)
        if c.qk_norm:
            q = rms_norm(q, self.q_norm, c.norm_eps)
        k = self._keys(to_tokens(k, self.layout), positions)
        v = to_tokens(v, self.layout).reshape(*positions.shape, c.num_kv_heads, c.head_dim)
        return rope(q, positions, c.rope_theta), k, v

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        context_keys: jax.Array,
        context_values: jax.Array,
        visible: jax.Array,
        block_mask: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Mixes tokens with the context and with their own block.

        Args:
          x: activations of B * A * K tokens.
          positions: [B, A, K].
          context_keys: [B, G, S, H].
          context_values: [B, G, S, H].
          visible: [B, A], context slots each block sees.
          block_mask: [K, K] bool.

        Returns:
          Activations like x; the tokens' own keys and values [B, A*K, G, H].
        """
        c = self.config
        batch, blocks, size = positions.shape
        q, k, v = self.project(x, positions.reshape(batch, blocks * size))
        mixed = attend(
            q.reshape(batch, blocks, size, c.num_heads, c.head_dim),
            context_keys,
            context_values,
            visible,
            k.reshape(batch, blocks, size, c.num_kv_heads, c.head_dim),
            v.reshape(batch, blocks, size, c.num_kv_heads, c.head_dim),
            block_mask,
        )
        mixed = from_tokens(mixed.reshape(batch * blocks * size, self.query_size), self.layout)
        return self.o(mixed), k, v


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x) (Shazeer, 2020)."""

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
        return self.down(jax.nn.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals; the same for targets and drafters."""

    config: DecoderConfig
    layout: Layout
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        """Declares the parameters."""
        c = self.config
        self.input_norm = RMSNorm(c.width, c.norm_eps, self.layout, self.dtype)
        self.attention = Attention(c, self.layout, self.dtype)
        self.mlp_norm = RMSNorm(c.width, c.norm_eps, self.layout, self.dtype)
        self.mlp = GatedMLP(c, self.layout, self.dtype)

    def project_context(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of injected context; see `Attention.project_context`."""
        return self.attention.project_context(x, positions)

    def __call__(self, x, positions, context_keys, context_values, visible, block_mask):
        """Arguments and results as `Attention.__call__`."""
        mixed, k, v = self.attention(self.input_norm(x), positions, context_keys, context_values, visible, block_mask)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), k, v
