"""Reads what SGLang's expert distribution recorder dumps: ``expert_distribution_recorder_*.pt``.

Modes ``stat`` and ``stat_approx`` give ``logical_count`` [steps, num_layers, num_experts]; ``per_pass`` gives
``records`` of ``global_physical_count`` [num_layers, physical experts] by forward pass and rank: both counts.
Mode ``per_token`` adds the ids of each token, ``topk_ids_of_layer`` [num_layers, tokens, 8], -1 where there
is none: a trace. All layers of the model are there. Ids are those of physical experts, copies included, and
``last_physical_to_logical_map`` [num_layers, physical experts] tells which expert each is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.counts import ExpertCounts
from traces.importers.assemble import assemble
from traces.importers.counted import counted
from traces.importers.routed import Origin
from traces.importers.sglang_passes import Pass
from traces.importers.sglang_requests import requests_of
from traces.importers.sources import files_of
from traces.importers.told import Told
from traces.importers.torch_file import load_torch
from traces.schema import Trace
from traces.trace import TraceError

_NAME = "SGLang expert distribution recorder"
_IDLE = 4


@dataclass(frozen=True, slots=True)
class _Record:
    """One forward pass of one rank."""

    where: str  # the file and the record, for errors
    file: Path
    values: dict[str, Any]

    def whole(self, key: str) -> int:
        """Return a whole number; raises TraceError if there is none."""
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TraceError(f"{self.where}: {key} is {_brief(value)}: must be a whole number")
        return value

    def array(self, key: str, dims: int) -> NDArray[np.integer]:
        """Return an array of whole numbers with so many axes; raises TraceError if there is none."""
        value = self.values.get(key)
        try:
            array = np.asarray([] if value is None else value)
        except ValueError:  # lists of different lengths
            array = np.zeros(0)
        if array.size == 0 and array.ndim == dims:
            array = array.astype(np.int64)
        if array.ndim != dims or array.dtype.kind not in "iu":
            rule = f"must be whole numbers on {dims} axes"
            raise TraceError(f"{self.where}: {key} is {array.dtype}{array.shape}: {rule}")
        return array


def _brief(value: object) -> str:
    """Return a value as one short line."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def read(path: Path, told: Told) -> Trace | ExpertCounts:
    """Return the trace of a ``per_token`` recording, or the counts of another; of a file, or all in a folder.

    Raises
    ------
    TraceError
        For files of other kinds or of different modes, ids that no physical expert has, passes of speculative
        decoding, and ids that the last map cannot explain.
    """
    dumps = [(file, load_torch(file)) for file in files_of(path, ".pt")]
    for file, dump in dumps:
        if not isinstance(dump, dict) or not {"logical_count", "records"} & {*dump}:
            raise TraceError(f"{file}: not a dump of the {_NAME}: no 'logical_count', no 'records'")
    if all("logical_count" in dump for _, dump in dumps):
        return _of_stat(path, [(file, dump["logical_count"]) for file, dump in dumps], told)
    if any("logical_count" in dump for _, dump in dumps):
        raise TraceError(f"{path}: files of mode stat beside others: must be of one mode")
    table = _map_of(path, dumps)
    records = list(_records(dumps))
    if not records:
        raise TraceError(f"{path}: no records: nothing was recorded")
    with_tokens = ["topk_ids_of_layer" in record.values for record in records]
    if not any(with_tokens):
        return _of_passes(path, records, table, told)
    if not all(with_tokens):
        raise TraceError(f"{path}: records with and without tokens: must be of one mode")
    return _of_tokens(path, records, table, told)


def _of_stat(path: Path, dumps: list[tuple[Path, Any]], told: Told) -> ExpertCounts:
    arrays = []
    for file, array in dumps:
        if not isinstance(array, np.ndarray) or array.ndim != 3:
            found = getattr(array, "shape", type(array).__name__)
            raise TraceError(f"{file}: logical_count is {found}: must be [steps, layers, experts]")
        if array.shape[1:] != dumps[0][1].shape[1:]:
            rule = f"must be {dumps[0][1].shape[1:]}, as in {dumps[0][0].name}"
            raise TraceError(f"{file}: [layers, experts] are {array.shape[1:]}: {rule}")
        arrays.append(array)
    note = "all ranks summed by the engine: ranks that share their tokens count them more than once"
    origin = Origin(file=str(path), what=f"{_NAME}, stat", recorder=_NAME, notes=(note,))
    return counted(np.concatenate(arrays), told, origin, "forward pass")


def _records(dumps: list[tuple[Path, dict[str, Any]]]) -> Iterator[_Record]:
    for file, dump in dumps:
        if not isinstance(dump["records"], list):
            raise TraceError(
                f"{file}: records are {type(dump['records']).__name__}: must be a list"
            )
        for number, values in enumerate(dump["records"]):
            if not isinstance(values, dict):
                raise TraceError(f"{file}: record {number} is {_brief(values)}: must be a dict")
            yield _Record(f"{file}: record {number}", file, values)


def _map_of(path: Path, dumps: list[tuple[Path, dict[str, Any]]]) -> NDArray[np.int64]:
    """Return the expert of each physical one, [num_layers, physical experts], which all files must share."""
    tables = []
    for file, dump in dumps:
        found = dump.get("last_physical_to_logical_map")
        if not isinstance(found, np.ndarray) or found.ndim != 2 or found.dtype.kind not in "iu":
            rule = "must be whole numbers [layers, physical experts]"
            raise TraceError(f"{file}: last_physical_to_logical_map is {_brief(found)}: {rule}")
        if found.size == 0 or found.min() < 0 or found.max() >= found.shape[1]:
            rule = f"must name experts, 0..{found.shape[1] - 1} at most"
            raise TraceError(f"{file}: last_physical_to_logical_map {found.shape}: {rule}")
        tables.append((file, found.astype(np.int64)))
    for file, table in tables[1:]:
        if not np.array_equal(table, tables[0][1]):
            raise TraceError(
                f"{file}: last_physical_to_logical_map differs from {tables[0][0].name}: experts were moved "
                "between the dumps: import them one by one, if none was moved within"
            )
    return tables[0][1]


def _map_notes(table: NDArray[np.int64]) -> tuple[str, ...]:
    """Say what was done to physical ids, where they are not the experts' own."""
    physical = table.shape[1]
    if (table == np.arange(physical)).all():
        return ()
    copies = physical - int(table.max()) - 1
    return (
        f"repaired: ids of {physical} physical experts, {copies} of them copies, were turned into experts",
        "warning: by the last map: ids recorded before EPLB moved experts, if it did, are wrong",
    )


def _of_passes(
    path: Path, records: list[_Record], table: NDArray[np.int64], told: Told
) -> ExpertCounts:
    """Sum each forward pass over its ranks, and the copies of each expert."""
    by_rank: dict[int, dict[tuple[int, int], NDArray[np.integer]]] = {}
    for record, session in _sessions(records):
        counts = record.array("global_physical_count", 2)
        if counts.shape != table.shape:
            rule = f"must be {table.shape}, as the map"
            raise TraceError(f"{record.where}: counts are {counts.shape}: {rule}")
        key = session, record.whole("forward_pass_id")
        passes = by_rank.setdefault(record.whole("rank"), {})
        if key in passes:
            raise TraceError(f"{record.where}: forward pass {key[1]} is there twice")
        passes[key] = counts
    kept, notes = list(by_rank.values()), _map_notes(table)
    if len(kept) > 1 and all(_equal(rank, kept[0]) for rank in kept):  # each counted all tokens
        kept, notes = (
            kept[:1],
            (*notes, f"repaired: {len(kept)} ranks counted the same; one was kept"),
        )
    total: dict[tuple[int, int], NDArray[np.int64]] = {}
    for rank in kept:
        for key, counts in rank.items():
            total[key] = total.get(key, 0) + counts.astype(np.int64)
    origin = Origin(file=str(path), what=f"{_NAME}, per_pass", recorder=_NAME, notes=notes)
    physical = np.stack([total[key] for key in sorted(total)])
    return counted(_logical(physical, table), told, origin, "forward pass")


def _equal(
    one: dict[tuple[int, int], NDArray[np.integer]],
    other: dict[tuple[int, int], NDArray[np.integer]],
) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def _logical(counts: NDArray[np.int64], table: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sum counts [passes, layers, physical] over the copies of each expert."""
    num_experts = int(table.max()) + 1
    summed = np.empty((*counts.shape[:2], num_experts))
    for layer, experts in enumerate(table):
        of_expert = experts[:, None] == np.arange(num_experts)  # [physical, experts]
        summed[:, layer] = counts[:, layer].astype(np.float64) @ of_expert
    return summed


def _sessions(records: list[_Record]) -> Iterator[tuple[_Record, int]]:
    """Give each record the number of the server's run: its passes count up within one."""
    last: dict[int, tuple[int, int]] = {}
    for record in records:
        rank, number = record.whole("rank"), record.whole("forward_pass_id")
        session, before = last.get(rank, (0, -1))
        session += number < before
        last[rank] = session, number
        yield record, session


def _of_tokens(path: Path, records: list[_Record], table: NDArray[np.int64], told: Told) -> Trace:
    passes = [
        _pass(record, session, table)
        for record, session in _sessions(records)
        if record.whole("forward_mode") != _IDLE and len(record.array("input_ids", 1))
    ]
    if not passes:
        raise TraceError(f"{path}: no forward pass has a token: nothing was recorded")
    slots = passes[0].expert_ids.shape[2]
    for step in passes:
        if (found := step.expert_ids.shape[2]) != slots:
            raise TraceError(
                f"{step.where}: tokens have {found} slots: must have {slots}, as before"
            )
    requests, notes = requests_of(passes, str(path))
    origin = Origin(
        file=str(path),
        what=f"{_NAME}, per_token",
        recorder=_NAME,
        num_experts=int(table.max()) + 1,
        notes=(
            "requests were rebuilt from positions: the recording does not name them",
            *_map_notes(table),
            *notes,
        ),
    )
    return assemble(requests, told, origin)


def _pass(record: _Record, session: int, table: NDArray[np.int64]) -> Pass:
    """Return a forward pass with the ids of experts, physical ones mapped."""
    token_id, position = record.array("input_ids", 1), record.array("positions", 1)
    ids = record.array("topk_ids_of_layer", 3)
    if len(position) != len(token_id) or ids.shape[:2] != (len(table), len(token_id)):
        rule = f"must be {len(token_id)} tokens in {len(table)} layers"
        raise TraceError(
            f"{record.where}: {len(position)} positions, ids {ids.shape}: {rule}, as input_ids and the map"
        )
    lengths = record.values.get("extend_seq_lens")
    return Pass(
        where=record.where,
        rank=record.whole("rank"),
        session=session,
        number=record.whole("forward_pass_id"),
        mode=record.whole("forward_mode"),
        lengths=None if lengths is None else record.array("extend_seq_lens", 1).tolist(),
        token_id=token_id,
        position=position,
        expert_ids=_experts(record, ids, table),
    )


def _experts(
    record: _Record, ids: NDArray[np.integer], table: NDArray[np.int64]
) -> NDArray[np.int16]:
    """Return the ids of experts, [tokens, layers, slots], of physical ones [layers, tokens, slots]."""
    if ids.size and ids.max() >= table.shape[1]:
        layer, token, slot = (int(place[0]) for place in np.nonzero(ids >= table.shape[1]))
        raise TraceError(
            f"{record.where}: layer {layer}, token {token}, slot {slot} is expert "
            f"{ids[layer, token, slot]}: must be < {table.shape[1]}, the physical experts (was the shared "
            "expert fused into the routed ones? SGLang: --disable-shared-experts-fusion)"
        )
    mapped = np.where(
        ids < 0, -1, table[np.arange(len(table))[:, None, None], np.maximum(ids, 0)]
    ).astype(np.int16)
    ordered = np.sort(mapped, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twice.any():
        layer, token, _ = (int(place[0]) for place in np.nonzero(twice))
        raise TraceError(
            f"{record.where}: layer {layer}, token {token} has an expert twice by the last map: experts were "
            "moved during the recording, and which ids are right is lost"
        )
    return mapped.transpose(1, 0, 2)
