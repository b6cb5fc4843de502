"""AdamW with warmup and cosine decay, and a learning rate of its own for the heads."""

from __future__ import annotations

import jax
import optax

from dspark_jax.config import TrainConfig
from dspark_jax.records import Params

HEADS = ("sequential", "confidence")


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns the optimiser of a recipe.

    One global-norm clip over all gradients, then AdamW per group: the backbone at `learning_rate`, the sequential and
    confidence heads at `heads_learning_rate` (at the backbone's rate a head that starts small never catches up).
    """

    def group(peak: float) -> optax.GradientTransformation:
        warmup = max(1, round(config.warmup_share * config.steps))
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(config.steps, warmup + 1), 0.0)
        return optax.adamw(schedule, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.multi_transform(
            {"backbone": group(config.learning_rate), "heads": group(config.heads_learning_rate)}, param_labels
        ),
    )


def param_labels(params: Params) -> Params:
    """Labels every parameter "heads" or "backbone"."""
    return {
        name: jax.tree.map(lambda _, n=name: "heads" if n in HEADS else "backbone", subtree)
        for name, subtree in params.items()
    }
