"""The notebooks' code runs from top to bottom, as it stands."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, capsys, monkeypatch):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells), "commit it without outputs"
    scope: dict = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), str(path), "exec"), scope)
    printed = capsys.readouterr().out
    assert "tokens in the cache" in printed and "�" not in printed
    assert len(printed.split()) > 40  # text came out, not only tables
