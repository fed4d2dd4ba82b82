"""The trace in memory: a header that says where it comes from, and one row a processed token.

Knows nothing of files. Import these names from ``traces.schema``, which adds the rules.

Axes: ``num_tokens`` rows, then ``num_layers`` MoE layers (dense layers are left out; see
``TraceMeta.layer_indices``), then ``top_k`` slots in the order the router gave them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FORMAT_VERSION = 1
NO_EXPERT = 65535
PREFILL, DECODE = 0, 1
GATE_COLUMNS = ("next_gate_ids", "next_gate_ids_2", "next_gate_ids_3")
"""Where a trace keeps what gates of later MoE layers pick early: one, two and three layers ahead."""
PHASE_NAMES = ("prefill", "decode")

PROVENANCE_KINDS = ("recorded", "imported", "transformed", "synthetic")
WEIGHT_SEMANTICS = ("applied", "renormalised", "raw_prob", "selection_biased", "none")


class TraceError(ValueError):
    """A trace breaks a rule; the one-line message names file, row, column, value and rule."""


def near_match(word: object, known: Sequence[str]) -> str:
    """Return ``"; did you mean 'x'?"`` where a known name is close, else an empty string."""
    match = get_close_matches(str(word), known, n=1)
    return f"; did you mean '{match[0]}'?" if match else ""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a trace comes from; every result table and plot carries it.

    ``kind`` is one of ``PROVENANCE_KINDS``; ``source`` names the file, model or generator;
    ``detail`` says how (a transformation, the generator's parameters).
    """

    kind: str
    source: str
    detail: str = ""

    def __post_init__(self) -> None:
        if self.kind not in PROVENANCE_KINDS:
            rule = f"must be one of {', '.join(PROVENANCE_KINDS)}"
            raise TraceError(
                f"provenance.kind is {self.kind!r}: {rule}{near_match(self.kind, PROVENANCE_KINDS)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMeta:
    """The header of a trace. None always means unknown; tuples per layer follow the MoE layers."""

    model: str
    num_layers: int  # MoE layers only
    num_experts: int  # routed experts a layer
    top_k: int
    layer_indices: tuple[int, ...]  # absolute index of each MoE layer, ascending
    provenance: Provenance
    num_shared_experts: int = 0
    scoring: str = "softmax"  # softmax, sigmoid, topk_softmax, unknown, ...
    normalized: bool | None = None  # are a token's applied weights rescaled to sum to one?
    weight_semantics: str = "none"  # what expert_weights hold: one of WEIGHT_SEMANTICS
    sorted_by_weight: bool = True  # ids in descending order of weight
    incomplete_layers: tuple[int, ...] = ()  # positions on the layer axis prefill rows may lack
    hidden_size: int | None = None
    intermediate_size: int | None = None
    expert_bytes: tuple[int, ...] | None = None  # bytes of one expert, by MoE layer
    tokenizer: str | None = None
    recorder: str | None = None
    recorder_version: str | None = None
    seed: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    stage_names: tuple[str, ...] = ()  # index = stage id
    notes: tuple[str, ...] = ()
    licence: str | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_type(item.name, str(item.type), getattr(self, item.name))
        for name in ("num_layers", "num_experts", "top_k"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "must be >= 1")
        layers, experts, indices = self.num_layers, self.num_experts, self.layer_indices
        _require(experts < NO_EXPERT, "num_experts", experts, f"must be < {NO_EXPERT}")
        _require(self.top_k <= experts, "top_k", self.top_k, f"must be <= num_experts {experts}")
        rule = f"must be {layers} ascending indices, one a MoE layer"
        ascending = all(a < b for a, b in zip((-1, *indices), indices, strict=False))
        _require(len(indices) == layers and ascending, "layer_indices", indices, rule)
        if self.expert_bytes is not None:
            good = len(self.expert_bytes) == layers and min(self.expert_bytes) > 0
            rule = f"must be {layers} positive sizes, one a MoE layer"
            _require(good, "expert_bytes", self.expert_bytes, rule)
        good = all(0 <= layer < layers for layer in self.incomplete_layers)
        _require(good, "incomplete_layers", self.incomplete_layers, f"must lie in 0..{layers - 1}")
        rule = f"must be one of {', '.join(WEIGHT_SEMANTICS)}"
        semantics = self.weight_semantics
        _require(semantics in WEIGHT_SEMANTICS, "weight_semantics", semantics, rule)

    def to_json(self) -> str:
        """Return the header as one line of JSON with sorted keys."""
        try:
            return json.dumps(asdict(self), sort_keys=True)
        except TypeError as error:
            raise TraceError(f"header key 'sampling' is not plain JSON: {error}") from error

    @classmethod
    def from_json(cls, text: str, name: str) -> TraceMeta:
        """Parse a header; ``name`` is the file the errors speak of.

        Raises
        ------
        TraceError
            On bad JSON, another format version, an unknown, missing or ill-typed key.
        """
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{name}: the header is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise TraceError(f"{name}: the header is {record!r}: must be a JSON object")
        version = record.get("format_version")
        if version != FORMAT_VERSION:
            raise TraceError(
                f"{name}: format_version is {version!r}: this Greenroom reads {FORMAT_VERSION}"
            )
        try:
            return cls(**_header_arguments(record))
        except TraceError as error:
            raise TraceError(f"{name}: {error}") from error


def _header_arguments(record: dict[str, Any]) -> dict[str, Any]:
    """Turn parsed JSON into constructor arguments: lists become tuples, provenance an object."""
    _check_keys("header", record, fields(TraceMeta))
    origin = record["provenance"]
    if not isinstance(origin, dict):
        raise TraceError(f"header key 'provenance' is {origin!r}: must be a JSON object")
    _check_keys("provenance", origin, fields(Provenance))
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
    return {**arguments, "provenance": Provenance(**origin)}


def _check_keys(what: str, record: dict[str, Any], known: Sequence[Any]) -> None:
    """Refuse keys that are unknown (naming the nearest known one) and keys that are missing."""
    names = [item.name for item in known]
    for key in record:
        if key not in names:
            raise TraceError(f"{what} key {key!r} is not known{near_match(key, names)}")
    for name in names:
        if name not in record:
            raise TraceError(f"{what} key '{name}' is missing")


def _require(good: bool, name: str, value: object, rule: str) -> None:
    if not good:
        raise TraceError(f"header key '{name}' is {value!r}: {rule}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tuple_of(test: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(map(test, value))


_TYPE_TESTS: dict[str, Callable[[object], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": _is_int,
    "tuple[int, ...]": _tuple_of(_is_int),
    "tuple[str, ...]": _tuple_of(lambda value: isinstance(value, str)),
    "dict[str, Any]": lambda value: isinstance(value, dict),
    "Provenance": lambda value: isinstance(value, Provenance),
}


def _check_type(name: str, annotation: str, value: object) -> None:
    """Compare a header value with the field's annotation, which dataclasses keep as text."""
    if value is None and annotation.endswith(" | None"):
        return
    test = _TYPE_TESTS[annotation.removesuffix(" | None")]
    _require(test(value), name, value, f"must be {annotation}")


class Column(NamedTuple):
    """One column: its numpy dtype (None: Python strings), inner axes, and whether it must exist."""

    dtype: str | None
    axes: tuple[str, ...] = ()  # names of TraceMeta fields
    required: bool = False


COLUMNS: dict[str, Column] = {
    "request_id": Column("int32", required=True),
    "position": Column("int32", required=True),
    "phase": Column("uint8", required=True),
    "step": Column("int32", required=True),
    "expert_ids": Column("uint16", ("num_layers", "top_k"), required=True),
    "token_id": Column("int32"),
    "text": Column(None),
    "stage": Column("int16"),
    "expert_weights": Column("float16", ("num_layers", "top_k")),
    "router_logits": Column("float16", ("num_layers", "num_experts")),
    **{name: Column("uint16", ("num_layers", "top_k")) for name in GATE_COLUMNS},
}


def inner_shape(meta: TraceMeta, column: str) -> tuple[int, ...]:
    """Return the shape of one row of ``column``: ``()`` for a flat column."""
    return tuple(getattr(meta, axis) for axis in COLUMNS[column].axes)


@dataclass(slots=True)
class Trace:
    """A whole trace or a chunk of one. Arrays read from a file are read-only views."""

    meta: TraceMeta
    request_id: NDArray[np.int32]  # [num_tokens]
    position: NDArray[np.int32]  # place in the request's sequence, from 0
    phase: NDArray[np.uint8]  # PREFILL or DECODE
    step: NDArray[np.int32]  # engine step that processed the token
    expert_ids: NDArray[np.uint16]  # [num_tokens, num_layers, top_k], NO_EXPERT = empty slot
    token_id: NDArray[np.int32] | None = None  # the token routed in this row, -1 unknown
    text: list[str] | None = None  # its decoded piece
    stage: NDArray[np.int16] | None = None  # index into meta.stage_names, -1 unknown
    expert_weights: NDArray[np.float16] | None = None  # like expert_ids; see weight_semantics
    router_logits: NDArray[np.float16] | None = None  # [num_tokens, num_layers, num_experts]
    next_gate_ids: NDArray[np.uint16] | None = None  # what the next MoE layer's gate picks on this
    # layer's input, best first; the last layer has no next one: NO_EXPERT
    next_gate_ids_2: NDArray[np.uint16] | None = None  # the same of the MoE layer two further on
    next_gate_ids_3: NDArray[np.uint16] | None = None  # and three further on

    def __len__(self) -> int:
        return len(self.request_id)

    def __repr__(self) -> str:
        meta, requests = self.meta, self.num_requests
        more = ", ".join(name for name in self.columns if not COLUMNS[name].required)
        return (
            f"Trace({meta.model}, {meta.provenance.kind}: {requests} request{'s' * (requests != 1)}, "
            f"{len(self)} token{'s' * (len(self) != 1)}, {meta.num_layers} MoE layers of "
            f"{meta.num_experts} experts, top-{meta.top_k}"
            + (f";\n  with {more})" if more else ")")
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns present, in file order."""
        return tuple(name for name in COLUMNS if getattr(self, name) is not None)

    @property
    def num_requests(self) -> int:
        """Number of distinct requests among the rows."""
        return int(np.unique(self.request_id).size)

    def take(self, rows: slice | Sequence[int] | NDArray[Any]) -> Trace:
        """Return the chosen rows (a slice gives views; indices or a mask give copies)."""
        chosen = {name: getattr(self, name)[rows] for name in self.columns if name != "text"}
        if self.text is not None:
            chosen["text"] = [self.text[row] for row in np.arange(len(self))[rows]]
        return Trace(self.meta, **chosen)


def concat(traces: Sequence[Trace]) -> Trace:
    """Join chunks in order; they must share header and columns."""
    if not traces:
        raise TraceError("concat needs at least one trace")
    first = traces[0]
    for place, trace in enumerate(traces):
        if trace.meta != first.meta:
            raise TraceError(f"concat: trace {place} has another header than trace 0")
        if trace.columns != first.columns:
            raise TraceError(
                f"concat: trace {place} has columns {trace.columns}: must be {first.columns}"
            )
    joined: dict[str, Any] = {}
    for name in first.columns:
        parts = [getattr(trace, name) for trace in traces]
        joined[name] = list(chain(*parts)) if name == "text" else np.concatenate(parts)
    return Trace(first.meta, **joined)
