"""One layer's decoded tokens for tests of lossy routing, made by hand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from sim.choices import Choices
from sim.policies.base import RoutingPolicy
from sim.policies.history import PastRequest
from sim.residency import Residency
from sim.types import LOADING, NO_EXPERT, RESIDENT, KeySpace, LayerRouting, Phase, StepInfo, View
from tests.strategies import ConstantCosts

NO = NO_EXPERT


def view_of(
    num_experts: int,
    resident: Collection[int] = (),
    num_tokens: int = 1,
    requests: Sequence[int] = (0,),
    loading: Collection[int] = (),
    num_copies: int = 1,
) -> View:
    """Return a view of one layer with these keys in memory, in a step that only decodes."""
    keys = KeySpace(1, num_experts, num_copies)
    sizes, pools = [1] * num_copies, list(range(num_copies))
    residency = Residency(keys, sizes, pools, [num_experts] * num_copies)
    for state, some in ((RESIDENT, resident), (LOADING, loading)):
        for key in some:
            residency.state[key] = state
    step = StepInfo(
        0, Phase.DECODE, num_tokens, num_decoding=num_tokens, request_ids=tuple(requests)
    )
    return View(keys, ConstantCosts(), step, residency)


def routing_of(
    ids: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]] | None = None,
    logits: Sequence[Sequence[float]] | None = None,
    num_experts: int = 8,
) -> LayerRouting:
    """Return what layer 0's router chose for some tokens, [num_tokens, top_k]."""
    columns: dict[str, Any] = {
        "expert_ids": np.array(ids, dtype=np.uint16)[:, None],
        "expert_weights": None if weights is None else np.array(weights, np.float32)[:, None],
        "router_logits": None if logits is None else np.array(logits, np.float16)[:, None],
    }
    choices = Choices(cast("Any", SimpleNamespace(**columns)), slice(None))
    made = LayerRouting(0, (), ()).rewritten(
        KeySpace(1, num_experts), columns["expert_ids"][:, 0], None
    )
    return LayerRouting(0, made.experts, made.token_counts, choices)


def rewritten(
    policy: RoutingPolicy, routing: LayerRouting, view: View
) -> tuple[list[list[int]], list[list[float]] | None]:
    """Return a policy's ids and weights for an event, token by token."""
    made = policy.rewrite(routing, view)
    policy.observe(made, view)
    ids, weights = made.topk_ids, made.topk_weights
    assert ids is not None
    return ids.tolist(), None if weights is None else weights.tolist()


class Past:
    """A calibration of one layer: one request of these tokens, the first of them its prompt."""

    num_layers = 1

    def __init__(
        self,
        ids: Sequence[Sequence[int]],
        num_experts: int,
        weights: Sequence[Sequence[float]] | None = None,
        logits: Sequence[Sequence[float]] | None = None,
    ) -> None:
        self.num_experts = num_experts
        self.top_k = len(ids[0])
        self._request = PastRequest(
            np.array(ids, np.uint16)[:, None],
            1,
            None if weights is None else np.array(weights, np.float16)[:, None],
            None if logits is None else np.array(logits, np.float16)[:, None],
        )

    def popularity(self) -> np.ndarray:
        counts = np.bincount(self._request.ids.ravel(), minlength=self.num_experts)
        return counts[None].astype(np.float64)

    def requests(self) -> list[PastRequest]:  # type: ignore[override]
        return [self._request]
