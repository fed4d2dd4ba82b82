"""From counts as a source gives them to expert counts: dense layers out, artefacts named or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from traces.counts import ExpertCounts
from traces.importers.repairs import forced_top_k, layers_that_route
from traces.importers.routed import Origin
from traces.importers.told import Told, agreed
from traces.trace import Provenance, TraceError

_MOST_PER_EXPERT = 0.02
"""Largest difference between experts, of their mean, at which counts look balanced by force: chance alone
makes more below some 20,000 uses an expert."""


def counted(
    counts: NDArray[np.generic], told: Told, origin: Origin, unit: str, top_k: int | None = None
) -> ExpertCounts:
    """Return counts [samples, layers, experts] of a source as expert counts; ``unit`` is what a sample is.

    Layers that no expert was used in are dense; samples without any use are dropped. Both, and what is
    suspicious, is in the notes.

    Raises
    ------
    TraceError
        For other shapes, values no counter can have, a MoE layer that was never used, and facts that
        differ from what the user told.
    """
    if counts.ndim != 3 or counts.dtype.kind not in "iuf" or 0 in counts.shape:
        rule = "must be numbers [samples, layers, experts], none of them 0"
        raise TraceError(f"{origin.file}: counts are {counts.dtype}{counts.shape}: {rule}")
    values = counts.astype(np.float64)
    _refuse_values(values, origin)
    used: NDArray[np.bool_] = np.asarray(values.any(axis=2))
    layers, found = layers_that_route(~np.asarray(used.any(axis=0)), told, origin)
    samples = np.flatnonzero(used[:, layers].any(axis=1))
    if idle := len(values) - len(samples):
        found.append(f"repaired: {idle} of {len(values)} samples without any use were dropped")
    values = values[np.ix_(samples, layers)]
    agreed(origin.file, "num_experts", told.num_experts, values.shape[2])
    if top_k is not None:
        found += forced_top_k(top_k, told, origin)
    return ExpertCounts(
        model=told.model or origin.model or "unknown",
        counts=values,
        layer_indices=_indices(layers, told, origin),
        unit=unit,
        provenance=Provenance(
            "imported", f"{Path(origin.file).name}: {origin.what}", origin.detail
        ),
        top_k=told.top_k if top_k is None else top_k,
        recorder=origin.recorder,
        notes=(*origin.notes, *found, *_doubts(values)),
        licence=told.licence,
    )


def _refuse_values(values: NDArray[np.float64], origin: Origin) -> None:
    wrong = np.argwhere(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        sample, layer, expert = wrong[0].tolist()
        raise TraceError(
            f"{origin.file}: sample {sample}, layer {layer}, expert {expert} is "
            f"{values[sample, layer, expert]:g}: must be finite and >= 0"
        )


def _indices(layers: NDArray[np.intp], told: Told, origin: Origin) -> tuple[int, ...]:
    if origin.layer_indices is not None:
        return tuple(origin.layer_indices[place] for place in layers.tolist())
    return told.layer_indices or tuple(layers.tolist())


def _doubts(values: NDArray[np.float64]) -> list[str]:
    """Say where the experts of every layer are used alike: no router does that by itself."""
    total = values.sum(axis=0)
    spread = (total.max(axis=1) - total.min(axis=1)) / total.mean(axis=1)
    if total.shape[1] == 1 or spread.max() > _MOST_PER_EXPERT:
        return []
    return [
        "warning: the experts of each layer are used alike: balanced by force, padded to capacity, or "
        "counts that were never told apart?"
    ]
