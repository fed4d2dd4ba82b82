"""What a test of a trace's stages found: plain data, as text, table and figure show it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.stage_capture import Capture
from sim.stage_draws import SHIFTED
from sim.stage_inference import Contrast, Floats
from sim.stage_kinds import KindContrast
from sim.stage_pairs import Counts


@dataclass(frozen=True, slots=True)
class PairResult:
    """Tokens at equal distance, within a stage against across a boundary; shares of the top_k experts.

    Attributes
    ----------
    edges
        Bounds of the bands of distances, int64[bands + 1], from 0.
    within, across
        What pairs share at each distance 1..D, mean over layers, float64[D]; nan where there is no pair.
    num_within, num_across
        Pairs at each distance, [D].
    weights
        Of each distance in the overall difference, float64[D].
    against
        Within less across, mean over layers, all distances, against random cuts of each kind: see
        :data:`sim.stage_draws.NULLS`.
    by_band, by_layer
        The same by band of distances (mean over layers), and by layer, against shifted cuts.
    """

    edges: NDArray[np.int64]
    within: Floats
    across: Floats
    num_within: Counts
    num_across: Counts
    weights: Floats
    against: dict[str, Contrast]
    by_band: tuple[Contrast, ...]
    by_layer: tuple[Contrast, ...]

    @property
    def overall(self) -> Contrast:
        """Within less across, against shifted cuts."""
        return self.against[SHIFTED]

    @property
    def is_clear(self) -> bool:
        """Tell whether chance of no kind explains the difference."""
        return self.overall.is_clear and all(c.p_value <= 0.05 for c in self.against.values())

    def sides(self, band: int | None = None) -> tuple[float, float]:
        """Return what pairs within and across share in a band, or at all distances, as weighted there."""
        low, high = (0, None) if band is None else self.edges[band : band + 2].tolist()
        weights = self.weights[low:high]
        if not weights.sum():
            return math.nan, math.nan
        sides = (np.nan_to_num(side[low:high]) for side in (self.within, self.across))
        within, across = (float(np.average(side, weights=weights)) for side in sides)
        return within, across


@dataclass(frozen=True, slots=True)
class SplitResult:
    """Two adjacent windows of ``window`` tokens each: the mean cosine of their uses of the experts.

    Attributes
    ----------
    within, across
        In the middle of stages, and at their boundaries.
    against
        Within less across, against random cuts of each kind: see :data:`sim.stage_draws.NULLS`.
    windows_within, windows_across
        What windows of the stages' mean length have in the mean.
    """

    window: int
    within: float
    across: float
    against: dict[str, Contrast]
    windows_within: float
    windows_across: float


@dataclass(frozen=True, slots=True)
class Findings:
    """All that the test found.

    Attributes
    ----------
    source
        Kind of provenance, and model, of the trace.
    by
        Whose stages these are: "annotated", or a detector's name.
    num_texts, num_stages, num_tokens, mean_length
        Requests, stages, decoded tokens, and the mean length of a stage in whole tokens.
    draws
        Random cuts of each kind.
    unrelated
        Share of the top_k experts that tokens of different requests have in common.
    pairs, beyond
        Pairs at equal distance; and beyond the tokens' identity, None where the trace has no token ids, or
        there is one request.
    splits
        Adjacent windows of several lengths.
    kinds
        Stages of a kind in other requests; None where the stages have no kinds, or there is one request.
    captures, window_captures
        What sets by stage hold, at several sizes; and sets by window of the mean length, whose kind is
        its number in the request. Empty for a single request, where nothing is learnt from others.
    """

    source: str
    by: str
    num_texts: int
    num_stages: int
    num_tokens: int
    mean_length: int
    draws: int
    unrelated: float
    pairs: PairResult
    beyond: PairResult | None
    splits: tuple[SplitResult, ...]
    kinds: KindContrast | None
    captures: tuple[Capture, ...]
    window_captures: tuple[Capture, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON knows it; what is not a number becomes None."""
        return {key: _plain(value) for key, value in asdict(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
