"""HOBBIT's cache: one priority of recency, frequency, uses in high precision and layer distance."""

from __future__ import annotations

from collections.abc import Sequence

from sim.policies.base import Evictable, Predictor
from sim.policies.prefetch import expected
from sim.policies.ranking import LayeredCache
from sim.types import LayerRouting, View


class HOBBIT(LayeredCache):
    """Drop the expert with the lowest weighted priority (arXiv 2411.01433).

    p = recency * R / T + frequency * F / T + high * H / T + distance * (1 - d / L): R is the token of
    the last use, F counts uses, H those in high precision, T the tokens so far, and d is how many
    layers ahead the expert's layer is, of L. The records begin anew with each sequence. The notation
    of the last term leaves open which layer is which; it is read so that layers that come soon are
    kept, which is what the term is for. The paper fits the weights offline, on a penalty that takes a
    low-precision miss for (low bytes / high bytes) of a high one; they are not printed in the sources
    at hand. Equal ones are a RECONSTRUCTION, to be fitted by a sweep over these parameters.

    High- and low-precision copies have pools of their own. In a pool of low copies H counts the uses
    of the low copy, for the same reason: what is used in a precision comes back in it. Several tokens
    in a step, and several sequences in a batch, are not in the paper: F and H count tokens, and the
    records begin anew when a step has no sequence of the step before. Both RECONSTRUCTION.

    Parameters
    ----------
    top_k
        Experts a token uses in a layer.
    recency, frequency, high, distance
        The weights, each >= 0; they must sum to 1.
    predictor
        Experts it expects soon are not dropped while any other can be: the ``top_k`` likeliest of each
        of the next ``mask_layers`` layers. None: nothing is masked.
    mask_layers
        Layers ahead that are masked, >= 0.
    """

    def __init__(
        self,
        top_k: int,
        recency: float = 0.25,
        frequency: float = 0.25,
        high: float = 0.25,
        distance: float = 0.25,
        predictor: Predictor | None = None,
        mask_layers: int = 1,
    ) -> None:
        super().__init__()
        weights = {"recency": recency, "frequency": frequency, "high": high, "distance": distance}
        for name, value in weights.items():
            if not value >= 0.0:
                raise ValueError(f"{name} = {value}: must be >= 0")
        if abs(sum(weights.values()) - 1.0) > 1e-6:
            raise ValueError(f"{', '.join(weights)} = {list(weights.values())}: must sum to 1")
        if mask_layers < 0:
            raise ValueError(f"mask_layers = {mask_layers}: must be >= 0")
        self.recency, self.frequency, self.high, self.distance = weights.values()
        self.mask_layers = mask_layers
        self._top_k = top_k
        self._predictor = predictor
        self._masked: frozenset[int] = frozenset()
        self._masked_event = -2
        self._tokens = 0
        self._step = -1
        self._requests: frozenset[int] = frozenset()
        self._uses: dict[int, int] = {}  # F by key
        self._own_uses: dict[int, int] = {}  # H
        self._score: dict[int, float] = {}  # recency * R + frequency * F + high * H
        self._all_keys = 0
        self._near: dict[int, list[float]] = {}  # the term of distance, by the layer under way

    def start(self, keys: Sequence[int], num_slots: int, view: View) -> None:
        """Learn the pool's layers, and whether it holds low copies."""
        super().start(keys, num_slots, view)
        self._all_keys = view.num_layers * view.num_experts
        self._is_low = keys[0] >= self._all_keys

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Record the event's uses, and begin anew with a new sequence."""
        if view.step.step != self._step:
            self._step = view.step.step
            self._begin_step(view)
        uses, own_uses, score = self._uses, self._own_uses, self._score
        recent, frequency, high = self.recency * self._tokens, self.frequency, self.high
        for key, tokens in zip(routing.experts, routing.token_counts, strict=True):
            own = key
            if (key >= self._all_keys) == self._is_low:
                own_uses[key] = own_uses.get(key, 0) + tokens
            else:  # the expert's other copy
                own = key % self._all_keys + (self._all_keys if self._is_low else 0)
            uses[own] = count = uses.get(own, 0) + tokens
            score[own] = recent + frequency * count + high * own_uses.get(own, 0)

    def score(self, key: int) -> float:
        """Return the part of the priority that the expert's uses decide, times T."""
        return self._score.get(key, 0.0)

    def rank(self, layer: int, score: float, view: View) -> float:
        """Return the priority."""
        ahead = (layer - view.layer) % view.num_layers
        return score / max(1, self._tokens) + self.distance * (1.0 - ahead / view.num_layers)

    def ranks(self, layers: Sequence[int], scores: Sequence[float], view: View) -> list[float]:
        """Return the priorities."""
        near = self._near.get(view.layer)
        if near is None:
            near = [self.rank(layer, 0.0, view) for layer in layers]
            self._near[view.layer] = near
        total = max(1, self._tokens)
        return [score / total + term for score, term in zip(scores, near, strict=True)]

    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        """Return the evictable member of lowest priority, one that is not expected soon if possible."""
        if self._predictor is not None and self._is_ahead(view):
            masked = self._masked
            if self._masked_event != view.event:
                masked = self._expected(self._predictor, view)
            victim = super().choose_victim(lambda key: key not in masked and evictable(key), view)
            if victim is not None:
                return victim
        return super().choose_victim(evictable, view)

    def _is_ahead(self, view: View) -> bool:
        """Tell whether the pool has experts of the layers that are masked."""
        if len(self._layers) > 1 or not self.mask_layers:
            return self.mask_layers > 0
        num_layers = view.keys.num_layers
        return ((self._layers[0] - view.layer) % num_layers or num_layers) <= self.mask_layers

    def _begin_step(self, view: View) -> None:
        requests = frozenset(view.step.request_ids)
        if not requests & self._requests and self._tokens:
            for record in (self._uses, self._own_uses, self._score):
                record.clear()
            self._tokens = 0
            self.rescore()
        self._requests = requests
        self._tokens += view.step.num_tokens

    def _expected(self, predictor: Predictor, view: View) -> frozenset[int]:
        """Return the keys that the predictor expects in the next layers; once an event."""
        self._masked_event = view.event
        shift = self._all_keys if self._is_low else 0
        found: list[int] = []
        for ahead in range(1, self.mask_layers + 1):
            layer = (view.layer + ahead) % view.num_layers
            first = layer * view.num_experts + shift
            found += [first + e for e in expected(predictor, layer, self._top_k, view)]
        self._masked = frozenset(found)
        return self._masked
