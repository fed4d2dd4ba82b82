"""Drives caches event by event, and the plain models of caches that tests hold them against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from sim.lockstep import run_lockstep
from sim.offloader import Offloader
from sim.policies.base import CachePolicy, PolicySet
from sim.residency import Residency
from sim.types import KeySpace, View
from sim.workload import Workload
from tests.strategies import ConstantCosts, trace_of_ids

Contents = list[frozenset[int]]
NUM_EXPERTS = 12


def run_of(
    ids: np.ndarray,
    num_experts: int,
    tokens_a_step: int = 1,
    weights: np.ndarray | None = None,
    logits: np.ndarray | None = None,
) -> Workload:
    """Return requests of one prompt token each, decoding together; ids [num_tokens, num_layers, top_k]."""
    length = len(ids) // tokens_a_step
    lengths = [(1, length - 1)] * tokens_a_step
    trace = trace_of_ids(ids.astype(np.uint16), lengths, num_experts)
    trace = replace(trace, expert_weights=weights, router_logits=logits)
    return Workload(trace, tokens_a_step)


def one_layer(events: Sequence[Sequence[int]], num_experts: int) -> Workload:
    """Return a run of one layer; each event lists its experts, all equally many."""
    return run_of(np.array(events)[:, None, :], num_experts)


def contents(
    workload: Workload,
    make: Callable[[], CachePolicy],
    slots: int,
    is_global: bool = False,
) -> Contents:
    """Return what is in memory after each event; each pool, one a layer or one for all, has ``slots``."""
    layers = workload.num_layers
    keys = KeySpace(layers, workload.num_experts)
    pools = [0] * layers if is_global else list(range(layers))
    capacity = [slots] * (1 if is_global else layers)
    residency = Residency(keys, [1] * layers, pools, capacity)
    caches = [make() for _ in capacity]
    offloader = Offloader(residency, PolicySet(caches), ConstantCosts(), staging_slots=64)
    found: Contents = []
    inside: set[int] = set()
    for step in workload.steps():
        offloader.begin_step(step.info)
        for routing in workload.routings(step):
            plan = offloader.plan_layer(routing, 0)
            offloader.on_loaded_at_once([*plan.loads, *plan.prefetches])
            inside.difference_update(plan.evicts)
            inside.update(plan.loads, plan.prefetches)
            for admission in offloader.end_layer(plan):
                inside.difference_update(admission.evicts)
                inside.add(admission.key)
            found.append(frozenset(inside))
    assert inside == set(residency.resident())
    return found


def skewed(seed: int, num_tokens: int, num_layers: int, num_experts: int, top_k: int) -> np.ndarray:
    """Return choices of a popularity that drifts, int[num_tokens, num_layers, top_k], distinct in a row."""
    rng = np.random.default_rng(seed)
    ids = np.empty((num_tokens, num_layers, top_k), dtype=np.int64)
    base = np.log(1.0 / np.arange(1, num_experts + 1))
    for token in range(num_tokens):
        shift = token // 40
        noise = rng.gumbel(size=(num_layers, num_experts))
        score = np.roll(base, shift) + noise
        ids[token] = np.argsort(-score, axis=1)[:, :top_k]
    return ids


def keep_best(
    ids: np.ndarray,
    slots: int,
    num_experts: int,
    score: Callable[[int, int, int], tuple[float, ...]],
    learn: Callable[[int, int, list[int]], None],
    bypass: bool,
) -> Contents:
    """A plain model of a score cache over one pool: a set, and a sort for every decision.

    ``learn(step, layer, keys)`` is told of each event, its hits first, then ``score(key, step, layer)``
    orders the keys.
    """
    num_tokens, num_layers, _ = ids.shape
    inside: set[int] = set()
    found: Contents = []
    for step in range(num_tokens):
        for layer in range(num_layers):
            used = [layer * num_experts + int(e) for e in ids[step, layer]]
            learn(step, layer, sorted(used, key=lambda key: key not in inside))
            for key in [key for key in used if key not in inside]:
                inside.add(key)
                if len(inside) > slots:
                    free = inside if bypass else inside - set(used)
                    if free:
                        inside.remove(min(free, key=lambda k: (*score(k, step, layer), k)))
                    else:
                        inside.remove(key)
            found.append(frozenset(inside))
    return found


def num_hits(workload: Workload, found: Contents) -> int:
    """Return how many uses found their expert in memory, from the contents after each event."""
    events = [r.experts for step in workload.steps() for r in workload.routings(step)]
    before = [frozenset[int](), *found]
    return sum(key in held for used, held in zip(events, before, strict=False) for key in used)


class Model:
    """Uses and last uses of all keys, by the number of the event."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids
        self.uses: dict[int, list[tuple[int, int]]] = {}  # (step, layer) of each use
        self.events = 0
        self.last: dict[int, int] = {}
        self.order: dict[int, int] = {}  # the same, uses of one event apart

    def learn(self, step: int, layer: int, used: list[int]) -> None:
        for key in used:
            self.uses.setdefault(key, []).append((step, layer))
            self.last[key] = self.events
            self.order[key] = 1000 * self.events + used.index(key)
        self.events += 1


def learned(policy: CachePolicy, workload: Workload) -> View:
    """Show a policy a run that it has all the room for; return the view of the last event."""
    keys = KeySpace(workload.num_layers, workload.num_experts)
    residency = Residency(keys, [1] * keys.num_layers, [0] * keys.num_layers, [len(keys)])
    offloader = Offloader(residency, PolicySet([policy]), ConstantCosts(), staging_slots=1)
    run_lockstep(workload, offloader)
    return offloader.view


Score = Callable[[Model, int, int, int], tuple[float, ...]]


def agree(
    make: Callable[[], CachePolicy],
    score: Score,
    bypass: bool,
    num_layers: int = 1,
    slots: int = 5,
    num_tokens: int = 160,
    weights: np.ndarray | None = None,
) -> None:
    """Hold a cache against its model in one pool of all layers, on two runs."""
    for seed in range(2):
        ids = skewed(seed, num_tokens, num_layers, NUM_EXPERTS, 2)
        model = Model(ids)
        expected = keep_best(
            ids,
            slots * num_layers,
            NUM_EXPERTS,
            lambda key, step, layer, model=model: score(model, key, step, layer),
            model.learn,
            bypass,
        )
        run = run_of(ids, NUM_EXPERTS, weights=weights)
        found = contents(run, make, slots * num_layers, is_global=True)
        assert found == expected
