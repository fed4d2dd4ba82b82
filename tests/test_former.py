"""Who decodes where more requests are in memory than a step holds: rules and mechanism, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sim.batching import TokenKeys
from sim.policies.base import BatchFormer, Waiting
from sim.policies.former import OracleUnion, UnionFormer
from sim.requests import REQUEST_COLUMNS, RequestClock
from sim.schedule import WorkStep
from sim.workload import Workload
from tests.strategies import make_trace, trace_of_ids
from traces.schema import NO_EXPERT


class Favourite(BatchFormer):
    """Runs the request with the least id, alone or with those next to it; keeps what it was told."""

    def __init__(self, count: int = 1) -> None:
        self.told: list[tuple[Sequence[Waiting], int, Sequence[Waiting]]] = []
        self._count = count

    def choose(
        self, waiting: Sequence[Waiting], size: int, due: Sequence[Waiting] = ()
    ) -> Sequence[int]:
        self.told.append((waiting, size, due))
        order = sorted(range(len(waiting)), key=lambda place: waiting[place].request_id)
        return order[: min(size, self._count)]


class Fixed(BatchFormer):
    """Answers the same whatever it is asked."""

    def __init__(self, answer: Sequence[Any]) -> None:
        self._answer = answer

    def choose(
        self, waiting: Sequence[Waiting], size: int, due: Sequence[Waiting] = ()
    ) -> Sequence[int]:
        return self._answer


def work_of(lengths: Sequence[tuple[int, int]], batch_size: int, **options: Any) -> Workload:
    """Return work on one layer of 4 experts; row n of the trace uses expert n % 4."""
    num_rows = sum(map(sum, lengths))
    ids = np.arange(num_rows, dtype=np.uint16).reshape(-1, 1, 1) % 4
    return Workload(trace_of_ids(ids, lengths, 4), batch_size, **options)


def lines(workload: Workload) -> list[str]:
    """Return a line a step: phase, ids of its tokens' requests."""
    return [
        f"{step.info.phase.name.lower()} {' '.join(map(str, step.info.request_ids))}"
        for step in workload.steps()
    ]


def decoding(workload: Workload) -> list[tuple[int, ...]]:
    """Return the requests of each step that decodes."""
    return [s.info.request_ids for s in workload.steps() if s.info.num_decoding]


# -- the mechanism ---------------------------------------------------------------------------------


def test_without_a_rule_the_longest_waiting_run_first() -> None:
    work = work_of([(1, 2)] * 3, 2, waiting=3)
    assert lines(work) == [
        *["prefill 0", "prefill 1", "prefill 2"],
        *["decode 0 1", "decode 2 0", "decode 1 2"],
    ]


def test_waits_are_counted_in_steps_that_decode() -> None:
    work = work_of([(1, 2)] * 3, 1, waiting=3)
    steps = list(work.steps())
    assert [s.info.request_ids for s in steps[3:]] == [(0,), (1,), (2,), (0,), (1,), (2,)]
    assert [s.waited for s in steps[3:]] == [
        (),
        ((1, 1),),
        ((2, 2),),
        *([((n, 2),) for n in range(3)]),
    ]


def test_one_that_comes_in_begins_to_wait_then() -> None:
    work = work_of([(1, 1), (1, 3), (1, 1)], 1, waiting=2)
    assert lines(work) == [
        *["prefill 0", "prefill 1", "decode 0"],
        *["prefill 2", "decode 1", "decode 2", "decode 1", "decode 1"],
    ]
    waited = {step.info.step: step.waited for step in work.steps() if step.waited}
    assert waited == {4: ((1, 1),), 5: ((2, 1),), 6: ((1, 1),)}


def test_places_in_memory_bound_who_is_let_in_and_kv_is_that_of_all() -> None:
    work = work_of([(2, 2)] * 4, 1, waiting=3)
    steps = list(work.steps())
    assert [s.info.held_kv_tokens for s in steps[:5]] == [2, 4, 6, 7, 8]
    assert work.peak_kv_tokens() == max(s.info.held_kv_tokens for s in steps) == 10
    alone = work_of([(2, 2)] * 4, 1)
    assert alone.peak_kv_tokens() == 4
    open_work = work_of([(2, 2)] * 4, 1, waiting=3, arrivals="poisson", rate_per_s=1.0)
    assert open_work.peak_kv_tokens() == 12


def test_the_kv_limit_holds_for_all_in_memory() -> None:
    work = work_of([(2, 2)] * 3, 1, waiting=3, kv_limit_tokens=8)
    assert lines(work)[:2] == ["prefill 0 0", "prefill 1 1"]
    assert lines(work)[2] == "decode 0", "a third would come to 12 tokens"


def test_mixed_steps_choose_too() -> None:
    work = work_of([(1, 3), (1, 3), (3, 1)], 1, waiting=3, mixed=True, prefill_chunk=2)
    work.form_batches(Favourite, "favourite")
    assert lines(work) == [
        "prefill 0 1",
        "mixed 0 2 2",
        "mixed 0 2",
        *["decode 0", "decode 1", "decode 1", "decode 1", "decode 2"],
    ]


def test_a_rule_is_not_asked_where_all_fit() -> None:
    rule = Favourite()
    work = work_of([(1, 2)] * 2, 2, waiting=2)
    work.form_batches(lambda: rule, "favourite")
    assert decoding(work) == [(0, 1), (0, 1)]
    work = work_of([(1, 2)] * 2, 2, waiting=9)
    work.form_batches(lambda: rule, "favourite")
    assert decoding(work) == [(0, 1), (0, 1)]
    assert rule.told == []


def test_a_favourite_starves_the_others_and_the_bound_ends_it() -> None:
    work = work_of([(1, 4)] * 3, 1, waiting=3)
    work.form_batches(Favourite, "favourite")
    assert decoding(work)[:5] == [(0,), (0,), (0,), (0,), (1,)]
    bounded = work_of([(1, 4)] * 3, 1, waiting=3, max_wait_steps=2)
    bounded.form_batches(Favourite, "favourite")
    # 1 and 2 are due at the same time: the one waits 2 steps, the other 2 + (3 - 2) // 1.
    assert decoding(bounded)[:6] == [(0,), (0,), (1,), (2,), (0,), (1,)]
    assert max(n for step in bounded.steps() for _, n in step.waited) == 3


def test_those_that_are_due_run_beside_those_that_are_chosen() -> None:
    rule = Favourite()
    work = work_of([(1, 9)] * 4, 2, waiting=4, max_wait_steps=2)
    work.form_batches(lambda: rule, "favourite")
    assert decoding(work)[:4] == [(0,), (0,), (1, 2), (3, 0)]
    seen, size, due = rule.told[0]
    assert [one.request_id for one in seen] == [0, 1, 2, 3]
    assert (size, list(due)) == (2, [])
    seen, size, due = rule.told[2]
    assert [(one.request_id, one.steps_waited) for one in due] == [(3, 3)]
    assert [(one.request_id, one.steps_waited) for one in seen] == [(0, 1), (1, 0), (2, 0)]
    assert size == 1


def test_no_wait_at_all_is_taking_turns_whatever_the_rule() -> None:
    work = work_of([(1, 3)] * 3, 1, waiting=3, max_wait_steps=0)
    work.form_batches(Favourite, "favourite")
    assert decoding(work) == [(0,), (1,), (2,)] * 3


def test_a_rule_is_told_tokens_and_the_keys_of_the_last() -> None:
    rule = Favourite()
    work = work_of([(3, 2), (1, 2)], 1, waiting=2)  # rows 0..4 and 5..7, expert = row % 4
    work.form_batches(lambda: rule, "favourite")
    list(work.steps())
    assert rule.told[0][0] == [Waiting(0, 0, 3, 1 << 2), Waiting(1, 0, 1, 1 << 1)]
    assert rule.told[1][0] == [Waiting(1, 1, 1, 1 << 1), Waiting(0, 0, 4, 1 << 3)]


def test_a_request_without_a_token_behind_it_has_no_keys() -> None:
    rule = Favourite()
    work = work_of([(0, 2), (0, 2)], 1, waiting=2)
    work.form_batches(lambda: rule, "favourite")
    list(work.steps())
    assert [one.last_keys for one in rule.told[0][0]] == [0, 0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], r"Fixed.choose = \[\]: must be 1 to 2 places"),
        ([0, 1, 2], r"\[0, 1, 2\]: must be 1 to 2 places"),
        ([1, 1], r"\[1, 1\]: must name no place twice"),
        ([3], r"\[3\]: must be places in \[0, 3\)"),
        ([-1], r"\[-1\]: must be places in \[0, 3\)"),
        ([0.5], r"\[0.5\]: must be places in \[0, 3\)"),
    ],
)
def test_an_answer_that_is_none_is_named(answer: list[Any], message: str) -> None:
    work = work_of([(1, 2)] * 3, 2, waiting=3)
    work.form_batches(lambda: Fixed(answer), "fixed")
    with pytest.raises(ValueError, match=message):
        list(work.steps())


def test_the_request_table_has_the_steps_waited() -> None:
    work, clock = work_of([(1, 2)] * 3, 1, waiting=3), RequestClock()
    for step in work.steps():
        assert isinstance(step, WorkStep)
        clock.end_step(step, 0, 0)
    places = [REQUEST_COLUMNS.index(name) for name in ("wait_steps", "longest_wait_steps")]
    rows = {row[0]: tuple(row[place] for place in places) for row in clock.table.rows}
    assert rows == {0: (2, 2), 1: (3, 2), 2: (4, 2)}


# -- the rules -------------------------------------------------------------------------------------


def bits(*keys: int) -> int:
    return sum(1 << key for key in keys)


def told(*keys: int) -> list[Waiting]:
    return [Waiting(number, 0, 1, one) for number, one in enumerate(keys)]


def test_union_begins_with_the_longest_waiting_and_adds_what_is_most_alike() -> None:
    waiting = told(bits(0, 1, 2), bits(6, 7, 8), bits(0, 1, 9), bits(0, 2, 3), bits(2, 3))
    # After 0: 4 adds one (3), 2 one (9), 3 one (3): of equals the first. Then 0 1 2 9: 3 and 4 add one.
    assert UnionFormer().choose(waiting, 2) == [0, 2]
    assert UnionFormer().choose(waiting, 4) == [0, 2, 3, 4]
    assert UnionFormer().choose(waiting, 1) == [0]


def test_union_is_greedy_about_the_whole_union_not_about_pairs() -> None:
    waiting = told(bits(0, 1), bits(0, 2), bits(2, 3), bits(1, 4, 5))
    assert UnionFormer().choose(waiting, 3) == [0, 1, 2]  # 3 has more in common with 0 than 2 has


def test_union_starts_from_those_that_are_due() -> None:
    waiting = told(bits(0, 1), bits(4, 5), bits(5, 6))
    due = [Waiting(9, 5, 1, bits(5, 6, 7))]
    assert UnionFormer().choose(waiting, 1, due) == [2]
    assert UnionFormer().choose(waiting, 2, due) == [2, 1]


def test_an_unknown_request_adds_nothing() -> None:
    assert UnionFormer().choose(told(bits(0), bits(0, 1), 0), 2) == [0, 2]


def test_the_oracle_looks_at_the_token_to_come() -> None:
    # One layer, top-1: request 0 uses 0 then 1; request 1 uses 0 then 2; request 2 uses 3 then 1.
    prompt_and_token = [([[[a]]], [[[b]]]) for a, b in ((0, 1), (0, 2), (3, 1))]
    found = {}
    for rule in ("causal", "oracle"):
        work = Workload(make_trace(prompt_and_token, 4), 2, waiting=3)
        made = UnionFormer() if rule == "causal" else OracleUnion(work.token_keys())
        work.form_batches(lambda made=made: made, rule)
        found[rule] = decoding(work)[0]
    assert found == {"causal": (0, 1), "oracle": (0, 2)}


def test_token_keys_have_a_bit_for_each_key() -> None:
    ids = np.array([[[0, 3], [1, NO_EXPERT]], [[2, 1], [0, 3]]], dtype=np.uint16)
    work = Workload(trace_of_ids(ids, [(1, 1)], 4))
    keys = TokenKeys(work.trace, work.requests)
    assert keys.of_row(0) == bits(0, 3, 4 + 1)
    assert keys.of_token(0, 1) == bits(1, 2, 4 + 0, 4 + 3)
