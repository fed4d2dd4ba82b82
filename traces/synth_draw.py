"""Draws the routing of requests from a fitted model, in blocks of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.schema import DECODE, Provenance, Trace, TraceMeta
from traces.synth_model import SynthModel
from traces.synth_scores import BLOCK_TOKENS, States, choose, directions, filters

_ROUTING, _STAGES = 1, 2
"""Purposes of a request's random numbers."""


class Routes(NamedTuple):
    """Choices uint16[num_tokens, num_layers, top_k], best first, and their weights, if wanted."""

    expert_ids: NDArray[np.uint16]
    expert_weights: NDArray[np.float16] | None


class Router:
    """A fitted model, ready to route: the experts' directions and the filters are worked out.

    Inside, the experts of a layer are in the order of their classes; ``order`` says which is which.
    """

    def __init__(self, model: SynthModel) -> None:
        self.model = model
        order = np.argsort(model.classes, axis=1, kind="stable")
        ranked = np.take_along_axis(model.classes, order, axis=1)
        bounds = np.arange(model.num_classes + 1)
        self.order = order.astype(np.uint16)
        self._edges = [np.searchsorted(row, bounds).tolist() for row in ranked]
        all_directions = directions((model.num_layers, model.num_experts), model.rank, model.seed)
        self._directions = np.take_along_axis(all_directions, order[:, None], axis=2)
        offsets = model.offsets.transpose(1, 0, 2)  # [layer, stage, expert]
        self._offsets = np.take_along_axis(offsets, order[:, None], axis=2)
        self.filters = filters(model.correlations * (1 - model.stays)[..., None])

    def scores(
        self, layer: int, states: NDArray[np.float32], stages: NDArray[np.int16]
    ) -> NDArray[np.float32]:
        """Return scores of a layer's experts in ``order``, float32[num_tokens, num_experts].

        ``states`` is float32[num_classes, num_tokens, rank].
        """
        scores = np.empty((len(stages), self.model.num_experts), dtype=np.float32)
        for own, (first, last) in zip(states, pairwise(self._edges[layer]), strict=True):
            np.matmul(own, self._directions[layer, :, first:last], out=scores[:, first:last])
        scores += self._offsets[layer, stages]
        return scores

    def request(self, request: int, seed: int) -> RequestRoutes:
        """Begin a request; its routing depends on the seed and its number, on nothing else."""
        rng = generator(seed, request, _ROUTING)
        model = self.model
        return RequestRoutes(
            self, States(self.filters, model.stays, model.rank, model.coupling, rng)
        )


class RequestRoutes:
    """The routing of one request, which comes in blocks of ``BLOCK_TOKENS``."""

    def __init__(self, router: Router, states: States) -> None:
        self._router, self._states = router, states

    def next(self, stages: NDArray[np.int16], weights: bool = False) -> Routes:
        """Return the routes of the next tokens, a block's at most, whose stages these are.

        Only the last call may ask for fewer: the rest of a block is not kept.
        """
        router, count = self._router, len(stages)
        layers, top_k = router.model.num_layers, router.model.top_k
        states = self._states.next()[:, :, :count]
        ids = np.empty((count, layers, top_k), dtype=np.uint16)
        shares = np.empty(ids.shape, dtype=np.float16) if weights else None
        for layer in range(layers):
            scores = router.scores(layer, states[layer], stages)
            best = choose(scores, top_k)
            ids[:, layer] = router.order[layer, best]
            if shares is not None:
                chosen = np.take_along_axis(scores, best.astype(np.intp), axis=1)
                shares[:, layer] = softmax(chosen * router.model.sharpness[layer])
        return Routes(ids, shares)


def softmax(scores: NDArray) -> NDArray:
    """Return the shares of scores [..., top_k] that descend, which sum to one."""
    powers = np.exp(scores - scores[..., :1])
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def generator(seed: int, request: int, purpose: int) -> np.random.Generator:
    """Return the random numbers of a request for one purpose."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, request, purpose])))


def stage_generator(seed: int, request: int) -> np.random.Generator:
    """Return the random numbers of a request's stages."""
    return generator(seed, request, _STAGES)


def draw_like(
    model: SynthModel, sequences: Sequence[NDArray[np.int16]], seed: int, replicas: int = 1
) -> Trace:
    """Return requests that go through the given stages, each ``replicas`` times; all rows decode.

    For comparisons with a source: request after request, one token a step.
    """
    router = Router(model)
    parts, requests, positions = [], [], []
    for number, stages in enumerate([*sequences] * replicas):
        routes = router.request(number, seed)
        for first in range(0, len(stages), BLOCK_TOKENS):
            parts.append(routes.next(stages[first : first + BLOCK_TOKENS]).expert_ids)
        requests.append(np.full(len(stages), number, dtype=np.int32))
        positions.append(np.arange(len(stages), dtype=np.int32))
    rows = sum(map(len, requests))
    return Trace(
        _plain_meta(model),
        request_id=np.concatenate(requests),
        position=np.concatenate(positions),
        phase=np.full(rows, DECODE, dtype=np.uint8),
        step=np.arange(rows, dtype=np.int32),
        expert_ids=np.concatenate(parts),
    )


def _plain_meta(model: SynthModel) -> TraceMeta:
    return TraceMeta(
        model="synthetic",
        num_layers=model.num_layers,
        num_experts=model.num_experts,
        top_k=model.top_k,
        layer_indices=tuple(range(model.num_layers)),
        provenance=Provenance("synthetic", "traces.synth_draw", "drawn for a comparison"),
    )
