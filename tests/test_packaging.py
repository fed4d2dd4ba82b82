"""What is installed is what is in the tree: a wheel holds every file a run needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
DATA = ("*.yaml", "*.mplstyle", "*.safetensors", "*.json", "*.parquet")


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    # From a copy, so that the tree keeps no build folder and none of an earlier build is picked up.
    kept_out = shutil.ignore_patterns(".*", "build", "outputs", "multirun", "*.egg-info", "tests")
    source = shutil.copytree(REPO, folder / "source", ignore=kept_out)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (wheel,) = folder.glob("greenroom-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_every_module_and_data_file(unpacked_wheel: Path) -> None:
    packages = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    tops = {name.split(".")[0] for name in packages}
    wanted = {
        str(file.relative_to(REPO))
        for top in tops
        for pattern in ("*.py", *DATA)
        for file in (REPO / top).rglob(pattern)
        if "checkpoint_state" not in file.parts
    }
    shipped = {str(f.relative_to(unpacked_wheel)) for f in unpacked_wheel.rglob("*") if f.is_file()}
    assert wanted <= shipped, wanted - shipped
    assert len(wanted) > 50


def test_the_command_runs_from_the_wheel_in_any_folder(
    unpacked_wheel: Path, tmp_path: Path, small_trace_file: Path
) -> None:
    (tmp_path / "conf").mkdir()  # a folder of that name must do no harm
    done = subprocess.run(
        [sys.executable, "-m", "sim", f"trace.path={small_trace_file}", "hydra.run.dir=out"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(unpacked_wheel), "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "summary.json").is_file()


def test_both_commands_start_from_the_wheel(unpacked_wheel: Path, tmp_path: Path) -> None:
    (entry,) = unpacked_wheel.glob("greenroom-*.dist-info/entry_points.txt")
    assert "greenroom = sim.cli:main" in entry.read_text()
    for command in ("sim", "record"):
        done = subprocess.run(
            [sys.executable, "-m", "sim.cli", command, "--help"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(unpacked_wheel), "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "greenroom" in done.stdout


def test_a_script_beside_a_folder_named_greenroom_imports_it(tmp_path: Path) -> None:
    (tmp_path / "greenroom").mkdir()  # as a clone is, seen from the folder above it
    script = tmp_path / "mine.py"
    script.write_text("import greenroom\nprint(greenroom.load_trace.__name__)\n")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={name: text for name, text in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    assert done.stdout == "load_trace\n", done.stderr
