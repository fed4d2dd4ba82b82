"""The quality ledger: rows made by hand, the laws they obey, and what a reader is shown of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sim import report
from sim.ledger import LEDGER_COLUMNS, Ledger, quality
from sim.metrics import Totals
from sim.result_tables import StoredTable
from sim.results import LEDGER, SUMMARY
from sim.simulate import simulate
from sim.tables import Table
from sim.types import KeySpace, LayerPlan, LayerRouting, Phase, StepInfo
from tests.configs import composed
from tests.test_report import row as lossless_row
from tests.tokens import NO, routing_of

KEYS = KeySpace(1, 8, 2)
LOGITS = [[4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0]]


def entered(
    recorded: LayerRouting,
    ids: Sequence[Sequence[int]] | None,
    low: Sequence[Sequence[bool]] | None = None,
    deferred: Sequence[int] = (),
) -> dict[str, int]:
    """Return the row of a step of one layer whose slots become ``ids``; None: as recorded."""
    made = recorded
    if ids is not None:
        marks = None if low is None else np.array(low)
        made = recorded.rewritten(KEYS, np.array(ids, np.uint16), recorded.topk_weights, marks)
    plan = LayerPlan(made, made.experts)
    plan.recorded, plan.deferred = recorded, deferred
    table = Table(LEDGER_COLUMNS)
    ledger = Ledger(table, 8)
    ledger.add(plan)
    ledger.end_step(StepInfo(3, Phase.DECODE, len(recorded.topk_ids)))  # type: ignore[arg-type]
    (found,) = table.rows
    return {
        name: value
        for name, value in zip(LEDGER_COLUMNS, found, strict=True)
        if value or name == "step"
    }


ONE = routing_of([[0, 1, 2]], [[0.5, 0.25, 0.125]], LOGITS)
BASE = {"step": 3, "phase": 1, "slots": 3, "mass_millionths": 875_000, "scored_tokens": 1}


def test_nothing_given_up_is_nothing_entered() -> None:
    assert entered(ONE, None) == BASE
    assert entered(ONE, [[0, 1, 2]]) == BASE
    assert entered(ONE, [[2, 0, 1]]) == BASE, "an expert in another slot is kept"


def test_substituted_and_dropped_slots_keep_their_recorded_mass_apart() -> None:
    kl = log((exp(4) + exp(3) + exp(2)) / (exp(4) + exp(0)))
    assert entered(ONE, [[0, 4, NO]]) == BASE | {
        "substituted_slots": 1, "substituted_mass_millionths": 250_000,
        "dropped_slots": 1, "dropped_mass_millionths": 125_000,
        "route_kl_millionths": round(1e6 * kl),
    }  # fmt: skip


def test_two_slots_that_become_one_expert_are_computed_once() -> None:
    kl = log((exp(4) + exp(3) + exp(2)) / (exp(4) + exp(0)))
    assert entered(ONE, [[0, 4, 4]])["route_kl_millionths"] == round(1e6 * kl)


def test_low_and_late_slots_are_told_beside_what_changed() -> None:
    found = entered(ONE, [[0, 4, 2]], [[False, True, True]], deferred=[2 + 8, 0])
    assert (found["substituted_slots"], found["substituted_mass_millionths"]) == (1, 250_000)
    assert (found["low_slots"], found["low_mass_millionths"]) == (2, 375_000)
    assert (found["deferred_slots"], found["deferred_mass_millionths"]) == (2, 625_000)


def test_a_deferral_alone_is_entered() -> None:
    assert entered(ONE, None, deferred=[1]) == BASE | {
        "deferred_slots": 1, "deferred_mass_millionths": 250_000,
    }  # fmt: skip


def test_several_tokens_add_up_and_unused_slots_do_not_count() -> None:
    two = routing_of([[0, 1], [2, NO]], [[0.75, 0.25], [1.0, 0.0]])
    assert entered(two, [[0, 3], [2, NO]]) == {
        "step": 3, "phase": 1, "slots": 3, "mass_millionths": 2_000_000,
        "substituted_slots": 1, "substituted_mass_millionths": 250_000,
    }  # fmt: skip
    assert entered(two, None)["slots"] == 3


def test_without_weights_slots_are_counted() -> None:
    assert entered(routing_of([[0, 1]]), [[0, NO]]) == {
        "step": 3, "phase": 1, "slots": 2, "dropped_slots": 1,
    }  # fmt: skip


@st.composite
def rewrites(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """Draw tokens' picks, what is computed of them (each slot kept, swapped or empty), and weights."""
    tokens = draw(st.integers(1, 4))
    recorded, made, weights = [], [], []
    for _ in range(tokens):
        order = draw(st.permutations(range(8)))
        picks, spare = list(order[:4]), list(order[4:])
        fates = draw(st.lists(st.sampled_from("ksd"), min_size=4, max_size=4))
        recorded.append(picks)
        fate_of = {"k": lambda e, _: e, "s": lambda _, s: s, "d": lambda *_: NO}
        made.append([fate_of[f](e, s) for f, e, s in zip(fates, picks, spare, strict=True)])
        weights.append(draw(st.lists(st.integers(0, 64), min_size=4, max_size=4)))
    return recorded, made, [[w / 64 for w in row] for row in weights]


@given(rewrites())
def test_kept_substituted_and_dropped_come_to_all(
    case: tuple[list[list[int]], list[list[int]], list[list[float]]],
) -> None:
    recorded, made, weights = case
    found = dict.fromkeys(LEDGER_COLUMNS, 0) | entered(routing_of(recorded, weights), made)
    pairs = [
        (old, new, weight)
        for row in zip(recorded, made, weights, strict=True)
        for old, new, weight in zip(*row, strict=True)
    ]
    kept = [weight for old, new, weight in pairs if old == new]
    slots = found["slots"] - found["substituted_slots"] - found["dropped_slots"]
    mass = found["mass_millionths"]
    mass -= found["substituted_mass_millionths"] + found["dropped_mass_millionths"]
    assert slots == len(kept)
    assert mass == pytest.approx(1e6 * sum(kept), abs=2)
    assert found["dropped_slots"] == sum(new == NO for _, new, _ in pairs)


def test_metrics_are_shares_and_none_where_nothing_is_known() -> None:
    sums = dict.fromkeys(LEDGER_COLUMNS, 0)
    sums |= {"slots": 40, "substituted_slots": 6, "dropped_slots": 2, "low_slots": 10}
    found = quality(list(sums.values()), "decode_")
    assert found["decode_route_agreement"] == 0.8
    assert (found["decode_substituted_slot_rate"], found["decode_low_slot_rate"]) == (0.15, 0.25)
    assert found["decode_substituted_mass_rate"] is None
    assert found["decode_route_kl"] is None
    sums |= {"mass_millionths": 10, "dropped_mass_millionths": 1}
    sums |= {"scored_tokens": 4, "route_kl_millionths": 2_000_000}
    found = quality(list(sums.values()))
    assert (found["dropped_mass_rate"], found["route_kl"]) == (0.1, 0.5)
    assert quality([0] * len(LEDGER_COLUMNS))["route_agreement"] is None


def test_decode_steps_are_told_apart() -> None:
    totals, place = Totals(), LEDGER_COLUMNS.index
    block = np.zeros((2, len(LEDGER_COLUMNS)), dtype=np.int64)
    block[:, place("phase")] = (Phase.PREFILL, Phase.DECODE)
    block[:, place("slots")] = (30, 10)
    block[1, place("dropped_slots")] = 5
    totals.add_ledger(block)
    found = totals.summary()
    assert (found["dropped_slot_rate"], found["decode_dropped_slot_rate"]) == (0.125, 0.5)
    assert "route_agreement" not in Totals().summary(), "a lossless run has none"


def _config(policy: str) -> dict[str, Any]:
    config = composed(f"policy={policy}", "trace=tiny_logits", "output.belady=false")
    config["workload"] |= {"requests": [8, 10], "length": [8, 24]}
    return config


def test_a_lossy_run_leaves_its_ledger_and_a_lossless_one_none(tmp_path: Path) -> None:
    summary, _ = simulate(_config("max_rank"), tmp_path)
    in_memory, tables = simulate(_config("max_rank"))
    assert tables.ledger is not None
    assert summary["lossy"] is True
    assert 0.0 < summary["decode_substituted_mass_rate"] < summary["decode_substituted_slot_rate"]
    assert summary["route_kl"] > 0.0
    assert {k: v for k, v in summary.items() if k != "provenance"} == {
        k: v for k, v in in_memory.items() if k != "provenance"
    }
    stored = np.concatenate(list(StoredTable(tmp_path / LEDGER)))
    assert [tuple(one) for one in stored.tolist()] == tables.ledger.rows
    plain, tables = simulate(_config("lru"), tmp_path)
    assert plain["lossy"] is False
    assert tables.ledger is None
    assert "route_agreement" not in plain
    assert not (tmp_path / LEDGER).exists(), "that of the run before is gone"
    assert not (tmp_path / SUMMARY).exists(), "finish_run writes it"


def test_a_trace_without_weights_is_told(small_trace_file: Path) -> None:
    config = composed("policy=reuse", f"trace.path={small_trace_file}", "output.belady=false")
    summary, _ = simulate(config)
    assert summary["decode_substituted_slot_rate"] > 0.0
    assert summary["decode_substituted_mass_rate"] is None
    assert any("no weights" in note for note in summary["notes"])


def lossy_row(**changes: Any) -> dict[str, Any]:
    sums = dict.fromkeys(LEDGER_COLUMNS, 0) | {
        "slots": 1000, "mass_millionths": 1000, "substituted_slots": 81,
        "substituted_mass_millionths": 44, "low_slots": 200, "low_mass_millionths": 100,
    } | changes  # fmt: skip
    metrics = quality(list(sums.values())) | quality(list(sums.values()), "decode_")
    return lossless_row("smoe", **(metrics | {"lossy": True}))


def _table(rows: list[dict[str, Any]], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    report._print_table(console, rows)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("width", [100, 250])
def test_a_lossy_run_is_never_shown_without_its_ledger(width: int) -> None:
    text = _table([lossless_row(), lossy_row()], width)
    for shown in ("smoe ~", "slots changed", "8.1%", "mass changed", "4.4%", "low bits", "10.0%"):
        assert shown in text
    assert "late" not in text
    assert "slots changed" not in _table([lossless_row()], width)


def test_without_weights_the_table_tells_slots() -> None:
    row = lossy_row(mass_millionths=0, substituted_mass_millionths=0, low_mass_millionths=0)
    assert "8.1% slots" in _table([row], 250)


def test_one_run_tells_its_ledger_in_words() -> None:
    told = report.details(lossy_row())
    assert told[1] == (
        "Quality ledger, while decoding, of the experts that tokens chose: 8.1% replaced (4.4% of the "
        "router's weight), 20.0% in low precision (10.0% of the router's weight)."
    )
    assert not any("ledger" in line for line in report.details(lossless_row()))
