"""DSpark speculative decoding in JAX and Flax: draft with a small model, verify with the target, keep its distribution.

>>> import dspark_jax
>>> target = dspark_jax.load_target("smollm2-135m-instruct")
>>> drafter = dspark_jax.load_drafter("runs/smollm2_demo", target)
>>> dspark_jax.generate(target, ["What is the capital of France?"], drafter=drafter).rows[0].text
"""

from dspark_jax import schedules, sps
from dspark_jax.drafter_loading import load_drafter, prompt_lookup
from dspark_jax.generation import Generation, GenerationBatch, LoadedDrafter, generate, stream
from dspark_jax.loading import Target, load_target, random_target
from dspark_jax.scheduler import Policy

__all__ = [
    "Generation",
    "GenerationBatch",
    "LoadedDrafter",
    "Policy",
    "Target",
    "generate",
    "load_drafter",
    "load_target",
    "prompt_lookup",
    "random_target",
    "schedules",
    "sps",
    "stream",
]
