"""MRS, the score cache of HybriMoE: running averages of what the router thinks of every expert."""

from __future__ import annotations

from collections.abc import Sequence
from operator import truediv

import numpy as np

from sim.policies.ranking import LayeredCache
from sim.types import LayerRouting, View

_MOST_WEIGHT = 1e200
"""Scores are divided by the weight of new ones before floats overflow."""


class MRS(LayeredCache):
    """Drop the expert with the lowest score S, which follows the router's probabilities s.

    At each event of its layer S <- alpha * TopP(s) + (1 - alpha) * S, TopP keeping the ``width``
    largest of s and zero for the others, so that experts score that were nearly chosen (HybriMoE,
    arXiv 2504.05897). Where the trace has the router's logits, s is their softmax. Where it has only
    the weights of the chosen experts, s is these, and where it has none, each chosen expert counts
    1 / top-k; then no expert scores that was not chosen. The mean over the event's tokens is taken
    before TopP: RECONSTRUCTION, the source caches in decoding, one token at a time. A low-precision
    copy has the score of its expert.

    Parameters
    ----------
    top_k
        Experts a token uses in a layer.
    alpha
        Weight of the new probabilities, in (0, 1); 0.5 in the source.
    width
        Experts that score in an event. 0: twice top-k, as in the paper; the code has 12.
    bypass
        Whether a newcomer competes when the event is over, and may be kept out.
    """

    def __init__(
        self, top_k: int, alpha: float = 0.5, width: int = 0, bypass: bool = False
    ) -> None:
        super().__init__()
        if not 0.0 < alpha < 1.0:
            raise ValueError(f"alpha = {alpha}: must be in (0, 1)")
        if width < 0:
            raise ValueError(f"width = {width}: must be >= 0")
        self.alpha = alpha
        self.width = width or 2 * top_k
        self.admits_after = bypass
        # Instead of all old scores falling at each event of a layer, its new ones weigh more.
        self._weight: list[float] = []
        self._scaled: dict[int, float] = {}
        self._all_keys = 1

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn the pool's layers."""
        super().start(keys, num_slots, view)
        self._weight = [1.0] * view.num_layers
        self._all_keys = view.num_layers * view.num_experts

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Add the event's probabilities to the scores of its layer."""
        layer, scaled, all_keys = routing.layer, self._scaled, self._all_keys
        weight = self._weight[layer] / (1.0 - self.alpha)
        if weight > _MOST_WEIGHT:
            weight = self._rescale(layer, weight)
        self._weight[layer] = weight
        factor = weight * self.alpha
        for key, probability in self._probabilities(routing, view.num_experts):
            own = key % all_keys
            scaled[own] = scaled.get(own, 0.0) + factor * probability

    def score(self, key: int) -> float:
        """Return what orders the experts of a layer: S times the weight of the layer."""
        return self._scaled.get(key % self._all_keys, 0.0)

    def rank(self, layer: int, score: float, view: View) -> float:
        """Return the score S itself."""
        return score / self._weight[layer % view.num_layers]

    def ranks(self, layers: Sequence[int], scores: Sequence[float], view: View) -> list[float]:
        """Return the scores S themselves."""
        weights = self._weight
        if len(layers) != len(weights):
            return super().ranks(layers, scores, view)
        return list(map(truediv, scores, weights))

    def _probabilities(
        self, routing: LayerRouting, num_experts: int
    ) -> Sequence[tuple[int, float]]:
        """Return (key, mean probability) of the experts that score."""
        logits = routing.router_logits
        if logits is not None:
            return self._of_logits(logits, routing.layer * num_experts)
        masses = routing.masses(num_experts)
        if masses is None:
            counts = zip(routing.experts, routing.token_counts, strict=True)
            masses = {key: float(tokens) for key, tokens in counts}
        total = sum(masses.values()) or 1.0
        found = list(masses.items())
        if len(found) > self.width:
            found = sorted(found, key=_by_probability)[: self.width]
        return [(key, mass / total) for key, mass in found]

    def _of_logits(self, logits: np.ndarray, first: int) -> Sequence[tuple[int, float]]:
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True), dtype=np.float32)
        mean = (exponentials / exponentials.sum(axis=1, keepdims=True)).mean(axis=0)
        if len(mean) > self.width:
            best = np.argpartition(mean, len(mean) - self.width)[-self.width :]
        else:
            best = np.arange(len(mean))
        return list(zip((best + first).tolist(), mean[best].tolist(), strict=True))

    def _rescale(self, layer: int, weight: float) -> float:
        """Divide the layer's scores by the weight; return the weight that is left, 1."""
        scaled, num_experts = self._scaled, self._num_experts
        for key in scaled:
            if key // num_experts == layer:
                scaled[key] /= weight
        for bank in self._place:
            if bank % len(self._weight) == layer:
                self.rescore(bank)
        return 1.0


def _by_probability(entry: tuple[int, float]) -> tuple[float, int]:
    return -entry[1], entry[0]
