"""The `config.json` of Hugging Face models: which families there are, and how each one becomes a `DecoderConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspark_jax.checkpoints import huggingface_rope
from dspark_jax.checkpoints.target_files import CheckpointError, number
from dspark_jax.config import ConfigError, DecoderConfig


@dataclasses.dataclass(frozen=True)
class _Family:
    """A model type of transformers.

    Attributes:
      name: `DecoderConfig.family`.
      architectures: Classes whose weights are read.
      defaults: Values of the fields that a config.json may leave out.
      switches: Fields of `DecoderConfig` that all models of the family share.
    """

    name: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any]
    switches: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072}
_GEMMA |= {"tie_word_embeddings": True}
_GEMMA_SWITCHES = {"activation": "gelu_tanh", "qk_norm": True, "sandwich_norms": True, "scale_embeddings": True}

_FAMILIES = {
    "llama": _Family("llama", ("LlamaForCausalLM",), {"max_position_embeddings": 2048}),
    "qwen2": _Family("qwen2", ("Qwen2ForCausalLM",), {"sliding_window": 4096}, {"qkv_bias": True}),
    "qwen3": _Family("qwen3", ("Qwen3ForCausalLM",), {"sliding_window": 4096, "head_dim": 128}, {"qk_norm": True}),
    "mistral": _Family(
        "mistral",
        ("MistralForCausalLM",),
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    ),
    "gemma3_text": _Family(
        "gemma3",
        ("Gemma3ForCausalLM",),
        _GEMMA | {"vocab_size": 262208, "sliding_window": 4096},
        _GEMMA_SWITCHES | {"norm_plus_one": True},
    ),
    "gemma4_text": _Family(
        "gemma4",
        ("Gemma4ForCausalLM",),
        _GEMMA
        | {"vocab_size": 262144, "sliding_window": 512, "global_head_dim": 512}
        # What a config.json leaves out is on in transformers, too.
        | {"hidden_size_per_layer_input": 256},
        _GEMMA_SWITCHES | {"value_norm": True, "layer_scalar": True, "attention_scale": 1.0},
    ),
}
# Models of several modalities: their language model is the text model whose config is nested.
_WRAPPERS = {
    "gemma3": ("gemma3_text", "Gemma3ForConditionalGeneration"),
    "gemma4": ("gemma4_text", "Gemma4ForConditionalGeneration"),
}

# Feature -> the values of it that are computed as transformers does. A field that is missing or null is no feature.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (),
    "attn_logit_softcapping": (),
    "use_bidirectional_attention": (False, "vision"),
    "enable_moe_block": (False,),
    "num_kv_shared_layers": (0,),
    "hidden_size_per_layer_input": (0,),
}


def is_wrapper(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of a multimodal model around a language model."""
    return values.get("model_type") in _WRAPPERS


def decoder_config_from_hf(values: Mapping[str, Any]) -> DecoderConfig:
    """Returns the config that a Hugging Face `config.json` describes.

    Fields that a file leaves out have the default of its model type. RoPE is read from either dialect
    (`huggingface_rope`). Of a multimodal model, it is the language model that is described.

    Raises:
      CheckpointError: a model type or feature that is not supported, or a missing field; it is named with its value.
    """
    family = _family(values)
    if is_wrapper(values):
        inner = values.get("text_config")
        if not isinstance(inner, Mapping):
            raise CheckpointError(f"text_config = {inner!r}: the config must hold that of the language model")
        outer = {key: values[key] for key in ("tie_word_embeddings", "quantization_config") if key in values}
        values = outer | dict(inner)
    values = dict(family.defaults) | {key: value for key, value in values.items() if value is not None or key in _NULL}
    _refuse_features(values, family)
    layers, width, heads = (number(values, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    sliding = _sliding_layers(values, family, layers)
    rope = huggingface_rope.read_rope(values, "full_attention", family.name)
    fields: dict[str, Any] = {
        "num_kv_heads": number(values, "num_key_value_heads", heads),
        "head_dim": number(values, "head_dim", width // max(heads, 1)),
    }
    if family.name == "gemma3":
        fields["attention_scale"] = number(values, "query_pre_attn_scalar", 256) ** -0.5
    if family.name == "gemma4":
        fields |= _gemma4_heads(values, fields, sliding, layers)
    if family.name.startswith("gemma"):
        fields["logit_softcap"] = float(number(values, "final_logit_softcapping", 0))
    if sliding:
        fields["sliding_window"] = number(values, "sliding_window", 0)
        own = huggingface_rope.read_rope(values, "sliding_attention", family.name)
        fields["sliding_rope_theta"] = huggingface_rope.sliding_theta(rope, own)
    try:
        return DecoderConfig(
            family=family.name,
            vocab_size=number(values, "vocab_size"),
            width=width,
            mlp_width=number(values, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            norm_eps=float(number(values, "rms_norm_eps", 1e-6)),
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            max_positions=number(values, "max_position_embeddings", 32768),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            rope_share=rope.share,
            sliding_layers=sliding,
            **family.switches,
            **fields,
        )
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


# An explicit null of these means "none", not "the default".
_NULL = ("sliding_window", "hidden_size_per_layer_input", "num_global_key_value_heads")


def _family(values: Mapping[str, Any]) -> _Family:
    kind = values.get("model_type")
    architectures = values.get("architectures") or []
    text_kind, wrapper = _WRAPPERS.get(str(kind), (str(kind), None))
    family = _FAMILIES.get(text_kind)
    expected = (wrapper,) if wrapper else family.architectures if family else ()
    if family is None or any(name not in expected for name in architectures):
        supported = [f"{kind} ({', '.join(family.architectures)})" for kind, family in _FAMILIES.items()]
        supported += [f"{kind} ({name})" for kind, (_, name) in _WRAPPERS.items()]
        raise CheckpointError(
            f"model_type = {kind!r} with architectures = {architectures!r} is not supported;"
            f" supported are {', '.join(supported)}"
        )
    return family


def _refuse_features(values: Mapping[str, Any], family: _Family) -> None:
    """Refuses what would change the output and is not implemented."""
    activation = family.switches.get("activation", "silu")
    key, only = ("hidden_activation", "gelu_pytorch_tanh") if activation == "gelu_tanh" else ("hidden_act", "silu")
    for name, accepted in (_ACCEPTED | {key: (only,)}).items():
        value = values.get(name)
        if value is not None and value not in accepted:
            what = f"only {accepted[0]!r} is" if accepted else "only models without it are"
            raise CheckpointError(f"{name} = {value!r} is not supported, {what}; use another model of the family")


def _sliding_layers(values: Mapping[str, Any], family: _Family, layers: int) -> tuple[int, ...]:
    """Returns the layers that slide over a window, from `layer_types` or by the family's own rule."""
    window, kinds = values.get("sliding_window"), values.get("layer_types")
    if family.name == "mistral":
        rule = lambda i: window is not None  # noqa: E731
    elif family.name.startswith("gemma"):
        pattern = number(values, "sliding_window_pattern", 6)
        rule = lambda i: (i + 1) % pattern != 0  # noqa: E731
    else:
        first = number(values, "max_window_layers", 28) if values.get("use_sliding_window") else layers
        rule = lambda i: window is not None and i >= first  # noqa: E731
    sliding = [i for i in range(layers) if rule(i)]
    if kinds is not None:
        others = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        named = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
        # Mistral has one kind of layer whatever layer_types says, and Llama has no windows.
        wrong = family.name in ("llama", "mistral") and named != sliding
        if others or wrong or len(kinds) != layers:
            raise CheckpointError(
                f"layer_types with {', '.join(map(repr, others or sorted(set(kinds))))} for {layers} layers"
                f" (sliding_window = {window!r}) is not supported for {family.name};"
                " use a model whose layer_types are full_attention and, if its family has windows, sliding_attention"
            )
        sliding = named
    if family.name == "gemma4":  # transformers makes the last layer a full one whatever the config says
        sliding = [i for i in sliding if i < layers - 1]
    if family.name == "llama" and sliding:
        raise CheckpointError(
            f"sliding_window = {window!r} from layer {sliding[0]} on is not supported for llama; use a model without it"
        )
    return tuple(sliding)


def _gemma4_heads(
    values: Mapping[str, Any], fields: Mapping[str, Any], sliding: tuple[int, ...], layers: int
) -> dict[str, Any]:
    """Returns the heads of both kinds of layers.

    The config's plain fields are those of the sliding ones. Those of the others are in `global_head_dim` and
    `num_global_key_value_heads`, or, as newer files have it, in `per_layer_config` by layer.
    """
    shared = bool(values.get("attention_k_eq_v", False))
    found: dict[str, Any] = {"keys_as_values": shared}
    if sliding:
        found |= {"sliding_head_dim": fields["head_dim"], "sliding_kv_heads": fields["num_kv_heads"]}
    own = values.get("per_layer_config")
    if own is None:
        kv_heads = number(values, "num_global_key_value_heads", fields["num_kv_heads"]) if shared else None
        return found | {
            "head_dim": number(values, "global_head_dim"),
            "num_kv_heads": kv_heads or fields["num_kv_heads"],
        }
    full = [own.get(str(i), {}) for i in range(layers) if i not in sliding]
    uniform = all(layer == full[0] for layer in full) and not any(str(i) in own for i in sliding)
    if not uniform or set(full[0]) - {"head_dim", "num_key_value_heads"}:
        raise CheckpointError(
            f"per_layer_config = {own!r} is not supported: it may give head_dim and num_key_value_heads of the"
            " full_attention layers, the same for all of them; use another model"
        )
    return found | {
        "head_dim": number(full[0], "head_dim", fields["head_dim"]),
        "num_kv_heads": number(full[0], "num_key_value_heads", fields["num_kv_heads"]),
    }
