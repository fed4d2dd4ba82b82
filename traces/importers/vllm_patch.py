"""Reads the JSON lines that home-made patches of vLLM share: a ``meta`` line, then a ``route`` line a token.

``{"type": "meta", "model_id", "vllm_version", "device", "seed", "layers_logged", "top_k", "num_experts"?}``,
``{"type": "route", "req_id", "token_idx", "layer", "topk_ids", "topk_weights"}``. Most log one layer, and of
the public ones none knows requests: ``req_id`` is a constant or counts calls, ``token_idx`` is the row in a
forward pass, or counts all rows. What they do tell is read; the rest is said in the notes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.assemble import assemble
from traces.importers.cells import EMPTY, Cells, codes, padded, pivot
from traces.importers.checked import experts, is_whole, weights, whole
from traces.importers.json_file import json_lines
from traces.importers.routed import Origin, Routed
from traces.importers.told import Told
from traces.importers.vllm_passes import (
    LEAST_WARM_UP,
    is_running,
    passes_of_rows,
    requests_of_passes,
)
from traces.trace import Trace, TraceError, near_match

_TYPES = ("meta", "route")
_KEYS = ("req_id", "token_idx", "layer", "topk_ids", "topk_weights")


@dataclass(slots=True)
class _File:
    """What the lines hold: ``runs`` counts the meta lines before each row."""

    meta: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)


def read(path: Path, told: Told) -> Trace:
    """Return the rows as a trace, by requests where ``req_id`` tells them, else by forward passes.

    Raises
    ------
    TraceError
        For a line of another kind, runs of several models in one file, and rows that do not fit together.
    """
    source = _parse(path)
    cells = _cells(source, path)
    if is_running(cells):
        rows, first = _without_warm_up(cells)
        requests, layers, found = _by_request(rows, source, path, told)
        if first:
            found.append(
                f"repaired: {first} warm-up rows were dropped (equal ones at the beginning)"
            )
    else:
        passes, layers = passes_of_rows(cells, str(path))
        requests, found = requests_of_passes(passes)
    return assemble(requests, told, _origin(path, source, layers, found))


def _origin(path: Path, source: _File, layers: tuple[int, ...], found: list[str]) -> Origin:
    meta = source.meta
    parts = [f"{key} {meta[key]}" for key in ("device", "seed", "torch_version") if key in meta]
    notes = [
        "weights taken as applied: the source does not say",
        "token ids and text are not in it",
    ]
    return Origin(
        file=str(path),
        what="vLLM patch's routes",
        recorder="a patch of vLLM",
        recorder_version=str(meta["vllm_version"]) if "vllm_version" in meta else None,
        detail=", ".join(parts),
        weight_semantics="applied",
        model=str(meta.get("model_id") or "") or None,
        num_experts=meta.get("num_experts"),
        top_k=meta.get("top_k"),
        layer_indices=layers,
        notes=(*notes, *found),
    )


# -- lines -----------------------------------------------------------------------------------------


def _parse(path: Path) -> _File:
    source, run = _File(), 0
    for number, line in json_lines(path):
        where = f"{path}: line {number}"
        kind = line.get("type") if isinstance(line, dict) else None
        if kind == "meta":
            _take_meta(source, line, where)
            run += bool(source.rows)
        elif kind == "route":
            source.rows.append(_checked(line, where))
            source.runs.append(run)
        else:
            hint = near_match(str(kind), _TYPES)
            raise TraceError(f"{where}: type is {kind!r}: must be meta or route{hint}")
    if not source.rows:
        raise TraceError(f"{path}: no routes: a trace has at least one")
    return source


def _take_meta(source: _File, line: dict[str, Any], where: str) -> None:
    for key in ("num_experts", "top_k"):
        value = line.get(key)
        if value is not None and not is_whole(value, 1):
            raise TraceError(f"{where}: {key} is {value!r}: must be a whole number >= 1")
    for key in ("model_id", "top_k", "layers_logged", "num_experts"):
        if source.meta and line.get(key) != source.meta.get(key):
            rule = f"must be {source.meta.get(key)!r}, as in the run before it in the file"
            raise TraceError(f"{where}: {key} is {line.get(key)!r}: {rule}")
    source.meta = line


def _checked(line: dict[str, Any], where: str) -> dict[str, Any]:
    for key in _KEYS[:4]:
        if key not in line:
            raise TraceError(f"{where}: '{key}' is missing{near_match(key, list(line))}")
    for key in ("token_idx", "layer"):
        whole(line[key], f"{where}: {key}")
    ids = experts(line["topk_ids"], f"{where}: topk_ids")
    if line.get("topk_weights") is not None:
        weights(line["topk_weights"], f"{where}: topk_weights", len(ids))
    return line


def _cells(source: _File, path: Path) -> Cells:
    """Return the rows; a request is a ``req_id`` of one run."""
    rows = source.rows
    names = [(run, str(row["req_id"])) for run, row in zip(source.runs, rows, strict=True)]
    given = [row.get("topk_weights") for row in rows]
    absent = given.count(None)
    if 0 < absent < len(given):
        raise TraceError(
            f"{path}: {absent} of {len(given)} routes lack topk_weights: must be all or none"
        )
    return Cells(
        request=codes(names)[0],
        token=np.array([row["token_idx"] for row in rows], dtype=np.int64),
        layer=np.array([row["layer"] for row in rows], dtype=np.int64),
        expert_ids=padded([row["topk_ids"] for row in rows], EMPTY, np.int32),
        expert_weights=None if absent else _weights(given),
    )


def _weights(given: list[list[float] | None]) -> NDArray[np.float32]:
    return padded([row or [] for row in given], 0, np.float32)


# -- requests that the file names ------------------------------------------------------------------


def _without_warm_up(cells: Cells) -> tuple[Cells, int]:
    """Drop equal rows at the beginning of a file that counts its rows on; return how many."""
    ids = cells.expert_ids
    differs = (ids != ids[0]).any(axis=1)
    count = int(np.argmax(differs)) if differs.any() else 0
    if count < LEAST_WARM_UP or len(np.unique(cells.layer)) > 1:
        return cells, 0
    kept: slice = slice(count, None)
    weights = cells.expert_weights
    return Cells(
        request=cells.request[kept],
        token=cells.token[kept],
        layer=cells.layer[kept],
        expert_ids=ids[kept],
        expert_weights=None if weights is None else weights[kept],
    ), count


def _by_request(
    cells: Cells, source: _File, path: Path, told: Told
) -> tuple[list[Routed], tuple[int, ...], list[str]]:
    names = codes(
        [(run, str(row["req_id"])) for run, row in zip(source.runs, source.rows, strict=True)]
    )[1]
    found, layers = pivot(cells, str(path), lambda number: f"req_id {_name(names, number)}")
    num_prompt = told.prompt_or_first
    requests = [
        replace(one.routed, num_prompt=min(num_prompt, len(one.routed)), first_position=0)
        for one in found
    ]
    notes = [f"phase is not in the source: the first {num_prompt} of a request count as prompt"]
    if len(requests) == 1:
        notes.append(
            "warning: one req_id for all rows: requests are run together, if there were several"
        )
    return requests, layers, notes


def _name(names: list[Any], number: int) -> str:
    return repr(names[number][1])
