"""General chat for SmolLM2-135M-Instruct, made for a CPU: one to two hours of two cores.

The target writes its own prompts and answers. The drafter is small, since at batch 1 a CPU pays for every weight it
reads: blocks of three, 8,192 draft tokens. It starts from the larger one in `drafters/smollm2_135m`, which was trained
on an accelerator; `--config.drafter.init_from=""` starts from the target's last layers and bigrams, which takes longer.

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
                source="self",
                num_prompts=384,
                num_heldout=32,
                max_prompt_tokens=96,
                max_new_tokens=160,
                batch_size=64,
                seed=1,  # other prompts than those that the larger drafter was trained on
            ),
            drafter=config.DraftModelConfig(
                block_size=3,
                num_layers=2,
                markov_rank=128,
                draft_vocab_size=8192,
                init_from="drafters/smollm2_135m",
            ),
            train=config.TrainConfig(
                steps=400,
                batch_size=8,
                max_tokens=256,
                anchors=64,
                loss_chunk=64,
                learning_rate=3e-4,
                heads_learning_rate=2e-3,
                eval_every=100,
                eval_prompts=32,
                eval_new_tokens=128,
                save_every=50,
            ),
            decode=config.DecodeConfig(max_new_tokens=128),
        )
    )
