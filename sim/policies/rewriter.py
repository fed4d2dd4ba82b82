"""What lossy routing policies share: decoded tokens are rewritten one by one, slot by slot."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from sim.policies.base import RoutingPolicy
from sim.types import NO_EXPERT, RESIDENT, LayerRouting, View

Choice = tuple[list[int], "list[float] | None", "list[bool] | None"]
"""A token's experts by slot (NO_EXPERT drops one), their weights, and which use a low-precision copy."""
Table = list[list[Any]]


class TokenRewriter(RoutingPolicy):
    """Rewrites the decoded tokens of an event; prompt tokens are left as they are.

    A subclass fills :meth:`choose`. What it keeps of a token stays in its slot, so that the ledger
    (sim/ledger.py) can tell slot by slot what was given up. ``states`` tells where each expert of the
    event's layer is (see :meth:`sim.types.View.states`), while :meth:`meet` and :meth:`choose` run.
    """

    only_misses: ClassVar[bool] = True
    """True where an event whose experts are all on the GPU is left as it is."""

    states: bytes = b""

    def rewrite(self, routing: LayerRouting, view: View) -> LayerRouting:
        """Return the routing with every decoded token's choice, the same object if none differs."""
        count = view.step.num_decoding
        if not count:
            return routing
        layer = routing.layer
        self.states = states = view.bank_states(layer)
        if self.only_misses:
            first = layer * view.keys.num_experts
            missing = [key for key in routing.experts if states[key - first] != RESIDENT]
            if not missing:
                return routing
        ids, weights = routing.id_rows(), routing.weight_rows()
        if ids is None:
            raise ValueError(f"{type(self).__name__}: layer {layer}: must know topk_ids")
        is_mixed = len(ids) > count  # prompt tokens follow the decoded ones
        rows: Table = ids[:count] if is_mixed else ids
        weight_rows = weights[:count] if is_mixed and weights is not None else weights
        self.meet(routing, rows, weight_rows, view)
        made: dict[int, Choice] = {}
        for token, row in enumerate(rows):
            choice = self.choose(
                token, row, None if weight_rows is None else weight_rows[token], view
            )
            if choice is not None:
                made[token] = choice
        return _with(routing, made, ids, weights, view) if made else routing

    def meet(self, routing: LayerRouting, rows: Table, weights: Table | None, view: View) -> None:
        """Learn all decoded tokens of the event before the first is chosen for."""

    def choose(
        self, token: int, experts: list[int], weights: list[float] | None, view: View
    ) -> Choice | None:
        """Return what a token computes instead; None leaves it.

        ``experts`` are indices in the layer by slot, NO_EXPERT where unused; ``token`` counts the
        decoded tokens of the event.
        """
        raise NotImplementedError

    def absent(self, experts: Sequence[int]) -> list[int]:
        """Return the slots whose experts are neither on the GPU nor on their way there."""
        states = self.states
        return [s for s, e in enumerate(experts) if e != NO_EXPERT and not states[e]]


def _with(
    routing: LayerRouting, made: dict[int, Choice], ids: Table, weights: Table | None, view: View
) -> LayerRouting:
    """Return the routing in which some tokens have another choice."""
    low: Table | None = None
    if len(ids) == 1:
        experts, new_weights, marks = made[0]
        weights = None if new_weights is None else [new_weights]
        low = None if marks is None else [marks]
        return routing.rewritten(view.keys, [experts], weights, low)
    new_ids = list(ids)
    weights = None if weights is None else list(weights)
    for token, (experts, new_weights, marks) in made.items():
        new_ids[token] = experts
        if weights is not None and new_weights is not None:
            weights[token] = new_weights
        if marks is not None:
            low = [[False] * len(row) for row in ids] if low is None else low
            low[token] = marks
    return routing.rewritten(view.keys, new_ids, weights, low)


def refilled(experts: Sequence[int], chosen: Collection[int]) -> list[int]:
    """Return the slots with those of ``chosen`` that were there in place, newcomers in the others.

    Newcomers enter in the order of ``chosen``; unused slots stay unused.
    """
    newcomers = iter([expert for expert in chosen if expert not in experts])
    return [
        expert if expert in chosen or expert == NO_EXPERT else next(newcomers, NO_EXPERT)
        for expert in experts
    ]


def dropped(
    experts: Sequence[int],
    weights: Sequence[float],
    slots: Collection[int],
    renormalise: bool,
) -> Choice:
    """Return the token without some slots; with ``renormalise`` the others take up their weight."""
    new_experts, new_weights = list(experts), list(weights)
    for slot in slots:
        new_experts[slot], new_weights[slot] = NO_EXPERT, 0.0
    left = sum(new_weights)
    if renormalise and left > 0.0:
        scale = sum(weights) / left
        new_weights = [weight * scale for weight in new_weights]
    return new_experts, new_weights, None
