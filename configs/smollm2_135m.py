"""General chat for SmolLM2-135M-Instruct: hours of a CPU.

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
            drafter=config.DraftModelConfig(block_size=3, markov_rank=128, draft_vocab_size=10240),
            train=config.TrainConfig(
                steps=2400,
                batch_size=8,
                max_tokens=256,
                anchors=64,
                loss_chunk=64,
                eval_every=300,
                eval_prompts=16,
                eval_new_tokens=128,
                save_every=150,
            ),
            decode=config.DecodeConfig(max_new_tokens=128),
        )
    )
