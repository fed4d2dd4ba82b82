"""``greenroom plot``: what it draws, where to, what it leaves out and why, and mistakes in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sim.cli import main
from sim.figures.table import FIGURES
from sim.results import write_sweep
from tests.figure_rows import run
from tests.test_cli import greenroom


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """The folder of a sweep of two policies at two sizes, as its table alone."""
    rows = [
        run(p, size, speed) for p, speed in (("lru", 10.0), ("b", 20.0)) for size in (0.25, 0.5)
    ]
    folder = tmp_path / "sweep"
    folder.mkdir()
    write_sweep(folder, rows)
    return folder


def test_all_that_can_be_drawn_is_drawn_and_the_rest_is_accounted_for(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(sweep), "--format", "png"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[-1] == f"Figures: {sweep / 'figures'}"
    drawn = {Path(line.partition(": ")[2]).stem for line in lines[:-1]}
    left_out = {name for line in err.splitlines() for name in line.split(": ")[1].split(", ")}
    assert drawn | left_out == set(FIGURES)
    assert not drawn & left_out
    assert {"throughput_by_cache", "speed_by_bytes", "stall_breakdown"} <= drawn
    assert {path.name for path in (sweep / "figures").iterdir()} == {
        f"{name}.png" for name in drawn
    }
    assert "left out: gantt, heatmap, residency: needs the folder of one run" in err


def test_formats_names_and_folder_can_be_chosen(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "paper"
    words = ["plot", str(sweep / "results.parquet"), "tpot_by_cache", "--format", "svg,pdf"]
    assert main([*words, "--out", str(out), "--policies", "lru"]) == 0
    assert {path.name for path in out.iterdir()} == {"tpot_by_cache.svg", "tpot_by_cache.pdf"}
    assert capsys.readouterr().out.splitlines()[-1] == f"Figures: {out}"
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    assert main([*words, "--out", str(out), "--policies", "lru"]) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == first


def test_the_list_has_each_figure_and_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "--list"]) == 0
    out = capsys.readouterr().out
    for name, entry in FIGURES.items():
        assert f"{name} " in out
        assert entry.shows in out
        assert entry.needs in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "DIR: missing, must be the folder of a run, a sweep or a validation"),
        (["nowhere"], "nowhere: no such file or folder"),
        (["league"], "league: no such file or folder; the folder of results comes before the figures"),
        (["DIR", "leage"], "figure = leage: no such figure; did you mean 'league'?"),
        (["DIR", "gantt"], "gantt: needs the folder of one run, and this is a sweep"),
        (["DIR", "--format", "pgn"], "--format pgn: must be of pdf, png, svg; did you mean 'png'?"),
        (["DIR", "--format", ","], "--format ,: must name at least one"),
        (["DIR", "--policies", "lur"], "--policies lur: no such policy in these results; did you mean"),
        (["DIR", "league", "--baseline", "lur"], "--baseline lur: no such policy in these results"),
        (["DIR", "--windw", "1", "2"], "--windw: no such option; did you mean '--window'?"),
        (["DIR", "--layer", "two"], "--layer = two: must be a whole number"),
        (["--trace", "tniy"], "tniy: no such file, nor a bundled trace; did you mean 'tiny'?"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    words: list[str], message: str, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", *(str(sweep) if word == "DIR" else word for word in words)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("greenroom plot: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("summary.json", "{", "cannot be read, is it damaged?"),
        ("validation.json", "[]", "must hold one JSON object"),
        ("validation.json", '{"runs": []}', "holds no runs of a validation"),
        ("other.csv", "a,b\n1,2\n", "must be results.parquet, summary.json, validation.json or"),
        ("results.parquet", "no table", "cannot be read as a table of results"),
    ],
)  # fmt: skip
def test_damaged_files_are_told_of(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["plot", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_results_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(tmp_path)]) == 2
    assert "holds no results" in capsys.readouterr().err


def test_a_part_of_a_trace_is_drawn_whatever_its_path(
    tmp_path: Path, small_trace_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it's a, trace").symlink_to(small_trace_file)
    assert main(["plot", "--trace", "it's a, trace#layers=1:2", "heatmap", "--format", "svg"]) == 0
    assert "layer 0; " in next(tmp_path.rglob("heatmap.svg")).read_text()


def test_a_run_of_the_command_line_is_drawn(tmp_path: Path, small_trace_file: Path) -> None:
    done = greenroom(
        "sim", f"trace.path={small_trace_file}", "output.events=true", "output.belady=false",
        f"hydra.run.dir={tmp_path / 'run'}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    drawn = greenroom(
        "plot", "run", "gantt", "residency", "heatmap", "--format", "svg", cwd=tmp_path
    )
    assert drawn.returncode == 0, drawn.stderr
    assert drawn.stdout.splitlines()[-1] == f"Figures: {Path('run') / 'figures'}"
    names = {path.name for path in (tmp_path / "run" / "figures").iterdir()}
    assert names == {"gantt.svg", "residency.svg", "heatmap.svg"}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["policy"] == "lru"


def test_the_command_itself_loads_no_plotting() -> None:
    import subprocess

    code = (
        "import sim.plot_cli, sim.figures.table, sim.figures.source, sim.policy_looks, sys; "
        "print([m for m in ('matplotlib', 'pandas', 'torch', 'hydra') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
