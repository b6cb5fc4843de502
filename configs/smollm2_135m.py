"""General chat for SmolLM2-135M-Instruct: hours of a CPU, minutes of a GPU.

The target writes its own prompts and answers.

  python -m train.distill --config configs/smollm2_135m.py
  python -m eval.speedup --config configs/smollm2_135m.py --drafter runs/smollm2_135m
"""

from dspark_jax import config


def get_config():
    """Returns the recipe as a ConfigDict."""
    return config.to_config_dict(
        config.RecipeConfig(
            name="smollm2_135m",
            out="runs/smollm2_135m",
            data=config.DataConfig(
                source="self", num_prompts=1024, num_heldout=32, max_prompt_tokens=96, max_new_tokens=160, batch_size=32
            ),
        )
    )
