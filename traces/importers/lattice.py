"""Reads the JSON lines that lattice's offline cache simulator reads: a line a token and MoE layer.

``{"layer_idx", "token_idx", "selected_ids", "gate_weights"}`` in any order of lines, ``gate_weights`` maybe
absent or empty, other keys ignored as there. One sequence: there are no requests and no phases.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.assemble import assemble
from traces.importers.cells import EMPTY, Cells, padded, pivot
from traces.importers.checked import experts, weights, whole
from traces.importers.json_file import json_lines
from traces.importers.routed import Origin
from traces.importers.told import Told
from traces.trace import Trace, TraceError

_KEYS = ("layer_idx", "token_idx", "selected_ids")


def read(path: Path, told: Told) -> Trace:
    """Return the lines as a trace; ``told`` must say the number of experts.

    A (token, layer) that comes again begins the next sequence. ``prompt_tokens`` of each are prompt, 1 where
    nobody tells.

    Raises
    ------
    TraceError
        For a line without the keys, or with values that no router gives.
    """
    rows = [_checked(path, number, line) for number, line in json_lines(path)]
    if not rows:
        raise TraceError(f"{path}: no rows: a trace has at least one")
    layer, token = (np.array([row[key] for row in rows], dtype=np.int64) for key in _KEYS[:2])
    given = [row.get("gate_weights") or [] for row in rows]
    cells = Cells(
        request=_sequence(token, layer),
        token=token,
        layer=layer,
        expert_ids=padded([row["selected_ids"] for row in rows], EMPTY, np.int32),
        expert_weights=padded(given, 0, np.float32) if all(given) else None,
    )
    found, layers = pivot(cells, str(path), lambda number: f"sequence {number}")
    num_prompt = told.prompt_or_first
    requests = [replace(one.routed, num_prompt=min(num_prompt, len(one.routed))) for one in found]
    origin = Origin(
        file=str(path),
        what="lattice routing trace",
        recorder="lattice",
        weight_semantics="applied",
        layer_indices=layers,
        notes=tuple(_notes(cells, num_prompt, len(requests))),
    )
    return assemble(requests, told, origin)


def _notes(cells: Cells, num_prompt: int, num_requests: int) -> list[str]:
    notes = [f"phase is not in the source: the first {num_prompt} of a sequence count as prompt"]
    if cells.expert_weights is not None:
        notes.append("weights taken as applied: the source does not say")
    if num_requests > 1:
        notes.append(f"{num_requests} sequences: token_idx begins anew for each")
    return notes


def _checked(path: Path, number: int, line: Any) -> dict[str, Any]:
    where = f"{path}: line {number}"
    if not isinstance(line, dict):
        raise TraceError(f"{where}: is {type(line).__name__}: must be an object")
    for key in _KEYS:
        if key not in line:
            raise TraceError(f"{where}: '{key}' is missing (keys: {', '.join(line)})")
    for key in _KEYS[:2]:
        whole(line[key], f"{where}: {key}")
    ids = experts(line["selected_ids"], f"{where}: selected_ids")
    if line.get("gate_weights") not in (None, []):
        weights(line["gate_weights"], f"{where}: gate_weights", len(ids))
    return line


def _sequence(token: NDArray[np.int64], layer: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of the sequence of each row: how often its (token, layer) came before."""
    _, place = np.unique(np.stack([token, layer], axis=1), axis=0, return_inverse=True)
    place = place.reshape(-1)
    order = np.argsort(place, kind="stable")
    first = np.searchsorted(place[order], place[order])
    sequence = np.empty(len(token), dtype=np.int64)
    sequence[order] = np.arange(len(token)) - first
    return sequence
