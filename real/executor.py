"""The driver with real memory: weights, copies and kernels, decided by the same Offloader as a simulation.

One layer: plan | experts that are there | experts as they arrive | what the host computed | next layer.
Everything is counted and logged in the simulator's own tables, so that its metrics and pictures serve here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hwmodels.engine import Engine
from real.accounts import Accounts
from real.copies import Copy, CopyEngine
from real.device import Device
from real.experts import ExpertFormat
from real.insitu import InSitu
from real.kernels import Kernels
from real.mover import Mover
from real.slots import Arena
from real.store import Store
from real.store_file import FileStore
from real.tokens import Combine, LayerTokens
from sim.counter import StepCounter
from sim.events import Kind, Lane
from sim.gpu import Gate
from sim.metrics import RunTables
from sim.offloader import Offloader
from sim.types import LayerPlan, LayerRouting, StepInfo


class Parts(NamedTuple):
    """What an executor works with; see real/rig.py for how they are made.

    ``kernels`` by format; ``insitu`` is None where no expert can be computed on the host.
    """

    store: Store
    device: Device
    arena: Arena
    copies: CopyEngine
    kernels: Mapping[ExpertFormat, Kernels]
    insitu: InSitu | None = None


class Owed(NamedTuple):
    """What the layer of ``plan`` has deferred: the tokens, and their experts under way on the host."""

    plan: LayerPlan
    tokens: LayerTokens
    parts: list[Any]


class Executor:
    """Runs layers through the Offloader with actual weights.

    Parameters
    ----------
    offloader
        Who decides; it must not have been used, but for what it holds from the beginning.
    parts
        Memory, copies and kernels.
    engine
        What overlaps, in which order experts compute, and whether kernels are grouped.
    tables
        What the run fills; events are logged if it has an event log.
    combine
        How an expert layer's results are added up (see LayerTokens).
    lockstep
        Copies take no time as far as decisions go: these are then exactly those of ``run_lockstep``.
    """

    def __init__(
        self,
        offloader: Offloader,
        parts: Parts,
        engine: Engine,
        tables: RunTables | None = None,
        *,
        combine: Combine = "by_slot",
        lockstep: bool = False,
    ) -> None:
        self.offloader = offloader
        self.parts = parts
        self.tables = tables or RunTables()
        self._lane = Lane.STORAGE if isinstance(parts.store, FileStore) else Lane.H2D
        self.accounts = Accounts(parts.device, self._lane, self.tables, offloader)
        self._engine = engine
        self._counter = StepCounter(offloader.residency, self.tables.steps, self.tables.ledger)
        self._combine = combine
        self._lockstep = lockstep
        self._groups_kernels = engine.kernels == "grouped"
        told = self._come
        self._mover = Mover(offloader, parts.arena, parts.copies, parts.device, told, lockstep)
        self._gate: Gate | None = None
        if engine.order == "routing" or not engine.copies_overlap:
            self._gate = Gate(at_end=not engine.copies_overlap)
        self._owed: Owed | None = None  # what the layer before has deferred
        if parts.insitu is not None:
            self.tables.units["cpu"] = parts.insitu.num_teams
        try:
            self._mover.fill()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the threads and give the memory back; harmless twice."""
        self.parts.copies.close()
        if self.parts.insitu is not None:
            self.parts.insitu.close()
        self.parts.arena.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- a step -----------------------------------------------------------------------------------

    def begin_step(self, info: StepInfo) -> None:
        """Learn that a step begins."""
        self.accounts.begin_step(info)
        with self._mover.held():
            self._mover.report()
            self.offloader.begin_step(info)

    def end_step(self, info: StepInfo) -> tuple[int, int]:
        """Learn that a step has ended; return when it began and ended, ns since the run began."""
        start_ns, end_ns = self.accounts.end_step(self._counter)
        if isinstance(self.parts.store, FileStore):
            self.parts.store.check_unchanged()
        self._counter.end_step(info, self.offloader.view.stage, start_ns, end_ns)
        return start_ns, end_ns

    # -- a layer ----------------------------------------------------------------------------------

    @torch.no_grad()
    def run_layer(
        self, routing: LayerRouting, hidden: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Compute one MoE layer's routed experts, [num_tokens, hidden_size] -> the same.

        ``weights`` are those of the model's router, [num_tokens, top_k]; None: those of the routing.
        """
        accounts, mover = self.accounts, self._mover
        self.parts.device.synchronize()  # the routing is known when all before it has been computed
        accounts.begin_layer()
        with mover.held():
            mover.report()
            begin_ns = time.perf_counter_ns()
            plan = self.offloader.plan_layer(routing, 0 if self._lockstep else accounts.now_ns())
            decided_ns = time.perf_counter_ns()
            mover.begin(plan)
        mover.ask(plan)
        self._counter.add(plan)
        accounts.planned(plan, decided_ns - begin_ns, time.perf_counter_ns() - decided_ns)
        later = set(plan.deferred)
        if routing.layer == self.offloader.view.num_layers - 1 or not self._engine.cpu_overlaps:
            later = set()  # the last layer has none after it
        tokens = self._tokens(plan, hidden, weights, later)
        begun = (
            self._begin_cpu(plan, tokens, later, hidden, weights)
            if self._engine.cpu_overlaps
            else None
        )
        self._compute_as_they_come(plan, tokens)
        if begun is None:
            begun = self._begin_cpu(plan, tokens, later, hidden, weights)
        output = self._finish(plan, tokens, begun)
        admissions = self.offloader.end_layer(plan)
        self._counter.add_admissions(admissions)
        mover.end(admissions)
        return output

    def _tokens(
        self, plan: LayerPlan, hidden: Tensor, weights: Tensor | None, without: set[int]
    ) -> LayerTokens:
        routing = plan.routing
        only = [key for key in routing.experts if key not in without] if without else None
        return LayerTokens(
            *(hidden, routing, self.offloader.residency.keys, weights),
            plan.packed,
            plan.groups,
            self._combine,
            rewritten=routing is not plan.recorded,
            only=only,
        )

    def _compute_as_they_come(self, plan: LayerPlan, tokens: LayerTokens) -> None:
        mover, gate = self._mover, self._gate
        self._compute(plan, tokens, list(plan.resident) if gate is None else gate.begin(plan))
        while mover.num_awaited:
            if mover.is_stuck and gate is not None:
                self._compute(plan, tokens, gate.flush())
            since_ns = time.perf_counter_ns()
            arrived = mover.wait()
            self.accounts.waited(since_ns)
            for key in arrived:
                self._compute(plan, tokens, [key] if gate is None else gate.arrived(key))
        if self._lockstep:
            mover.settle(plan)
        elif plan.prefetches and not self._engine.copies_overlap:
            since_ns = time.perf_counter_ns()
            mover.wait_for_all()  # an engine that does one thing at a time waits for these too
            self.accounts.waited(since_ns)

    def _compute(self, plan: LayerPlan, tokens: LayerTokens, keys: Sequence[int]) -> None:
        """Run experts that are there."""
        arena, kernels, insitu = self.parts.arena, self.parts.kernels, self.parts.insitu
        if self._groups_kernels and len(keys) > 1:
            for part, form in self._by_format(keys):
                begin = self.parts.device.stamp()
                stacked = arena.stacked(arena.format_index(part[0]))
                slots = [arena.slot_of(key) for key in part]
                tokens.run_many(kernels[form], part, stacked, slots)
                self.accounts.computed(plan, part, begin)
        else:
            for key in keys:
                begin = self.parts.device.stamp()
                form = self.parts.store.format_of(key)
                tokens.run(kernels[form], key, arena.weights(key))
                beside = insitu is not None and insitu.is_busy
                self.accounts.computed(plan, (key,), begin, beside)
        if plan.bypasses:
            for key in keys:
                self._mover.computed(key)

    def _by_format(self, keys: Sequence[int]) -> list[tuple[list[int], ExpertFormat]]:
        found: dict[ExpertFormat, list[int]] = {}
        for key in keys:
            found.setdefault(self.parts.store.format_of(key), []).append(key)
        return [(part, form) for form, part in found.items()]

    # -- the host's experts -----------------------------------------------------------------------

    def _begin_cpu(
        self,
        plan: LayerPlan,
        tokens: LayerTokens,
        later: set[int],
        hidden: Tensor,
        weights: Tensor | None,
    ) -> tuple[list[Any], Owed | None]:
        """Hand the host its experts; return what this layer waits for, and what the next one does."""
        if not plan.on_cpu and not plan.deferred:
            return [], None
        insitu = self.parts.insitu
        assert insitu is not None
        own = [*plan.on_cpu, *(key for key in plan.deferred if key not in later)]
        begun = insitu.begin(own, tokens)
        if not later:
            return begun, None
        others = [key for key in plan.routing.experts if key not in later]
        deferred = self._tokens(plan, hidden, weights, set(others))
        return begun, Owed(plan, deferred, insitu.begin(list(plan.deferred), deferred))

    def _finish(
        self,
        plan: LayerPlan,
        tokens: LayerTokens,
        begun: tuple[list[Any], Owed | None],
    ) -> Tensor:
        """Wait for the host's part, and add up: this layer's results, and those owed from the one before."""
        own, later = begun
        owed, self._owed = self._owed, later
        if own:
            self._put_back(plan, own, tokens)
        output = tokens.output()
        if owed is not None:
            self._put_back(owed.plan, owed.parts, owed.tokens)
            output = output + owed.tokens.output()
        return output

    def _put_back(self, plan: LayerPlan, parts: list[Any], tokens: LayerTokens) -> None:
        insitu = self.parts.insitu
        assert insitu is not None
        since_ns = time.perf_counter_ns()
        found = insitu.put_back(parts, tokens)
        self.accounts.waited_for_cpu(plan, found, time.perf_counter_ns() - since_ns)

    # -- what has come ----------------------------------------------------------------------------

    def _come(self, copy: Copy) -> None:
        """Count and record a copy that has come."""
        if copy.kind is Kind.PREFETCH:
            self._counter.add_prefetches((copy.key,))
        self.accounts.copied(copy)
