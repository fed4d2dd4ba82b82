"""The folder of a sweep: what it is (``sweep.json``), what came of each point, and the table of all."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sim.point import overridden
from sim.results import ABOUT as ABOUT
from sim.results import (
    CONFIG,
    ERROR,
    SUMMARY,
    TABLE,
    clear_leftovers,
    holds_run,
    read_json,
    whole_file,
    write_sweep,
    write_text,
)
from sim.sound_rows import sound_row
from sim.sweeps.chunk import CRASH, MISTAKE, Point, has_result, plain
from sim.types import ConfigError

ERRORS = "errors.csv"
_LOCK = ".lock"
_OWN = (CONFIG, TABLE, "results.csv", ERRORS)
"""What a sweep writes beside its points; in a folder of no sweep they are somebody else's."""
_WORDS = {
    "points": "its points are others",
    "inputs": "a trace or another file it reads has changed",
    "code": "the program, or the code of a policy, has changed",
    "search": "its points are found in another way",
}


class Store:
    """One sweep's folder; made, or found as an earlier process left it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of the folder; a killed process leaves no lock behind."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / _LOCK).open("w")
        except OSError as error:
            raise ConfigError(f"sweep.dir = {self.folder}: {error.strerror}") from error
        with file:
            if not _locks(file.fileno()):
                raise ConfigError(f"sweep.dir = {self.folder}: another sweep is at work there")
            yield

    def open(self, about: Mapping[str, Any], *, overwrite: bool) -> None:
        """Begin a sweep, or go on with it.

        Raises ConfigError if the folder holds something else, unless that may be overwritten.
        """
        clear_leftovers(self.folder)
        try:
            found = self.about()
        except ConfigError:  # it is damaged
            if not overwrite:
                raise
            found = {}
        if found is not None:
            changed = _changed(found.get("identity"), about["identity"])
            if changed and not overwrite:
                raise ConfigError(
                    f"sweep.dir = {self.folder}: holds another sweep: {changed}; give another folder, or "
                    "sweep.overwrite=true to replace it"
                )
            if changed:
                self._clear()
        elif overwrite:
            self._clear()
        else:
            self._refuse_others()
        write_text(self.folder / ABOUT, json.dumps(about, indent=1, default=str) + "\n")

    def _refuse_others(self) -> None:
        """Raise ConfigError if a folder of no sweep holds what a sweep would write there."""
        if self.numbers():
            raise ConfigError(
                f"sweep.dir = {self.folder}: holds runs that are not of `greenroom sweep`; give another "
                "folder, or sweep.overwrite=true to replace them"
            )
        for name in _OWN:
            if (self.folder / name).exists():
                raise ConfigError(
                    f"sweep.dir = {self.folder}: holds {name}, but no sweep; give another folder, or "
                    "sweep.overwrite=true to replace it"
                )

    def about(self) -> dict[str, Any] | None:
        """Return what is known of the sweep in this folder; None if there is none."""
        file = self.folder / ABOUT
        return read_json(file) if file.exists() else None

    def numbers(self) -> list[int]:
        """Return the numbers of the folders of points, in order: not of others that are called so (2026)."""
        if not self.folder.is_dir():
            return []
        with os.scandir(self.folder) as entries:
            names = [entry.name for entry in entries if entry.name.isdecimal()]
        own = sorted(int(name) for name in names if name == str(int(name)))
        return [number for number in own if holds_run(self.folder / str(number))]

    def _clear(self) -> None:
        """Take away the points of another sweep, and its tables."""
        for number in self.numbers():
            shutil.rmtree(self.folder / str(number))
        for name in (ABOUT, "league.csv", *_OWN):
            (self.folder / name).unlink(missing_ok=True)

    def has(self, number: int) -> bool:
        """Tell whether a point has a summary or an error."""
        return has_result(self.folder, number)

    def forget_others(self, points: Sequence[Point]) -> None:
        """Take away results of points that were others under the same numbers.

        Where results decide which points follow, one that comes out otherwise when it is run again makes
        all that follow it others.
        """
        for point in points:
            folder = self.folder / str(point.number)
            if self.has(point.number) and not _is_of(folder, point):
                shutil.rmtree(folder)

    def forget_errors(self, *, mistakes: bool) -> None:
        """Make points wait again that crashed, and with ``mistakes`` all that failed."""
        for number in self.numbers():
            file = self.folder / str(number) / ERROR
            if file.exists() and (mistakes or _told(file).get("kind") == CRASH):
                file.unlink()

    def rows(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return the summaries of those points that have one, in order, each with its number."""
        files = [(number, self.folder / str(number) / SUMMARY) for number in numbers]
        return [{"point": n, **_summary(file)} for n, file in files if file.exists()]

    def errors(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return what the points that failed left: number, overrides, error, kind."""
        files = [(number, self.folder / str(number) / ERROR) for number in numbers]
        return [{"point": n, **_told(file)} for n, file in files if file.exists()]

    def publish(
        self, rows: Sequence[Mapping[str, Any]], errors: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write the table of all points that went well, and the list of those that did not."""
        for name in (TABLE, "results.csv", ERRORS):
            (self.folder / name).unlink(missing_ok=True)
        if rows:
            write_sweep(self.folder, rows)
        if errors:
            with whole_file(self.folder / ERRORS) as partial:
                _write_errors(partial, errors)


def _is_of(folder: Path, point: Point) -> bool:
    """Tell whether a folder's result is of a point with these overrides."""
    summary = folder / SUMMARY
    if summary.exists():
        return bool(read_json(summary).get("overrides") == overridden(point.overrides))
    return bool(_told(folder / ERROR)["overrides"] == list(point.overrides))


def _summary(file: Path) -> dict[str, Any]:
    """Return a point's summary; ConfigError for one that is damaged, which says how to go on."""
    try:
        return sound_row(read_json(file), file)
    except ConfigError as error:
        raise ConfigError(f"{error}; delete the file, and its point runs again") from error


def _told(file: Path) -> dict[str, Any]:
    """Return what an error file says; one that is damaged counts as a crash."""
    try:
        found = read_json(file)
    except ConfigError as error:
        found = {"error": str(error)}
    overrides = found.get("overrides")
    return {
        "overrides": [*map(str, overrides)] if isinstance(overrides, list) else [],
        "error": plain(str(found.get("error", ""))),
        "kind": MISTAKE if found.get("kind") == MISTAKE else CRASH,
    }


def _write_errors(file: Path, errors: Sequence[Mapping[str, Any]]) -> None:
    with file.open("w", newline="", encoding="utf-8", errors="backslashreplace") as opened:
        writer = csv.writer(opened)
        writer.writerow(("point", "overrides", "error", "kind"))
        for row in errors:
            writer.writerow((row["point"], " ".join(row["overrides"]), row["error"], row["kind"]))


def _changed(found: Any, wanted: Mapping[str, Any]) -> str:
    """Say in what two sweeps differ; nothing if they are the same."""
    found = found if isinstance(found, Mapping) else {}
    differ = [name for name in wanted if not _agree(found.get(name), wanted[name])]
    return ", ".join(_WORDS.get(name, f"its {name} differs") for name in differ)


def _agree(found: Any, wanted: Any) -> bool:
    """Tell whether a part of a sweep is as it was; a file that was missing may be there now."""
    if not isinstance(found, Mapping) or not isinstance(wanted, Mapping):
        return bool(found == wanted)
    both = found.keys() == wanted.keys()
    return both and all(found[name] in (None, wanted[name]) for name in wanted)


def _locks(descriptor: int) -> bool:
    """Tell whether the file could be locked; where files have no locks, it always can."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
