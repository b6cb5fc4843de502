"""The training data on disk: the target's own answers with everything that training reads of the target.

A data folder holds shards, one per generated batch, written atomically, so that an interrupted run goes on where it
stopped. A shard has, for the flattened tokens of its sequences: `tokens`, `features` (the tapped layers, bfloat16 as
uint16), `last_hidden` (what the LM head reads, float16) and `log_normalizer` (log of the softmax's denominator over the
whole vocabulary), so that training never runs the target again. `manifest.json` says how it was made.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dspark_jax.config import TrainConfig
from dspark_jax.text_stats import is_loop

_SHARD_ARRAYS = ("tokens", "lengths", "prompt_lengths", "features", "last_hidden", "log_normalizer")


class DataError(ValueError):
    """Training data that can't be used; the message says which and why."""


@dataclasses.dataclass(frozen=True)
class Answered:
    """One prompt and the target's answer.

    Attributes:
      tokens: [n] int32, prompt and answer.
      prompt_length: tokens of the prompt.
      features: [n - 1, M, D] bfloat16, tapped outputs of all tokens but the last one (which was never read).
      last_hidden: [n - 1, D] float16.
      log_normalizer: [n - 1] float32; valid from the prompt's last token on.
    """

    tokens: np.ndarray
    prompt_length: int
    features: np.ndarray
    last_hidden: np.ndarray
    log_normalizer: np.ndarray


def shard_path(folder: Path, index: int) -> Path:
    """Returns the path of shard `index`."""
    return folder / f"shard_{index:05d}.npz"


def write_atomically(path: Path, write) -> None:
    """Calls `write(file)` on a temporary file beside `path`, then moves it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically."""
    text = json.dumps(value, indent=2, sort_keys=True) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def write_shard(folder: Path, index: int, sequences: Sequence[Answered], extra: dict[str, np.ndarray]) -> None:
    """Writes one shard.

    Args:
      folder: the data folder.
      index: number of the shard.
      sequences: its sequences, at least one.
      extra: further arrays (the target's probability mass per token).
    """
    arrays = {
        "tokens": np.concatenate([s.tokens for s in sequences]),
        "lengths": np.asarray([len(s.tokens) for s in sequences], np.int32),
        "prompt_lengths": np.asarray([s.prompt_length for s in sequences], np.int32),
        "features": np.concatenate([s.features for s in sequences]).view(np.uint16),
        "last_hidden": np.concatenate([s.last_hidden for s in sequences]),
        "log_normalizer": np.concatenate([s.log_normalizer for s in sequences]),
        **extra,
    }
    write_atomically(shard_path(folder, index), lambda file: np.savez(file, **arrays))


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """All shards of a folder in memory-mapped or loaded arrays.

    Attributes:
      tokens: per sequence [n] int32.
      prompt_lengths: per sequence.
      features: per sequence [n - 1, M, D] bfloat16.
      last_hidden: per sequence [n - 1, D] float16.
      log_normalizer: per sequence [n - 1] float32.
      mass: [V] float64, sum of the target's next-token probabilities over all answer positions.
    """

    tokens: list[np.ndarray]
    prompt_lengths: list[int]
    features: list[np.ndarray]
    last_hidden: list[np.ndarray]
    log_normalizer: list[np.ndarray]
    mass: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def answer_tokens(self) -> int:
        """Number of answer tokens."""
        return sum(len(t) - p for t, p in zip(self.tokens, self.prompt_lengths))


def read_dataset(folder: Path, drop_loops: bool, min_answer: int = 4) -> Dataset:
    """Reads every shard of a data folder.

    Args:
      folder: the data folder.
      drop_loops: leave out answers that repeat themselves (`text_stats.is_loop`).
      min_answer: leave out answers shorter than this (nothing to learn from).

    Raises:
      DataError: there is no shard, or one is damaged.
    """
    paths = sorted(folder.glob("shard_*.npz"))
    if not paths:
        raise DataError(f"{folder}: no training data; run train.distill without --resume to make it")
    columns: dict[str, list[Any]] = {name: [] for name in ("tokens", "prompt", "features", "hidden", "log")}
    mass = 0.0
    for path in paths:
        try:
            with np.load(path) as arrays:
                shard = {name: arrays[name] for name in (*_SHARD_ARRAYS, "mass")}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{path}: damaged shard ({error}); delete it and run again, it is made anew") from error
        ends = np.cumsum(shard["lengths"])
        features = shard["features"].view(ml_dtypes.bfloat16)
        mass = mass + shard["mass"].astype(np.float64)
        for i, end in enumerate(ends):
            length, prompt = int(shard["lengths"][i]), int(shard["prompt_lengths"][i])
            tokens = shard["tokens"][end - length : end]
            if length - prompt < min_answer or (drop_loops and is_loop(tokens[prompt:].tolist())):
                continue
            start, stop = end - length - i, end - i - 1  # one position less per sequence
            columns["tokens"].append(tokens)
            columns["prompt"].append(prompt)
            columns["features"].append(features[start:stop])
            columns["hidden"].append(shard["last_hidden"][start:stop])
            columns["log"].append(shard["log_normalizer"][start:stop])
    if not columns["tokens"]:
        raise DataError(f"{folder}: every answer was filtered out (too short or looping); make more data")
    return Dataset(
        columns["tokens"], columns["prompt"], columns["features"], columns["hidden"], columns["log"], np.asarray(mass)
    )


def row_contents(seed: int, lengths: Sequence[int], max_tokens: int, pack: bool) -> Iterator[list[int]]:
    """Yields the sequences of one row after the other, without end: every epoch a new permutation.

    Args:
      seed: seed of the run; the rows are a pure function of the arguments.
      lengths: tokens of each sequence.
      max_tokens: T, tokens of a row; a longer sequence counts as T, since it is cut.
      pack: put the next sequence of the permutation into the same row while it fits.
    """
    for epoch in itertools.count():
        row: list[int] = []
        free = 0
        for i in np.random.default_rng([seed, epoch]).permutation(len(lengths)).tolist():
            size = min(lengths[i], max_tokens)
            if row and not (pack and size <= free):
                yield row
                row = []
            free = (free if row else max_tokens) - size
            row.append(i)
        yield row


def batches(dataset: Dataset, cfg: TrainConfig, first: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the batches of steps `first`..`cfg.steps` - 1, each one made while the step before it runs."""
    rows = row_contents(cfg.seed, [len(tokens) for tokens in dataset.tokens], cfg.max_tokens, cfg.pack)
    rows = itertools.islice(rows, first * cfg.batch_size, None)

    def make() -> dict[str, np.ndarray]:
        return make_batch(dataset, list(itertools.islice(rows, cfg.batch_size)), cfg.max_tokens)

    with futures.ThreadPoolExecutor(max_workers=1) as pool:
        coming = pool.submit(make)
        for step in range(first, cfg.steps):
            batch = coming.result()
            if step + 1 < cfg.steps:
                coming = pool.submit(make)
            yield batch


def make_batch(dataset: Dataset, rows: Sequence[Sequence[int]], max_tokens: int) -> dict[str, np.ndarray]:
    """Puts sequences into rows of one shape, one behind the other.

    Args:
      dataset: the sequences.
      rows: [B] the sequences of each row; a single one is cut to `max_tokens`, several fit.
      max_tokens: T.

    Returns:
      tokens [B, T] int32, features [B, T, M, D] bfloat16, last_hidden [B, T, D] float16, log_normalizer [B, T],
      start [B, T] int32 (the place where each token's sequence begins) and response [B, T] bool (answer tokens).
    """
    batch = len(rows)
    _, taps, width = dataset.features[0].shape
    out = {
        "tokens": np.zeros((batch, max_tokens), np.int32),
        "features": np.zeros((batch, max_tokens, taps, width), ml_dtypes.bfloat16),
        "last_hidden": np.zeros((batch, max_tokens, width), np.float16),
        "log_normalizer": np.zeros((batch, max_tokens), np.float32),
        "start": np.zeros((batch, max_tokens), np.int32),
        "response": np.zeros((batch, max_tokens), bool),
    }
    for row, contents in enumerate(rows):
        start = 0
        for i in contents:
            end = min(start + len(dataset.tokens[i]), max_tokens)
            read = min(start + len(dataset.features[i]), max_tokens)
            out["tokens"][row, start:end] = dataset.tokens[i][: end - start]
            out["features"][row, start:read] = dataset.features[i][: read - start]
            out["last_hidden"][row, start:read] = dataset.last_hidden[i][: read - start]
            out["log_normalizer"][row, start:read] = dataset.log_normalizer[i][: read - start]
            out["start"][row, start:] = start
            out["response"][row, start + dataset.prompt_lengths[i] : end] = True
            start = end
    return out
