"""Fits the score model of ``traces.synth_model`` to a recorded trace.

In this order: the experts' offsets by stage (popularity), the correlations by lag for each class of
popularity (overlap by lag, by single moments and then by a few rounds against simulated requests), the
offsets once more for the states that the classes see, the share that all layers have in common
(next-layer predictability), the chain of stages, the sharpness of weights. The rank is chosen before, on
a few layers, by Belady's gain over least recently used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.locality_ahead import NextLayer
from traces.locality_caches import belady_curve, lru_curve
from traces.locality_requests import choice_counts
from traces.schema import DECODE, PREFILL, Trace
from traces.synth_classes import (
    NUM_CLASSES,
    ClassOverlap,
    agreement,
    class_overlap,
    popularity_classes,
)
from traces.synth_draw import Router, draw_like
from traces.synth_model import SynthModel
from traces.synth_moments import Mix, OverlapSolver, correlation_of, solve_offsets, solve_sharpness
from traces.synth_scores import SPAN_TOKENS, choose, directions
from traces.synth_source import Source
from traces.synth_stages import StageChain, fit_chain

NEAR_LAGS = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 127)
FAR_LAGS = (160, 192, 224, 256)
RANKS = (3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
_FIRST_RANK = 6
_LAGS = NEAR_LAGS + FAR_LAGS
_LEAST_PAIRS = 500
_SMOOTHING_TOKENS = 40
_ROUNDS = 3
_COUPLINGS = (0.0, 0.5, 0.8, 1.0)
_SEARCH_LAYERS = 6
_SEARCH_TOKENS = 6000
_LEAST_CHAIN_ROWS = 64
_MOST_STAYS = 0.95

Report = Callable[[str], None]


def fit(
    source: Source, seed: int = 0, rank: int | None = None, report: Report = lambda _: None
) -> SynthModel:
    """Return the model of a source.

    Parameters
    ----------
    source
        See ``traces.synth_source``.
    seed
        Of the experts' directions and of the simulations.
    rank
        Dimensions of a hidden state; None: chosen, see ``search_rank``.
    report
        Told what is being done, a line each.
    """
    if rank is None:
        report("choosing the rank")
        rank = search_rank(source, seed)
    report(f"fitting {source.trace.meta.num_layers} layers at rank {rank}")
    model = fit_layers(source, seed, rank)
    report("fitting the coupling of layers")
    model = replace(model, coupling=_coupling(source, model, seed))
    return replace(model, sharpness=_sharpness(source, model))


def fit_layers(source: Source, seed: int, rank: int, rounds: int = _ROUNDS) -> SynthModel:
    """Return the model with each layer fitted by itself, and layers that have all in common."""
    meta, trace = source.trace.meta, source.trace
    direction = directions((meta.num_layers, meta.num_experts), rank, seed)
    shares = stage_shares(source)
    classes = popularity_classes(trace)
    offsets = _offsets(shares, direction, meta.top_k, seed)
    overlap = class_overlap(trace, classes, _LAGS)
    values, slopes = _solve_overlaps(source, overlap, offsets, direction, classes, seed)
    correlations, stays = _parts(values, overlap)
    mixes = [Mix(*own) for own in zip(classes, agreement(correlations, stays), strict=True)]
    offsets = _offsets(shares, direction, meta.top_k, seed, mixes)
    model = SynthModel(
        source=_origin(source),
        num_layers=meta.num_layers,
        num_experts=meta.num_experts,
        top_k=meta.top_k,
        stage_names=source.stage_names,
        stages_told=source.told,
        rank=rank,
        coupling=1.0,
        seed=seed,
        offsets=offsets,
        classes=classes,
        correlations=correlations,
        stays=stays,
        sharpness=np.ones(meta.num_layers),
        lengths_tokens=source.lengths_tokens(),
        prefill_chain=_chain(source, PREFILL),
        decode_chain=_chain(source, DECODE),
    )
    for number in range(rounds):
        drawn = class_overlap(_drawn(source, model, seed + 1 + number), classes, _LAGS)
        missing = overlap.rates - drawn.rates
        values += 0.7 * np.where(np.isfinite(missing), missing, 0) / slopes
        values = np.clip(values, -0.9, 0.98)
        correlations, stays = _parts(values, overlap)
        model = replace(model, correlations=correlations, stays=stays)
    return model


def stage_shares(source: Source) -> NDArray[np.float64]:
    """Return how often a token chooses each expert, float64[num_stages, num_layers, num_experts].

    Stages lean towards the mean of all by the weight of 40 tokens, so that a short one does not take
    chance for its nature.
    """
    stages, count = source.stages.astype(np.intp), len(source.stage_names)
    counts = choice_counts(source.trace.expert_ids, stages, count, source.trace.meta.num_experts)
    tokens = np.bincount(stages, minlength=count)
    mean = counts.sum(axis=0) / tokens.sum()
    smoothed = counts + _SMOOTHING_TOKENS * mean
    return np.asarray(smoothed / (tokens + _SMOOTHING_TOKENS)[:, None, None])


def _offsets(
    shares: NDArray[np.float64],
    direction: NDArray[np.float32],
    top_k: int,
    seed: int,
    mixes: Sequence[Mix] | None = None,
) -> NDArray[np.float32]:
    """Return the offsets of all layers, float32[num_stages, num_layers, num_experts]."""
    layers = [
        solve_offsets(shares[:, layer], own, top_k, seed, None if mixes is None else mixes[layer])
        for layer, own in enumerate(direction)
    ]
    return np.stack(layers, axis=1)


def _solve_overlaps(
    source: Source,
    overlap: ClassOverlap,
    offsets: NDArray[np.float32],
    direction: NDArray[np.float32],
    classes: NDArray[np.int64],
    seed: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the correlations that single moments give, and slopes: float64 in the shape of the rates.

    A class that a layer does not use gets those of the most popular experts.
    """
    rates = overlap.rates
    values, slopes = np.full(rates.shape, np.nan), np.ones(rates.shape)
    least_pairs = min(_LEAST_PAIRS, int(overlap.pairs.max()) // 4)  # of a short source, fewer
    rng = np.random.default_rng([seed, 3])
    for layer in range(len(rates)):
        solver = OverlapSolver(offsets[:, layer], direction[layer], source.trace.meta.top_k, seed)
        is_of = np.eye(NUM_CLASSES)[classes[layer]]
        for column, lag in enumerate(overlap.lags.tolist()):
            if overlap.pairs[column] < least_pairs:
                continue
            pairs = _stage_pairs(source, lag, solver.num_pairs, rng)
            curves = solver.curve(*pairs, is_of)
            for number in np.flatnonzero(np.isfinite(rates[layer, :, column])):
                place = (layer, number, column)
                values[place], slopes[place] = correlation_of(
                    curves[:, number], float(rates[place])
                )
    return np.where(np.isfinite(rates), values, values[:, :1]), slopes


def _stage_pairs(
    source: Source, lag: int, number: int, rng: np.random.Generator
) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """Draw the stages of tokens of one request that are ``lag`` apart."""
    request = source.trace.request_id
    earlier = rng.choice(np.flatnonzero(request[lag:] == request[:-lag]), number)
    return source.stages[earlier], source.stages[earlier + lag]


def _parts(
    values: NDArray[np.float64], overlap: ClassOverlap
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Split correlations by layer, class and lag into the moving part's and the share that stays.

    What stays is the mean from lag 128 on (from 64 on where requests are too short); 0 at least. The
    moving part's autocorrelation is interpolated between lags; where requests are so short that a lag
    has no value it continues as the last one has it.
    """
    known = np.isfinite(values).all(axis=(0, 1))
    lags = overlap.lags
    far = known & (lags >= SPAN_TOKENS)
    if not far.any():
        far = known & (lags >= SPAN_TOKENS // 2)
    stays = values[..., far].mean(axis=-1) if far.any() else np.zeros(values.shape[:-1])
    stays = np.clip(stays, 0, _MOST_STAYS)
    near = known & (lags < SPAN_TOKENS)
    moving = np.empty((*stays.shape, SPAN_TOKENS))
    for place in np.ndindex(stays.shape):
        own = (values[place][near] - stays[place]) / (1 - stays[place])
        moving[place] = np.interp(np.arange(SPAN_TOKENS), [0, *lags[near]], [1.0, *own])
    return np.clip(moving, -0.95, 1), stays


def search_rank(source: Source, seed: int) -> int:
    """Return the rank at which Belady's gain over least recently used is nearest to the source's.

    The fewer the dimensions, the more do tokens either repeat many experts or none, and the less does
    knowing the future gain in small caches. Compared are the gains of caches of ``top_k`` + 1 to four
    times ``top_k`` experts, on six layers; the rank is taken whose worst relative error is least.
    """
    layers = np.unique(np.linspace(0, source.trace.meta.num_layers - 1, _SEARCH_LAYERS).round())
    few = source.layers(layers.astype(int).tolist())
    few = replace(few, trace=few.trace.take(slice(0, _SEARCH_TOKENS)))
    wanted = _gains(few.trace)
    errors: dict[int, float] = {}
    place = RANKS.index(_FIRST_RANK)
    while RANKS[place] not in errors:
        drawn = _drawn(few, fit_layers(few, seed, RANKS[place], rounds=1), seed + 11)
        ratios = np.log(_gains(drawn) / wanted)
        errors[RANKS[place]] = float(np.abs(ratios).max())
        towards = -1 if ratios.mean() > 0 else 1  # the gain rises with the rank
        place = int(np.clip(place + towards, 0, len(RANKS) - 1))
    return min(errors, key=errors.__getitem__)


def _gains(trace: Trace) -> NDArray[np.float64]:
    """Return how much more an optimal cache hits, by size, for small sizes."""
    meta = trace.meta
    belady, lru = (
        curve([trace], meta, events="token").pooled for curve in (belady_curve, lru_curve)
    )
    sizes = slice(meta.top_k, max(meta.top_k + 1, min(4 * meta.top_k, meta.num_experts - 1)))
    return np.maximum(belady[sizes] - lru[sizes], 1e-4)


def _coupling(source: Source, model: SynthModel, seed: int) -> float:
    """Return the coupling at which pairs of neighbouring layers predict as well as in the source."""
    if model.num_layers < 2:
        return 1.0
    wanted = next_layer_rate(source.trace)
    found = [
        next_layer_rate(_drawn(source, replace(model, coupling=value), seed + 21))
        for value in _COUPLINGS
    ]
    return float(np.interp(wanted, np.maximum.accumulate(found), _COUPLINGS))


def next_layer_rate(trace: Trace) -> float:
    """Return the share of the next layer's choices that pair counts of the first half predict."""
    counter = NextLayer(trace.meta, len(trace) // 2, most_tokens=3000)
    counter.add(trace)
    return float(np.nanmean(counter.result().pairs))


def _sharpness(source: Source, model: SynthModel) -> NDArray[np.float64]:
    """Return the factor by layer that gives the best slot its mean share of a token's weights.

    1 where the source has no weights.
    """
    weights = source.trace.expert_weights
    if weights is None:
        return np.ones(model.num_layers)
    kept = weights[:: max(1, len(weights) // 4000)].astype(np.float64)
    top_shares = np.nanmean(kept.max(axis=2) / np.maximum(kept.sum(axis=2), 1e-9), axis=0)
    router, rng = Router(model), np.random.default_rng([model.seed, 4])
    states = rng.standard_normal((1, 2000, model.rank), dtype=np.float32)
    states = states.repeat(model.num_classes, axis=0)  # of which all classes see nearly the same
    stages = rng.choice(source.stages, 2000)
    found = np.ones(model.num_layers)
    for layer in range(model.num_layers):
        scores = router.scores(layer, states, stages)
        chosen = choose(scores, model.top_k).astype(np.intp)
        best = np.take_along_axis(scores, chosen, axis=1)
        found[layer] = solve_sharpness(float(top_shares[layer]), best)
    return found


def _drawn(source: Source, model: SynthModel, seed: int) -> Trace:
    return draw_like(model, source.sequences(), seed)


def _chain(source: Source, phase: int) -> StageChain:
    """Return the chain of a phase's stages; of all rows where the phase has very few."""
    own = source.sequences(phase)
    enough = sum(map(len, own)) >= _LEAST_CHAIN_ROWS + 2 * len(own)
    return fit_chain(own if enough else source.sequences(), len(source.stage_names))


def _origin(source: Source) -> dict[str, Any]:
    meta = source.trace.meta
    return {
        "model": meta.model,
        "kind": meta.provenance.kind,
        "name": meta.provenance.source,
        "tokens": len(source.trace),
        "requests": source.trace.num_requests,
        "shape": [meta.num_layers, meta.num_experts, meta.top_k],
        "licence": meta.licence,
        "has_weights": source.trace.expert_weights is not None,
    }
