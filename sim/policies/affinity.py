"""A predictor from a table: which experts of a layer followed which of an earlier one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import Predictor
from sim.policies.history import History
from sim.types import NO_EXPERT, View


class Affinity(Predictor):
    """Expect what followed the experts of the layer under way in the calibration requests.

    A table P(b of layer l + d | a of layer l), as EdgeMoE (arXiv 2308.14352) keeps it for d = 1; tables
    are made when they are first asked for. How several experts of one token are combined is not public
    (RECONSTRUCTION): their mean, and the sum over tokens. The first layer of the next step is that of the
    next token of the request.

    Parameters
    ----------
    calibration
        Where the tables come from.
    smoothing
        Tokens' worth of the layer's mean use that each row is mixed with, > 0.
    max_tokens
        Calibration tokens read at most, >= 1, so that tables of large models are made in seconds.
    """

    def __init__(
        self, calibration: History, smoothing: float = 4.0, max_tokens: int = 16384
    ) -> None:
        if not smoothing > 0.0:
            raise ValueError(f"smoothing = {smoothing}: must be > 0")
        if max_tokens < 1:
            raise ValueError(f"max_tokens = {max_tokens}: must be >= 1")
        self.smoothing = smoothing
        self._num_layers, self._num_experts = calibration.num_layers, calibration.num_experts
        self._ids, self._follows = _past_tokens(calibration, max_tokens)
        self._tables: dict[tuple[int, int, bool], NDArray[np.float32]] = {}

    def scores(self, layer: int, view: View) -> NDArray[np.floating]:
        """Return how many of the tokens under way are expected at each expert, float32[num_experts]."""
        routing, source, num_experts = view.routing, view.layer, self._num_experts
        next_step = layer <= source
        table = self._tables.get((source, layer, next_step))
        if table is None:
            table = self._table(source, layer, next_step)
            self._tables[source, layer, next_step] = table
        first = source * num_experts
        rows = table[[key - first for key in routing.experts]]
        if view.step.num_tokens == 1:
            return rows.sum(axis=0) / max(1, len(rows))
        counts = np.asarray(routing.token_counts, dtype=np.float32)
        slots = max(1.0, float(counts.sum()) / view.step.num_tokens)
        return (counts / slots) @ rows

    def _table(self, source: int, target: int, next_step: bool) -> NDArray[np.float32]:
        """Return P(target's expert | source's expert), float32[num_experts, num_experts]."""
        num_experts = self._num_experts
        before, after = self._ids[:, source], self._ids[:, target]
        if next_step:
            before, after = before[:-1][self._follows], after[1:][self._follows]
        pairs = before[:, :, None].astype(np.int64) * num_experts + after[:, None, :]
        used = (before < num_experts)[:, :, None] & (after < num_experts)[:, None, :]
        counts = np.bincount(pairs[used], minlength=num_experts**2)
        uses = np.bincount(before[before < num_experts], minlength=num_experts)
        mean = np.bincount(after[after < num_experts], minlength=num_experts) / max(1, len(after))
        mixed = counts.reshape(num_experts, num_experts) + self.smoothing * mean
        return (mixed / (uses + self.smoothing)[:, None]).astype(np.float32)


def _past_tokens(
    calibration: History, max_tokens: int
) -> tuple[NDArray[np.uint16], NDArray[np.bool_]]:
    """Return the first tokens of the past, and for each but the last whether the next one follows it."""
    ids: list[NDArray[np.uint16]] = []
    number: list[NDArray[np.intp]] = []
    left = max_tokens
    for request, past in enumerate(calibration.requests()):
        ids.append(past.ids[:left])
        number.append(np.full(len(ids[-1]), request))
        left -= len(ids[-1])
        if not left:
            break
    empty: Sequence[NDArray[np.uint16]] = [
        np.full((0, calibration.num_layers, calibration.top_k), NO_EXPERT, dtype=np.uint16)
    ]
    whole = np.concatenate(ids or empty)
    requests = np.concatenate(number) if number else np.zeros(0, dtype=np.intp)
    return whole, requests[1:] == requests[:-1]
