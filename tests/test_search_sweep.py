"""Searches as ``greenroom sweep`` runs them: their points are simulated, and go on where they stopped."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from sim.results import read_json
from sim.sweeps.coordinator import Outcome, run_sweep
from sim.types import ConfigError
from tests.sweeping import contents, points_of, results_in

SPACE = ("cache.ratio=interval(0.1,0.9)", "policy=lru,fifo,lfu")
LEARNING = ("sweep.search=optuna", "sweep.points=6", "sweep.batch=2", "sweep=serial")


def swept(trace: Path, folder: Path, *words: str) -> Outcome:
    return run_sweep(points_of(trace, *SPACE, *words, folder=folder))


@pytest.fixture(scope="module")
def learnt(small_trace_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a sweep that learns, done without a stop."""
    pytest.importorskip("optuna")
    folder = tmp_path_factory.mktemp("learnt") / "s"
    swept(small_trace_file, folder, *LEARNING)
    return folder


@pytest.mark.parametrize("kind", ["random", "lhs"])
def test_drawn_values_reach_the_simulator(
    kind: str, small_trace_file: Path, tmp_path: Path
) -> None:
    outcome = swept(
        small_trace_file, tmp_path / "s", f"sweep.search={kind}", "sweep.points=4", "sweep=serial"
    )
    assert len(outcome.rows) == 4
    for row in outcome.rows:
        assert abs(float(row["overrides"]["cache.ratio"]) - row["cache_ratio"]) < 1 / 16
        assert row["policy"] == row["overrides"]["policy"]
    assert len({row["cache_ratio"] for row in outcome.rows}) > 1


def test_a_list_runs_its_points(small_trace_file: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("policy,cache.ratio\nlru,0.25\nfifo,\n")
    words = (
        "sweep.search=list",
        f"sweep.list={tmp_path / 'a.csv'}",
        "sweep=serial",
        "cache.ratio=0.5",
    )
    outcome = run_sweep(points_of(small_trace_file, *words, folder=tmp_path / "s"))
    assert [(row["policy"], row["cache_ratio"]) for row in outcome.rows] == [
        ("lru", 0.25),
        ("fifo", 0.5),
    ]


@pytest.mark.parametrize("done", [1, 4])
def test_a_search_that_was_stopped_goes_on_as_if_it_had_not_been(
    done: int, learnt: Path, small_trace_file: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(learnt, tmp_path / "s")
    for number in results_in(folder)[done:]:
        (folder / str(number) / "summary.json").unlink()
    outcome = swept(small_trace_file, folder, *LEARNING)
    assert outcome.num_resumed == done
    assert contents(folder) == contents(learnt)


def test_a_pool_of_workers_learns_the_same(
    learnt: Path, small_trace_file: Path, tmp_path: Path
) -> None:
    swept(small_trace_file, tmp_path / "s", *LEARNING, "sweep=pool", "sweep.workers=2")
    assert contents(tmp_path / "s") == contents(learnt)


def test_points_that_follow_from_a_crash_make_room_when_it_goes_well(
    learnt: Path, small_trace_file: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(learnt, tmp_path / "s")
    overrides = [
        f"{k}={v}" for k, v in read_json(folder / "1" / "summary.json")["overrides"].items()
    ]
    told = {"overrides": overrides, "error": "out of luck", "kind": "mistake"}
    (folder / "1" / "summary.json").unlink()
    (folder / "1" / "error.json").write_text(json.dumps(told))
    outcome = swept(small_trace_file, folder, *LEARNING)
    assert [row["point"] for row in outcome.failed] == [1]
    chosen = [row["overrides"] for row in outcome.rows]
    assert chosen != [
        read_json(learnt / str(n) / "summary.json")["overrides"] for n in range(6) if n != 1
    ]
    swept(small_trace_file, folder, *LEARNING, "sweep.retry_failed=true")
    assert contents(folder) == contents(learnt)


def test_a_misspelt_objective_is_told_of_with_the_nearest_column(
    small_trace_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.objective = tokens_per_sec: .*'tokens_per_s'"):
        swept(small_trace_file, tmp_path / "s", *LEARNING, "sweep.objective=tokens_per_sec")


def test_a_column_may_be_minimised(small_trace_file: Path, tmp_path: Path) -> None:
    words = (*LEARNING, "sweep.objective=tpot_ns_p50", "sweep.direction=minimize")
    outcome = swept(small_trace_file, tmp_path / "s", *words)
    with (tmp_path / "s" / "results.csv").open() as file:
        assert all(float(line["tpot_ns_p50"]) > 0 for line in csv.DictReader(file))
    assert len(outcome.rows) == 6
