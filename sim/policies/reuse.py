"""A trace as a router with more reuse would have left it (after ReMoE, arXiv 2605.27081)."""

from __future__ import annotations

from collections import OrderedDict

from sim.policies.buddy import lightest_first
from sim.policies.rewriter import Choice, Table
from sim.policies.routing import Reselection
from sim.types import NO_EXPERT, LayerRouting, View

_REMEMBERED = 4096
"""Requests whose last token is kept; those unseen longest are forgotten first."""


class _Layer:
    """Running sums of one layer: tokens that have a predecessor, reuse as recorded and as made."""

    __slots__ = ("last", "made", "natural", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.natural = self.made = 0.0
        # by request: the last token's experts as recorded, and as made with their weights
        self.last: OrderedDict[int, tuple[set[int], dict[int, float]]] = OrderedDict()


class ReuseTransform(Reselection):
    """Raise the expert overlap ratio (EOR) of consecutive tokens to a target, and pay in router mass.

    EOR = |E(t) & E(t-1)| / k, by request, layer and decoded token (the first has no predecessor),
    averaged. ReMoE reaches a higher one by training its gates, which a trace cannot show. Here, until a
    layer's running EOR meets the target, a token's lightest pick that is no reuse is replaced by the
    best-ranked member of E(t-1), as made, that it does not use: by router score, or where no scores are
    recorded by weight at t-1. RECONSTRUCTION: a transform, no training; it knows nothing of memory.

    Parameters
    ----------
    delta_eor
        What to add to the recorded EOR, running too, in [0, 1]; ReMoE gained .072 on DeepSeek-V2-Lite.
    target_eor
        The EOR to reach instead, in [0, 1]; None takes ``delta_eor``. A higher recorded one stays.
    """

    needs = ()
    only_misses = False

    def __init__(
        self,
        delta_eor: float = 0.072,
        target_eor: float | None = None,
        scoring: str = "softmax",
        normalized: bool | None = True,
    ) -> None:
        super().__init__(scoring, normalized)
        for name, ratio in (("delta_eor", delta_eor), ("target_eor", target_eor)):
            if ratio is not None and not 0.0 <= ratio <= 1.0:
                raise ValueError(f"{name} = {ratio}: must be in [0, 1]")
        self.delta_eor = delta_eor
        self.target_eor = target_eor
        self._layers: dict[int, _Layer] = {}

    def eor(self) -> tuple[float, float]:
        """Return the mean EOR so far, as recorded and as made, over the layers that have one."""
        seen = [layer for layer in self._layers.values() if layer.tokens]
        if not seen:
            return 0.0, 0.0
        natural = sum(layer.natural / layer.tokens for layer in seen) / len(seen)
        return natural, sum(layer.made / layer.tokens for layer in seen) / len(seen)

    def meet(self, routing: LayerRouting, rows: Table, weights: Table | None, view: View) -> None:
        """Take the tokens' scores, where they are recorded."""
        self._logits = routing.router_logits

    def choose(
        self, token: int, experts: list[int], weights: list[float] | None, view: View
    ) -> Choice | None:
        """Return the token with as many reused experts as the target asks for."""
        layer = self._layers.setdefault(view.layer, _Layer())
        request = view.step.request_ids[token]
        recorded = {expert for expert in experts if expert != NO_EXPERT}
        slots, made = experts, weights
        if request in layer.last:
            recorded_before, before = layer.last[request]
            layer.tokens += 1
            layer.natural += len(recorded & recorded_before) / len(experts)
            swaps, scores = self._reuse(layer, token, experts, weights, before)
            if swaps:
                slots = [swaps.get(expert, expert) for expert in experts]
                made = weights if scores is None else self.weigh(experts, weights, swaps, scores)
        layer.last[request] = recorded, _weights_by_expert(slots, made)
        layer.last.move_to_end(request)
        if len(layer.last) > _REMEMBERED:
            layer.last.popitem(last=False)
        return None if slots is experts else (slots, made, None)

    def _reuse(
        self,
        layer: _Layer,
        token: int,
        experts: list[int],
        weights: list[float] | None,
        before: dict[int, float],
    ) -> tuple[dict[int, int], list[float] | None]:
        """Return the swaps that bring the layer's mean to its target, and the scores they went by."""
        share, reused = 1.0 / len(experts), sum([expert in before for expert in experts])
        wanted = self._target(layer) * layer.tokens - layer.made - 1e-9
        swaps: dict[int, int] = {}
        scores = None
        if reused * share < wanted:
            scores = None if self._logits is None else self._logits[token].tolist()
            rank = before.__getitem__ if scores is None else scores.__getitem__
            spare = [expert for expert in before if expert not in experts]
            spare.sort(key=rank, reverse=True)
            fresh = [s for s, e in enumerate(experts) if e != NO_EXPERT and e not in before]
            for slot, stand_in in zip(lightest_first(fresh, weights), spare, strict=False):
                swaps[experts[slot]] = stand_in
                reused += 1
                if reused * share >= wanted:
                    break
        layer.made += reused * share
        return swaps, scores

    def _target(self, layer: _Layer) -> float:
        if self.target_eor is not None:
            return self.target_eor
        return min(1.0, layer.natural / layer.tokens + self.delta_eor)


def _weights_by_expert(experts: list[int], weights: list[float] | None) -> dict[int, float]:
    """Return a token's experts with their weights, falling numbers where there are none."""
    known = [-float(slot) for slot in range(len(experts))] if weights is None else weights
    return {e: weight for e, weight in zip(experts, known, strict=True) if e != NO_EXPERT}
