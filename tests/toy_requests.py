"""Toy requests for tests of the importers' core, of which routing looks like a router's."""

from __future__ import annotations

import numpy as np
import pytest

from traces.importers.assemble import assemble
from traces.importers.routed import Origin, Routed
from traces.importers.told import NOTHING, Told
from traces.schema import Trace, TraceError

ORIGIN = Origin(file="a.bin", what="toy file", recorder="toy", num_experts=8)


def drawn(tokens: int, layers: int = 3, top_k: int = 2, experts: int = 8, seed: int = 0):
    """Ids [tokens, layers, k] of a router that keeps half of its experts from token to token."""
    rng = np.random.default_rng(seed)
    scores = rng.random((tokens, layers, experts))
    for row in range(1, tokens):
        scores[row] = 0.7 * scores[row - 1] + 0.3 * scores[row]
    return (-scores).argsort(axis=-1)[..., :top_k].astype(np.int32)


def routed(
    ids: np.ndarray | None = None, prompt: int = 2, name: str = "request 0", **more
) -> Routed:
    return Routed(name, drawn(6) if ids is None else ids, prompt, **more)


def weights_of(ids: np.ndarray) -> np.ndarray:
    return np.broadcast_to([0.75, 0.25], ids.shape).astype(np.float32)


def notes(trace: Trace) -> str:
    return "\n".join(trace.meta.notes)


def made(*requests: Routed, told: Told = NOTHING, origin: Origin = ORIGIN) -> Trace:
    return assemble(requests, told, origin)


def refused(*requests: Routed, told: Told = NOTHING, origin: Origin = ORIGIN) -> str:
    with pytest.raises(TraceError) as error:
        assemble(requests, told, origin)
    text = str(error.value)
    assert text.startswith("a.bin: ")
    assert "\n" not in text
    return text
