"""Traces with stages, made for tests: some with stage structure and some without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.stage_cuts import (
    StagedText,
    annotated_texts,
)
from sim.stage_structure import TestSettings
from sim.workload import Workload
from traces.schema import Provenance, Trace, TraceMeta

FEW = TestSettings(draws=99, edges=(0, 4, 8, 16))


def trace_of(ids: Any, labels: Any, tokens: int, token_id: Any = None) -> Trace:
    """Requests of ``tokens`` decoded tokens each; ids [rows, layers, top_k], labels [rows]."""
    ids = np.asarray(ids, np.uint16)
    rows, layers, top_k = ids.shape
    place = np.arange(rows, dtype=np.int32)
    meta = TraceMeta(
        model="toy",
        num_layers=layers,
        num_experts=8,
        top_k=top_k,
        layer_indices=tuple(range(layers)),
        provenance=Provenance("synthetic", "tests"),
    )
    return Trace(
        meta,
        request_id=place // tokens,
        position=place % tokens,
        phase=np.ones(rows, np.uint8),
        step=place,
        expert_ids=ids,
        stage=None if labels is None else np.asarray(labels, np.int16),
        token_id=None if token_id is None else np.asarray(token_id, np.int32),
    )


def texts_of(trace: Trace) -> list[StagedText]:
    return annotated_texts(Workload(trace))


def random_stages(rng: np.random.Generator, requests: int, tokens: int) -> np.ndarray:
    """Labels of four stages of random lengths a request, their kinds in random order."""
    found = []
    for _ in range(requests):
        cut = np.sort(rng.choice(np.arange(5, tokens - 5), 3, replace=False))
        found.append(rng.permutation(4)[np.searchsorted(cut, np.arange(tokens), side="right")])
    return np.concatenate(found)


def sticky(rng: np.random.Generator, wished: np.ndarray, stay: float, tokens: int) -> np.ndarray:
    """One expert a token: the last one with probability ``stay``, else what is wished for."""
    ids = wished.copy()
    for row in range(len(ids)):
        if row % tokens and rng.random() < stay:
            ids[row] = ids[row - 1]
    return ids[:, None, None]


def local_only(seed: int, requests: int = 10, tokens: int = 60) -> Trace:
    """Tokens like those before them, whatever the stage."""
    rng = np.random.default_rng(seed)
    labels = random_stages(rng, requests, tokens)
    return trace_of(sticky(rng, rng.integers(0, 8, len(labels)), 0.7, tokens), labels, tokens)


def planted(seed: int, requests: int = 10, tokens: int = 60) -> Trace:
    """The same, but half of the new experts are those of the stage's kind."""
    rng = np.random.default_rng(seed)
    labels = random_stages(rng, requests, tokens)
    own = rng.random(len(labels)) < 0.5
    wished = np.where(
        own, 2 * labels + rng.integers(0, 2, len(labels)), rng.integers(0, 8, len(labels))
    )
    return trace_of(sticky(rng, wished, 0.5, tokens), labels, tokens)


def uses_of(ids: Sequence[int]) -> np.ndarray:
    return np.eye(8, dtype=np.float32)[list(ids)]
