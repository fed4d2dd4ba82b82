"""Policies of users that break the contract of their role: one line says who, what and the rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from sim.mistakes import explain
from sim.policies.base import (
    BatchFormer,
    CachePolicy,
    Evictable,
    PlacementPolicy,
    Predictor,
    PrefetchPolicy,
    RepackPolicy,
    RoutingPolicy,
    SizingPolicy,
    StageDetector,
    Waiting,
)
from sim.policies.classic import LRU
from sim.simulate import simulate
from sim.types import ConfigError, ExpertWork, LayerRouting, Service, StepInfo, View
from tests.configs import composed


class Names(LRU):
    def __init__(self, victim: Any = None, after: bool = False) -> None:
        super().__init__()
        self.admits_after = after
        self._victim = victim

    def choose_victim(self, evictable: Evictable, view: View) -> Any:
        return view.routing.experts[0] if self._victim == "in use" else self._victim


class OfAnotherPool(LRU):
    def choose_victim(self, evictable: Evictable, view: View) -> int | None:
        others = (key for key in view.resident() if view.keys.bank(key) != view.layer)
        return next(filter(evictable, others), None)


class Idle(CachePolicy):
    pass


class Mute(Predictor):
    pass


class NeedsWidth(LRU):
    def __init__(self, width: int | None = None) -> None:
        super().__init__()


class NeedsShares(LRU):
    def __init__(self, shares: float | Sequence[float] = 0.5) -> None:
        super().__init__()


class Asks(LRU):
    def __init__(self, popularity: Any, num_experts: int = 0) -> None:
        super().__init__()


class Holds(LRU):
    def preload(self, view: View) -> Sequence[int]:
        return [1000]


class Ahead(PrefetchPolicy):
    def propose(self, routing: LayerRouting, view: View) -> Sequence[int]:
        return [-1]


class Serves(PlacementPolicy):
    def __init__(self, answer: Any = None, marked: bool = False) -> None:
        self._answer = answer
        self.lossy = marked  # type: ignore[misc]

    def place(self, work: Sequence[ExpertWork], view: View) -> Sequence[Service]:
        return self._answer if self._answer is None else [self._answer] * len(work)


class Rewrites(RoutingPolicy):
    shape: ClassVar[Any] = None

    def rewrite(self, routing: LayerRouting, view: View) -> LayerRouting:
        ids = routing.topk_ids
        assert ids is not None
        return self.made(routing, ids, view)

    def made(self, routing: LayerRouting, ids: Any, view: View) -> Any:
        return routing.rewritten(view.keys, np.full_like(ids, 32), routing.topk_weights)


class ToNothing(Rewrites):
    def made(self, routing: LayerRouting, ids: Any, view: View) -> Any:
        return None


class ToAnotherLayer(Rewrites):
    def made(self, routing: LayerRouting, ids: Any, view: View) -> Any:
        return LayerRouting(routing.layer + 1, routing.experts, routing.token_counts)


class ToFewerSlots(Rewrites):
    def made(self, routing: LayerRouting, ids: Any, view: View) -> Any:
        return routing.rewritten(view.keys, ids[:, :2], None)


class ToLow(Rewrites):
    def made(self, routing: LayerRouting, ids: Any, view: View) -> Any:
        return routing.rewritten(view.keys, ids, None, np.ones(ids.shape, dtype=bool))


class Unmarked(Rewrites):
    lossy = False

    def made(self, routing: LayerRouting, ids: Any, view: View) -> Any:
        return routing.rewritten(view.keys, np.zeros_like(ids), routing.topk_weights)


class Parts(RepackPolicy):
    def repack(self, routing: LayerRouting, view: View) -> Any:
        return [np.array([0, 0])]


class Says(StageDetector):
    def is_boundary(self, step: StepInfo) -> Any:
        return None


class Shares(SizingPolicy):
    def slots(self, num_slots: int) -> Any:
        return None


class Forms(BatchFormer):
    def __init__(self, answer: Any = None) -> None:
        self._answer = answer

    def choose(self, waiting: Sequence[Waiting], size: int, due: Sequence[Waiting] = ()) -> Any:
        return self._answer


VICTIM = "must be a key of its pool for which evictable holds, or None"


def cases() -> Iterator[tuple[str, str, dict[str, Any], str]]:
    for victim, said in (
        (10**6, "1000000"),
        (-1, "-1"),
        (1.0, "1.0"),
        ("a", "'a'"),
        ("in use", ""),
    ):
        settings = {"victim": victim}
        yield "cache", "Names", settings, f"Names.choose_victim: names {said}"
        yield "cache", "Names", settings, VICTIM
        yield "cache", "Names", settings | {"after": True}, VICTIM
    yield "cache", "OfAnotherPool", {}, VICTIM
    yield "cache", "Idle", {}, "Idle.choose_victim: must be defined"
    yield "cache", "ExpertWork", {"key": 1, "num_tokens": 1}, "must be a CachePolicy"
    yield "predictor", "Mute", {}, "Mute.scores: must be defined"
    yield "cache", "NeedsWidth", {"width": 1.5}, "cache.width = 1.5: must be an int or null"
    yield "cache", "NeedsShares", {"shares": "half"}, "must be a float or a list of floats"
    yield "cache", "NeedsShares", {"shares": [True]}, "must be a float or a list of floats"
    yield "cache", "Asks", {"popularity": 3}, "cache.popularity: is filled in for you"
    yield "cache", "Asks", {"num_experts": 3}, "cache.num_experts: is filled in for you"
    yield "cache", "Holds", {}, "preload: key = 1000: must be in [0, 256)"
    yield "prefetch", "Ahead", {}, "prefetch: key = -1: must be in [0, 256)"
    yield "placement", "Serves", {}, "Serves.place = None: must be a list"
    yield "placement", "Serves", {"answer": "CPU"}, "Serves.place: 'CPU' for key = "
    yield "placement", "Serves", {"answer": 3}, "DEFER for key = "
    yield "placement", "Serves", {"answer": 3}, "must be marked lossy = True"
    yield "routing", "Rewrites", {}, "Rewrites.rewrite: key 32 is no expert of layer 0"
    yield "routing", "ToNothing", {}, "ToNothing.rewrite = None: must be a LayerRouting of layer 0"
    yield "routing", "ToAnotherLayer", {}, "must be a LayerRouting of layer 0"
    yield "routing", "ToFewerSlots", {}, "topk_ids must be int[4, 4], as recorded in layer 0"
    yield "routing", "ToLow", {}, "low_slots None without policy.low"
    yield (
        "routing",
        "Unmarked",
        {},
        "Unmarked.rewrite: changes the answer: the class must be marked",
    )
    yield "repack", "Parts", {}, "Parts.repack: must be a partition"
    yield "stages", "Says", {}, "Says.is_boundary = None: must be True or False"
    yield "sizing", "Shares", {}, "Shares.slots: TypeError"
    yield "former", "Forms", {}, "Forms.choose = None: must be a list of places"
    yield "former", "Forms", {"answer": [99]}, "Forms.choose = [99]: must be places in [0, 2)"


def config_of(role: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    config = composed(
        *("workload.requests=[24,26]", "workload.length=[4,4]", "workload.waiting=2"),
        *("cache.ratio=0.15", "output.belady=false"),
    )
    config["policy"][role] = {"_target_": f"{__name__}.{kind}", **settings}
    return config


@pytest.mark.parametrize(("role", "kind", "settings", "said"), list(cases()))
def test_one_line_says_what_a_policy_did_wrong(
    role: str, kind: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate(config_of(role, kind, settings))
    line = explain(caught.value)
    assert line is not None
    assert said in line
    assert "\n" not in line


class Writes(LRU):
    def observe(self, routing: LayerRouting, view: View) -> None:
        assert routing.topk_ids is not None
        routing.topk_ids[:] = 0


@pytest.mark.parametrize("batch", [1, 2])
def test_nobody_writes_in_the_trace(batch: int) -> None:
    config = config_of("cache", "Writes", {})
    config["workload"] |= {"batch_size": batch, "prefill_chunk": 1}
    with pytest.raises(ValueError, match="read-only"):
        simulate(config)


def test_too_little_memory_and_too_long_a_number_are_one_line() -> None:
    assert explain(MemoryError()) == "not enough memory"
    with pytest.raises(ValueError, match="limit") as long:  # as a YAML file may give it, in base 16
        str(16**4000)
    assert explain(long.value) == "a whole number has more than 4300 digits"
    with pytest.raises(MemoryError) as caught:
        np.empty(2**55)
    assert str(explain(caught.value)).startswith("not enough memory: Unable to allocate")
