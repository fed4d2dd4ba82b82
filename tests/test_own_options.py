"""Folders of the user's own options, given once, several times, or as Hydra's searchpath."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.cases import compose_case
from sim.cli import main
from sim.own_options import with_folders
from sim.types import ConfigError

ASKED = ("predict", "machine=desk", "usage=mine", "--json", "-")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two folders below the current one: machines in both, of one name; usage in the second."""
    monkeypatch.chdir(tmp_path)
    for folder, machine in (("a", "rtx3090"), ("b, c", "rtx4090")):
        (tmp_path / folder / "machine").mkdir(parents=True)
        text = f"defaults: [{machine}, _self_]\nname: desk {machine}\n"
        (tmp_path / folder / "machine" / "desk.yaml").write_text(text)
    (tmp_path / "b, c" / "usage").mkdir()
    (tmp_path / "b, c" / "usage" / "mine.yaml").write_text(
        "name: mine\nsource: 'stated'\ndistinct: null\nhits: null\n"
    )
    return "a", "b, c"


@pytest.mark.parametrize(
    "words",
    [
        ["--config-dir", "a", "--config-dir", "b, c"],
        ['hydra.searchpath=[a,"b, c"]'],
        ["--config-dir", "a", 'hydra.searchpath=["file://b, c"]'],
    ],
)
def test_folders_work_together_and_the_first_counts(
    words: list[str], folders: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASKED, *words]) == 0
    names: Any = json.loads(capsys.readouterr().out)["asked"]["names"]
    assert (names["machine"], names["usage"]) == ("desk rtx3090", "mine")


def test_the_other_way_round_the_other_counts(folders: tuple[str, str]) -> None:
    chosen = ["machine=desk"]
    assert compose_case(chosen, folders).config["machine"]["name"] == "desk rtx3090"
    assert compose_case(chosen, folders[::-1]).config["machine"]["name"] == "desk rtx4090"


def test_every_command_takes_several_folders(
    folders: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--config-dir", "a", "--config-dir", "none"]
    commands = (["predict"], ["advise"], ["calibrate", "published"], ["published"], ["machines"])
    for command in commands:
        assert main([*command, *both]) == 2
        said = f"greenroom {command[0]}: error: --config-dir none: no such folder\n"
        assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("hydra.searchpath=[a,none]", "hydra.searchpath = none: no such folder"),
        ("hydra.searchpath=a", "must be a list of folders"),
    ],
)
def test_a_searchpath_that_cannot_be(
    override: str, rule: str, folders: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=rule):
        with_folders([override], [])
    assert main(["predict", "machine=desk", override]) == 2
    told = capsys.readouterr().err
    assert rule in told
    assert told.count("\n") == 1


def test_without_folders_the_overrides_are_as_they_were() -> None:
    assert with_folders(["machine=rtx4090"], []) == ["machine=rtx4090"]
    package = with_folders(["hydra.searchpath=[pkg://conf]"], [])
    assert package == ['hydra.searchpath=["pkg://conf"]']
