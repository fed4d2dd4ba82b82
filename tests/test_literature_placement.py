"""What papers say of where misses should run, found again: on their constants, and on the timeline."""

from __future__ import annotations

from functools import cache

import pytest

from sim.build import build
from sim.counter import STEP_COLUMNS
from sim.hardware import Hardware, Memory
from sim.policies.classic import LRU
from sim.policies.placement import FiddlerMax, InSituCPU
from sim.policies.share import FetchShare
from sim.timeline import Timeline
from sim.types import ExpertWork, Phase, Service
from sim.workload import Workload
from tests.configs import composed
from tests.doubles import ScriptedPlacement
from tests.hand import AMPLE, BYTE_A_NS, ByteCosts, HandRun, play
from tests.placing import services, view_of
from tests.strategies import one_request, only

MS = 10**6
LOAD, CPU = Service.LOAD, Service.CPU


# -- Fiddler: 7 ms a token on the CPU, 70 ms to load ----------------------------------------------------


@pytest.mark.parametrize(("tokens", "service"), [(1, CPU), (9, CPU), (10, LOAD), (40, LOAD)])
def test_fiddler_loads_from_ten_tokens_on(tokens: int, service: Service) -> None:
    policy = InSituCPU(cpu_token_ns=7 * MS, load_ns=70 * MS)
    assert services(policy, view_of(tokens=tokens), {0: tokens}) == [service]


def test_fiddlers_maximum_has_another_crossover_where_experts_are_many() -> None:
    """One expert of 9 tokens: 63 ms on the CPU. Two: 126 there, or 63 and 70 side by side."""
    policy = FiddlerMax(cpu_token_ns=7 * MS, load_ns=70 * MS)
    assert services(policy, view_of(tokens=9), {0: 9}) == [CPU]
    assert services(policy, view_of(tokens=9), {0: 9, 1: 9}).count(CPU) == 1
    assert services(policy, view_of(tokens=5), {0: 5, 1: 5}).count(CPU) == 1  # 70 either way
    assert services(policy, view_of(tokens=4), {0: 4, 1: 4}) == [CPU, CPU]  # 56 against 70


# -- FreeToken: link and CPU end together --------------------------------------------------------------


def misses(number: int) -> Workload:
    """Return a run whose second step, one layer, needs so many experts none of which is on the GPU."""
    return one_request([[[0]], [list(range(number))]], num_experts=16)


def step_ns(done: HandRun) -> int:
    """Return how long the second step took."""
    step = done.steps()[1]
    return step["end_ns"] - step["start_ns"]


@cache
def sweep(missing: int, link: int, cpu: int, memory: Memory) -> list[int]:
    """Return the step's time with 0, 1, ... of the missing experts loaded and the others on the CPU."""
    costs = rated(link, cpu)
    hardware = Hardware(memory=memory, h2d_bytes_per_s=link * BYTE_A_NS)
    found = []
    for fetched in range(missing + 1):
        script = {key: LOAD if key < fetched else CPU for key in range(missing)}
        policies = only(LRU(), placement=ScriptedPlacement(script))
        found.append(step_ns(play(misses(missing), policies, costs, hardware, slots=0)))
    return found


def rated(link: int, cpu: int) -> ByteCosts:
    """Return costs of experts of 60 kB, at rates in bytes a nanosecond; their kernels take 1 ns."""
    rates = {"link_bytes_per_s": link * BYTE_A_NS, "cpu_bytes_per_s": cpu * BYTE_A_NS}
    return ByteCosts(gpu=1, expert_bytes=60_000, **rates)


def fetched_by(policy: FetchShare, missing: int, link: int, cpu: int) -> int:
    """Return how many of the missing experts the policy loads."""
    work = [ExpertWork(key, 1) for key in range(missing)]
    return list(policy.place(work, view_of(rated(link, cpu)))).count(LOAD)


@pytest.mark.parametrize("missing", [5, 8, 12])
@pytest.mark.parametrize(("link", "cpu"), [(1, 3), (1, 4), (2, 5), (3, 8)])
def test_freetokens_share_is_the_fastest_where_link_and_cpu_do_not_meet(
    missing: int, link: int, cpu: int
) -> None:
    times = sweep(missing, link, cpu, AMPLE)
    number = fetched_by(FetchShare(contended=False), missing, link, cpu)
    assert times[number] == min(times)
    assert number == pytest.approx(missing * link / (link + cpu), abs=1.0)
    # On either side of it the step only becomes longer.
    assert times[: number + 1] == sorted(times[: number + 1], reverse=True)
    assert times[number:] == sorted(times[number:])


def test_freetokens_share_in_full_is_the_balance_to_the_nanosecond() -> None:
    # 3 of 12 over a link of 1 byte a nanosecond: 180 us; 9 of 12 on a CPU of 3: 180 us. The router's 5 ns
    # come before, then the last expert's kernel of 1 ns and the head's 3.
    assert sweep(12, 1, 3, AMPLE)[3] == 5 + 180_000 + 1 + 3
    assert fetched_by(FetchShare(contended=False), 12, 1, 3) == 3


def test_where_copies_take_the_cpus_memory_the_share_costs_nothing_and_more_does() -> None:
    """FreeToken's formula for rates measured alone, q* = link / CPU, is for memory that the CPU can fill.

    All 12 experts come out of memory of 3 bytes a nanosecond, 240 us, whoever reads them, as long as the
    CPU is not done before the link: up to 4 of 12. So loading q* of the misses warms the cache at no cost
    in time, but gains none.
    """
    memory = Memory(dram_bytes_per_s=(3 * BYTE_A_NS,), proportional=False)
    times = sweep(12, 1, 3, memory)
    number = fetched_by(FetchShare(contended=True), 12, 1, 3)
    assert number == 4
    flat = times[: number + 1]
    assert max(flat) - min(flat) <= 13  # kernels of what is loaded, 1 ns each
    assert min(flat) == pytest.approx(240_000, abs=20)
    assert times[number + 1] >= 5 * 60_000  # five experts over the link


def test_the_advice_of_twice_the_link_gives_time_away_where_nothing_else_costs() -> None:
    """A CPU of 1.5 times the link is left idle by the advice; the best division takes a third less time."""
    memory = Memory(dram_bytes_per_s=(3 * BYTE_A_NS,), proportional=False)
    assert fetched_by(FetchShare(), 12, 2, 3) == 12
    times = sweep(12, 2, 3, memory)
    assert times[12] == pytest.approx(360_000, abs=20)  # 12 x 30 us over the link
    assert min(times) == pytest.approx(240_000, abs=20)  # all that memory can give
    # q* itself, 8, would take 280 us: half of memory is the link's while both read, not its 2 of 3.
    assert fetched_by(FetchShare(threshold=1.0), 12, 2, 3) == 8
    assert times[8] == pytest.approx(280_000, abs=20)


# -- static sets, and how their misses are served (arXiv 2608.07911) ---------------------------------------


def tokens_per_s(policy: str, placement: str | None = None) -> float:
    """Return the decoding rate on the bundled trace, a quarter of the experts on the GPU."""
    config = composed(f"policy={policy}", "machine=rtx4090", "model=qwen3_30b_a3b")
    config["cache"]["ratio"] = 0.25
    config["workload"] |= {"requests": [24, 26], "length": [8, 24]}
    if placement is not None:
        config["policy"]["placement"] = {"_target_": placement}
    scenario = build(config)
    parts = (scenario.workload, scenario.offloader, scenario.costs, scenario.hardware)
    rows = [dict(zip(STEP_COLUMNS, row, strict=True)) for row in Timeline(*parts).run().steps.rows]
    steps = [row for row in rows if row["phase"] == Phase.DECODE]
    spent_ns = sum(row["end_ns"] - row["start_ns"] for row in steps)
    return sum(row["num_tokens"] for row in steps) / spent_ns * 1e9


def test_one_static_set_loses_or_wins_by_how_misses_are_served() -> None:
    """Loaded for one use each, its misses cost it the race against LRU and LFRU; on the CPU they win it."""
    reactive = [tokens_per_s("lru"), tokens_per_s("lfru")]
    assert tokens_per_s("static") < 0.95 * min(reactive)
    on_cpu = tokens_per_s("static", "sim.policies.static.MissOnCPU")
    assert on_cpu > 1.2 * max(reactive)
