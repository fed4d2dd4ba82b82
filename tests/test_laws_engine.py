"""Laws of every run on every machine: engines, links, shared memory, CPU teams, several GPUs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwmodels.units import transfer_ns
from sim.events import EventLog, Kind, Lane
from sim.hardware import Memory
from sim.metrics import RunTables
from sim.residency import QUEUED, Residency
from sim.timeline import Timeline
from sim.types import LayerPlan
from tests.doubles import Setup
from tests.machines import AMPLE, BYTE_A_NS, EVERY, Case, Watched, cases, key_of
from tests.strategies import LAW, Run
from tests.test_laws import chosen_tokens, of_either_copy, served

FEWER = settings(LAW, max_examples=12)
every_setup = pytest.mark.parametrize("setup", EVERY.values(), ids=EVERY.keys())


class Audited(Residency):
    """Checks after every change that bytes add up, and after each that takes some that they fit."""

    def _audit(self, takes: bool = False) -> None:
        used = [0] * len(self.capacity_bytes)
        for key, state in enumerate(self.state):
            used[self.pool_of_key[key]] += self.expert_bytes(key) if state >= QUEUED else 0
        for pool, capacity in enumerate(self.capacity_bytes):
            assert self.used_bytes(pool) == used[pool]
            assert not takes or used[pool] <= capacity

    def reserve(self, key: int) -> None:
        super().reserve(key)
        self._audit(takes=True)

    def replace(self, victim: int, key: int) -> None:
        super().replace(victim, key)
        self._audit(takes=True)

    def complete(self, key: int) -> None:
        super().complete(key)
        self._audit(takes=True)

    def release(self, key: int) -> int:
        size = super().release(key)
        self._audit()
        return size

    def cancel(self, key: int) -> None:
        super().cancel(key)
        self._audit()


# -- what a run's rows tell ------------------------------------------------------------------------

Row = tuple[int, ...]
TO_GPU = (Kind.LOAD, Kind.BYPASS, Kind.PREFETCH)
TO_HOST = (Kind.READ, Kind.DEMOTE)
WORK = (Lane.GPU, Lane.CPU, Lane.HANDOVER, Lane.DEFERRAL)


@dataclass
class Told(Run):
    """A finished run whose rows are found by plan.

    ``copies[event, key]`` are the rows of the chunks that brought an expert to the GPU for a plan, and
    ``at_host_ns[event, key]`` is when it came into host memory, if it had to.
    """

    case: Case
    watched: Watched
    copies: dict[tuple[int, int], list[Row]] = field(default_factory=dict)
    at_host_ns: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        to_gpu, to_host = self._arrivals(TO_GPU), self._arrivals(TO_HOST)
        for (event, key), (asked, returned) in self.watched.orders.items():
            if key not in off_gpu(self.plans[event]) and asked <= len(to_gpu[key]):
                self.copies[event, key] = to_gpu[key][asked - 1]
            if returned and returned <= len(to_host[key]):
                self.at_host_ns[event, key] = to_host[key][returned - 1][-1][1]

    def _arrivals(self, kinds: Sequence[Kind]) -> dict[int, list[list[Row]]]:
        """Return the copies of each key that have wholly arrived, each as the rows of its chunks."""
        found = defaultdict[int, list[list[Row]]](list)
        parts = defaultdict[int, list[Row]](list)
        for row in self.rows:
            if row[4] in kinds:
                key = key_of(self.watched.residency.keys, row[6], row[7])
                parts[key].append(row)
                size = self.watched.residency.expert_bytes(key)
                if sum(part[9] for part in parts[key]) == size:
                    found[key].append(parts.pop(key))
        return found

    @property
    def end_ns(self) -> int:
        """When the last step ends."""
        return max((row["end_ns"] for row in self.steps()), default=0)


def off_gpu(plan: LayerPlan) -> list[int]:
    """Return the experts that the CPU computes."""
    return [*plan.on_cpu, *plan.deferred]


def expert_ns(run: Told, plan: LayerPlan, key: int) -> int:
    """Return what an expert's kernels cost by themselves, over all micro-batches of its plan."""
    keys = run.watched.residency.keys
    bank, expert = divmod(key, keys.num_experts)
    rows = plan.routing.token_ids(expert, keys.is_low(key))
    counts = [plan.routing.num_tokens(key)]
    if plan.groups is not None:
        counts = [int(np.isin(group, rows).sum()) for group in plan.groups]
    return sum(run.case.costs.expert_gpu_ns(bank, count, plan.packed) for count in counts if count)


def run_case(case: Case, setup: Setup, log: bool = True, kind: type[Residency] = Audited) -> Told:
    """Run a case under a setup's policies."""
    offloader = case.offloader(setup, kind)
    shape = offloader.residency.keys
    events = EventLog(shape.num_experts, num_layers=shape.num_layers) if log else None
    tables = RunTables(events=events)
    Timeline(case.workload, offloader, case.costs, case.hardware, tables).run()
    rows = tables.events.rows if tables.events is not None else []
    return Told(tables, offloader.plans, offloader, rows, case, offloader)


def check_laws(run: Told) -> None:
    """Check all that holds of any run; what holds at every plan is checked by `Watched` meanwhile."""
    check_each_expert_is_computed_once(run)
    check_time(run)
    check_lanes(run)
    check_all_that_is_asked_for_is_carried(run)
    check_nothing_happens_before_its_weights_are_there(run)
    check_no_run_beats_its_bytes_or_its_compute(run)


def computed(run: Told) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """Return the rows of each expert's kernels, or CPU work, by (event, key)."""
    found = defaultdict[tuple[int, int], list[tuple[int, ...]]](list)
    workload = run.case.workload
    for row in run.rows:
        if row[4] == Kind.EXPERT:
            event = row[5] * workload.num_layers + row[6]
            found[event, key_of(run.watched.residency.keys, row[6], row[7])].append(row)
    return found


def check_each_expert_is_computed_once(run: Told) -> None:
    """Once, or in shares that together cost the whole; of just the tokens that chose it."""
    case, rows_of = run.case, computed(run)
    for plan in run.plans:
        assert Counter(served(plan)) == Counter(plan.routing.experts)
    if not case.workload.is_open:  # else the steps depend on the clock
        chosen = chosen_tokens(case.workload)
        tokens = {(rows[0][5], rows[0][6], rows[0][7]): rows[0][8] for rows in rows_of.values()}
        assert of_either_copy(tokens, case.workload.num_experts) == chosen
    for (event, key), rows in rows_of.items():
        assert len(rows) <= (case.hardware.chunks if case.hardware.chunk_compute else 1)
        assert len({(row[2], row[3], row[8]) for row in rows}) == 1
        plan, spent_ns = run.plans[event], sum(row[1] - row[0] for row in rows)
        if key in off_gpu(plan):
            bank = run.watched.residency.keys.bank(key)
            least_ns = case.costs.expert_cpu_ns(bank, plan.routing.num_tokens(key))
            assert spent_ns == least_ns if case.hardware.memory is None else spent_ns >= least_ns
        elif not case.costs.grouped:
            assert spent_ns == expert_ns(run, plan, key)


def check_time(run: Told) -> None:
    """The clock never falls; every nanosecond is GPU work, one of the stalls, or idle."""
    run.check_accounts()
    steps = run.steps()
    idle_ns = steps[0]["start_ns"] if steps else run.tables.idle_ns
    for before, after in pairwise(steps):
        assert before["start_ns"] <= before["end_ns"] <= after["start_ns"]
        idle_ns += after["start_ns"] - before["end_ns"]
    assert idle_ns == run.tables.idle_ns
    work = [row for row in run.rows if row[2] in WORK]
    assert max((row[1] for row in work), default=0) <= run.end_ns


def check_lanes(run: Told) -> None:
    """No unit of a lane does two things at once."""
    spans = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for start, end, lane, unit, *_ in run.rows:
        assert start <= end
        spans[lane, unit].append((start, end))
    for of_one in spans.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(of_one)))


def check_all_that_is_asked_for_is_carried(run: Told) -> None:
    """And nothing else: a prefetch may still be under way at the end, in part."""
    num_layers, matched = run.case.workload.num_layers, 0
    for event, plan in enumerate(run.plans):
        for key in [*plan.loads, *plan.bypasses, *plan.late]:
            rows = run.copies[event, key]
            assert {row[5] for row in rows[-1:]} == {event // num_layers}
        wanted = [*plan.loads, *plan.bypasses, *plan.prefetches]
        matched += sum(len(run.copies.get((event, key), ())) for key in wanted)
    partial = len(run.watched.residency.keys) * 9
    found = sum(row[4] in TO_GPU for row in run.rows)
    assert matched <= found <= matched + partial


def check_nothing_happens_before_its_weights_are_there(run: Told) -> None:
    """On the GPU after the last chunk came, or each share after its chunk; copies after host memory."""
    for (event, key), rows in computed(run).items():
        plan = run.plans[event]
        assert rows[0][0] >= run.watched.times_ns[event]
        if key in off_gpu(plan):
            assert rows[0][0] >= run.at_host_ns.get((event, key), 0)
        elif key not in plan.resident:
            chunks = run.copies[event, key][-len(rows) :]
            assert all(
                row[0] >= chunk[1]
                for row, chunk in zip(sorted(rows)[-len(chunks) :], chunks, strict=True)
            )
    for place, chunks in run.copies.items():
        assert chunks[0][0] >= run.at_host_ns.get(place, 0)


def check_no_run_beats_its_bytes_or_its_compute(run: Told) -> None:
    """Bytes of each lane over its rate, host memory's over its own, and the layers' longest parts."""
    hardware, costs, end_ns = run.case.hardware, run.case.costs, run.end_ns
    rates = {Lane.H2D: hardware.h2d_bytes_per_s, Lane.D2H: hardware.d2h_bytes_per_s}
    if hardware.reading is not None:
        rates[Lane.STORAGE] = hardware.reading.curve.bytes_per_s(1, hardware.reading.queue_depth)
    moved = Counter[tuple[int, int]]()
    for row in run.rows:
        if row[1] <= end_ns:
            moved[row[2], row[3]] += row[9]
    for (lane, _), num_bytes in moved.items():
        assert not num_bytes or transfer_ns(num_bytes, rates[Lane(lane)]) <= end_ns
    least_ns = costs.step * len(run.steps())
    of_unit = defaultdict[int, Counter[tuple[int, int]]](Counter)
    for (event, key), rows in computed(run).items():
        if key not in run.plans[event].deferred:  # those may run beside the next layer
            for row in rows:
                of_unit[event][row[2], row[3]] += row[1] - row[0]
    for event in range(len(run.plans)):
        least_ns += costs.dense + max(of_unit[event].values(), default=0)
    assert least_ns <= end_ns


@every_setup
@FEWER
@given(data=st.data())
def test_the_laws_hold_on_machines_that_share_nothing(setup: Setup, data: st.DataObject) -> None:
    check_laws(run_case(data.draw(cases(setup, shared=False)), setup))


@every_setup
@FEWER
@given(data=st.data())
def test_the_laws_hold_where_memory_and_links_are_shared(setup: Setup, data: st.DataObject) -> None:
    check_laws(run_case(data.draw(cases(setup, shared=True)), setup))


def table_bytes(run: Told) -> list[bytes]:
    """Return the content of every table of a run."""
    tables = [run.tables.steps, run.tables.requests]
    if run.tables.events is not None:
        tables += [run.tables.events.table, run.tables.events.counters]
    return [b"".join(block.tobytes() for block in table.blocks()) for table in tables]


@every_setup
@FEWER
@given(data=st.data())
def test_copies_without_events_come_at_the_same_times_as_with_them(
    setup: Setup, data: st.DataObject
) -> None:
    """Without a log, what can meet nobody takes no event: copies, CPU work, layers and steps."""
    ample = Memory((4 * BYTE_A_NS,)), Memory((4 * BYTE_A_NS,), 12 * 10**8)
    suited = {"chunks": 1, "chunk_compute": False, "num_teams": 1}
    case = data.draw(cases(setup, most_gpus=1, shared=False, **suited))
    memory = data.draw(st.sampled_from([None, *ample]))
    case = replace(case, hardware=replace(case.hardware, memory=memory))
    quick, slow = (run_case(case, setup, log) for log in (False, True))
    assert table_bytes(quick) == table_bytes(slow)[:2]
    assert quick.tables.busy_ns == slow.tables.busy_ns
    assert quick.tables.idle_ns == slow.tables.idle_ns
    assert quick.tables.dram_bytes == slow.tables.dram_bytes
    assert quick.watched.times_ns == slow.watched.times_ns
    assert quick.watched.residency.state == slow.watched.residency.state


@every_setup
@FEWER
@given(data=st.data(), proportional=st.booleans())
def test_sharing_what_is_ample_changes_nothing(
    setup: Setup, data: st.DataObject, proportional: bool
) -> None:
    """To the nanosecond: sizes and rates are such that a copy's fixed time is just bytes / rate.

    With one team, for experts that share nothing are computed one after another; and activations of no
    bytes, for where anything is shared they and copies are on the link together. Where prefetches may meet
    CPU experts without staging: the host thread's counts up to when the end of a layer becomes known.
    """
    alone = data.draw(cases(setup, shared=False, num_teams=1))
    alone = replace(alone, costs=replace(alone.costs, activation=0))
    policies = setup.policies(alone.workload)
    if policies.placement is not None and policies.prefetch is not None:
        alone = alone.with_hardware(staging_ns=())
    memory = Memory((AMPLE,), proportional=proportional)
    shared = replace(alone, hardware=replace(alone.hardware, memory=memory))
    first, second = (run_case(case, setup) for case in (alone, shared))
    assert first.tables.steps.rows == second.tables.steps.rows
    assert first.tables.requests.rows == second.tables.requests.rows
    assert sorted(first.rows) == sorted(second.rows)
    assert first.tables.busy_ns == second.tables.busy_ns
