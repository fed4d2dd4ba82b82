"""Reads moe-policylang traces (``trace_recorder``, up to 1.15): Parquet, or JSON lines with a header.

A row is a token and layer: ``prompt_id, token_idx, layer_idx, selected_experts`` and maybe ``router_scores``
(of the chosen, the softmax's, not renormalised), ``router_softmax`` and ``router_logits`` of all experts,
``token_id``, ``phase``. The Parquet form has lost the model: name, experts and top-k. Its oldest traces have
the softmax alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.assemble import assemble
from traces.importers.cells import EMPTY, Cells, Pivoted, pivot, top_of
from traces.importers.moe_policylang_rows import UNKNOWN, Rows, rows_of_json, rows_of_parquet
from traces.importers.routed import Origin, Routed
from traces.importers.told import Told, agreed, needed
from traces.trace import DECODE, Provenance, Trace, TraceError, TraceMeta

_OWN_CHOICE = (
    "ids and scores are the recorder's own softmax and top-k of the router's logits: routers with sigmoid "
    "scores, groups or a bias choose otherwise"
)
_STEPS = "steps derived: prompts one after another"
_FLOOR_SHARE = 0.9
"""Share of softmax rows that are level behind the chosen, from which all were made up of the scores."""


def read(path: Path, told: Told) -> Trace:
    """Return the trace; ``told`` must say the number of experts where the file has no softmax or header.

    Raises
    ------
    TraceError
        For a file without the columns, a token that has a layer twice, and a softmax alone where nobody tells
        the top-k.
    """
    is_parquet = path.suffix.lower() == ".parquet"
    rows = rows_of_parquet(path) if is_parquet else rows_of_json(path)
    told = _with_header(told, rows.header)
    cells, semantics, found = _cells(rows, path, told)
    pivoted, layers = pivot(cells, str(path), lambda number: f"prompt {rows.prompts[number]}")
    lengths = _prompt_tokens(pivoted, told, path, found)
    requests = [_request(one, length) for one, length in zip(pivoted, lengths, strict=True)]
    origin = Origin(
        file=str(path),
        what=f"moe-policylang {'Parquet' if is_parquet else 'JSON lines'}",
        weight_semantics=semantics,
        num_experts=_num_experts(rows, path, told),
        top_k=rows.top_k,
        model=rows.model,
        layer_indices=layers,
        **_recorder(rows.header, found),
    )
    return _honest(assemble(requests, told, origin), rows.header)


def _recorder(header: TraceMeta | None, found: list[str]) -> dict[str, Any]:
    """Return who recorded the trace, and its notes."""
    if header is None:
        return {"recorder": "moe-policylang", "notes": (_OWN_CHOICE, _STEPS, *found)}
    source = header.provenance
    return {
        "recorder": header.recorder or "Greenroom",
        "detail": f"exported from {source.kind} {source.source}",
        "notes": (*header.notes, _STEPS, *found),
    }


def _with_header(told: Told, header: TraceMeta | None) -> Told:
    """Fill what nobody told with the header of a file that we exported."""
    if header is None:
        return told
    known = {
        name: getattr(header, name)
        for name in (
            "model",
            "num_shared_experts",
            "hidden_size",
            "intermediate_size",
            "scoring",
            "tokenizer",
            "licence",
        )
    }
    return replace(told, **{k: v for k, v in known.items() if getattr(told, k) is None})


def _honest(trace: Trace, header: TraceMeta | None) -> Trace:
    """Return the trace, called synthetic if what was exported is."""
    if header is None or header.provenance.kind != "synthetic":
        return trace
    source = trace.meta.provenance
    provenance = Provenance("synthetic", source.source, source.detail)
    return replace(trace, meta=replace(trace.meta, provenance=provenance))


# -- what was chosen -------------------------------------------------------------------------------


def _cells(rows: Rows, path: Path, told: Told) -> tuple[Cells, str, list[str]]:
    """Return the rows as cells, what their weights are, and notes."""
    ids, found = _choices(rows, path, told)
    is_level = rows.softmax is not None and _is_level(rows.softmax, ids)
    cells = Cells(
        request=rows.request,
        token=rows.token,
        layer=rows.layer,
        expert_ids=ids,
        expert_weights=_scores(rows, ids),
        router_logits=None if is_level and rows.logits is None else _logits(rows, found),
        of_token=rows.of_token,
    )
    if cells.expert_weights is None:
        return cells, "none", found
    if is_level:
        found.append(
            "the softmax is made up of a vLLM session's weights: no logits, applied weights"
        )
    return cells, "applied" if is_level else "raw_prob", found


def _choices(rows: Rows, path: Path, told: Told) -> tuple[NDArray[np.int32], list[str]]:
    """Return the chosen experts, int32[num_rows, k], and notes."""
    notes = [f"not kept: {', '.join(rows.left_out)}"] if rows.left_out else []
    if rows.expert_ids is not None:
        return rows.expert_ids, notes
    assert rows.softmax is not None
    asked = rows.top_k or told.top_k or told.native_top_k
    top_k = needed(
        str(path), "the choices a token has, as the softmax alone is in it", asked, "--top-k"
    )
    notes.append(f"ids are the {top_k} largest of the recorded softmax: the file has no choices")
    return top_of(rows.softmax, top_k)[0], notes


def _scores(rows: Rows, ids: NDArray[np.int32]) -> NDArray[np.float32] | None:
    """Return the probabilities of the chosen, of their column or of the softmax."""
    if rows.scores is not None or rows.softmax is None:
        return rows.scores
    chosen = np.take_along_axis(rows.softmax, np.maximum(ids, 0), axis=1)
    return np.where(ids == EMPTY, 0, chosen).astype(np.float32)


def _is_level(softmax: NDArray[np.float32], ids: NDArray[np.int32]) -> bool:
    """Tell whether all experts but the chosen have one probability, which no router gives."""
    others = softmax.copy()
    np.put_along_axis(others, np.maximum(ids, 0), np.nan, axis=1)
    rest = np.isnan(others).sum(axis=1) < softmax.shape[1] - 1
    if not rest.any():
        return False
    others = others[rest]
    level = np.nanmax(others, axis=1) == np.nanmin(others, axis=1)
    return float(level.mean()) > _FLOOR_SHARE


def _logits(rows: Rows, found: list[str]) -> NDArray[np.float32] | None:
    if rows.logits is not None or rows.softmax is None:
        return rows.logits
    found.append("logits are the logarithms of the recorded softmax: right up to a constant")
    with np.errstate(divide="ignore"):
        return np.log(rows.softmax)


def _num_experts(rows: Rows, path: Path, told: Told) -> int | None:
    """Return what header and widths say of the experts; they must agree."""
    number = rows.num_experts if rows.header is None else rows.header.num_experts
    for name, values in (("router_softmax", rows.softmax), ("router_logits", rows.logits)):
        if values is None:
            continue
        if number not in (None, values.shape[1]):
            rule = f"must be {number}, the number of experts"
            raise TraceError(f"{path}: {name} has {values.shape[1]} values a row: {rule}")
        number = values.shape[1]
    return agreed(str(path), "num_experts", told.num_experts, number)


# -- prompts ---------------------------------------------------------------------------------------


def _prompt_tokens(pivoted: list[Pivoted], told: Told, path: Path, found: list[str]) -> list[int]:
    """Return the prompt tokens of each request, as its phases say, or as told, or 1."""
    phases = [one.of_token.get("phase") for one in pivoted]
    known = [phase is not None and bool((phase != UNKNOWN).all()) for phase in phases]
    if not all(known):
        count = told.prompt_or_first
        found.append(f"phase is not in the source: the first {count} of a prompt count as prefill")
        return [min(count, len(one.routed)) for one in pivoted]
    lengths = []
    for one, phase in zip(pivoted, phases, strict=True):
        assert phase is not None
        count = int((phase != DECODE).sum())
        if (phase[:count] == DECODE).any():
            at = int(np.argmax(phase == DECODE)) + one.routed.first_position
            rule = "must not decode before the prompt ends"
            raise TraceError(f"{path}: {one.routed.name}: token {at}: {rule}")
        lengths.append(count)
    return lengths


def _request(one: Pivoted, num_prompt: int) -> Routed:
    token_id = one.of_token.get("token_id")
    return replace(one.routed, num_prompt=num_prompt, token_id=token_id)
