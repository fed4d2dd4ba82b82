"""Compares the locality of a synthetic trace with that of its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.locality_caches import belady_curve, lru_curve
from traces.locality_reuse import overlap_by_lag
from traces.locality_windows import window_coherence
from traces.schema import Trace
from traces.synth import Wanted, requests
from traces.synth_draw import draw_like
from traces.synth_fit import Report, fit, next_layer_rate
from traces.synth_source import Source, make_source

LAGS = (1, 2, 4, 8, 16, 32, 64)
WINDOWS = (32, 64, 128)
TOLERANCE_RATIO = 0.10
LEAST_GAP = 0.02
"""Two hits in a hundred; what is smaller is not compared."""


@dataclass(frozen=True, slots=True)
class Measures:
    """A trace's measures, pooled over layers, caches one token at a time.

    ``reuse`` by ``LAGS`` (expert overlap), ``coherence`` by ``WINDOWS`` (cosine of adjacent windows),
    ``lru`` and ``gap`` by size from ``top_k`` to all experts (hit rate; Belady's minus LRU's), and
    ``next_layer``, what pair counts of neighbouring layers predict.
    """

    reuse: NDArray[np.float64]
    coherence: NDArray[np.float64]
    lru: NDArray[np.float64]
    gap: NDArray[np.float64]
    next_layer: float


def measures(trace: Trace) -> Measures:
    """Return the measures of a trace whose rows are in the order of its requests."""
    meta = trace.meta
    lru = lru_curve([trace], meta, events="token").pooled
    belady = belady_curve([trace], meta, events="token").pooled
    windows = [window_coherence([trace], meta, length).cosine.mean() for length in WINDOWS]
    sizes = slice(meta.top_k - 1, None)
    return Measures(
        reuse=overlap_by_lag([trace], meta, LAGS).pooled,
        coherence=np.array(windows),
        lru=lru[sizes],
        gap=(belady - lru)[sizes],
        next_layer=next_layer_rate(trace) if meta.num_layers > 1 else float("nan"),
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of the source and of what was drawn; both in the mean over the two halves.

    ``halves`` are the source's two halves by themselves.
    """

    measure: str
    at: str
    source: float
    synthetic: float
    halves: tuple[float, float]

    @property
    def error_ratio(self) -> float:
        """The synthetic figure relative to the source's, less one."""
        return self.synthetic / self.source - 1

    @property
    def floor_ratio(self) -> float:
        """By how much the source's halves differ, relative to their mean; >= 0."""
        return abs(self.halves[0] - self.halves[1]) / self.source


@dataclass(frozen=True, slots=True)
class Match:
    """How close a model comes to text it was not fitted to.

    ``rows`` has every figure, cache sizes and all. ``least_gap``: below it a difference of hit rates
    is too small for a relative error to mean anything, and the gap there is not in ``rows``.
    ``next_layer``: what pairs of neighbouring layers predict, in the source and in what was drawn; nan
    of one layer.
    """

    rows: tuple[Row, ...]
    ranks: tuple[int, int]
    tokens: int
    least_gap: float
    next_layer: tuple[float, float]

    def of(self, measure: str) -> list[Row]:
        """Return the rows of one measure."""
        return [row for row in self.rows if row.measure == measure]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        rows = [
            {**asdict(row), "error_ratio": row.error_ratio, "floor_ratio": row.floor_ratio}
            for row in self.rows
        ]
        next_layer = [value if np.isfinite(value) else None for value in self.next_layer]
        plain = {**asdict(self), "rows": rows, "next_layer": next_layer}
        return {**plain, "tolerance_ratio": TOLERANCE_RATIO}


def match(
    source: Source,
    seed: int = 0,
    rank: int | None = None,
    least_gap: float = LEAST_GAP,
    report: Report = lambda _: None,
) -> Match:
    """Fit each half of a source's requests, draw as many as the other half has, and compare with that.

    The halves are every second request. Nothing of the text that a draw is compared with has gone into
    it; the means over both halves are compared, since what one half has more of than the other enters
    twice, with opposite signs.
    """
    found, drawn, ranks = [], [], []
    for number in (0, 1):
        report(f"held-out check, half {number + 1} of 2")
        model = fit(_alone(source.half(number), seed), seed, rank, report)
        ranks.append(model.rank)
        held = source.half(1 - number)
        found.append(measures(held.trace))
        asked = Wanted(num_requests=held.trace.num_requests, seed=seed + 31)
        stages = [request.stages for request in requests(model, asked)]
        drawn.append(measures(draw_like(model, stages, seed + 31)))
    return Match(
        rows=tuple(_rows(found, drawn, source.trace.meta.top_k, least_gap)),
        ranks=(ranks[0], ranks[1]),
        tokens=len(source.trace),
        least_gap=least_gap,
        next_layer=(_mean("next_layer", found), _mean("next_layer", drawn)),
    )


def _alone(half: Source, seed: int) -> Source:
    """Return a half whose stages are its own: clusters of its windows, unless they were told."""
    return half if half.told else make_source(replace(half.trace, stage=None), seed)


def _mean(measure: str, halves: Sequence[Measures]) -> float:
    return float(np.mean([getattr(half, measure) for half in halves]))


def _rows(
    found: Sequence[Measures], drawn: Sequence[Measures], top_k: int, least_gap: float
) -> list[Row]:
    sizes = [f"{top_k + place} experts" for place in range(len(found[0].lru))]
    columns = {
        "reuse": [f"lag {lag}" for lag in LAGS],
        "coherence": [f"window {length}" for length in WINDOWS],
        "lru": sizes,
        "gap": sizes,
    }
    rows = []
    for measure, places in columns.items():
        halves = np.array([getattr(half, measure) for half in found])
        values = np.mean([getattr(half, measure) for half in drawn], axis=0)
        for place, pair, value in zip(places, halves.T.tolist(), values.tolist(), strict=True):
            mean = sum(pair) / 2
            if np.isfinite(mean) and np.isfinite(value) and (measure != "gap" or mean >= least_gap):
                rows.append(Row(measure, place, mean, value, (pair[0], pair[1])))
    return rows
