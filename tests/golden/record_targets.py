"""Records tiny random models of the target families with Hugging Face transformers: weights, config.json, outputs.

    python tests/golden/record_targets.py [NAME ...]     needs torch and transformers, see the extra `oracle`

Each folder of `targets/` gets `config.json` and `model.safetensors` as transformers writes them, and `golden.npz`:
`input_ids [2, T]`, `logits [2, T, V]`, `hidden_i [2, T, D]` (0 = the embeddings, i = output of layer i - 1; the last
one is after the final norm). Prompts are longer than the sliding windows.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers

TOKENS = 21
SIZES = {
    "vocab_size": 72,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e5}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
GEMMA = {
    "sliding_window": 6,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, FULL, FULL],
    "final_logit_softcapping": 5.0,
}

# Folder -> class of transformers and what its config has beside SIZES.
CASES = {
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama_linear": ("Llama", {"rope_parameters": LINEAR | {"rope_theta": 1e3}}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3_yarn": ("Qwen3", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "gemma3": (
        "Gemma3",
        GEMMA | {"query_pre_attn_scalar": 12, "rope_parameters": {FULL: LINEAR | {"rope_theta": 1e6}, SLIDING: LOCAL}},
    ),
    "gemma4": (
        "Gemma4",
        GEMMA
        | {
            "num_key_value_heads": 4,
            "global_head_dim": 16,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "rope_parameters": {FULL: PROPORTIONAL, SLIDING: LOCAL},
        },
    ),
    # Global layers with a value projection of their own, and heads as in the sliding ones.
    "gemma4_values": (
        "Gemma4",
        {
            "num_hidden_layers": 2,
            "sliding_window": 6,
            "layer_types": [SLIDING, FULL],
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
        },
    ),
}


def randomize(model, seed: int) -> None:
    """Draws weights that are loud enough for every feature to matter; norms, biases and scalars differ from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    scalars = {name: buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")}
    for name, weight in [*model.named_parameters(), *scalars.items()]:
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim == 2:
            noise = noise * weight.shape[1] ** -0.5 * 1.5
        elif name.endswith("bias") or "gemma3" in model.config.model_type:
            noise = noise * 0.3
        else:
            noise = 1 + 0.3 * noise
        weight.data.copy_(noise)


def record(name: str, folder: Path) -> None:
    """Writes one folder."""
    family, own = CASES[name]
    config_class = getattr(transformers, f"{family}TextConfig" if family.startswith("Gemma") else f"{family}Config")
    config = config_class(**(SIZES | own), attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    randomize(model, sorted(CASES).index(name))
    ids = torch.randint(SIZES["vocab_size"], (2, TOKENS), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        output = model(ids, output_hidden_states=True, use_cache=False)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    hidden = {f"hidden_{i}": state.numpy() for i, state in enumerate(output.hidden_states)}
    np.savez_compressed(
        folder / "golden.npz", input_ids=ids.numpy().astype(np.int32), logits=output.logits.numpy(), **hidden
    )
    print(name, f"logits up to {output.logits.abs().max():.2f}", sum(f.stat().st_size for f in folder.iterdir()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or CASES:
        record(chosen, Path(__file__).parent / "targets" / chosen)
