"""Fits the ranks of a Megatron run together: copies of tensor parallelism, pipeline stages, replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from traces.importers.megatron_passes import Pass, joined_stages
from traces.importers.told import Told
from traces.trace import TraceError

_REPLICAS = (
    "warning: {} ranks hold other tokens of the same layers: taken as data-parallel replicas, one after"
    " another (--layers tells pipeline stages; slices of sequence parallelism cannot be told from replicas)"
)
_STAGES = "repaired: {} pipeline stages were joined in the order of their ranks; each numbers its own layers"


@dataclass(frozen=True, slots=True)
class Streams:
    """The passes of whole models, one list a replica.

    Attributes
    ----------
    layer_indices
        Absolute indices of the layers; None where the ranks number them each from 0.
    """

    passes: list[list[Pass]]
    layer_indices: tuple[int, ...] | None
    notes: list[str]


def streams_of(ranks: Sequence[tuple[Path, list[Pass]]], told: Told) -> Streams:
    """Return what the ranks, in order, recorded together.

    Ranks that hold the same choices are copies. Ranks with other layers each are pipeline stages. Where the
    numbers overlap, each stage counts its own layers: then only ``told.layer_indices`` tells how many layers
    there are in all, and thus how many stages.

    Raises
    ------
    TraceError
        If the ranks cannot be parts of one model, or stages have other tokens.
    """
    kept, notes = _distinct(ranks)
    layers = [_layers_of(passes) for _, passes in kept]
    distinct = sorted(set(layers))
    union = sorted({layer for part in distinct for layer in part})
    stages = _told_stages(layers, len(union), told)
    if stages is not None:
        notes.append(_STAGES.format(len(stages)))
        return Streams(_joined(kept, stages, True, notes), None, notes)
    if sum(map(len, distinct)) != len(union):
        shown = " and ".join(f"{part[0]}-{part[-1]}" for part in distinct[:2])
        raise TraceError(
            f"{kept[0][0].parent}: ranks hold layers {shown}: must be apart (pipeline stages) or the same; "
            "stages that number their own layers need --layers, the MoE layers of the whole model"
        )
    stages = [[at for at, part in enumerate(layers) if part == wanted] for wanted in distinct]
    if len({len(stage) for stage in stages}) > 1:
        counts = ", ".join(str(len(stage)) for stage in stages)
        raise TraceError(f"{kept[0][0].parent}: stages have {counts} ranks: must be as many each")
    if len(stages[0]) > 1:
        notes.append(_REPLICAS.format(len(stages[0])))
    return Streams(_joined(kept, stages, False, notes), tuple(union), notes)


def _distinct(
    ranks: Sequence[tuple[Path, list[Pass]]],
) -> tuple[list[tuple[Path, list[Pass]]], list[str]]:
    """Return the ranks without copies: tensor parallelism routes the same tokens on each."""
    kept: list[tuple[Path, list[Pass]]] = []
    for file, passes in ranks:
        if not any(_is_copy(passes, other) for _, other in kept):
            kept.append((file, passes))
    copies = len(ranks) - len(kept)
    return kept, [f"repaired: {copies} ranks that copy another were dropped"] if copies else []


def _is_copy(passes: Sequence[Pass], other: Sequence[Pass]) -> bool:
    return len(passes) == len(other) and all(map(Pass.equals, passes, other))


def _layers_of(passes: Sequence[Pass]) -> tuple[int, ...]:
    return tuple(sorted(passes[0].ids))


def _told_stages(
    layers: Sequence[tuple[int, ...]], num_numbers: int, told: Told
) -> list[list[int]] | None:
    """Return the ranks of each stage if the stages number their own layers, as what was told shows.

    Stages are blocks of successive ranks, the outermost dimension of Megatron's order.
    """
    total = None if told.layer_indices is None else len(told.layer_indices)
    if total is None or total <= num_numbers:
        return None
    for num_stages in range(2, len(layers) + 1):
        width, rest = divmod(len(layers), num_stages)
        blocks = [list(range(at, at + width)) for at in range(0, len(layers), width)]
        alike = all(len({layers[rank] for rank in block}) == 1 for block in blocks)
        if not rest and alike and sum(len(layers[block[0]]) for block in blocks) == total:
            return blocks
    return None


def _joined(
    ranks: Sequence[tuple[Path, list[Pass]]],
    stages: Sequence[Sequence[int]],
    renumbered: bool,
    notes: list[str],
) -> list[list[Pass]]:
    """Return a stream for each rank of the first stage, joined with its like of the other stages."""
    streams = []
    cut = 0
    for like in zip(*stages, strict=True):
        parts = [ranks[rank][1] for rank in like]
        cut += max(map(len, parts)) - min(map(len, parts))
        try:
            streams.append(joined_stages(parts, renumbered))
        except TraceError as error:
            raise TraceError(f"{ranks[like[0]][0].parent}: {error}") from None
    if cut:
        notes.append(f"repaired: {cut} last passes that some stages lack were dropped")
    return streams
