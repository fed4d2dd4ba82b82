"""Routing for the tests of importers and exporters: choices with locality, as routers make them."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from strategies import trace_of_ids

from traces.exporters.formats import export_named
from traces.importers.formats import format_named
from traces.importers.told import Told
from traces.trace import Provenance, Trace


def choices(
    num_tokens: int, num_layers: int = 3, num_experts: int = 16, top_k: int = 4, seed: int = 0
) -> NDArray[np.int64]:
    """Distinct ids [num_tokens, num_layers, top_k]; a token shares most of them with the one before."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(num_tokens, num_layers, num_experts))
    for token in range(1, num_tokens):
        scores[token] = 0.9 * scores[token - 1] + 0.44 * scores[token]
    return (-scores).argsort(axis=-1)[..., :top_k]


def read_as(name: str, path: Path, **told: object) -> Trace:
    """Import a file that makes a trace."""
    found = format_named(name).reader()(path, Told(**told))  # type: ignore[arg-type]
    assert isinstance(found, Trace)
    return found


def notes_with(trace: Trace, word: str) -> list[str]:
    return [note for note in trace.meta.notes if word in note]


# -- what other tools write -------------------------------------------------------------------------


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


META = {
    "type": "meta",
    "model_id": "org/Toy-MoE",
    "vllm_version": "0.15.1",
    "device": "a GPU",
    "seed": 7,
    "layers_logged": [0],
    "top_k": 4,
    "num_experts": 16,
}


def routes(
    ids: NDArray[np.int64], req_id: str = "r1", first: int = 0, layer: int = 0
) -> list[dict[str, Any]]:
    """A line a token of ids [num_tokens, k]."""
    return [
        {
            "type": "route",
            "req_id": req_id,
            "token_idx": first + row,
            "layer": layer,
            "topk_ids": chosen,
            "topk_weights": [0.4, 0.3, 0.2, 0.05],
        }
        for row, chosen in enumerate(ids.tolist())
    ]


def lattice_lines(ids: NDArray[np.int64], weights: bool = True) -> list[dict[str, Any]]:
    num_tokens, num_layers, _ = ids.shape
    lines = [
        {"layer_idx": layer + 1, "token_idx": token, "selected_ids": ids[token, layer].tolist()}
        for layer in range(num_layers)
        for token in range(num_tokens)
    ]
    return [line | ({"gate_weights": [0.1, 0.4, 0.3, 0.2]} if weights else {}) for line in lines]


def mpt(
    ids: NDArray[np.int64],
    *,
    version: int = 1,
    kind: int = 1,
    extra: Sequence[tuple[int, int, int, int]] = (),
    **header: Any,
) -> bytes:
    """A file as moepager's writer makes it: ids [num_tokens, num_layers, k]."""
    values = {"source": "llama-evalcb", "observation": "full", "n_layers": 4, "n_experts": 16}
    text = json.dumps(values | {"top_k": 4, "model_file": "Toy-Q4.gguf", "later": True} | header)
    out = struct.pack("<8sHHI", b"MPTRACE\0", version, kind, len(text)) + text.encode()
    rows = [
        (100 * token + 10 * layer + slot, token, layer, expert)
        for token, layers in enumerate(ids.tolist())
        for layer, chosen in enumerate(layers)
        for slot, expert in enumerate(chosen)
    ]
    return out + b"".join(struct.pack("<QIHH", *row) for row in [*rows, *extra])


# -- traces to export ------------------------------------------------------------------------------


def small_trace(lengths: tuple[tuple[int, int], ...] = ((4, 6), (3, 7)), **meta: object) -> Trace:
    """A trace of (prompt tokens, decoded tokens) by request, with token ids."""
    ids = choices(sum(map(sum, lengths))).astype(np.uint16)
    trace = trace_of_ids(ids, list(lengths), 16)
    trace.token_id = np.arange(len(trace), dtype=np.int32)
    recorded = Provenance("recorded", "a toy")
    header = {"layer_indices": (1, 3, 4), "licence": "MIT", "provenance": recorded, **meta}
    return replace(trace, meta=replace(trace.meta, **header))


def with_logits(trace: Trace) -> Trace:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(len(trace), trace.meta.num_layers, trace.meta.num_experts))
    bonus = np.linspace(6, 4, trace.meta.top_k)[None, None].repeat(len(trace), axis=0)
    bonus = bonus.repeat(trace.meta.num_layers, axis=1)
    np.put_along_axis(logits, trace.expert_ids.astype(np.int64), bonus, axis=2)
    return replace(trace, router_logits=logits.astype(np.float16))


def export(name: str, trace: Trace, path: Path, chunk_tokens: int = 7) -> tuple[str, ...]:
    chunks = [trace.take(slice(at, at + chunk_tokens)) for at in range(0, len(trace), chunk_tokens)]
    return export_named(name).writer()(chunks, path)
