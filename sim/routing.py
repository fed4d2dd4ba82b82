"""What routers chose: for one layer of one step, and what a policy made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from traces.schema import GATE_COLUMNS, NO_EXPERT, Trace

if TYPE_CHECKING:
    from sim.types import KeySpace


class Choices:
    """What the routers said of one step's tokens in all layers; a column is read when it is asked for.

    Parameters
    ----------
    trace
        Where it is recorded.
    rows
        The step's tokens.
    """

    __slots__ = ("_columns", "_rows", "_trace")

    def __init__(self, trace: Trace, rows: slice | NDArray[np.intp]) -> None:
        self._trace = trace
        self._rows = rows
        self._columns: dict[str, NDArray[Any] | None] = {}

    def column(self, name: str) -> NDArray[Any] | None:
        """Return the step's part of a trace column, [num_tokens, num_layers, ...]; None if not recorded."""
        if name not in self._columns:
            whole = getattr(self._trace, name)
            self._columns[name] = None if whole is None else whole[self._rows]
        return self._columns[name]


class LayerRouting:
    """What one layer's router chose for the tokens of one step.

    Parameters
    ----------
    layer
        The MoE layer.
    experts
        The distinct keys chosen: for one token in the router's order, for several by index.
    token_counts
        The number of tokens each of them serves.
    choices
        What is recorded of the step, for the whole step (so that a layer costs no copy); None where
        the driver has nothing.
    """

    __slots__ = ("_choices", "_count", "_own", "experts", "layer", "token_counts")

    def __init__(
        self,
        layer: int,
        experts: Sequence[int],
        token_counts: Sequence[int],
        choices: Choices | None = None,
    ) -> None:
        self.layer = layer
        self.experts = experts
        self.token_counts = token_counts
        self._choices = choices
        self._own: tuple[NDArray[Any], NDArray[Any] | None, NDArray[np.bool_] | None] | None = None
        self._count: dict[int, int] | None = None

    def num_tokens(self, key: int) -> int:
        """Number of the step's tokens that expert ``key`` serves."""
        if self._count is None:
            self._count = dict(zip(self.experts, self.token_counts, strict=True))
        return self._count[key]

    # -- token by token ------------------------------------------------------------------------------

    @property
    def topk_ids(self) -> NDArray[np.integer] | None:
        """Experts by token and slot, int[num_tokens, top_k], NO_EXPERT in an unused slot."""
        return self._own[0] if self._own is not None else self._recorded("expert_ids")

    @property
    def topk_weights(self) -> NDArray[np.floating] | None:
        """Weights by token and slot as applied, float[num_tokens, top_k]; None if not recorded."""
        return self._own[1] if self._own is not None else self._recorded("expert_weights")

    @property
    def low_slots(self) -> NDArray[np.bool_] | None:
        """Slots that are computed with a low-precision copy, bool[num_tokens, top_k]; None: none."""
        return None if self._own is None else self._own[2]

    @property
    def router_logits(self) -> NDArray[np.floating] | None:
        """The router's scores of all experts, float[num_tokens, num_experts]; None if not recorded."""
        return self._recorded("router_logits")

    def gate_ahead(self, distance: int = 1) -> NDArray[np.integer] | None:
        """Return what the gate of layer + ``distance`` picks on this layer's input, int[num_tokens, top_k].

        Best first. None where that is not recorded (distances 1 to 3 may be) or past the last layer.
        """
        if self._choices is None or not 1 <= distance <= len(GATE_COLUMNS):
            return None
        whole = self._choices.column(GATE_COLUMNS[distance - 1])
        if whole is None or self.layer + distance >= whole.shape[1]:
            return None
        early: NDArray[np.integer] = whole[:, self.layer]
        return early

    def token_ids(self, expert: int, is_low: bool | None = None) -> NDArray[np.intp]:
        """Return the rows (token indices in the step) routed to ``expert``, an index in the layer.

        ``is_low``: those that use its low-precision copy, or those that do not; None: either.
        """
        chosen = self.topk_ids
        if chosen is None:
            raise ValueError(f"layer {self.layer}: this routing has no topk_ids")
        here = chosen == expert
        if is_low is not None:
            low = self.low_slots
            here &= (False if low is None else low) == is_low
        return np.flatnonzero(here.any(axis=1))

    def masses(self, num_experts: int) -> dict[int, float] | None:
        """Return the weight that each of the chosen experts has over all tokens, by key; None if unknown.

        A low-precision copy has the mass of the slots that use it.
        """
        weights, ids = self.topk_weights, self.topk_ids
        if weights is None or ids is None:
            return None
        first, low = self.layer * num_experts, self.low_slots
        if len(ids) == 1 and low is None:
            row = zip(ids[0].tolist(), weights[0].tolist(), strict=True)
            return {first + expert: weight for expert, weight in row if expert != NO_EXPERT}
        used = ids != NO_EXPERT
        keys = ids[used].astype(np.int64) + first
        if low is not None:  # the experts of a layer and their low copies are far apart in keys
            offset = max(self.experts, default=0) // num_experts * num_experts - first
            keys = keys + np.where(low[used], offset, 0)
        found: dict[int, float] = {}
        for key, weight in zip(keys.tolist(), weights[used].tolist(), strict=True):
            found[key] = found.get(key, 0.0) + weight
        return found

    def rewritten(
        self,
        keys: KeySpace,
        topk_ids: NDArray[np.integer],
        topk_weights: NDArray[np.floating] | None,
        low_slots: NDArray[np.bool_] | None = None,
    ) -> LayerRouting:
        """Return what a RoutingPolicy computes instead.

        ``topk_ids`` are indices in the layer, int[num_tokens, top_k], NO_EXPERT for a slot that is
        dropped; ``topk_weights`` the weights applied; ``low_slots`` which slots use a low-precision copy.
        """
        made = LayerRouting(
            self.layer, *_used(keys, self.layer, topk_ids, low_slots), self._choices
        )
        made._own = topk_ids, topk_weights, low_slots
        return made

    def reordered(self, experts: Sequence[int], token_counts: Sequence[int]) -> LayerRouting:
        """Return the same choices with ``experts`` in another order, or some of them only."""
        made = LayerRouting(self.layer, experts, token_counts, self._choices)
        made._own = self._own
        return made

    def _recorded(self, name: str) -> NDArray[Any] | None:
        whole = None if self._choices is None else self._choices.column(name)
        return None if whole is None else whole[:, self.layer]


def _used(
    keys: KeySpace, layer: int, ids: NDArray[np.integer], low: NDArray[np.bool_] | None
) -> tuple[list[int], list[int]]:
    """Return the distinct keys of a layer's slots and how many tokens each serves."""
    first = layer * keys.num_experts
    if len(ids) == 1:
        chosen = [first + expert for expert in ids[0].tolist() if expert != NO_EXPERT]
        if low is not None:
            marks = [
                mark
                for mark, e in zip(low[0].tolist(), ids[0].tolist(), strict=True)
                if e != NO_EXPERT
            ]
            chosen = [keys.low(k) if mark else k for k, mark in zip(chosen, marks, strict=True)]
        return chosen, [1] * len(chosen)
    used = ids != NO_EXPERT
    flat = ids[used].astype(np.int64) + first
    if low is not None:
        flat += np.where(low[used], keys.low(0), 0)
    found, counts = np.unique(flat, return_counts=True)
    return found.tolist(), counts.tolist()


def ordering(name: str) -> Callable[[LayerRouting], LayerRouting] | None:
    """Return what puts an event's experts in an order (see Workload); None for that in which they come.

    Raises ValueError for a name that is none.
    """
    ranks: dict[str, Callable[[int, int], tuple[int, int]]] = {
        "index": lambda key, _: (key, 0),
        "tokens": lambda key, tokens: (-tokens, key),
    }
    if name == "router":
        return None
    if name not in ranks:
        raise ValueError(f"workload.expert_order = {name}: must be 'router', 'index' or 'tokens'")
    rank = ranks[name]

    def ordered(routing: LayerRouting) -> LayerRouting:
        pairs = zip(routing.experts, routing.token_counts, strict=True)
        keys, counts = zip(*sorted(pairs, key=lambda pair: rank(*pair)), strict=True)
        return routing.reordered(list(keys), list(counts))

    return ordered
