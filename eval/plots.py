"""Plot what `eval.measure` found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from eval.measure import Section


def acceptance_by_position(path: str | Path, sections: Sequence[Section]) -> None:
    """Writes a PNG: for each section, the share of accepted draft tokens against their position in the block."""
    figure = Figure(figsize=(4.2 * max(len(sections), 1), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, max(len(sections), 1), squeeze=False, sharey=True)[0]
    for panel, section in zip(panels, sections):
        for method in section.methods:
            points = [(k, share) for k, share in enumerate(method.acceptance_by_position, 1) if share is not None]
            if points:
                panel.plot(*zip(*points), marker="o", markersize=4, label=method.method)
        panel.set_title(f"{section.prompt_set}, T={section.temperature:g} ({section.prompts} prompts)", fontsize=10)
        panel.set_xlabel("position k in the draft block")
        panel.set_ylim(0, 1)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("accepted, of those verified")
    if panels[0].get_legend_handles_labels()[0]:
        panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
