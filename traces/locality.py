"""All measures of a trace's locality in one pass over its chunks, in memory that does not grow with it.

A report on them is ``greenroom stats``; each measure is defined where it is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from traces.locality_ahead import Foresight, NextLayer
from traces.locality_batches import RecordedBatches, RequestBatches
from traces.locality_caches import BeladyCurve, HitCurve, LruCurve
from traces.locality_histograms import Coherence
from traces.locality_lookahead import LookaheadCurve, LookaheadHits
from traces.locality_reuse import Overlap, OverlapByLag, Popularities, Popularity
from traces.locality_segments import Segments, SegmentScores
from traces.locality_stages import StageCoherence, StageWindows
from traces.locality_windows import WindowCoherence
from traces.locality_working_set import Touched, WorkingSet
from traces.schema import PHASE_NAMES, Trace, TraceError, TraceMeta

WINDOWS = (16, 32, 64, 128, 256)
SEGMENTS = (16, 64)
_CURVE_USES = 20_000_000
"""Uses that are replayed through caches by default: the one thing that goes a step at a time."""
_MOST_ROWS = 4096
"""Rows that are counted at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Locality:
    """What a trace's routing has of locality, by layer; the attributes say what each is of.

    ``num_tokens`` are all rows, ``counted_tokens`` those of ``phase`` (None: all), which the measures
    are of. ``curve_tokens`` of the rows, the first ones, are replayed through caches.
    """

    meta: TraceMeta
    phase: int | None
    num_tokens: int
    counted_tokens: int
    num_requests: int
    curve_tokens: int
    overlap: Overlap
    popularity: Popularities
    working_set: Touched
    lru: HitCurve
    belady: HitCurve
    lookahead: LookaheadHits
    segments: tuple[SegmentScores, ...]
    windows: dict[int, Coherence]  # by length
    stages: StageCoherence
    next_layer: Foresight
    recorded_batches: Touched
    request_batches: Touched

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values for JSON: lists by layer, null where there is nothing."""
        phase = None if self.phase is None else PHASE_NAMES[self.phase]
        derived = {
            "phase": phase,
            "eor": _plain(self.overlap.rates),
            "lru_hit_rate": _plain(self.lru.rates),
            "belady_hit_rate": _plain(self.belady.rates),
            "best_fixed_set_hit_rate": _plain(self.popularity.best_set),
            "gini": _plain(self.popularity.gini),
            "effective_experts": _plain(self.popularity.effective_experts),
        }
        plain = _plain(asdict(self))
        return {**plain, **derived}


def _plain(value: Any) -> Any:
    """Turn arrays, tuples and numbers that are none into what JSON knows."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float):
        return round(value, 6) if np.isfinite(value) else None
    return value


class _Counter(Protocol):
    def add(self, chunk: Trace) -> None: ...

    def result(self) -> Any: ...


class LocalityCounter:
    """All measures of a trace, chunk by chunk.

    Parameters
    ----------
    meta
        The header of the trace.
    num_tokens
        Rows of the whole trace, whose first half is learnt from where something is predicted.
    phase
        Measure rows of this phase only; None: all. Caches are replayed with all rows, and count the
        events with rows of this phase.
    curve_tokens
        How many of the first rows go through caches; None: as ``default_curve_tokens`` says.
    windows, segments
        Lengths in tokens.
    """

    def __init__(
        self,
        meta: TraceMeta,
        num_tokens: int,
        phase: int | None = None,
        curve_tokens: int | None = None,
        windows: tuple[int, ...] = WINDOWS,
        segments: tuple[int, ...] = SEGMENTS,
    ) -> None:
        if curve_tokens is None:
            curve_tokens = default_curve_tokens(meta)
        if curve_tokens < 1:
            raise TraceError(f"curve_tokens is {curve_tokens}: must be >= 1")
        self._meta, self._phase, self._curve_tokens = meta, phase, curve_tokens
        sizes = [min(rho * meta.top_k, meta.num_experts) for rho in (1, 2, 3)]
        self._curves: dict[str, _Counter] = {
            "lru": LruCurve(meta, phase),
            "belady": BeladyCurve(meta, phase),
            "lookahead": LookaheadCurve(meta, sizes, phase=phase),
        }
        self._others: dict[str, _Counter] = {
            "overlap": OverlapByLag(meta, phase=phase),
            "popularity": Popularity(meta, phase),
            "working_set": WorkingSet(meta, phase),
            "stages": StageWindows(meta, phase=phase),
            "next_layer": NextLayer(meta, num_tokens // 2, phase),
            "recorded_batches": RecordedBatches(meta),
            "request_batches": RequestBatches(meta, phase),
        }
        self._windows = {n: WindowCoherence(meta, n, phase=phase) for n in windows}
        self._segments = [Segments(meta, n, phase) for n in segments]
        self._requests: set[int] = set()
        self._rows = self._counted = 0

    def add(self, chunk: Trace) -> None:
        """Take the next rows of the trace."""
        for first in range(0, len(chunk), _MOST_ROWS):
            self._add(chunk.take(slice(first, first + _MOST_ROWS)))

    def _add(self, rows: Trace) -> None:
        replayed = rows.take(slice(0, max(0, self._curve_tokens - self._rows)))
        if len(replayed):
            for curve in self._curves.values():
                curve.add(replayed)
        for counter in (*self._others.values(), *self._windows.values(), *self._segments):
            counter.add(rows)
        self._requests.update(np.unique(rows.request_id).tolist())
        self._rows += len(rows)
        wanted = np.ones(len(rows), bool) if self._phase is None else rows.phase == self._phase
        self._counted += int(wanted.sum())

    def result(self) -> Locality:
        """Return all measures; no rows can be added afterwards."""
        counters = {**self._curves, **self._others}
        found = {name: counter.result() for name, counter in counters.items()}
        return Locality(
            meta=self._meta,
            phase=self._phase,
            num_tokens=self._rows,
            counted_tokens=self._counted,
            num_requests=len(self._requests),
            curve_tokens=min(self._rows, self._curve_tokens),
            segments=tuple(counter.result() for counter in self._segments),
            windows={length: counter.result() for length, counter in self._windows.items()},
            **found,
        )


def default_curve_tokens(meta: TraceMeta) -> int:
    """Return how many tokens caches are replayed with: fewer for a larger model, as each costs more."""
    return max(1, _CURVE_USES // (meta.num_layers * meta.top_k))


def locality(
    chunks: Iterable[Trace],
    meta: TraceMeta,
    num_tokens: int,
    phase: int | None = None,
    curve_tokens: int | None = None,
) -> Locality:
    """Return all measures of a trace that comes in chunks, in file order; see ``LocalityCounter``."""
    counter = LocalityCounter(meta, num_tokens, phase, curve_tokens)
    for chunk in chunks:
        counter.add(chunk)
    return counter.result()


def mean_over_layers(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over the first axis of what is known; nan where nothing is."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, values, 0).sum(axis=0) / known.sum(axis=0))
