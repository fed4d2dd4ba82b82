"""What a model routes, found without the recorder: by replaced methods, in one full forward.

Also how the recorder's tests compare traces.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from traces.record_hooks import find_moe_layers
from traces.schema import GATE_COLUMNS, NO_EXPERT, Trace

NUM_EXPERTS = 8
COLUMNS = ("request_id", "position", "phase", "token_id", "expert_ids", *GATE_COLUMNS)
LOGITS_PLACE = {"Llama4Router": 1, "JetMoeTopKGating": 4, "DbrxRouter": None}


class Reference:
    """One uncached forward of a lone sequence through a copy of ``model``."""

    def __init__(self, model: Any, tokens: list[int]) -> None:
        twin = copy.deepcopy(model)
        self.layers = find_moe_layers(twin.get_decoder())
        self.kinds = [type(layer.router).__name__ for layer in self.layers]
        self.routers = [layer.router.forward for layer in self.layers]
        self.router_calls: list[tuple[tuple[Any, ...], Any]] = []
        self.expert_calls: list[dict[str, Any]] = []
        for layer in self.layers:
            layer.router.forward = self._spy_router(layer.router.forward)
            layer.experts.forward = self._spy_experts(layer.experts.forward)
        with torch.no_grad():
            twin(input_ids=torch.tensor([tokens]), use_cache=False)

    def _spy_router(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*args: Any) -> Any:
            inputs = tuple(copy.deepcopy(arg) for arg in args)
            self.router_calls.append((inputs, forward(*args)))
            return self.router_calls[-1][1]

        return spy

    def _spy_experts(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(forward).parameters)

        def spy(*args: Any) -> Any:
            self.expert_calls.append(dict(zip(names, args, strict=False)))
            return forward(*args)

        return spy

    def logits(self, layer: int) -> Any:
        """Router logits [n, E] of a layer, identity experts left out."""
        return self._logits_of(self.router_calls[layer][1], layer)[:, :NUM_EXPERTS]

    def _logits_of(self, output: Any, layer: int) -> Any:
        place = LOGITS_PLACE.get(self.kinds[layer], 0)
        return output if place is None else output[place]

    def routing(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and weights [n, k] that the experts computed with, heaviest slot first."""
        call = self.expert_calls[layer]
        if "top_k_index" in call:
            return by_weight(call["top_k_index"], call["top_k_weights"])
        if "router_indices" in call:
            return by_weight(call["router_indices"], call["routing_weights"])
        if self.kinds[layer] == "Llama4Router":
            return self._llama4(layer)
        return by_rank(self.logits(layer), 2)  # JetMoe sorts by expert before it calls them

    def _llama4(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Llama-4 gives every expert every token, scaled by 0 unless it was chosen."""
        scaled = self.expert_calls[layer]["hidden_states"]
        loads = scaled.reshape(NUM_EXPERTS, -1, scaled.shape[-1]).abs().sum(dim=-1).T
        assert ((loads > 0).sum(dim=1) == 1).all()
        ids = loads.argmax(dim=1, keepdim=True)
        hidden = self.router_calls[layer][0][0]
        scale = loads.sum(dim=1, keepdim=True) / hidden.abs().sum(dim=1, keepdim=True)
        return ids.numpy(), scale.numpy()

    def gate_ahead(self, layer: int, distance: int) -> np.ndarray:
        """What the router ``distance`` layers on picks on this layer's router input, best first."""
        hidden = self.router_calls[layer][0][0]
        later = layer + distance
        rest = self.router_calls[later][0][1:]
        with torch.no_grad():
            output = self.routers[later](hidden, *rest)
        if self.kinds[later] in LOGITS_PLACE:
            slots = 1 if self.kinds[later] == "Llama4Router" else 2
            return by_rank(self._logits_of(output, later), slots)[0]
        return by_weight(output[2], output[1])[0]


def by_weight(ids: Any, weights: Any) -> tuple[np.ndarray, np.ndarray]:
    """Order slots by falling weight; an identity expert (LongCat) becomes no expert, last."""
    ids, weights = ids.numpy(), weights.float().numpy()
    weights = np.where(ids < NUM_EXPERTS, weights, -1)
    ids = np.where(ids < NUM_EXPERTS, ids, NO_EXPERT)
    order = np.argsort(-weights, axis=1, kind="stable")
    weights = np.take_along_axis(weights, order, 1)
    return np.take_along_axis(ids, order, 1), np.maximum(weights, 0)


def by_rank(logits: Any, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose by logits, weigh by the softmax of the chosen ones."""
    ranked = torch.sort(logits, dim=1, descending=True)
    return ranked.indices[:, :slots].numpy(), ranked.values[:, :slots].softmax(dim=1).numpy()


def assert_same(left: Trace, right: Trace) -> None:
    """Compare what was routed, not when (steps depend on batches and chunks)."""
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
    assert_close(left.expert_weights, right.expert_weights)


def assert_close(recorded: Any, expected: Any) -> None:
    recorded, expected = np.float32(recorded), np.float32(expected)
    np.testing.assert_allclose(recorded, expected, rtol=2e-3, atol=2e-3)
