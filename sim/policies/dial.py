"""Predictors whose accuracy is assumed: built from the truth, spoilt to order.

A trace holds no hidden states, so that a predictor which needs them cannot run on it. What it would be
worth can be asked all the same: take the truth, and replace as much of it as the predictor gets wrong.
Runs with one are marked as resting on an assumption.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.policies.oracle import Future
from sim.policies.predictors import Listed
from sim.types import View

_PICKS = 1024


def _target(layer: int, view: View) -> int:
    """Return the event at which ``layer`` is next."""
    ahead = layer - view.layer
    return view.event + (ahead if ahead > 0 else ahead + view.num_layers)


class _Named(Listed):
    """A predictor that names experts, and ranks none of them."""

    def scores(self, layer: int, view: View) -> NDArray[np.floating]:
        """Return 1 for each expert named for the layer's next event, else 0, float64[num_experts]."""
        found = np.zeros(view.num_experts)
        found[self.listed(layer, view)] = 1.0
        return found


class Perfect(_Named):
    """Know which experts each layer will use. A bound on what prediction can bring.

    Parameters
    ----------
    future
        The future of this very run.
    """

    oracle = True

    def __init__(self, future: Future) -> None:
        self._future = future

    def listed(self, layer: int, view: View) -> list[int]:
        """Return the experts of the layer's next event."""
        first = layer * view.num_experts
        return [key - first for key in self._future.used(_target(layer, view))]


class AssumedAccuracy(_Named):
    """Name the truth, but for a share of its experts that chance replaces by wrong ones.

    *Slot accuracy* is the share of an event's experts that are predicted. Each expert of the truth is kept
    with that probability, on its own; for each that is not, one of the layer's other experts is named. One
    draw an expert and event serves all distances, so that what is right two layers ahead is right one
    layer ahead as well.

    Parameters
    ----------
    future
        The future of this very run.
    rng
        The source of chance.
    accuracy
        Slot accuracy one layer ahead, in [0, 1]: a number, or a list by target layer. A list of another
        length than the trace has layers is read by relative depth.
    loss_per_layer
        What every further layer ahead takes from it.
    wrong_last
        Whether the wrong ones are named last: a gate errs where it is least sure. Else each is named in the
        place of a right one.
    """

    oracle = True
    assumed = True

    def __init__(
        self,
        future: Future,
        rng: np.random.Generator,
        num_layers: int,
        accuracy: float | Sequence[float] = 0.9,
        loss_per_layer: float = 0.0,
        wrong_last: bool = False,
    ) -> None:
        given = [accuracy] if isinstance(accuracy, int | float) else list(accuracy)
        if not given or not all(0.0 <= a <= 1.0 for a in given):
            raise ValueError(f"accuracy = {accuracy}: must be in [0, 1], or a list of such")
        if not 0.0 <= loss_per_layer <= 1.0:
            raise ValueError(f"loss_per_layer = {loss_per_layer}: must be in [0, 1]")
        self.accuracy = [given[layer * len(given) // num_layers] for layer in range(num_layers)]
        self.loss_per_layer = loss_per_layer
        self.wrong_last = wrong_last
        self._future = future
        self._rng = rng
        self._drawn: dict[int, tuple[list[float], list[int]]] = {}
        self._picks: list[int] = []

    def listed(self, layer: int, view: View) -> list[int]:
        """Return the experts named for the layer's next event, wrong ones among them."""
        event, first = _target(layer, view), layer * view.num_experts
        truth = [key - first for key in self._future.used(event)]
        accuracy = self.accuracy[layer] - self.loss_per_layer * (event - view.event - 1)
        luck, wrong = self._draws(event, len(truth), view.event)
        found: list[int] = []
        used, others = 0, list[int]() if self.wrong_last else found
        for expert, draw in zip(truth, luck, strict=True):
            if draw < accuracy:
                found.append(expert)
            elif used < view.num_experts - len(truth):
                if used == len(wrong):
                    wrong.append(self._other(truth, wrong, view.num_experts))
                others.append(wrong[used])
                used += 1
        return found + others if self.wrong_last else found

    def _other(self, truth: Sequence[int], wrong: Sequence[int], num_experts: int) -> int:
        """Return any expert of a layer that is neither right nor picked already."""
        while True:
            if not self._picks:  # chance is asked for many at one time
                self._picks = self._rng.integers(num_experts, size=_PICKS).tolist()
            pick = self._picks.pop()
            if pick not in truth and pick not in wrong:
                return pick

    def _draws(self, event: int, count: int, now: int) -> tuple[list[float], list[int]]:
        """Return one draw in [0, 1) for each expert of the truth, and the wrong ones picked so far."""
        drawn = self._drawn.get(event)
        if drawn is None:
            for old in [known for known in self._drawn if known <= now]:
                del self._drawn[old]
            drawn = self._drawn[event] = (self._rng.random(count).tolist(), [])
        return drawn
