"""Parts of a trace, named behind its path: ``math.npz#layers=0:48:4,request_tokens=8000``.

``layers`` is a slice of the MoE layers, as in Python; ``request_tokens`` cuts the rows, in the order of
the file, into requests of so many tokens, the first of each as a prompt. Published replays are often of
every fourth layer, or run straight through a text that the file holds in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from traces.trace import COLUMNS, DECODE, GATE_COLUMNS, PREFILL, Trace, TraceError, near_match

_MARK = "#"
_SLICE = re.compile(r"(\d*):(\d*)(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a trace is meant; None where nothing is cut. ``layers`` is what a slice is made of."""

    layers: tuple[int | None, ...] | None = None
    request_tokens: int | None = None

    def of(self, trace: Trace, name: str) -> Trace:
        """Return that part of a trace; ``name`` is the path that errors speak of."""
        if self.layers is not None:
            trace = _some_layers(trace, slice(*self.layers), name)
        if self.request_tokens is not None:
            trace = _other_requests(trace, self.request_tokens)
        return trace


def split_part(path: str) -> tuple[str, Part | None]:
    """Return the file behind a path and the part of it that is named; None: all of it.

    A file whose own name has the mark is taken as it is.

    Raises
    ------
    TraceError
        If what stands behind the mark names no part.
    """
    file, mark, words = path.rpartition(_MARK)
    if not mark or Path(path).expanduser().exists():
        return path, None
    found: dict[str, Any] = {}
    for word in words.split(","):
        key, _, value = word.partition("=")
        if key not in _READERS:
            rule = f"a part is named by {' or '.join(_READERS)}{near_match(key, tuple(_READERS))}"
            raise TraceError(f"{path}: {word}: {rule}")
        try:
            found[key] = _READERS[key](value)
        except ValueError as error:
            raise TraceError(f"{path}: {word}: {error}") from None
    return file, Part(**found)


def _layers(words: str) -> tuple[int | None, ...]:
    match = _SLICE.fullmatch(words)
    if match is None or match[3] == "0":
        raise ValueError("must be FIRST:END or FIRST:END:STEP, such as 0:48:4")
    return tuple(int(word) if word else None for word in match.groups())


def _tokens(words: str) -> int:
    if not words.isdecimal() or int(words) < 1:
        raise ValueError("must be a number of tokens >= 1")
    return int(words)


_READERS: dict[str, Callable[[str], Any]] = {"layers": _layers, "request_tokens": _tokens}


def _some_layers(trace: Trace, chosen: slice, name: str) -> Trace:
    """Return a trace of some layers; gates that look ahead are left out, for the next layer is another."""
    meta = trace.meta
    kept = range(meta.num_layers)[chosen]
    if not kept:
        raise TraceError(f"{name}: layers: none of its {meta.num_layers} layers is among them")
    sizes, place = meta.expert_bytes, {layer: at for at, layer in enumerate(kept)}
    words = f"layers {kept.start}:{kept.stop}:{kept.step} of {meta.num_layers}"
    made = replace(
        meta,
        num_layers=len(kept),
        layer_indices=tuple(meta.layer_indices[layer] for layer in kept),
        expert_bytes=None if sizes is None else tuple(sizes[layer] for layer in kept),
        incomplete_layers=tuple(place[at] for at in meta.incomplete_layers if at in place),
        notes=(*meta.notes, words),
    )
    columns = {column: getattr(trace, column) for column in trace.columns}
    for column in set(columns) & set(GATE_COLUMNS):
        columns[column] = None
    for column, values in columns.items():
        if values is not None and "num_layers" in COLUMNS[column].axes:
            columns[column] = np.ascontiguousarray(np.asarray(values)[:, chosen])
    return Trace(made, **columns)


def _other_requests(trace: Trace, tokens: int) -> Trace:
    """Return a trace whose rows, in their order, are requests of so many tokens (the last one shorter)."""
    rows = np.arange(len(trace), dtype=np.int32)
    position = rows % tokens
    columns = {column: getattr(trace, column) for column in trace.columns}
    columns |= {
        "request_id": rows // tokens,
        "position": position,
        "phase": np.where(position > 0, DECODE, PREFILL).astype(np.uint8),
        "step": rows,
    }
    note = f"cut into requests of {tokens} tokens, the first of each as a prompt"
    return Trace(replace(trace.meta, notes=(*trace.meta.notes, note)), **columns)
