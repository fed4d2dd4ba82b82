"""Caches that drop the lowest of many scores at once, all of one pool or of all layers.

Scores lie in one array over all keys, so that the lowest is found without a word of Python a key.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import CachePolicy, Evictable, Predictor
from sim.policies.eam import EAMPredictor
from sim.policies.finemoe import MapPredictor
from sim.types import View

_FLOOR = 1e-6  # added to each factor of MoE-Infinity's priority


class VisitCache(CachePolicy):
    """Drop the member with the lowest score, where a score looks at the visits an expert has had.

    A visit is an event that uses the expert. Equal scores fall to the lower key. A subclass gives
    :meth:`score`; ``visits`` are counted while an expert is in the cache, and ``forgets`` tells whether
    they begin anew when it comes back. A pool of low-precision copies has the scores of their experts.
    """

    forgets = True

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.visits = np.zeros(num_layers * num_experts)
        self._num_visits = 0.0  # the sum of them
        self._absent = np.full(num_layers * num_experts, np.inf)
        self._order: NDArray[np.floating] | None = None  # scores of this event, of members
        self._scored_at = (-2, -2)
        self._shift = 0  # a low-precision copy's key less that of its expert

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn whether the pool holds low-precision copies."""
        self._shift = keys[0] - view.keys.high(keys[0])

    @abstractmethod
    def score(self, view: View) -> NDArray[np.floating]:
        """Return the score of each expert of all layers at this event; the lowest goes first."""
        raise NotImplementedError

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the evictable member with the lowest score."""
        now = view.event, view.step.step
        order = self._order
        if order is None or self._scored_at != now:
            order = self._order = self.score(view) + self._absent
            self._scored_at = now
        while order[victim := int(order.argmin())] < np.inf:
            if evictable(victim + self._shift):
                return victim + self._shift
            order[victim] = np.inf  # in use or on its way: not in this event
        return None

    def on_hit(self, keys: Sequence[int], view: View) -> None:
        """Count a visit."""
        shift = self._shift
        self.visits[[key - shift for key in keys] if shift else keys] += 1.0
        self._num_visits += len(keys)

    def on_insert(self, key: int, view: View) -> None:
        """Join the members; a miss is a visit, a prefetch is none. Nothing that comes goes at once."""
        expert = key - self._shift
        self._absent[expert] = 0.0
        if key in view.routing.experts:
            self.visits[expert] += 1.0
            self._num_visits += 1.0

    def on_evict(self, key: int) -> None:
        """Leave the members."""
        expert = key - self._shift
        self._absent[expert] = np.inf
        if self._order is not None:
            self._order[expert] = np.inf
        if self.forgets:
            self._num_visits -= float(self.visits[expert])
            self.visits[expert] = 0.0


class InCacheLFU(VisitCache):
    """Drop the expert with the fewest visits since it came: what MoE-Infinity's runtime (C++) does."""

    def score(self, view: View) -> NDArray[np.floating]:
        """Return the visits."""
        return self.visits


class EAMCache(VisitCache):
    """Drop the lowest of layer decay x share in the sequence's own matrix x frequency (MoE-Infinity).

    Each factor is scaled to a sum of 1 over all experts, and 1e-6 is added. The matrices of a batch's
    requests are added up row by row. The decay is 1 - layer / num_layers: experts of early layers are kept,
    for a prefetch has the least time for them (RECONSTRUCTION: the code's own decay rises with the layer in a
    model with a decoder alone, whose layers it halves as if it had an encoder).

    Parameters
    ----------
    predictor
        An :class:`EAMPredictor`, which keeps the matrices.
    """

    forgets = False

    def __init__(self, num_layers: int, num_experts: int, predictor: Predictor) -> None:
        super().__init__(num_layers, num_experts)
        if not isinstance(predictor, EAMPredictor):
            raise ValueError(f"predictor = {type(predictor).__name__}: must be an EAMPredictor")
        self._predictor = predictor
        self._shape = num_layers, num_experts
        decay = 1.0 - np.arange(num_layers)[:, None] / num_layers
        self._decay = decay / (decay.sum() * num_experts) + _FLOOR
        self._weights = np.zeros(self._shape)  # decay x share, by row as last seen
        self._seen = (-1, -1)  # event, and how often requests had come or gone

    def score(self, view: View) -> NDArray[np.floating]:
        """Return the product of the three factors, times the sum of visits."""
        num_layers, changes = self._shape[0], self._predictor.num_changes
        num_events = view.event - self._seen[0]
        if changes != self._seen[1] or num_events >= num_layers:
            self._weigh(range(num_layers))
        elif num_events:  # only the rows of the layers since then have changed
            self._weigh({(view.layer - back) % num_layers for back in range(num_events)})
        self._seen = view.event, changes
        total = self._num_visits
        visits = self.visits + _FLOOR * total if total else np.ones_like(self.visits)
        found: NDArray[np.floating] = self._weights.ravel() * visits
        return found

    def _weigh(self, layers: Iterable[int]) -> None:
        """Work out decay x share of some rows."""
        num_layers, num_experts = self._shape
        rows = sorted(layers)
        if len(rows) == 1 and len(self._predictor.running) == 1:
            self._weigh_one(rows[0], self._predictor.running[0][rows[0]])
            return
        shares = np.zeros((len(rows), num_experts))
        running = self._predictor.running
        for counts in running:
            sums = counts[rows].sum(axis=1, keepdims=True)
            shares += np.where(sums > 0.0, counts[rows] / np.maximum(sums, 1.0), 1.0 / num_experts)
        shares /= max(1, len(running)) * num_layers
        self._weights[rows] = (shares + _FLOOR) * self._decay[rows]

    def _weigh_one(self, layer: int, counts: NDArray[np.float32]) -> None:
        """Do the same for one row of one request, in fewer steps."""
        num_layers, num_experts = self._shape
        total = sum(counts.tolist())
        if total > 0.0:
            shares = (counts / np.float32(total)).astype(np.float64)
        else:
            shares = np.full(num_experts, 1.0 / num_experts)
        self._weights[layer] = (shares / num_layers + _FLOOR) * self._decay[layer]


class MapCache(VisitCache):
    """Drop the lowest of expected probability x visits since it came (FineMoE, arXiv 2502.05370).

    Parameters
    ----------
    predictor
        A :class:`MapPredictor`, whose latest word on each layer is the probability.
    """

    def __init__(self, num_layers: int, num_experts: int, predictor: Predictor) -> None:
        super().__init__(num_layers, num_experts)
        if not isinstance(predictor, MapPredictor):
            raise ValueError(f"predictor = {type(predictor).__name__}: must be a MapPredictor")
        self._predictor = predictor

    def score(self, view: View) -> NDArray[np.floating]:
        """Return the products."""
        return self._predictor.probabilities.ravel() * self.visits
