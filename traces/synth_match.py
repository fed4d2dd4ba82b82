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
from traces.schema import Trace, TraceMeta
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
    """A trace's measures, caches one token at a time; pooled over layers, but those by layer.

    ``reuse`` by ``LAGS`` (expert overlap), ``coherence`` by ``WINDOWS`` (cosine of adjacent windows),
    ``lru`` and ``gap`` by size from ``top_k`` to all experts (hit rate; Belady's minus LRU's), and
    ``next_layer``, what pair counts of neighbouring layers predict. By layer: ``layer_reuse`` at lag 1,
    ``layer_lru`` of a quarter of the experts (of ``top_k``, if those are more).
    """

    reuse: NDArray[np.float64]
    coherence: NDArray[np.float64]
    lru: NDArray[np.float64]
    gap: NDArray[np.float64]
    next_layer: float
    layer_reuse: NDArray[np.float64]
    layer_lru: NDArray[np.float64]


def measures(trace: Trace) -> Measures:
    """Return the measures of a trace whose rows are in the order of its requests."""
    meta = trace.meta
    overlap = overlap_by_lag([trace], meta, LAGS)
    lru_hits = lru_curve([trace], meta, events="token")
    lru = lru_hits.pooled
    belady = belady_curve([trace], meta, events="token").pooled
    windows = [window_coherence([trace], meta, length).cosine.mean() for length in WINDOWS]
    sizes = slice(meta.top_k - 1, None)
    return Measures(
        reuse=overlap.pooled,
        coherence=np.array(windows),
        lru=lru[sizes],
        gap=(belady - lru)[sizes],
        next_layer=next_layer_rate(trace) if meta.num_layers > 1 else float("nan"),
        layer_reuse=overlap.rates[:, LAGS.index(1)],
        layer_lru=lru_hits.rates[:, quarter_experts(meta) - 1],
    )


def quarter_experts(meta: TraceMeta) -> int:
    """Return the size of a cache of a quarter of a layer's experts; ``top_k`` at least."""
    return max(meta.top_k, meta.num_experts // 4)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of the source and of what was drawn; both in the mean over the two halves.

    ``halves`` are the source's two halves by themselves, ``drawn`` what was drawn for either: each from
    a fit to the other one.
    """

    measure: str
    at: str
    source: float
    synthetic: float
    halves: tuple[float, float]
    drawn: tuple[float, float]

    @property
    def error_ratio(self) -> float:
        """The synthetic figure relative to the source's, less one."""
        return self.synthetic / self.source - 1

    @property
    def single_error_ratio(self) -> float:
        """The larger error of a half alone against what was drawn for it, with its sign.

        Differences between the halves do not cancel here, as they do in ``error_ratio``.
        """
        errors = [new / old - 1 for new, old in zip(self.drawn, self.halves, strict=True)]
        return max(errors, key=abs)

    @property
    def floor_ratio(self) -> float:
        """By how much the source's halves differ, relative to their mean; >= 0."""
        return abs(self.halves[0] - self.halves[1]) / self.source


@dataclass(frozen=True, slots=True)
class Match:
    """How close a model comes to text it was not fitted to.

    ``rows`` has every figure, cache sizes and all. ``gap_mean``: the gap in the mean over all sizes, the
    area between the curves; None without any gap. ``layers``: reuse at lag 1 ("reuse") and the LRU hit
    rate of a quarter of the experts ("lru") by layer. ``least_gap``: below it a difference of hit rates
    is too small for a relative error to mean anything, and the gap there is not in ``rows``.
    ``next_layer``: what pairs of neighbouring layers predict, in the source and in what was drawn; nan
    of one layer.
    """

    rows: tuple[Row, ...]
    ranks: tuple[int, int]
    tokens: int
    least_gap: float
    next_layer: tuple[float, float]
    gap_mean: Row | None
    layers: tuple[Row, ...]

    def of(self, measure: str) -> list[Row]:
        """Return the rows of one measure."""
        return [row for row in self.rows if row.measure == measure]

    def worst_layer(self, measure: str) -> Row | None:
        """Return the layer with the largest error of "reuse" or "lru"; None where none can be compared."""
        rows = [row for row in self.layers if row.measure == measure]
        return max(rows, key=lambda row: abs(row.error_ratio), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        plain = {
            **asdict(self),
            "rows": [_plain(row) for row in self.rows],
            "gap_mean": None if self.gap_mean is None else _plain(self.gap_mean),
            "layers": [_plain(row) for row in self.layers],
        }
        next_layer = [value if np.isfinite(value) else None for value in self.next_layer]
        return {**plain, "next_layer": next_layer, "tolerance_ratio": TOLERANCE_RATIO}


def match(
    source: Source,
    seed: int = 0,
    rank: int | None = None,
    least_gap: float = LEAST_GAP,
    report: Report = lambda _: None,
) -> Match:
    """Fit each half of a source's requests, draw as many as the other half has, and compare with that.

    The halves are every second request. Nothing of the text that a draw is compared with has gone into
    it. Errors are those of the means over both halves, so that what one half has more of than the other
    cancels: they judge the kind of model. How well one half foretells the other is in
    ``Row.single_error_ratio``, beside how far apart the halves are.
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
    meta = source.trace.meta
    gaps = [tuple(float(half.gap.mean()) for half in halves) for halves in (found, drawn)]
    return Match(
        rows=tuple(_rows(found, drawn, meta.top_k, least_gap)),
        ranks=(ranks[0], ranks[1]),
        tokens=len(source.trace),
        least_gap=least_gap,
        next_layer=(_mean("next_layer", found), _mean("next_layer", drawn)),
        gap_mean=_row("gap", "all sizes", *gaps),
        layers=tuple(_layer_rows(found, drawn, meta.layer_indices)),
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
    return [
        row
        for measure, places in columns.items()
        for row in _column(measure, places, found, drawn, measure)
        if measure != "gap" or row.source >= least_gap
    ]


def _layer_rows(
    found: Sequence[Measures], drawn: Sequence[Measures], layer_indices: Sequence[int]
) -> list[Row]:
    places = [f"layer {index}" for index in layer_indices]
    columns = {"reuse": "layer_reuse", "lru": "layer_lru"}
    return [
        row
        for measure, name in columns.items()
        for row in _column(measure, places, found, drawn, name)
    ]


def _column(
    measure: str,
    places: Sequence[str],
    found: Sequence[Measures],
    drawn: Sequence[Measures],
    name: str,
) -> list[Row]:
    """Return a row for each place of the array ``name`` of the measures, but where none can be made."""
    halves, others = ([getattr(half, name).tolist() for half in both] for both in (found, drawn))
    rows = map(
        _row, [measure] * len(places), places, zip(*halves, strict=True), zip(*others, strict=True)
    )
    return [row for row in rows if row is not None]


def _row(measure: str, at: str, halves: tuple[float, ...], drawn: tuple[float, ...]) -> Row | None:
    """Return a row; None where a figure is missing, or the source's is 0, to which nothing is relative."""
    (one, other), (new, newer) = halves, drawn
    if not np.isfinite([*halves, *drawn]).all() or min(halves) <= 0:
        return None
    return Row(measure, at, (one + other) / 2, (new + newer) / 2, (one, other), (new, newer))


def _plain(row: Row) -> dict[str, Any]:
    errors = ("error_ratio", "single_error_ratio", "floor_ratio")
    return {**asdict(row), **{name: getattr(row, name) for name in errors}}
