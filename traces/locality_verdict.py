"""What a trace's locality says of expert offloading, in words, with the rule of each judgement.

The thresholds are this project's own. They compare with what chance would give, since a hit rate alone
says little: a cache of half the experts hits half of random choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.locality import Locality, mean_over_layers

_QUARTER = 4
_GOOD_MISSES, _FAIR_MISSES = 0.5, 0.8
"""Of the misses of random choices, what is left: less is good, less than the second is fair."""
_GOOD_FORESIGHT, _FAIR_FORESIGHT = 0.8, 0.5
_CLEAR_COSINE = 0.05
_MOST_FIRST_USES = 0.5
"""Where more of the misses are first uses of an expert, the trace is too short to judge a cache by it."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """One question, its answer in a word or two, and what it rests on."""

    question: str
    answer: str
    because: str


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Hit rates of all layers together by size, and the sizes that stand out.

    Attributes
    ----------
    lru, belady, fixed
        float64[num_experts]; ``fixed`` is the most popular experts in hindsight. Column c - 1 is a
        cache of c experts a layer.
    quarter
        A quarter of a layer's experts, at least an event.
    knee
        Where the curve of LRU is farthest above the straight line from an event's size to all.
    beats_fixed
        The least and the largest size of the longest run of sizes at which LRU hits more than the
        fixed set; None if it never does. The first use of an expert, for which the fixed set was
        filled beforehand, does not count here.
    """

    lru: NDArray[np.float64]
    belady: NDArray[np.float64]
    fixed: NDArray[np.float64]
    quarter: int
    knee: int
    beats_fixed: tuple[int, int] | None

    @property
    def misses_left(self) -> float:
        """Misses of LRU at a quarter of the experts, over those of random choices."""
        chance = 1 - self.quarter / len(self.lru)
        return float((1 - self.lru[self.quarter - 1]) / chance) if chance else 1.0


def _too_short(found: Locality, quarter: int) -> str | None:
    """Say why the trace is too short to judge a cache of ``quarter`` experts by; None if it is not."""
    curve = found.lru
    misses = int(curve.uses.sum() - curve.hits[:, quarter - 1].sum())
    first = int(curve.first_uses.sum())
    if first <= _MOST_FIRST_USES * misses:
        return None
    return (
        f"the trace is too short: {_percent(first / misses)} of the misses of an LRU cache of {quarter} "
        f"of {found.meta.num_experts} experts a layer are first uses (at most "
        f"{_percent(_MOST_FIRST_USES)} can be judged)"
    )


def cache_sizes(found: Locality) -> CacheSizes:
    """Return the curves of all layers together and their sizes of note."""
    experts = found.meta.num_experts
    least = min(experts, max(found.meta.top_k, 1))
    lru, fixed = found.lru.pooled, mean_over_layers(found.popularity.best_set)
    sizes = np.arange(1, experts + 1)
    warm = found.lru.hits.sum(axis=0) / max(1, (found.lru.uses - found.lru.first_uses).sum())
    return CacheSizes(
        lru,
        found.belady.pooled,
        fixed,
        quarter=max(least, experts // _QUARTER),
        knee=_knee(sizes[least - 1 :], lru[least - 1 :]),
        beats_fixed=_longest_run(sizes[least - 1 :], (warm > fixed)[least - 1 :]),
    )


def _knee(sizes: NDArray[np.int64], rates: NDArray[np.float64]) -> int:
    """Return the size whose rate is farthest above the chord of the curve."""
    if len(sizes) < 3 or not rates[-1] > rates[0]:
        return int(sizes[0])
    across = (sizes - sizes[0]) / (sizes[-1] - sizes[0])
    up = (rates - rates[0]) / (rates[-1] - rates[0])
    return int(sizes[np.argmax(up - across)])


def _longest_run(sizes: NDArray[np.int64], better: NDArray[np.bool_]) -> tuple[int, int] | None:
    """Return the first and last size of the longest run of sizes that are better."""
    edges = np.flatnonzero(np.diff(better, prepend=False, append=False))
    if not len(edges):
        return None
    starts, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - starts))
    return int(sizes[starts[longest]]), int(sizes[ends[longest] - 1])


def judge(found: Locality) -> tuple[Judgement, ...]:
    """Answer whether the model and workload suit offloading, what size, and if foresight or stages help."""
    sizes = cache_sizes(found)
    return (
        _suits(found, sizes),
        _size(found, sizes),
        _prefetch(found),
        _stages(found),
        _batching(found),
    )


def _suits(found: Locality, sizes: CacheSizes) -> Judgement:
    left, quarter, question = sizes.misses_left, sizes.quarter, "Does it suit expert offloading?"
    if (short := _too_short(found, quarter)) is not None:
        return Judgement(question, "unknown", short)
    answer = "yes" if left <= _GOOD_MISSES else "partly" if left <= _FAIR_MISSES else "hardly"
    return Judgement(
        question,
        answer,
        f"an LRU cache of {quarter} of {found.meta.num_experts} experts a layer hits "
        f"{_percent(sizes.lru[quarter - 1])} of the uses and leaves {_percent(left)} of the misses "
        f"that random choices would have (yes: at most {_percent(_GOOD_MISSES)}, partly: at most "
        f"{_percent(_FAIR_MISSES)})",
    )


def _size(found: Locality, sizes: CacheSizes) -> Judgement:
    knee, experts = sizes.knee, found.meta.num_experts
    if (short := _too_short(found, sizes.quarter)) is not None:
        return Judgement("What cache size is worthwhile?", "unknown", short)
    gap = 100 * (sizes.belady[knee - 1] - sizes.lru[knee - 1])
    return Judgement(
        "What cache size is worthwhile?",
        f"about {knee} experts a layer ({_percent(knee / experts)})",
        f"there the curve of LRU bends most, with {_percent(sizes.lru[knee - 1])} hits; knowing the "
        f"future would hit {gap:.1f} points more; {_against_fixed(found, sizes.beats_fixed)}",
    )


def _against_fixed(found: Locality, run: tuple[int, int] | None) -> str:
    what = "the most popular experts, chosen in hindsight and kept throughout,"
    least, most = found.meta.top_k, found.meta.num_experts
    if run is None:
        return f"{what} hit as much at every size"
    if run[0] <= least and run[1] >= most - 1:
        return f"{what} hit less at every size"
    return f"{what} hit less from {run[0]} to {run[1]} experts, but not beyond"


def _prefetch(found: Locality) -> Judgement:
    ahead = found.next_layer
    sources = {
        "the gate of the next layer, asked a layer early, names": ahead.gates[0],
        "counts of pairs name": ahead.pairs,
    }
    shares = {name: float(mean_over_layers(values)) for name, values in sources.items()}
    best = max(shares, key=lambda name: np.nan_to_num(shares[name], nan=-1.0))
    share, question = shares[best], "Will prefetching help?"
    if np.isnan(share):
        return Judgement(question, "unknown", "there is nothing to predict from")
    answer = (
        "likely"
        if share >= _GOOD_FORESIGHT
        else "only over an idle link"
        if share >= _FAIR_FORESIGHT
        else "hardly"
    )
    popular, new, popular_new = (
        _percent(float(mean_over_layers(values)))
        for values in (ahead.popularity, ahead.pairs_new, ahead.popularity_new)
    )
    return Judgement(
        question,
        answer,
        f"{best} {_percent(share)} of the next layer's experts (popularity alone: {popular}), which "
        f"is {(1 - share) / max(share, 1e-9):.2f} wrong copies for a right one; of experts that the "
        f"token before did not use, pairs name {new} and popularity {popular_new} (likely: at least "
        f"{_percent(_GOOD_FORESIGHT)}, hardly: below {_percent(_FAIR_FORESIGHT)})",
    )


def _stages(found: Locality) -> Judgement:
    stages = found.stages
    mean = {
        name: float(mean_over_layers(pairs.cosine))
        for name in ("adjacent", "apart", "shuffled", "within", "across")
        if (pairs := getattr(stages, name)) is not None and pairs.num_pairs
    }
    question, length = "Will stages help?", stages.length
    if "within" in mean and "across" in mean:
        gain = mean["within"] - mean["across"]
        answer = "there is structure to use" if gain >= _CLEAR_COSINE else "hardly"
        because = (
            f"adjacent windows of {length} tokens have a cosine of {mean['within']:.3f} within a stage and "
            f"{mean['across']:.3f} across a boundary"
        )
    elif "adjacent" in mean and "apart" in mean:
        gain = mean["adjacent"] - mean["apart"]
        answer = "there is drift that they could follow" if gain >= _CLEAR_COSINE else "hardly"
        because = (
            f"no stages are annotated; adjacent windows of {length} tokens have a cosine of "
            f"{mean['adjacent']:.3f}, windows half a request apart {mean['apart']:.3f}"
        )
    else:
        return Judgement(question, "unknown", f"no request has two windows of {length} tokens")
    return Judgement(
        question,
        answer,
        f"{because}, shuffled tokens {mean.get('shuffled', np.nan):.3f} (a difference of at least "
        f"{_CLEAR_COSINE:.2f} counts)",
    )


def _batching(found: Locality) -> Judgement:
    touched, meta = found.request_batches, found.meta
    question = "What of batches?"
    if len(touched.tokens) < 2:
        return Judgement(question, "unknown", "there is one request only")
    most = int(touched.tokens[-1])
    distinct = float(touched.experts[:, -1].mean())
    chance = meta.num_experts * (1 - (1 - meta.top_k / meta.num_experts) ** most)
    share = distinct / meta.num_experts
    answer = "they need most experts" if share > _FAIR_MISSES else "they share experts"
    return Judgement(
        question,
        answer,
        f"{most} tokens of different requests use {distinct:.1f} of {meta.num_experts} experts a "
        f"layer (random choices: {chance:.1f}), {_percent(distinct / (most * meta.top_k))} of what "
        "they would load one by one",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if np.isfinite(share) else "-"
