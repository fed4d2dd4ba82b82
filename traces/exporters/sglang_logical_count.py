"""Writes how often each expert was used, for SGLang's ``--init-expert-location FILE.json``.

``{"logical_count": [num_layers, num_experts]}`` over all hidden layers, dense ones 0: by it SGLang places
experts, and copies of hot ones (EPLB). The counts are over all tokens, prompt and output.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from traces.locality_requests import expert_uses
from traces.out_file import whole_output
from traces.schema import Trace, TraceError, TraceMeta


def write(chunks: Iterable[Trace], out: Path) -> tuple[str, ...]:
    """Count the experts of a trace into a file, whole or not at all; return what the format has no place for.

    Raises
    ------
    TraceError
        If the file cannot be written.
    """
    counts, meta = None, None
    for chunk in chunks:
        meta = chunk.meta
        uses = expert_uses(chunk.expert_ids, meta.num_experts)
        counts = uses if counts is None else counts + uses
    if counts is None or meta is None:
        raise TraceError(f"{out}: there are no rows to count")
    content = {"logical_count": _of_all_layers(counts, meta.layer_indices).tolist()}
    with whole_output(out) as temporary:
        temporary.write_text(json.dumps(content), encoding="utf-8")
    return _notes(meta)


def _of_all_layers(counts: NDArray[np.int64], layer_indices: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the counts with a row of zeros for each dense layer before the last MoE layer."""
    every = np.zeros((layer_indices[-1] + 1, counts.shape[1]), dtype=np.int64)
    every[list(layer_indices)] = counts
    return every


def _notes(meta: TraceMeta) -> tuple[str, ...]:
    layers = meta.layer_indices[-1] + 1
    notes = [
        "the order of tokens, requests and weights has no place there",
        f"{layers} layers are written, up to the last MoE layer: SGLang wants all that the model has",
    ]
    if meta.incomplete_layers:
        notes.append("prompt tokens lack the last layer, so its counts are of decoded tokens only")
    if meta.provenance.kind == "synthetic":
        notes.append("the trace is synthetic, and the file has no place to say so")
    return tuple(notes)
