"""What ``greenroom synth`` prints: how close a fit comes to text it has not seen, and what was written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from traces.schema import TraceMeta
from traces.synth_draw import draw_like
from traces.synth_match import TOLERANCE_RATIO, Match, Row, measures
from traces.synth_model import SynthModel

_MOST_SIZES = 6
"""Cache sizes that have a line each; all sizes are judged."""
_LAYER_TITLES = {"reuse": "reuse at lag 1", "lru": "LRU, 1/4 of the experts"}
_PREVIEW_LAYERS = 6
_PREVIEW_REQUESTS, _PREVIEW_TOKENS = 8, 384
_TITLES = {
    "reuse": "reuse (expert overlap, EOR)",
    "coherence": "coherence (cosine of adjacent windows)",
    "lru": "LRU hit rate, one token at a time",
    "gap": "Belady gap (optimum less LRU)",
}


def match_page(match: Match, name: str) -> str:
    """Return the table of a held-out check and the verdict; ``name`` is what the source is called."""
    ranks = " and ".join(map(str, sorted(set(match.ranks))))
    lines = [
        f"Held-out check of the fit to {name} ({match.tokens} tokens, rank {ranks})",
        "Each half of the requests is drawn from a fit to the other half and compared with it; means of",
        "both, all layers together. Single: the larger error of one half by itself, in which differences",
        "between the halves do not cancel. Halves: how far apart the source's halves are themselves.",
        "",
        f"{'':42}{'source':>9}{'synthetic':>11}{'error':>9}{'single':>9}{'halves':>9}",
    ]
    for measure, title in _TITLES.items():
        rows = match.of(measure)
        lines.append(title)
        lines += [_line(row) for row in _some(rows, measure)]
        lines.append(_worst(rows))
        if measure == "gap" and match.gap_mean is not None:
            lines.append(_line(match.gap_mean, "all sizes (area between the curves)"))
    lines += _layer_lines(match)
    source, drawn = match.next_layer
    if np.isfinite(source):
        lines.append(
            f"{'next layer predicted by pairs of experts':42}{source:9.4f}{drawn:11.4f}"
            f"{100 * (drawn / source - 1):+8.1f}%"
        )
    return "\n".join([*lines, "", *_verdict(match)]) + "\n"


def _some(rows: Sequence[Row], measure: str) -> list[Row]:
    """Return all rows of lags and windows, and some, evenly spread, of cache sizes."""
    if measure not in ("lru", "gap") or len(rows) <= _MOST_SIZES:
        return list(rows)
    places = np.unique(np.geomspace(1, len(rows), _MOST_SIZES).round().astype(int) - 1)
    return [rows[place] for place in places]


def _layer_lines(match: Match) -> list[str]:
    """Return the layer that is met worst, for reuse and for a cache of a quarter of the experts."""
    lines = []
    for measure, title in _LAYER_TITLES.items():
        row = match.worst_layer(measure)
        if row is not None:
            lines.append(_line(row, f"{title}: {row.at}"))
    return [f"worst of {_num_layers(match)} layers", *lines] if lines else []


def _num_layers(match: Match) -> int:
    return len({row.at for row in match.layers})


def _line(row: Row, label: str | None = None) -> str:
    return (
        f"  {row.at if label is None else label:40}{row.source:9.4f}{row.synthetic:11.4f}"
        f"{100 * row.error_ratio:+8.1f}%{100 * row.single_error_ratio:+8.1f}%"
        f"{100 * row.floor_ratio:8.1f}%"
    )


def _worst(rows: Sequence[Row]) -> str:
    if not rows:
        return "  (nothing to compare)"
    worst = max(rows, key=lambda row: abs(row.error_ratio))
    return f"  worst of {len(rows)}: {100 * worst.error_ratio:+.1f}% at {worst.at}"


def _named(places: Sequence[str], total: int) -> str:
    """Name the first few of the figures that miss."""
    named = ", ".join(places[:4]) + (", ..." if len(places) > 4 else "")
    return f"{len(places)} of {total} figures ({named})"


def _verdict(match: Match) -> list[str]:
    """Say which measures are within the tolerance, of the mean and of either half, and name what misses."""
    lines = []
    for measure, title in _TITLES.items():
        rows = match.of(measure)
        missing = [row.at for row in rows if abs(row.error_ratio) > TOLERANCE_RATIO]
        alone = [row.at for row in rows if abs(row.single_error_ratio) > TOLERANCE_RATIO]
        limit = f"within {100 * TOLERANCE_RATIO:.0f} %"
        if missing:
            lines.append(f"MISSES: {title}: {_named(missing, len(rows))}; one half: {len(alone)}")
        elif alone:
            beyond = f"beyond it in one half: {_named(alone, len(rows))}"
            lines.append(f"{limit} in the mean of both halves: {title}; {beyond}")
        else:
            lines.append(f"{limit}, either half by itself too: {title}")
    small = f"cache sizes whose gap is below {match.least_gap:g} are not compared"
    return [*lines, f"({small})"]


def shape_page(source: SynthModel, scaled: SynthModel, name: str) -> str:
    """Return a few measures of the fitted shape and of the new one, of a short draw of each."""
    layers, experts, top_k = scaled.num_layers, scaled.num_experts, scaled.top_k
    columns = [_preview(source), _preview(scaled)]
    lines = [
        f"Scaled to {layers} layers of {experts} experts, top-{top_k} ({name}). Kept are, by stage, the",
        "quantiles of popularity relative to an even share, correlations over tokens and the coupling of",
        "layers; what follows from them, of a short draw:",
        "",
        f"{'':42}{'as fitted':>11}{'scaled':>11}",
    ]
    for label, one, other in zip(_Preview._fields, *columns, strict=True):
        lines.append(f"  {_LABELS[label]:40}{one:11.4f}{other:11.4f}")
    return "\n".join(lines) + "\n"


class _Preview(NamedTuple):
    chance: float
    reuse_1: float
    reuse_8: float
    reuse_64: float
    hottest: float
    lru_eighth: float
    lru_quarter: float


_LABELS = {
    "chance": "reuse of independent tokens (chance)",
    "reuse_1": "reuse at lag 1",
    "reuse_8": "reuse at lag 8",
    "reuse_64": "reuse at lag 64",
    "hottest": "hottest expert, times its even share",
    "lru_eighth": "LRU hit rate, 1/8 of the experts",
    "lru_quarter": "LRU hit rate, 1/4 of the experts",
}


def _preview(model: SynthModel) -> _Preview:
    layers = np.unique(np.linspace(0, model.num_layers - 1, _PREVIEW_LAYERS).round().astype(int))
    few = model.only(layers.tolist())
    rng = np.random.default_rng(model.seed)
    sequences = [few.decode_chain.draw(_PREVIEW_TOKENS, rng) for _ in range(_PREVIEW_REQUESTS)]
    trace = draw_like(few, sequences, model.seed)
    found = measures(trace)
    uses = np.stack(
        [
            np.bincount(trace.expert_ids[:, layer].ravel(), minlength=few.num_experts)
            for layer in range(few.num_layers)
        ]
    )
    shares = uses / len(trace)
    eighth, quarter = (max(few.top_k, few.num_experts // part) - few.top_k for part in (8, 4))
    return _Preview(
        chance=float((shares**2).sum(axis=1).mean() / few.top_k),
        reuse_1=found.reuse[0],
        reuse_8=found.reuse[3],
        reuse_64=found.reuse[6],
        hottest=float(shares.max(axis=1).mean() * few.num_experts / few.top_k),
        lru_eighth=found.lru[eighth],
        lru_quarter=found.lru[quarter],
    )


def written_page(path: str, meta: TraceMeta, rows: int, requests: int, size_bytes: int) -> str:
    """Return what was written, which says that it is synthetic."""
    shape = f"{meta.num_layers} layers of {meta.num_experts} experts, top-{meta.top_k}"
    return (
        f"{meta.provenance.source}\n"
        f"{path}: SYNTHETIC, {rows} tokens of {requests} requests, {shape}, {size_bytes / 1e6:.1f} MB\n"
    )
