"""A drafter for a narrow domain, in minutes on two CPU cores: the recipe of `make demo`.

The service answers one kind of question. The target answers prompts made from a few templates and many fillers; the
drafter learns from these answers and is measured on fillers that it never saw.

  python -m train.distill --config configs/smollm2_demo.py
  python -m eval.speedup --config configs/smollm2_demo.py --drafter runs/smollm2_demo
"""

from dspark_jax import config


def get_config():
    """Returns the recipe as a ConfigDict."""
    return config.to_config_dict(
        config.RecipeConfig(
            name="smollm2_demo",
            out="runs/smollm2_demo",
            data=config.DataConfig(
                source="domain:recipes",
                num_prompts=256,
                num_heldout=40,
                max_prompt_tokens=52,
                max_new_tokens=96,
                temperature=0.7,
                greedy_share=0.75,
                batch_size=32,
                drop_loops=False,
            ),
            drafter=config.DraftModelConfig(block_size=3, markov_rank=64, draft_vocab_size=1536),
            train=config.TrainConfig(
                steps=360,
                batch_size=8,
                max_tokens=148,
                anchors=64,
                loss_chunk=64,
                eval_every=120,
                eval_prompts=8,
                eval_new_tokens=96,
                save_every=120,
            ),
            decode=config.DecodeConfig(block_size=3, max_new_tokens=96),
        )
    )
