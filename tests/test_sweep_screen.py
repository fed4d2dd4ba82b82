"""What a sweep shows while it runs: one bar on a terminal, nothing in a pipe."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

from tests.sweeping import command, environment, greenroom, points_of


def test_a_terminal_sees_one_bar_with_done_failed_and_the_time_left(
    small_trace_file: Path, tmp_path: Path
) -> None:
    words = points_of(small_trace_file, "cache.ratio=0.25,0.5,9", folder=tmp_path / "s")
    ours, theirs = pty.openpty()
    wide = {**environment(), "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command("sweep", *words), cwd=tmp_path, stderr=theirs,
                               stdout=subprocess.DEVNULL, env=wide)  # fmt: skip
    os.close(theirs)
    shown = _read_all(ours)
    assert process.wait(30) == 2
    bars = re.findall(r"points .*?(\d)/3 +(1 failed)?", shown)
    assert ("3", "1 failed") in bars
    assert re.search(r"\d:\d\d:\d\d|-:--:--", shown)
    assert "greenroom sweep: 1 of 3 points failed" in shown


def _read_all(descriptor: int) -> str:
    parts = []
    while True:
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        parts.append(part)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(parts).decode())


def test_a_pipe_sees_results_only(small_trace_file: Path, tmp_path: Path) -> None:
    words = points_of(small_trace_file, "cache.ratio=0.25,0.5", folder=tmp_path / "s")
    done = greenroom("sweep", *words, cwd=tmp_path)
    assert done.stderr == f"greenroom sweep: 2 points, engine pool, into {tmp_path / 's'}\n"
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[-1] == f"Results: {tmp_path / 's'}"
