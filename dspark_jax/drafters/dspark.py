"""The DSpark drafter: a parallel backbone over injected target features, then a sequential head (DSpark, section 3).

Parallel stage: the block's embeddings (the anchor's, then the mask token's) pass through a few decoder layers whose
attention sees, without a causal mask, the whole block and the context: keys and values that each layer projects from
the target's tapped features of the positions before the anchor. Sequential stage: left to right, token k is drawn from
softmax(U_k + B_k). The embedding table and the LM head are the target's, shared and frozen; they arrive as an argument.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax import kv_cache, layers, processors, sampling
from dspark_jax.confidence import ConfidenceHead
from dspark_jax.config import DRAFT_SAMPLING, ConfigError, DrafterConfig
from dspark_jax.records import BlockKV, Draft, KVCache, Params, Sampler
from dspark_jax.sequential_head import SequentialHead
from pallas_kernels.markov_sample import api as markov_sample


@struct.dataclass
class SharedWeights:
    """The target's frozen weights that a drafter uses.

    Attributes:
      embed: [V, D], the target's embedding table.
      head: [V', D], the target's LM head, its rows reduced to the draft vocabulary.
      vocab: [V'] int32 ascending target ids of those rows, or None for the whole vocabulary.
    """

    embed: jax.Array
    head: jax.Array
    vocab: jax.Array | None


def shared_weights(target_params: Params, vocab: jax.Array | None) -> SharedWeights:
    """Returns the shared weights of a target for a draft vocabulary (ascending ids, or None)."""
    head = target_params.get("head", target_params["embed"])
    return SharedWeights(embed=target_params["embed"], head=head if vocab is None else head[vocab], vocab=vocab)


class DSparkModel(nn.Module):
    """Backbone, sequential head and confidence head.

    Attributes:
      config: the drafter's shape.
      layout: layout of the activations (`layers.Layout`).
      dtype: dtype of weights and activations.
    """

    config: DrafterConfig
    layout: layers.Layout
    dtype: Any = jnp.float32

    def setup(self):
        """Declares the parameters."""
        c, body = self.config, self.config.decoder
        self.fc = layers.Linear(body.width, len(c.tapped_layers) * body.width, self.layout, dtype=self.dtype)
        self.context_norm = layers.decoder_norm(body, self.layout, self.dtype)
        self.layers = [layers.DecoderLayer(body, self.layout, self.dtype, i) for i in range(body.num_layers)]
        self.norm = layers.decoder_norm(body, self.layout, self.dtype)
        self.sequential = SequentialHead(c, self.layout, self.dtype)
        if c.confidence_head:
            self.confidence = ConfidenceHead(c, self.dtype)

    def project_context(self, features: jax.Array, positions: jax.Array) -> BlockKV:
        """Turns target features into every draft layer's context keys and values.

        Args:
          features: [B, T, M, D].
          positions: [B, T].

        Returns:
          keys and values [B, G, T, H] per layer.
        """
        batch, size = positions.shape
        flat = features.reshape(batch * size, -1).astype(self.dtype)
        x = self.context_norm(self.fc(layers.from_tokens(flat, self.layout)))
        pairs = [layer.project_context(x, positions) for layer in self.layers]
        return BlockKV(keys=tuple(k for k, _ in pairs), values=tuple(v for _, v in pairs))

    def backbone(
        self,
        embed: jax.Array,
        anchor_ids: jax.Array,
        positions: jax.Array,
        context: BlockKV,
        visible: jax.Array,
        first: jax.Array | None = None,
    ) -> jax.Array:
        """The parallel stage: A blocks per row over one context.

        Args:
          embed: [V, D].
          anchor_ids: [B, A].
          positions: [B, A], each anchor's position in its document.
          context: keys and values [B, G, S, H] per layer.
          visible: [B, A], context slots that each block sees (its anchor's slot: strictly before it).
          first: [B, A], the slot where each anchor's document begins, nothing before it is seen; None = 0.

        Returns:
          h_1..h_K after the final norm, [B, A, K, D].
        """
        c = self.config
        batch, blocks = anchor_ids.shape
        masks = jnp.full((batch, blocks, c.block_slots - 1), c.mask_token_id, jnp.int32)
        block_ids = jnp.concatenate([anchor_ids[..., None], masks], axis=-1)
        block_positions = positions[..., None] + jnp.arange(c.block_slots)
        x = layers.embed(embed, block_ids.reshape(-1), c.decoder, self.layout)
        for layer, keys, values in zip(self.layers, context.keys, context.values):
            x, _, _ = layer(x, block_positions, keys, values, visible, None, first)
        hidden = layers.to_tokens(self.norm(x), self.layout).reshape(batch, blocks, c.block_slots, -1)
        return hidden[:, :, c.block_slots - c.block_size :]

    def base_logits(self, head: jax.Array, hidden: jax.Array) -> jax.Array:
        """Returns U = head h, capped as the target's logits: [n, D] -> [n, V'] float32."""
        x = layers.from_tokens(hidden, self.layout)
        logits = layers.to_tokens(layers.linear(head, x, self.layout), self.layout).astype(jnp.float32)
        return layers.soft_cap(logits, self.config.decoder.logit_softcap)

    def block_logits(
        self, head: jax.Array, hidden: jax.Array, previous_ids: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Teacher-forced logits of whole blocks (training).

        Args:
          head: [V', D].
          hidden: [n, K, D].
          previous_ids: [n, K], the true token before each position.

        Returns:
          logits [n, K, V'] float32, and confidence logits [n, K] or None.
        """
        codes, confidence = self.block_codes(hidden, previous_ids)
        flat = lambda x: x.reshape(previous_ids.size, -1)  # noqa: E731
        logits = self.position_logits(head, flat(hidden), None if codes is None else flat(codes))
        return logits.reshape(*previous_ids.shape, -1), confidence

    def position_logits(self, head: jax.Array, hidden: jax.Array, codes: jax.Array | None) -> jax.Array:
        """Returns U + B: hidden [n, D] and codes [n, R], or None without a sequential head -> [n, V'] float32."""
        logits = self.base_logits(head, hidden)
        return logits if codes is None else logits + self.sequential.bias(codes).astype(jnp.float32)

    def block_codes(self, hidden: jax.Array, previous_ids: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
        """The part of `block_logits` that is not as wide as the vocabulary; arguments as there.

        Returns:
          the sequential head's codes [n, K, R] and confidence logits [n, K], None without such a head.
        """
        count, size, width = hidden.shape
        codes = embedded = confidence = None
        if self.config.sequential_head != "none":
            codes, embedded = self.sequential.teacher_forced(hidden, previous_ids)
            embedded = embedded.reshape(count * size, -1)
        if self.config.confidence_head:
            confidence = self.confidence(hidden.reshape(count * size, width), embedded).reshape(count, size)
        return codes, confidence

    def draft_block(
        self,
        shared: SharedWeights,
        anchor_ids: jax.Array,
        context: KVCache,
        block_size: int,
        uniforms: jax.Array,
        sampler: Sampler,
        seen: jax.Array | None = None,
        candidates: int = 0,
        greedy: bool = False,
        backend: str = "auto",
        interpret: bool = False,
    ) -> Draft:
        """Both stages of one draft.

        The whole trained block runs through the backbone, then it is cut: a shorter block would change its outputs.

        Args:
          shared: the target's embedding and head.
          anchor_ids: [B].
          context: projected context; the anchor's position is its length.
          block_size: how many tokens to propose, at most the trained K.
          uniforms: [B, block_size].
          sampler: settings of the rows.
          seen: [B, V'] bool, entries of the draft vocabulary that the row holds so far, for the repetition penalty.
          candidates: m, how many of a position's tokens, the likeliest by its base logits, are corrected by the
            sequential head and can be proposed; 0 = all. The list doesn't depend on the tokens drafted before, and
            leaving something out of it costs acceptance, never exactness: q is what is drawn from.
          greedy: propose the argmax whatever the temperature; q is then one-hot.
          backend: which implementation of the sequential stage, see `pallas_kernels.backend.select`.
          interpret: run its kernel in Pallas' interpreter.
        """
        if greedy:
            sampler = dataclasses.replace(sampler, temperature=jnp.zeros_like(sampler.temperature))
        batch = anchor_ids.shape[0]
        hidden = self.backbone(
            shared.embed,
            anchor_ids[:, None],
            context.length[:, None],
            BlockKV(keys=context.keys, values=context.values),
            context.length[:, None],
        )[:, 0, :block_size]
        base = self.base_logits(shared.head, hidden.reshape(batch * block_size, -1)).reshape(batch, block_size, -1)
        index = None
        if candidates and candidates < base.shape[-1]:
            base, index = jax.lax.approx_max_k(base, candidates)  # [B, K, m]; exact on CPU and GPU
        arguments = (anchor_ids, base, index, hidden, shared.vocab, uniforms, sampler)
        head = {"kind": self.config.sequential_head, **self.sequential.weights()}
        kernel = markov_sample.pick(
            base, kind=head["kind"], w1=head.get("w1"), index=index, backend=backend, interpret=interpret
        )
        if kernel == "reference":
            token_ids, logits, confidence_logits = self._left_to_right(*arguments, seen)
        else:
            fused = functools.partial(self._left_to_right_fused, *arguments, head, kernel, interpret)
            token_ids, logits, confidence_logits = jax.lax.cond(
                processors.beyond_temperature(sampler).any(), lambda: self._left_to_right(*arguments, seen), fused
            )
        ids = shared.vocab
        if index is not None:
            ids = index if shared.vocab is None else shared.vocab[index]
        return Draft(
            token_ids=token_ids,
            logits=None if greedy else logits,
            confidence_logits=confidence_logits,
            length=jnp.full((batch,), block_size, jnp.int32),
            ids=ids,
        )

    def _left_to_right(
        self,
        anchor_ids: jax.Array,
        base: jax.Array,
        index: jax.Array | None,
        hidden: jax.Array,
        vocab: jax.Array | None,
        uniforms: jax.Array,
        sampler: Sampler,
        seen: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The sequential stage, step by step.

        Args:
          anchor_ids: [B].
          base: [B, K, m], or [B, K, V'] of the whole draft vocabulary.
          index: [B, K, m], the candidates, or None.
          hidden: [B, K, D].
          vocab: [V'], or None.
          uniforms: [B, K].
          sampler: settings of the rows.
          seen: [B, V'] bool, or None.

        Returns:
          target ids [B, K], processed logits shaped as `base`, confidence logits [B, K] or None.
        """
        state, previous = self.sequential.init_state(anchor_ids.shape[0]), anchor_ids
        tokens, logits, confidences = [], [], []
        for k in range(base.shape[1]):
            step_logits, embedded = base[:, k], self.sequential.embed_previous(previous)
            only = None if index is None else index[:, k]
            if embedded is not None:
                code, state = self.sequential.step(hidden[:, k], embedded, state)
                step_logits = step_logits + self.sequential.bias(code, only).astype(jnp.float32)
            if self.config.confidence_head:
                confidences.append(self.confidence(hidden[:, k], embedded))
            marked = seen if seen is None or only is None else jnp.take_along_axis(seen, only, axis=1)
            step_logits = processors.process(step_logits, sampler, marked)
            chosen = sampling.sample(step_logits, sampler.temperature, uniforms[:, k])
            if only is not None:
                chosen = jnp.take_along_axis(only, chosen[:, None], axis=1)[:, 0]
            if seen is not None:
                seen = processors.mark(seen, chosen)
            previous = chosen if vocab is None else vocab[chosen]
            tokens.append(previous)
            logits.append(step_logits)
        return (
            jnp.stack(tokens, axis=1),
            jnp.stack(logits, axis=1),
            jnp.stack(confidences, axis=1) if confidences else None,
        )

    def _left_to_right_fused(
        self,
        anchor_ids: jax.Array,
        base: jax.Array,
        index: jax.Array | None,
        hidden: jax.Array,
        vocab: jax.Array | None,
        uniforms: jax.Array,
        sampler: Sampler,
        head: dict[str, Any],
        kernel: str,
        interpret: bool,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The same in one kernel, for rows that need no processor but their temperature."""
        token_ids, logits = markov_sample.markov_sample(
            base,
            anchor_ids,
            sampler.temperature,
            uniforms,
            hidden=hidden,
            index=index,
            vocab=vocab,
            backend=kernel,
            interpret=interpret,
            **head,
        )
        if not self.config.confidence_head:
            return token_ids, logits, None
        embedded = self.sequential.embed_previous(jnp.concatenate([anchor_ids[:, None], token_ids[:, :-1]], axis=1))
        return token_ids, logits, self.confidence(hidden, embedded)

    def init_everything(self, shared: SharedWeights, features: jax.Array) -> jax.Array:
        """Touches every parameter once; the method that `init` calls.

        Args:
          shared: the target's embedding and head.
          features: [1, T, M, D].
        """
        positions = jnp.arange(features.shape[1])[None]
        anchor = jnp.zeros((1, 1), jnp.int32)
        context = self.project_context(features, positions)
        hidden = self.backbone(shared.embed, anchor, anchor, context, anchor)
        return self.block_logits(shared.head, hidden[:, 0], jnp.zeros(hidden.shape[1:3], jnp.int32)[:1])[0]


@dataclasses.dataclass(frozen=True)
class DSparkDrafter:
    """`DSparkModel` behind the drafter protocol; `params` is {"model": ..., "shared": SharedWeights}.

    Attributes:
      model: the Linen module.
      block_size: tokens proposed per cycle, at most the trained K.
      draft_sampling: "sample" draws tokens from q; "greedy" proposes the likeliest ones at any temperature, and
        verification takes q as one-hot.
      candidates: m, how many tokens per position the sequential head corrects (`DSparkModel.draft_block`); 0 = all.
      always_full: see `base.Drafter`.
    """

    model: DSparkModel
    block_size: int
    draft_sampling: str = "sample"
    candidates: int = 0
    always_full: bool = True

    def __post_init__(self):
        if self.draft_sampling not in DRAFT_SAMPLING:
            raise ConfigError(f"draft_sampling = {self.draft_sampling!r}: use {' or '.join(DRAFT_SAMPLING)}")
        if self.candidates < 0:
            raise ConfigError(f"candidates = {self.candidates}: use 0 (all tokens) or more")

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs are the context."""
        return self.model.config.tapped_layers

    @property
    def confidence_reads_draft(self) -> bool:
        """The confidence head sees the Markov embedding of the token before; h_k alone knows no draft token."""
        return self.model.config.confidence_head and self.model.config.confidence_reads_markov

    def init_state(self, batch: int, slots: int) -> KVCache:
        """Returns an empty context."""
        return kv_cache.init_cache(self.model.config.decoder, batch, slots, self.model.dtype)

    def draft(self, params, state, tokens, length, uniforms, sampler) -> Draft:
        """Proposes a block; see `base.Drafter.draft`."""
        anchor = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
        shared = params["shared"]
        seen = processors.seen_tokens(tokens, length, sampler, len(shared.embed))
        draft = self.model.apply(
            {"params": params["model"]},
            shared,
            anchor,
            state,
            self.block_size,
            uniforms,
            sampler,
            seen if shared.vocab is None else seen[:, shared.vocab],
            self.candidates,
            self.draft_sampling == "greedy",
            method="draft_block",
        )
        return cast("Draft", draft)

    def commit(self, params, state, output, count, tokens) -> KVCache:
        """Projects features into the context; see `base.Observer.commit`."""
        del tokens
        positions = state.length[:, None] + jnp.arange(output.features.shape[1])
        block = self.model.apply({"params": params["model"]}, output.features, positions, method="project_context")
        return kv_cache.append(state, cast("BlockKV", block), count)
