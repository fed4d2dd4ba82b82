"""Reads Megatron's ``tokens_per_expert/rank<r>.jsonl``: tokens of each expert of a rank, by micro-batch.

A line is ``{"iter", "block": "decoder" or "mtp", "layer", "tpe"}``; ``tpe`` lists, for each micro-batch, the
tokens of each local expert. A rank knows its own experts only: with E experts and n on a rank, E / n
neighbouring ranks make a group that holds all (expert tensor parallelism of 1, Megatron's order of ranks),
and groups are replicas that see other tokens: they are summed. The order of the tokens is lost: counts, one
sample a micro-batch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.counts import ExpertCounts
from traces.importers.counted import counted
from traces.importers.json_file import json_lines
from traces.importers.routed import Origin
from traces.importers.sources import files_of
from traces.importers.told import Told, needed
from traces.trace import TraceError

_FOLDER = "tokens_per_expert"
_PADDED_TOKENS = 16  # FP8 kernels pad each expert's rows to a multiple of this
_Cells = dict[tuple[int, int], NDArray[np.float64]]
"""Counts [micro-batches, local experts] by (iteration, layer)."""


def read(path: Path, told: Told) -> ExpertCounts:
    """Return the counts of a file, or of all ranks in a folder; raises TraceError for anything else."""
    path = path / _FOLDER if (path / _FOLDER).is_dir() else path
    ranks, notes = _ranks(path)
    first = next(iter(ranks.values()))
    local = next(iter(first.values())).shape[1]
    option = "--num-experts or --model (a rank has its own only)"
    num_experts = needed(str(path), "the number of experts", told.num_experts, option)
    groups = _groups(path, ranks, local, num_experts)
    layers = tuple(sorted({layer for _, layer in first}))
    values = np.sum([_whole(path, group, layers) for group in groups], axis=0)
    origin = Origin(
        file=str(path),
        what="Megatron tokens_per_expert",
        recorder="Megatron-LM --save-tokens-per-experts-interval",
        layer_indices=layers,
        notes=(*notes, *_doubts(values, len(groups))),
    )
    return counted(values, told, origin, "micro-batch")


def _ranks(path: Path) -> tuple[dict[int, _Cells], list[str]]:
    """Return what each rank counted, and what was left out."""
    ranks, notes = dict[int, _Cells](), list[str]()
    twice = ahead = 0
    for file in files_of(path, ".jsonl"):
        match = re.fullmatch(r"rank(\d+)", file.stem)
        if match is None and path.is_dir():
            raise TraceError(f"{file}: must be called rank<number>.jsonl")
        cells = _Cells()
        for number, record in json_lines(file):
            if not isinstance(record, dict):
                raise TraceError(f"{file}: line {number} is {record!r:.60}: must be a JSON object")
            if record.get("block") == "mtp":
                ahead += 1
                continue
            place, found = _record(f"{file}: line {number}", record)
            twice += place in cells
            cells[place] = found
        if not cells:
            raise TraceError(f"{file}: no counts of decoder layers in it")
        ranks[int(match[1]) if match else 0] = cells
    if ahead:
        notes.append(f"repaired: {ahead} records of multi-token prediction were left out")
    if twice:
        what = "records of iterations that a restart ran again were replaced"
        notes.append(f"repaired: {twice} {what}")
    return ranks, notes


def _record(where: str, record: dict[str, Any]) -> tuple[tuple[int, int], NDArray[np.float64]]:
    """Return (iteration, layer) and the counts [micro-batches, local experts] of a line."""
    for key in ("iter", "layer"):
        if not isinstance(record.get(key), int):
            raise TraceError(f"{where}: {key} is {record.get(key)!r}: must be a whole number")
    try:
        found = np.array(record.get("tpe"), dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.zeros(0)
    if found.ndim != 2 or 0 in found.shape:
        raise TraceError(f"{where}: tpe must be a list of counts for each micro-batch")
    return (record["iter"], record["layer"]), found


def _groups(
    path: Path, ranks: dict[int, _Cells], local: int, num_experts: int
) -> list[list[_Cells]]:
    """Return the ranks in groups that hold all experts, each in order of its experts."""
    if num_experts % local:
        raise TraceError(f"{path}: ranks have {local} experts: must divide {num_experts}")
    size = num_experts // local
    starts = sorted({rank // size * size for rank in ranks})
    wanted = [rank for start in starts for rank in range(start, start + size)]
    if missing := [rank for rank in wanted if rank not in ranks]:
        rule = f"groups of {size} ranks hold the {num_experts} experts, {local} on each"
        raise TraceError(f"{path}: rank{missing[0]}.jsonl is missing: {rule}")
    _check_alike(path, ranks, local)
    return [[ranks[rank] for rank in range(start, start + size)] for start in starts]


def _check_alike(path: Path, ranks: dict[int, _Cells], local: int) -> None:
    """Refuse ranks that counted other iterations, layers or micro-batches than the first."""
    first = min(ranks)
    shapes = {place: (len(found), local) for place, found in ranks[first].items()}
    for rank, cells in sorted(ranks.items()):
        if {place: found.shape for place, found in cells.items()} != shapes:
            rule = f"must count the iterations, layers and micro-batches of rank {first}, {local} experts"
            raise TraceError(
                f"{path}: rank {rank}: {rule} (pipeline stages are imported one by one)"
            )


def _whole(path: Path, group: list[_Cells], layers: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the counts [samples, layers, experts] of one group."""
    samples = []
    for iteration in sorted({iteration for iteration, _ in group[0]}):
        by_layer = []
        for layer in layers:
            if (iteration, layer) not in group[0]:
                raise TraceError(
                    f"{path}: iteration {iteration} has no layer {layer}, but others have"
                )
            by_layer.append(np.concatenate([cells[iteration, layer] for cells in group], axis=1))
        if len({found.shape for found in by_layer}) > 1:
            raise TraceError(f"{path}: iteration {iteration}: layers differ in their micro-batches")
        samples.append(np.stack(by_layer, axis=1))
    return np.concatenate(samples)


def _doubts(values: NDArray[np.float64], num_groups: int) -> list[str]:
    notes = []
    if num_groups > 1:
        notes.append(
            f"warning: {num_groups} groups of ranks were summed as replicas; pipeline stages, which number "
            "their layers from 0 each, must be imported one by one"
        )
    totals = values.sum(axis=2)
    if (totals != totals[:, :1]).any():
        notes.append(
            "warning: layers of a micro-batch count different numbers of tokens: tokens were dropped, or the "
            "ranks are grouped otherwise"
        )
    if (values % _PADDED_TOKENS == 0).all():
        notes.append(
            f"warning: all counts are multiples of {_PADDED_TOKENS}: rows that pad an expert are counted too"
        )
    return notes
