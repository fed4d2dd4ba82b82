"""Toy traces for tests: small random ones that obey every rule, and a strategy that varies them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from traces.schema import (
    DECODE,
    GATE_COLUMNS,
    NO_EXPERT,
    PREFILL,
    Provenance,
    Trace,
    TraceMeta,
)

OPTIONAL = ("token_id", "text", "stage", "expert_weights", "router_logits", *GATE_COLUMNS)


def make_meta(num_layers: int = 3, num_experts: int = 6, top_k: int = 2, **changes) -> TraceMeta:
    return TraceMeta(
        model="toy",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        layer_indices=tuple(range(1, num_layers + 1)),
        provenance=Provenance("synthetic", "tests", "random"),
        weight_semantics="applied",
        stage_names=("plan", "work"),
        expert_bytes=(64,) * num_layers,
        sampling={"temperature": 0.6},
        notes=("toy",),
        **changes,
    )


def make_trace(
    meta: TraceMeta | None = None, lengths=(5, 4), seed: int = 0, optional=OPTIONAL, shuffle=False
) -> Trace:
    """Requests of the given lengths, two prompt tokens each; ``shuffle`` interleaves them."""
    meta = meta or make_meta()
    rng = np.random.default_rng(seed)
    request = np.repeat(np.arange(len(lengths), dtype=np.int32) * 3, lengths)
    position = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    rows, shape = len(request), (len(request), meta.num_layers, meta.top_k)
    logits = rng.normal(size=(rows, meta.num_layers, meta.num_experts)).astype(np.float16)
    best = np.argsort(-logits, axis=-1, kind="stable").astype(np.uint16)[..., : meta.top_k]
    extra = {
        "token_id": rng.integers(-1, 99, rows).astype(np.int32),
        "text": [str(i) + "é\n"[: i % 3] for i in range(rows)],
        "stage": rng.integers(-1, 2, rows).astype(np.int16),
        "expert_weights": np.sort(rng.random(shape), axis=-1)[..., ::-1].astype(np.float16),
        "router_logits": logits,
    }
    for distance, name in enumerate(GATE_COLUMNS, start=1):
        extra[name] = np.full_like(best, NO_EXPERT)
        extra[name][:, :-distance] = best[:, distance:]
    trace = Trace(
        meta,
        request,
        position,
        phase=np.where(position < 2, PREFILL, DECODE).astype(np.uint8),
        step=np.maximum(position - 1, 0).astype(np.int32),
        expert_ids=best,
        **{name: extra[name] for name in optional},
    )
    return trace.take(np.argsort(rng.random(rows) + position, kind="stable")) if shuffle else trace


def assert_same(left: Trace, right: Trace) -> None:
    assert left.meta == right.meta
    assert left.columns == right.columns
    for name in left.columns:
        one, other = getattr(left, name), getattr(right, name)
        np.testing.assert_array_equal(one, other, err_msg=name)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)


@st.composite
def traces(draw) -> Trace:
    num_experts = draw(st.integers(1, 9))
    meta = make_meta(draw(st.integers(1, 4)), num_experts, draw(st.integers(1, num_experts)))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    optional = tuple(name for name in OPTIONAL if draw(st.booleans()))
    return make_trace(meta, lengths, draw(st.integers(0, 2**32)), optional, draw(st.booleans()))
