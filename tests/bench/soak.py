"""Runs a sweep for a long time and watches the memory of its processes: it must stay flat.

A sweep of many short runs (several families of policies, cache sizes and seeds) goes on for so many minutes,
then it is interrupted. The resident memory of the sweep's own process and of each worker is read from
``/proc`` all the while. After a warm-up of a fifth of the time, a line is fitted to each: what it rises by
over the rest must be less than ``MOST_SHARE`` of the mean, or than ``MOST_MIB``::

    python tests/bench/soak.py --minutes 30 --workers 1 --out soak     # or: make soak

Prints a table, writes ``soak.csv`` and ``soak.png`` to the folder, and exits with 1 if memory rose.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

MOST_SHARE = 0.03
MOST_MIB = 8.0
WARM_UP = 0.2
EVERY_S = 5.0
POLICIES = "lru,saem,arc,hybrimoe,moe_infinity,mixtral_offloading,belady,lfru"
RATIOS = "0.125,0.25,0.5"


class Sample(NamedTuple):
    """The memory of one process at one time, and how many points had a result by then."""

    seconds: float
    pid: int
    role: str
    rss_mib: float
    num_points: int


def sweep(folder: Path, workers: int, policies: str) -> subprocess.Popen[bytes]:
    """Begin a sweep that takes far longer than anyone waits."""
    words = [
        *(f"policy={policies}", f"cache.ratio={RATIOS}", "workload.seed=range(0,3000)"),
        *("workload.requests=[24,25]", "workload.length=[4,8]"),
        *(f"sweep.workers={workers}", f"sweep.dir={folder}"),
    ]
    with (folder.parent / "sweep.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "sim.cli", "sweep", *words], stdout=log, stderr=log
        )


def descendants(root: int) -> list[tuple[int, str]]:
    """Return the processes below ``root``, itself included, with what each is."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
    found, level = [(root, "sweep")], [root]
    for role in ("server", "worker", "other"):
        level = [pid for pid, parent in parents.items() if parent in level]
        found += [(pid, role) for pid in level]
    return found


def rss_mib(pid: int) -> float | None:
    """Return the resident memory of a process; None if it has gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def count_points(folder: Path) -> int:
    """Return how many points have a folder of their own by now."""
    if not folder.is_dir():
        return 0
    with os.scandir(folder) as entries:
        return sum(entry.name.isdigit() for entry in entries)


def watch(process: subprocess.Popen[bytes], folder: Path, minutes: float) -> list[Sample]:
    """Sample until the time is over or the sweep ends by itself."""
    samples: list[Sample] = []
    began = time.monotonic()
    while (now := time.monotonic() - began) < 60 * minutes and process.poll() is None:
        num_points = count_points(folder)
        for pid, role in descendants(process.pid):
            size = rss_mib(pid)
            if size:
                samples.append(Sample(now, pid, role, size, num_points))
        time.sleep(EVERY_S)
    return samples


def series(samples: list[Sample]) -> dict[tuple[int, str], np.ndarray]:
    """Return [samples, 2] of seconds and MiB of each process that was there for most of the time."""
    last = max(sample.seconds for sample in samples)
    found: dict[tuple[int, str], np.ndarray] = {}
    for key in dict.fromkeys((sample.pid, sample.role) for sample in samples):
        own = np.array([(s.seconds, s.rss_mib) for s in samples if (s.pid, s.role) == key])
        if own[-1, 0] - own[0, 0] > 0.7 * last:
            found[key] = own
    return found


def growth_mib(own: np.ndarray) -> tuple[float, float]:
    """Return what the fitted line rises by after the warm-up, and the mean, in MiB."""
    first = own[0, 0] + WARM_UP * (own[-1, 0] - own[0, 0])
    late = own[own[:, 0] >= first]
    slope = np.polyfit(late[:, 0], late[:, 1], 1)[0]
    return float(slope * (late[-1, 0] - late[0, 0])), float(late[:, 1].mean())


def report(samples: list[Sample]) -> bool:
    """Print the table; return whether memory stayed flat."""
    last, is_flat = max(sample.seconds for sample in samples), True
    marks = [last * part for part in (1 / 6, 1 / 3, 2 / 3, 1)]
    heads = "".join(f"{f'{mark / 60:.1f} min':>12}" for mark in marks)
    print(f"{'process':16}{heads}{'rise MiB':>12}{'allowed':>12}")
    for (pid, role), own in series(samples).items():
        rise, mean = growth_mib(own)
        most = max(MOST_SHARE * mean, MOST_MIB)
        sizes = [own[np.abs(own[:, 0] - mark).argmin(), 1] for mark in marks]
        cells = "".join(f"{size:12.1f}" for size in sizes)
        print(f"{f'{role} {pid}':16}{cells}{rise:12.2f}{most:12.2f}")
        is_flat &= rise < most
    done = [max(s.num_points for s in samples if s.seconds <= mark) for mark in marks]
    print(f"{'points':16}" + "".join(f"{number:12}" for number in done))
    return is_flat


def draw(samples: list[Sample], path: Path) -> None:
    """Draw the memory of each process by time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for (pid, role), own in series(samples).items():
        axes.plot(own[:, 0] / 60, own[:, 1], label=f"{role} {pid}")
    axes.set(xlabel="minutes", ylabel="resident memory (MiB)", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Run the sweep, watch it, and tell; return 1 if memory rose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--out", type=Path, default=Path("soak"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.out / f"sweep-{os.getpid()}"
    process = sweep(folder.absolute(), options.workers, options.policies)
    try:
        samples = watch(process, folder, options.minutes)
    finally:
        process.terminate()  # as Ctrl-C, which a shell's background jobs do not hear
    if not samples or samples[-1].num_points == 0:
        print(f"the sweep did not run: see {options.out / 'sweep.log'}", file=sys.stderr)
        return 1
    with (options.out / "soak.csv").open("w", newline="") as file:
        csv.writer(file).writerows([Sample._fields, *samples])
    is_flat = report(samples)
    draw(samples, options.out / "soak.png")
    process.wait()
    print(f"memory {'stayed flat' if is_flat else 'ROSE'}; {options.out / 'soak.png'}")
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
