"""What ``greenroom machines`` says of machines and parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.machines_cli import machines, main, parts
from tests.configs import options
from tests.round_hardware import read


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """Return the words of each line that the command prints."""
    assert main(list(arguments)) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_all_machines_and_parts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    first = {words[0] for words in shown(capsys) if words}
    groups = ["machine", *(f"machine/{part}" for part in ("gpu", "cpu", "link", "storage"))]
    assert {name for group in groups for name in options(group)} <= first


def test_a_line_tells_parts_or_key_figures(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys)
    assert ["rtx4090_x4", "rtx4090", "xeon_6454s", "pcie4_x16_switch", "-"] in lines
    row = next(words for words in lines if words[:3] == ["rtx4090", "NVIDIA", "GeForce"])
    assert row[5:] == ["24", "GiB", "867", "GB/s", "I", "165", "TF"]
    assert ["pcie4_x16", "PCIe", "4.0", "x16", "25.2", "GB/s", "X"] in lines
    assert ["ufs_2_1", "UFS", "2.1", "0.82", "GB/s", "X"] in lines


@pytest.mark.parametrize("name", options("machine"))
def test_listed_parts_are_those_that_compose(name: str) -> None:
    plain = read("machine", name)
    chosen = machines()[name]
    assert set(chosen) == {part for part in plain if part != "name"}
    assert {part: plain[part]["name"] for part in chosen} == {
        part: parts(part)[option]["name"] for part, option in chosen.items()
    }


def test_one_machine_is_shown_with_rate_derate_and_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = shown(capsys, "gh200")
    assert lines[0] == ["gh200:", "discrete"]
    rows = {words[0]: words for words in lines if words}
    assert rows["memory_derate"][1:3] == ["0.65", "I"]  # of the CPU, whose figures come later
    assert rows["h2d_bytes_per_s"][1:6] == ["375", "GB/s", "375", "GB/s", "X"]
    assert rows["copy_setup_ns"][1:4] == ["10", "us", "I"]
    assert rows["numa_bytes_per_s"][1:3] == ["none", "I"]


def test_a_machine_is_shown_as_it_would_be_with_overrides(
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = ("machine/gpu=rtx3090", "machine.gpu.memory_derate=0.5")
    lines = shown(capsys, "gh200", *overrides)
    assert ["gpu:", "NVIDIA", "GeForce", "RTX", "3090"] in lines
    row = next(words for words in lines if words[:1] == ["memory_bytes_per_s"])
    assert row[1:5] == ["936", "GB/s", "468", "GB/s"]


def test_one_part_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "storage/sd_card_uhs_1")
    assert lines[0] == ["storage:", "SD", "card,", "UHS-I"]
    row = next(words for words in lines if words[:1] == ["curve"])
    assert row[4:8] == ["I", "no", "measurement", "was"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["rtx409"], "machine = rtx409: no such machine or part; did you mean 'rtx4090'?"),
        (["gpu/h100_sx"], "did you mean 'gpu/h100_sxm'?"),
        (["rtx4090", "machine/gpu=rtx30"], "machine/gpu = rtx30: no such option; did you mean"),
        (["rtx4090", "machine.gpu.count=0"], "machine/rtx4090: gpu.count = 0: must be > 0"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert line in told
    assert told.count("\n") == 1


def test_a_machine_of_ones_own_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "machine"
    folder.mkdir()
    (folder / "mine.yaml").write_text("defaults: [rtx4090, _self_]\nname: mine\n", encoding="utf-8")
    assert main(["mine", "--config-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("mine: discrete")
    assert main(["mine"]) == 2
    assert "machine = mine: no such machine" in capsys.readouterr().err


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a machine whose processor begins with a bundled one."""
    (tmp_path / "machine" / "cpu").mkdir(parents=True)
    (tmp_path / "machine" / "cpu" / "mine.yaml").write_text(
        "defaults: [ryzen_7950x, _self_]\nname: My Ryzen\ncores: 12\nsources: {cores: 'M: mine'}\n"
    )
    (tmp_path / "machine" / "desk.yaml").write_text(
        "defaults: [gpu: rtx3090, cpu: mine, link: pcie4_x8, storage: null, _self_]\nname: desk\n"
    )
    return tmp_path


def test_ones_own_are_listed_and_parts_of_them_shown(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, "--config-dir", str(own))
    assert ["desk", "rtx3090", "mine", "pcie4_x8", "-"] in lines
    bundled = next(words for words in lines if words[:1] == ["ryzen_7950x"])
    mine = next(words for words in lines if words[:3] == ["mine", "My", "Ryzen"])
    assert mine[3:-1] == bundled[5:-1]  # of the file that it begins with
    assert (mine[-1], bundled[-1]) == ("12", "16")
    rows = {
        words[0]: words for words in shown(capsys, "cpu/mine", "--config-dir", str(own)) if words
    }
    assert rows["cores"][1:] == ["12", "M", "mine"]
    assert rows["threads_used"][1] == "8"


def test_of_two_folders_the_first_counts(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    (other / "machine").mkdir(parents=True)
    (other / "machine" / "desk.yaml").write_text("defaults: [gh200, _self_]\nname: another\n")
    both = ("--config-dir", str(own), "--config-dir", str(other))
    assert shown(capsys, "desk", *both)[0] == ["desk:", "discrete"]
    assert shown(capsys, "desk", *both[2:], *both[:2])[0] == ["another:", "discrete"]
    lines = shown(capsys, *both[2:], *both[:2])
    assert ["desk", "gh200", "grace", "nvlink_c2c", "-"] in lines


@pytest.mark.parametrize("name", [[], ["desk"]])
def test_a_folder_that_is_not_there_is_said(
    name: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*name, "--config-dir", "/nonexistent"]) == 2
    told = capsys.readouterr().err
    assert told == "greenroom machines: error: --config-dir /nonexistent: no such folder\n"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("cores: [", "cpu/mine.yaml: line"),
        ("name: mine\n", "machine/cpu/mine: memory_bytes: missing"),
        ("defaults: [mine, _self_]\n", "defaults: mine: begins with itself"),
        ("defaults: [nothing, _self_]\n", "defaults: nothing: no such option"),
        (
            "defaults: [ryzen_7950x]\nmemory_derate: fast\n",
            "machine/cpu/mine: memory_derate = fast: must be a number",
        ),
    ],
)
def test_a_file_that_cannot_be_listed_is_named(
    own: Path, text: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (own / "machine" / "cpu" / "mine.yaml").write_text(text)
    assert main(["--config-dir", str(own)]) == 2
    told = capsys.readouterr().err
    assert rule in told
    assert told.count("\n") == 1
