"""The steps of continuous batching, each written down by hand: who is in which step, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sim.arrivals import ClosedLoop, OpenLoop
from sim.schedule import Limits, Schedule, WorkStep
from sim.tiling import Request
from sim.types import Phase

STEP_NS = 10


def requests(*lengths: tuple[int, int]) -> list[Request]:
    """Return requests 0, 1, ... of (prompt rows, decoded rows); request n has rows 100 n and on."""
    return [
        Request(number, np.arange(prompt + decode) + 100 * number, prompt, number)
        for number, (prompt, decode) in enumerate(lengths)
    ]


def play(
    lengths: Sequence[tuple[int, int]],
    batch_size: int = 1,
    times_ns: Sequence[int] | None = None,
    **limits: Any,
) -> tuple[list[str], Schedule, list[WorkStep]]:
    """Play a schedule whose steps take 10 ns each; return a line a step: start, phase, rows."""
    schedule = Schedule(
        requests(*lengths),
        ClosedLoop(min(batch_size, len(lengths))) if times_ns is None else OpenLoop(times_ns),
        Limits(batch_size, **limits),
    )
    lines, steps, now_ns = list[str](), list[WorkStep](), 0
    while (step := schedule.next(now_ns)) is not None:
        if isinstance(step, int):
            assert step > now_ns, "time goes on"
            now_ns = step
            continue
        rows = " ".join(map(str, step.rows.tolist()))
        lines.append(f"{now_ns} {step.info.phase.name.lower()} {rows}")
        steps.append(step)
        now_ns += STEP_NS
        schedule.ended(step, now_ns)
    return lines, schedule, steps


def test_one_request_is_its_prompt_and_then_a_token_a_step() -> None:
    lines, _, steps = play([(3, 2)])
    assert lines == ["0 prefill 0 1 2", "10 decode 3", "20 decode 4"]
    assert [step.admitted for step in steps] == [((0, 0, 3),), (), ()]
    assert [step.yields for step in steps] == [(0,), (0,), (0,)]
    assert [step.finished for step in steps] == [(), (), (0,)]
    assert [step.info.kv_tokens for step in steps] == [3, 4, 5]
    assert [step.info.attention_pairs for step in steps] == [1 + 2 + 3, 4, 5]
    assert [step.info.num_outputs for step in steps] == [1, 1, 1]


def test_a_prompt_comes_in_chunks_of_which_the_last_yields() -> None:
    lines, _, steps = play([(5, 1)], prompt_tokens=2)
    assert lines == ["0 prefill 0 1", "10 prefill 2 3", "20 prefill 4", "30 decode 5"]
    assert [step.yields for step in steps] == [(), (), (0,), (0,)]
    assert [step.info.num_outputs for step in steps] == [0, 0, 1, 1]
    assert [len(step.admitted) for step in steps] == [1, 0, 0, 0]
    assert [step.info.kv_tokens for step in steps] == [2, 4, 5, 6]
    assert [step.info.attention_pairs for step in steps] == [1 + 2, 3 + 4, 5, 6]


def test_a_chunk_may_end_with_the_prompt() -> None:
    assert play([(4, 0)], prompt_tokens=2)[0] == ["0 prefill 0 1", "10 prefill 2 3"]


def test_chunks_of_their_own_hold_decoding_up() -> None:
    lines, _, _ = play([(1, 3), (3, 1)], batch_size=2, prompt_tokens=2)
    assert lines == [
        "0 prefill 0",
        "10 prefill 100 101",
        "20 prefill 102",
        "30 decode 1 103",
        "40 decode 2",
        "50 decode 3",
    ]


def test_a_mixed_step_decodes_and_takes_prompt_tokens_as_a_rest() -> None:
    lines, _, steps = play([(1, 3), (3, 1)], batch_size=2, prompt_tokens=2, mixed=True)
    assert lines == [
        "0 prefill 0 100",  # the chunk is shared, first come first served
        "10 mixed 1 101 102",
        "20 decode 2 103",
        "30 decode 3",
    ]
    mixed = steps[1]
    assert mixed.info.request_ids == (0, 1, 1)
    assert mixed.yields == (0, 1)
    assert (mixed.info.num_tokens, mixed.info.num_sequences, mixed.info.num_outputs) == (3, 2, 2)
    assert mixed.info.kv_tokens == 2 + 3
    assert mixed.info.attention_pairs == 2 + (2 + 3)


def test_mixed_without_a_chunk_takes_whole_prompts() -> None:
    assert play([(3, 1), (2, 1)], batch_size=2, mixed=True)[0] == [
        "0 prefill 0 1 2 100 101",
        "10 decode 3 102",
    ]


def test_a_place_becomes_free_when_a_request_ends() -> None:
    lines, _, steps = play([(1, 1), (1, 4), (2, 1)], batch_size=2)
    assert lines == [
        "0 prefill 0",
        "10 prefill 100",
        "20 decode 1 101",  # request 0 leaves
        "30 prefill 200 201",
        "40 decode 102 202",
        "50 decode 103",
        "60 decode 104",
    ]
    assert [one for step in steps for one in step.admitted] == [(0, 0, 1), (1, 0, 1), (2, 30, 2)]
    assert [step.info.held_kv_tokens for step in steps] == [1, 2, 4, 4, 6, 4, 5]


def test_a_request_that_is_all_prompt_leaves_at_once() -> None:
    lines, _, steps = play([(2, 0), (1, 1)], batch_size=1)
    assert lines == ["0 prefill 0 1", "10 prefill 100", "20 decode 101"]
    assert steps[0].yields == steps[0].finished == (0,)


def test_a_request_without_a_prompt_begins_by_decoding_once_prompts_are_done() -> None:
    lines, _, steps = play([(0, 2), (2, 1)], batch_size=2)
    assert lines == ["0 prefill 100 101", "10 decode 0 102", "20 decode 1"]
    assert [step.admitted for step in steps] == [((1, 0, 2),), ((0, 0, 0),), ()]


def test_a_mixed_step_lets_a_request_without_a_prompt_decode_at_once() -> None:
    lines, _, steps = play([(2, 1), (0, 2)], batch_size=2, prompt_tokens=4, mixed=True)
    assert lines == ["0 mixed 100 0 1", "10 decode 101 2"]
    assert steps[0].admitted == ((0, 0, 2), (1, 0, 0))


def test_open_arrivals_leave_gaps_and_come_together() -> None:
    lines, _, steps = play([(1, 1), (1, 1), (1, 0)], batch_size=2, times_ns=[5, 100, 100])
    assert lines == [
        "5 prefill 0",
        "15 decode 1",
        "100 prefill 100",
        "110 prefill 200",
        "120 decode 101",
    ]
    assert [one.arrival_ns for step in steps for one in step.admitted] == [5, 100, 100]


def test_one_that_arrives_during_a_step_waits_for_its_end() -> None:
    lines, _, steps = play([(1, 3), (1, 0)], batch_size=2, times_ns=[0, 12])
    assert lines == ["0 prefill 0", "10 decode 1", "20 prefill 100", "30 decode 2", "40 decode 3"]
    assert steps[2].admitted == ((1, 12, 1),)


def test_the_kv_limit_makes_a_request_wait_and_those_behind_it() -> None:
    lines, schedule, _ = play([(2, 2), (3, 1), (1, 0)], batch_size=3, kv_tokens=7)
    assert lines == [
        "0 prefill 0 1",  # 4 of 7; request 1 needs 4 more, and request 2, which would fit, waits too
        "10 decode 2",
        "20 decode 3",
        "30 prefill 100 101 102",
        "40 prefill 200",
        "50 decode 103",
    ]
    assert schedule.refused == []


def test_what_can_never_fit_is_refused_when_it_arrives() -> None:
    lines, schedule, steps = play([(2, 1), (4, 4), (1, 1)], batch_size=1, kv_tokens=5)
    assert lines == ["0 prefill 0 1", "10 decode 2", "20 prefill 200", "30 decode 201"]
    assert schedule.refused == [(1, 20, 4, 5)]
    assert steps[2].admitted == ((2, 20, 1),), "the refused one took up no place"


def test_all_may_be_refused() -> None:
    lines, schedule, _ = play([(4, 4), (9, 9)], batch_size=2, times_ns=[3, 8], kv_tokens=7)
    assert lines == []
    assert schedule.refused == [(0, 3, 4, 5), (1, 8, 9, 10)]


def test_a_driver_must_end_a_step_before_the_next() -> None:
    schedule = Schedule(requests((1, 1)), ClosedLoop(1), Limits(1))
    assert isinstance(schedule.next(0), WorkStep)
    with pytest.raises(RuntimeError, match="has not ended"):
        schedule.next(0)


def test_a_sequence_of_steps_without_decoding_is_never_mixed() -> None:
    _, _, steps = play([(4, 0), (4, 0)], batch_size=2, prompt_tokens=3, mixed=True)
    assert {step.info.phase for step in steps} == {Phase.PREFILL}
    assert [step.rows.tolist() for step in steps] == [[0, 1, 2], [3, 100, 101], [102, 103]]
