"""Prefetchers: which experts to load before their layer asks for them.

How many may be under way at one time is no matter of theirs: ``cache.prefetch_limit``, or
``prefetch_limit`` in the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import Evictable, Predictor, PrefetchPolicy
from sim.policies.classic import LRU
from sim.policies.predictors import Listed
from sim.types import LayerRouting, View


def best(scores: Sequence[float] | NDArray[np.floating], width: int, threshold: float) -> list[int]:
    """Return at most ``width`` indices by falling score, those above ``threshold``, equals by index."""
    values = np.asarray(scores)
    if width < 1:  # an event of which nothing is computed names no width
        return []
    if width < len(values):
        least = np.partition(values, len(values) - width)[len(values) - width]
        places = np.flatnonzero(values >= least if least > threshold else values > threshold)
    else:
        places = np.flatnonzero(values > threshold)
    named = values[places].tolist()
    order = sorted(range(len(named)), key=named.__getitem__, reverse=True)  # equals stay in order
    found = places.tolist()
    return [found[place] for place in order[:width]]


def expected(
    predictor: Predictor, layer: int, width: int, view: View, threshold: float = 0.0
) -> Sequence[int]:
    """Return at most ``width`` experts that a predictor expects of a layer, likeliest first."""
    if threshold < 1.0 and isinstance(
        predictor, Listed
    ):  # a list names what has a score of 1 at least
        listed = predictor.listed(layer, view)
        if listed is not None:
            return listed[:width]
    return best(predictor.scores(layer, view), width, threshold)


def _check_width(width: int | None) -> None:
    if width is not None and width < 1:
        raise ValueError(f"width = {width}: must be >= 1, or null")


class NextLayers(PrefetchPolicy):
    """Load what a predictor expects of the next layers, the nearest layer first.

    Experts that are on the GPU already are passed over, so that where a layer is complete the next one's
    turn comes (HOBBIT, arXiv 2411.01433). After the last layer comes the first one of the next step.

    Parameters
    ----------
    predictor
        Who says what to expect.
    width
        Experts expected of a layer; None: as many as the event under way uses.
    distance
        Layers ahead that are looked at, >= 1.
    first
        The nearest of them, 1 <= first <= distance. 2 skips the next layer: ProMoE's stride, for which a
        layer's prediction and its copies have a whole layer's time (arXiv 2410.22134).
    threshold
        Only higher scores count; at least 0.
    preempt
        When a layer's gate has spoken, give up the loads still queued for it that it did not choose
        (ProMoE's early preemption).
    """

    def __init__(
        self,
        predictor: Predictor,
        width: int | None = None,
        distance: int = 1,
        first: int = 1,
        threshold: float = 0.0,
        preempt: bool = False,
    ) -> None:
        _check_width(width)
        if not 1 <= first <= distance:
            raise ValueError(f"first = {first}: must be >= 1 and <= distance = {distance}")
        if not threshold >= 0.0:
            raise ValueError(f"threshold = {threshold}: must be >= 0")
        self.width = width
        self.distance = distance
        self.first = first
        self.threshold = threshold
        self.preempt = preempt
        self._predictor = predictor

    def propose(self, routing: LayerRouting, view: View) -> Sequence[int]:
        """Return what is expected of the layers ahead, best first within a layer."""
        found: list[int] = []
        width = self.width or len(routing.experts)
        num_layers, num_experts = view.keys.num_layers, view.keys.num_experts
        for ahead in range(self.first, min(self.distance, num_layers) + 1):
            target = (routing.layer + ahead) % num_layers
            names = expected(self._predictor, target, width, view, self.threshold)
            base = target * num_experts
            found += [base + expert for expert in names]
        return found

    def stale(self, queued: Sequence[int], view: View) -> Sequence[int]:
        """Return the loads queued for the layer whose gate has just spoken."""
        if not self.preempt:
            return ()
        keys = view.keys
        return [key for key in queued if keys.unpack(key).layer == view.layer]


class Impact(PrefetchPolicy):
    """Load the experts whose presence would shorten the next layer most (HybriMoE, arXiv 2504.05897).

    The paper's idea as understood from its outline; its code takes the next layer's likeliest experts
    instead (RECONSTRUCTION). The next layer is expected to use ``width`` experts. Those on the GPU are
    computed there, largest first; of the others the GPU takes the largest as their copies arrive, the CPU
    the smallest, whichever is done sooner. An absent expert's impact is what its presence takes from the
    end of that. Equal impacts fall to the higher score.

    Parameters
    ----------
    predictor
        Scores the next layer's experts by the number of their tokens.
    width
        Experts expected of a layer; None: as many as the event under way uses.
    """

    def __init__(self, predictor: Predictor, width: int | None = None) -> None:
        _check_width(width)
        self.width = width
        self._predictor = predictor

    def propose(self, routing: LayerRouting, view: View) -> Sequence[int]:
        """Return the absent experts expected of the next layer, the largest impact first."""
        layer = (routing.layer + 1) % view.num_layers
        if view.step.num_tokens == 1 and isinstance(self._predictor, Listed):
            return self._of_one_token(self._predictor, layer, view)
        scores = np.asarray(self._predictor.scores(layer, view))
        base = layer * view.num_experts
        names = best(scores, self.width or len(routing.experts), 0.0)
        absent = [expert for expert in names if not view.is_resident(base + expert)]
        if len(absent) < 2:
            return [base + expert for expert in absent]
        tokens = {expert: max(1, round(float(scores[expert]))) for expert in names}
        here = [tokens[expert] for expert in names if expert not in absent]
        away = [tokens[expert] for expert in absent]
        sizes = set(away)
        if len(sizes) == 1:  # then all have the same impact
            return [base + expert for expert in absent]
        ends = {n: _end_ns([*here, n], _without(away, n), layer, view) for n in sizes}
        absent.sort(key=lambda expert: ends[tokens[expert]])  # stable: by score where equal
        return [base + expert for expert in absent]

    def _of_one_token(self, predictor: Predictor, layer: int, view: View) -> list[int]:
        """Return the same where each expert serves one token, so that all have the same impact."""
        base, width = layer * view.num_experts, self.width or len(view.routing.experts)
        named = expected(predictor, layer, width, view)
        return [base + expert for expert in named if not view.is_resident(base + expert)]


def _without(sizes: Sequence[int], size: int) -> list[int]:
    """Return a list less one of its members."""
    rest = list(sizes)
    rest.remove(size)
    return rest


def _end_ns(here: Sequence[int], away: Sequence[int], layer: int, view: View) -> int:
    """Return when a layer is done whose experts have so many tokens each, on the GPU or away from it."""
    costs = view.costs
    gpu_ns = sum(costs.expert_gpu_ns(layer, n, view.packed) for n in here)
    load_ns, link_ns, cpu_ns = costs.load_ns(layer), 0, 0
    left = sorted(away, reverse=True)
    while left:
        on_gpu = max(gpu_ns, link_ns + load_ns) + costs.expert_gpu_ns(layer, left[0], view.packed)
        on_cpu = cpu_ns + costs.expert_cpu_ns(layer, left[-1])
        if on_gpu <= on_cpu:
            link_ns += load_ns
            gpu_ns = on_gpu
            left.pop(0)
        else:
            cpu_ns = on_cpu
            left.pop()
    return max(gpu_ns, cpu_ns)


class SparingLRU(LRU):
    """LRU that drops nothing which its layer is expected to use next, to make room for a prefetch.

    HOBBIT (arXiv 2411.01433) masks predicted experts from eviction. A prefetch that would have to drop one
    of them is refused. Where one pool serves all layers, the experts expected of the next layer are spared
    by demand loads as well, unless nothing else can go.

    Parameters
    ----------
    predictor
        Who says what to expect.
    width
        Experts expected of a layer; None: as many as the event under way uses.
    """

    def __init__(self, predictor: Predictor, width: int | None = None) -> None:
        super().__init__()
        _check_width(width)
        self.width = width
        self._predictor = predictor
        self._layer: int | None = None
        self._known = (-1, -1)  # event and layer of what is expected
        self._expected: frozenset[int] = frozenset()

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn whether the pool serves one layer."""
        layers = {view.keys.unpack(key).layer for key in (keys[0], keys[-1])}
        self._layer = layers.pop() if len(layers) == 1 else None

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the least recently used key that is not expected."""
        if self._layer == view.layer or view.event < 0:
            return super().choose_victim(evictable, view)
        spared = self._ahead(view)
        for key in self._order:
            if key not in spared and evictable(key):
                return key
        return None if self._layer is not None else super().choose_victim(evictable, view)

    def give_up(self, evictable: Evictable, view: View) -> int | None:
        """Return the least recently used key: memory shrinks whatever is expected."""
        return super().choose_victim(evictable, view)

    def _ahead(self, view: View) -> frozenset[int]:
        """Return the keys expected of the pool's layer, or of the next one."""
        layer = self._layer if self._layer is not None else (view.layer + 1) % view.num_layers
        if self._known != (view.event, layer):
            width = self.width or len(view.routing.experts)
            base = layer * view.num_experts
            names = expected(self._predictor, layer, width, view)
            self._known, self._expected = (view.event, layer), frozenset(base + e for e in names)
        return self._expected
