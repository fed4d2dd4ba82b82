"""The guide to machines and models works as it stands: its files, its commands, what it shows of them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sim.cli import main
from tests.configs import CONF, options
from tests.test_headers import ENDS, gguf, layer_tensors

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", GUIDE, re.DOTALL)
NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def write_files(folder: Path) -> None:
    """Write the guide's files where their first lines say, and those that a reader has."""
    for language, text in BLOCKS:
        if language == "yaml":
            file = folder / text.splitlines()[0].removeprefix("# ")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        if language == "csv":
            (folder / "measured.csv").write_text(text, encoding="utf-8")
    (folder / "traces").symlink_to(ROOT / "traces")
    layers = [tensor for i in (0, 1) for tensor in layer_tensors(i, "Q6_K", "Q4_K")]
    (folder / "mine.gguf").write_bytes(gguf([*ENDS, *layers]))


def ran(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command, which must succeed, and return what it prints; Hydra is for a process of its own."""
    if words[:2] != ["greenroom", "sim"]:
        assert main(words[1:]) == 0, capsys.readouterr().err
        return capsys.readouterr().out
    command = [sys.executable, "-m", "sim.cli", *words[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def plain(line: str) -> str:
    return " ".join(re.sub("[│┃]", " ", line).split())


def assert_shown(shown: str, output: str) -> None:
    """Check that each line shown is one of the output's: the same words, and numbers within a tenth."""
    lines = {NUMBER.sub("0", plain(line)): plain(line) for line in output.splitlines()}
    for line in map(plain, shown.splitlines()):
        words = NUMBER.sub("0", line)
        assert words in lines, f"{line}: not in\n{output}"
        there = [float(found.replace(",", "")) for found in NUMBER.findall(lines[words])]
        told = [float(found.replace(",", "")) for found in NUMBER.findall(line)]
        assert told == pytest.approx(there, rel=0.1), f"{line}: now {lines[words]}"


def test_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    count, output = 0, ""
    for language, text in BLOCKS:
        if language == "text":
            assert_shown(text, output)
        for line in text.splitlines() if language == "sh" else ():
            output, count = ran(shlex.split(line, comments=True), capsys), count + 1
    assert count > 15
    assert (tmp_path / "my_conf/machine/rtx5090_wsl2_fitted.yaml").is_file()
    assert (tmp_path / "table.csv").is_file()


def rows_of(head: str) -> list[list[str]]:
    """Return the cells of the table whose first column is named so."""
    (table,) = re.findall(rf"\| {head} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", GUIDE)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]


def named(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_every_engine_and_placement_is_told() -> None:
    section = GUIDE[GUIDE.index("## 3.") : GUIDE.index("## 4.")]
    assert set(options("engine")) <= named(section)
    assert {name for row in rows_of("engine") for name in named(row[0])} <= set(options("engine"))
    assert {row[0].split("`")[1] for row in rows_of("placement")} == set(options("placement"))
    assert set(options("usage")) <= named(GUIDE)


def test_the_fitted_figures_are_those_of_the_calibration() -> None:
    spec = yaml.safe_load((CONF / "calibration" / "published.yaml").read_text(encoding="utf-8"))
    pairs = [name.removeprefix("engine/").split(".") for name in spec["parameters"]]
    fitted = {(engine, field) for engine, field in pairs if "/" not in engine}
    told = {(row[0].strip("`"), field) for row in rows_of("engine") for field in named(row[-1])}
    assert told - {("llama_cpp_2025", "llama_cpp")} == fitted


def test_the_kinds_of_rows_are_those_there_are() -> None:
    from hwmodels.bench_kinds import KINDS

    told = {}
    for kinds, columns, _, rate in rows_of("kind"):
        for kind in named(kinds):
            told[kind] = set(re.findall(r"(\w+)(?: \([^)]*\))?(?:, |$)", columns)), rate == "yes"
    assert told == {
        name: (set(kind.arguments), kind.work is not None) for name, kind in KINDS.items()
    }


def test_the_help_of_a_run_offers_its_own_groups_only(tmp_path: Path) -> None:
    """Not calibration, published, placement, usage: other commands read those. A user's own are there."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "mine.yaml").write_text("name: mine\n", encoding="utf-8")
    command = [sys.executable, "-m", "sim.cli", "sim", "--config-dir", str(tmp_path), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    listed = done.stdout.split("GROUP=OPTION ==\n")[1].split("\n\n")[0]
    groups = dict(line.split(": ", 1) for line in listed.splitlines())
    parts = {f"machine/{part}" for part in ("gpu", "cpu", "link", "storage")}
    own = {"trace", "model", "machine", "engine", "policy", "stages", "experiment"}
    assert set(groups) == own | parts
    assert "mine" in groups["policy"].split(", ")
    assert groups["engine"].split(", ") == options("engine")
