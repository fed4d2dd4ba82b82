"""Known artefacts of recordings: each is repaired and named, or refused.

A repair is a sentence that begins with ``repaired:`` in the trace's notes; what is only suspicious
begins with ``warning:``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from traces.importers.routed import Origin, Routed
from traces.importers.told import Told, agreed
from traces.trace import TraceError

_LEAST_REPEATED_IDS = 8  # that a warm-up request has; fewer may be alike by chance
_LEAST_ADJACENT_ROWS = 64
_SUSPICIOUS = 1.15
"""Overlap of adjacent tokens over chance below which routing looks random; the least of the public
traces has 1.4 (granite, 2.9 of 8 where chance is 2)."""


def moe_layers(
    requests: Sequence[Routed], told: Told, origin: Origin
) -> tuple[NDArray[np.intp], list[str]]:
    """Return which layers of the source are MoE layers, as places on its axis, and what was repaired.

    Raises
    ------
    TraceError
        If a layer that must route has no expert in any token (a missing pipeline stage, a dead hook), one
        that is told to be dense has, or nobody can tell a dense layer from expert 0.
    """
    one_slot = requests[0].expert_ids.shape[2] == 1
    return layers_that_route(_empty_layers(requests, origin), told, origin, one_slot=one_slot)


def layers_that_route(
    empty: NDArray[np.bool_], told: Told, origin: Origin, *, one_slot: bool = False
) -> tuple[NDArray[np.intp], list[str]]:
    """Return what :func:`moe_layers` does, of which layers are ``empty``, bool[num_layers].

    ``one_slot``: ids of top-k 1, where zeros may be a dense layer or expert 0.
    """
    num_layers, hidden = len(empty), told.num_hidden_layers
    if hidden is not None and num_layers > hidden:
        raise TraceError(
            f"{origin.file}: has {num_layers} layers: must be at most {hidden}, as you said"
        )
    named = told.layer_indices
    if origin.layer_indices is not None:
        _refuse_empty(np.flatnonzero(empty), origin)
        return np.arange(num_layers), _compared(origin.layer_indices, named, origin)
    if named is not None and len(named) != num_layers:
        return _told_layers(named, empty, origin), []
    if named is not None:
        _refuse_empty(np.flatnonzero(empty), origin)
        return np.arange(num_layers), []
    if not empty.any():
        return np.arange(num_layers), []
    if one_slot and origin.zero_means_dense:
        raise TraceError(
            f"{origin.file}: layer {int(empty.argmax())} is 0 in every token, which with top_k 1 may be a "
            "dense layer or expert 0: tell the MoE layers (--layers)"
        )
    dense = np.flatnonzero(empty)
    if len(dense) == num_layers:
        raise TraceError(
            f"{origin.file}: no layer has an expert in any token: nothing was recorded"
        )
    if dense[-1] >= len(
        dense
    ):  # dense layers that no one named are the first ones, or else it is a fault
        raise TraceError(
            f"{origin.file}: layer {int(dense[-1])} has no expert in any token, but layers before it have: a "
            "missing pipeline stage, or dense layers between MoE layers: tell the MoE layers (--layers)"
        )
    return np.flatnonzero(~empty), [
        f"repaired: {len(dense)} dense layers were dropped, {_list(dense)}"
    ]


def _compared(found: tuple[int, ...], named: tuple[int, ...] | None, origin: Origin) -> list[str]:
    """Compare the layers that a file names with those that the user told; say what is not there."""
    if named is None:
        return []
    if stray := sorted({*found} - {*named}):
        rule = "must be one of the MoE layers that were told"
        raise TraceError(f"{origin.file}: layer {stray[0]} has experts: {rule}")
    if len(found) == len(named):
        return []
    return [f"warning: only {len(found)} of the {len(named)} MoE layers are in the file"]


def _told_layers(
    named: tuple[int, ...], empty: NDArray[np.bool_], origin: Origin
) -> NDArray[np.intp]:
    """Return the places of the layers that the user named among all hidden layers of the source."""
    num_layers = len(empty)
    if named[-1] >= num_layers:
        raise TraceError(
            f"{origin.file}: has {num_layers} layers: must be the {len(named)} MoE layers, or all hidden "
            f"layers up to {named[-1]}, the last that you named"
        )
    places = np.array(named, dtype=np.intp)
    stray = np.setdiff1d(np.flatnonzero(~empty), places)
    if len(stray):
        raise TraceError(
            f"{origin.file}: layer {int(stray[0])} has experts: must be one of the MoE layers that were told"
        )
    _refuse_empty(places[empty[places]], origin)
    return places


def _refuse_empty(layers: NDArray[np.intp], origin: Origin) -> None:
    if len(layers):
        raise TraceError(
            f"{origin.file}: layer {int(layers[0])} has no expert in any token: a pipeline stage is "
            "missing, or it is a dense layer (--layers tells the MoE layers)"
        )


def _empty_layers(requests: Sequence[Routed], origin: Origin) -> NDArray[np.bool_]:
    """Tell for each layer whether no token has an expert in it."""
    empty = np.ones(requests[0].expert_ids.shape[1], dtype=bool)
    for request in requests:
        empty &= blank_cells(request, origin).all(axis=0)
    return empty


def blank_cells(request: Routed, origin: Origin) -> NDArray[np.bool_]:
    """Tell where a token has no routing in a layer, bool[num_tokens, num_layers]: no id, or all of them 0."""
    blank = np.asarray(request.is_empty_slot.all(axis=2))
    if origin.zero_means_dense:
        blank |= np.asarray((request.expert_ids == 0).all(axis=2))
    return blank


def drop_blank_rows(requests: Sequence[Routed], origin: Origin) -> tuple[list[Routed], list[str]]:
    """Drop first rows of a request that have no routing in any layer; refuse such rows further on.

    Prompt tokens that came out of a prefix cache, or that the engine's buffer missed, begin a request.
    With ``top_k`` 1 a row of zeros may be expert 0 and stays.
    """
    kept, dropped = list[Routed](), 0
    for request in requests:
        if request.expert_ids.shape[2] == 1 and origin.zero_means_dense:
            kept.append(request)
            continue
        blank = np.asarray(blank_cells(request, origin).all(axis=1))
        first = int(blank.argmin()) if not blank.all() else len(blank)
        if blank[first:].any():
            row = first + int(blank[first:].argmax())
            raise TraceError(
                f"{origin.file}: {request.name}: row {row} has no expert in any layer, but rows before it "
                "have: the recording lost tokens"
            )
        dropped += first
        if first < len(request):
            kept.append(request.without_first(first))
    if not kept:
        raise TraceError(
            f"{origin.file}: no token has an expert in any layer: nothing was recorded"
        )
    if not dropped:
        return kept, []
    what = (
        "first rows without routing were dropped (prefix cache, or a buffer that missed the prompt)"
    )
    return kept, [f"repaired: {dropped} {what}"]


def refuse_unfilled(requests: Sequence[Routed], origin: Origin) -> None:
    """Refuse a cell of zeros where zeros mean that nothing was written; with top-k 1 it may be expert 0."""
    if not origin.zero_means_dense or requests[0].expert_ids.shape[2] == 1:
        return
    for request in requests:
        zeros = np.argwhere((request.expert_ids == 0).all(axis=2))
        if len(zeros):
            row, layer = zeros[0].tolist()
            raise TraceError(
                f"{origin.file}: {request.name}: row {row}, MoE layer {layer} is 0 in every slot: the "
                "engine's buffer was not filled there"
            )


def drop_warm_up(requests: Sequence[Routed], origin: Origin) -> tuple[list[Routed], list[str]]:
    """Drop requests at the beginning whose rows are all alike: an engine's warm-up on one token.

    Raises
    ------
    TraceError
        If every request is like that.
    """
    first = 0
    while first < len(requests) and _is_constant(requests[first]):
        first += 1
    if first == 0:
        return list(requests), []
    if first == len(requests):
        raise TraceError(
            f"{origin.file}: all rows of each request are alike: only a warm-up was recorded"
        )
    rows = sum(map(len, requests[:first]))
    return list(requests[first:]), [
        f"repaired: {rows} warm-up rows were dropped ({first} first requests whose rows are all alike)"
    ]


def _is_constant(request: Routed) -> bool:
    ids = request.expert_ids
    return ids[1:].size >= _LEAST_REPEATED_IDS and bool((ids == ids[0]).all())


def forced_top_k(top_k: int, told: Told, origin: Origin) -> list[str]:
    """Say whether the run used another top-k than the file or the model has; refuse more than was told."""
    agreed(origin.file, "top_k", told.top_k, top_k)
    native, stated = told.native_top_k, origin.top_k
    if stated is not None and top_k > stated:
        rule = f"must be at most {stated}, the top_k that the file states"
        raise TraceError(f"{origin.file}: tokens have {top_k} experts: {rule}")
    notes = []
    if stated is not None and top_k < stated:
        notes.append(f"warning: no token has more than {top_k} experts, the file states {stated}")
    if native is not None and native != top_k:
        notes.append(f"warning: top_k was forced from {native} to {top_k}")
    return notes


def adjacency(requests: Sequence[Routed], num_experts: int) -> list[str]:
    """Warn where adjacent tokens share no more experts than chance would let them.

    The expected overlap of two random choices of k among E is k * k / E.
    """
    shared, pairs = 0, 0
    for request in requests:
        ids, there = request.expert_ids, ~request.is_empty_slot
        slots = range(ids.shape[2])
        for now, before in product(slots, slots):  # slot by slot: one plain array at a time
            equal = (ids[1:, :, now] == ids[:-1, :, before]) & there[1:, :, now]
            shared += int(np.count_nonzero(equal))
        pairs += (len(ids) - 1) * ids.shape[1]
    top_k = requests[0].expert_ids.shape[2]
    chance = top_k * top_k / num_experts
    rows = pairs / requests[0].expert_ids.shape[1]  # pairs of adjacent tokens
    if rows < _LEAST_ADJACENT_ROWS or top_k == num_experts or shared / pairs > _SUSPICIOUS * chance:
        return []
    told = f"adjacent tokens share {shared / pairs:.2f} of {top_k} experts, chance is {chance:.2f}"
    return [f"warning: {told}: shuffled, forced or random routing?"]


def _list(numbers: NDArray[np.intp]) -> str:
    return ", ".join(map(str, numbers.tolist()))
