"""Records what Hugging Face's logits processors do, into processors.json beside this file.

  python tests/golden/record_processors.py        # needs torch and transformers; the tests don't

Every case is one row of logits with one setting of each processor. Recorded are the probabilities after all of them, in
the order of `GenerationMixin._get_logits_processor`: repetition penalty, temperature, top-k, top-p, min-p; zero means
dropped. Logits are multiples of 1/8 (exact in float32, with many ties) or random; top-p is never within 1e-5 of a
cumulative sum, where rounding would decide.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.generation import logits_process as hf

SETTINGS = {
    "temperature": (1.0, 0.5, 1.7),
    "top_k": (0, 1, 3, 8, 16, 40),
    "top_p": (1.0, 0.05, 0.5, 0.9, 0.999),
    "min_p": (0.0, 0.1, 0.4, 1.0),
    "repetition_penalty": (1.0, 1.3, 0.7),
}


def rows(rng: np.random.Generator) -> list[list[float]]:
    """Rows of 16 logits: random, with ties everywhere, all equal, one far ahead, with zeros of both signs, -inf."""
    tied = (rng.integers(-16, 16, (4, 16)) / 8).tolist()
    few = rng.choice([-1.0, 0.5, 2.0], (2, 16)).tolist()
    ahead = [*(rng.integers(-8, 8, 15) / 8).tolist(), 30.0]
    zeros = [0.0, -0.0, 1.0, 0.0, -0.0, -1.0, 0.0, 1.0, -0.0, 0.0, -1.0, 1.0, 0.0, -0.0, 0.0, -0.0]
    masked = np.where(rng.random(16) < 0.4, -np.inf, rng.integers(-16, 16, 16) / 8).tolist()
    loud = np.float32(rng.standard_normal((3, 16)) * 3).tolist()
    return [*tied, *few, [1.0] * 16, ahead, zeros, masked, *loud]


def process(logits: list[float], seen: list[int], case: dict[str, float]) -> tuple[list[float], float]:
    """Returns the probabilities, and how far top-p is from the nearest cumulative sum."""
    scores, ids = torch.tensor([logits], dtype=torch.float32), torch.tensor([seen])
    margin = 1.0
    if case["repetition_penalty"] != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(case["repetition_penalty"])(ids, scores)
    if case["temperature"] != 1:
        scores = hf.TemperatureLogitsWarper(case["temperature"])(ids, scores)
    if case["top_k"]:
        scores = hf.TopKLogitsWarper(int(case["top_k"]))(ids, scores)
    if case["top_p"] < 1:
        sums = torch.sort(scores.double())[0].softmax(-1).cumsum(-1)
        margin = float((sums - (1 - case["top_p"])).abs().min())
        scores = hf.TopPLogitsWarper(case["top_p"])(ids, scores)
    if case["min_p"]:
        scores = hf.MinPLogitsWarper(case["min_p"])(ids, scores)
    return scores.softmax(-1)[0].tolist(), margin


def main() -> None:
    """Records every processor alone on every row, and random combinations."""
    rng = np.random.default_rng(0)
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    alone = [{**off, name: value} for name, values in SETTINGS.items() for value in values]
    everything = [dict(zip(SETTINGS, values)) for values in itertools.product(*SETTINGS.values())]
    records, table = [], rows(rng)
    for row, logits in enumerate(table):
        mixed = [everything[i] for i in rng.choice(len(everything), 24, replace=False)]
        for case in [*alone, *mixed]:
            seen = rng.integers(0, 16, 5).tolist()
            probabilities, margin = process(logits, seen, case)
            if margin > 1e-5:
                rounded = [float(f"{p:.7g}") if p > 0 else 0 for p in probabilities]
                records.append({"row": row, "seen": seen, **case, "probabilities": rounded})
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    lines = ",\n".join(json.dumps(record, separators=(",", ":")) for record in records)
    logits = json.dumps([[None if value == -np.inf else value for value in row] for row in table])
    text = f'{{"versions": {json.dumps(versions)}, "logits": {logits}, "records": [\n{lines}\n]}}\n'
    Path(__file__).with_name("processors.json").write_text(text)
    print(f"{len(records)} cases")


if __name__ == "__main__":
    main()
