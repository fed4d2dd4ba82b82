"""Reads damaged files by every reader, in one process with a limit of memory, and tells what went wrong.

The law: a reader returns a value, or raises what ``sim.mistakes.explain`` tells in one line, within bounded
time and memory. Run by ``test_fuzz_readers.py`` for some seconds; by hand for as long as wanted::

    python tests/fuzzing.py --minutes 20 --seed 7 [--only trace,counts] [--keep FOLDER]

Each line of standard output is a finding, or a count, as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from mutations import mutated, put, special  # noqa: E402
from reader_subjects import SUBJECTS, Subject  # noqa: E402

from sim.mistakes import explain  # noqa: E402
from traces.record_prompts import UsageError  # noqa: E402

CPU_SECONDS = 5
WAIT_SECONDS = 10
MEMORY_BYTES = 1 << 30
"""What reading one small file may take on top of what the process has."""
LONGEST_LINE = 1500


class TooSlowError(BaseException):
    """Raised by the timer; no reader catches it."""


class TooLargeError(BaseException):
    """A reader took more memory than any file here is worth."""


def _interrupt(_: int, __: FrameType | None) -> None:
    raise TooSlowError


def judged(read: Callable[[Path], object], path: Path) -> str | None:
    """Return what is wrong with how a reader took a file; None if it kept the law."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    before = peak_bytes()
    try:
        with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
            read(path)
    except (Exception, SystemExit, TooSlowError) as error:
        return _fault(error, path)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        grown = peak_bytes() - before
    return f"takes {grown / 2**20:.0f} MiB" if grown > MEMORY_BYTES // 2 else None


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _fault(error: BaseException, path: Path) -> str | None:
    if isinstance(error, TooSlowError):
        return f"still reads after {CPU_SECONDS} s of processor time\n{_where(error)}"
    if isinstance(error, MemoryError):
        return f"MemoryError\n{_where(error)}"
    told = isinstance(error, UsageError)  # of greenroom record, whose parser tells it
    line = str(error) if told else explain(error) if isinstance(error, Exception) else None
    if line is None:
        return f"{type(error).__name__}: {str(error)[:300]}\n{_where(error)}"
    if "\n" in line or len(line) > LONGEST_LINE + 3 * len(str(path)):
        return f"a message of {len(line)} characters: {line[:300]}\n{_where(error)}"
    return None


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return "\n".join(f"  {f.filename}:{f.lineno} {f.name}" for f in frames[-12:])


# -- what is read ---------------------------------------------------------------------------------------


class Bench:
    """A folder with whole files of all subjects, from which damaged ones are made."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.places: dict[str, Path] = {}
        self.whole: dict[str, bytes] = {}
        for number, name in enumerate(names):
            subject = SUBJECTS[name]
            path = folder / f"s{number}" / subject.file
            path.parent.mkdir(parents=True)
            subject.make(path)
            self.places[name], self.whole[name] = path, path.read_bytes()

    def whole_is_read(self, name: str) -> str | None:
        """Return what is wrong with reading the whole file."""
        put(self.places[name], self.whole[name])
        try:
            SUBJECTS[name].read(self.places[name])
        except Exception as error:
            return f"the whole file: {type(error).__name__}: {error}"
        return None

    def damaged(self, name: str, seed: int) -> bytes:
        """Return the damage that a seed stands for."""
        suffix = Path(SUBJECTS[name].file).suffix
        return mutated(self.whole[name], suffix, random.Random(f"{name} {seed}"))

    def judge(self, name: str, data: bytes) -> str | None:
        """Return what is wrong with how a file of these bytes is read."""
        put(self.places[name], data)
        return judged(SUBJECTS[name].read, self.places[name])


def odd_places(
    subject: Subject, whole: bytes, path: Path
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield what may lie where a file should: a folder, a loop of links, a pipe, nothing."""

    def piped() -> None:
        os.mkfifo(path)
        threading.stack_size(1 << 19)  # many wait at a time, under a limit of memory
        threading.Thread(target=_feed, args=(path, whole), daemon=True).start()

    def full() -> None:
        path.mkdir()
        (path / path.name).mkdir()
        (path / f"loop{path.suffix}").symlink_to(path)
        os.mkfifo(path / f"pipe{path.suffix}")

    yield "nothing", lambda: None
    yield "folder", path.mkdir
    yield "folder of odd things", full
    yield "link to itself", lambda: path.symlink_to(path)
    yield "link to nothing", lambda: path.symlink_to(path.with_name("absent"))
    yield "device", lambda: path.symlink_to("/dev/null")
    yield "pipe", piped


def _feed(path: Path, data: bytes) -> None:
    """Write into a pipe once, for the first who opens it; who opens it again is let go after a while."""
    with contextlib.suppress(OSError), path.open("wb") as pipe:
        pipe.write(data)
    time.sleep(WAIT_SECONDS)
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


def judge_odd_places(subject: Subject, bench: Bench) -> Iterator[tuple[str, str]]:
    """Yield the odd places that a reader does not stand."""
    path = bench.places[subject.name]
    for name, make in odd_places(subject, bench.whole[subject.name], path):
        path.unlink(missing_ok=True)
        make()
        began = time.monotonic()
        fault = judged(subject.read, path)
        if time.monotonic() - began > WAIT_SECONDS and not fault:
            fault = "waits: a pipe is opened twice"
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if fault:
            yield name, fault


# -- the program ----------------------------------------------------------------------------------------


def limit_memory() -> None:
    """Let this process have little more than it has now: who asks for more gets a MemoryError."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def warmed_up(bench: Bench) -> None:
    """Read each whole file once, so that modules are loaded and pools of threads there."""
    for name in bench.places:
        tell(subject=name, place="whole", fault=bench.whole_is_read(name))


def tell(**found: Any) -> None:
    """Print one line of JSON at once: the last one names the culprit of a crash."""
    print(json.dumps(found), flush=True)


def fuzz(bench: Bench, name: str, seeds: range) -> None:
    """Read the special files, the odd places, and a damage a seed; tell of each fault."""
    subject, suffix = SUBJECTS[name], Path(SUBJECTS[name].file).suffix
    tell(begins=name)
    if seeds or not subject.is_slow:
        for place, data in special(suffix).items():
            if fault := bench.judge(name, data):
                tell(subject=name, place=place, fault=fault)
        for place, fault in judge_odd_places(subject, bench):
            tell(subject=name, place=place, fault=fault)
    for seed in seeds:
        if fault := bench.judge(name, bench.damaged(name, seed)):
            tell(subject=name, place=seed, fault=fault)
    tell(ends=name, count=len(seeds))


def main() -> None:
    """Read the arguments and fuzz."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names of subjects, by commas")
    parser.add_argument("--count", type=int, default=30, help="damaged files a reader")
    parser.add_argument(
        "--slow-count", type=int, default=4, help="the same, of slow readers; 0: not at all"
    )
    parser.add_argument("--minutes", type=float, help="go on with further seeds so long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = list(SUBJECTS) if options.only is None else options.only.split(",")
    signal.signal(signal.SIGPROF, _interrupt)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), names)
        warmed_up(bench)
        limit_memory()
        first, ends = options.seed, time.monotonic() + 60 * (options.minutes or 0)
        while True:
            for name in names:
                count = options.slow_count if SUBJECTS[name].is_slow else options.count
                fuzz(bench, name, range(first, first + count))
            first += options.count
            if time.monotonic() > ends:
                return


if __name__ == "__main__":
    main()
