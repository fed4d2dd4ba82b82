"""Recorded routing forced over layers of any shape: actual copies and kernels, step by step."""

from __future__ import annotations

import time

from real.dense import DenseWork
from real.device import Device
from real.executor import Executor
from real.experts import ExpertFormat
from sim.build import Scenario
from sim.events import Kind
from sim.metrics import RunTables
from sim.requests import RequestClock
from sim.schedule import WorkStep


class Replay:
    """Plays the work of a scenario through an executor, one step at a call, so that runs can take turns.

    Parameters
    ----------
    scenario
        Whose workload; its offloader is the executor's.
    executor, dense
        Routed experts, and all the rest of the layers.
    """

    def __init__(self, scenario: Scenario, executor: Executor, dense: DenseWork) -> None:
        self.executor = executor
        self._workload = scenario.workload
        self._schedule = scenario.workload.schedule()
        self._dense = dense
        self._requests = RequestClock(executor.tables.requests)
        self._begun_ns = time.perf_counter_ns()

    @property
    def tables(self) -> RunTables:
        """What the run has filled so far."""
        return self.executor.tables

    def step(self) -> WorkStep | None:
        """Run the next step; None when all is done. Waits for requests that have not come yet."""
        while isinstance(found := self._schedule.next(self._now_ns()), int):
            wait_ns = max(0, found - self._now_ns())
            time.sleep(wait_ns / 1e9)
            self.tables.idle_ns += wait_ns
        if found is None:
            for refused in self._schedule.refused:
                self._requests.refuse(refused)
            return None
        self._run(found)
        return found

    def _now_ns(self) -> int:
        return time.perf_counter_ns() - self._begun_ns

    def _run(self, step: WorkStep) -> None:
        executor, dense, accounts = self.executor, self._dense, self.executor.accounts
        device = executor.parts.device
        executor.begin_step(step.info)
        dense.begin_step(step.info)
        hidden = dense.embed(step.rows.tolist())
        for routing in self._workload.routings(step):
            begin = device.stamp()
            hidden, inner = dense.layer(routing.layer, hidden)
            accounts.beside(Kind.DENSE, routing.layer, begin)
            hidden = hidden + executor.run_layer(routing, inner)
        begin = device.stamp()
        if step.info.num_outputs:
            device.to_host(dense.head(hidden, step.info.num_outputs))
        accounts.beside(Kind.STEP, -1, begin)
        dense.end_step(step.finished)
        times_ns = executor.end_step(step.info)
        self._schedule.ended(step, self._now_ns())
        self._requests.end_step(step, *times_ns)


def dense_work(scenario: Scenario, device: Device, form: ExpertFormat, seed: int = 0) -> DenseWork:
    """Return a scenario's layers but for their experts, with room for the requests that run at one time."""
    workload = scenario.workload
    longest = max((len(request.rows) for request in workload.requests), default=1)
    places = min(workload.limits.places, max(1, len(workload.requests)))
    return DenseWork(scenario.shape, device, form.compute_dtype, places, longest, seed)
