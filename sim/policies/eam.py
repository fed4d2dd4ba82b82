"""MoE-Infinity (arXiv 2401.14361): what a sequence has used so far tells what it will use.

The *expert activation matrix* (EAM) of a sequence counts, by layer and expert, the tokens it has sent there.
A collection keeps those of past sequences. At each layer the current matrix is compared with all of them,
and the most similar one says what the layers ahead will need. Rules and constants as in the authors' code
(EfficientMoE/MoE-Infinity).

Matrices are compared by the cosine of their rows, averaged over layers. The code makes the rows up to the
current layer of all past matrices even, so that only the layers ahead can tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import Predictor, PrefetchPolicy
from sim.policies.history import History
from sim.policies.predictors import chosen_ids
from sim.types import NO_EXPERT, LayerRouting, Phase, View

_TRIFLE = 1e-8  # what the code adds to a predicted count
_FLOOR = 1e-6  # and to each factor of a cache priority


class Collection:
    """The matrices of past sequences, at most ``capacity``; a newcomer replaces the least looked up.

    Rows of length 1 are kept as float32[num_layers, num_experts, capacity], so that the products of a few
    experts with all matrices are one sum.
    """

    def __init__(self, num_layers: int, num_experts: int, capacity: int) -> None:
        self.capacity = capacity
        self.size = self.num_kept = 0
        self.counts: list[NDArray[np.float32]] = []
        self.lookups = np.zeros(capacity, dtype=np.int64)
        self.units = np.zeros((num_layers, num_experts, min(16, capacity)), dtype=np.float32)

    def add(self, counts: NDArray[np.float32]) -> int | None:
        """Take a matrix in; return its place, None if all others are kept for good."""
        if self.size < self.capacity:
            place = self.size
            self.size += 1
            self.counts.append(counts)
            self._grow()
        elif self.num_kept == self.capacity:
            return None
        else:
            place = self.num_kept + int(self.lookups[self.num_kept : self.size].argmin())
            self.counts[place] = counts
        self.lookups[place] = 1
        norms = np.sqrt((counts**2).sum(axis=1, keepdims=True))
        self.units[:, :, place] = counts / np.maximum(norms, _FLOOR)
        return place

    def keep_all(self) -> None:
        """Keep for good what is there now."""
        self.num_kept = self.size

    def _grow(self) -> None:
        num_layers, num_experts, room = self.units.shape
        if self.size > room:
            wider = np.zeros((num_layers, num_experts, min(2 * room, self.capacity)), np.float32)
            wider[:, :, :room] = self.units
            self.units = wider


class _Sequence:
    """A sequence under way: its matrix and, by layer and past matrix, how alike the rows are."""

    def __init__(self, num_layers: int, num_experts: int, room: int) -> None:
        self.counts = np.zeros((num_layers, num_experts), dtype=np.float32)
        self.products = np.zeros((num_layers, room), dtype=np.float32)
        self.inverse = np.zeros(num_layers, dtype=np.float32)  # of the rows' lengths
        self.squares = [0.0] * num_layers
        self.ahead = np.zeros(room, dtype=np.float32)  # sum of the cosines of the layers ahead
        self.match = -1

    def begin(self, units: NDArray[np.float32]) -> None:
        """Add up the cosines of all layers, all of which are ahead; see past matrices that have come."""
        if units.shape[2] > self.products.shape[1]:
            self.renew(units)
        self.ahead = self.inverse @ self.products

    def renew(self, units: NDArray[np.float32], place: int | None = None) -> None:
        """Compare with all past matrices anew, or with one that has been replaced."""
        if place is None or units.shape[2] != self.products.shape[1]:
            self.products = np.einsum("le,len->ln", self.counts, units)
        else:
            self.products[:, place] = (self.counts * units[:, :, place]).sum(axis=1)

    def add(self, layer: int, ids: NDArray[np.integer], units: NDArray[np.float32]) -> None:
        """Count the tokens of int[num_tokens, num_slots]; the layer is no longer ahead."""
        self.ahead -= self.inverse[layer] * self.products[layer]
        row = self.counts[layer]
        if len(ids) == 1:
            used = [expert for expert in ids[0].tolist() if expert != NO_EXPERT]
            before = row[used]
            self.squares[layer] += 2.0 * sum(before.tolist()) + len(used)
            row[used] = before + 1.0
            self.products[layer] += np.add.reduce(units[layer].take(used, axis=0), axis=0)
        else:
            new = np.bincount(ids[ids != NO_EXPERT], minlength=len(row)).astype(np.float32)
            row += new
            self.squares[layer] = float(row @ row)
            self.products[layer] += new @ units[layer]
        if self.squares[layer]:
            self.inverse[layer] = self.squares[layer] ** -0.5


class EAMPredictor(Predictor):
    """Expect what the most similar past sequence did in the layers ahead.

    A batch has a matrix a request; what their matches say is added up. A request is over when a step that
    decodes goes without it; then its matrix joins the collection.

    Parameters
    ----------
    num_layers, num_experts
        Of the trace.
    calibration
        Its requests begin the collection and are never replaced, as a loaded trace in the code.
    capacity
        Matrices kept, >= 1.
    """

    def __init__(
        self, num_layers: int, num_experts: int, calibration: History, capacity: int = 1000
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity}: must be >= 1")
        self.collection = Collection(num_layers, num_experts, capacity)
        self.num_changes = 0  # times that a request has come or gone
        self._shape = num_layers, num_experts
        self._running: dict[int, _Sequence] = {}
        self._rows: list[tuple[_Sequence, slice | list[int]]] = []
        for past in calibration.requests():
            if self.collection.size == capacity:
                break
            self.collection.add(_matrix(past.ids, num_experts))
        self.collection.keep_all()

    @property
    def running(self) -> Sequence[NDArray[np.float32]]:
        """The matrices of the requests under way, float32[num_layers, num_experts] each."""
        return [sequence.counts for sequence in self._running.values()]

    def begin_step(self, view: View) -> None:
        """Find out which requests are over, which begin, and whose tokens are whose."""
        step = view.step
        ids = step.request_ids or (0,) * step.num_tokens
        rows: dict[int, list[int]] = {}
        for row, request in enumerate(ids):
            rows.setdefault(request, []).append(row)
        if step.phase != Phase.PREFILL:
            for request in [known for known in self._running if known not in rows]:
                self._finish(request)
        self._rows = []
        units = self.collection.units
        for request, own in rows.items():
            sequence = self._running.get(request)
            if sequence is None:
                sequence = _Sequence(*self._shape, units.shape[2])
                self._running[request] = sequence
                self.num_changes += 1
            sequence.begin(units)
            self._rows.append(
                (sequence, slice(own[0], own[-1] + 1))
            )  # a request's rows are together

    def observe(self, routing: LayerRouting, view: View) -> None:
        """Count the event in the matrices, and look up the past sequence that is most similar."""
        ids, layer, collection = (
            chosen_ids(routing, view.num_experts),
            routing.layer,
            self.collection,
        )
        for sequence, rows in self._rows:
            sequence.add(layer, ids[rows], collection.units)
            if collection.size:
                sequence.match = int(sequence.ahead[: collection.size].argmax())
                collection.lookups[sequence.match] += 1

    def expected(self, layer: int) -> NDArray[np.float32] | None:
        """Return the counts that the matches have from ``layer`` on, float32[:, num_experts].

        None before anything is past.
        """
        found = [self.collection.counts[s.match][layer:] for s, _ in self._rows if s.match >= 0]
        if len(found) < 2:
            return found[0] if found else None
        return np.sum(found, axis=0, dtype=np.float32)

    def scores(self, layer: int, view: View) -> NDArray[np.floating]:
        """Return what is expected of one layer, the nearer the more, float32[num_experts]."""
        ahead = layer - view.layer
        rows = self.expected(layer) if ahead > 0 else None
        if rows is None:
            return np.zeros(view.num_experts)
        return rows[0] * (1.0 - ahead / (view.num_layers + 1))

    def _finish(self, request: int) -> None:
        self.num_changes += 1
        place = self.collection.add(self._running.pop(request).counts)
        if place is not None:
            for sequence in self._running.values():
                sequence.renew(self.collection.units, place)


def _matrix(ids: NDArray[np.uint16], num_experts: int) -> NDArray[np.float32]:
    """Return the activation matrix of int[num_tokens, num_layers, top_k]."""
    num_layers = ids.shape[1]
    used = ids != NO_EXPERT
    keys = (ids.astype(np.int64) + np.arange(num_layers)[:, None] * num_experts)[used]
    counts = np.bincount(keys, minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts).astype(np.float32)


class SequencePrefetch(PrefetchPolicy):
    """Load what the matches used in any layer ahead, by count, the nearer layer the sooner.

    The priority of an expert of layer x, seen from layer l, is (count + 1e-8) * (1 - (x - l) / (L + 1)).

    Parameters
    ----------
    predictor
        An :class:`EAMPredictor`.
    width
        Absent experts named at each layer, >= 1; the order is worked out anew at the next.
    everything
        False: only experts that the matches used. True: then all others of the layers ahead, the nearest
        first, as the code does, whose trifle of 1e-8 leaves no expert out.
    """

    def __init__(self, predictor: Predictor, width: int = 4, everything: bool = False) -> None:
        if not isinstance(predictor, EAMPredictor):
            raise ValueError(f"predictor = {type(predictor).__name__}: must be an EAMPredictor")
        if width < 1:
            raise ValueError(f"width = {width}: must be >= 1")
        self.width = width
        self.everything = everything
        self._predictor = predictor
        self._decay: NDArray[np.float32] | None = None

    def propose(self, routing: LayerRouting, view: View) -> Sequence[int]:
        """Return absent experts of the layers ahead, the most urgent first."""
        layer, num_layers, num_experts = routing.layer, view.num_layers, view.num_experts
        rows = self._predictor.expected(layer + 1)
        if rows is None or not len(rows):
            return ()
        if self._decay is None:
            ahead = np.arange(1, num_layers + 1)[:, None]
            self._decay = (1.0 - ahead / (num_layers + 1)).astype(np.float32)
        if self.everything:
            rows = rows + np.float32(_TRIFLE)
        priority = (rows * self._decay[: len(rows)]).ravel()
        first = (layer + 1) * num_experts
        priority[view.states()[first : num_layers * num_experts] != 0] = 0.0
        found: list[int] = []
        for _ in range(self.width):
            place = int(priority.argmax())
            if not priority[place] > 0.0:
                break
            found.append(first + place)
            priority[place] = 0.0
        return found
