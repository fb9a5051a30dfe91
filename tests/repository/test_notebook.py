"""The notebook of examples/ runs from its first cell to its last, in a folder of its own."""

import pytest
from conftest import ROOT


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_learns_draws_and_plays(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it ipykernel does not show what processes print
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(ROOT / "examples" / "cartpole.ipynb", 4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs).splitlines()
    returns = [float(line.split()[-1]) for line in printed if line.startswith("iteration")]
    assert len(returns) == 10 and returns[-1] > 150 > returns[0]
    shown = [kind for output in outputs for kind in output.get("data", {})]
    assert "image/png" in shown and "text/html" in shown
    assert not [output for output in outputs if output.output_type == "error"]
