"""The timeline by hand: batches, micro-batches, requests, ties in time, and the seam to SimPy."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import simpy
from numpy.typing import NDArray

from sim.clock import COMPUTE_ENDED, LOAD_ENDED, PLAN, Event
from sim.policies.classic import LFU, LRU
from sim.types import LayerRouting, Service, View
from sim.workload import Workload
from tests.doubles import Preloaded, ScriptedPlacement, ScriptedPrefetch, SplitTokens
from tests.strategies import (
    ConstantCosts,
    Memory,
    Run,
    Token,
    make_trace,
    one_request,
    only,
    run_timeline,
)

ALL = Memory(slots=8)
EVERY_KEY = range(8)


def run(tokens: Sequence[Token], keys: Sequence[int], costs: ConstantCosts, **parts: Any) -> Run:
    """Run one request with ``keys`` in memory at first."""
    return run_timeline(one_request(tokens), only(Preloaded(keys), **parts), ALL, costs)


def test_micro_batches_pay_a_kernel_for_each_group_that_uses_the_expert() -> None:
    prompt = [
        [[0, 1]],
        [[0, 1]],
        [[0, 2]],
        [[3, 1]],
    ]  # tokens 0 and 2 are one group, 1 and 3 the other
    workload = Workload(make_trace([(prompt, [])], 4))
    costs = ConstantCosts(gpu=10, gpu_token=1)
    done = run_timeline(workload, only(Preloaded(range(4)), repack=SplitTokens()), ALL, costs)
    done.check_accounts()
    assert done.lines()[1:5] == [
        "5 28 GPU EXPERT 0 0",  # tokens 0, 2 | 1: (10 + 2) + (10 + 1)
        "28 51 GPU EXPERT 0 1",  # 0 | 1, 3
        "51 62 GPU EXPERT 0 2",  # 2 | -
        "62 73 GPU EXPERT 0 3",  # - | 3
    ]


def test_a_batch_loads_the_union_once_and_computes_by_tokens() -> None:
    requests = [([[[0], [0]]], [[[1], [0]]]), ([[[0], [0]]], [[[1], [2]]])]
    workload = Workload(make_trace(requests, 4), batch_size=2)
    costs = ConstantCosts(gpu=0, gpu_token=10)
    done = run_timeline(workload, only(LRU()), ALL, costs)
    done.check_accounts()
    assert done.lines()[-8:] == [  # the third step decodes a token of each
        "266 271 GPU DENSE 0 -1",
        "271 371 H2D LOAD 0 1",
        "371 391 GPU EXPERT 0 1",
        "391 396 GPU DENSE 1 -1",
        "396 406 GPU EXPERT 1 0",
        "396 496 H2D LOAD 1 2",
        "496 506 GPU EXPERT 1 2",
        "506 509 GPU STEP -1 -1",
    ]
    assert [step["num_tokens"] for step in done.steps()] == [1, 1, 2]
    assert [step["accesses"] for step in done.steps()] == [2, 2, 3]


def test_request_rows_give_ttft_and_tpot() -> None:
    token: Token = [[0], [0]]
    requests = [([token], [token] * 3), ([token, token], [token]), ([token], [])]
    workload = Workload(make_trace(requests, 4), batch_size=2)
    done = run_timeline(workload, only(Preloaded(EVERY_KEY)), ALL, ConstantCosts())
    # prefill 0 | prefill 1 | decode 0, 1 | prefill 2 | decode 0 | decode 0: each 2 * (5 + 10) + 3
    assert [step["end_ns"] for step in done.steps()] == [33, 66, 99, 132, 165, 198]
    assert done.tables.requests.rows == [
        # request, arrival, start, first token, end, prompt, output, ttft, tpot, queue, waits, outcome
        (1, 0, 33, 66, 99, 2, 2, 66, 33, 33, 0, 0, 0),  # a place was free from the start
        (2, 99, 99, 132, 132, 1, 1, 33, 0, 0, 0, 0, 0),
        (0, 0, 0, 33, 198, 1, 4, 33, 55, 0, 0, 0, 0),
    ]


@pytest.mark.parametrize(("load", "hits", "late"), [(15, 2, 0), (16, 1, 1)])
def test_a_load_that_ends_at_the_time_of_a_plan_is_a_hit(load: int, hits: int, late: int) -> None:
    script = ScriptedPrefetch({0: [4]})  # planned at 5; the next plan is at 20
    done = run([[[0], [0]]], [0], ConstantCosts(load=load), prefetch=script)
    step = done.steps()[0]
    assert (step["hits"], step["late_hits"]) == (hits, late)


def test_a_load_that_ends_with_a_step_is_known_when_the_next_begins() -> None:
    seen: list[bool] = []

    class Watcher(ScriptedPrefetch):
        def begin_step(self, view: View) -> None:
            seen.append(view.is_resident(7))

    token: Token = [[0], [0]]
    script: Mapping[int, Sequence[int]] = {1: [7]}  # planned at 20; the step ends at 33
    run([token] * 2, [0, 4], ConstantCosts(load=13), prefetch=Watcher(script))
    run([token] * 2, [0, 4], ConstantCosts(load=14), prefetch=Watcher(script))
    assert seen == [False, True, False, False]


def test_a_repack_that_loses_a_token_is_refused() -> None:
    class Careless(SplitTokens):
        def repack(self, routing: LayerRouting, view: View) -> Sequence[NDArray[np.intp]]:
            return super().repack(routing, view)[:1]

    workload = Workload(make_trace([([[[0]], [[0]]], [])], 4))
    with pytest.raises(ValueError, match="Careless"):
        run_timeline(workload, only(LRU(), repack=Careless()), ALL, ConstantCosts())


def test_staged_experts_do_not_hold_up_those_that_take_turns() -> None:
    """5 misses, 4 slots: 0 and 1 stay to the end, and two slots are free for 2 and 3 at once."""
    workload = Workload(make_trace([([[[0, 1, 2, 3, 4]]], [])], 8))
    memory = Memory(slots=0, staging_slots=4)
    done = run_timeline(workload, only(LFU()), memory, ConstantCosts(gpu=500))
    assert [line for line in done.lines() if "H2D" in line] == [
        "5 105 H2D BYPASS 0 0",
        "105 205 H2D BYPASS 0 1",
        "205 305 H2D BYPASS 0 2",
        "305 405 H2D BYPASS 0 3",
        "1605 1705 H2D BYPASS 0 4",  # 2 computes from 1105 to 1605
    ]


def test_only_those_that_may_stay_hold_their_slot() -> None:
    """As before, but of the 5 misses only 0 may stay: three slots are free for 1, 2 and 3."""
    workload = Workload(make_trace([([[[0, 1, 2, 3, 4]]], [])], 8))
    memory = Memory(slots=0, staging_slots=4)
    used_once = ScriptedPlacement(dict.fromkeys(range(1, 5), Service.BYPASS))
    policies = only(LFU(), placement=used_once)
    done = run_timeline(workload, policies, memory, ConstantCosts(gpu=500))
    assert "1105 1205 H2D BYPASS 0 4" in done.lines()  # 1 computes from 605 to 1105


def test_a_request_may_begin_with_a_decoded_token() -> None:
    workload = Workload(make_trace([([], [[[0], [0]]] * 2)], 4))
    done = run_timeline(workload, only(Preloaded(EVERY_KEY)), ALL, ConstantCosts())
    assert [step["num_tokens"] for step in done.steps()] == [1, 1]


def test_events_at_one_time_come_load_compute_plan() -> None:
    assert LOAD_ENDED < COMPUTE_ENDED < PLAN
    env, order = simpy.Environment(), []
    for name, priority in (("plan", PLAN), ("compute", COMPUTE_ENDED), ("load", LOAD_ENDED)):
        env.schedule(Event(lambda _, name=name: order.append(name)), priority, 7)  # type: ignore[arg-type]
    env.run()
    assert order == ["load", "compute", "plan"]


def test_simpy_still_takes_our_own_event_objects() -> None:
    """The seam the timeline leans on; if this fails, pin SimPy or change sim/link.py's Event."""
    assert list(inspect.signature(simpy.Environment.schedule).parameters) == [
        "self",
        "event",
        "priority",
        "delay",
    ]
    env, log = simpy.Environment(), []
    event = Event(lambda e: log.append(("callback", env.now)))
    assert event._ok is True
    assert event._value is None
    assert isinstance(event.callbacks, list)

    def process() -> Any:
        env.schedule(event, LOAD_ENDED, 5)  # type: ignore[arg-type]
        value = yield event
        log.append(("process", env.now))
        assert value is event._value

    env.run(until=env.process(process()))
    assert log == [("callback", 5), ("process", 5)]
    assert event.callbacks is None, "SimPy marks a processed event by taking its callbacks away"
    assert type(env.now) is int
