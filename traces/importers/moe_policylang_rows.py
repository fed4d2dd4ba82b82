"""The rows of a moe-policylang trace as arrays, from its Parquet and its JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.cells import EMPTY, codes, padded
from traces.importers.checked import MOST_WEIGHT, experts, is_whole, weights, whole
from traces.importers.json_file import json_lines
from traces.trace import PHASE_NAMES, TraceError, TraceMeta, near_match

EXPORT_KEY = b"greenroom_export"
"""Where our own exporter keeps the trace's header in the Parquet metadata."""
UNKNOWN = -1
_SHORT = {
    "p": "prompt_id",
    "t": "token_idx",
    "l": "layer_idx",
    "e": "selected_experts",
    "s": "router_scores",
    "sm": "router_softmax",
    "ti": "token_id",
    "ph": "phase",
    "lg_l": "router_logits",
    "lg": "language_tag",
    "dm": "domain_tag",
    "tl": "token_loss",
    "kv": "kv_shard_id",
}
_PLACES = ("prompt_id", "token_idx", "layer_idx")
_LISTS = ("selected_experts", "router_scores", "router_softmax", "router_logits")
_LEFT_OUT = ("language_tag", "domain_tag", "token_loss", "kv_shard_id")


@dataclass(slots=True, kw_only=True)
class Rows:
    """A file's rows, one a token and layer; None for what it has not.

    Attributes
    ----------
    prompts
        The prompt_id of each request; ``request`` numbers them in order of appearance.
    expert_ids, scores
        [num_rows, k].
    softmax, logits
        [num_rows, num_experts].
    of_token
        ``token_id`` and ``phase`` (index of PHASE_NAMES) of each row, ``UNKNOWN`` where null.
    num_experts, top_k, model
        Of the header of JSON lines.
    header
        Of a file that we exported.
    left_out
        Columns that a trace has no place for.
    """

    prompts: list[object]
    request: NDArray[np.int64]
    token: NDArray[np.int64]
    layer: NDArray[np.int64]
    expert_ids: NDArray[np.int32] | None
    scores: NDArray[np.float32] | None
    softmax: NDArray[np.float32] | None
    logits: NDArray[np.float32] | None
    of_token: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    num_experts: int | None = None
    top_k: int | None = None
    model: str | None = None
    header: TraceMeta | None = None
    left_out: tuple[str, ...] = ()


# -- Parquet ---------------------------------------------------------------------------------------


def rows_of_parquet(path: Path) -> Rows:
    """Return the rows; raises TraceError for a file that is none, or lacks the columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path).combine_chunks()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TraceError(f"{path}: not Parquet: {' '.join(str(error).split())}") from None
    _check_columns(path, table.column_names)
    if not table.num_rows:
        raise TraceError(f"{path}: no rows: a trace has at least one")
    text = (table.schema.metadata or {}).get(EXPORT_KEY)
    header = None if text is None else TraceMeta.from_json(text.decode(errors="replace"), str(path))
    try:
        return _made(path, lambda name: _column(table, name, path), table.column_names, header)
    except (pa.ArrowException, ValueError, TypeError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: {' '.join(str(error).split())}") from None


def _check_columns(path: Path, names: Sequence[str]) -> None:
    for name in _PLACES:
        if name not in names:
            raise TraceError(f"{path}: column '{name}' is missing{near_match(name, names)}")
    if not {"selected_experts", "router_softmax"} & {*names}:
        rule = "must be there, or router_softmax"
        raise TraceError(f"{path}: column 'selected_experts' is missing: {rule}")


def _column(table: Any, name: str, path: Path) -> NDArray[Any] | None:
    """Return a column: flat ones with ``UNKNOWN`` for null, lists as [num_rows, longest], padded."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if name not in table.column_names:
        return None
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0)
    if name == "phase":
        return _phases(column.to_pylist(), lambda row: f"{path}: row {row}")
    if name not in _LISTS:
        return pc.fill_null(column, UNKNOWN).to_numpy(zero_copy_only=False).astype(np.int64)
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_kind(column.type) for is_kind in kinds):
        raise TraceError(f"{path}: {name} is {column.type}: must be lists of numbers")
    if column.null_count:
        raise TraceError(f"{path}: {name} has null rows: must be lists throughout")
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    values = column.flatten()
    if values.null_count:
        raise TraceError(f"{path}: {name} has null values in its lists: must be numbers")
    kind = np.int32 if name == "selected_experts" else np.float32
    flat = values.to_numpy(zero_copy_only=False).astype(kind)
    return _grid(flat, lengths, EMPTY if name == "selected_experts" else 0)


def _grid(flat: NDArray[Any], lengths: NDArray[np.integer], fill: int) -> NDArray[Any]:
    width = int(lengths.max(initial=0))
    if (lengths == width).all():
        return flat.reshape(len(lengths), width)
    out = np.full((len(lengths), width), fill, dtype=flat.dtype)
    out[np.arange(width) < lengths[:, None]] = flat
    return out


# -- JSON lines ------------------------------------------------------------------------------------


def rows_of_json(path: Path) -> Rows:
    """Return the rows; raises TraceError for a line without the keys."""
    lines = json_lines(path)
    number, header = next(lines, (0, None))
    if not isinstance(header, dict) or "num_experts" not in header:
        found = "nothing" if header is None else str(header)[:60]
        raise TraceError(f"{path}: line 1 is {found}: must be a header with num_experts")
    columns: dict[str, list[Any]] = {name: [] for name in _SHORT.values()}
    for number, line in lines:
        _take(columns, line, f"{path}: line {number}")
    if not columns["token_idx"]:
        raise TraceError(f"{path}: no rows: a trace has at least one")
    _check_header(path, header, len(columns["token_idx"]))
    present = [name for name, values in columns.items() if _is_there(path, name, values)]
    rows = _made(
        path, lambda name: _of_lists(columns[name], name, path, name in present), present, None
    )
    rows.num_experts, rows.top_k = header["num_experts"], header.get("top_k")
    name = str(header.get("model_name") or "")
    rows.model = (Path(name).name if Path(name).is_absolute() else name) or None
    return rows


def _check_header(path: Path, header: dict[str, Any], found: int) -> None:
    for key in ("num_experts", "top_k"):
        value = header.get(key)
        if value is not None and not is_whole(value, 1):
            raise TraceError(f"{path}: header '{key}' is {value!r}: must be a whole number >= 1")
    count = header.get("num_entries", found)
    if count != found:
        raise TraceError(f"{path}: {found} rows: must be {count} by the header (cut short?)")


def _take(columns: dict[str, list[Any]], line: Any, where: str) -> None:
    if not isinstance(line, dict):
        raise TraceError(f"{where}: is {type(line).__name__}: must be an object")
    for short, name in _SHORT.items():
        value = line.get(short, 0 if short == "p" else None)
        if name in _PLACES or (name == "token_id" and value not in (None, UNKNOWN)):
            whole(value, f"{where}: '{short}'")
        elif name == "selected_experts" and value is not None:
            experts(value, f"{where}: '{short}'")
        elif name in _LISTS and value is not None:
            weights(value, f"{where}: '{short}'", len(value) if isinstance(value, list) else 0)
        columns[name].append(value)


def _is_there(path: Path, name: str, values: list[Any]) -> bool:
    absent = sum(value is None for value in values)
    if name in _LISTS and 0 < absent < len(values):
        raise TraceError(f"{path}: {absent} of {len(values)} rows lack {name}: must be all or none")
    return absent < len(values)


def _of_lists(values: list[Any], name: str, path: Path, is_there: bool) -> NDArray[Any] | None:
    if not is_there:
        return None
    if name == "phase":
        return _phases(values, lambda row: f"{path}: line {row + 2}")
    if name not in _LISTS:
        return np.array([UNKNOWN if value is None else value for value in values], dtype=np.int64)
    if name == "selected_experts":
        return padded(values, EMPTY, np.int32)
    return padded(values, 0, np.float32)


# -- both ------------------------------------------------------------------------------------------


def _made(
    path: Path,
    column: Callable[[str], NDArray[Any] | None],
    names: Sequence[str],
    header: TraceMeta | None,
) -> Rows:
    prompt, token, layer = (_place(path, name, column(name)) for name in _PLACES)
    request, prompts = codes(prompt.tolist())
    of_token = {name: column(name) for name in ("token_id", "phase")}
    lists = {name: column(name) for name in _LISTS}
    for name in _LISTS:
        _check_values(path, name, lists[name])
    _refuse_beyond(path, lists)
    return Rows(
        prompts=prompts,
        request=request,
        token=token,
        layer=layer,
        expert_ids=lists["selected_experts"],
        scores=lists["router_scores"],
        softmax=lists["router_softmax"],
        logits=lists["router_logits"],
        of_token={name: values for name, values in of_token.items() if values is not None},
        header=header,
        left_out=tuple(name for name in _LEFT_OUT if name in names),
    )


def _place(path: Path, name: str, values: NDArray[Any] | None) -> NDArray[np.int64]:
    if values is None or (values < 0).any():
        row = 0 if values is None else int(np.argmax(values < 0))
        found = None if values is None else values[row]
        raise TraceError(f"{path}: row {row}: {name} is {found}: must be >= 0, and not null")
    return values


def _check_values(path: Path, name: str, values: NDArray[Any] | None) -> None:
    """Refuse what 16 bits do not hold, and what no router gives; a logit may be minus infinity."""
    if values is None or values.dtype.kind == "i":
        return
    is_logit = name == "router_logits"
    least = -MOST_WEIGHT if is_logit else 0
    wrong = ~((values >= least) & (values <= MOST_WEIGHT)) & ~(is_logit & np.isneginf(values))
    if wrong.any():
        row, place = np.argwhere(wrong)[0].tolist()
        rule = f"must be a number{'' if is_logit else ' >= 0'} that 16 bits hold"
        raise TraceError(f"{path}: row {row}: {name}[{place}] is {values[row, place]}: {rule}")
    if name != "router_scores" and values.shape[1] < 2:
        raise TraceError(
            f"{path}: {name} has {values.shape[1]} values a row: must be one an expert"
        )


def _refuse_beyond(path: Path, lists: dict[str, NDArray[Any] | None]) -> None:
    """Refuse choices that the softmax or logits of all experts have no value for."""
    ids = lists["selected_experts"]
    for name in ("router_softmax", "router_logits"):
        values = lists[name]
        if ids is not None and values is not None and (ids >= values.shape[1]).any():
            row, slot = np.argwhere(ids >= values.shape[1])[0].tolist()
            rule = f"must be < {values.shape[1]}, as {name} has values"
            raise TraceError(
                f"{path}: row {row}: selected_experts[{slot}] is {ids[row, slot]}: {rule}"
            )


def _phases(words: Sequence[Any], where: Callable[[int], str]) -> NDArray[np.int64]:
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(PHASE_NAMES)}
    numbers[None] = UNKNOWN
    for row, word in enumerate(words):
        if not isinstance(word, str | None) or word not in numbers:
            rule = f"must be {' or '.join(PHASE_NAMES)}{near_match(str(word), PHASE_NAMES)}"
            raise TraceError(f"{where(row)}: phase is {word!r}: {rule}")
    return np.array([numbers[word] for word in words], dtype=np.int64)
