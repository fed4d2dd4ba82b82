"""A sweep that was stopped goes on where it was, and ends as if it had never been stopped."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from sim.cli import main
from sim.sweeps.coordinator import run_sweep
from sim.sweeps.store import Store
from sim.types import ConfigError
from tests.sweeping import (
    about,
    begun,
    contents,
    greenroom,
    kill_alone,
    points_of,
    results_in,
    user_folder,
    wait_for_points,
)

SLOW = ("policy=slow", "cache.ratio=0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8", "workload.batch_size=1,2")


@pytest.fixture(scope="module")
def unbroken(small_trace_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = user_folder(tmp_path_factory.mktemp("unbroken"))
    words = points_of(small_trace_file, *SLOW, folder=where / "s")
    done = greenroom("sweep", "--config-dir", "my_conf", *words, cwd=where)
    assert done.returncode == 0, done.stderr
    return where / "s"


@pytest.mark.usefixtures("heeds_sigint")
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_stopped_at_any_point_it_ends_as_if_it_had_never_been(
    unbroken: Path, small_trace_file: Path, tmp_path: Path, sign: int
) -> None:
    where = user_folder(tmp_path)
    words = points_of(small_trace_file, *SLOW, folder=where / "s")
    process = begun("sweep", "--config-dir", "my_conf", *words, cwd=where)
    wait_for_points(where / "s", 3)
    workers = _children(process.pid)
    assert workers, "there is nobody to be left behind"
    kill_alone(process, sign)
    assert _gone(workers), "workers outlive the sweep"
    before = {n: _written(where / "s", n) for n in results_in(where / "s")}
    assert 3 <= len(before) < 16
    assert not (where / "s" / "results.parquet").exists()
    if sign != signal.SIGKILL:
        assert process.returncode == 130
        assert f"go on with: greenroom sweep --resume {where / 's'}" in process.stderr.read()
    done = greenroom("sweep", "--resume", "s", cwd=where)
    assert done.returncode == 0, done.stderr
    assert f"{len(before)} of 16 points had a result already" in done.stderr
    assert {n: _written(where / "s", n) for n in before} == before, "points ran twice"
    assert contents(where / "s") == contents(unbroken)


def _written(folder: Path, number: int) -> int:
    return (folder / str(number) / "summary.json").stat().st_mtime_ns


def _children(pid: int) -> list[int]:
    """Return the processes that a process has begun, and those that these have."""
    found, left = [], [pid]
    while left:
        parent = left.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            own = [int(word) for word in task.read_text().split()]
            found += own
            left += own
    return found


def _gone(pids: list[int], timeout_s: float = 10) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_worker_loses_nothing(
    unbroken: Path, small_trace_file: Path, tmp_path: Path
) -> None:
    where = user_folder(tmp_path)
    words = points_of(small_trace_file, *SLOW, folder=where / "s")
    process = begun("sweep", "--config-dir", "my_conf", *words, "sweep.chunk=8", cwd=where)
    killed = 0
    for count in (2, 5):
        wait_for_points(where / "s", count)
        for pid in _children(process.pid):
            if "forkserver" in Path(f"/proc/{pid}/cmdline").read_text():
                continue
            if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
                killed += 1
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert contents(where / "s") == contents(unbroken)


def test_the_same_words_again_run_nothing(small_trace_file: Path, tmp_path: Path) -> None:
    words = points_of(small_trace_file, "cache.ratio=0.25,0.5,9", "sweep=serial",
                      folder=tmp_path / "s")  # fmt: skip
    first = run_sweep(words)
    before = contents(tmp_path / "s")
    again = run_sweep(words)
    assert (first.num_resumed, again.num_resumed) == (0, 3)
    assert again.rows == first.rows
    assert again.failed == first.failed
    assert contents(tmp_path / "s") == before


def test_crashes_run_again_and_mistakes_only_when_asked_to(
    small_trace_file: Path, tmp_path: Path
) -> None:
    words = points_of(small_trace_file, "cache.ratio=0.25,9", "sweep=serial", folder=tmp_path / "s")
    run_sweep(words)
    error = tmp_path / "s" / "1" / "error.json"
    told = json.loads(error.read_text())
    error.write_text(json.dumps({**told, "kind": "crash", "error": "out of memory"}))
    assert run_sweep(words).failed[0]["error"] != "out of memory"
    assert run_sweep(words).num_resumed == 2
    assert run_sweep([*words, "sweep.retry_failed=true"]).num_resumed == 1


def test_another_engine_may_go_on_with_a_sweep(small_trace_file: Path, tmp_path: Path) -> None:
    words = points_of(
        small_trace_file, "cache.ratio=0.25,0.5", "sweep=serial", folder=tmp_path / "s"
    )
    run_sweep(words)
    before = contents(tmp_path / "s")
    (tmp_path / "s" / "1" / "summary.json").unlink()
    file = tmp_path / "s" / "sweep.json"
    told = json.loads(file.read_text())
    told["arguments"] += ["sweep.partition=gone", "sweep.chunk=1"]
    file.write_text(json.dumps(told))
    done = greenroom("sweep", "--resume", "s", "sweep=pool", "sweep.workers=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "engine pool" in done.stderr
    after = contents(tmp_path / "s")
    assert {name: after[name] for name in before} == before
    assert "sweep.chunk=1" in about(tmp_path / "s")["arguments"]


def test_two_processes_do_not_work_in_one_folder(small_trace_file: Path, tmp_path: Path) -> None:
    where = user_folder(tmp_path)
    words = points_of(small_trace_file, *SLOW, "+policy.cache.seconds=60", folder=where / "s")
    process = begun("sweep", "--config-dir", "my_conf", *words, cwd=where)
    while not (where / "s" / "sweep.json").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    other = greenroom("sweep", "--config-dir", "my_conf", *words, cwd=where)
    kill_alone(process, signal.SIGTERM)
    assert other.returncode == 2
    assert "another sweep is at work there" in other.stderr


def test_damaged_and_strange_folders_are_told_of(
    small_trace_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "s"
    words = points_of(small_trace_file, "cache.ratio=0.25,0.5,7", "sweep=serial", folder=folder)
    run_sweep(words)

    def complaint(*words: str) -> str:
        assert main(["sweep", *words]) == 2
        return capsys.readouterr().err

    asked = about(folder)
    for name, odd in (
        *(("arguments", [1]), ("arguments", "policy=lru"), ("config_dirs", 3)),
        *(("config_dirs", [None]), ("working_folder", 5), ("working_folder", "a\0")),
    ):
        (folder / "sweep.json").write_text(json.dumps({**asked, name: odd}))
        assert f"sweep.json: {name}: missing, or no " in complaint("--resume", "s")
    for damaged in ("", json.dumps(asked)[:50], "[]", "{}"):
        (folder / "sweep.json").write_text(damaged)
        told = complaint("--resume", "s")
        assert "sweep.json" in told
        assert told.count("\n") == 1
    (folder / "sweep.json").write_text(json.dumps(asked))
    summary = json.loads((folder / "1" / "summary.json").read_text())
    for text, message in (
        ("{", "cannot be read"),
        ("{}", "has no policy"),
        (json.dumps(summary | {"provenance": 1}), "has provenance = 1: must be an object"),
    ):
        (folder / "1" / "summary.json").write_text(text)
        told = complaint("--resume", "s")
        assert f"{folder / '1' / 'summary.json'}: {message}".replace(": has", " has") in told
        assert "; delete the file, and its point runs again" in told
    (folder / "1" / "summary.json").write_text(json.dumps(summary | {"later": "x"}))
    (folder / "0" / "summary.json").write_text(json.dumps(summary | {"later": 1.5}))
    assert "later: differs in kind between the summaries" in complaint("--resume", "s")
    (folder / "1" / "summary.json").unlink()
    (folder / "0" / "summary.json").unlink()
    (folder / "2" / "error.json").write_text(
        json.dumps({"overrides": [3, "y" * 9999], "error": ["x" * 9999], "kind": "mistake"})
    )
    (folder / "²").mkdir()  # a digit that is no number
    told = complaint("--resume", "s")
    assert "point 2 failed: 3 yyy" in told
    assert "yyy...: ['xxx" in told
    assert max(map(len, told.splitlines())) < 2000
    (folder / "sweep.json").unlink()
    assert "holds runs that are not of `greenroom sweep`" in complaint(*words)


def test_what_the_folder_says_of_the_sweep(small_trace_file: Path, tmp_path: Path) -> None:
    words = points_of(
        small_trace_file, "cache.ratio=0.25,0.5", "sweep=serial", folder=tmp_path / "s"
    )
    run_sweep(words)
    told = about(tmp_path / "s")
    assert told["arguments"] == words
    assert told["num_points"] == 2
    assert told["first"][0] == "cache.ratio=0.25"
    assert told["last"][0] == "cache.ratio=0.5"


def test_replacing_takes_away_runs_and_nothing_else(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / "2024" / "photos").mkdir(parents=True)
    for name in (
        "3/summary.json",
        "4/error.json",
        "5/.tmp-1-steps.parquet",
        "6/.hydra/config.yaml",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert store.numbers() == [3, 4, 5, 6]
    with pytest.raises(ConfigError, match="runs that are not of"):
        store.open({"identity": {}}, overwrite=False)
    store.open({"identity": {}}, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2024", "sweep.json"]
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(ConfigError, match="is it damaged"):
        store.open({"identity": {"points": "a"}}, overwrite=False)
    store.open({"identity": {"points": "a"}}, overwrite=True)
    assert about(tmp_path)["identity"] == {"points": "a"}


def test_results_stay_when_a_trace_that_was_missing_is_there(
    small_trace_file: Path, tmp_path: Path
) -> None:
    late = tmp_path / "late.parquet"
    words = [f"trace.path={small_trace_file},{late}", "output.belady=false", "sweep=serial"]
    words += ["policy=lru", "cache.ratio=0.5", f"sweep.dir={tmp_path / 's'}"]
    assert [row["point"] for row in run_sweep(words).failed] == [1]
    first = (tmp_path / "s" / "0" / "summary.json").stat().st_mtime_ns
    late.write_bytes(small_trace_file.read_bytes())
    outcome = run_sweep([*words, "sweep.retry_failed=true"])
    assert ([row["point"] for row in outcome.rows], outcome.num_resumed) == ([0, 1], 1)
    assert (tmp_path / "s" / "0" / "summary.json").stat().st_mtime_ns == first


def test_files_of_others_are_left_alone_where_no_sweep_is(
    small_trace_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    words = points_of(small_trace_file, "cache.ratio=0.25,0.5", "sweep=serial", folder=folder)
    for name in ("config.yaml", "results.csv"):
        (folder / name).write_text("mine: 1\n")
        with pytest.raises(ConfigError, match=f"holds {name}, but no sweep; give another"):
            run_sweep(words)
        assert (folder / name).read_text() == "mine: 1\n"
        (folder / name).unlink()
    (folder / "config.yaml").write_text("mine: 1\n")
    assert len(run_sweep([*words, "sweep.overwrite=true"]).rows) == 2
