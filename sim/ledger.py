"""The quality ledger: what a lossy policy takes from the model's answer, slot by slot.

Only runs whose policy is lossy keep one: a table with a row a step. A *slot* is one expert of one token
in one layer, as the router chose it; its *mass* is the weight recorded with it. Against what is computed
a slot is *kept* (the token still uses that expert), *substituted* (its place is taken by another) or
*dropped* (its place is empty), so that kept + substituted + dropped = all, in slots and in mass. Apart
from that, of the slots computed, some are *low* (in low precision) and some *deferred* (their result
comes a layer late); their mass is that recorded in the slot. Masses and divergence are whole millionths.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from math import exp, log
from typing import Any

import numpy as np

from sim.tables import Table
from sim.types import NO_EXPERT, LayerPlan, LayerRouting, StepInfo

LEDGER_COLUMNS = (
    "step",
    "phase",
    "slots",
    "substituted_slots",
    "dropped_slots",
    "low_slots",
    "deferred_slots",
    "mass_millionths",
    "substituted_mass_millionths",
    "dropped_mass_millionths",
    "low_mass_millionths",
    "deferred_mass_millionths",
    "scored_tokens",
    "route_kl_millionths",
)
"""``scored_tokens`` counts (token, layer) pairs with recorded router scores; ``route_kl_millionths`` is the
sum over them of ln(P(router's picks) / P(picks computed)), P the softmax of the scores: by how much the
divergence of what is computed from the router's full distribution exceeds that of its own picks (nats)."""
_MILLION = 1e6
_KINDS = ("substituted", "dropped", "low", "deferred")
_SUBSTITUTED, _DROPPED, _LOW, _DEFERRED = range(1, 5)  # 0 counts all


class Ledger:
    """Keeps the ledger of a run; adds a row to ``table`` at the end of each step."""

    def __init__(self, table: Table, num_experts: int) -> None:
        self._table = table
        self._num_experts = num_experts
        self._reset()

    def add(self, plan: LayerPlan) -> None:
        """Enter one layer's plan."""
        recorded, computed = plan.recorded, plan.routing
        num_tokens, has_scores = recorded.num_rows, recorded.has_scores
        if not num_tokens:
            raise ValueError("the ledger must know the recorded topk_ids")
        if has_scores:
            self._scored += num_tokens
        changed = computed is not recorded
        if num_tokens > 1 and not changed and not plan.deferred:  # a long prompt makes no lists
            weights = recorded.topk_weights
            self._slots[0] += sum(recorded.token_counts)
            self._masses[0] += 0.0 if weights is None else float(weights.sum(dtype=np.float64))
            return
        rows, masses = recorded.id_rows(), recorded.weight_rows()
        assert rows is not None
        for row in rows:
            self._slots[0] += len(row) - row.count(NO_EXPERT)
        if masses is not None:
            self._masses[0] += sum(map(sum, masses))
        if not changed and not plan.deferred:
            return
        made = computed.id_rows()
        assert made is not None
        late = {key % self._num_experts for key in plan.deferred}
        self._compare(rows, made, masses or [None] * len(rows), computed.low_rows(), late)
        if has_scores and changed:
            self._diverge(rows, made, recorded)

    def end_step(self, info: StepInfo) -> None:
        """Close the step's row."""
        slots = [int(count) for count in self._slots]
        masses = [round(mass * _MILLION) for mass in self._masses]
        route_kl = round(self._route_kl * _MILLION)
        row = (info.step, int(info.phase), *slots, *masses, self._scored, route_kl)
        self._table.append(row)
        self._reset()

    def _reset(self) -> None:
        self._slots = [0] * (1 + len(_KINDS))
        self._masses = [0.0] * (1 + len(_KINDS))
        self._scored = 0
        self._route_kl = 0.0

    def _compare(
        self,
        rows: list[list[int]],
        made: list[list[int]],
        masses: list[Any],
        low: list[list[bool]] | None,
        late: set[int],
    ) -> None:
        """Enter what became of each slot."""
        marks: Sequence[list[bool] | None] = low or [None] * len(rows)
        for old, new, mass, mark in zip(rows, made, masses, marks, strict=True):
            if old != new:
                self._enter_changes(old, new, mass)
            if late:
                self._enter(_DEFERRED, mass, [expert in late for expert in new])
            if mark is not None:
                self._enter(_LOW, mass, mark)

    def _enter_changes(self, old: list[int], new: list[int], mass: list[float] | None) -> None:
        """Enter the slots whose expert the token does not use any more."""
        for slot, expert in enumerate(old):
            now = new[slot]
            if expert in (now, NO_EXPERT) or expert in new:
                continue
            kind = _DROPPED if now == NO_EXPERT else _SUBSTITUTED
            self._slots[kind] += 1
            if mass is not None:
                self._masses[kind] += mass[slot]

    def _enter(self, kind: int, mass: list[float] | None, marks: list[bool]) -> None:
        """Enter the marked slots."""
        self._slots[kind] += sum(marks)
        if mass is not None:
            self._masses[kind] += sum(compress(mass, marks))

    def _diverge(
        self, rows: list[list[int]], made: list[list[int]], recorded: LayerRouting
    ) -> None:
        """Enter by how much the picks computed are less probable than the router's."""
        for token, (old, new) in enumerate(zip(rows, made, strict=True)):
            if old == new:
                continue
            scores = recorded.score_row(token)
            assert scores is not None
            picks = [expert for expert in old if expert != NO_EXPERT]
            top = max([scores[expert] for expert in picks])
            odds = {expert: exp(scores[expert] - top) for expert in picks}
            before = sum(odds.values())
            after = sum(
                [
                    odds[expert] if expert in odds else exp(scores[expert] - top)
                    for expert in dict.fromkeys(new)
                    if expert != NO_EXPERT
                ]
            )
            if after > 0.0:  # a token left with nothing has no divergence that could be told
                self._route_kl += log(before / after)


def quality(sums: Sequence[int], prefix: str = "") -> dict[str, float | None]:
    """Return the metrics of sums of ledger rows (see the head of sim/metrics.py), by prefixed name."""
    total = dict(zip(LEDGER_COLUMNS, sums, strict=True))
    slots, mass, scored = total["slots"], total["mass_millionths"], total["scored_tokens"]
    kept = slots - total["substituted_slots"] - total["dropped_slots"]
    found = {"route_agreement": kept / slots if slots else None}
    for kind in _KINDS:
        found[f"{kind}_slot_rate"] = total[f"{kind}_slots"] / slots if slots else None
    for kind in _KINDS:
        found[f"{kind}_mass_rate"] = total[f"{kind}_mass_millionths"] / mass if mass else None
    found["route_kl"] = total["route_kl_millionths"] / _MILLION / scored if scored else None
    return {f"{prefix}{name}": value for name, value in found.items()}
