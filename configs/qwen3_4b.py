"""The published recipe for Qwen3-4B: five draft layers, K = 7, rank 256 (DSpark, section 5).

Needs an accelerator with the target and a global batch of 512 sequences in memory, and prompts to answer:

  python -m train.distill --config configs/qwen3_4b.py --config.data.prompts_path=prompts.jsonl
"""

from dspark_jax import config


def get_config():
    """Returns the recipe as a ConfigDict."""
    return config.to_config_dict(
        config.RecipeConfig(
            name="qwen3_4b",
            target="Qwen/Qwen3-4B",
            dtype="bfloat16",
            out="runs/qwen3_4b",
            data=config.DataConfig(
                source="file",
                prompts_path="prompts.jsonl",
                num_prompts=1_300_000,
                num_heldout=256,
                max_prompt_tokens=2048,
                max_new_tokens=2048,
                temperature=1.0,
                greedy_share=0.0,
                batch_size=256,
            ),
            drafter=config.DraftModelConfig(
                block_size=7,
                num_layers=5,
                tapped_layers=(1, 9, 17, 25, 33),
                sequential_head="vanilla",
                markov_rank=256,
                init_layers_from_target=False,
                init_markov_from_bigrams=False,
            ),
            train=config.TrainConfig(
                steps=25_390,  # 10 epochs of 1.3 million sequences
                batch_size=512,
                max_tokens=4096,
                anchors=512,
                loss_chunk=512,
                learning_rate=6e-4,
                heads_learning_rate=6e-4,
                warmup_share=0.04,
                weight_decay=0.0,
                clip_norm=1.0,
                decay=4.0,
                eval_every=1000,
                eval_prompts=64,
                eval_new_tokens=256,
                save_every=500,
            ),
        )
    )
