"""General chat for SmolLM2-135M-Instruct at full size: minutes of one data-centre GPU.

The same recipe as `smollm2_135m.py` with twelve times the data, blocks of seven, and two draft layers. About eight
minutes of an H200, half of them for the data; acceptance is still rising at the end: more steps help.

  python -m train.distill --config configs/smollm2_135m_gpu.py
  python -m eval.speedup --config configs/smollm2_135m_gpu.py --drafter runs/smollm2_135m_gpu
"""

from dspark_jax import config


def get_config():
    """Returns the recipe as a ConfigDict."""
    return config.to_config_dict(
        config.RecipeConfig(
            name="smollm2_135m_gpu",
            out="runs/smollm2_135m_gpu",
            data=config.DataConfig(
                source="self",
                num_prompts=12288,
                num_heldout=64,
                max_prompt_tokens=96,
                max_new_tokens=192,
                batch_size=256,
            ),
            drafter=config.DraftModelConfig(block_size=7, num_layers=2, markov_rank=128, draft_vocab_size=12288),
            train=config.TrainConfig(
                steps=800,
                batch_size=32,
                max_tokens=288,
                anchors=128,
                loss_chunk=128,
                eval_every=100,
                eval_prompts=32,
                eval_new_tokens=128,
                save_every=100,
                matmul_precision="tensorfloat32",
            ),
            decode=config.DecodeConfig(max_new_tokens=128),
        )
    )
