"""DAOP: prompts bring the experts they use to the GPU; decoding follows the next layer's gate, one early.

Source: ecolab-nus/DAOP, and arXiv 2501.10375 (DATE'25). Its three parts are a cache whose set changes in
prompts (:class:`sim.policies.swap.PrefillSwap`), :class:`DAOPPlacement` and :class:`DAOPRouting`. Its
quota of experts a layer, filled by popularity, is one pool a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import PlacementPolicy
from sim.policies.placement import Prices
from sim.policies.rewriter import Choice, Table, TokenRewriter, refilled
from sim.types import NO_EXPERT, RESIDENT, ExpertWork, LayerRouting, Phase, Service, View

_FIRST_LAYER = 5
"""The first layer whose experts DAOP's code takes from the gate of the layer before; 0 to 4 are real."""


class DAOPPlacement(PlacementPolicy):
    """Serve a prompt's misses by exchange, else by Fiddler's sum; decode misses on the CPU.

    In a prompt the missing experts with the most tokens are paired with the residents of the layer that
    have the fewest; a missing one with more than ``factor`` times its pair's tokens is loaded and kept (at
    most half of a layer's experts). Any other is computed on the CPU if that is cheaper than to load it,
    and is not kept.

    While decoding, DAOP computes an expert that is on the CPU one layer ahead of its use. Here its work
    begins with its own layer and has until the next one's end: the same time, one layer later. In the
    books that counts as added late, though DAOP's loss is that of an early input.

    Parameters
    ----------
    factor
        1.05 in DAOP's code.
    ahead
        False: the CPU's experts of all layers must be done with their layer.
    first_layer
        The first layer of which the CPU knows ahead; that of DAOPRouting.
    cpu_token_ns, load_ns
        Constants for the prompt's rule instead of ``view.costs``: see Prices. DAOP's pairs are, in ms,
        A100: 5 and 40 (Mixtral), 2.5 and 25 (Phi-3.5), 16 and 86 (Mixtral-8x22B); A6000: 8.5 and 210
        (Mixtral), 3.5 and 30 (Phi-3.5); MI100: 96 and 21.
    """

    lossy: ClassVar[bool] = True

    def __init__(
        self,
        factor: float = 1.05,
        ahead: bool = True,
        first_layer: int = _FIRST_LAYER,
        cpu_token_ns: int = 0,
        load_ns: int = 0,
    ) -> None:
        if not factor >= 1.0:
            raise ValueError(f"factor = {factor}: must be >= 1")
        _check_first_layer(first_layer)
        self.factor = factor
        self.first_layer = first_layer
        self._decode_service = Service.DEFER if ahead else Service.CPU
        self._prices = Prices(cpu_token_ns, load_ns)

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        """Return CPU or DEFER for each missing expert while decoding; LOAD, CPU or BYPASS in a prompt."""
        if view.step.phase == Phase.DECODE:
            early = view.layer >= self.first_layer
            return [self._decode_service if early else Service.CPU] * len(work)
        exchanged = self._exchanged(work, view)
        services = []
        for key, tokens, _ in work:
            if key in exchanged:
                services.append(Service.LOAD)
                continue
            cpu_ns, gpu_ns = self._prices.of(key, tokens, view)
            services.append(Service.CPU if cpu_ns < gpu_ns else Service.BYPASS)
        return services

    def _exchanged(self, work: Sequence[ExpertWork], view: View) -> set[int]:
        """Return the missing experts that a resident makes way for."""
        routing = view.routing
        tokens = dict(zip(routing.experts, routing.token_counts, strict=True))
        here = [key for key in view.keys.layer_keys(view.layer) if view.is_resident(key)]
        coldest = sorted(tokens.get(key, 0) for key in here)[: view.keys.num_experts // 2]
        hottest = sorted(work, key=lambda item: -item.num_tokens)
        pairs = zip(hottest, coldest, strict=False)
        return {item.key for item, cold in pairs if item.num_tokens > self.factor * cold}


class DAOPRouting(TokenRewriter):
    """Decode with the experts that the next layer's gate picks on this layer's input: lossy.

    They replace the router's own from ``first_layer`` on. Of a token none of whose experts is on the GPU
    the last is replaced by the best one that is (DAOP knows top-2 models only: if both are on the CPU,
    the second).

    RECONSTRUCTION: a trace has the early gate's picks but not its scores. Where ``router_logits`` are
    recorded the router's own scores stand for them, for the best expert on the GPU and for weights
    (softmax over the chosen, at the recorded sum). Else the best is the one used most in calibration, and
    picks take the recorded weights by rank.

    Parameters
    ----------
    popularity
        Uses of each expert in the calibration trace, float[num_layers, num_experts].
    first_layer
        5 in DAOP's code.
    """

    needs: ClassVar[tuple[str, ...]] = ("next_gate_ids",)
    only_misses: ClassVar[bool] = False  # the early gate replaces hits as well

    def __init__(self, popularity: NDArray[np.floating], first_layer: int = _FIRST_LAYER) -> None:
        _check_first_layer(first_layer)
        self.first_layer = max(1, first_layer)  # no layer comes before the first
        self._popularity = np.asarray(popularity, dtype=np.float64)
        self._order: dict[int, list[int]] = {}
        self._early: Table | None = None  # what the layer before said of the next one
        self._picks: Table | None = None
        self._routing: LayerRouting | None = None  # where it knows the router's scores
        self._layer = -1

    def meet(self, routing: LayerRouting, rows: Table, weights: Table | None, view: View) -> None:
        """Take what the layer before said of this one, and note what this one says of the next."""
        follows = routing.layer >= self.first_layer and routing.layer == self._layer + 1
        self._picks = self._early if follows else None
        self._routing = routing if follows and routing.has_scores else None
        self._early = routing.early_rows(1) if routing.layer + 1 >= self.first_layer else None
        self._layer = routing.layer

    def choose(
        self, token: int, experts: list[int], weights: list[float] | None, view: View
    ) -> Choice | None:
        """Return the early picks in slots; None where they are what the router chose."""
        if self._picks is None:
            return None
        picks = [expert for expert in self._picks[token] if expert != NO_EXPERT]
        states = self.states
        if RESIDENT not in [states[pick] for pick in picks]:
            best = self._best_resident(token, picks, view)
            picks = picks if best is None else [*picks[:-1], best]
        if not [pick for pick in picks if pick not in experts]:
            return None
        slots = refilled(experts, picks)
        return slots, self._weigh(token, slots, picks, weights), None

    def _best_resident(self, token: int, picks: list[int], view: View) -> int | None:
        """Return the expert on the GPU that scores highest; None if there is none."""
        layer = view.layer
        scores = self._scores_of(token)
        if scores is not None:
            order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        elif layer in self._order:
            order = self._order[layer]
        else:
            order = np.argsort(-self._popularity[layer], kind="stable").tolist()
            self._order[layer] = order
        states = self.states
        return next((expert for expert in order if states[expert] == RESIDENT), None)

    def _weigh(
        self, token: int, slots: list[int], picks: list[int], weights: list[float] | None
    ) -> list[float] | None:
        """Return the weights of the slots, of the same sum as the recorded ones."""
        if weights is None:
            return None
        scores = self._scores_of(token)
        if scores is None:
            by_rank = dict(zip(picks, sorted(weights, reverse=True), strict=False))
            return [by_rank.get(expert, 0.0) for expert in slots]
        top = max([scores[pick] for pick in picks])
        values = [0.0 if e == NO_EXPERT else exp(scores[e] - top) for e in slots]
        scale = sum(weights) / sum(values)
        return [value * scale for value in values]

    def _scores_of(self, token: int) -> list[float] | None:
        """Return the router's scores where they are recorded and the early picks are used."""
        return None if self._routing is None else self._routing.score_row(token)


def _check_first_layer(first_layer: int) -> None:
    if first_layer < 0:
        raise ValueError(f"first_layer = {first_layer}: must be >= 0")
