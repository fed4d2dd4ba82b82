"""The arrows between packages, and how files are named and sized (docs/architecture.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("sim", "traces", "hwmodels", "real", "conf")
OURS = {*PACKAGES, "tests", "notebooks"}
HEAVY = {"torch", "transformers", "safetensors"}
MAX_LINES = 320


def sources(*folders: str) -> list[str]:
    """Return our Python files, as paths from the root."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file.relative_to(ROOT).as_posix() for file in files if "__pycache__" not in file.parts]


@cache
def imports(source: str) -> frozenset[str]:
    """Return the dotted names that a file imports anywhere, in functions and for types too."""
    tree = ast.parse((ROOT / source).read_text(encoding="utf-8"))
    return frozenset(name for node in ast.walk(tree) for name in _names(node, source))


def _names(node: ast.AST, source: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = source.split("/")[: -node.level] if node.level else []
        base = ".".join([*parents, *([node.module] if node.module else [])])
        yield from (f"{base}.{alias.name}" for alias in node.names)


def tops(source: str) -> set[str]:
    return {name.split(".")[0] for name in imports(source)}


def within(name: str, *modules: str) -> bool:
    """Tell whether a dotted name is one of the modules or lies in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


@pytest.mark.parametrize("package", ["traces", "hwmodels"])
def test_traces_and_hwmodels_import_nothing_else_of_ours(package: str) -> None:
    assert {
        f: tops(f) & OURS - {package} for f in sources(package) if tops(f) & OURS - {package}
    } == {}


def test_policies_import_only_types_policies_numpy_and_the_standard_library() -> None:
    for source in sources("sim/policies"):
        for name in imports(source):
            top = name.split(".")[0]
            allowed = within(name, "sim.types", "sim.policies") or top == "numpy"
            assert allowed or top in sys.stdlib_module_names, f"{source} imports {name}"


def test_only_the_timeline_imports_simpy() -> None:
    assert [f for f in sources(*PACKAGES) if "simpy" in tops(f)] == ["sim/timeline.py"]


def test_torch_and_its_kin_stay_in_real_recording_and_the_tiny_model() -> None:
    homes = ("real/", "traces/record", "traces/tiny/", "traces/importers/torch_file.py")
    strays = [f for f in sources(*PACKAGES) if tops(f) & HEAVY and not f.startswith(homes)]
    assert strays == []


def test_sim_never_imports_real() -> None:
    assert [f for f in sources("sim", "conf") if "real" in tops(f)] == []


def test_real_never_imports_the_timeline() -> None:
    assert [f for f in sources("real") if any(within(n, "sim.timeline") for n in imports(f))] == []


def test_no_file_has_a_name_that_says_nothing() -> None:
    empty = ("utils", "util", "helpers", "helper", "manager", "misc", "common")
    assert [f for f in sources(*PACKAGES, "tests") if Path(f).stem in empty] == []


def test_no_source_file_is_too_long_to_read() -> None:
    lines = {
        f: len((ROOT / f).read_text(encoding="utf-8").splitlines()) for f in sources(*PACKAGES)
    }
    assert {f: count for f, count in lines.items() if count > MAX_LINES} == {}


def test_every_package_is_listed_for_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {Path(f).parent.as_posix().replace("/", ".") for f in sources(*PACKAGES)}
    assert found - listed == set()


def test_importing_the_simulator_loads_nothing_heavy() -> None:
    modules = ["sim.timeline", "sim.lockstep"]
    modules += ["sim.cli"] if (ROOT / "sim" / "cli.py").exists() else []
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) & {*HEAVY, "pandas", "matplotlib"} == set()
