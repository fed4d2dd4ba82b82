"""Runs a sweep to its end: hands chunks to an engine, sees to what is lost, and makes the table."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from sim.composing import composing
from sim.results import CONFIG, write_text
from sim.sweeps.beforehand import first_config
from sim.sweeps.chunk import CRASH, Chunk, Point, record_error
from sim.sweeps.engine import Ended, Engine
from sim.sweeps.identity import digest_of_code, digest_of_points, digests_of_inputs
from sim.sweeps.objective import values_of
from sim.sweeps.question import Question, question_of
from sim.sweeps.settings import SweepSettings
from sim.sweeps.store import Store
from sim.types import ConfigError

_POLL_S = 0.2
_MOST_DEATHS = 10
"""So many workers that die before any point has a result are no accident."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a sweep.

    Attributes
    ----------
    rows
        The summaries of the points that went well, in order, each with its number as ``point``.
    failed
        Of the others: point, overrides, error, kind ("mistake": of the point; "crash": of its worker).
    num_resumed
        Points that had a result before.
    """

    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    num_points: int = 0
    num_resumed: int = 0


class Watch(Protocol):
    """Is told how a sweep goes on."""

    def __call__(self, done: int, failed: int) -> None:
        """Take the numbers of points that have a result, and of those that failed."""


Bar = Callable[[int], AbstractContextManager[Any]]
"""Given the number of points, makes a context that gives a :class:`Watch`, or None."""


def run_sweep(
    arguments: Sequence[str],
    config_dirs: Sequence[str] = (),
    *,
    bar: Bar | None = None,
) -> Outcome:
    """Run a sweep, or the rest of one, and leave its table in its folder.

    Parameters
    ----------
    arguments
        Overrides as on the command line of ``greenroom sweep``.
    config_dirs
        Folders of the user's own options.
    bar
        Shows progress.

    Raises ConfigError, or an error of Hydra, for a command line that is no sweep, and for a folder that
    holds another one. What goes wrong in a point is in the outcome.
    """
    with composing():
        question = question_of(arguments, config_dirs)
        if question.settings.dry_run:
            raise ConfigError(
                "sweep.dry_run = True: only the command `greenroom sweep` tells beforehand"
            )
        return run_question(question, arguments, config_dirs, bar=bar)


def run_question(
    question: Question,
    arguments: Sequence[str],
    config_dirs: Sequence[str] = (),
    *,
    bar: Bar | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run a sweep that has been read already; only within ``sim.composing.composing()``.

    ``arguments`` and ``config_dirs`` are those that it can be taken up with again; ``on_start`` is called
    when it is about to run. The rest is as for :func:`run_sweep`.
    """
    batches = question.batches()
    first = next(batches)  # mistakes are found before anything is written
    question.check(first)
    store = Store(question.folder)
    with store.locked():
        run = _Run(question, store)
        run.begin(first, arguments, config_dirs)
        on_start()
        show = bar or (lambda total: nullcontext())
        with show(question.search.num_points) as watch:
            return run.to_its_end(chain([first], batches), watch if callable(watch) else None)


class _Run:
    """One process' work on a sweep."""

    def __init__(self, question: Question, store: Store) -> None:
        self._question = question
        self._settings = question.settings
        self._store = store
        self._engine: Engine | None = None
        self._strikes: Counter[int] = Counter()
        self._deaths = 0
        self._numbers: list[int] = []
        self._resumed = 0

    def begin(
        self, first: Sequence[Point], arguments: Sequence[str], config_dirs: Sequence[str]
    ) -> None:
        """Check that the folder is of this sweep, whose first batch is given; say there what it is."""
        told = {"arguments": list(arguments), "config_dirs": [str(d) for d in config_dirs]}
        about = {**told, **self._about(first)}
        self._store.open(about, overwrite=self._settings.overwrite)
        shown = first_config(first, self._question.composer.bases, about["num_points"])
        write_text(self._store.folder / CONFIG, shown)
        self._store.forget_errors(mistakes=self._settings.retry_failed)

    def to_its_end(self, batches: Iterable[list[Point]], watch: Watch | None) -> Outcome:
        """Run all batches and publish the table."""
        search, objective = self._question.search, self._settings.objective
        try:
            for points in batches:
                self._run_batch(points, watch)
                if self._settings.search == "optuna":
                    search.tell(values_of(self._store, points, objective))
        finally:
            if self._engine is not None:
                self._engine.close()
        rows, failed = self._store.rows(self._numbers), self._store.errors(self._numbers)
        lost = len(self._numbers) - len(rows) - len(failed)
        if lost:
            raise ConfigError(
                f"sweep.dir = {self._store.folder}: results of {lost} points were taken away while the "
                "sweep ran; must be left alone"
            )
        self._store.publish(rows, failed)
        return Outcome(self._store.folder, rows, failed, search.num_points, self._resumed)

    def _about(self, points: Sequence[Point]) -> dict[str, Any]:
        from sim.simulate import version_of_greenroom

        bases = self._question.composer.bases
        return {
            "working_folder": os.getcwd(),
            "num_points": self._question.search.num_points,
            "first": list(points[0].overrides),
            "last": list(points[-1].overrides),
            "greenroom_version": version_of_greenroom(),
            "identity": {
                "search": self._question.how_found(),
                "points": digest_of_points(points, bases),
                "inputs": digests_of_inputs(bases.values(), points),
                "code": digest_of_code(bases.values(), points),
            },
        }

    def _run_batch(self, points: Sequence[Point], watch: Watch | None) -> None:
        store = self._store
        self._numbers += [point.number for point in points]
        if self._settings.search == "optuna":
            store.forget_others(points)
        pending = {point.number: point for point in points if not store.has(point.number)}
        self._resumed += len(points) - len(pending)
        progress = _Progress(store, self._numbers, pending, watch)
        if not pending:
            return
        engine = self._engine = self._engine or engine_of(self._settings, store.folder)
        chunks = self._chunks(list(pending.values()), engine)
        progress.expect(chunks)
        engine.submit(chunks)
        num_open = len(chunks)
        while num_open:
            for ended in engine.wait(_POLL_S):
                again = self._see_to(ended, engine)
                engine.submit(again)
                num_open += len(again) - 1
            progress.look()

    def _see_to(self, ended: Ended, engine: Engine) -> list[Chunk]:
        """Return what of a dead worker's chunk must run again, without a point it died of too often."""
        left = [p for p in ended.chunk.points if not self._store.has(p.number)]
        if not left:
            return []
        why = ended.lost or "its worker came back without a result"
        self._deaths += 1
        if self._deaths >= _MOST_DEATHS and not any(map(self._store.has, self._numbers)):
            raise ConfigError(f"sweep.engine = {engine.name}: no worker lives long enough: {why}")
        suspect, rest = left[0], left[1:]
        self._strikes[suspect.number] += 1
        strikes = self._strikes[suspect.number]
        if strikes >= self._settings.strikes:
            told = f"the worker died of it {strikes} times: {why}"
            record_error(self._store.folder, suspect, told, CRASH)
        again = [] if strikes >= self._settings.strikes else [[suspect]]
        return [self._chunk(points) for points in (*again, rest) if points]

    def _chunks(self, points: Sequence[Point], engine: Engine) -> list[Chunk]:
        """Cut points into chunks; those of one trace together, for a worker keeps the last ones."""
        bases = self._question.composer.bases
        ordered = sorted(points, key=lambda point: _trace_of(point, bases))
        share = engine.workers * engine.chunks_per_worker
        size = self._settings.chunk or max(1, len(points) // share)
        return [self._chunk(ordered[i : i + size]) for i in range(0, len(ordered), size)]

    def _chunk(self, points: Sequence[Point]) -> Chunk:
        bases = self._question.composer.bases
        needed = {point.base: bases[point.base] for point in points}
        return Chunk(str(self._store.folder), needed, tuple(points), self._settings.tables)


def _trace_of(point: Point, bases: Mapping[int, Mapping[str, Any]]) -> str:
    own = [value for path, value in point.edits if path == ("trace", "path")]
    return str(own[-1] if own else bases[point.base]["trace"]["path"])


class _Progress:
    """Looks on disk which points have come to a result, whoever runs them."""

    def __init__(
        self,
        store: Store,
        numbers: Sequence[int],
        pending: Mapping[int, Point],
        watch: Watch | None,
    ) -> None:
        self._store = store
        self._watch = watch
        self._done = len(numbers) - len(pending)
        self._failed = len(store.errors([n for n in numbers if n not in pending])) if watch else 0
        self._fronts: list[deque[int]] = []
        self._tell()

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """Take the chunks whose points are to be looked for, each in the order in which they run."""
        self._fronts = [deque(point.number for point in chunk.points) for chunk in chunks]

    def look(self) -> None:
        """Count what has a result by now: of each chunk only the next point is looked for."""
        if self._watch is None:
            return
        before = self._done
        for front in self._fronts:
            while front and self._store.has(front[0]):
                self._done += 1
                self._failed += len(self._store.errors([front.popleft()]))
        self._fronts = [front for front in self._fronts if front]
        if self._done > before:
            self._tell()

    def _tell(self) -> None:
        if self._watch is not None:
            self._watch(self._done, self._failed)


def engine_of(settings: SweepSettings, folder: Path) -> Engine:
    """Return the engine that a sweep asks for.

    Raises ConfigError if it cannot run here.
    """
    if settings.engine == "slurm":
        from sim.sweeps.slurm_engine import SlurmEngine

        return SlurmEngine(settings, folder)
    if settings.engine == "ray":
        from sim.sweeps.ray_engine import RayEngine

        return RayEngine(settings, folder)
    refuse_own(settings.own, settings.engine)
    if settings.engine == "serial":
        from sim.sweeps.serial import SerialEngine

        return SerialEngine()
    from sim.sweeps.pool import PoolEngine

    return PoolEngine(settings.workers)


def refuse_own(own: Iterable[str], engine: str) -> None:
    """Raise ConfigError for settings of another engine."""
    for name in own:
        raise ConfigError(f"sweep.{name}: is no setting of sweep.engine={engine}")
