"""Roofline of a run: for each resource what it moved, at which rate, and how far that is from its limit.

Of N output tokens, that took T (time without any work to do is not counted), and a resource that moved A:

amount               A: bytes, operations or kernels
achieved_per_s       A / T
limit_per_s          the rate at which A can go at most: the machine file's achieved rates, over all units;
                     the mean where parts of A go at several (bits of experts)
rated_per_s          the same by the file's rate before its derates, the vendor's or a plainly measured one
least_ns             A / limit: the time if nothing but this resource took any
utilisation          least_ns / T, which is achieved / limit; the largest binds
times_from_limit     T / least_ns: how much faster the run would be if only this resource mattered
tokens_per_s_limit   N / least_ns: the roof; the run is never above it
busy_share           time in which it worked / T; None where nobody kept count
busy_utilisation     least_ns / that time: how well it is used while it works
waited_share         time for which the step waited for it / T, by the causes of sim/metrics.py; the GPU's
                     own work stands with that of its three parts (operations, memory, launches) that takes
                     the largest share of it

Prompts are part of a run: its amounts for an output token include them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hwmodels.devices import Link
from hwmodels.layer_time import GPU_BYTES, HOST_BYTES, LAUNCH, LINK_BYTES, STORAGE_BYTES
from hwmodels.machine import Machine
from hwmodels.predict import Prediction
from hwmodels.units import NS_PER_S
from sim.build import Scenario
from sim.metrics import RunTables
from sim.roofline_work import CountingCosts, Tally

BYTES, OPERATIONS, KERNELS = "B", "op", "kernel"
DEVICE_OPS, DEVICE_MEMORY, LAUNCHES = "operations", "memory", "kernel launches"
TO_GPU, FROM_GPU = "link to the GPU", "link from the GPU"
HOST_MEMORY, CPU_WEIGHTS, CPU_OPS = "host memory", "CPU: weights", "CPU: operations"
STORAGE = "storage"
_SMALLEST = 1e-12


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource of a run; see the head of this file. Amounts are those of the whole run."""

    name: str
    unit: str
    amount: float
    least_ns: float
    rated_per_s: float | None = None
    busy_ns: float | None = None
    waited_ns: float | None = None


@dataclass(frozen=True, slots=True)
class Roofline:
    """The resources that a run used, the most used first."""

    tokens: int
    time_ns: float
    resources: tuple[Resource, ...]

    @property
    def binding(self) -> Resource:
        """The resource whose roof is the lowest."""
        return self.resources[0]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row a resource, as plain values."""
        return [self._row(resource) for resource in self.resources]

    def _row(self, found: Resource) -> dict[str, Any]:
        time_ns, least_ns, busy_ns = self.time_ns, found.least_ns, found.busy_ns
        return {
            "resource": found.name,
            "unit": found.unit,
            "amount": found.amount,
            "amount_per_token": found.amount / self.tokens,
            "achieved_per_s": found.amount * NS_PER_S / time_ns,
            "limit_per_s": found.amount * NS_PER_S / least_ns,
            "rated_per_s": found.rated_per_s,
            "utilisation": least_ns / time_ns,
            "busy_share": None if busy_ns is None else busy_ns / time_ns,
            "busy_utilisation": least_ns / busy_ns if busy_ns else None,
            "waited_share": None if found.waited_ns is None else found.waited_ns / time_ns,
            "least_ns_per_token": least_ns / self.tokens,
            "tokens_per_s": self.tokens * NS_PER_S / time_ns,
            "tokens_per_s_limit": self.tokens * NS_PER_S / least_ns,
            "times_from_limit": time_ns / least_ns,
        }


def _roofline(tokens: int, time_ns: float, found: list[Resource]) -> Roofline:
    used = [resource for resource in found if resource.least_ns > _SMALLEST]
    return Roofline(tokens, time_ns, tuple(sorted(used, key=lambda r: -r.least_ns)))


# -- of a run --------------------------------------------------------------------------------------


def roofline_of_run(
    config: Mapping[str, Any],
    scenario: Scenario,
    tables: RunTables,
    metrics: Mapping[str, Any],
    costs: CountingCosts,
) -> Roofline | None:
    """Return the roofline of a run that ``costs`` counted; None where no token came out."""
    time_ns = (metrics["total_ns"] or 0) - tables.idle_ns
    if not metrics["output_tokens"] or time_ns <= 0:
        return None
    costs.count_kernels(metrics["kernels"], metrics["gather_bytes"])
    run = _Run(config["machine"], scenario, tables, metrics, costs, time_ns)
    found = [*run.device(), *run.links(), *run.cpu(), *run.storage()]
    return _roofline(metrics["output_tokens"], time_ns, found)


@dataclass(frozen=True, slots=True)
class _Run:
    """What there is to know of a run."""

    rated: Mapping[str, Any]
    """The machine's file: rates before derates."""
    scenario: Scenario
    tables: RunTables
    metrics: Mapping[str, Any]
    costs: CountingCosts
    time_ns: int

    def device(self) -> Iterator[Resource]:
        """Yield what computes: the GPUs, or the CPU of a machine without one."""
        gpu, work, units = self.scenario.machine.gpu, self.costs.work, self._units("gpu")
        who, file = ("GPU", self.rated["gpu"]) if gpu else ("CPU", self.rated["cpu"])
        parts = [
            (f"{who}: {DEVICE_OPS}", OPERATIONS, work.device_ops, file["matmul_flops"]),
            (f"{who}: {DEVICE_MEMORY}", BYTES, work.device_bytes, file["memory_bytes_per_s"]),
            (f"{who}: {LAUNCHES}", KERNELS, work.launches, None),
        ]
        largest = max(tally.least_ns for _, _, tally, _ in parts)
        works_ns = self._waited("gpu_share")
        for name, unit, tally, rated in parts:
            yield Resource(
                name,
                unit,
                tally.amount,
                tally.least_ns / units,
                None if rated is None else rated * units,
                self._busy("gpu"),
                works_ns if tally.least_ns == largest else None,
            )

    def links(self) -> Iterator[Resource]:
        """Yield both directions of the host link."""
        link, file = self.scenario.machine.link, self.rated.get("link")
        if link is None or file is None:
            return
        waited = self._waited("link_stall_share")
        to_gpu = self._limit(link, link.load_bytes_per_s, "h2d")
        yield self._lane(TO_GPU, "h2d", "h2d_bytes", to_gpu, file["h2d_bytes_per_s"], waited)
        back = self._limit(link, link.d2h_bytes_per_s, "d2h")
        yield self._lane(FROM_GPU, "d2h", "d2h_bytes", back, file["d2h_bytes_per_s"], None)

    def cpu(self) -> Iterator[Resource]:
        """Yield the CPU's experts, and the memory that they share with copies and reads."""
        cpu, file, work = self.scenario.machine.cpu, self.rated["cpu"], self.costs.work
        units, waited = self._units("cpu"), self._waited("cpu_stall_share")
        busy_ns = self._busy("cpu")
        weights, ops = work.cpu_bytes, work.cpu_ops
        rated = file["memory_bytes_per_s"], file["matmul_flops"]
        least_ns = weights.least_ns / units, ops.least_ns / units
        yield Resource(CPU_WEIGHTS, BYTES, weights.amount, least_ns[0], rated[0], busy_ns, waited)
        yield Resource(CPU_OPS, OPERATIONS, ops.amount, least_ns[1], rated[1], busy_ns)
        moved, dram = self.tables.dram_bytes, Tally()
        if moved:
            dram.add(moved, cpu.dram_bytes_per_s)
            resource = Resource(HOST_MEMORY, BYTES, dram.amount, dram.least_ns)
            waited = self._waited("dram_stall_share")
            yield _done(resource, self.time_ns, file["dram_bytes_per_s"], None, waited)

    def storage(self) -> Iterator[Resource]:
        """Yield the storage that was read."""
        storage, engine = self.scenario.machine.storage, self.costs.engine
        if storage is None or not self.metrics["read_bytes"]:
            return
        blocks = engine.storage_block_bytes, engine.storage_queue_depth
        fastest = max(row[-1] for row in storage.curve)
        waited = self._waited("storage_stall_share")
        rate = storage.bytes_per_s(*blocks)
        yield self._lane(STORAGE, "storage", "read_bytes", rate, fastest, waited)

    def _lane(
        self,
        name: str,
        lane: str,
        column: str,
        per_s: float,
        rated_per_s: float,
        waited_ns: float | None,
    ) -> Resource:
        tally, busy_ns = Tally(), self._busy(lane)
        tally.add(self.metrics[column], per_s)
        rated = rated_per_s * self._units(lane)
        found = Resource(name, BYTES, tally.amount, tally.least_ns)
        return _done(found, self.time_ns if busy_ns is None else busy_ns, rated, busy_ns, waited_ns)

    def _limit(self, link: Link, per_s: int, lane: str) -> float:
        """Return what all GPUs' links carry one way, a switch that they share included."""
        total = per_s * self._units(lane)
        return min(total, link.switch_bytes_per_s or total)

    def _units(self, lane: str) -> int:
        return self.tables.units.get(lane, 1)

    def _busy(self, lane: str) -> float | None:
        """Return the time in which a unit worked, in the mean; None where what binds is not one of them.

        That is a switch before several links, and GPUs that share each matrix, one of which stands for all.
        """
        busy_ns, link = self.tables.busy_ns.get(lane), self.scenario.machine.link
        is_switched = lane in ("h2d", "d2h") and link is not None and link.switch_bytes_per_s
        is_shared = lane == "gpu" and self.costs.engine.tensor_parallel
        if busy_ns is None or (self._units(lane) > 1 and (is_switched or is_shared)):
            return None
        return busy_ns / self._units(lane)

    def _waited(self, column: str) -> float:
        return float(self.metrics[column] or 0) * float(self.metrics["total_ns"])


def _done(
    found: Resource,
    most_ns: float,
    rated_per_s: float,
    busy_ns: float | None,
    waited_ns: float | None,
) -> Resource:
    """Return a resource less what was asked of it but still under way when the run ended.

    Copies and reads count when they are planned, and can have moved no more than fits in their time.
    """
    share = min(1.0, most_ns / found.least_ns) if found.least_ns else 1.0
    return replace(
        found,
        amount=found.amount * share,
        least_ns=found.least_ns * share,
        rated_per_s=rated_per_s,
        busy_ns=busy_ns,
        waited_ns=waited_ns,
    )


# -- of a prediction -------------------------------------------------------------------------------


def roofline_of_prediction(prediction: Prediction) -> Roofline:
    """Return the roofline of a predicted decode step.

    Bytes and launches only: a prediction tells no operations, nor what is busy when.
    """
    case, spent = prediction.case, prediction.decode
    costs, moved = case.costs, prediction.decode.num_bytes
    found = []
    for name, key, rate in _rates(costs.machine, case.costs):
        if rate and moved.get(key):
            tally = Tally()
            tally.add(moved[key], rate)
            found.append(Resource(name, BYTES, tally.amount, tally.least_ns))
    if costs.launch_ns:
        kernels = spent.ns[LAUNCH] / costs.launch_ns
        found.append(Resource(f"GPU: {LAUNCHES}", KERNELS, kernels, spent.ns[LAUNCH]))
    return _roofline(case.batch_size, prediction.tpot_ns, found)


def _rates(machine: Machine, costs: Any) -> Iterator[tuple[str, str, float]]:
    """Yield the resources that move bytes: name, key of ``Spent.num_bytes``, most bytes a second."""
    count = machine.device.count
    who = "GPU" if machine.gpu else "CPU"
    yield f"{who}: {DEVICE_MEMORY}", GPU_BYTES, machine.device.memory_bytes_per_s * count
    if machine.link is not None:
        yield TO_GPU, LINK_BYTES, machine.link.load_bytes_per_s * count
    layer_rate = costs.cpu_work(0, 1).bytes_per_s * costs.num_cpu_teams
    yield CPU_WEIGHTS, HOST_BYTES, layer_rate
    if machine.storage is not None:
        engine = costs.engine
        blocks = engine.storage_block_bytes, engine.storage_queue_depth
        yield STORAGE, STORAGE_BYTES, machine.storage.bytes_per_s(*blocks)


def summary_rows(found: Roofline | None) -> list[dict[str, Any]]:
    """Return what a run's summary keeps; nothing where no token came out."""
    return [] if found is None else found.rows()
