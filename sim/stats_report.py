"""The page of ``greenroom stats``: what the trace is, its measures, what they say of offloading."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.locality import Locality, mean_over_layers
from traces.locality_histograms import Coherence
from traces.locality_verdict import CacheSizes, cache_sizes, judge
from traces.locality_working_set import Touched
from traces.schema import PHASE_NAMES

_WIDTH = 104
_MOST_LAYERS = 8
"""Layers that have a line each, evenly spread."""


def page(found: Locality, name: str) -> str:
    """Return the page; ``name`` is what the trace is called."""
    sizes = cache_sizes(found)
    parts = [
        _heading(found, name),
        _reuse(found),
        _caches(found, sizes),
        _segments(found),
        _touched(found),
        _likeness(found),
        _foresight(found),
        _layers(found, sizes.quarter),
        _verdict(found),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def is_synthetic(found: Locality) -> bool:
    """Tell whether the trace was drawn by a generator."""
    return found.meta.provenance.kind == "synthetic"


def origin(found: Locality) -> str:
    """Return one line on where the trace comes from."""
    meta, source = found.meta, found.meta.provenance
    kind = "SYNTHETIC" if is_synthetic(found) else source.kind
    phase = "all" if found.phase is None else PHASE_NAMES[found.phase]
    return (
        f"{kind} trace of {meta.model}: {found.num_requests} request{'s' * (found.num_requests != 1)}, "
        f"{found.num_tokens} token{'s' * (found.num_tokens != 1)} "
        f"({found.counted_tokens} counted: {phase}), {meta.num_layers} MoE layers of {meta.num_experts} "
        f"experts, top-{meta.top_k}"
    )


def _heading(found: Locality, name: str) -> list[str]:
    source = found.meta.provenance
    lines = [f"Locality of {name}", *_wrapped(origin(found))]
    if is_synthetic(found):
        lines += _wrapped(
            "Drawn by a generator: what follows is a property of that, not of a model."
        )
    lines += _wrapped(f"From {source.source}" + (f": {source.detail}" if source.detail else ""))
    for note in found.meta.notes:
        lines += _wrapped(f"Note: {note}")
    return lines


def _reuse(found: Locality) -> list[str]:
    overlap, popular = found.overlap, found.popularity
    shares = popular.shares
    meta = found.meta
    # Two tokens that choose by popularity alone have k * sum(share^2) of k experts in common.
    skewed = meta.top_k * float(np.nanmean((shares**2).sum(axis=1)))
    kept = [n for n, rate in enumerate(overlap.pooled) if np.isfinite(rate)]
    return [
        "Reuse: share of a token's experts that the token so many before used (lag 1: EOR)",
        *_table([["lag", *overlap.lags[kept]], ["share", *map(_share, overlap.pooled[kept])]]),
        f"by chance {meta.top_k / meta.num_experts:.3f}, by popularity alone {skewed:.3f}; popularity: "
        f"Gini {np.nanmean(popular.gini):.3f}, as if {np.nanmean(popular.effective_experts):.1f} "
        "experts were chosen evenly",
    ]


def _caches(found: Locality, sizes: CacheSizes) -> list[str]:
    experts, least = found.meta.num_experts, found.meta.top_k
    wanted = {least, 2 * least, 3 * least, sizes.knee, *(experts * n // 8 for n in range(1, 9))}
    shown = np.array(sorted(size for size in wanted if least <= size <= experts))
    at = shown - 1
    words = "" if found.curve_tokens == found.num_tokens else f", first {found.curve_tokens} tokens"
    return [
        f"Hit rate of a cache of so many experts a layer (a step at a time, evicting after it{words})",
        *_table(
            [
                ["experts", *shown],
                ["LRU", *map(_share, sizes.lru[at])],
                ["optimal", *map(_share, sizes.belady[at])],
                ["gap", *map(_share, (sizes.belady - sizes.lru)[at])],
                ["best fixed set", *map(_share, sizes.fixed[at])],
                ["random", *map(_share, shown / experts)],
            ]
        ),
    ]


def _segments(found: Locality) -> list[str]:
    top_k, ahead = found.meta.top_k, found.lookahead
    rows: list[list[object]] = [["segment", "SRP", "group / k", "SCH k", "SCH 2k", "SCH 3k"]]
    for scores in found.segments:
        if scores.num_segments:
            sch = [min(rho * top_k, found.meta.num_experts) - 1 for rho in (1, 2, 3)]
            values = (scores.srp, scores.group_ratio, *(scores.sch[:, column] for column in sch))
            rows.append([f"{scores.length} tokens", *(_share(np.nanmean(v)) for v in values)])
    revised = ", ".join(_share(rate) for rate in ahead.pooled)
    return [
        "Local routing consistency (arXiv 2505.16056): SRP, and SCH as first published",
        *_table(rows),
        f"SCH as revised, 16 steps ahead, at k, 2k, 3k: {revised}",
    ]


def _touched(found: Locality) -> list[str]:
    lines = ["Distinct experts a layer"]
    rows = (
        ("tokens in a row", found.working_set),
        ("recorded batch", found.recorded_batches),
        ("requests, a token each", found.request_batches),
    )
    for title, touched in rows:
        if len(touched.tokens) > 1:
            lines += _table([[title, *touched.tokens], ["experts", *_means(touched)]])
    return lines


def _means(touched: Touched) -> list[str]:
    return [f"{mean:.1f}" for mean in touched.experts.mean(axis=0)]


def _likeness(found: Locality) -> list[str]:
    windows = {length: pairs for length, pairs in found.windows.items() if pairs.num_pairs}
    stages = found.stages
    kinds = {
        "adjacent": stages.adjacent,
        "half a request apart": stages.apart,
        "shuffled": stages.shuffled,
        "in a stage": stages.within,
        "across stages": stages.across,
    }
    known = {name: pairs for name, pairs in kinds.items() if pairs is not None and pairs.num_pairs}
    return [
        "Likeness of adjacent windows: cosine of their histograms, most used experts (an eighth) in common",
        *_likeness_table("tokens a window", windows),
        *_likeness_table(f"windows of {stages.length}", known),
    ]


def _likeness_table(title: str, pairs: dict) -> list[str]:
    found: list[Coherence] = list(pairs.values())
    if not found:
        return []
    return _table(
        [
            [title, *pairs],
            ["cosine", *(_share(np.nanmean(p.cosine)) for p in found)],
            ["in common", *(_share(np.nanmean(p.overlap)) for p in found)],
            ["pairs", *(p.num_pairs for p in found)],
        ]
    )


def _foresight(found: Locality) -> list[str]:
    ahead = found.next_layer
    kinds = {
        "pair counts": ahead.pairs,
        "popularity": ahead.popularity,
        "pairs, new ones": ahead.pairs_new,
        "popularity, new ones": ahead.popularity_new,
        **{f"gate {n + 1} early": gate for n, gate in enumerate(ahead.gates)},
    }
    means = {name: float(mean_over_layers(values)) for name, values in kinds.items()}
    means = {name: mean for name, mean in means.items() if np.isfinite(mean)}
    return [
        f"The next layer's experts named before (learnt on {ahead.learn_tokens} tokens, tried on "
        f"{ahead.test_tokens} later ones; new: not used by the token before)",
        *_table([["by", *means], ["share", *map(_share, means.values())]]),
    ]


def _layers(found: Locality, quarter: int) -> list[str]:
    layers = found.meta.num_layers
    shown = np.unique(np.linspace(0, layers - 1, min(layers, _MOST_LAYERS)).round().astype(int))
    columns: list[tuple[str, NDArray[np.float64]]] = [
        ("EOR lag 1", found.overlap.rates[:, 0]),
        (f"LRU at {quarter}", found.lru.rates[:, quarter - 1]),
        ("optimal", found.belady.rates[:, quarter - 1]),
        ("Gini", found.popularity.gini),
        ("by pairs", found.next_layer.pairs),
    ]
    indices = [found.meta.layer_indices[layer] for layer in shown]
    rows = [[title, *map(_share, values[shown])] for title, values in columns]
    return ["By layer", *_table([["layer", *indices], *rows])]


def _verdict(found: Locality) -> list[str]:
    lines = ["Verdict" + (" (of a SYNTHETIC trace)" if is_synthetic(found) else "")]
    for judged in judge(found):
        lines += _wrapped(
            f"{judged.question} {judged.answer.capitalize()}: {judged.because}.", "  "
        )
    return lines


def _share(value: float | np.floating[Any]) -> str:
    return f"{value:.3f}" if np.isfinite(value) else "-"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return wrap(text, _WIDTH, subsequent_indent=indent)


def _table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Return aligned lines; the first column to the left, all others to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    widths[0] = max(widths[0], 15)
    return [
        "  "
        + row[0].ljust(widths[0])
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in texts
    ]
