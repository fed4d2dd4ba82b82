"""Missing experts in lower precision: the lighter the pick, the fewer bits it is worth loading."""

from __future__ import annotations

from typing import ClassVar

from sim.policies.drop import before_each, weighed
from sim.policies.rewriter import Choice, Table, TokenRewriter
from sim.types import NO_EXPERT, LayerRouting, View


class HobbitPrecision(TokenRewriter):
    """Load a missing expert in high or low precision, or skip it (HOBBIT, arXiv 2411.01433).

    With a token's picks in falling order of weight, s is the share of its weight before a pick (0 for
    the first). A pick whose high-precision copy is on the GPU, or on its way, uses that. Else up to
    s <= ``high_below`` it misses: the high copy is loaded, even where a low one is. Beyond, a low copy
    that is there is used; else the pick is loaded low if s <= ``low_below``, or skipped. The weights of
    the others stay. Picks that some other token of the event needs high are high for all
    (RECONSTRUCTION: the paper decodes one token at a time). Decoded tokens only.

    Parameters
    ----------
    high_below, low_below
        T1 and T2 with 0 <= T1 <= T2 <= 1; the paper has .6 and .9.
    """

    needs: ClassVar[tuple[str, ...]] = ("expert_weights",)
    needs_low: ClassVar[bool] = True

    def __init__(self, high_below: float = 0.6, low_below: float = 0.9) -> None:
        if not 0.0 <= high_below <= low_below <= 1.0:
            raise ValueError(
                f"high_below = {high_below}, low_below = {low_below}: must be 0 <= high_below <= "
                "low_below <= 1"
            )
        self.high_below = high_below
        self.low_below = low_below
        self._shares: list[list[tuple[int, float]]] = []
        self._high: set[int] = set()
        self._low_states = b""

    def meet(self, routing: LayerRouting, rows: Table, weights: Table | None, view: View) -> None:
        """Find each pick's share of weight before it, and who must be there in high precision."""
        if view.keys.num_copies < 2:
            raise ValueError("HobbitPrecision: policy.low must be given, for low-precision copies")
        self._shares = [
            before_each(experts, weighed(None if weights is None else weights[token], self))
            for token, experts in enumerate(rows)
        ]
        self._low_states = view.bank_states(view.num_layers + routing.layer)
        self._high = set()
        if view.step.num_tokens == 1:
            return
        # Prompt tokens of the same step are computed in high precision too.
        ids = routing.id_rows()
        assert ids is not None
        for experts in ids[len(rows) :]:
            self._high.update(experts)
        for experts, shares in zip(rows, self._shares, strict=True):
            self._high |= {experts[slot] for slot, before in shares if before <= self.high_below}

    def choose(
        self, token: int, experts: list[int], weights: list[float] | None, view: View
    ) -> Choice | None:
        """Return the token with its low slots marked and its skipped ones empty."""
        known, states, low_states = weighed(weights, self), self.states, self._low_states
        low, skipped = list[int](), list[int]()
        for slot, before in self._shares[token]:
            expert = experts[slot]
            if before <= self.high_below or states[expert] or expert in self._high:
                continue
            if before <= self.low_below or low_states[expert]:
                low.append(slot)
            else:
                skipped.append(slot)
        if not low and not skipped:
            return None
        slots = [NO_EXPERT if slot in skipped else e for slot, e in enumerate(experts)]
        made = [0.0 if slot in skipped else w for slot, w in enumerate(known)]
        return slots, made, [slot in low for slot in range(len(experts))] if low else None
