"""Chunks for tests of engines, and a policy in a user's folder that tells where it ran, or dies of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from sim.sweeps.chunk import Chunk, Point, run_chunk
from sim.sweeps.engine import Ended, Engine
from tests.configs import composed

POLICY = '''
import os
import signal
import sys
import time
from pathlib import Path

from sim.policies.classic import LRU


class Marking(LRU):
    """LRU that leaves a file named by where it runs, and may be told to sleep or to die.

    ``once`` is a file: who takes it away is killed.
    """

    def __init__(self, marks: str, ends: str = "well", once: str | None = None) -> None:
        super().__init__()
        where = os.environ.get("SLURMD_NODENAME") or self._ray_node()
        Path(marks, f"{where}-{os.getpid()}").touch()
        self._ends = ends
        self._once = once
        if ends == "slowly":
            time.sleep(600)

    def _takes(self, file):
        try:
            os.unlink(file)
        except FileNotFoundError:
            return False
        return True

    def _ray_node(self) -> str:
        ray = sys.modules.get("ray")
        return ray.get_runtime_context().get_node_id() if ray and ray.is_initialized() else "here"

    def choose_victim(self, evictable, view):
        if self._ends == "killed" or (self._ends == "killed_once" and self._takes(self._once)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().choose_victim(evictable, view)
'''


def write_policy(folder: Path) -> None:
    """Put the policy where a user would have it, as ``marking.Marking``."""
    (folder / "marking.py").write_text(POLICY, encoding="utf-8")
    (folder / "marks").mkdir(exist_ok=True)


def make_chunks(
    folder: Path, trace: Path, marks: Path, ends: list[list[str]], first: int = 0
) -> list[Chunk]:
    """Return a chunk for each list, with a point for each way of ending in it: well, slowly, killed."""
    base = composed(
        f"trace.path={trace}",
        "policy.cache._target_=marking.Marking",
        f"+policy.cache.marks={marks}",
        "+policy.cache.ends=well",
    )
    chunks = []
    for ways in ends:
        numbers = range(first, first + len(ways))
        points = tuple(_point(number, way) for number, way in zip(numbers, ways, strict=True))
        chunks.append(Chunk(str(folder), {0: base}, points))
        first += len(ways)
    return chunks


def _point(number: int, ends: str) -> Point:
    ratio = (number % 9 + 1) / 10
    edits = ((("cache", "ratio"), ratio), (("policy", "cache", "ends"), ends))
    return Point(number, (f"cache.ratio={ratio}",), 0, edits)


def swept_points(user: Path, trace: Path) -> list[str]:
    """Return a command line of eight points, of which the first to evict anything is killed, once."""
    (user / "once").touch()
    shutil.copy(trace, user / "own.parquet")
    return [
        "trace.path=own.parquet",
        "cache.ratio=0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8",
        "policy.cache._target_=marking.Marking",
        f"+policy.cache.marks={user / 'marks'}",
        "+policy.cache.ends=killed_once",
        f"+policy.cache.once={user / 'once'}",
    ]


def sweep(folder: Path, *arguments: str) -> str:
    """Run ``greenroom sweep`` as a user does, to its good end; return what it says."""
    command = [sys.executable, "-m", "sim.cli", "sweep", f"sweep.dir={folder}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"Results: {folder}"
    return done.stdout + done.stderr


def interrupted(user: Path, *arguments: str) -> int:
    """Run ``greenroom sweep`` until a chunk runs, stop it, and return its exit code."""
    command = [
        sys.executable,
        "-m",
        "sim.cli",
        "sweep",
        f"sweep.dir={user / 'stopped'}",
        *arguments,
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as process:
        while not list((user / "marks").iterdir()):
            assert process.poll() is None, "it ended before any chunk ran"
            time.sleep(0.1)
        process.terminate()
        return process.wait(60)


def nodes(marks: Path) -> set[str]:
    """Return the nodes that have left marks."""
    return {mark.name.partition("-")[0] for mark in marks.iterdir()}


def wait_for_marks(marks: Path, count: int, engine: Engine) -> set[str]:
    """Wait until so many chunks run, none of which ends; return their nodes."""
    while len(list(marks.iterdir())) < count:
        assert engine.wait(0.2) == []
    return nodes(marks)


def wait_for(engine: Engine, count: int, seconds: float = 60.0) -> list[Ended]:
    """Return so many chunks that ended."""
    ended: list[Ended] = []
    until = time.monotonic() + seconds
    while len(ended) < count and time.monotonic() < until:
        ended += engine.wait(0.5)
    assert len(ended) == count, f"{len(ended)} of {count} chunks ended in {seconds} s"
    return ended


def results(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all summaries in a sweep's folder."""
    files = sorted(folder.glob("*/summary.json"))
    return {file.parent.name: file.read_bytes() for file in files}


def results_here(chunks: list[Chunk], folder: Path) -> dict[str, bytes]:
    """Return the bytes of the summaries that this process makes of the same points."""
    for chunk in chunks:
        run_chunk(Chunk(str(folder), chunk.bases, chunk.points))
    return results(folder)
