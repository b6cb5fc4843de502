"""The quickstart notebook runs from top to bottom, at toy size and offline."""

import os
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"


def test_notebook_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert not cell.get("execution_count")


def test_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_NOTEBOOK_SMALL", "1")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # nearly all of the time is compilation
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    notebook = nbformat.read(NOTEBOOK, as_version=4)

    # The kernel inherits the environment; whatever it writes goes to its working folder.
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(figures) == 2, "the training curve and the acceptance by position"
    pages = [output for output in outputs if "background:#b7e1cd" in output.get("data", {}).get("text/html", "")]
    assert len(pages) == 2, "accepted tokens are marked for prompt lookup and for the trained drafter"
    assert (tmp_path / "runs" / "quickstart_small" / "metrics.csv").exists()
