"""The target: one decoder for all families; families are config fields.

`TargetModel` is pure: tokens and a cache in, logits, tapped features and the tokens' own keys and values out. It never
writes the cache (`kv_cache.append` does, after verification), so that rejecting a draft costs nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache, layers
from dspark_jax.config import DecoderConfig
from dspark_jax.records import BlockKV, KVCache, Params, TargetOutput


class TargetModel(nn.Module):
    """A decoder-only language model with taps.

    Attributes:
      config: sizes and family switches.
      layout: layout of the activations (`layers.Layout`).
      tapped_layers: layers whose outputs are returned as features, 0-based, -1 the embedding.
      dtype: dtype of weights and activations.
      with_attention_spread: also returns `TargetOutput.attention_spread`.
    """

    config: DecoderConfig
    layout: layers.Layout
    tapped_layers: tuple[int, ...] = ()
    dtype: Any = jnp.float32
    with_attention_spread: bool = False

    def setup(self):
        """Declares the parameters."""
        c = self.config
        self.embed = self.param("embed", nn.initializers.normal(0.02), (c.vocab_size, c.width), self.dtype)
        self.layers = [layers.DecoderLayer(c, self.layout, self.dtype, i) for i in range(c.num_layers)]
        self.norm = layers.decoder_norm(c, self.layout, self.dtype)
        if not c.tie_embeddings:
            self.head = self.param("head", nn.initializers.normal(0.02), (c.vocab_size, c.width), self.dtype)

    def __call__(self, token_ids: jax.Array, cache: KVCache, with_logits: bool = True) -> TargetOutput:
        """Reads T tokens per row after the cache.

        Args:
          token_ids: [B, T] int32, at positions cache.length + 0..T-1.
          cache: what each row has read before.
          with_logits: False skips the LM head; `logits` is then [B, T, 0].
        """
        chex.assert_rank(token_ids, 2)
        batch, size = token_ids.shape
        positions = (cache.length[:, None] + jnp.arange(size))[:, None, :]  # [B, 1, T]
        visible = cache.length[:, None]  # [B, 1]
        x = layers.embed(self.embed, token_ids.reshape(-1), self.config, self.layout)
        taps, keys, values, spread = {-1: x}, [], [], None
        for i, layer in enumerate(self.layers):
            if self.with_attention_spread and i == self.config.num_layers - 1:
                spread = layer.attention.spread(layer.input_norm(x), positions[:, 0], cache.keys[i], cache.length)
            x, k, v = layer(x, positions, cache.keys[i], cache.values[i], visible, "causal")
            taps[i] = x
            keys.append(jnp.transpose(k, (0, 2, 1, 3)))
            values.append(jnp.transpose(v, (0, 2, 1, 3)))
        x = self.norm(x)
        by_token = lambda a: layers.to_tokens(a, self.layout).reshape(batch, size, -1)  # noqa: E731
        logits = by_token(self.logits(x)) if with_logits else jnp.zeros((batch, size, 0), jnp.float32)
        features = [by_token(taps[i]) for i in self.tapped_layers]
        return TargetOutput(
            logits=logits,
            features=jnp.stack(features, axis=2) if features else jnp.zeros((batch, size, 0, 0), self.dtype),
            last_hidden=by_token(x),
            block=BlockKV(keys=tuple(keys), values=tuple(values)),
            attention_spread=spread,
        )

    def logits(self, x: jax.Array) -> jax.Array:
        """The LM head: normed activations of n tokens -> logits of n tokens in the same layout, float32."""
        head = self.embed if self.config.tie_embeddings else self.head
        return layers.soft_cap(layers.linear(head, x, self.layout).astype(jnp.float32), self.config.logit_softcap)


@dataclasses.dataclass(frozen=True)
class TargetStep:
    """A `TargetModel` as the hashable callable that `decode` takes."""

    model: TargetModel

    def __call__(self, params: Params, token_ids: jax.Array, cache: KVCache, with_logits: bool = True) -> TargetOutput:
        """Reads T tokens per row after the cache; see `TargetModel.__call__`."""
        return cast("TargetOutput", self.model.apply({"params": params}, token_ids, cache, with_logits))

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Applies the LM head to `TargetOutput.last_hidden`: [B, T, D] -> [B, T, V] float32."""
        batch, size, width = hidden.shape
        x = layers.from_tokens(hidden.reshape(batch * size, width), self.model.layout)
        logits = cast("jax.Array", self.model.apply({"params": params}, x, method="logits"))
        return layers.to_tokens(logits, self.model.layout).reshape(batch, size, -1)

    def lm_head(self, params: Params) -> tuple[jax.Array, float]:
        """Returns the LM head's weights [V, D] and the cap of its logits (0 = none)."""
        config = self.model.config
        return params["embed" if config.tie_embeddings else "head"], config.logit_softcap


def init_params(model: TargetModel, seed: int) -> Params:
    """Draws random weights (for tests and trials)."""
    empty = kv_cache.init_cache(model.config, 1, 1, model.dtype)
    return jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32), empty)["params"]
