"""Turn the records of decoder calls into the rows of a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from traces.record_hooks import ForwardRecord
from traces.schema import DECODE, GATE_COLUMNS, PREFILL, Trace, TraceError, TraceMeta


@dataclass(frozen=True)
class Annotation:
    """What to write beside the routing.

    ``piece`` maps a token id to its text. ``stages`` maps a whole text to one label per
    character (a name of ``stage_names``, or an index into it); a token takes the label of its
    first character, and a token without text that of the character after it.
    """

    piece: Callable[[int], str] | None = None
    stages: Callable[[str], Sequence[str] | Sequence[int]] | None = None
    stage_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.stages is not None and (self.piece is None or not self.stage_names):
            raise TraceError("stages need both piece and stage_names")


@dataclass(frozen=True)
class Request:
    """One finished request: its id, its tokens (prompt and new), and the prompt's length."""

    request_id: int
    tokens: list[int]
    num_prompt_tokens: int


@dataclass
class DroppedRows:
    """How many rows the engine computed that a trace does not hold."""

    padding: int = 0
    rejected: int = 0  # drafted tokens that were not accepted
    ended: int = 0  # sequences that wait for the rest of their batch
    recomputed: int = 0  # processed once more after the engine had given up their cache

    def notes(self) -> tuple[str, ...]:
        """Return one sentence a kind of row that occurred."""
        kinds = {
            "padding": self.padding,
            "rejected draft": self.rejected,
            "ended sequence": self.ended,
            "recomputed": self.recomputed,
        }
        return tuple(
            f"{count} computed rows dropped: {kind}" for kind, count in kinds.items() if count
        )


def join_records(records: Sequence[ForwardRecord]) -> dict[str, np.ndarray]:
    """Concatenate the rows of all decoder calls of a batch, by column; step is added."""
    if not records:
        raise TraceError("no decoder call was recorded: generate() bypassed the decoder module")
    names = [name for name in vars(records[0]) if getattr(records[0], name) is not None]
    columns = {
        name: np.concatenate([getattr(record, name) for record in records])
        for name in names
        if name != "step"
    }
    lengths = [len(record.position) for record in records]
    columns["step"] = np.repeat([record.step for record in records], lengths).astype(np.int32)
    return columns


def assemble(
    meta: TraceMeta,
    rows: Mapping[str, np.ndarray],
    requests: Sequence[Request],
    annotation: Annotation,
    dropped: DroppedRows,
) -> Trace:
    """Keep the last visit of every processed position, ordered by request and position.

    A position is visited again when a draft was rejected; then the last visit is the one whose
    prefix was accepted. Raises TraceError where the rows are not the requests' tokens.
    """
    lengths = np.array([len(request.tokens) - 1 for request in requests])
    beyond = rows["position"] >= lengths[rows["batch_row"]]
    order = np.lexsort((rows["step"], rows["position"], rows["batch_row"]))
    order = order[~beyond[order]]
    place = np.stack([rows["batch_row"], rows["position"]])[:, order]
    last = np.ones(len(order), dtype=bool)
    last[:-1] = (place[:, 1:] != place[:, :-1]).any(axis=0)
    dropped.rejected += int((~last).sum()) + (int(beyond.sum()) if len(requests) == 1 else 0)
    dropped.ended += int(beyond.sum()) if len(requests) > 1 else 0
    kept = {name: column[order[last]] for name, column in rows.items()}
    _check_rows(kept, requests)
    return _to_trace(meta, kept, requests, annotation)


def _check_rows(rows: Mapping[str, np.ndarray], requests: Sequence[Request]) -> None:
    """Hold the recorded rows against the generated tokens: every position, the right token."""
    for row, request in enumerate(requests):
        mine = rows["batch_row"] == row
        expected = len(request.tokens) - 1
        where = f"request {request.request_id}"
        if not np.array_equal(rows["position"][mine], np.arange(expected)):
            raise TraceError(
                f"{where}: {int(mine.sum())} rows were recorded, must be {expected} at positions "
                f"0..{expected - 1}: padding or cache positions were misread"
            )
        tokens = rows.get("token_id")
        if tokens is not None and tokens[mine].tolist() != request.tokens[:-1]:
            raise TraceError(f"{where}: the recorded token ids are not the generated ones")


def _to_trace(
    meta: TraceMeta,
    rows: Mapping[str, np.ndarray],
    requests: Sequence[Request],
    annotation: Annotation,
) -> Trace:
    lengths = np.array([request.num_prompt_tokens for request in requests])
    numbers = np.array([request.request_id for request in requests], dtype=np.int32)
    prefill = rows["position"] < lengths[rows["batch_row"]]
    text, stage = annotate(requests, annotation)
    return Trace(
        meta,
        request_id=numbers[rows["batch_row"]],
        phase=np.where(prefill, PREFILL, DECODE).astype(np.uint8),
        token_id=np.concatenate([request.tokens[:-1] for request in requests]).astype(np.int32),
        text=text,
        stage=stage,
        **recorded_columns(meta, rows),
    )


def recorded_columns(meta: TraceMeta, rows: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the columns of a trace that need nothing but the recorded ``rows``, in their order."""
    logits = rows.get("router_logits")
    return {
        "position": rows["position"],
        "step": rows["step"],
        "expert_ids": rows["expert_ids"],
        "expert_weights": rows["expert_weights"].astype(np.float16),
        "router_logits": None if logits is None else logits[:, :, : meta.num_experts],
        **{name: rows.get(name) for name in GATE_COLUMNS},
    }


def annotate(
    requests: Sequence[Request], annotation: Annotation
) -> tuple[list[str] | None, np.ndarray | None]:
    """Return the text pieces and the stages of all rows, or None where not asked for."""
    if annotation.piece is None:
        return None, None
    text: list[str] = []
    stages: list[int] = []
    for request in requests:
        pieces = [annotation.piece(token) for token in request.tokens]
        text += pieces[:-1]
        if annotation.stages is not None:
            stages += _stage_ids(pieces, annotation)[:-1]
    return text, None if annotation.stages is None else np.array(stages, dtype=np.int16)


def _stage_ids(pieces: Sequence[str], annotation: Annotation) -> list[int]:
    """Return one stage id per piece; -1 throughout where there is no text."""
    full = "".join(pieces)
    labels: list[str | int] = []
    if annotation.stages is not None:
        labels = list(annotation.stages(full))
    if len(labels) != len(full):
        raise TraceError(f"stages gave {len(labels)} labels: must be {len(full)}, one a character")
    if not labels:
        return [-1] * len(pieces)
    starts = np.cumsum([0, *(len(piece) for piece in pieces[:-1])])
    return [_stage_id(labels[min(int(start), len(labels) - 1)], annotation) for start in starts]


def _stage_id(label: str | int, annotation: Annotation) -> int:
    if isinstance(label, str):
        if label not in annotation.stage_names:
            raise TraceError(f"stage {label!r} is not one of {', '.join(annotation.stage_names)}")
        return annotation.stage_names.index(label)
    if not -1 <= label < len(annotation.stage_names):
        raise TraceError(f"stage {label} must lie in -1..{len(annotation.stage_names) - 1}")
    return int(label)
