"""Records drafters of the speculators library (vLLM): random weights, inputs, logits, losses.

  pip install -e .[speculators]
  python tests/golden/record_speculators.py tests/golden/speculators

Writes one folder per drafter as the library saves it, and a `golden.npz` in each. The tests read them without torch,
and, where the library is installed, run what this project exports through the same `run`.
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # plain torch on the CPU

import contextlib
import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import safetensors.torch
import torch
from speculators import SpeculatorModel
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import eager
from speculators.models.dflash import core as dflash_core
from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.dspark import core as dspark_core
from speculators.models.dspark.config import DSparkSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

VERIFIER = "tiny-verifier"  # a folder in the working directory
VOCAB, WIDTH, LENGTH, BLOCK = 64, 16, 24, 4
ANCHORS = (6, 9, 15)
CASES = {
    "vanilla": {"markov_head_type": "vanilla"},
    "rnn": {"markov_head_type": "rnn", "confidence_head_with_markov": False},
    "gated_reduced": {"markov_head_type": "gated", "draft_vocab_size": 40},
    "vanilla_bonus_anchor": {"markov_head_type": "vanilla", "sample_from_anchor": False},
    "dflash": {},
}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
}


def write_verifier(folder: pathlib.Path) -> None:
    """Writes what the library reads of a target: its config, embedding, final norm and head."""
    folder.mkdir()
    config = Qwen3Config(num_hidden_layers=6, **SIZES)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    torch.manual_seed(1)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = {name: torch.randn(VOCAB, WIDTH) for name in names}
    tensors["model.norm.weight"] = 1 + 0.3 * torch.randn(WIDTH)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make(case: str):
    """Returns a random drafter."""
    fields = dict(CASES[case])
    kind = "dflash" if case == "dflash" else "dspark"
    layers = Qwen3Config(num_hidden_layers=2, layer_types=["full_attention"] * 2, **SIZES)
    layers._attn_implementation = "eager"
    from_anchor = fields.get("sample_from_anchor", kind == "dspark")
    proposal = GreedyTokenProposalConfig(speculative_tokens=BLOCK if from_anchor else BLOCK - 1)
    fields = {"draft_vocab_size": VOCAB, **fields, **({"markov_rank": 4} if kind == "dspark" else {})}
    config_class = DSparkSpeculatorConfig if kind == "dspark" else DFlashSpeculatorConfig
    config = config_class(
        transformer_layer_config=layers,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[0, 2, 5],
        mask_token_id=63,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(VERIFIER),
        ),
        **fields,
    )
    torch.manual_seed(2)
    model = (dspark_core.DSparkDraftModel if kind == "dspark" else dflash_core.DFlashDraftModel)(config)
    for name, value in model.named_parameters():
        if not value.requires_grad:
            continue  # the target's
        if "norm" in name:
            torch.nn.init.normal_(value, 1.0, 0.2)
        else:
            torch.nn.init.normal_(value, 0.0, 0.3)
    if model.use_draft_vocab:
        ids = torch.randperm(VOCAB)[: model.draft_vocab_size].sort().values
        model.load_vocab_mappings(torch.isin(torch.arange(VOCAB), ids), ids - torch.arange(len(ids)))
    model.load_verifier_weights()
    return model.eval()


def make_inputs() -> dict[str, np.ndarray]:
    """Returns one document whose tokens are the target's likeliest ones, so that labels mean the same to everyone."""
    weights = safetensors.torch.load_file(f"{VERIFIER}/model.safetensors")
    torch.manual_seed(3)
    hidden = torch.randn(1, LENGTH, WIDTH)
    normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * weights["model.norm.weight"]
    likeliest = (normed @ weights["lm_head.weight"].T).argmax(-1)
    tokens = torch.cat([torch.tensor([[5]]), likeliest[:, :-1]], dim=1)
    arrays = {"tokens": tokens, "features": torch.randn(1, LENGTH, 3 * WIDTH), "hidden": hidden, "last_hidden": normed}
    arrays |= {"embed": weights["model.embed_tokens.weight"], "head": weights["lm_head.weight"]}
    return {name: value.numpy() for name, value in arrays.items()} | {"anchors": np.array(ANCHORS)}


def run(model, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs the library's forward pass and loss with fixed anchors; logits are those that its loss sees."""
    seen = {}
    core = dspark_core if isinstance(model, dspark_core.DSparkDraftModel) else dflash_core
    original = core.compute_metrics

    def spy(logits, targets, *rest, **options):
        seen["logits"], seen["targets"] = logits, targets
        if core is dspark_core and rest[0] is not None:
            seen["confidence"] = rest[0]
        return original(logits, targets, *rest, **options)

    def anchors(loss_mask, count, block_size):
        return torch.tensor(ANCHORS), torch.ones(count, dtype=torch.bool)

    terms = {"ce": (eager.ce_loss, 0.1), "tv": (eager.tv_loss, 1.8)}  # L1 is twice the total variation
    options = {"tv_loss_fn": eager.tv_loss} if core is dspark_core else {}
    with contextlib.ExitStack() as stack, torch.no_grad():
        for module, name, value in ((core, "compute_metrics", spy), (dflash_core, "select_anchors", anchors)):
            before = getattr(module, name)
            setattr(module, name, value)
            stack.callback(setattr, module, name, before)
        _, loss, metrics = model(
            hidden_states=torch.tensor(inputs["features"]),
            input_ids=torch.tensor(inputs["tokens"]),
            loss_mask=torch.ones(1, LENGTH),
            verifier_last_hidden_states=torch.tensor(inputs["hidden"]),
            document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
            loss_config=terms,
            gamma=4.0,
            max_anchors=len(ANCHORS),
            **options,
        )
    kept = {"loss": loss, "ce": metrics["ce_loss_sum"], "tv": metrics["tv_loss_sum"], **seen}
    if "confidence_loss_sum" in metrics:
        kept["confidence_loss"] = metrics["confidence_loss_sum"]
    shape = (len(ANCHORS), BLOCK, -1)
    return {name: value.reshape(shape).numpy() if value.ndim else value.numpy() for name, value in kept.items()}


def load(folder: pathlib.Path):
    """Loads a drafter with the library's own loader."""
    config = SpeculatorModel.config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(folder, config=config).eval()


def main(out: pathlib.Path) -> None:
    """Records every case."""
    out = out.resolve()
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        write_verifier(pathlib.Path(VERIFIER))
        inputs = make_inputs()
        for case in CASES:
            shutil.rmtree(out / case, ignore_errors=True)
            model = make(case)
            model.save_pretrained(out / case)
            (out / case / "config.py").unlink()  # the library's source, which it copies along
            (out / case / "model.safetensors").chmod(0o644)
            results = run(model, inputs)
            again = run(load(out / case), inputs)
            for name, value in results.items():
                np.testing.assert_array_equal(again[name], value, err_msg=f"{case} {name}")
            np.savez_compressed(out / case / "golden.npz", **inputs, **results)
            print(case, {name: value.shape for name, value in results.items()})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
