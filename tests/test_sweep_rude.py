"""What is done to a sweep's processes and its folder while it runs spoils no result, and is told of."""

from __future__ import annotations

import csv
import os
import shutil
import signal
from pathlib import Path

import pytest

from sim.sweeps.coordinator import run_sweep
from sim.types import ConfigError
from tests.sweeping import (
    begun,
    contents,
    greenroom,
    points_of,
    results_in,
    user_folder,
    wait_for_points,
)


def test_what_a_policy_does_to_its_process_touches_no_other_point(
    small_trace_file: Path, tmp_path: Path
) -> None:
    where = user_folder(tmp_path)
    shutil.copy(small_trace_file, where / "t.parquet")
    words = ("policy=rude", "policy.cache.how=leave,print,interrupt,base,strange", "cache.ratio=0.25,0.5",
             "trace.path=t.parquet", "output.belady=false", "sweep.dir=s")  # fmt: skip
    done = greenroom("sweep", "--config-dir", "my_conf", *words, "sweep.chunk=10", cwd=where)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "HELLO" in done.stderr
    assert "HELLO" not in done.stdout
    assert done.stdout.splitlines()[-1] == f"Results: {where / 's'}"
    with (where / "s" / "errors.csv").open(encoding="utf-8") as file:
        errors = {int(line["point"]): line["error"] for line in csv.DictReader(file)}
    assert sorted(errors) == [0, 1, 4, 5, 6, 7, 8, 9], "others than those that fail by themselves"
    assert errors[4] == "the worker died of it 3 times: KeyboardInterrupt"
    assert "of the lowest sort" in errors[6]
    assert errors[8].isprintable()
    assert len(errors[8]) < 2000


def test_serial_sweeps_go_on_after_any_exception(small_trace_file: Path, tmp_path: Path) -> None:
    where = user_folder(tmp_path)
    words = points_of(small_trace_file, "policy=rude", "policy.cache.how=base,print", "sweep=serial",
                      folder=where / "s")  # fmt: skip
    done = greenroom("sweep", "--config-dir", "my_conf", *words, cwd=where)
    assert results_in(where / "s") == [0, 1], done.stderr
    assert "1 of 2 points failed" in done.stderr
    assert "HELLO" in done.stderr


def test_a_killed_server_of_workers_is_replaced(small_trace_file: Path, tmp_path: Path) -> None:
    where = user_folder(tmp_path)
    words = points_of(small_trace_file, "policy=slow", "cache.ratio=0.1,0.2,0.3,0.4,0.5,0.6",
                      "sweep.workers=2", folder=where / "s")  # fmt: skip
    process = begun("sweep", "--config-dir", "my_conf", *words, cwd=where)
    wait_for_points(where / "s", 1)
    (server,) = _servers(process.pid)
    os.kill(server, signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert "Traceback" not in told
    assert results_in(where / "s") == list(range(6))
    assert (where / "s" / "results.parquet").exists()


def _servers(pid: int) -> list[int]:
    own = [t.read_text().split() for t in Path(f"/proc/{pid}/task").glob("*/children")]
    pids = [int(word) for words in own for word in words]
    return [p for p in pids if "forkserver" in Path(f"/proc/{p}/cmdline").read_text()]


def test_results_that_vanish_while_the_sweep_runs_are_missed(
    small_trace_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "s"
    words = points_of(small_trace_file, "cache.ratio=0.2,0.3", "sweep=serial", folder=folder)
    run_sweep(words)
    (folder / "1" / "summary.json").unlink()

    class Thief:
        """Takes the first point's result as soon as the second one is there."""

        def __call__(self, done: int, failed: int) -> None:
            if done == 2:
                (folder / "0" / "summary.json").unlink()

    class Shown:
        def __enter__(self) -> Thief:
            return Thief()

        def __exit__(self, *error: object) -> None:
            pass

    with pytest.raises(ConfigError, match="results of 1 points were taken away"):
        run_sweep(words, bar=lambda total: Shown())


def test_what_a_killed_sweep_left_unfinished_is_taken_away(
    small_trace_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "s"
    words = points_of(small_trace_file, "cache.ratio=0.2,0.3", "sweep=serial", folder=folder)
    run_sweep(words)
    before = contents(folder)
    for process in (str(99_999_999), "9" * 30):  # of which no process has the second
        (folder / f".tmp-{process}-results.parquet").write_bytes(b"half")
    kept = folder / ".tmp-²-mine"  # nor is this a number
    kept.touch()
    run_sweep(words)
    kept.unlink()
    assert contents(folder) == before
