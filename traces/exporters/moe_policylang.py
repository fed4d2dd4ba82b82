"""Writes moe-policylang's Parquet trace: a row a token and layer, tokens in file order, then layers.

Its scores are the softmax's before any renormalisation. They are written where the trace has them (its
weights are raw probabilities, or it has logits of a softmax router), else left out. The trace's header goes
into the file's metadata, where their reader does not look and ours does.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.moe_policylang_rows import EXPORT_KEY
from traces.out_file import whole_output
from traces.trace import NO_EXPERT, PHASE_NAMES, Trace, TraceError, TraceMeta

_SOFTMAX = ("softmax", "topk_softmax")
_ALWAYS_LOST = "steps: their traces are of one prompt after another"


def write(chunks: Iterable[Trace], out: Path) -> tuple[str, ...]:
    """Write the chunks of one trace; return what the format has no place for.

    Raises
    ------
    TraceError
        If ``out`` cannot be written.
    """
    import pyarrow.parquet as pq

    remaining = iter(chunks)
    first = next(remaining, None)
    if first is None:
        raise TraceError(f"{out}: no rows: a trace has at least one")
    schema = _schema(first)
    with (
        whole_output(out) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd") as file,
    ):
        for chunk in chain([first], remaining):
            file.write_table(_table(chunk, schema))
    return _lost(first)


def _schema(chunk: Trace) -> Any:
    import pyarrow as pa

    integer, numbers = pa.int32(), pa.list_(pa.float32())
    fields = {
        "prompt_id": integer,
        "token_idx": integer,
        "layer_idx": integer,
        "selected_experts": pa.list_(pa.int32()),
    }
    if _has_scores(chunk):
        fields["router_scores"] = numbers
    if chunk.router_logits is not None and _is_softmax(chunk.meta):
        fields["router_softmax"] = numbers
    if chunk.token_id is not None:
        fields["token_id"] = integer
    fields["phase"] = pa.string()
    if chunk.router_logits is not None:
        fields["router_logits"] = numbers
    return pa.schema(fields.items(), metadata={EXPORT_KEY: chunk.meta.to_json().encode()})


def _is_softmax(meta: TraceMeta) -> bool:
    return meta.scoring in _SOFTMAX


def _are_raw(chunk: Trace) -> bool:
    """Tell whether the weights are the softmax's own: so called, or applied as they are."""
    meta = chunk.meta
    as_they_are = meta.weight_semantics == "applied" and meta.normalized is False
    is_raw = meta.weight_semantics == "raw_prob" or (as_they_are and meta.scoring == "softmax")
    return chunk.expert_weights is not None and is_raw


def _has_scores(chunk: Trace) -> bool:
    return _are_raw(chunk) or (chunk.router_logits is not None and _is_softmax(chunk.meta))


def _table(chunk: Trace, schema: Any) -> Any:
    """Return the rows of a chunk; cells without experts have none."""
    import pyarrow as pa

    is_there = chunk.expert_ids != NO_EXPERT
    row, layer = np.nonzero(is_there.any(axis=2))
    columns: dict[str, Any] = {
        "prompt_id": chunk.request_id[row],
        "token_idx": chunk.position[row],
        "layer_idx": np.array(chunk.meta.layer_indices, dtype=np.int32)[layer],
        "selected_experts": _lists(
            chunk.expert_ids[row, layer].astype(np.int32), is_there[row, layer]
        ),
        "phase": pa.DictionaryArray.from_arrays(
            pa.array(chunk.phase[row].astype(np.int8)), pa.array(PHASE_NAMES)
        ).cast(pa.string()),
    }
    if chunk.token_id is not None:
        columns["token_id"] = chunk.token_id[row]  # -1 where unknown: their reader dies of nulls
    if chunk.router_logits is not None:
        logits = chunk.router_logits[row, layer].astype(np.float32)
        columns["router_logits"] = _lists(logits)
        if _is_softmax(chunk.meta):
            columns["router_softmax"] = _lists(_softmax(logits))
    if _has_scores(chunk):
        columns["router_scores"] = _lists(_scores(chunk, row, layer), is_there[row, layer])
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _scores(chunk: Trace, row: NDArray[np.intp], layer: NDArray[np.intp]) -> NDArray[np.float32]:
    """Return the chosen experts' probabilities, float32[num_cells, k]."""
    if _are_raw(chunk):
        assert chunk.expert_weights is not None
        return chunk.expert_weights[row, layer].astype(np.float32)
    assert chunk.router_logits is not None
    probs = _softmax(chunk.router_logits[row, layer].astype(np.float32))
    ids = np.minimum(chunk.expert_ids[row, layer], probs.shape[1] - 1)
    return np.take_along_axis(probs, ids.astype(np.intp), axis=1)


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def _lists(values: NDArray[Any], is_there: NDArray[np.bool_] | None = None) -> Any:
    """Return rows of an array as an Arrow list array, without the cells that are not there."""
    import pyarrow as pa

    lengths = np.full(len(values), values.shape[1]) if is_there is None else is_there.sum(axis=1)
    flat = values.reshape(-1) if is_there is None else values[is_there]
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _lost(chunk: Trace) -> tuple[str, ...]:
    lost = [_ALWAYS_LOST]
    if chunk.expert_weights is not None and not _are_raw(chunk):
        lost.append(f"weights ({chunk.meta.weight_semantics}): theirs are raw probabilities")
    names = [
        name
        for name in ("text", "stage", "next_gate_ids", "next_gate_ids_2", "next_gate_ids_3")
        if getattr(chunk, name) is not None
    ]
    if names:
        lost.append(f"columns {', '.join(names)}")
    if not _has_scores(chunk):
        lost.append("no scores or softmax is written, which some of their analyses need")
    return tuple(lost)
