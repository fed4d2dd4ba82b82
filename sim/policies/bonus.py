"""More routing that adds a bonus to scores: CECAR, the deadband of Temporal-MoE, Strata's sigma bias."""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

from sim.policies.history import History
from sim.policies.rewriter import Choice
from sim.policies.routing import Reselection, best_with_bonus, favour, swaps_between
from sim.types import NO_EXPERT, RESIDENT, LayerRouting, View


class CECAR(Reselection):
    """Favour residents the more, the longer the cache means to keep them (CECAR, malmong/CECAR).

    A resident's score rises by (z(1) - z(k)) * (1 - s / max s), s its eviction score, max over the
    layer's residents. The k best run, but those of rank ``executed`` and beyond only if resident: the
    others are dropped, and weights stay as shares of all k. RECONSTRUCTION: s is the rank by age since
    the last use, the oldest highest, in place of CECAR's trained heads; so it suits an LRU cache.

    Parameters
    ----------
    executed
        Ranks that run in any case, >= 1; the repository's ``topk_threshold`` is 4.
    """

    only_misses = False

    def __init__(
        self, executed: int = 4, scoring: str = "softmax", normalized: bool | None = True
    ) -> None:
        super().__init__(scoring, normalized)
        if executed < 1:
            raise ValueError(f"executed = {executed}: must be >= 1")
        self.executed = executed
        self._ages: dict[int, OrderedDict[int, None]] = {}  # by layer: experts, oldest use first
        self._ranked: list[int] = []

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Make the used experts the youngest of their layer."""
        ages, num_experts = self._ages.setdefault(routing.layer, OrderedDict()), view.num_experts
        for key in routing.experts:
            expert = key % num_experts
            ages[expert] = None
            ages.move_to_end(expert)

    def swap(self, picks: list[int], scores: list[float], view: View) -> dict[int, int]:
        """Return what brings in the experts whose score with the bonus is highest."""
        gap = scores[picks[0]] - scores[picks[-1]]
        bonuses = self._bonuses(view.layer * view.num_experts, gap, view)
        self._ranked = best_with_bonus(picks, scores, bonuses)
        return swaps_between(picks, self._ranked)

    def choose(
        self, token: int, experts: list[int], weights: list[float] | None, view: View
    ) -> Choice | None:
        """Return the selection without its absent experts of high rank."""
        choice = super().choose(token, experts, weights, view)
        slots, made = (experts, weights) if choice is None else choice[:2]
        absent = [e for e in self._ranked[self.executed :] if self.states[e] != RESIDENT]
        if not absent:
            return choice
        if made is not None:
            made = [0.0 if e in absent else w for e, w in zip(slots, made, strict=True)]
        return [NO_EXPERT if e in absent else e for e in slots], made, None

    def _bonuses(self, first: int, gap: float, view: View) -> dict[int, float]:
        """Return the bonus of each resident of the layer, by expert; none for one not used yet."""
        ages, states = self._ages.setdefault(view.layer, OrderedDict()), self.states
        for expert in [e for e in ages if states[e] != RESIDENT]:
            del ages[expert]
        oldest = max(len(ages) - 1, 1)
        return {expert: gap * place / oldest for place, expert in enumerate(ages)}


class Deadband(Reselection):
    """Leave a resident for an absent expert only if that scores higher by ``margin`` (arXiv 2604.20156).

    Temporal-MoE's rule for serving: of the k experts with the highest score, a resident's counting
    ``margin`` more. It trains the router besides, which a trace cannot show.

    Parameters
    ----------
    margin
        Rho, in units of the router's scores, >= 0.
    """

    def __init__(
        self, margin: float, scoring: str = "softmax", normalized: bool | None = True
    ) -> None:
        super().__init__(scoring, normalized)
        if margin < 0.0:
            raise ValueError(f"margin = {margin}: must be >= 0")
        self.margin = margin

    def swap(self, picks: list[int], scores: list[float], view: View) -> dict[int, int]:
        """Return what brings in the experts with the highest score, residents favoured."""
        return favour(picks, scores, self.here, self.margin, 0)


class SigmaBias(Reselection):
    """Favour warm or resident experts by a multiple of the scores' spread (amperor-strata 0.1.0 on PyPI).

    z' = z + sigmas * s * m, s the mean by layer of the standard deviation of a token's scores over the
    calibration requests. m is 1 for experts used in the layer's last ``window`` tokens ("warm"), for
    residents ("cache"), or half of each ("hybrid"). The package picks ``sigmas`` by measured quality.

    Parameters
    ----------
    sigmas
        Bias in standard deviations, >= 0.
    mode
        "warm", "cache" or "hybrid".
    window
        Tokens that keep an expert warm, >= 1; the package has 16.
    calibration
        Requests with ``router_logits``.
    """

    only_misses = False

    def __init__(
        self,
        sigmas: float,
        calibration: History,
        mode: str = "warm",
        window: int = 16,
        scoring: str = "softmax",
        normalized: bool | None = True,
    ) -> None:
        super().__init__(scoring, normalized)
        if sigmas < 0.0:
            raise ValueError(f"sigmas = {sigmas}: must be >= 0")
        if mode not in ("warm", "cache", "hybrid"):
            raise ValueError(f"mode = {mode}: must be warm, cache or hybrid")
        if window < 1:
            raise ValueError(f"window = {window}: must be >= 1")
        self._warm = {"warm": 1.0, "cache": 0.0, "hybrid": 0.5}[mode]
        self._window = window
        self._bias = [sigmas * spread for spread in _spreads(calibration)]
        self._recent: dict[int, deque[list[int]]] = {}
        self._uses: dict[int, dict[int, int]] = {}

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Count the event's tokens, prompt ones included, among the layer's last."""
        recent = self._recent.setdefault(routing.layer, deque())
        uses = self._uses.setdefault(routing.layer, {})
        ids = routing.topk_ids
        for row in [] if ids is None else ids[-self._window :].tolist():
            recent.append(row)
            for expert in row:
                uses[expert] = uses.get(expert, 0) + 1
            if len(recent) > self._window:
                for expert in recent.popleft():
                    uses[expert] -= 1

    def swap(self, picks: list[int], scores: list[float], view: View) -> dict[int, int]:
        """Return what brings in the experts with the highest biased score."""
        bias, states = self._bias[view.layer], self.states
        uses = self._uses.get(view.layer, {})
        warm, cached = bias * self._warm, bias * (1.0 - self._warm)
        bonuses = {expert: warm for expert, count in uses.items() if count} if warm else {}
        if cached:
            for expert, state in enumerate(states):
                if state == RESIDENT:
                    bonuses[expert] = bonuses.get(expert, 0.0) + cached
        return swaps_between(picks, best_with_bonus(picks, scores, bonuses))


def _spreads(calibration: History) -> list[float]:
    """Return the mean over tokens of the standard deviation of the scores, by layer."""
    found = []
    for request in calibration.requests():
        if request.router_logits is None:
            raise ValueError(
                "the calibration trace has no router_logits: must be recorded with --logits"
            )
        found.append(request.router_logits.astype(np.float32).std(axis=2))
    means: list[float] = np.concatenate(found).mean(axis=0).tolist()
    return means
