"""What the tests of placement policies share: a view of a small memory. Keys are ``layer * 8 + expert``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from sim.policies.base import PlacementPolicy
from sim.residency import Residency
from sim.types import Choices, ExpertWork, KeySpace, LayerRouting, Phase, Service, StepInfo, View
from tests.strategies import ConstantCosts

KEYS = KeySpace(8, 8)


class Columns(Choices):
    """Recorded columns of one step, [num_tokens, num_layers, ...], by name."""

    def __init__(self, **columns: NDArray[Any]) -> None:
        self._columns = dict(columns)
        self._lists = {}
        self.order = None

    def column(self, name: str) -> NDArray[Any] | None:
        return self._columns.get(name)


def recorded(layer: int, **columns: NDArray[Any]) -> LayerRouting:
    """Return a layer's routing as a trace with these columns has it."""
    found, counts = np.unique(columns["expert_ids"][:, layer], return_counts=True)
    keys = [layer * KEYS.num_experts + int(expert) for expert in found]
    return LayerRouting(layer, keys, counts.tolist(), cast(Any, Columns(**columns)))


def view_of(
    costs: ConstantCosts | None = None,
    phase: Phase = Phase.DECODE,
    tokens: int = 1,
    resident: Sequence[int] = (),
    slots: int = 64,
) -> View:
    """Return the view of a step; one pool of ``slots`` experts of one byte holds ``resident``."""
    residency = Residency(KEYS, [1] * KEYS.num_layers, [0] * KEYS.num_layers, [slots])
    for key in resident:
        residency.reserve(key)
    residency.complete_at_once(resident)
    decoding = tokens if phase == Phase.DECODE else 0
    step = StepInfo(0, phase, tokens, num_decoding=decoding)
    return View(KEYS, costs or ConstantCosts(), step, residency)


def event(view: View, counts: Mapping[int, int]) -> LayerRouting:
    """Make the view's event one in which these experts serve so many tokens; return its routing."""
    layer = min(counts) // KEYS.num_experts
    view.routing = LayerRouting(layer, list(counts), list(counts.values()))
    view.layer = layer
    view.event += 1
    return view.routing


def services(policy: PlacementPolicy, view: View, counts: Mapping[int, int]) -> list[Service]:
    """Return how the missing experts of an event (all of them, if hits are asked about) are served."""
    policy.observe(event(view, counts), view)
    work = [ExpertWork(key, n, view.is_resident(key)) for key, n in counts.items()]
    asked = [item for item in work if policy.places_hits or not item.resident]
    return list(policy.place(asked, view))
