"""Everything at toy size, on random weights, in seconds: for tests and for trying the commands.

python -m train.distill --config configs/tiny.py
python -m eval.speedup --config configs/tiny.py --drafter runs/tiny
"""

from dspark_jax import config


def get_config():
    """Returns the recipe as a ConfigDict."""
    return config.to_config_dict(
        config.RecipeConfig(
            name="tiny",
            target="random",
            random_target=config.DecoderConfig(
                vocab_size=199,
                width=48,
                mlp_width=96,
                num_layers=4,
                num_heads=4,
                num_kv_heads=2,
                head_dim=12,
                max_positions=1024,
            ),
            out="runs/tiny",
            data=config.DataConfig(
                num_prompts=16, num_heldout=4, max_prompt_tokens=12, max_new_tokens=32, batch_size=8, drop_loops=False
            ),
            drafter=config.DraftModelConfig(block_size=4, markov_rank=16, draft_vocab_size=96),
            train=config.TrainConfig(
                steps=20,
                batch_size=2,
                max_tokens=96,  # two or three sequences
                pack=True,
                anchors=16,
                loss_chunk=16,
                save_every=10,
                log_every=5,
                eval_every=10,
                eval_prompts=4,
                eval_new_tokens=16,
            ),
            decode=config.DecodeConfig(max_new_tokens=32),
        )
    )
