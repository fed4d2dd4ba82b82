"""Experts in memory that stand in for missing ones."""

from __future__ import annotations

from typing import ClassVar

from sim.policies.buddy import BuddyTable, lightest_first
from sim.policies.drop import weighed
from sim.policies.history import History
from sim.policies.rewriter import Choice, Table, TokenRewriter
from sim.types import RESIDENT, LayerRouting, View


class CachedBuddies(TokenRewriter):
    """Replace every absent pick by the first of its ``most`` buddies in memory (e1n00r/tinyserve).

    No gate and no limit; a pick without a buddy in memory is loaded. A buddy has the weight of the pick
    it replaces, and is no pick of the token. Decoded tokens only.

    Parameters
    ----------
    calibration
        Requests to count pairs in.
    most
        Buddies an expert has, >= 1; the repository has 3.
    """

    def __init__(self, calibration: History, most: int = 3) -> None:
        self._buddies = BuddyTable(calibration, 1.0, most)

    def choose(
        self, token: int, experts: list[int], weights: list[float] | None, view: View
    ) -> Choice | None:
        """Return the token with buddies in the slots of absent picks."""
        slots, changed, states = list(experts), False, self.states
        for slot in self.absent(experts):
            for buddy, _ in self._buddies.of(view.layer, experts[slot]):
                if states[buddy] == RESIDENT and buddy not in slots:
                    slots[slot], changed = buddy, True
                    break
        return (slots, weights, None) if changed else None


class SMoE(TokenRewriter):
    """Replace absent picks of little weight by like experts in memory (SMoE, arXiv 2508.18983).

    RECONSTRUCTION from the abstract, which has no rule for either: a pick matters little if it weighs
    less than ``fraction`` of a uniform share, and the resident most like it is the one with the highest
    router score for this very token, or, in a trace without ``router_logits``, the one that calibration
    chose together with it most often. It takes the weight of the pick it replaces. The lightest picks
    are replaced first, the heaviest never. Decoded tokens only.

    Parameters
    ----------
    calibration
        Requests to count pairs in.
    fraction
        > 0; 1 is the uniform share 1 / top-k of the token's weight.
    """

    needs: ClassVar[tuple[str, ...]] = ("expert_weights",)

    def __init__(self, calibration: History, fraction: float = 1.0) -> None:
        if not fraction > 0.0:
            raise ValueError(f"fraction = {fraction}: must be > 0")
        self.fraction = fraction
        self._calibration = calibration
        self._buddies: BuddyTable | None = None
        self._routing: LayerRouting | None = None

    def meet(self, routing: LayerRouting, rows: Table, weights: Table | None, view: View) -> None:
        """Take the tokens' scores, where they are recorded."""
        self._routing = routing

    def choose(
        self, token: int, experts: list[int], weights: list[float] | None, view: View
    ) -> Choice | None:
        """Return the token with residents in the slots of light absent picks."""
        known = weighed(weights, self)
        least = min(self.fraction * sum(known) / len(known), max(known))
        light = [slot for slot in self.absent(experts) if known[slot] < least]
        slots, changed = list(experts), False
        for slot in lightest_first(light, known):
            stand_in = self._alike(token, experts[slot], slots, view)
            if stand_in is not None:
                slots[slot], changed = stand_in, True
        return (slots, weights, None) if changed else None

    def _alike(self, token: int, expert: int, taken: list[int], view: View) -> int | None:
        """Return the resident most like an expert that the token does not use yet."""
        states, routing = self.states, self._routing
        scores = None if routing is None else routing.score_row(token)
        if scores is not None:
            here = [e for e, at in enumerate(states) if at == RESIDENT and e not in taken]
            return max(here, key=scores.__getitem__, default=None)  # of equals the first
        if self._buddies is None:  # not before it is clear that there are no scores
            past = self._calibration
            self._buddies = BuddyTable(past, 1.0, past.num_experts)
        for buddy, _ in self._buddies.of(view.layer, expert):
            if states[buddy] == RESIDENT and buddy not in taken:
                return buddy
        return None
