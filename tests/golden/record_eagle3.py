"""Records a tiny random EAGLE-3 drafter with Gemma 4's layer, as DeepSpec stores it, and what it computes.

    python tests/golden/record_eagle3.py       needs torch and transformers, see the extra `oracle`

Norms, MLP, embedding, rotary frequencies and rotation are transformers' own; how they are put together is written here
from the published method and format. `draft_gemma4_eagle3/` gets `config.json`, `model.safetensors` and `golden.npz`:
`token_ids [2, T]` (token i+1 of each position i), `features [2, T, M*D]`, and after the layer `hidden [2, T, D]`,
`logits [2, T, V]`.
"""

import json
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from transformers import Gemma4TextConfig
from transformers.models.gemma4 import modeling_gemma4 as gemma4

TOKENS, TAPS, VOCAB, WIDTH, HEADS, GROUPS, DIM = 13, (0, 1), 72, 32, 4, 2, 16
CONFIG = Gemma4TextConfig(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=40,
    num_hidden_layers=1,
    num_attention_heads=HEADS,
    num_key_value_heads=4,
    head_dim=8,
    global_head_dim=DIM,
    num_global_key_value_heads=GROUPS,
    attention_k_eq_v=True,
    hidden_size_per_layer_input=0,
    layer_types=["full_attention"],
    final_logit_softcapping=5.0,
    max_position_embeddings=128,
    rope_parameters={
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
)


def draw(*shape: int, around: float | None = None) -> torch.Tensor:
    """Weights loud enough for every feature to matter."""
    noise = torch.randn(shape)
    return around + 0.3 * noise if around is not None else noise * 1.5 * shape[-1] ** -0.5


def norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """RMSNorm; without a weight the scale-free one of the values."""
    module = gemma4.Gemma4RMSNorm(x.shape[-1], eps=CONFIG.rms_norm_eps, with_scale=weight is not None)
    if weight is not None:
        module.weight.data.copy_(weight)
    return module(x)


def main() -> None:
    """Writes the folder."""
    torch.manual_seed(3)
    layer = "layers.0."
    tensors = {
        "embed_tokens.weight": draw(VOCAB, WIDTH),
        "lm_head.weight": 4 * draw(VOCAB, WIDTH),
        "fc.weight": draw(WIDTH, len(TAPS) * WIDTH),
        "norm.weight": draw(WIDTH, around=1.0),
        f"{layer}self_attn.q_proj.weight": draw(HEADS * DIM, 2 * WIDTH),
        f"{layer}self_attn.k_proj.weight": draw(GROUPS * DIM, 2 * WIDTH),
        f"{layer}self_attn.o_proj.weight": draw(WIDTH, HEADS * DIM),
        f"{layer}self_attn.q_norm.weight": draw(DIM, around=1.0),
        f"{layer}self_attn.k_norm.weight": draw(DIM, around=1.0),
        f"{layer}mlp.gate_proj.weight": draw(40, WIDTH),
        f"{layer}mlp.up_proj.weight": draw(40, WIDTH),
        f"{layer}mlp.down_proj.weight": draw(WIDTH, 40),
        f"{layer}layer_scalar": draw(1, around=1.0),
    }
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}{name}.weight"] = draw(WIDTH, around=1.0)
    for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
        tensors[f"{layer}{name}.weight"] = draw(WIDTH, around=1.0)
    get = lambda name: tensors[layer + name]  # noqa: E731
    token_ids = torch.randint(VOCAB, (2, TOKENS))
    features = torch.randn(2, TOKENS, len(TAPS) * WIDTH)
    with torch.no_grad():
        embedding = gemma4.Gemma4TextScaledWordEmbedding(VOCAB, WIDTH, 0, embed_scale=WIDTH**0.5)
        embedding.weight.copy_(tensors["embed_tokens.weight"])
        hidden = features @ tensors["fc.weight"].T
        both = [
            norm(embedding(token_ids), get("input_layernorm.weight")),
            norm(hidden, get("hidden_norm.weight")),
        ]
        both = torch.cat(both, dim=-1)
        heads = lambda name, count: (both @ get(f"self_attn.{name}.weight").T).view(2, TOKENS, count, DIM)  # noqa: E731
        q = norm(heads("q_proj", HEADS), get("self_attn.q_norm.weight")).transpose(1, 2)
        k = norm(heads("k_proj", GROUPS), get("self_attn.k_norm.weight")).transpose(1, 2)
        v = norm(heads("k_proj", GROUPS), None).transpose(1, 2)
        positions = torch.arange(TOKENS)[None].expand(2, -1)
        cos, sin = gemma4.Gemma4TextRotaryEmbedding(CONFIG)(hidden, positions, layer_type="full_attention")
        q, k = (gemma4.apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1) for x in (q, k))
        k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        mixed = mixed.transpose(1, 2).reshape(2, TOKENS, -1) @ get("self_attn.o_proj.weight").T
        hidden = hidden + norm(mixed, get("post_attention_layernorm.weight"))
        x = norm(hidden, get("pre_feedforward_layernorm.weight"))
        gate = torch.nn.functional.gelu(x @ get("mlp.gate_proj.weight").T, approximate="tanh")
        added = (gate * (x @ get("mlp.up_proj.weight").T)) @ get("mlp.down_proj.weight").T
        hidden = (hidden + norm(added, get("post_feedforward_layernorm.weight"))) * get("layer_scalar")
        logits = norm(hidden, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
        logits = 5.0 * torch.tanh(logits / 5.0)
    folder = Path(__file__).parent / "draft_gemma4_eagle3"
    folder.mkdir(exist_ok=True)
    values = CONFIG.to_dict() | {
        "architectures": ["Gemma4Eagle3Model"],
        "target_layer_ids": list(TAPS),
        "num_target_layers": 3,
        "ttt_length": 4,
        "step_loss_decay": 0.8,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    arrays = {"token_ids": token_ids.int(), "features": features, "hidden": hidden, "logits": logits}
    np.savez_compressed(folder / "golden.npz", **{name: array.numpy() for name, array in arrays.items()})
    print(f"logits up to {logits.abs().max():.2f}", sum(file.stat().st_size for file in folder.iterdir()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
