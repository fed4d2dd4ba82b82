"""Batches, prompts in chunks, arrivals, and KV cache that takes memory from experts, by hand.

The figures that hold unless a test says otherwise stand at the head of tests/hand.py.
"""

from __future__ import annotations

from pathlib import Path

from sim.hardware import Hardware
from sim.kv import JointBudget
from sim.policies.classic import LRU, OnDemand
from sim.types import Phase, Service
from sim.workload import Workload
from tests.doubles import Preloaded, ScriptedPlacement, ScriptedPrefetch, SplitTokens
from tests.hand import EVERY_KEY, ByteCosts, GroupedCosts, HandRun, play
from tests.strategies import Token, make_trace, only

PLAIN: Token = [[0], [0]]
"""A token of expert 0 in both layers; from GPU memory a step of it takes 5 + 10 + 5 + 10 + 3 = 33."""


def shifted(lines: list[str], by_ns: int) -> list[str]:
    """Return log lines that happen ``by_ns`` later."""
    split = [line.split(" ", 2) for line in lines]
    return [f"{int(start) + by_ns} {int(end) + by_ns} {rest}" for start, end, rest in split]


HITS = [
    "0 5 GPU DENSE 0 -1",
    "5 15 GPU EXPERT 0 0",
    "15 20 GPU DENSE 1 -1",
    "20 30 GPU EXPERT 1 0",
    "30 33 GPU STEP -1 -1",
]
"""The step of a PLAIN token."""


# -- batches --------------------------------------------------------------------------------------


def test_a_batch_copies_the_union_once_and_groups_the_kernels_of_what_is_there() -> None:
    requests = [([PLAIN], [[[0, 1], [0]]]), ([PLAIN], [[[1, 2], [0]]])]
    workload = Workload(make_trace(requests, 4), batch_size=2)
    costs = GroupedCosts(gpu=10, gpu_token=10)  # 10 a set of kernels and 10 a token
    done = play(workload, only(Preloaded([0, 1, 4])), costs)
    prompt = [
        "0 5 GPU DENSE 0 -1",
        "5 25 GPU EXPERT 0 0",
        "25 30 GPU DENSE 1 -1",
        "30 50 GPU EXPERT 1 0",
        "50 53 GPU STEP -1 -1",
    ]
    assert done.lines() == [
        *prompt,
        *shifted(prompt, 53),
        "106 111 GPU DENSE 0 -1",
        "111 127 GPU EXPERT 0 0",  # one set for 3 tokens: 40, shared as 20 to 30 (alone each)
        "111 211 H2D LOAD 0 2",
        "127 151 GPU EXPERT 0 1",
        "211 231 GPU EXPERT 0 2",
        "231 236 GPU DENSE 1 -1",
        "236 266 GPU EXPERT 1 0",  # two tokens
        "266 269 GPU STEP -1 -1",
    ]
    assert [step["accesses"] for step in done.steps()] == [2, 2, 4]
    assert done.stalls(2) == {"link": 211 - 151}
    assert done.tables.requests.rows == [
        # request, arrival, start, first token, end, prompt, output, ttft, tpot, queue, waits, outcome
        (0, 0, 0, 53, 269, 1, 2, 53, 216, 0, 0, 0, 0),
        (1, 0, 53, 106, 269, 1, 2, 106, 163, 53, 0, 0, 0),
    ]


def test_micro_batches_each_pay_for_their_set_of_kernels() -> None:
    prompt: list[Token] = [[[0, 1], [0]], [[0, 1], [0]], [[0, 2], [0]], [[3, 1], [0]]]
    workload = Workload(make_trace([(prompt, [])], 4))
    costs = GroupedCosts(gpu=20, gpu_token=10)
    done = play(workload, only(Preloaded(EVERY_KEY), repack=SplitTokens()), costs)
    # Tokens 0, 2: experts 0 (twice), 1, 2. Tokens 1, 3: 0, 1 (twice), 3. Each set 20 + 40.
    # Alone 0 and 1 would cost (20 + 20) + (20 + 10) = 70 each, 2 and 3 20 + 10 = 30 each.
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "5 47 GPU EXPERT 0 0",  # 120 * 70 / 200
        "47 89 GPU EXPERT 0 1",
        "89 107 GPU EXPERT 0 2",  # 120 * 30 / 200
        "107 125 GPU EXPERT 0 3",
        "125 130 GPU DENSE 1 -1",
        "130 210 GPU EXPERT 1 0",  # (20 + 20) * 2
        "210 213 GPU STEP -1 -1",
    ]
    assert done.stalls() == {}


# -- prompts --------------------------------------------------------------------------------------


def test_every_chunk_of_a_prompt_streams_its_experts_again_through_the_slots() -> None:
    prompt: list[Token] = [[[0, 1], [0]], [[2, 3], [0]]] * 2
    workload = Workload(make_trace([(prompt, [])], 4), prefill_chunk=2)
    done = play(workload, only(OnDemand()), ByteCosts(gpu=150), staging_slots=2)
    chunk = [
        "0 5 GPU DENSE 0 -1",
        "5 105 H2D BYPASS 0 0",
        "105 255 GPU EXPERT 0 0",
        "105 205 H2D BYPASS 0 1",
        "255 405 GPU EXPERT 0 1",
        "255 355 H2D BYPASS 0 2",  # into the slot of 0
        "405 555 GPU EXPERT 0 2",
        "405 505 H2D BYPASS 0 3",  # into that of 1
        "555 705 GPU EXPERT 0 3",
        "705 710 GPU DENSE 1 -1",
        "710 810 H2D BYPASS 1 0",
        "810 960 GPU EXPERT 1 0",
        "960 963 GPU STEP -1 -1",
    ]
    assert done.lines() == [*chunk, *shifted(chunk, 963)]
    assert [step["demand_bytes"] for step in done.steps()] == [500, 500]
    assert done.stalls(0) == done.stalls(1) == {"link": 100 + 100}
    assert done.tables.requests.rows == [(0, 0, 0, 1926, 1926, 4, 1, 1926, 0, 0, 0, 0, 0)]


def test_a_mixed_step_decodes_and_takes_a_chunk_of_a_prompt() -> None:
    first: tuple[list[Token], list[Token]] = [PLAIN], [[[1], [0]], PLAIN, PLAIN]
    second: tuple[list[Token], list[Token]] = [PLAIN, [[1], [0]], [[2], [0]]], [PLAIN]
    trace = make_trace([first, second], 4)
    workload = Workload(trace, batch_size=2, prefill_chunk=2, mixed=True)
    done = play(workload, only(Preloaded(EVERY_KEY)), ByteCosts(gpu_token=1))  # 10 + 1 a token
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",  # the first token of each prompt
        "5 17 GPU EXPERT 0 0",
        "17 22 GPU DENSE 1 -1",
        "22 34 GPU EXPERT 1 0",
        "34 37 GPU STEP -1 -1",
        "37 42 GPU DENSE 0 -1",  # one decoded token and the other two of the second prompt
        "42 54 GPU EXPERT 0 1",
        "54 65 GPU EXPERT 0 2",
        "65 70 GPU DENSE 1 -1",
        "70 83 GPU EXPERT 1 0",
        "83 86 GPU STEP -1 -1",
        "86 91 GPU DENSE 0 -1",  # both decode
        "91 103 GPU EXPERT 0 0",
        "103 108 GPU DENSE 1 -1",
        "108 120 GPU EXPERT 1 0",
        "120 123 GPU STEP -1 -1",
        "123 128 GPU DENSE 0 -1",
        "128 139 GPU EXPERT 0 0",
        "139 144 GPU DENSE 1 -1",
        "144 155 GPU EXPERT 1 0",
        "155 158 GPU STEP -1 -1",
    ]
    phases = [Phase(step["phase"]) for step in done.steps()]
    assert phases == [Phase.PREFILL, Phase.MIXED, Phase.DECODE, Phase.DECODE]
    assert [step["num_tokens"] for step in done.steps()] == [2, 3, 2, 1]
    assert done.tables.requests.rows == [
        (1, 0, 0, 86, 123, 3, 2, 86, 37, 0, 0, 0, 0),
        (0, 0, 0, 37, 158, 1, 4, 37, (158 - 37) // 3, 0, 0, 0, 0),
    ]


# -- arrivals and admission -----------------------------------------------------------------------


def test_a_prefetch_goes_on_while_there_is_nothing_to_run(tmp_path: Path) -> None:
    times = tmp_path / "times.csv"
    times.write_text("arrival_s\n0\n2e-7\n")  # the second arrives at 200 ns
    trace = make_trace([([PLAIN], []), ([[[0], [1]]], [])], 4)
    workload = Workload(trace, arrivals=str(times))
    ahead = ScriptedPrefetch({0: [5]})
    done = play(workload, only(Preloaded([0, 4]), prefetch=ahead))
    assert done.lines() == [
        *HITS[:2],
        "5 105 H2D PREFETCH 1 1",
        *HITS[2:],
        "200 205 GPU DENSE 0 -1",
        "205 215 GPU EXPERT 0 0",
        "215 220 GPU DENSE 1 -1",
        "220 230 GPU EXPERT 1 1",
        "230 233 GPU STEP -1 -1",
    ]
    assert done.tables.idle_ns == 200 - 33
    assert [step["hits"] for step in done.steps()] == [2, 2]
    assert done.tables.requests.rows == [
        (0, 0, 0, 33, 33, 1, 1, 33, 0, 0, 0, 0, 0),
        (1, 200, 200, 233, 233, 1, 1, 33, 0, 0, 0, 0, 0),
    ]


def test_requests_wait_for_kv_memory_and_one_that_never_fits_is_refused() -> None:
    requests = [([PLAIN], [PLAIN] * 2), ([PLAIN], [PLAIN] * 4), ([PLAIN], [PLAIN])]
    workload = Workload(make_trace(requests, 4), batch_size=2, kv_limit_tokens=4)
    done = play(workload, only(Preloaded(EVERY_KEY)))
    # 3 tokens of the first; 5 of the second are too many; 2 of the third must wait for the first
    assert done.lines() == [line for step in range(5) for line in shifted(HITS, 33 * step)]
    assert [step["kv_tokens"] for step in done.steps()] == [1, 2, 3, 1, 2]
    assert done.tables.requests.rows == [
        (0, 0, 0, 33, 99, 1, 3, 33, 33, 0, 0, 0, 0),
        (2, 0, 99, 132, 165, 1, 2, 132, 33, 99, 0, 0, 0),
        (1, 0, -1, -1, 0, 1, 5, -1, -1, -1, -1, -1, 1),
    ]


# -- KV cache and experts in one memory -----------------------------------------------------------


def test_kv_takes_experts_as_it_grows_and_gives_room_back_when_a_request_ends() -> None:
    joint = JointBudget(500, 50, (1,), (100,))  # bytes: all, of one token; least for experts
    first: tuple[list[Token], list[Token]] = [PLAIN], [PLAIN, [[1], [0]]]
    second: tuple[list[Token], list[Token]] = [[[2], [0]]], []
    workload = Workload(make_trace([first, second], 4))
    done = play(workload, only(Preloaded([2, 1, 0, 4, 5])), joint=joint)
    assert done.lines() == [
        *HITS,  # 450 bytes for experts: 2, the least recently used, goes
        *shifted(HITS, 33),  # 400: no more need go
        "66 71 GPU DENSE 0 -1",  # 350: 1 goes
        "71 171 H2D LOAD 0 1",  # and is missed; 5 goes for it
        "171 181 GPU EXPERT 0 1",
        "181 186 GPU DENSE 1 -1",
        "186 196 GPU EXPERT 1 0",
        "196 199 GPU STEP -1 -1",
        "199 204 GPU DENSE 0 -1",  # one token is held: 450 again
        "204 304 H2D LOAD 0 2",  # so there is room for a fourth
        "304 314 GPU EXPERT 0 2",
        "314 319 GPU DENSE 1 -1",
        "319 329 GPU EXPERT 1 0",
        "329 332 GPU STEP -1 -1",
    ]
    assert [step["evictions"] for step in done.steps()] == [1, 0, 2, 0]
    assert list(done.offloader.residency.resident()) == [0, 1, 2, 4]
    assert [done.stalls(step) for step in range(4)] == [{}, {}, {"link": 100}, {"link": 100}]


def grow_with_prefetches_queued() -> HandRun:
    """Two prefetches are under way when KV grows to 2 tokens and wants the room of one expert."""
    joint = JointBudget(600, 100, (1,), (100,))
    tokens: list[Token] = [PLAIN, [[0], [2]], [[0], [3]]]
    ahead = ScriptedPrefetch({0: [6, 7]})
    return play(tokens, only(Preloaded([0, 4, 5]), prefetch=ahead), joint=joint)


def test_kv_takes_queued_prefetches_first_and_then_what_the_policy_chooses() -> None:
    done = grow_with_prefetches_queued()
    assert (
        done.lines()
        == [
            *HITS[:2],  # room for 5: 3 experts and the 2 on their way
            "5 105 H2D PREFETCH 1 2",
            *HITS[2:],
            "33 38 GPU DENSE 0 -1",  # room for 4: 7 is given up, which is queued; nothing is evicted
            "38 48 GPU EXPERT 0 0",
            "48 53 GPU DENSE 1 -1",
            "105 115 GPU EXPERT 1 2",
            "115 118 GPU STEP -1 -1",
            "118 123 GPU DENSE 0 -1",  # room for 3: 5, never used, goes
            "123 133 GPU EXPERT 0 0",
            "133 138 GPU DENSE 1 -1",
            "138 238 H2D LOAD 1 3",  # in the place of 4
            "238 248 GPU EXPERT 1 3",
            "248 251 GPU STEP -1 -1",
        ]
    )
    assert [step["evictions"] for step in done.steps()] == [0, 0, 2]
    assert list(done.offloader.residency.resident()) == [0, 6, 7]
    assert [done.stalls(step) for step in range(3)] == [{}, {"link": 105 - 53}, {"link": 100}]


def test_prefetches_that_kv_takes_are_counted_as_cancelled() -> None:
    assert [step["cancels"] for step in grow_with_prefetches_queued().steps()] == [0, 1, 0]


# -- decisions that take time -----------------------------------------------------------------------


def test_what_deciding_takes_comes_between_routing_and_experts_and_is_the_hosts() -> None:
    done = play([PLAIN], only(Preloaded(EVERY_KEY)), hardware=Hardware(plan_ns=4))
    assert done.lines() == [
        "0 5 GPU DENSE 0 -1",
        "9 19 GPU EXPERT 0 0",
        "19 24 GPU DENSE 1 -1",
        "28 38 GPU EXPERT 1 0",
        "38 41 GPU STEP -1 -1",
    ]
    assert done.stalls() == {"host": 8}


def test_copies_are_asked_for_when_it_is_decided() -> None:
    done = play([PLAIN], only(LRU()), hardware=Hardware(plan_ns=4))
    assert done.of_lane("H2D") == ["9 109 LOAD 0 0", "128 228 LOAD 1 0"]
    assert done.stalls() == {"link": 200, "host": 8}


# -- kernels beside CPU experts ---------------------------------------------------------------------


def beside(kept_ratio: float, hits: int) -> HandRun:
    """Run one layer's expert 0 on the CPU (100 ns) beside ``hits`` experts that are on the GPU."""
    token: Token = [list(range(1 + hits)), []]
    preloaded = Preloaded([1, 2, 3][:hits])
    placement = ScriptedPlacement({0: Service.CPU})
    hardware = Hardware(rate_beside_cpu_ratio=kept_ratio)
    return play([token], only(preloaded, placement=placement), ByteCosts(gpu=40), hardware)


def test_kernels_are_slower_until_the_cpu_has_ended() -> None:
    # Half the rate from 5 to 105: 50 of the 120 ns of kernels are done by then, 70 are left.
    done = beside(0.5, hits=3)
    assert done.of_lane("CPU") == ["5 105 EXPERT 0 0"]
    assert done.of_lane("GPU")[:5] == [
        "0 5 DENSE 0 -1",
        "5 61 EXPERT 0 1",
        "61 118 EXPERT 0 2",
        "118 175 EXPERT 0 3",
        "175 180 DENSE 1 -1",
    ]


def test_kernels_that_end_before_the_cpu_are_slower_all_along() -> None:
    done = beside(0.5, hits=1)
    assert done.of_lane("GPU")[1] == "5 85 EXPERT 0 1"
    assert done.stalls() == {"cpu": 20}


def test_kernels_of_a_card_do_not_mind_the_cpu() -> None:
    assert beside(1.0, hits=1).of_lane("GPU")[1] == "5 45 EXPERT 0 1"
