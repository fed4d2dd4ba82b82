"""Every experiment composes, and its points build; every figure is named with the command that makes it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sim.build import build
from sim.composing import composing
from sim.sweeps.chunk import config_of
from sim.sweeps.question import Question, question_of
from sim.sweeps.space import PointSettings
from sim.types import ConfigError
from tests.configs import CONF, options
from tests.public_data import routing_file
from traces.schema import TraceError

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
EXPERIMENTS = options("experiment")
NEEDS_PUBLIC = re.compile(r"\$\{oc\.env:GREENROOM_PUBLIC_DATA,\.\}")


def source(name: str) -> str:
    """Return the file of an experiment."""
    return (CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")


def needs_public_data(name: str) -> bool:
    """Tell whether an experiment, or the one it begins with, reads public traces."""
    begins_with = re.findall(r"^  - (\w+)$", source(name), re.MULTILINE)
    parents = [parent for parent in begins_with if parent in EXPERIMENTS]
    return bool(NEEDS_PUBLIC.search(source(name))) or any(map(needs_public_data, parents))


def covering(question: Question) -> Iterator[PointSettings]:
    """Yield the first point, the last, and others until each value of each axis is in one of them.

    But for policies: that they exist is checked here, that each of them builds in tests/test_policies.py.
    """
    seen: set[str] = set()
    points = [settings for batch in question.search.batches() for settings in batch]
    for place, settings in enumerate(points):
        assert all(s.value in options("policy") for s in settings if s.key == "policy")
        texts = {setting.text for setting in settings if setting.key != "policy"}
        if texts - seen or place in (0, len(points) - 1):
            seen |= texts
            yield settings


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_points_of_an_experiment_compose_and_build(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if needs_public_data(name):
        folder = routing_file("qwen3-30b-a3b_math.npz").parent
        monkeypatch.setenv("GREENROOM_PUBLIC_DATA", str(folder))
    with composing():
        question = question_of([f"+experiment={name}"])
        for settings in covering(question):
            base, edits = question.composer.place(settings)
            scenario = build(config_of(question.composer.bases[base], edits))
            assert scenario.workload.requests
    assert question.folder == Path.cwd() / "outputs" / name


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if needs_public_data(name)])
def test_without_the_public_data_it_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GREENROOM_PUBLIC_DATA", str(tmp_path))
    with composing():
        question = question_of([f"+experiment={name}"])
        base, edits = question.composer.place(next(covering(question)))
        with pytest.raises((TraceError, ConfigError)) as caught:
            build(config_of(question.composer.bases[base], edits))
    (message,) = str(caught.value).splitlines()
    assert str(tmp_path) in message


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_what_it_asks_and_how_long_it_takes(name: str) -> None:
    first, *comments = source(name).split("\n", 1)[0], *source(name).splitlines()[1:]
    assert first == "# @package _global_"
    header = "\n".join(line for line in comments if line.startswith("#"))
    assert f"greenroom sweep +experiment={name}\n" in f"{header}\n" or (
        f"greenroom sweep +experiment={name} " in header
    )
    assert re.search(r"Time: \w", header)
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` ")]
    assert "?" not in row.split("|")[-2]  # a time that was measured


def test_every_experiment_that_a_document_names_is_there() -> None:
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        named = re.findall(r"\+experiment=([a-z_]+)", file.read_text(encoding="utf-8"))
        assert set(named) <= set(EXPERIMENTS), file.name


def figures_of(text: str) -> list[str]:
    """Return the names of the image files that a document shows."""
    return [os.path.basename(path) for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)]


def test_every_figure_is_named_with_the_command_that_makes_it() -> None:
    told = dict(re.findall(r"^\| \[?`?([\w/]+\.(?:png|svg))`?.*? \| `([^`]+)`", PAGE, re.MULTILINE))
    commands = {os.path.basename(path): command for path, command in told.items()}
    for file in (ROOT / "docs").glob("*.md"):
        text = file.read_text(encoding="utf-8")
        for figure in figures_of(text):
            if figure.endswith(".svg"):  # a drawing
                continue
            assert figure in commands or "greenroom plot" in text or "greenroom report" in text, (
                figure
            )
    for figure in figures_of(README):
        if figure.endswith(".png"):
            assert commands[figure] in README, figure
