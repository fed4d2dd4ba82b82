"""Writes each .ipynb from its .py, without outputs and always the same bytes: to run after an edit.

python notebooks/pair.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def notebooks() -> list[Path]:
    """Return the notebooks as .py files, in their order."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def paired(script: Path) -> str:
    """Return the .ipynb file of a notebook in py:percent."""
    import jupytext
    import nbformat

    notebook: Any = jupytext.read(script)
    del notebook.metadata["jupytext"]
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number:02}"  # jupytext draws another one each time
        cell.metadata = {}
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    return str(nbformat.writes(notebook, indent=1)).rstrip() + "\n"


if __name__ == "__main__":
    for script in notebooks():
        script.with_suffix(".ipynb").write_text(paired(script), encoding="utf-8")
