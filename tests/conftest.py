"""Fixtures shared by all tests: a small synthetic trace, in memory and as a file."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from traces.schema import DECODE, PREFILL, Provenance, Trace, TraceMeta
from traces.store import write_trace

_PHRASES = ("So it goes.\n", "Wait, no.\n", "Step 1: two and two.\n", "Check it.\n", "Plan: add.\n")


def make_trace(
    num_requests: int = 6,
    num_layers: int = 4,
    num_experts: int = 16,
    top_k: int = 2,
    prompt: int = 5,
    decoded: int = 40,
    seed: int = 1,
) -> Trace:
    """Return a trace with text whose tokens keep about half of the last token's experts."""
    rng = np.random.default_rng(seed)
    length = prompt + decoded
    rows = num_requests * length
    ids = np.empty((rows, num_layers, top_k), dtype=np.uint16)
    for row in range(rows):
        for layer in range(num_layers):
            fresh = rng.choice(num_experts, size=top_k, replace=False, p=_skew(num_experts))
            keep = row % length != 0 and rng.random() < 0.5
            ids[row, layer] = ids[row - 1, layer] if keep else fresh
    text = "".join(_PHRASES) * (1 + rows // 20)
    meta = TraceMeta(
        model="synthetic",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        layer_indices=tuple(range(num_layers)),
        sorted_by_weight=False,
        weight_semantics="none",
        provenance=Provenance("synthetic", "tests/conftest.py"),
    )
    position = np.tile(np.arange(length, dtype=np.int32), num_requests)
    return Trace(
        meta=meta,
        request_id=np.repeat(np.arange(num_requests, dtype=np.int32), length),
        position=position,
        phase=np.where(position < prompt, PREFILL, DECODE).astype(np.uint8),
        step=np.arange(rows, dtype=np.int32),
        expert_ids=ids,
        text=list(text[:rows]),
    )


def _skew(num_experts: int) -> np.ndarray:
    weights = 1.0 / np.arange(1, num_experts + 1)
    return weights / weights.sum()


@pytest.fixture(scope="session")
def small_trace() -> Trace:
    return make_trace()


@pytest.fixture(scope="session")
def small_trace_file(tmp_path_factory: pytest.TempPathFactory, small_trace: Trace) -> Path:
    path = tmp_path_factory.mktemp("traces") / "small.parquet"
    write_trace(path, small_trace)
    return path


@pytest.fixture
def heeds_sigint() -> Iterator[None]:
    """Let SIGINT interrupt, also where the suite runs in the background of a shell that has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))
