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
