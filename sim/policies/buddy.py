"""Buddies: experts that calibration saw at work together stand in for one another (BuddyMoE)."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from sim.policies.history import History
from sim.policies.rewriter import Choice, Table, TokenRewriter
from sim.types import NO_EXPERT, RESIDENT, ConfigError, LayerRouting, View


class BuddyTable:
    """How often experts of a layer are chosen together: q(j|i) = M(i,j) / sum over j of M(i,j).

    M counts the tokens of the calibration requests, prompts included, that choose both.

    Parameters
    ----------
    calibration
        The requests.
    share
        A list is the shortest prefix, by falling q, whose q come to this much, in (0, 1].
    most
        Longest list, >= 1.
    """

    def __init__(self, calibration: History, share: float, most: int) -> None:
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share = {share}: must be in (0, 1]")
        if most < 1:
            raise ValueError(f"most = {most}: must be >= 1")
        counts = _together(calibration)
        sums = counts.sum(axis=2, keepdims=True)
        shares = np.divide(counts, sums, out=np.zeros_like(counts), where=sums > 0)
        order = np.argsort(-shares, axis=2, kind="stable")[:, :, :most]
        ranked = np.take_along_axis(shares, order, axis=2)
        before = np.cumsum(ranked, axis=2) - ranked
        kept = (before < share - 1e-9) & (ranked > 0)
        self._lists = [
            [
                list(zip(e[k].tolist(), q[k].tolist(), strict=True))
                for e, q, k in zip(*layer, strict=True)
            ]
            for layer in zip(order, ranked, kept, strict=True)
        ]

    def of(self, layer: int, expert: int) -> Sequence[tuple[int, float]]:
        """Return (buddy, q) of an expert, the likeliest first."""
        return self._lists[layer][expert]


class BuddyMoE(TokenRewriter):
    """Replace absent picks by a buddy in memory, where the token bears it (BuddyMoE, arXiv 2511.10054).

    A token whose picks' weights have low entropy is left alone: TAE = - sum p ln p / ln k at or below
    ``quantile`` of the calibration's, by layer. So is one of whose picks ``cpu_share`` or more are
    absent. Else its absent picks are replaced, the lightest first (RECONSTRUCTION: the order is not
    known to us), at most ``replacements`` of them, each by the resident buddy with the highest
    q * (1 + eta * z), z the buddy's router score less the mean over the layer's experts, in standard
    deviations. A buddy has the weight of the pick it replaces, and is no pick of the token.

    Left out: the paper's factor for hops between GPUs (all copies count as near). Without
    ``expert_weights`` in trace and calibration no token is left alone for its entropy, and the last
    slots count as the lightest; with eta = 0 scores are not used.

    Parameters
    ----------
    calibration
        Requests to count pairs in.
    share, most
        Alpha .90 and 16 in the paper, see :class:`BuddyTable`.
    quantile
        In [0, 1]; the paper has the 15th percentile.
    cpu_share
        Delta in [0, 1]; the paper has .60.
    replacements
        >= 1 a token; the paper has 3 to 4.
    eta
        >= 0; above 0 the trace must have ``router_logits``. No published value is known to us.
    """

    def __init__(
        self,
        calibration: History,
        share: float = 0.9,
        most: int = 16,
        quantile: float = 0.15,
        cpu_share: float = 0.6,
        replacements: int = 3,
        eta: float = 0.0,
    ) -> None:
        for name, ratio in (("quantile", quantile), ("cpu_share", cpu_share)):
            if not 0.0 <= ratio <= 1.0:
                raise ValueError(f"{name} = {ratio}: must be in [0, 1]")
        if replacements < 1:
            raise ValueError(f"replacements = {replacements}: must be >= 1")
        if not eta >= 0.0:
            raise ValueError(f"eta = {eta}: must be >= 0")
        self.cpu_share, self.replacements, self.eta = cpu_share, replacements, eta
        self._buddies = BuddyTable(calibration, share, most)
        self._bounds = _entropy_bounds(calibration, quantile)
        self._scores: Table = []

    def meet(self, routing: LayerRouting, rows: Table, weights: Table | None, view: View) -> None:
        """Take the tokens' scores in standard deviations, where they count."""
        if not self.eta:
            return
        logits = routing.router_logits
        if logits is None:
            raise ConfigError(
                f"BuddyMoE: eta = {self.eta}: the trace has no router_logits: must be recorded with "
                "--logits, or eta 0"
            )
        scores = logits[: len(rows)].astype(np.float32)
        spread = scores.std(axis=1, keepdims=True)
        centred = scores - scores.mean(axis=1, keepdims=True)
        self._scores = (centred / np.maximum(spread, 1e-6)).tolist()

    def choose(
        self, token: int, experts: list[int], weights: list[float] | None, view: View
    ) -> Choice | None:
        """Return the token with buddies in the slots of absent picks."""
        absent = self.absent(experts)
        num_used = len(experts) - experts.count(NO_EXPERT)
        if not absent or len(absent) >= self.cpu_share * num_used or self._is_sure(weights, view):
            return None
        absent = lightest_first(absent, weights)
        slots, replaced = list(experts), 0
        for slot in absent:
            buddy = self._best(token, experts[slot], slots, view)
            if buddy is not None:
                slots[slot] = buddy
                replaced += 1
                if replaced == self.replacements:
                    break
        return (slots, weights, None) if replaced else None

    def _is_sure(self, weights: list[float] | None, view: View) -> bool:
        """Tell whether a token's weights are so uneven that its picks must stay."""
        if weights is None or self._bounds is None:
            return False
        return entropy(weights) <= self._bounds[view.layer]

    def _best(self, token: int, expert: int, taken: list[int], view: View) -> int | None:
        """Return the resident buddy with the highest score that the token does not use yet."""
        states = self.states
        best, best_score = None, 0.0
        for buddy, likelihood in self._buddies.of(view.layer, expert):
            if states[buddy] != RESIDENT or buddy in taken:
                continue
            if not self.eta:  # the lists are in falling order of likelihood
                return buddy
            score = likelihood * (1.0 + self.eta * self._scores[token][buddy])
            if best is None or score > best_score:
                best, best_score = buddy, score
        return best


def lightest_first(slots: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """Return slots by rising weight, later ones first among equals or where weights are unknown."""
    ordered = sorted(slots, reverse=True)
    return ordered if weights is None else sorted(ordered, key=lambda slot: weights[slot])


def entropy(weights: Sequence[float]) -> float:
    """Return the entropy of some weights as shares, over its greatest value ln(number): in [0, 1]."""
    total = sum(weights)
    if total <= 0.0 or len(weights) < 2:
        return 0.0
    shares = [weight / total for weight in weights]
    return -sum(p * log(p) for p in shares if p > 0.0) / log(len(weights))


def _together(calibration: History) -> NDArray[np.float64]:
    """Return how many tokens choose both experts, float64[num_layers, num_experts, num_experts]."""
    layers, experts = calibration.num_layers, calibration.num_experts
    counts = np.zeros((layers, experts, experts))
    for request in calibration.requests():
        for layer in range(layers):
            ids = request.ids[:, layer].astype(np.intp)
            chosen = np.zeros((len(ids), experts + 1), dtype=np.float32)
            np.put_along_axis(chosen, np.minimum(ids, experts), 1.0, axis=1)  # the last: NO_EXPERT
            chosen = chosen[:, :experts]
            counts[layer] += chosen.T @ chosen
    counts[:, np.arange(experts), np.arange(experts)] = 0.0
    return counts


def _entropy_bounds(calibration: History, quantile: float) -> list[float] | None:
    """Return the quantile of the tokens' entropies by layer; None without recorded weights."""
    found = []
    for request in calibration.requests():
        if request.weights is None:
            return None
        weights = np.where(request.ids == NO_EXPERT, 0.0, request.weights.astype(np.float64))
        shares = weights / np.maximum(weights.sum(axis=2, keepdims=True), 1e-12)
        logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
        found.append(-(shares * logs).sum(axis=2) / max(log(weights.shape[2]), 1e-12))
    bounds: list[float] = np.quantile(np.concatenate(found), quantile, axis=0).tolist()
    return bounds
