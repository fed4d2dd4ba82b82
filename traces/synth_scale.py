"""Takes a fitted model to another shape.

The rule: experts are more, or fewer, draws of the same kind in the same hidden space. A layer of the new
shape is the fitted layer of the same relative depth. Kept are, by stage, the quantiles of popularity
relative to an even share (a model is trained to balance the experts it has, at its own ``top_k``), with
each quantile its class and the correlations over tokens of that, the coupling of layers, the rank and the
stages. Offsets are solved for anew, so that the popularity holds among the new experts; reuse, hit rates
and gaps then follow, they are not carried over as figures.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from traces.schema import NO_EXPERT, TraceError
from traces.synth_classes import agreement
from traces.synth_model import SynthModel
from traces.synth_moments import Mix, chosen_shares, solve_offsets
from traces.synth_scores import directions

_MOST_SHARE = 0.97
"""Share of the tokens that use the hottest expert, at most."""


def rescaled(model: SynthModel, num_layers: int, num_experts: int, top_k: int) -> SynthModel:
    """Return the model of another shape; the model itself where the shape is its own."""
    check_shape(num_layers, num_experts, top_k)
    if (num_layers, num_experts, top_k) == (model.num_layers, model.num_experts, model.top_k):
        return model
    layers = np.arange(num_layers) * (model.num_layers - 1) / max(1, num_layers - 1)
    layers = layers.round().astype(np.intp)
    fitted = directions((model.num_layers, model.num_experts), model.rank, model.seed)
    new = directions((num_layers, num_experts), model.rank, model.seed)
    agreements = agreement(model.correlations, model.stays)
    offsets = np.empty((len(model.stage_names), num_layers, num_experts), dtype=np.float32)
    classes = np.empty((num_layers, num_experts), dtype=np.int64)
    for layer, like in enumerate(layers.tolist()):
        own = (fitted[like], model.top_k, model.seed, Mix(model.classes[like], agreements[like]))
        shares = chosen_shares(model.offsets[:, like], *own)
        rng = np.random.default_rng([model.seed, layer, num_experts])
        wanted, chosen = _resampled(
            shares / model.top_k * model.num_experts, num_experts, top_k, rng
        )
        classes[layer] = model.classes[like][chosen]
        mix = Mix(classes[layer], agreements[like])
        offsets[:, layer] = solve_offsets(wanted, new[layer], top_k, model.seed, mix)
    return replace(
        model,
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        offsets=offsets,
        classes=classes,
        correlations=model.correlations[layers],
        stays=model.stays[layers],
        sharpness=model.sharpness[layers],
    )


def _resampled(
    relative: NDArray[np.float64], num_experts: int, top_k: int, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return shares of tokens that use each expert, float64[num_stages, num_experts], and who they are like.

    ``relative`` is float64[num_stages, fitted_experts], 1 where an expert has an even share. Each new
    expert takes those of the fitted expert at its own place in the order of popularity, in all stages;
    which expert is how popular is drawn, for otherwise copies of a layer would agree.
    """
    by_popularity = np.argsort(-relative.mean(axis=0), kind="stable")
    places = (np.arange(num_experts) + 0.5) * relative.shape[1] / num_experts
    chosen = by_popularity[rng.permutation(places.astype(np.intp))]
    shares = relative[:, chosen] * top_k / num_experts
    for _ in range(20):  # no share above the most; what is cut off goes to the others
        shares = np.minimum(shares * top_k / shares.sum(axis=1, keepdims=True), _MOST_SHARE)
    return shares, chosen


def check_shape(num_layers: int, num_experts: int, top_k: int) -> None:
    """Raise TraceError for a shape that no model has."""
    if num_layers < 1:
        raise TraceError(f"layers is {num_layers}: must be >= 1")
    if not 2 <= num_experts < NO_EXPERT:
        raise TraceError(f"experts is {num_experts}: must lie in 2..{NO_EXPERT - 1}")
    if not 1 <= top_k < num_experts:
        raise TraceError(f"top_k is {top_k}: must lie in 1..{num_experts - 1}, below experts")
