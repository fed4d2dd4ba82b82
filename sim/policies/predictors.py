"""Predictors: how likely each expert of a layer is at that layer's next event.

None of them knows the future, and none has learned anything beforehand. What they look at:

    NextGate        what a later layer's gate says of an earlier layer's input
    PreviousToken   what the layer chose for the last token of the same request
    HottestK        what the layer has used most in this run

Scores count tokens: an expert that two tokens of a batch are expected to use has twice the score of one
that a single token uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import Predictor
from sim.types import ConfigError, LayerRouting, Phase, StepInfo, View

_LEAST_DECAY = 0.01  # as in LFU: below it only the last step counts
_HEAVIEST = 1e200  # weights of counts are scaled back before floats overflow


def tally(ids: NDArray[np.integer], num_experts: int) -> NDArray[np.float64]:
    """Return how many rows of int[num_rows, num_slots] name each expert, float64[num_experts].

    Of equals the one that stands in an earlier slot leads, by less than any count. NO_EXPERT is nobody.
    """
    lead = _lead(ids.shape[1])
    if len(ids) == 1:
        row = ids[0]
        found = np.zeros(num_experts)
        used = row < num_experts
        if used.all():
            found[row] = lead
        else:
            found[row[used]] = lead[used]
        return found
    used = ids < num_experts
    leads = np.broadcast_to(lead, ids.shape)
    counts = np.bincount(ids[used], weights=leads[used], minlength=num_experts)
    return counts.astype(np.float64, copy=False)


@lru_cache(maxsize=64)
def _lead(num_slots: int) -> NDArray[np.float64]:
    """Return what a row adds to the count of the expert in each slot: 1, and a trifle by rank."""
    lead: NDArray[np.float64] = 1.0 + 1e-9 * np.arange(num_slots, 0, -1, dtype=np.float64)
    return lead


def chosen_ids(routing: LayerRouting, num_experts: int) -> NDArray[np.integer]:
    """Return a routing's choices int[num_tokens, num_slots]; one row of its experts if no more is known."""
    ids = routing.topk_ids
    if ids is not None:
        return ids
    return np.array([[key % num_experts for key in routing.experts]], dtype=np.int64)


class Listed(Predictor):
    """A predictor that has a short list rather than a score for everybody."""

    def listed(self, layer: int, view: View) -> Sequence[int] | None:
        """Return all experts expected, likeliest first, as ``scores`` ranks them; None: ask for scores."""
        return None


def _named(rows: list[list[int]], num_experts: int) -> list[int] | None:
    """Return the experts of a single row in order; None for several rows."""
    return [expert for expert in rows[0] if expert < num_experts] if len(rows) == 1 else None


class LastTokens:
    """What the last token of every request chose, layer by layer."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[tuple[int, ...], NDArray[np.integer]]] = {}
        self._step = -1
        self._requests: tuple[int, ...] = ()
        self._rows: list[int] | None = None

    def begin_step(self, step: StepInfo) -> None:
        """Learn which tokens are the last of their requests: of a prompt only the last one is."""
        ids = step.request_ids or tuple(range(step.num_tokens))
        if step.phase == Phase.DECODE or len(ids) == 1:
            self._requests, self._rows = ids, None
        else:
            last = {request: row for row, request in enumerate(ids)}
            self._requests, self._rows = tuple(last), list(last.values())

    def learn(self, layer: int, ids: NDArray[np.integer], phase: Phase) -> None:
        """Keep what the last tokens chose, of int[num_tokens, num_slots]."""
        rows = ids if self._rows is None else ids[self._rows]
        requests = self._requests
        kept = self._kept.get(layer)
        if kept is not None and phase == Phase.PREFILL:  # the others sit this step out
            others = [place for place, known in enumerate(kept[0]) if known not in requests]
            if others and kept[1].shape[1] == rows.shape[1]:
                rows = np.concatenate([kept[1][others], rows])
                requests = (*(kept[0][place] for place in others), *requests)
        self._kept[layer] = requests, rows

    def rows(self, layer: int, this_step: bool) -> NDArray[np.integer] | None:
        """Return the choices of the last tokens, int[num_requests, num_slots]; None if there are none.

        ``this_step``: only of the requests that are in the step under way, in their order.
        """
        kept = self._kept.get(layer)
        if kept is None:
            return None
        known, ids = kept
        if not this_step or known == self._requests:
            return ids
        places = [known.index(request) for request in self._requests if request in known]
        return ids[places] if places else None


class NextGate(Listed):
    """Let a later layer's gate speak early, on the input of the layer under way.

    The gate of layer l + d applied to the hidden state that enters layer l (d = 1: Mixtral-Offloading,
    arXiv 2312.17238; AdapMoE, HOBBIT, Fate and others). What it says must be in the trace, for distances
    1 to 3; nothing is said of the next step.
    """

    needs: ClassVar[tuple[str, ...]] = ("next_gate_ids",)

    def scores(self, layer: int, view: View) -> NDArray[np.floating]:
        """Return how many tokens the gate gives to each expert, float64[num_experts].

        Raises
        ------
        ConfigError
            If the trace holds no choices of gates at that distance.
        """
        ids = self._spoken(layer, view)
        return np.zeros(view.num_experts) if ids is None else tally(ids, view.num_experts)

    def listed(self, layer: int, view: View) -> Sequence[int] | None:
        """Return what the gate picks for a single token, best first."""
        distance = layer - view.layer
        if view.step.num_tokens > 1:
            return None
        rows = view.routing.early_rows(distance) if distance > 0 else []
        if rows is None:
            raise _unspoken(distance)
        return _named(rows, view.keys.num_experts) if rows else []

    def _spoken(self, layer: int, view: View) -> NDArray[np.integer] | None:
        distance = layer - view.layer
        if distance < 1:
            return None
        ids = view.routing.gate_ahead(distance)
        if ids is None:
            raise _unspoken(distance)
        return ids


def _unspoken(distance: int) -> ConfigError:
    return ConfigError(
        f"NextGate: the trace does not tell what gates {distance} layers ahead would choose: "
        "must be recorded with it"
    )


class NextGate2(NextGate):
    """Let gates two layers ahead speak as well, which the trace must hold."""

    needs = ("next_gate_ids", "next_gate_ids_2")


class NextGate3(NextGate):
    """Let gates two and three layers ahead speak as well, which the trace must hold."""

    needs = ("next_gate_ids", "next_gate_ids_2", "next_gate_ids_3")


class PreviousToken(Listed):
    """Expect what the layer chose for the last token of the same request."""

    def __init__(self) -> None:
        self._last = LastTokens()

    def begin_step(self, view: View) -> None:
        """Learn which requests are in the step."""
        self._last.begin_step(view.step)

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Keep the choices of the last tokens."""
        self._last.learn(routing.layer, chosen_ids(routing, view.num_experts), view.step.phase)

    def scores(self, layer: int, view: View) -> NDArray[np.floating]:
        """Return how many last tokens chose each expert, float64[num_experts]."""
        rows = self._last.rows(layer, layer > view.layer)
        return np.zeros(view.num_experts) if rows is None else tally(rows, view.num_experts)

    def listed(self, layer: int, view: View) -> Sequence[int] | None:
        """Return what a single last token chose, in the router's order."""
        rows = self._last.rows(layer, layer > view.layer)
        return [] if rows is None else _named(rows.tolist(), view.num_experts)


class HottestK(Predictor):
    """Expect what the layer has used most so far in this run.

    Parameters
    ----------
    num_layers, num_experts
        Of the trace.
    decay
        Factor in [0.01, 1] on all counts at each step; 1 counts for ever.
    """

    def __init__(self, num_layers: int, num_experts: int, decay: float = 1.0) -> None:
        if not _LEAST_DECAY <= decay <= 1.0:
            raise ValueError(f"decay = {decay}: must be in [{_LEAST_DECAY}, 1]")
        self.decay = decay
        self._count = np.zeros(num_layers * num_experts)
        self._weight = 1.0

    def begin_step(self, view: View) -> None:
        """Let new uses weigh more, which is the same as old ones fading."""
        self._weight /= self.decay
        if self._weight > _HEAVIEST:
            self._count /= self._weight
            self._weight = 1.0

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Count the event's uses, of a copy in either precision."""
        counts = routing.token_counts
        if view.keys.num_copies > 1:  # both copies of an expert may be used
            experts = [view.keys.high(key) for key in routing.experts]
            np.add.at(self._count, experts, np.asarray(counts) * self._weight)
        elif view.step.num_tokens == 1:
            self._count[routing.experts] += self._weight
        else:
            self._count[routing.experts] += np.asarray(counts) * self._weight

    def scores(self, layer: int, view: View) -> NDArray[np.floating]:
        """Return the counts of a layer, float64[num_experts]."""
        num_experts = view.num_experts
        counts = self._count[layer * num_experts : (layer + 1) * num_experts]
        return counts if self._weight == 1.0 else counts / self._weight
