"""How alike the experts of adjacent stretches of text are (what SAEM calls temporal coherence).

The paper's formula is not public; the cosine of adjacent histograms, averaged over layers and pairs, and
the overlap of the most used experts are those of the project's own measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.locality_histograms import cosines, most_used
from traces.locality_requests import expert_uses


class Likeness(NamedTuple):
    """Mean over adjacent pairs of stretches: cosine, share of the most used experts in common; the pairs."""

    cosine: float
    overlap: float
    num_pairs: int


def likeness(
    stretches: Iterable[Sequence[NDArray[np.uint16]]], num_experts: int, top: int
) -> Likeness:
    """Compare each stretch with the next one of its text.

    Parameters
    ----------
    stretches
        For each text its stretches in order, each the choices uint16[num_tokens, num_layers, top_k].
    num_experts
        Experts a layer.
    top
        How many of the most used experts of each layer are compared; equals fall to the lower index.
    """
    alike, overlaps = list[float](), list[float]()
    for text in stretches:
        counts = [histogram(ids, num_experts) for ids in text]
        for one, other in pairwise(counts):
            alike.append(float(cosines(one, other).mean()))
            common = most_used(one, top) & most_used(other, top)
            overlaps.append(float(common.sum(axis=1).mean() / top))
    if not alike:
        return Likeness(float("nan"), float("nan"), 0)
    return Likeness(float(np.mean(alike)), float(np.mean(overlaps)), len(alike))


def histogram(ids: NDArray[np.uint16], num_experts: int) -> NDArray[np.float64]:
    """Return how often each expert is chosen, float64[num_layers, num_experts]."""
    return expert_uses(ids, num_experts).astype(np.float64)


def windows(ids: NDArray[np.uint16], length: int) -> list[NDArray[np.uint16]]:
    """Cut a text into stretches of ``length`` tokens; what is left at the end is dropped."""
    return [ids[first : first + length] for first in range(0, len(ids) - length + 1, length)]


def stages(ids: NDArray[np.uint16], labels: NDArray[np.int16]) -> list[NDArray[np.uint16]]:
    """Cut a text where its label changes; an unknown label (-1) continues the stage before it."""
    known = np.flatnonzero(labels >= 0)
    begins = known[1:][labels[known[1:]] != labels[known[:-1]]]
    return np.split(ids, begins)
