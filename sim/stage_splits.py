"""Windows of equal length on two sides of a place: at a stage's boundary, and in the middle of a stage.

SAEM's temporal coherence, the cosine of how often the experts are used, with what else differs taken
away: each window has the same number of tokens, so that none is noisier than another, and each pair
touches, so that none is farther apart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.stage_cuts import Cuts

Floats = NDArray[np.float64]


def split_cosines(one_layer: NDArray[np.float32], window: int) -> Floats:
    """Return at each place the cosine of the uses in ``window`` tokens before it and from it on.

    ``one_layer`` is float32[num_tokens, num_experts]. float64[num_tokens + 1]; nan where one of the two
    would reach beyond the text.
    """
    tokens, experts = one_layer.shape
    found = np.full(tokens + 1, np.nan)
    if tokens < 2 * window:
        return found
    total = np.concatenate([np.zeros((1, experts)), one_layer.cumsum(axis=0, dtype=np.float64)])
    uses = total[window:] - total[:-window]  # of the window that begins at each place
    before, after = uses[:-window], uses[window:]
    dot = (before * after).sum(axis=1)
    norms = (before**2).sum(axis=1) * (after**2).sum(axis=1)
    found[window : tokens - window + 1] = dot / np.sqrt(np.maximum(norms, 1e-12))
    return found


def split_sums(cosines: Floats, cuts: Cuts, window: int) -> Floats:
    """Return sums and numbers of the cosines within stages and across boundaries, float64[num_cuts, 4].

    Within: in the middle of each stage of twice ``window`` tokens at least. Across: at each boundary of
    two stages of ``window`` tokens at least. In this order: sum and number within, sum and number across.
    """
    lengths = np.diff(cuts, axis=1)
    middles = cuts[:, :-1] + lengths // 2
    inside = lengths >= 2 * window
    borders = cuts[:, 1:-1]
    between = np.minimum(lengths[:, :-1], lengths[:, 1:]) >= window
    parts = []
    for places, used in ((middles, inside), (borders, between)):
        values = np.where(used, cosines[np.where(used, places, window)], 0.0)
        parts += [values.sum(axis=1), used.sum(axis=1)]
    return np.stack(parts, axis=1).astype(np.float64)


def split_means(sums: Floats) -> Floats:
    """Return mean cosine within, across, and their difference, float64[..., 3]; nan where there is none."""
    with np.errstate(invalid="ignore", divide="ignore"):
        within, across = sums[..., 0] / sums[..., 1], sums[..., 2] / sums[..., 3]
    return np.stack([within, across, within - across], axis=-1)
