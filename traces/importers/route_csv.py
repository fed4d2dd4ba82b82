"""Reads BigMoeOnEdge ``route_trace v1`` files: routing, weights and what the phone's cache held.

Comment lines give the model and the bytes of one expert by layer; then one CSV row a chosen
expert: ``turn, phase, step, layer, slot, expert, weight, residency, expert_bytes``, and in later
builds ``dropped``; columns go by name. Here ``step`` counts tokens, prompt included. Prefill rows
come layer by layer, decode rows step by step. The engine computes the last layer only for the last
prompt token, so the others lack that layer.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from traces.importers.assemble import assemble
from traces.importers.cells import EMPTY
from traces.importers.routed import Origin, Routed
from traces.importers.sources import read_text
from traces.importers.told import Told
from traces.trace import NO_EXPERT, PREFILL, Trace, TraceError

_SIGNATURE = "# route_trace v1"
_HEADING = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
_COLUMNS = _HEADING.split(",")
_DROPPED = "dropped"  # a column of later builds: the engine left the choice out

RESIDENCY_ROW = np.dtype(
    [
        ("step", "i4"),  # the file's step: the token, prompt included
        ("layer", "i2"),  # absolute
        ("slot", "i2"),
        ("expert", "i4"),
        ("phase", "u1"),  # PREFILL or DECODE
        ("resident", "?"),  # was it in the engine's cache, or brought there ahead of its use?
        ("loaded_bytes", "i8"),  # read from storage for this row; 0 where it was there already
    ]
)
_NOTES = (
    "turns are requests; a turn's prompt is one prefill step, then one token a step (derived)",
    "scoring is not in the source; token ids and text neither",
)


@dataclass(frozen=True, slots=True)
class _RouteFile:
    path: Path
    header: dict[str, str]  # model, arch, n_layer, n_expert, n_expert_used
    expert_bytes: dict[int, int]  # by absolute layer
    rows: NDArray[np.void]  # a field a column, in file order


def read(path: Path, told: Told) -> Trace:
    """Return the routing as a trace; its residency comes from ``read_route_residency``.

    Where prompt tokens lack the last layer, its cells are ``NO_EXPERT`` and ``meta.incomplete_layers``
    names it; any other gap is an error. The file does not name the model's own top-k: where it is told, the
    header says whether k was forced.
    """
    source = _parse(path)
    rows = source.rows
    layers = np.unique(rows["layer"])
    token_key = np.stack([rows["turn"], rows["step"]], axis=1)
    tokens, token = np.unique(token_key, axis=0, return_inverse=True)
    layer, slot = np.searchsorted(layers, rows["layer"]), rows["slot"]
    top_k = _header_int(source, "n_expert_used")
    _check_cells(source, (token, layer, slot), (len(tokens), len(layers), top_k))
    ids = np.full((len(tokens), len(layers), top_k), EMPTY, dtype=np.int32)
    ids[token, layer, slot] = rows["expert"]
    weights = None
    if not np.isnan(rows["weight"]).any():
        weights = np.zeros(ids.shape, dtype=np.float32)
        weights[token, layer, slot] = rows["weight"]
    phase = np.zeros(len(tokens), dtype=np.uint8)
    phase[token] = rows["phase"]
    requests = _turns(source, tokens, phase, ids, weights)
    sizes = _layer_sizes(source, layers)
    trace = assemble(requests, told, _origin(source, layers, top_k, told))
    return replace(trace, meta=replace(trace.meta, expert_bytes=sizes))


def read_route_csv(
    path: str | os.PathLike[str], native_top_k: int | None = None, licence: str | None = None
) -> Trace:
    """Return the routing as a trace; ``native_top_k`` and ``licence`` are not in the file."""
    return read(Path(path), Told(native_top_k=native_top_k, licence=licence))


def read_route_residency(path: str | os.PathLike[str]) -> NDArray[np.void]:
    """Return what the engine's cache did, one ``RESIDENCY_ROW`` a CSV row in file order."""
    rows = _parse(Path(path)).rows
    residency = np.zeros(len(rows), dtype=RESIDENCY_ROW)
    for name in ("step", "layer", "slot", "expert", "phase"):
        residency[name] = rows[name]
    residency["resident"] = rows["residency"] > 0
    residency["loaded_bytes"] = rows["expert_bytes"]
    return residency


def _parse(path: Path) -> _RouteFile:
    lines = read_text(path).rstrip().splitlines()
    if not lines or lines[0].strip() != _SIGNATURE:
        found = lines[0][:40] if lines else ""
        raise TraceError(f"{path}: line 1 is {found!r}: must be {_SIGNATURE!r}")
    comments = [line for line in lines if line.startswith("#")]
    body = lines[len(comments) :]
    columns = body[0].split(",") if body else []
    if not {*_COLUMNS} <= {*columns} or len({*columns}) < len(columns):
        found = body[0][:99] if body else ""
        raise TraceError(f"{path}: the column line is {found!r}: must have {_HEADING}")
    header = next((line for line in comments if "n_expert=" in line), "")
    rows = _rows(path, body[1:], columns, len(comments) + 2)
    return _RouteFile(path, _pairs(header), _sizes(path, comments), rows)


def _pairs(line: str) -> dict[str, str]:
    """Return the ``key=value`` pairs of a comment; values may hold blanks."""
    return dict(re.findall(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)", line))


def _sizes(path: Path, comments: list[str]) -> dict[int, int]:
    """Return the bytes of one expert by layer."""
    sizes = {}
    for number, line in enumerate(comments, 1):
        found = _pairs(line)
        if "expert_bytes" not in found:
            continue
        layer, size = found.get("layer", ""), found["expert_bytes"]
        if not (layer.isdecimal() and size.isdecimal()):
            rule = "must have whole numbers as layer and expert_bytes"
            raise TraceError(f"{path}: line {number} is {line[:60]!r}: {rule}")
        sizes[int(layer)] = int(size)
    return sizes


def _row_type(columns: list[str]) -> np.dtype[np.void]:
    """Return the type of a row: numbers in the columns that are known, text in others."""
    kinds = dict.fromkeys((*_COLUMNS, _DROPPED), "i8") | {"weight": "f8"}
    return np.dtype([(name, kinds.get(name, "U1")) for name in columns])


def _rows(path: Path, lines: list[str], columns: list[str], first_line: int) -> NDArray[np.void]:
    """Parse the CSV rows and check each value by itself; errors give the line, counted from 1."""
    if not lines:
        raise TraceError(f"{path}: no rows: a trace has at least one")
    kind = _row_type(columns)
    try:
        rows = np.loadtxt(lines, dtype=kind, delimiter=",", ndmin=1, comments=None)
    except ValueError:
        number, line = next(
            (at, line) for at, line in enumerate(lines, first_line) if not _is_row(line, kind)
        )
        rule = f"must be {len(columns)} numbers: {','.join(columns)}"
        raise TraceError(f"{path}: line {number} is {line[:60]!r}: {rule}") from None
    if len(rows) != len(lines):
        raise TraceError(f"{path}: {len(rows)} rows in {len(lines)} lines: must be one a line")
    weights_unknown = bool(np.isnan(rows["weight"]).all())
    for name in (name for name in columns if kind[name].kind != "U"):
        values, limit = rows[name], _LIMITS.get(name, np.inf)
        good = (values >= 0) & (values < limit)
        if not good.all() and not (name == "weight" and weights_unknown):
            first = int(np.argmin(good))
            rule = f"must be >= 0 and < {limit}" if name in _LIMITS else "must be >= 0"
            raise TraceError(
                f"{path}: line {first_line + first}: {name} is {values[first]}: {rule}"
            )
    return rows


_LIMITS = {
    "turn": 2**31,
    "phase": 2,
    "step": 2**31,
    "layer": 2**15,
    "residency": 3,
    "weight": 65504,
    _DROPPED: 2,
}


def _is_row(line: str, kind: np.dtype[np.void]) -> bool:
    try:
        return np.loadtxt([line], dtype=kind, delimiter=",", ndmin=1, comments=None).size == 1
    except ValueError:
        return False


def _header_int(source: _RouteFile, key: str) -> int:
    text = source.header.get(key, "")
    if not text.isdecimal() or not 0 < int(text) < NO_EXPERT:
        rule = f"must be a number from 1 to {NO_EXPERT - 1}"
        raise TraceError(f"{source.path}: header '{key}' is {text!r}: {rule}")
    return int(text)


def _check_cells(
    source: _RouteFile,
    cells: tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]],
    shape: tuple[int, int, int],
) -> None:
    """Check that ids and slots are in range, and each token's layer has every slot once or none.

    ``cells`` are the (token, layer, slot) of each row, ``shape`` the counts of the three.
    """
    token, layer, slot = cells
    for name, values, limit in (
        ("slot", slot, shape[2]),
        ("expert", source.rows["expert"], _header_int(source, "n_expert")),
    ):
        if (values >= limit).any():
            at = int(np.argmax(values >= limit))
            rule = f"must be < {limit} by the header"
            raise TraceError(f"{source.path}: row {at}: {name} is {values[at]}: {rule}")
    count = np.zeros(shape, dtype=np.int64)
    np.add.at(count, (token, layer, slot), 1)
    uneven = (count != count[..., :1]).any(axis=-1) | (count[..., 0] > 1)
    if uneven.any():
        at = int(np.argmax(uneven[token, layer]))
        row = source.rows[at]
        raise TraceError(
            f"{source.path}: row {at}: slots of step {row['step']}, layer {row['layer']} appear "
            f"{count[token[at], layer[at]].tolist()} times: must be once each"
        )


def _turns(
    source: _RouteFile,
    tokens: NDArray[np.integer],
    phase: NDArray[np.uint8],
    ids: NDArray[np.int32],
    weights: NDArray[np.float32] | None,
) -> list[Routed]:
    """Return a request a turn, of the sorted (turn, step) of each token and its phase."""
    turn, count = tokens.T
    gap = np.flatnonzero((np.diff(turn) == 0) & (np.diff(count) != 1))
    if len(gap):
        before, found = int(count[gap[0]]), int(count[gap[0] + 1])
        where = f"turn {turn[gap[0]]}: step {found} follows step {before}"
        raise TraceError(f"{source.path}: {where}: must be {before + 1}")
    back = np.flatnonzero((np.diff(turn) == 0) & (np.diff(phase.astype(int)) < 0))
    if len(back):
        where = f"turn {turn[back[0]]}: step {count[back[0] + 1]} is prefill"
        raise TraceError(f"{source.path}: {where}: must not come after decode")
    edges = [0, *(np.flatnonzero(np.diff(turn)) + 1).tolist(), len(turn)]
    return [
        Routed(
            f"turn {turn[start]}",
            ids[start:stop],
            int((phase[start:stop] == PREFILL).sum()),
            None if weights is None else weights[start:stop],
        )
        for start, stop in pairwise(edges)
    ]


def _layer_sizes(source: _RouteFile, layers: NDArray[np.integer]) -> tuple[int, ...] | None:
    sizes = {layer: size for layer, size in source.expert_bytes.items() if size > 0}
    if sizes and sorted(sizes) != layers.tolist():
        rule = f"must be the {len(sizes)} that the header gives expert_bytes for"
        raise TraceError(f"{source.path}: rows name {len(layers)} layers: {rule}")
    return tuple(sizes[layer] for layer in sorted(sizes)) or None


def _origin(source: _RouteFile, layers: NDArray[np.integer], top_k: int, told: Told) -> Origin:
    model = source.header.get("model", "unknown").rsplit("/", 1)[-1].removesuffix(".gguf")
    return Origin(
        file=str(source.path),
        what="route_trace v1 CSV",
        recorder="BigMoeOnEdge route_trace",
        recorder_version="v1",
        weight_semantics="applied",
        model=model,
        num_experts=_header_int(source, "n_expert"),
        top_k=top_k,
        layer_indices=tuple(layers.tolist()),
        notes=(*_NOTES, *_findings(source, told)),
    )


def _findings(source: _RouteFile, told: Told) -> list[str]:
    """Return the notes that depend on the file."""
    notes = ["weights taken as applied: the source does not say"]
    if np.isnan(source.rows["weight"]).any():
        notes = ["weights are unknown (nan): the engine's graph exposed none"]
    if told.native_top_k is None:
        notes.append("the model's native top_k is not in the source: k may have been forced")
    fields = source.rows.dtype.names or ()
    if _DROPPED in fields and (dropped := int(source.rows[_DROPPED].sum())):
        what = "choices of the router were left out by the engine: they are kept here"
        notes.append(f"warning: {dropped} {what}")
    return notes
