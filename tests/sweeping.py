"""Sweeps of a short trace, run as a user would or in this process."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sim.results import ERROR, SUMMARY

ROOT = Path(__file__).parents[1]
FAILING_POLICIES = r'''
import os
import signal
import time
from pathlib import Path

from sim.policies.classic import LRU


class Deadly(LRU):
    """Kills its own process, for the first so many times that it is made."""

    def __init__(self, times: int = 1000, note: str = "deaths") -> None:
        super().__init__()
        with open(note, "a") as file:
            file.write("x")
        if len(Path(note).read_text()) <= times:
            os.kill(os.getpid(), signal.SIGKILL)


class Slow(LRU):
    """Takes its time."""

    def __init__(self, seconds: float = 0.2) -> None:
        super().__init__()
        time.sleep(seconds)


class Broken(LRU):
    """Has a defect."""

    def choose_victim(self, evictable, view):
        raise ZeroDivisionError("no good")


class Rude(LRU):
    """Does to its process what a policy should not."""

    def __init__(self, how: str = "print") -> None:
        super().__init__()
        if how == "print":
            print("HELLO", flush=True)
            os.write(1, b"HELLO\n")
        elif how == "interrupt":
            raise KeyboardInterrupt
        elif how == "base":
            raise BaseException("of the lowest sort")
        elif how == "strange":
            raise ValueError("bad \udce9 and \x1b[31m\n" + "long" * 100_000)
        elif how == "leave":
            os.chdir("/")
'''
"""A user's module, as ``my_policies.py`` in the folder where the sweep is begun."""


def points_of(trace: Path, *words: str, folder: Path) -> list[str]:
    """Return the words of a sweep of a short trace."""
    return [*words, f"trace.path={trace}", "output.belady=false", f"sweep.dir={folder}"]


def user_folder(folder: Path) -> Path:
    """Make a folder with a user's policies and their options in ``my_conf``."""
    (folder / "my_policies.py").write_text(FAILING_POLICIES)
    options = folder / "my_conf" / "policy"
    options.mkdir(parents=True)
    for name, params in (
        ("deadly", ""),
        ("deadly_once", "  times: 1\n  note: deaths_of_once\n"),
        ("slow", ""),
        ("broken", ""),
        ("rude", "  how: print\n"),
    ):
        kind = name.partition("_")[0].capitalize()
        text = f"name: {name}\nscope: global\ncache:\n  _target_: my_policies.{kind}\n{params}"
        (options / f"{name}.yaml").write_text(text)
    return folder


def greenroom(*words: str, cwd: Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder."""
    return subprocess.run(command(*words), cwd=cwd, env=environment(), capture_output=True, text=True,
                          timeout=timeout_s, check=False)  # fmt: skip


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "sim.cli", *words]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def begun(*words: str, cwd: Path) -> subprocess.Popen[str]:
    """Begin the command in a process group of its own."""
    return subprocess.Popen(command(*words), cwd=cwd, env=environment(), stdout=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip


def wait_for_points(folder: Path, count: int, timeout_s: float = 60) -> None:
    """Wait until so many points have a result."""
    end = time.monotonic() + timeout_s
    while len(results_in(folder)) < count:
        assert time.monotonic() < end, "the sweep does not get on"
        time.sleep(0.02)


def results_in(folder: Path) -> list[int]:
    """Return the numbers of points that have a result."""
    found = [f for name in (SUMMARY, ERROR) for f in folder.glob(f"*/{name}")]
    return sorted(int(file.parent.name) for file in found)


def contents(folder: Path) -> dict[str, str]:
    """Return a digest of every file of a sweep but of what tells where and when it was run."""
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.name not in _OF_THE_DAY]
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


_OF_THE_DAY = ("sweep.json", ".lock")


def kill_alone(process: subprocess.Popen[str], sign: int = signal.SIGKILL) -> None:
    """Send a signal to a process alone, not to its workers."""
    os.kill(process.pid, sign)
    process.wait(30)


def about(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return found
