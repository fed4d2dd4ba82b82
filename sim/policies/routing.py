"""Routing that prefers what is in memory: other experts are selected by the router's own scores.

All need the recorded scores of all experts (``router_logits``) and change decoded tokens only. The
router's own picks rank first, by score. Weights come from the unmodified scores, as in the router: for
softmax scores that is the recorded weight times e to the power of the difference in score; where a
token's weights are normalised they keep their recorded sum.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import exp
from typing import ClassVar

from sim.policies.rewriter import Choice, Table, TokenRewriter
from sim.types import NO_EXPERT, RESIDENT, LayerRouting, View


class Reselection(TokenRewriter):
    """Chooses a token's experts anew from its router scores; a subclass fills :meth:`swap`.

    Parameters
    ----------
    scoring
        How weights follow from scores: "sigmoid", else as softmax (the trace's ``scoring``).
    normalized
        Whether a token's weights are rescaled to one sum (the trace's ``normalized``); None is as True.
    """

    needs: ClassVar[tuple[str, ...]] = ("router_logits",)

    def __init__(self, scoring: str = "softmax", normalized: bool | None = True) -> None:
        self._sigmoid = scoring == "sigmoid"
        self._normalized = normalized is not False
        self._routing: LayerRouting | None = None
        self.here: list[int] = []  # the layer's experts on the GPU

    def meet(self, routing: LayerRouting, rows: Table, weights: Table | None, view: View) -> None:
        """Take the tokens' scores."""
        self._routing = routing
        self.here = [expert for expert, at in enumerate(self.states) if at == RESIDENT]

    def choose(
        self, token: int, experts: list[int], weights: list[float] | None, view: View
    ) -> Choice | None:
        """Return the slots with the experts of :meth:`swap`, and their weights."""
        scores = None if self._routing is None else self._routing.score_row(token)
        if scores is None:
            raise ValueError("the trace has no router_logits: must be recorded with --logits")
        picks = [expert for expert in experts if expert != NO_EXPERT]
        picks.sort(key=scores.__getitem__, reverse=True)
        swaps = self.swap(picks, scores, view)
        if not swaps:
            return None
        slots = [swaps.get(expert, expert) for expert in experts]
        return slots, self.weigh(experts, weights, swaps, scores), None

    def swap(self, picks: list[int], scores: list[float], view: View) -> dict[int, int]:
        """Return which pick gives its slot to which other expert.

        ``picks`` are those of the router in falling order of score; ``scores`` are those of
        all experts of the layer.
        """
        raise NotImplementedError

    def weigh(
        self,
        experts: list[int],
        weights: list[float] | None,
        swaps: Mapping[int, int],
        scores: list[float],
        alpha: float = 1.0,
    ) -> list[float] | None:
        """Return the weights after ``swaps``; None if unknown.

        ``alpha`` scales those of newcomers, before sums are restored.
        """
        if weights is None:
            return None
        made, heaviest = list(weights), max(weights)
        base = scores[experts[weights.index(heaviest)]]
        for old, new in swaps.items():
            made[experts.index(old)] = alpha * heaviest * self._ratio(scores[new], base)
        if not self._normalized:
            return made
        scale = sum(weights) / (sum(made) or 1.0)
        return [weight * scale for weight in made]

    def _ratio(self, score: float, base: float) -> float:
        """Return how much more a score weighs than another one."""
        if self._sigmoid:
            return (1.0 + exp(-base)) / (1.0 + exp(-score))
        return exp(score - base)


def best_with_bonus(
    picks: Sequence[int], scores: Sequence[float], bonuses: Mapping[int, float]
) -> list[int]:
    """Return the len(picks) experts whose score plus bonus is highest, in falling order of that.

    Experts without a bonus that are no picks score no higher than picks do. Of equals the pick stays.
    """
    best = {pick: scores[pick] + bonuses.get(pick, 0.0) for pick in picks}
    others = {e: scores[e] + bonus for e, bonus in bonuses.items() if e not in best}
    ranked = sorted((best | others).items(), key=lambda pair: -pair[1])  # stable: picks come first
    return [expert for expert, _ in ranked[: len(picks)]]


def swaps_between(picks: Sequence[int], chosen: Sequence[int]) -> dict[int, int]:
    """Return pairs (pick that is not chosen, chosen expert that is no pick), each in its order."""
    newcomers = [expert for expert in chosen if expert not in picks]
    return dict(zip([pick for pick in picks if pick not in chosen], newcomers, strict=True))


def favour(
    picks: list[int], scores: list[float], here: list[int], bonus: float, kept: int
) -> dict[int, int]:
    """Return the swaps that leave the best scores, where those ``here`` and ``kept`` picks have a bonus.

    Only a pick without the bonus can lose its slot, and only to a resident.
    """
    weak = [pick for pick in reversed(picks[kept:]) if pick not in here]
    if not weak:
        return {}
    bound = scores[weak[0]] - bonus
    strong = [e for e in here if scores[e] > bound and e not in picks]
    strong.sort(key=scores.__getitem__, reverse=True)
    swaps = {}
    for pick, expert in zip(weak, strong, strict=False):
        if scores[expert] + bonus <= scores[pick]:
            break
        swaps[pick] = expert
    return swaps


def _check_share(name: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{name} = {value}: must be in (0, 1]")


def _check_kept(kept: int) -> None:
    if kept < 0:
        raise ValueError(f"kept = {kept}: must be >= 0")


def _num_kept(kept: int, top_k: int) -> int:
    """Return how many of the router's first picks are safe; of two picks or less, one at most."""
    return min(kept, 1) if top_k <= 2 else kept


class CachePrior(Reselection):
    """Add a bonus to the scores of experts in memory (Cache-Prior, arXiv 2412.00099).

    z' = z + strength * spread * (1 for residents and for the router's first ``kept`` picks), and the
    experts with the highest z' run. ``spread`` is a running mean by layer of max z - min z, token by
    token, .99 old + .01 new, begun with the first token's (as in the port in malmong/CECAR).

    Parameters
    ----------
    strength
        Lambda, >= 0; the paper sweeps it, the port uses .2.
    kept
        J, the router's first picks that get the bonus wherever they are; 1 at most where top-k is 2.
    decay
        Share of the running mean that a token leaves, in [0, 1].
    """

    only_misses = False  # the spread is that of all tokens

    def __init__(
        self,
        strength: float = 0.2,
        kept: int = 2,
        decay: float = 0.99,
        scoring: str = "softmax",
        normalized: bool | None = True,
    ) -> None:
        super().__init__(scoring, normalized)
        if not strength >= 0.0:
            raise ValueError(f"strength = {strength}: must be >= 0")
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay = {decay}: must be in [0, 1]")
        _check_kept(kept)
        self.strength, self.kept, self.decay = strength, kept, decay
        self._spread: dict[int, float] = {}

    def swap(self, picks: list[int], scores: list[float], view: View) -> dict[int, int]:
        """Return what brings in the experts with the highest z'."""
        spread = max(scores) - min(scores)
        if view.layer in self._spread:
            spread = self.decay * self._spread[view.layer] + (1.0 - self.decay) * spread
        self._spread[view.layer] = spread
        kept = _num_kept(self.kept, len(picks))
        return favour(picks, scores, self.here, self.strength * spread, kept)


class MaxRank(Reselection):
    """Fill up with residents among the router's first ``window`` experts (arXiv 2412.00099).

    The router's first ``kept`` picks run; then residents of rank below ``window``, best first; then,
    if slots are left, the others in the router's order.

    Parameters
    ----------
    kept
        J, >= 0; 1 at most where top-k is 2.
    window
        M, >= 1.
    alpha
        Factor on the weights of substitutes before sums are restored (as ROUTE_ALPHA in
        JustVugg/colibri), > 0; 1 is the paper's rule.
    """

    def __init__(
        self,
        kept: int = 2,
        window: int = 12,
        alpha: float = 1.0,
        scoring: str = "softmax",
        normalized: bool | None = True,
    ) -> None:
        super().__init__(scoring, normalized)
        _check_kept(kept)
        if window < 1:
            raise ValueError(f"window = {window}: must be >= 1")
        if not alpha > 0.0:
            raise ValueError(f"alpha = {alpha}: must be > 0")
        self.kept, self.window, self.alpha = kept, window, alpha

    def swap(self, picks: list[int], scores: list[float], view: View) -> dict[int, int]:
        """Return what brings in residents of the window for absent picks, the last of them first."""
        states, top_k = self.states, len(picks)
        weak = [p for p in picks[_num_kept(self.kept, top_k) :] if states[p] != RESIDENT]
        if not weak:
            return {}
        ordered = sorted(scores, reverse=True)
        width = self.width(ordered)
        if width <= top_k:  # these are the picks
            return {}
        least = ordered[min(width, len(ordered)) - 1]
        strong = [e for e in self.here if scores[e] >= least and e not in picks]
        strong.sort(key=scores.__getitem__, reverse=True)
        number = min(len(weak), len(strong))
        return dict(zip(weak[len(weak) - number :], strong[:number], strict=True))

    def width(self, ordered: list[float]) -> int:
        """Return how many ranks are looked at, given the falling scores."""
        return self.window

    def weigh(
        self,
        experts: list[int],
        weights: list[float] | None,
        swaps: Mapping[int, int],
        scores: list[float],
        alpha: float = 1.0,
    ) -> list[float] | None:
        """Return the weights, those of substitutes scaled."""
        return super().weigh(experts, weights, swaps, scores, self.alpha)


class CumulativeSum(MaxRank):
    """:class:`MaxRank` whose window is the smallest prefix of ranks with enough router probability.

    Parameters
    ----------
    mass
        p, the softmax probability that the window must hold, in (0, 1]; the paper sweeps it.
    kept, alpha
        See :class:`MaxRank`.
    """

    def __init__(
        self,
        mass: float,
        kept: int = 2,
        alpha: float = 1.0,
        scoring: str = "softmax",
        normalized: bool | None = True,
    ) -> None:
        super().__init__(kept, 1, alpha, scoring, normalized)
        _check_share("mass", mass)
        self.mass = mass

    def width(self, ordered: list[float]) -> int:
        """Return the number of ranks whose probabilities come to ``mass``."""
        top = ordered[0]
        values = list(map(exp, [score - top for score in ordered]))
        enough = bisect_left(list(accumulate(values)), self.mass * sum(values))
        return min(enough + 1, len(ordered))
