"""The unit of work of every engine: some points of a sweep, run one after another by one process.

A chunk is plain data that any engine can ship, and :func:`run_chunk` all it needs to know. What came of
a point is a file of its own, so that a worker that dies loses no more than the point it was at.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.results import ERROR, SUMMARY, clear_leftovers, write_text
from sim.settings import without_middle

CRASH, MISTAKE = "crash", "mistake"
"""Why a point has no result: what may go well another time, and what cannot."""

Edit = tuple[tuple[str, ...], Any]
"""Where in a configuration a value goes, and the value."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep.

    Attributes
    ----------
    number
        Its place in the sweep, from 0, which names its folder.
    overrides
        What sets it apart, as on the command line.
    base
        Which of the sweep's composed configurations it starts from.
    edits
        What it changes there.
    """

    number: int
    overrides: tuple[str, ...]
    base: int
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some points of a sweep, for one worker.

    Attributes
    ----------
    folder
        The sweep's folder, absolute; all workers must see it.
    bases
        The composed configurations that its points start from, by number.
    points
        Those to run, in this order.
    tables
        Whether each point's step and request tables are kept too.
    """

    folder: str
    bases: Mapping[int, Mapping[str, Any]]
    points: tuple[Point, ...]
    tables: bool = False


def run_chunk(chunk: Chunk) -> None:
    """Run the points of a chunk that have no result yet; leave a summary or an error of each."""
    folder = Path(chunk.folder)
    for point in chunk.points:
        if not has_result(folder, point.number):
            run_one(chunk, point)


def run_one(chunk: Chunk, point: Point) -> None:
    """Run one point; whatever goes wrong there is its result, but for Ctrl-C."""
    from sim.mistakes import explain
    from sim.point import run_point

    config = config_of(chunk.bases[point.base], point.edits)
    folder = Path(chunk.folder) / str(point.number)
    clear_leftovers(folder)
    try:
        with _by_itself():
            run_point(config, folder, point.overrides, tables=chunk.tables)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a policy may raise what it likes
        kind = CRASH if isinstance(error, MemoryError | OSError) else MISTAKE
        told = explain(error) if isinstance(error, Exception) else None
        record_error(Path(chunk.folder), point, told or _defect(error), kind)


@contextmanager
def _by_itself() -> Iterator[None]:
    """Keep what a policy of the user's own does to the process from the points that follow.

    It may go to another folder, where relative paths mean others; and what it prints is no result.
    """
    here = os.getcwd()
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        with suppress(OSError):  # its own folder is gone
            os.chdir(here)


def _defect(error: BaseException) -> str:
    """Tell of what nobody has foreseen, and where it is: in a policy of the user's own, or here."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    try:
        said = str(error)
    except Exception:  # of whatever kind: it says nothing then
        said = ""
    return f"{type(error).__name__}: {plain(said)}{where}"


def plain(text: str) -> str:
    """Return a text as one line of bounded length that every file and every terminal can take."""
    signs = (sign if sign.isprintable() else "?" for sign in " ".join(text.split()))
    return without_middle("".join(signs))


def record_error(sweep: Path, point: Point, message: str, kind: str) -> None:
    """Leave in the folder of a sweep's point why it has no result."""
    folder = sweep / str(point.number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).unlink(missing_ok=True)
    told = {"overrides": list(point.overrides), "error": plain(message), "kind": kind}
    write_text(folder / ERROR, json.dumps(told, indent=1) + "\n")


def has_result(folder: Path, number: int) -> bool:
    """Tell whether a point of a sweep's folder has a summary or an error."""
    own = folder / str(number)
    return (own / SUMMARY).exists() or (own / ERROR).exists()


def config_of(base: Mapping[str, Any], edits: tuple[Edit, ...]) -> dict[str, Any]:
    """Return a configuration with some values changed; the base stays as it is.

    Only the groups on the way to a changed value are copied: the others are shared, and read only.
    """
    config = dict(base)
    for path, value in edits:
        group = config
        for name in path[:-1]:
            group[name] = dict(group.get(name) or {})
            group = group[name]
        group[path[-1]] = value
    return config
