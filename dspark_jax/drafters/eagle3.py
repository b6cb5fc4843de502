"""EAGLE-3: an autoregressive drafter, one layer run once per draft token (Li et al., 2025, arXiv:2503.01840).

Position i pairs what the target computed for token i with token i+1: the layer's queries, keys and values read
[norm(embedding of token i+1); norm(h_i)], where h_i is the projection of the tapped target features, and its output's
logits are those of token i+2. Beyond the text that the target has read, the layer's own output stands in for h_i. Its
cost grows with K, which is what DSpark's parallel backbone avoids; it is here as a baseline, and because many
checkpoints of this kind are in use.

The embedding table and the LM head are the target's, shared and frozen.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax import kv_cache, layers, processors, sampling
from dspark_jax.config import Eagle3Config
from dspark_jax.drafters.dspark import SharedWeights
from dspark_jax.records import BlockKV, Draft, KVCache, Sampler


@struct.dataclass
class Eagle3State:
    """What the drafter knows of a row.

    Attributes:
      cache: keys and values of the pairs (features i, token i+1) of all positions before the anchor.
      hidden: [B, D], the layer's output for the last of them.
    """

    cache: KVCache
    hidden: jax.Array


class Eagle3Model(nn.Module):
    """Feature projection and the one layer.

    Attributes:
      config: the drafter's shape.
      layout: layout of the activations (`layers.Layout`).
      dtype: dtype of weights and activations.
    """

    config: Eagle3Config
    layout: layers.Layout
    dtype: Any = jnp.float32

    def setup(self):
        """Declares the parameters."""
        c, body = self.config, self.config.decoder
        norm = lambda: layers.decoder_norm(body, self.layout, self.dtype)  # noqa: E731
        self.fc = layers.Linear(body.width, len(c.tapped_layers) * body.width, self.layout, dtype=self.dtype)
        self.hidden_norm = norm()
        self.input_norm = norm()
        self.attention = layers.Attention(body, self.layout, self.dtype, features_in=2 * body.width)
        self.mlp_norm = norm()
        self.mlp = layers.GatedMLP(body, self.layout, self.dtype)
        self.norm = norm()
        if body.sandwich_norms:
            self.attention_out_norm = norm()
            self.mlp_out_norm = norm()
        if body.layer_scalar:
            self.scalar = self.param("scalar", nn.initializers.ones, (1,), self.dtype)

    def project_features(self, features: jax.Array) -> jax.Array:
        """Projects tapped target features: [B, T, M, D] -> [B, T, D]."""
        batch, size = features.shape[:2]
        flat = features.reshape(batch * size, -1).astype(self.dtype)
        return layers.to_tokens(self.fc(layers.from_tokens(flat, self.layout)), self.layout).reshape(batch, size, -1)

    def __call__(
        self,
        embed: jax.Array,
        token_ids: jax.Array,
        hidden: jax.Array,
        positions: jax.Array,
        context: BlockKV,
        visible: jax.Array,
        block_mask: jax.Array,
        earlier: BlockKV | None = None,
    ) -> tuple[jax.Array, BlockKV]:
        """Runs the layer.

        Args:
          embed: [V, D].
          token_ids: [B, A, T], token i+1 of each position i, in A blocks that don't see each other.
          hidden: [B, A, T, D], h_i.
          positions: [B, A, T], i.
          context: keys and values [B, G, S, H].
          visible: [B, A], context slots that a block sees.
          block_mask: [T, J + T] bool, what the positions of a block see of `earlier` and of each other.
          earlier: J further keys and values [B, A, J, G, H] of each block.

        Returns:
          the layer's output [B, A, T, D], and the positions' own keys and values [B, A, T, G, H].
        """
        x = layers.from_tokens(hidden.reshape(-1, hidden.shape[-1]), self.layout)
        body, (batch, blocks, size) = self.config.decoder, positions.shape
        embedded = layers.embed(embed.astype(self.dtype), token_ids.reshape(-1), body, self.layout)
        both = layers.join_features(self.input_norm(embedded), self.hidden_norm(x), self.layout)
        q, k, v = self.attention.project(both, positions.reshape(batch, blocks * size))
        split = lambda a: a.reshape(batch, blocks, size, -1, body.attention(0).head_dim)  # noqa: E731
        block = BlockKV(keys=(split(k),), values=(split(v),))
        every = block if earlier is None else jax.tree.map(lambda *a: jnp.concatenate(a, axis=2), earlier, block)
        mixed = layers.attend(
            split(q),
            context.keys[0],
            context.values[0],
            visible,
            every.keys[0],
            every.values[0],
            block_mask,
            self.attention.scale,
        )
        mixed = self.attention.o(layers.from_tokens(mixed.reshape(batch * blocks * size, -1), self.layout))
        x = x + (self.attention_out_norm(mixed) if body.sandwich_norms else mixed)
        added = self.mlp(self.mlp_norm(x))
        x = x + (self.mlp_out_norm(added) if body.sandwich_norms else added)
        x = x * self.scalar if body.layer_scalar else x
        return layers.to_tokens(x, self.layout).reshape(hidden.shape), block

    def logits(self, head: jax.Array, hidden: jax.Array) -> jax.Array:
        """Returns head norm(h), capped as the target's logits: [n, D] -> [n, V'] float32."""
        x = self.norm(layers.from_tokens(hidden, self.layout))
        logits = layers.to_tokens(layers.linear(head, x, self.layout), self.layout).astype(jnp.float32)
        return layers.soft_cap(logits, self.config.decoder.logit_softcap)

    def init_everything(self, shared: SharedWeights, features: jax.Array) -> jax.Array:
        """Touches every parameter once; the method that `init` calls.

        Args:
          shared: the target's embedding and head.
          features: [1, 1, M, D].
        """
        hidden = self.project_features(features)[:, None]
        own, one = self.config.decoder.attention(0), jnp.zeros((1, 1), jnp.int32)
        empty = jnp.zeros((1, own.num_kv_heads, 1, own.head_dim), self.dtype)
        context = BlockKV(keys=(empty,), values=(empty,))
        hidden, _ = self(shared.embed, one[None], hidden, one[None], context, one, jnp.ones((1, 1), bool))
        return self.logits(shared.head, hidden[0, 0])


@dataclasses.dataclass(frozen=True)
class Eagle3Drafter:
    """`Eagle3Model` behind the drafter protocol; `params` is {"model": ..., "shared": SharedWeights}.

    Attributes:
      model: the Linen module.
      block_size: tokens proposed per cycle, at most the trained number of steps.
      always_full: see `base.Drafter`.
      confidence_reads_draft: there are no confidences.
    """

    model: Eagle3Model
    block_size: int
    always_full: bool = True
    confidence_reads_draft: bool = False

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs are read."""
        return self.model.config.tapped_layers

    def init_state(self, batch: int, slots: int) -> Eagle3State:
        """Returns an empty cache."""
        body, dtype = self.model.config.decoder, self.model.dtype
        return Eagle3State(kv_cache.init_cache(body, batch, slots, dtype), jnp.zeros((batch, body.width), dtype))

    def draft(self, params, state, tokens, length, uniforms, sampler: Sampler) -> Draft:
        """Proposes a block token by token; see `base.Drafter.draft`."""
        shared = params["shared"]
        seen = processors.seen_tokens(tokens, length, sampler, len(shared.embed))
        seen = seen if shared.vocab is None else seen[:, shared.vocab]
        cache, hidden = state.cache, state.hidden
        drafted, logits = [], []
        for k in range(self.block_size):
            if k:
                hidden, cache = self._read(params, cache, drafted[-1][:, None], hidden[:, None], jnp.ones_like(length))
                hidden = hidden[:, 0]
            step_logits = self.model.apply({"params": params["model"]}, shared.head, hidden, method="logits")
            step_logits = processors.process(cast("jax.Array", step_logits), sampler, seen)
            chosen = sampling.sample(step_logits, sampler.temperature, uniforms[:, k])
            seen = processors.mark(seen, chosen)
            drafted.append(chosen if shared.vocab is None else shared.vocab[chosen])
            logits.append(step_logits)
        return Draft(
            token_ids=jnp.stack(drafted, axis=1),
            logits=jnp.stack(logits, axis=1),
            confidence_logits=None,
            length=jnp.full(length.shape, self.block_size, jnp.int32),
            ids=shared.vocab,
        )

    def commit(self, params, state, output, count, tokens) -> Eagle3State:
        """Reads the committed pairs of features and tokens; see `base.Observer.commit`."""
        size, last = output.features.shape[1], tokens.shape[1] - 1
        following = jnp.minimum(state.cache.length[:, None] + 1 + jnp.arange(size), last)
        token_ids = jnp.take_along_axis(tokens, following, axis=1)
        hidden = self.model.apply({"params": params["model"]}, output.features, method="project_features")
        hidden, cache = self._read(params, state.cache, token_ids, cast("jax.Array", hidden), count)
        newest = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
        return Eagle3State(cache, jnp.where((count > 0)[:, None], newest, state.hidden))

    def _read(self, params, cache, token_ids, hidden, count) -> tuple[jax.Array, KVCache]:
        """Runs the layer causally on T further pairs, of which `count` [B] are kept in the cache."""
        size = token_ids.shape[1]
        positions = cache.length[:, None] + jnp.arange(size)
        out, block = self.model.apply(
            {"params": params["model"]},
            params["shared"].embed,
            token_ids[:, None],
            hidden[:, None],
            positions[:, None],
            BlockKV(keys=cache.keys, values=cache.values),
            cache.length[:, None],
            jnp.tril(jnp.ones((size, size), bool)),
        )
        block = jax.tree.map(lambda a: jnp.swapaxes(a[:, 0], 1, 2), block)  # [B, G, T, H]
        return cast("jax.Array", out)[:, 0], kv_cache.append(cache, cast("BlockKV", block), count)
