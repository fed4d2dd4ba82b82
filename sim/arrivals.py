"""When requests arrive: as places become free (closed loop), or at times that do not ask (open)."""

from __future__ import annotations

import csv
import math
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol
from zlib import crc32

import numpy as np

from sim.settings import did_you_mean, shortened
from sim.types import ConfigError

CLOSED, POISSON = "closed", "poisson"
COLUMN = "arrival_s"
_LATEST_NS = 1 << 62  # what a 64-bit column of the tables holds, with room to add
_FIELD = "workload.arrivals"


class Arrivals(Protocol):
    """Tells when the next of the waiting requests arrives; requests come in their order."""

    def next_ns(self) -> int | None:
        """Return when it arrives; None if that is not known before another request ends."""
        ...

    def take(self, refused: bool) -> None:
        """Let it arrive; if it is refused it takes up no place."""
        ...

    def freed(self, now_ns: int) -> None:
        """Learn that a request has ended."""
        ...


class ClosedLoop:
    """``num_places`` clients, each of which sends its next request when its last one has ended.

    A refused client sends its next one at once.
    """

    def __init__(self, num_places: int) -> None:
        self._free_since_ns = deque([0] * num_places)

    def next_ns(self) -> int | None:
        """Return since when the longest-free place is free."""
        return self._free_since_ns[0] if self._free_since_ns else None

    def take(self, refused: bool) -> None:
        """Fill the longest-free place."""
        if not refused:
            self._free_since_ns.popleft()

    def freed(self, now_ns: int) -> None:
        """Gain a place."""
        self._free_since_ns.append(now_ns)


class OpenLoop:
    """Arrivals at fixed times in nanoseconds, ascending, one a request."""

    def __init__(self, times_ns: Sequence[int]) -> None:
        self._times_ns = times_ns
        self._next = 0

    def next_ns(self) -> int | None:
        """Return the next of the times."""
        return self._times_ns[self._next] if self._next < len(self._times_ns) else None

    def take(self, refused: bool) -> None:
        """Go on to the time after."""
        self._next += 1

    def freed(self, now_ns: int) -> None:
        """Nobody waits to send."""


def poisson_ns(num_requests: int, rate_per_s: float, seed: int) -> list[int]:
    """Return the times of a Poisson process of ``rate_per_s`` arrivals a second, from 0 on."""
    purpose = crc32(b"arrivals")  # a stream of its own, whatever else is drawn from this seed
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(purpose,)))
    times_ns = np.cumsum(rng.exponential(1e9 / rate_per_s, num_requests))
    if times_ns[-1] > _LATEST_NS:
        raise ConfigError(
            f"workload.rate_per_s = {rate_per_s}: the last request arrives after "
            f"{times_ns[-1]:.3g} ns: must be <= {_LATEST_NS} (146 years)"
        )
    return [int(time_ns) for time_ns in times_ns]


def recorded_ns(path: str, num_requests: int) -> list[int]:
    """Return the first ``num_requests`` arrival times of a file, in nanoseconds.

    The file is a CSV with a column ``arrival_s``, or has one number a line: seconds since the run
    began, ascending. Lines that are empty count for nothing.

    Raises
    ------
    ConfigError
        If there is no such file, it holds too few times, or a line is wrong (the message names it).
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(
            f"{_FIELD} = {path}: must be '{CLOSED}', '{POISSON}' or a file of arrival times; "
            f"there is no such file{did_you_mean(path, (CLOSED, POISSON))}"
        )
    times_ns: list[int] = []
    for line, text in _cells(path, file):
        times_ns.append(
            _to_ns(f"{path}: line {line}: {COLUMN} = {shortened(text)}", text, times_ns)
        )
        if len(times_ns) == num_requests:
            return times_ns
    raise ConfigError(
        f"{_FIELD} = {path}: holds {len(times_ns)} arrivals: must be at least {num_requests}, "
        "one a request"
    )


def _cells(path: str, file: Path) -> Iterator[tuple[int, str]]:
    """Yield (number of the line, text of its arrival time)."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            reader = csv.reader(opened)
            place = None
            for row in reader:
                if not any(cell.strip() for cell in row):
                    continue
                if place is None:
                    place = _place(f"{path}: line {reader.line_num}", row)
                    if row[place].strip() == COLUMN:
                        continue
                if place >= len(row):
                    raise ConfigError(f"{path}: line {reader.line_num}: {COLUMN} is missing")
                yield reader.line_num, row[place].strip()
    except (csv.Error, UnicodeError) as error:
        raise ConfigError(f"{_FIELD} = {path}: is no text table: {error}") from error


def _place(where: str, first: list[str]) -> int:
    """Return which column holds the times, from the first line that is not empty."""
    names = [cell.strip() for cell in first]
    if COLUMN in names:
        return names.index(COLUMN)
    if len(names) == 1 and _number(names[0]) is not None:
        return 0
    raise ConfigError(
        f"{where}: {shortened(', '.join(names))}: must be one number of seconds, or column names, "
        f"one of them {COLUMN!r}"
    )


def _to_ns(where: str, text: str, earlier: Sequence[int]) -> int:
    """Return one time in nanoseconds; ``where`` begins the message of an error."""
    number = _number(text)
    if number is None:
        raise ConfigError(f"{where}: must be a number of seconds")
    if not 0 <= number * 1e9 <= _LATEST_NS:
        raise ConfigError(f"{where}: must be in [0, {_LATEST_NS / 1e9:.0f}] seconds (146 years)")
    time_ns = round(number * 1e9)
    if earlier and time_ns < earlier[-1]:
        raise ConfigError(f"{where}: comes before the one above it: must be in ascending order")
    return time_ns


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
