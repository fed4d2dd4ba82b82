"""The notebooks: each runs as it is committed, its two files agree, and none computes a metric."""

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")
pytest.importorskip("pandas")

HERE = Path(__file__).parents[1] / "notebooks"
PAIR = runpy.run_path(str(HERE / "pair.py"))
SCRIPTS = PAIR["notebooks"]()
NEED_TORCH = ("05", "06")
AS_IPYNB = "03"
"""It defines classes in cells, which a kernel's process alone knows: it runs in one."""
SOURCES = ("greenroom", "pandas", "sim.policies.base", "sim.types", "real.remoe_api")
"""What a notebook may import beside the standard library."""
COMPUTING = ("mean", "median", "sum", "std", "quantile", "diff", "div", "cumsum", "corr")


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_runs_and_leaves_nothing_behind(script, tmp_path):
    if script.stem.startswith(AS_IPYNB):
        pytest.skip("runs as .ipynb")
    if script.stem.startswith(NEED_TORCH):
        pytest.importorskip("torch")
    found = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_it_runs_in_a_kernel_and_shows_tables_and_figures(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    (script,) = (path for path in SCRIPTS if path.stem.startswith(AS_IPYNB))
    notebook = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    kinds = [set(output.get("data", {})) for output in outputs]
    assert [output.output_type for output in outputs if output.output_type == "stream"] == []
    assert sum("text/html" in kind for kind in kinds) == 6
    assert sum("image/png" in kind for kind in kinds) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_its_two_files_agree_and_hold_no_output(script):
    committed = script.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert committed == PAIR["paired"](script), "run: python notebooks/pair.py"
    cells = jupytext.reads(committed, "ipynb").cells
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


def test_every_notebook_is_listed():
    told = (HERE / "README.md").read_text(encoding="utf-8")
    assert [path.stem[:2] for path in SCRIPTS] == [f"{n:02}" for n in range(1, len(SCRIPTS) + 1)]
    assert all(f"({path.stem}.ipynb)" in told for path in SCRIPTS)
    assert sorted(HERE.glob("*.ipynb")) == [path.with_suffix(".ipynb") for path in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_reads_results_and_defines_no_metric(script):
    tree = ast.parse(script.read_text(encoding="utf-8"))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    inside = {id(node) for kind in classes for node in ast.walk(kind)}
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            assert module in SOURCES or module.partition(".")[0] in sys.stdlib_module_names
        if isinstance(node, ast.BinOp):
            is_path = isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant)
            assert is_path or isinstance(node.op, ast.BitAnd), ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr not in COMPUTING, ast.unparse(node)
