"""What holds whichever requests decode together, over random work, places, bounds and rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.lockstep import run_lockstep
from sim.policies.base import BatchFormer, PolicySet, Waiting
from sim.policies.classic import LRU
from sim.policies.former import OracleUnion, UnionFormer
from sim.policies.oracle import Belady, NextUse
from sim.requests import REQUEST_COLUMNS, RequestClock
from sim.schedule import WorkStep
from sim.timeline import Timeline
from sim.types import LayerPlan
from sim.workload import Workload
from tests.strategies import LAW, ConstantCosts, Memory, all_events, build, trace_of_ids

MANY = settings(LAW, max_examples=150)
NUM_EXPERTS = 6


class AnyFew(BatchFormer):
    """Runs some of those that wait, by chance, maybe fewer than fit."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def choose(
        self, waiting: Sequence[Waiting], size: int, due: Sequence[Waiting] = ()
    ) -> Sequence[int]:
        count = int(self._rng.integers(0 if due else 1, size + 1))
        found: list[int] = self._rng.permutation(len(waiting))[:count].tolist()
        return found


class Last(BatchFormer):
    """Runs only the one that has waited least: the most unfair rule."""

    def choose(
        self, waiting: Sequence[Waiting], size: int, due: Sequence[Waiting] = ()
    ) -> Sequence[int]:
        return [len(waiting) - 1]


RULES: dict[str, Callable[[Workload, int], BatchFormer]] = {
    "chance": lambda _, seed: AnyFew(seed),
    "last": lambda *_: Last(),
    "union": lambda *_: UnionFormer(),
    "oracle": lambda work, _: OracleUnion(work.token_keys()),
}


@dataclass(frozen=True)
class Formed:
    """Work, and how long a request of it may wait at most; None: there is no bound."""

    work: Workload
    bound: int | None


@st.composite
def formed(draw: st.DrawFn, closed: bool = False) -> Formed:
    """Draw work of up to 7 requests of which more may be in memory than a step decodes."""
    length = st.tuples(st.integers(0, 4), st.integers(0, 6)).filter(lambda pair: sum(pair) > 0)
    lengths = draw(st.lists(length, min_size=1, max_size=7))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    size = (sum(map(sum, lengths)), 2, 2)
    ids = np.argsort(rng.random((*size[:2], NUM_EXPERTS)), axis=-1)[..., :2].astype(np.uint16)
    batch = draw(st.integers(1, 3))
    places = draw(st.none() | st.integers(batch, 7))
    max_wait = draw(st.none() | st.integers(0, 4))
    work = Workload(
        trace_of_ids(ids, lengths, NUM_EXPERTS),
        batch,
        prefill_chunk=draw(st.none() | st.integers(1, 5)),
        mixed=draw(st.booleans()),
        arrivals="closed" if closed else draw(st.sampled_from(["closed", "poisson"])),
        rate_per_s=draw(st.sampled_from([1e7, 1e8])),
        repeat=draw(st.integers(1, 2)),
        kv_limit_tokens=draw(st.none() | st.integers(6, 25)),
        waiting=places,
        max_wait_steps=max_wait,
    )
    rule, seed = draw(st.none() | st.sampled_from(sorted(RULES))), draw(st.integers(0, 9))
    if rule is not None:
        work.form_batches(lambda: RULES[rule](work, seed), (rule, seed))
    return Formed(work, _bound(batch, places or batch, max_wait, rule is not None))


def _bound(batch: int, places: int, max_wait: int | None, has_rule: bool) -> int | None:
    if places == batch:
        return 0
    if not has_rule or max_wait == 0:
        return (places - 1) // batch
    return None if max_wait is None else max_wait + (places - 2) // batch


def play(work: Workload, step_ns: int) -> tuple[list[WorkStep], list[dict[str, Any]]]:
    """Return the steps and the request table of a run whose steps take ``step_ns``."""
    schedule, clock, now_ns, steps = work.schedule(), RequestClock(), 0, list[WorkStep]()
    while (step := schedule.next(now_ns)) is not None:
        if isinstance(step, int):
            now_ns = step
            continue
        steps.append(step)
        schedule.ended(step, now_ns + step_ns)
        clock.end_step(step, now_ns, now_ns + step_ns)
        now_ns += step_ns
    return steps, [dict(zip(REQUEST_COLUMNS, row, strict=True)) for row in clock.table.rows]


@MANY
@given(formed(), st.sampled_from([0, 7, 50]))
def test_each_token_is_processed_once_and_in_order(drawn: Formed, step_ns: int) -> None:
    work, found = drawn.work, defaultdict[int, list[int]](list)
    for step in play(work, step_ns)[0]:
        for request, row in zip(step.info.request_ids, step.rows.tolist(), strict=True):
            found[request].append(row)
    fitting = [request for request in work.requests if work.limits.fits_alone(request)]
    assert found == {request.request_id: request.rows.tolist() for request in fitting}


@MANY
@given(formed(), st.sampled_from([0, 7, 50]))
def test_a_batch_is_never_larger_than_its_size_nor_memory_fuller(
    drawn: Formed, step_ns: int
) -> None:
    work, done = drawn.work, defaultdict[int, int](int)
    prompts = {request.request_id: request.num_prompt for request in work.requests}
    for step in play(work, step_ns)[0]:
        info = step.info
        decoded = info.request_ids[: info.num_decoding]
        assert len(decoded) <= work.batch_size
        assert len(set(decoded)) == len(decoded)
        assert all(done[request] >= prompts[request] for request in decoded)
        for request in info.request_ids:
            done[request] += 1
        assert len(done) <= work.limits.places
        assert info.held_kv_tokens == sum(done.values()) <= work.peak_kv_tokens()
        for request in step.finished:
            del done[request]


@MANY
@given(formed(), st.sampled_from([0, 7, 50]))
def test_nobody_waits_longer_than_the_bound(drawn: Formed, step_ns: int) -> None:
    """Waits are counted here token by token, from the steps alone."""
    steps, table = play(drawn.work, step_ns)
    decodes, last = 0, dict[int, int]()
    waits = defaultdict[int, list[int]](lambda: [0])
    for step in steps:
        info = step.info
        for one in step.admitted:
            last.setdefault(one.request_id, decodes)
        for request in info.request_ids[: info.num_decoding]:
            if decodes > last[request]:
                waits[request].append(decodes - last[request])
        decodes += info.num_decoding > 0
        for request in info.request_ids:
            last[request] = decodes
    for row in table:
        of_one = waits[row["request_id"]]
        assert (row["wait_steps"], row["longest_wait_steps"]) == (sum(of_one), max(of_one))
        assert drawn.bound is None or max(of_one) <= drawn.bound


@MANY
@given(formed(closed=True))
def test_a_closed_loop_has_the_same_steps_whatever_the_clock(drawn: Formed) -> None:
    work = drawn.work
    slow, fast = play(work, 50)[0], play(work, 1)[0]
    assert [step.info for step in slow] == [step.info for step in fast]
    assert [step.info for step in work.steps()] == [step.info for step in fast]
    peak = max((step.info.held_kv_tokens for step in fast), default=0)
    assert (len(fast), peak) == (work.num_steps, work.peak_kv_tokens())


@MANY
@given(formed(), st.sampled_from([0, 7]))
def test_the_same_work_has_the_same_steps(drawn: Formed, step_ns: int) -> None:
    first, second = play(drawn.work, step_ns), play(drawn.work, step_ns)
    assert [step.info for step in first[0]] == [step.info for step in second[0]]
    assert first[1] == second[1]


@settings(LAW, max_examples=40)
@given(formed(closed=True), st.integers(1, 5))
def test_the_timeline_runs_the_steps_that_the_optimum_was_told(drawn: Formed, slots: int) -> None:
    """So that an oracle's future is the run's own, and Belady stays a bound."""
    work = drawn.work
    sizes = Memory(slots + 3, per_layer=True)
    events, costs = all_events(work), ConstantCosts()
    rates = list[int]()
    for make in (LRU, lambda: Belady(NextUse(events), bypass=True, warm=True)):
        policies = PolicySet([make() for _ in range(work.num_layers)])
        plans = list[LayerPlan]()
        Timeline(work, build(work, policies, sizes, costs), costs, on_plan=plans.append).run()
        seen = [tuple(plan.routing.experts) for plan in plans]
        assert seen == [tuple(routing.experts) for routing in events]
        counter = run_lockstep(work, build(work, PolicySet([make(), make()]), sizes, costs))
        rates.append(sum(row[counter.table.columns.index("hits")] for row in counter.rows))
    assert rates[0] <= rates[1]
