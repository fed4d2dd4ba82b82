"""What every schedule must hold, over random requests, limits and arrivals."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.requests import REQUEST_COLUMNS, Outcome, RequestClock
from sim.schedule import WorkStep
from sim.types import Phase
from sim.workload import Workload
from tests.strategies import LAW, trace_of_ids

NUM_EXPERTS = 4
MANY = settings(LAW, max_examples=150)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Draw work of up to 6 requests, with any limits, closed or open."""
    length = st.tuples(st.integers(0, 7), st.integers(0, 6)).filter(lambda pair: sum(pair) > 0)
    lengths = draw(st.lists(length, min_size=1, max_size=6))
    ids = np.zeros((sum(map(sum, lengths)), 1, 1), dtype=np.uint16)
    open_loop = draw(st.booleans())
    return Workload(
        trace_of_ids(ids, lengths, NUM_EXPERTS),
        draw(st.integers(1, 4)),
        prefill_chunk=draw(st.none() | st.integers(1, 5)),
        mixed=draw(st.booleans()),
        arrivals="poisson" if open_loop else "closed",
        rate_per_s=draw(st.sampled_from([1e7, 1e8, 1e9])),
        seed=draw(st.integers(0, 9)),
        repeat=draw(st.integers(1, 2)),
        kv_limit_tokens=draw(st.none() | st.integers(1, 20)),
    )


def play(workload: Workload, step_ns: int) -> tuple[list[WorkStep], list[tuple[int, ...]]]:
    """Return the steps and the request table of a run whose steps take ``step_ns``."""
    schedule, clock, now_ns, steps = workload.schedule(), RequestClock(), 0, list[WorkStep]()
    while (step := schedule.next(now_ns)) is not None:
        if isinstance(step, int):
            assert step > now_ns
            now_ns = step
            continue
        steps.append(step)
        schedule.ended(step, now_ns + step_ns)
        clock.end_step(step, now_ns, now_ns + step_ns)
        now_ns += step_ns
    for refused in schedule.refused:
        clock.refuse(refused)
    return steps, clock.table.rows


@MANY
@given(workloads(), st.sampled_from([0, 7, 50]))
def test_each_row_is_processed_once_and_in_order(workload: Workload, step_ns: int) -> None:
    steps, _ = play(workload, step_ns)
    found: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        for request, row in zip(step.info.request_ids, step.rows.tolist(), strict=True):
            found[request].append(row)
    fitting = {r.request_id: r.rows.tolist() for r in workload.requests if fits(workload, r.rows)}
    assert found == fitting


def fits(workload: Workload, rows: np.ndarray) -> bool:
    limit = workload.limits.kv_tokens
    return limit is None or len(rows) <= limit


@MANY
@given(workloads(), st.sampled_from([0, 7, 50]))
def test_limits_hold_in_every_step(workload: Workload, step_ns: int) -> None:
    chunk, limits = workload.limits.prompt_tokens, workload.limits
    lengths = {r.request_id: len(r.rows) for r in workload.requests}
    prompts = {r.request_id: r.num_prompt for r in workload.requests}
    done, running = dict.fromkeys(lengths, 0), set[int]()
    for step in play(workload, step_ns)[0]:
        running |= {one.request_id for one in step.admitted}
        assert set(step.info.request_ids) <= running
        assert len(running) <= limits.batch_size
        if limits.kv_tokens is not None:
            assert sum(lengths[request] for request in running) <= limits.kv_tokens
        prompt_tokens = sum(done_before(done, prompts, step.info.request_ids))
        if chunk is not None:
            assert prompt_tokens <= chunk
            assert step.info.num_tokens <= chunk + limits.batch_size
        if not limits.mixed:
            assert prompt_tokens in (0, step.info.num_tokens)
            assert step.info.phase != Phase.MIXED
        running -= set(step.finished)
    assert not running


def done_before(done: dict[int, int], prompts: dict[int, int], ids: tuple[int, ...]) -> list[bool]:
    """Return of each token whether it is of a prompt, and count it as done."""
    kinds = []
    for request in ids:
        kinds.append(done[request] < prompts[request])
        done[request] += 1
    return kinds


@MANY
@given(workloads(), st.sampled_from([0, 7, 50]))
def test_kv_and_attention_are_those_of_a_count_token_by_token(
    workload: Workload, step_ns: int
) -> None:
    done: dict[int, int] = defaultdict(int)
    peak = 0
    for step in play(workload, step_ns)[0]:
        info, pairs = step.info, 0
        for request in info.request_ids:
            done[request] += 1
            pairs += done[request]  # a token attends to itself and all before it
        assert info.attention_pairs == pairs
        assert info.kv_tokens == sum(done[request] for request in set(info.request_ids))
        assert info.held_kv_tokens == sum(done.values())
        assert info.num_sequences == len(set(info.request_ids))
        assert info.num_outputs == len(step.yields)
        peak = max(peak, info.held_kv_tokens)
        for request in step.finished:
            del done[request]
    assert workload.is_open or peak == workload.peak_kv_tokens()
    assert peak <= workload.peak_kv_tokens()


@MANY
@given(workloads(), st.sampled_from([1, 7, 50]))
def test_every_request_has_a_row_whose_times_are_in_order(workload: Workload, step_ns: int) -> None:
    _, rows = play(workload, step_ns)
    table = [dict(zip(REQUEST_COLUMNS, row, strict=True)) for row in rows]
    assert sorted(row["request_id"] for row in table) == sorted(
        request.request_id for request in workload.requests
    )
    by_id = {request.request_id: request for request in workload.requests}
    starts = [row["start_ns"] for row in sorted(table, key=lambda row: row["request_id"])]
    for row in table:
        request = by_id[row["request_id"]]
        assert (row["prompt_tokens"], row["output_tokens"]) == (
            request.num_prompt,
            request.num_outputs,
        )
        if row["outcome"] == Outcome.REFUSED:
            assert not fits(workload, request.rows)
            continue
        assert row["arrival_ns"] <= row["start_ns"] < row["first_token_ns"] <= row["end_ns"]
        assert row["queue_ns"] == row["start_ns"] - row["arrival_ns"]
        assert row["ttft_ns"] == row["first_token_ns"] - row["arrival_ns"]
    if all(request.num_prompt for request in workload.requests):
        came = [start for start in starts if start >= 0]
        assert came == sorted(came), "first come, first served"


@MANY
@given(workloads(), st.sampled_from([0, 7]))
def test_the_same_work_has_the_same_schedule(workload: Workload, step_ns: int) -> None:
    first, second = play(workload, step_ns), play(workload, step_ns)
    assert [step.info for step in first[0]] == [step.info for step in second[0]]
    assert first[1] == second[1]


@MANY
@given(workloads())
def test_a_closed_loop_does_not_depend_on_the_clock(workload: Workload) -> None:
    if workload.is_open:
        assert workload.num_steps is None
        return
    slow, fast = play(workload, 50)[0], play(workload, 1)[0]
    assert [step.info for step in slow] == [step.info for step in fast]
    assert [step.info for step in workload.steps()] == [step.info for step in fast]
    assert workload.num_steps == len(fast)
