"""The policies, one function each; `from_name` for configs and command lines.

>>> policy = dspark_jax.schedules.threshold(0.5)
>>> dspark_jax.generate(target, prompts, drafter=drafter, policy=policy)
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark_jax.config import check_policy_name
from dspark_jax.scheduler import Policy
from dspark_jax.schedules.adaptive import adaptive_threshold
from dspark_jax.schedules.complexity import context_complexity
from dspark_jax.schedules.hardware import delayed, global_maximum, hardware_aware
from dspark_jax.schedules.simple import conservative_tokens, full, oracle, threshold
from dspark_jax.sps import SpsTable

__all__ = [
    "adaptive_threshold",
    "conservative_tokens",
    "context_complexity",
    "delayed",
    "from_name",
    "full",
    "global_maximum",
    "hardware_aware",
    "oracle",
    "threshold",
]


def from_name(
    name: str,
    *,
    confidence_threshold: float = 0.5,
    table: SpsTable | None = None,
    conservative_ids: Sequence[int] = (),
) -> Policy:
    """Makes a policy from its name; constants that are not arguments here take their defaults.

    Args:
      name: one of `config.POLICIES`, or "NAME+conservative_tokens".
      confidence_threshold: of the policy "threshold".
      table: for the policies that need one.
      conservative_ids: for "conservative_tokens".

    Raises:
      ConfigError: an unknown name, or a constant that is missing or can't work.
    """
    check_policy_name(name, "policy")
    inner, plus, _ = name.partition("+")
    if plus:
        rest = from_name(inner, confidence_threshold=confidence_threshold, table=table)
        return conservative_tokens(conservative_ids, rest)
    if name == "threshold":
        return threshold(confidence_threshold)
    if name == "conservative_tokens":
        return conservative_tokens(conservative_ids)
    by_speed = {"hardware_aware": hardware_aware, "delayed": delayed, "global_maximum": global_maximum}
    if name in by_speed:
        return by_speed[name](table)  # type: ignore[arg-type]  # it refuses None
    plain = {
        "full": full,
        "adaptive_threshold": adaptive_threshold,
        "context_complexity": context_complexity,
        "oracle": oracle,
    }
    return plain[name]()
