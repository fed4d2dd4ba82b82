"""The figure of ``greenroom stats``: one page, six panels."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sim.plot_style import PAGE, look, new_panels, save, styled, write_below
from sim.stats_report import is_synthetic, origin
from traces.locality import Locality, mean_over_layers
from traces.locality_verdict import cache_sizes

_CHANCE: dict[str, Any] = {"color": "0.5", "linestyle": ":", "linewidth": 0.9}
_BLUE, _GREEN, _ORANGE, _PURPLE = "#0072B2", "#009E73", "#D55E00", "#CC79A7"


def plot_locality(found: Locality, name: str, stem: Path) -> Path:
    """Draw PNG and PDF; return the PNG's path."""
    with styled():
        return save(locality_figure(found, name), stem)


def locality_figure(found: Locality, name: str) -> Figure:
    """Draw hit rates, reuse, layers, distinct experts, likeness of windows and foresight."""
    figure, panels = new_panels(3, 2, PAGE / 2, 2.5, 0.8)
    drawers = (_hits, _reuse, _layers, _distinct, _likeness, _foresight)
    for axes, draw in zip(panels, drawers, strict=True):
        draw(axes, found)
    title = f"Locality of {name}"
    figure.suptitle(f"{title} (SYNTHETIC)" if is_synthetic(found) else title, fontsize=9)
    text = f"{origin(found)}; from {found.meta.provenance.source}; greenroom {version('greenroom')}"
    write_below(figure, text)
    return figure


def _hits(axes: Axes, found: Locality) -> None:
    """Hit rates by cache size, from the size of an event on."""
    sizes, experts = cache_sizes(found), found.meta.num_experts
    at = np.arange(min(found.meta.top_k, experts), experts + 1)
    curves = (("optimal", sizes.belady, "belady"), ("LRU", sizes.lru, "lru"))
    for label, rates, policy in curves:
        axes.plot(at, rates[at - 1], color=look(policy)[0], label=label)
    fixed = "best fixed set, in hindsight"
    axes.plot(at, sizes.fixed[at - 1], "--", color=look("static")[0], label=fixed)
    axes.plot(at, at / experts, label="random", **_CHANCE)
    bend = f"LRU's bend: {sizes.knee}"
    axes.plot([sizes.knee], [sizes.lru[sizes.knee - 1]], "o", color=look("lru")[0], label=bend)
    axes.set(xlabel="experts a layer in the cache", ylabel="hit rate", ylim=(0, 1.02))
    axes.set_title("Caches")
    axes.legend(loc="lower right")


def _reuse(axes: Axes, found: Locality) -> None:
    """Overlap by lag: all layers together, and how far layers spread."""
    overlap, meta = found.overlap, found.meta
    kept = np.flatnonzero(np.isfinite(overlap.pooled))
    lags, rates = overlap.lags[kept], overlap.rates[:, kept]
    axes.fill_between(
        lags, rates.min(axis=0), rates.max(axis=0), color=_BLUE, alpha=0.15, label="layers"
    )
    axes.plot(lags, overlap.pooled[kept], "o-", color=_BLUE, label="all layers")
    skewed = meta.top_k * float(np.nanmean((found.popularity.shares**2).sum(axis=1)))
    axes.axhline(skewed, color=_GREEN, linestyle="--", linewidth=0.9, label="by popularity alone")
    axes.axhline(meta.top_k / meta.num_experts, label="random", **_CHANCE)
    axes.set(xlabel="tokens apart", ylabel="share of experts in common", ylim=(0, None))
    _powers_of_two(axes, lags.tolist())
    axes.set_title("Reuse by lag")
    axes.legend()


def _layers(axes: Axes, found: Locality) -> None:
    """What layers differ in."""
    quarter, layers = cache_sizes(found).quarter, found.meta.layer_indices
    lines = (
        (f"LRU hits at {quarter}", found.lru.rates[:, quarter - 1], _BLUE, "o"),
        ("overlap at lag 1 (EOR)", found.overlap.rates[:, 0], _ORANGE, "s"),
        ("Gini of popularity", found.popularity.gini, _GREEN, "^"),
        *((f"SRP, {s.length} tokens", s.srp, _PURPLE, "D") for s in found.segments[:1]),
    )
    for label, values, colour, mark in lines:
        axes.plot(layers, values, mark + "-", color=colour, label=label, lw=0.9, markersize=3)
    axes.set(xlabel="layer", ylabel="share", ylim=(0, 1.02))
    axes.set_title("By layer")
    axes.legend(ncols=2, fontsize=6.5)


def _distinct(axes: Axes, found: Locality) -> None:
    """How many experts tokens in a row and batches touch."""
    meta = found.meta
    groups = (
        ("tokens in a row", found.working_set, _BLUE, "o"),
        ("tokens of as many requests", found.request_batches, _ORANGE, "s"),
        ("batches as recorded", found.recorded_batches, _GREEN, "^"),
    )
    for label, touched, colour, mark in groups:
        if len(touched.tokens) > 1:
            means = touched.experts.mean(axis=0)
            axes.plot(touched.tokens, means, mark + "-", color=colour, label=label, markersize=3)
    most = max([1, *found.working_set.tokens, *found.request_batches.tokens])
    tokens = np.unique(np.geomspace(1, most, 60))
    chance = meta.num_experts * (1 - (1 - meta.top_k / meta.num_experts) ** tokens)
    axes.plot(tokens, chance, label="random", **_CHANCE)
    axes.axhline(meta.num_experts, color="0.8", linewidth=0.6)
    axes.set(xlabel="tokens", ylabel="distinct experts a layer", ylim=(0, None))
    _powers_of_two(axes, found.working_set.tokens.tolist())
    axes.set_title("Working set and batches")
    axes.legend()


def _likeness(axes: Axes, found: Locality) -> None:
    """Adjacent windows by length; at one length what else they can be compared with."""
    lengths = [length for length, pairs in found.windows.items() if pairs.num_pairs]
    cosine = [float(np.nanmean(found.windows[n].cosine)) for n in lengths]
    overlap = [float(np.nanmean(found.windows[n].overlap)) for n in lengths]
    axes.plot(lengths, cosine, "o-", color=_BLUE, label="adjacent: cosine")
    axes.plot(lengths, overlap, "s-", color=_ORANGE, label="adjacent: most used")
    stages = found.stages
    others = (
        ("half a request apart", stages.apart, "v", "0.4"),
        ("shuffled tokens", stages.shuffled, "x", "0.4"),
        ("within a stage", stages.within, "^", _GREEN),
        ("across stages", stages.across, "D", _PURPLE),
    )
    for label, pairs, mark, colour in others:
        if pairs is not None and pairs.num_pairs:
            value = float(np.nanmean(pairs.cosine))
            axes.plot([stages.length], [value], mark, color=colour, label=f"cosine: {label}")
    axes.set(xlabel="tokens a window", ylabel="cosine, or share of the most used")
    axes.set(ylim=(-0.36, 1.02), yticks=np.linspace(0, 1, 6))  # below is room for the legend
    _powers_of_two(axes, lengths)
    axes.set_title("Likeness of windows")
    axes.legend(ncols=2, loc="lower center", fontsize=6, columnspacing=0.8)


def _powers_of_two(axes: Axes, ticks: Sequence[int]) -> None:
    """Make the horizontal axis one of doublings, with plain numbers."""
    if len(ticks):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])


def _foresight(axes: Axes, found: Locality) -> None:
    """What is known of the next layer, by layer."""
    ahead, layers = found.next_layer, found.meta.layer_indices
    lines = (
        ("counts of pairs", ahead.pairs, _BLUE, "o-"),
        ("the same, new experts only", ahead.pairs_new, _BLUE, "o--"),
        ("popularity", ahead.popularity, _ORANGE, "s-"),
        *((f"gate {n + 1} early", gate, _GREEN, s) for n, gate, s in _gates(ahead.gates)),
    )
    for label, values, colour, style in lines:
        if np.isfinite(mean_over_layers(values)):
            axes.plot(layers, values, style, color=colour, label=label, lw=1, markersize=3)
    axes.set(xlabel="layer", ylabel="share named", ylim=(0, 1.3), yticks=np.linspace(0, 1, 6))
    axes.set_title("The layer's experts, named early")
    axes.legend(ncols=2, loc="upper center", fontsize=6)


def _gates(gates: np.ndarray) -> list[tuple[int, np.ndarray, str]]:
    return list(zip(range(len(gates)), gates, ("^-", "^--", "^:"), strict=True))
