"""The kernels that a step's routed experts launch on GPUs, and what laying out their tokens moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from sim.counter import StepCounter
from sim.kernels import Kernels
from sim.types import KeySpace, LayerPlan, StepInfo


class LaunchCosts(Protocol):
    """How many kernels there are, and what they compute and move besides."""

    @property
    def is_grouped(self) -> bool:
        """Whether one set of kernels serves all experts that are ready together, or each its own."""
        ...

    @property
    def pack_launches(self) -> int:
        """Kernels that permute a layer's tokens by expert and back."""
        ...

    def expert_launches(self, packed: bool) -> int:
        """Return the kernels of one set."""
        ...

    def gather_bytes(self, num_tokens: int, packed: bool) -> int:
        """Return the activation bytes that sets of kernels move to gather and scatter their tokens."""
        ...

    def pack_bytes(self, num_tokens: int) -> int:
        """Return the activation bytes that permuting a layer's tokens moves."""
        ...

    def padded_tokens(self, token_counts: Sequence[int]) -> int:
        """Return the tokens that kernels compute for experts that have ``token_counts``."""
        ...


class StepLaunches(NamedTuple):
    """What one step launched; see sim/metrics.py."""

    kernels: int = 0
    padding_tokens: int = 0
    gather_bytes: int = 0


class Launches:
    """Counts the kernels of one step at a time.

    Sets of grouped kernels are counted as they run, those of single experts follow from the step's
    counts, so that a layer of theirs costs nothing. Of several micro-batches each launches its own.

    Parameters
    ----------
    costs
        The truth.
    kernels
        Who runs them.
    packed
        Whether tokens are permuted by expert.
    keys
        The experts.
    splits
        Whether there may be several micro-batches.
    """

    def __init__(
        self, costs: LaunchCosts, kernels: Kernels, packed: bool, keys: KeySpace, splits: bool
    ) -> None:
        self._costs = costs
        self._kernels = kernels
        self._packed = packed
        self._num_layers = keys.num_layers
        self._keys = keys
        self._unit_padding = costs.padded_tokens((1,)) - 1
        self._seen = self._more_sets = self._padding = 0
        self.watches = splits or self._unit_padding > 0
        """Whether :meth:`add` has anything to learn."""

    def add(self, step: StepInfo, plan: LayerPlan) -> None:
        """Learn a layer's plan."""
        if step.num_tokens == 1:
            return
        routing = plan.routing
        elsewhere = {*plan.on_cpu, *plan.deferred}
        keys = [key for key in routing.experts if key not in elsewhere]
        counts = [routing.num_tokens(key) for key in keys]
        if self._unit_padding:
            self._padding += self._costs.padded_tokens(counts) - sum(counts)
        if plan.groups is not None and len(plan.groups) > 1 and keys:
            self._more_sets += self._sets_of_groups(plan, keys)

    def _sets_of_groups(self, plan: LayerPlan, keys: Sequence[int]) -> int:
        """Return how many sets of kernels micro-batches add to those that one of all tokens would take.

        An expert has a set in each that has tokens of it; grouped kernels one set more for each but one
        that has any tokens, as if all experts were ready together.
        """
        assert plan.groups is not None
        if self._costs.is_grouped:
            return sum(1 for group in plan.groups if len(group)) - 1
        routing, space = plan.routing, self._keys
        rows = [routing.token_ids(key % space.num_experts, space.is_low(key)) for key in keys]
        return sum(
            int(np.isin(group, tokens).any()) for group in plan.groups for tokens in rows
        ) - len(keys)

    def end_step(self, step: StepInfo, counter: StepCounter) -> StepLaunches:
        """Return what the step launched, whose counts ``counter`` has."""
        costs, packed = self._costs, self._packed
        hits = counter.hits - counter.hits_on_cpu + counter.late_hits
        alone = hits + counter.loads + counter.bypasses
        sets = self._new_runs() if costs.is_grouped else alone
        kernels = (sets + self._more_sets) * costs.expert_launches(packed)
        moved = costs.gather_bytes(counter.pairs - counter.cpu_pairs, packed)
        if packed:
            kernels += self._num_layers * costs.pack_launches
            moved += self._num_layers * costs.pack_bytes(step.num_tokens)
        padding = self._padding if step.num_tokens > 1 else alone * self._unit_padding
        self._more_sets = self._padding = 0
        return StepLaunches(kernels, padding, moved)

    def _new_runs(self) -> int:
        """Return the sets of kernels that GPUs have run since the step before."""
        total = self._kernels.num_sets
        new, self._seen = total - self._seen, total
        return new
