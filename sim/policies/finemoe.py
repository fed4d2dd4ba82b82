"""FineMoE (fMoE, arXiv 2502.05370): iterations that began alike go on alike.

An *expert map* holds, for one iteration of one request, the probability of every expert in every layer. A
store keeps the maps of past iterations. As an iteration goes on, its layers so far are compared with the
same layers of all maps (trajectory search, cosine), and the most similar map says what the layer ``distance``
ahead will need. The first layers, for which there is no trajectory yet, come from a semantic search over
embeddings. Rules and constants as in the authors' code (IntelliSys-Lab/FineMoE-EuroSys26).

What a trace cannot give, and what is done about it:

* Embeddings of tokens are not recorded. Tokens with the same text have the same one, so the map of the
  last iteration that processed the same text is taken, at similarity 1; where there is none, or the trace
  has no text, the first layers are not predicted. Two different words are never similar (left out).
* Probabilities are those of the router where its scores are recorded. Else the chosen experts have their
  applied weights, or equal shares, and the others nothing.
* A full store replaces the map most similar in trajectory alone; the code adds similarity of embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import Predictor, PrefetchPolicy
from sim.policies.history import History
from sim.policies.predictors import chosen_ids
from sim.types import NO_EXPERT, LayerRouting, Phase, View

_TINY = 1e-12


def probabilities_of(
    ids: NDArray[np.integer],
    weights: NDArray[np.floating] | None,
    logits: NDArray[np.floating] | None,
    num_experts: int,
) -> NDArray[np.float32]:
    """Return the mean over tokens of what a layer's router gives each expert, float32[num_experts]; sum 1."""
    if logits is not None:
        scores = logits.astype(np.float32)
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        return (scores / scores.sum(axis=1, keepdims=True)).mean(axis=0)
    used = ids != NO_EXPERT
    shares = None if weights is None else weights[used].astype(np.float64)
    found = np.bincount(ids[used], weights=shares, minlength=num_experts).astype(np.float32)
    return found / max(float(found.sum()), _TINY)


class MapStore:
    """The maps of past iterations, at most ``capacity``.

    Kept as float32[num_layers, num_experts, capacity], so that a layer's few experts meet all maps at once;
    ``lengths`` are those of the maps' first layers together, float32[num_layers, capacity].
    """

    def __init__(self, num_layers: int, num_experts: int, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self.maps = np.zeros((num_layers, num_experts, capacity), dtype=np.float32)
        self.lengths = np.ones((num_layers, capacity), dtype=np.float32)

    def add(self, row: NDArray[np.float32], place: int) -> int:
        """Put a map float32[num_layers, num_experts] into free room, or at ``place`` if there is none."""
        if self.size < self.capacity:
            place = self.size
            self.size += 1
        self.maps[:, :, place] = row
        self.lengths[:, place] = np.sqrt(np.maximum((row**2).sum(axis=1).cumsum(), _TINY))
        return place


class _Iteration:
    """One request's iteration under way: its map so far and its products with all maps of the store."""

    def __init__(
        self, rows: slice, text: str | None, shape: tuple[int, int], capacity: int
    ) -> None:
        self.rows = rows
        self.text = text
        self.map = np.zeros(shape, dtype=np.float32)
        self.products = np.zeros(capacity, dtype=np.float32)
        self.square = 0.0

    def compare(self, layer: int, store: MapStore) -> NDArray[np.float32]:
        """Return the similarities to all maps after one more layer, float32[size]."""
        row, size = self.map[layer], store.size
        used = np.flatnonzero(row)
        self.products[:size] += row[used] @ store.maps[layer, used, :size]
        self.square += float(row @ row)
        found: NDArray[np.float32] = self.products[:size] / store.lengths[layer, :size]
        return found / max(self.square, _TINY) ** 0.5


class MapPredictor(Predictor):
    """Expect what the map with the most similar trajectory says.

    A batch has an iteration a request, whose word on a layer is the largest of theirs. A prompt's chunk is
    one iteration, its map the mean over its tokens.

    Parameters
    ----------
    num_layers, num_experts
        Of the trace.
    calibration
        Its decoded tokens begin the store, the last ones if they are more than it holds.
    top_k
        Experts selected of a layer at least.
    capacity
        Maps kept, >= 1.
    distance
        Layers that the search looks ahead, >= 1; as many first layers are left to the semantic search.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        calibration: History,
        capacity: int = 1000,
        distance: int = 6,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity}: must be >= 1")
        if distance < 1:
            raise ValueError(f"distance = {distance}: must be >= 1")
        self.distance = min(distance, num_layers)
        self.probabilities = np.zeros((num_layers, num_experts), dtype=np.float32)
        self.selected: list[list[int]] = [[] for _ in range(num_layers)]
        self.store = MapStore(num_layers, num_experts, capacity)
        self._top_k = top_k
        self._shape = num_layers, num_experts
        self._of_text: dict[str, int] = {}
        self._text_at: dict[int, str] = {}
        self._iterations: list[_Iteration] = []
        self._learn(calibration, capacity)

    def begin_step(self, view: View) -> None:
        """Begin the iterations of the step's requests; foretell the first layers by the tokens' text."""
        step, texts = view.step, view.step.texts
        ids = step.request_ids or (0,) * step.num_tokens
        bounds = [row for row in range(len(ids)) if not row or ids[row] != ids[row - 1]]
        num_decoding = step.num_tokens if step.phase == Phase.DECODE else step.num_decoding
        self._iterations = []
        for first, end in zip(bounds, [*bounds[1:], len(ids)], strict=True):
            text = texts[first] if texts is not None and first < num_decoding else None
            self._iterations.append(
                _Iteration(slice(first, end), text, self._shape, self.store.capacity)
            )
        known = [self._of_text[i.text] for i in self._iterations if i.text in self._of_text]
        for layer in range(self.distance):
            self._foretell(layer, [(place, 1.0) for place in known])

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Follow the trajectories by a layer and foretell the one ``distance`` ahead."""
        layer, num_experts = routing.layer, view.num_experts
        ids, weights, logits = (
            chosen_ids(routing, num_experts),
            routing.topk_weights,
            routing.router_logits,
        )
        target, found = layer + self.distance, list[tuple[int, float]]()
        for iteration in self._iterations:
            rows = iteration.rows
            own = (
                None if weights is None else weights[rows],
                None if logits is None else logits[rows],
            )
            iteration.map[layer] = probabilities_of(ids[rows], *own, num_experts)
            if self.store.size:
                alike = iteration.compare(layer, self.store)
                place = int(alike.argmax())
                found.append((place, float(alike[place])))
        if target < self._shape[0]:
            self._foretell(target, found)
        elif layer == self._shape[0] - 1:
            for iteration, (place, _) in zip(
                self._iterations, found or [(0, 0.0)] * len(ids), strict=False
            ):
                self._remember(iteration.map, place, iteration.text)

    def scores(self, layer: int, view: View) -> NDArray[np.floating]:
        """Return the probability last foretold for each expert that is selected, else 0."""
        found = np.zeros(view.num_experts)
        if layer > view.layer:
            chosen = self.selected[layer]
            found[chosen] = self.probabilities[layer, chosen]
        return found

    def _foretell(self, layer: int, found: Sequence[tuple[int, float]]) -> None:
        """Take a layer's probabilities from maps; select the likeliest until their mass is enough."""
        chosen: set[int] = set()
        rows = []
        for place, similarity in found:
            row = self.store.maps[layer, :, place]
            order = np.argsort(-row, kind="stable")
            wanted = min(max(1.0 - similarity, 0.0), 1.0)
            count = int((row[order].cumsum() < wanted).sum()) + 1
            chosen.update(order[: max(count, self._top_k)].tolist())
            rows.append(row)
        self.selected[layer] = sorted(chosen)
        if rows:
            self.probabilities[layer] = rows[0] if len(rows) == 1 else np.max(rows, axis=0)

    def _remember(self, row: NDArray[np.float32], place: int, text: str | None) -> None:
        """Store an iteration's map; in a full store it takes the place of the most similar one."""
        place = self.store.add(row, place)
        old = self._text_at.pop(place, None)
        if old is not None and self._of_text.get(old) == place:
            del self._of_text[old]
        if text is not None:
            self._text_at[place] = text
            self._of_text[text] = place

    def _learn(self, calibration: History, capacity: int) -> None:
        """Begin the store with the last decoded tokens of the calibration."""
        num_layers, num_experts = self._shape
        kept: list[tuple[NDArray[np.float32], str | None]] = []
        for past in calibration.requests():
            for token in range(max(past.num_prompt, len(past.ids) - capacity), len(past.ids)):
                row = np.stack([
                    probabilities_of(
                        past.ids[token : token + 1, layer],
                        None if past.weights is None else past.weights[token : token + 1, layer],
                        None if past.router_logits is None else past.router_logits[token : token + 1, layer],
                        num_experts,
                    )
                    for layer in range(num_layers)
                ])  # fmt: skip
                kept.append((row, None if past.texts is None else past.texts[token]))
            kept = kept[-capacity:]
        for row, text in kept:
            self._remember(row, 0, text)


class MapPrefetch(PrefetchPolicy):
    """Load what the maps select for the layers ahead, by probability, the nearer layer the sooner.

    The priority of an expert of layer x, seen from layer l, is probability * (1 - (x - l) / (end + 1)), where
    ``end`` is the number of layers.

    Parameters
    ----------
    predictor
        A :class:`MapPredictor`.
    """

    def __init__(self, predictor: Predictor) -> None:
        if not isinstance(predictor, MapPredictor):
            raise ValueError(f"predictor = {type(predictor).__name__}: must be a MapPredictor")
        self._predictor = predictor

    def propose(self, routing: LayerRouting, view: View) -> Sequence[int]:
        """Return absent experts selected for the layers ahead, the most urgent first."""
        layer, num_layers, num_experts = routing.layer, view.num_layers, view.num_experts
        predictor, states = self._predictor, view.states().tobytes()
        found: list[tuple[float, int]] = []
        for target in range(layer + 1, min(layer + predictor.distance, num_layers - 1) + 1):
            base, decay = target * num_experts, 1.0 - (target - layer) / (num_layers + 1)
            absent = [expert for expert in predictor.selected[target] if not states[base + expert]]
            if absent:
                row = predictor.probabilities[target]
                found += [(-decay * float(row[expert]), base + expert) for expert in absent]
        return [key for _, key in sorted(found)]
