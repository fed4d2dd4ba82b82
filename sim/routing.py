"""What routers chose: for one layer of one step, and what a policy made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sim.choices import FEW_TOKENS, Choices, Rows, TableOrRows, as_array, as_rows, used_keys
from traces.schema import GATE_COLUMNS, NO_EXPERT

if TYPE_CHECKING:
    from sim.types import KeySpace


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
        self._own: tuple[TableOrRows, TableOrRows | None, TableOrRows | None] | None = None
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
        own = self._own
        return self._recorded("expert_ids") if own is None else as_array(own[0], np.uint16)

    @property
    def topk_weights(self) -> NDArray[np.floating] | None:
        """Weights by token and slot as applied, float[num_tokens, top_k]; None if not recorded."""
        own = self._own
        return self._recorded("expert_weights") if own is None else as_array(own[1], np.float32)

    @property
    def low_slots(self) -> NDArray[np.bool_] | None:
        """Slots that are computed with a low-precision copy, bool[num_tokens, top_k]; None: none."""
        return None if self._own is None else as_array(self._own[2], np.bool_)

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

    @property
    def num_rows(self) -> int:
        """Number of tokens whose choices are known one by one; 0 where those of none are."""
        if self._own is not None:
            return len(self._own[0])
        ids = None if self._choices is None else self._choices.column("expert_ids")
        return 0 if ids is None else len(ids)

    @property
    def has_scores(self) -> bool:
        """Tell whether ``router_logits`` are recorded."""
        return self._choices is not None and self._choices.column("router_logits") is not None

    def id_rows(self) -> Rows | None:
        """Return ``topk_ids`` as lists, which is faster for few tokens; not to be changed."""
        return self._listed("expert_ids") if self._own is None else as_rows(self._own[0])

    def weight_rows(self) -> Rows | None:
        """Return ``topk_weights`` as lists; not to be changed."""
        if self._own is None:
            return self._listed("expert_weights")
        return as_rows(as_array(self._own[1], np.float32))  # rounded as those of the array are

    def low_rows(self) -> Rows | None:
        """Return ``low_slots`` as lists; not to be changed."""
        return None if self._own is None else as_rows(self._own[2])

    def score_row(self, token: int) -> list[float] | None:
        """Return a token's row of ``router_logits`` as a list; not to be changed."""
        rows = self._listed("router_logits") if self.num_rows <= FEW_TOKENS else None
        if rows is not None:
            return rows[token]
        logits = self.router_logits
        if logits is None:
            return None
        row: list[float] = logits[token].tolist()
        return row

    def early_rows(self, distance: int = 1) -> Rows | None:
        """Return :meth:`gate_ahead` as lists; not to be changed."""
        if self._choices is None or not 1 <= distance <= len(GATE_COLUMNS):
            return None
        name = GATE_COLUMNS[distance - 1]
        whole = self._choices.column(name)
        if whole is None or self.layer + distance >= whole.shape[1]:
            return None
        return self._choices.rows(name, self.layer)

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
        weights, ids = self.weight_rows(), self.id_rows()
        if weights is None or ids is None:
            return None
        first, low = self.layer * num_experts, self.low_rows()
        found: dict[int, float] = {}
        if low is None:
            if len(ids) == 1 and NO_EXPERT not in ids[0]:
                found = dict(zip([first + expert for expert in ids[0]], weights[0], strict=True))
                if len(found) == len(ids[0]):  # else two slots share an expert
                    return found
                found = {}
            for row, masses in zip(ids, weights, strict=True):
                for expert, weight in zip(row, masses, strict=True):
                    if expert != NO_EXPERT:
                        key = first + expert
                        found[key] = found.get(key, 0.0) + weight
            return found
        # The experts of a layer and their low copies are far apart in keys.
        shift = max(self.experts, default=0) // num_experts * num_experts - first
        for row, masses, marks in zip(ids, weights, low, strict=True):
            for expert, weight, is_low in zip(row, masses, marks, strict=True):
                if expert != NO_EXPERT:
                    key = first + expert + (shift if is_low else 0)
                    found[key] = found.get(key, 0.0) + weight
        return found

    def rewritten(
        self,
        keys: KeySpace,
        topk_ids: NDArray[np.integer] | Rows,
        topk_weights: NDArray[np.floating] | Rows | None,
        low_slots: NDArray[np.bool_] | Rows | None = None,
    ) -> LayerRouting:
        """Return what a RoutingPolicy computes instead.

        ``topk_ids`` are indices in the layer, int[num_tokens, top_k], NO_EXPERT for a slot that is
        dropped; ``topk_weights`` the weights applied; ``low_slots`` which slots use a low-precision copy.
        Each may be lists, one a token, which is faster for few tokens.
        """
        made = LayerRouting(
            self.layer, *used_keys(keys, self.layer, topk_ids, low_slots), self._choices
        )
        made._own = topk_ids, topk_weights, low_slots
        order = None if self._choices is None else self._choices.order
        return made if order is None else order(made)

    def reordered(self, experts: Sequence[int], token_counts: Sequence[int]) -> LayerRouting:
        """Return the same choices with ``experts`` in another order, or some of them only."""
        made = LayerRouting(self.layer, experts, token_counts, self._choices)
        made._own = self._own
        return made

    def _recorded(self, name: str) -> NDArray[Any] | None:
        whole = None if self._choices is None else self._choices.column(name)
        return None if whole is None else whole[:, self.layer]

    def _listed(self, name: str) -> Rows | None:
        return None if self._choices is None else self._choices.rows(name, self.layer)


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
        ranked = sorted(pairs, key=lambda pair: rank(*pair))
        return routing.reordered([key for key, _ in ranked], [tokens for _, tokens in ranked])

    return ordered
