"""RoPE in the `config.json` of Hugging Face models.

There are two dialects. The older one has `rope_theta`, `rope_scaling` (and Gemma 3 `rope_local_base_freq`) side by
side; the newer one has everything in `rope_parameters`, which Gemma nests by layer type.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dspark_jax.checkpoints.target_files import CheckpointError, number
from dspark_jax.config import ConfigError, RopeScaling

_THETA = {"gemma3": 1e6, "gemma4": 1e6}  # of layers that don't slide; 1e4 otherwise
_KINDS = ("default", "linear", "llama3", "yarn", "proportional")


@dataclasses.dataclass(frozen=True)
class Rope:
    """The fields `rope_theta`, `rope_scaling` and `rope_share` of a `DecoderConfig`."""

    theta: float
    scaling: RopeScaling
    share: float


def read_rope(values: Mapping[str, Any], layer_type: str, family: str) -> Rope:
    """Returns the RoPE of the layers of a type.

    Args:
      values: a config.json (of the text model).
      layer_type: "full_attention" or "sliding_attention".
      family: `DecoderConfig.family`.

    Raises:
      CheckpointError: a kind of RoPE that is not supported, or a missing or contradictory value.
    """
    gemma, sliding = family.startswith("gemma"), layer_type == "sliding_attention"
    scaling, parameters = values.get("rope_scaling"), values.get("rope_parameters")
    theta_key = "rope_local_base_freq" if gemma and sliding else "rope_theta"
    if gemma and sliding:
        scaling = None  # what the older dialect says is about the other layers
    if isinstance(parameters, Mapping) and any(isinstance(value, Mapping) for value in parameters.values()):
        if not gemma:
            raise _refuse("rope_parameters", parameters, f"{family} has one RoPE for all layers")
        parameters = parameters.get(layer_type)
        scaling = None
    if parameters is None and scaling is None and family == "gemma4" and not sliding:
        parameters = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    thetas, kinds = [values.get(theta_key)], {}
    for key, rope in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise _refuse(key, rope, "it must be an object with a rope_type")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in _KINDS:
            raise _refuse(key, rope, f"supported are rope_types {', '.join(_KINDS)}")
        thetas.append(rope.get("rope_theta"))
        if kind != "default" or "partial_rotary_factor" in rope:
            kinds[key] = (kind, rope)
    given = {float(theta) for theta in thetas if theta is not None}
    if len(given) > 1:
        raise CheckpointError(f"{theta_key} is given as {' and as '.join(map(str, sorted(given)))}: keep the right one")
    theta = given.pop() if given else 1e4 if sliding else _THETA.get(family, 1e4)
    if len(kinds) > 1:
        raise _refuse("rope_scaling", scaling, "rope_parameters says so too: keep one of them")
    key, (kind, rope) = next(iter(kinds.items()), ("rope_parameters", ("default", {})))
    share = number(rope, "partial_rotary_factor", values.get("partial_rotary_factor") or 1.0)
    if share != 1.0 and kind != "proportional":
        raise CheckpointError(f"partial_rotary_factor = {share} is not supported, only 1.0 is; use another model")
    try:
        return Rope(theta, _scaling(kind, rope, values), float(share))
    except (ConfigError, CheckpointError) as error:
        raise CheckpointError(f"{key} = {dict(rope)!r}: {error}") from error


def sliding_theta(full: Rope, sliding: Rope) -> float:
    """Returns `DecoderConfig.sliding_rope_theta` of a model with these two RoPEs.

    Raises:
      CheckpointError: the RoPE of the sliding layers is stretched, in another way than that of the others.
    """
    if sliding == full:
        return 0.0
    if sliding.scaling.kind != "none" or sliding.share != 1.0:
        raise CheckpointError(
            f"rope_parameters of sliding_attention = {sliding} is not supported: only the default RoPE, or that of"
            " full_attention, is; use another model"
        )
    return sliding.theta


def _scaling(kind: str, rope: Mapping[str, Any], values: Mapping[str, Any]) -> RopeScaling:
    if kind == "default":
        return RopeScaling()
    if kind == "proportional":
        factor = float(number(rope, "factor", 1.0))
        return RopeScaling("linear", factor) if factor != 1.0 else RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", float(number(rope, "factor")))
    longest = number(values, "max_position_embeddings")
    original = values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or longest
    if kind == "llama3":
        low, high = (float(number(rope, key)) for key in ("low_freq_factor", "high_freq_factor"))
        return RopeScaling("llama3", float(number(rope, "factor")), int(original), low, high)
    factor = float(number(rope, "factor", longest / original))
    return RopeScaling(
        "yarn",
        factor,
        int(original),
        beta_fast=float(number(rope, "beta_fast", 32)),
        beta_slow=float(number(rope, "beta_slow", 1)),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_attention_factor(factor, rope),
    )


def _attention_factor(factor: float, rope: Mapping[str, Any]) -> float:
    """The factor of cosines and sines: given, or by the paper's fit 0.1 ln(factor) + 1 (Peng et al., 2023, eq. 22)."""
    if rope.get("attention_factor") is not None:
        return float(number(rope, "attention_factor"))
    fit = lambda weight: 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0  # noqa: E731
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    return fit(above) / fit(below) if above and below else fit(1.0)


def _refuse(key: str, rope: Any, why: str) -> CheckpointError:
    return CheckpointError(f"{key} = {rope!r} is not supported: {why}; use another model")
