"""Metrics of a run in CSV files and TensorBoard; a resumed run continues both."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import tensorboardX


class MetricsWriter:
    """Appends rows to `NAME.csv` and scalars to TensorBoard event files.

    Rows after the step that a run resumes from are dropped: they are computed again.
    """

    def __init__(self, folder: Path, resume_step: int):
        self._folder = folder
        self._resume_step = resume_step
        self._opened: set[str] = set()
        self._board = tensorboardX.SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step + 1)

    def write(self, name: str, step: int, values: dict[str, float]) -> None:
        """Appends one row: `step` and the values, the same columns every time."""
        path = self._folder / f"{name}.csv"
        row = {"step": step, **{key: f"{value:.7g}" for key, value in values.items()}}
        if name not in self._opened:
            self._opened.add(name)
            kept = []
            if path.exists():
                with open(path, newline="") as file:
                    kept = [old for old in csv.DictReader(file) if int(old["step"]) <= self._resume_step]
            with open(path, "w", newline="") as file:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
                writer.writerows({key: old.get(key, "") for key in row} for old in kept)
        with open(path, "a", newline="") as file:
            csv.DictWriter(file, list(row)).writerow(row)
        for key, value in values.items():
            if math.isfinite(value):
                self._board.add_scalar(f"{name}/{key}", value, step)

    def close(self) -> None:
        """Flushes and closes the event files."""
        self._board.close()
