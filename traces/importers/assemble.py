"""From requests as a source gives them to a trace, with all known artefacts looked for on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.artefacts import refuse_rankings
from traces.importers.repairs import (
    adjacency,
    drop_blank_rows,
    drop_warm_up,
    forced_top_k,
    moe_layers,
    refuse_unfilled,
)
from traces.importers.routed import Origin, Routed
from traces.importers.told import Told, agreed, needed
from traces.schema import (
    DECODE,
    NO_EXPERT,
    PREFILL,
    Provenance,
    Trace,
    TraceError,
    TraceMeta,
    validate,
)


def assemble(requests: Sequence[Routed], told: Told, origin: Origin) -> Trace:
    """Return the requests as one trace, in order of steps, repaired where that is safe.

    What was repaired, and what is only suspicious, is in the header's notes (``repaired:``,
    ``warning:``).

    Raises
    ------
    TraceError
        For what no router can have produced, for shapes that differ between requests, and for facts that
        neither the file nor the user tells (the number of experts).
    """
    requests, layers, num_experts, found = shaped(requests, told, origin)
    for repair in (drop_blank_rows, drop_warm_up):
        requests, repaired = repair(requests, origin)
        found += repaired
    refuse_unfilled(requests, origin)
    found += adjacency(requests, num_experts)
    sorted_by_weight, ordered = _by_weight(requests)
    found += ordered
    ids = np.concatenate([_plain_ids(request) for request in requests])
    facts = {"num_experts": num_experts, "sorted_by_weight": sorted_by_weight}
    trace = _trace(requests, ids, facts, told, origin, _indices(layers, told, origin), found)
    for parts in _passes(trace, requests):
        refuse_rankings(parts, num_experts, origin.file)
    trace = _in_order_of_steps(trace)
    validate(trace, origin.file)
    return trace


def shaped(
    requests: Sequence[Routed], told: Told, origin: Origin
) -> tuple[list[Routed], NDArray[np.intp], int, list[str]]:
    """Return the requests with their MoE layers and used slots only, and what that tells of the model.

    That is: the places of those layers in the source, the number of experts, and notes. Raises TraceError as
    :func:`assemble` does, for all that is of the shape or out of range.
    """
    requests = [request for request in requests if len(request)]
    if not requests:
        raise TraceError(f"{origin.file}: no routing in it: a trace has at least one row")
    _check_alike(requests, origin)
    layers, found = moe_layers(requests, told, origin)
    slots = _used_slots(requests)
    num_experts = needed(
        origin.file,
        "the number of experts",
        agreed(origin.file, "num_experts", told.num_experts, origin.num_experts),
        "--num-experts, --model or --config",
    )
    if slots > num_experts:
        raise TraceError(f"{origin.file}: top_k is {slots}: must be <= num_experts {num_experts}")
    requests = [request.of_layers(layers, slots) for request in requests]
    for request in requests:
        _check_range(request, num_experts, layers, origin)
    return requests, layers, num_experts, found + forced_top_k(slots, told, origin)


def _check_alike(requests: Sequence[Routed], origin: Origin) -> None:
    """Refuse requests of other shapes than the first, or that lack a column it has."""
    first = requests[0]
    for request in requests:
        ids = request.expert_ids
        if ids.ndim != 3 or ids.dtype.kind not in "iu" or 0 in ids.shape:
            rule = "must be integers [tokens, layers, k], none of them 0"
            raise TraceError(
                f"{origin.file}: {request.name}: ids are {ids.dtype}{ids.shape}: {rule}"
            )
        if ids.shape[1:] != first.expert_ids.shape[1:]:
            rule = f"must be {first.expert_ids.shape[1:]}, as in {first.name}"
            raise TraceError(
                f"{origin.file}: {request.name}: [layers, k] are {ids.shape[1:]}: {rule}"
            )
        for name in ("expert_weights", "token_id", "text", "step", "router_logits"):
            values = getattr(request, name)
            if (values is None) != (getattr(first, name) is None):
                rule = f"must be as in {first.name}"
                raise TraceError(f"{origin.file}: {request.name}: {name} is there or not: {rule}")
            if values is not None and len(values) != len(ids):
                raise TraceError(
                    f"{origin.file}: {request.name}: {name} has {len(values)} rows: must have {len(ids)}"
                )
        weights = request.expert_weights
        if weights is not None and weights.shape != ids.shape:
            rule = f"must be {ids.shape}, as the ids"
            raise TraceError(
                f"{origin.file}: {request.name}: expert_weights are {weights.shape}: {rule}"
            )


def _used_slots(requests: Sequence[Routed]) -> int:
    """Return how many slots hold an expert anywhere: recorders pad a smaller top-k."""
    return 1 + max(
        int(np.flatnonzero(~request.is_empty_slot.all(axis=(0, 1))).max(initial=0))
        for request in requests
    )


def _check_range(
    request: Routed, num_experts: int, layers: NDArray[np.intp], origin: Origin
) -> None:
    wrong = np.argwhere((request.expert_ids >= num_experts) & ~request.is_empty_slot)
    if len(wrong):
        row, layer, slot = wrong[0].tolist()
        found = int(request.expert_ids[row, layer, slot])
        rule = f"must lie in 0..{num_experts - 1}"
        if found == num_experts:
            rule += " (an expert-parallel run's mark for another rank's expert?)"
        where = f"row {row}, layer {layers[layer]}, slot {slot}"
        raise TraceError(f"{origin.file}: {request.name}: {where} is expert {found}: {rule}")


def _by_weight(requests: list[Routed]) -> tuple[bool, list[str]]:
    """Order each token's slots by falling weight where they are not; return whether they are now."""
    if requests[0].expert_weights is None:
        return False, []
    changed = 0
    for request in requests:
        weights = request.expert_weights
        assert weights is not None
        key = np.where(request.is_empty_slot, np.inf, -weights.astype(np.float32))
        order = np.argsort(key, axis=-1, kind="stable")
        moved = (order != np.arange(order.shape[-1])).any(axis=-1)
        if moved.any():
            changed += int(moved.sum())
            request.expert_ids = np.take_along_axis(request.expert_ids, order, -1)
            request.expert_weights = np.take_along_axis(weights, order, -1)
    return True, [f"repaired: the slots of {changed} token-layers were put in order of weight"] * (
        changed > 0
    )


def _plain_ids(request: Routed) -> NDArray[np.uint16]:
    return np.where(request.is_empty_slot, NO_EXPERT, request.expert_ids).astype(np.uint16)


def _trace(
    requests: Sequence[Routed],
    ids: NDArray[np.uint16],
    facts: dict[str, Any],
    told: Told,
    origin: Origin,
    layer_indices: tuple[int, ...],
    found: list[str],
) -> Trace:
    lengths = np.array([len(request) for request in requests])
    phase = np.concatenate(
        [np.where(np.arange(len(r)) < r.num_prompt, PREFILL, DECODE) for r in requests]
    ).astype(np.uint8)
    positions = [np.arange(len(r)) + r.first_position for r in requests]
    columns: dict[str, Any] = {
        "request_id": np.repeat(np.arange(len(requests)), lengths).astype(np.int32),
        "position": np.concatenate(positions).astype(np.int32),
        "phase": phase,
        "step": _steps(requests, origin),
        "expert_ids": ids,
        **_optional(requests),
    }
    weights = columns.get("expert_weights")
    if weights is not None:
        weights[ids == NO_EXPERT] = 0
    missing = (ids == NO_EXPERT).all(axis=-1)
    facts["incomplete_layers"] = _incomplete(missing, phase, origin)
    if facts["incomplete_layers"]:
        found.append(
            "prompt rows lack the last layer: the engine computes it for the last token only"
        )
    meta = _meta(ids, weights, facts, told, origin, layer_indices, found)
    return Trace(meta, **columns)


def _optional(requests: Sequence[Routed]) -> dict[str, Any]:
    """Return the columns beside the ids that the requests have."""
    columns: dict[str, Any] = {}
    for name, dtype in (
        ("expert_weights", np.float16),
        ("router_logits", np.float16),
        ("token_id", np.int32),
    ):
        if getattr(requests[0], name) is not None:
            parts = [getattr(request, name) for request in requests]
            columns[name] = np.concatenate(parts).astype(dtype)
    if requests[0].text is not None:
        columns["text"] = [piece for request in requests for piece in request.text or ()]
    return columns


def _steps(requests: Sequence[Routed], origin: Origin) -> NDArray[np.int32]:
    """Return the engine's steps, or: a prompt is one, each decoded token one, requests in turn."""
    steps, base = [], 0
    for request in requests:
        if request.step is not None:
            steps.append(np.asarray(request.step))
            if (falls := np.flatnonzero(np.diff(request.step) < 0)).size:
                row = int(falls[0]) + 1
                rule = "must not be before that of the row before"
                raise TraceError(
                    f"{origin.file}: {request.name}: row {row} is of step {request.step[row]}: {rule}"
                )
            continue
        own = np.maximum(np.arange(len(request)) - max(0, request.num_prompt - 1), 0) + base
        steps.append(own)
        base = int(own[-1]) + 1
    return np.concatenate(steps).astype(np.int32)


def _incomplete(
    missing: NDArray[np.bool_], phase: NDArray[np.uint8], origin: Origin
) -> tuple[int, ...]:
    """Return the last layer if prompt rows lack it; any other gap is refused by validation."""
    last = missing.shape[1] - 1
    return (last,) if last > 0 and missing[phase == PREFILL, last].any() else ()


def _indices(layers: NDArray[np.intp], told: Told, origin: Origin) -> tuple[int, ...]:
    """Return the absolute index of each MoE layer."""
    if origin.layer_indices is not None:
        return tuple(origin.layer_indices[place] for place in layers.tolist())
    if told.layer_indices is not None:
        return told.layer_indices
    return tuple(layers.tolist())


def _meta(
    ids: NDArray[np.uint16],
    weights: NDArray[np.float16] | None,
    facts: dict[str, Any],
    told: Told,
    origin: Origin,
    layer_indices: tuple[int, ...],
    found: list[str],
) -> TraceMeta:
    normalized = told.normalized
    if weights is not None and normalized is None:
        there = (ids != NO_EXPERT).any(axis=-1)
        sums = weights.sum(axis=-1, dtype=np.float32)[there]
        normalized = bool(np.abs(sums - 1).max(initial=0) < 0.01)
    return TraceMeta(
        model=told.model or origin.model or "unknown",
        num_layers=ids.shape[1],
        top_k=ids.shape[2],
        layer_indices=layer_indices,
        num_shared_experts=told.num_shared_experts or 0,
        scoring=told.scoring or "unknown",
        normalized=normalized,
        weight_semantics=origin.weight_semantics if weights is not None else "none",
        hidden_size=told.hidden_size,
        intermediate_size=told.intermediate_size,
        tokenizer=told.tokenizer,
        recorder=origin.recorder,
        recorder_version=origin.recorder_version,
        notes=(*origin.notes, *found),
        licence=told.licence,
        provenance=Provenance(
            "imported", f"{Path(origin.file).name}: {origin.what}", origin.detail
        ),
        **facts,
    )


def _passes(trace: Trace, requests: Sequence[Routed]) -> tuple[list[NDArray[np.uint16]], ...]:
    """Return the ids [layers, tokens, k] of all prompts, and of all requests, as the ranking test wants them.

    Each prompt began a forward pass. Layers that some rows lack are left out.
    """
    whole = np.delete(trace.expert_ids, trace.meta.incomplete_layers, axis=1)
    ends = np.cumsum([len(request) for request in requests])
    own = [part.transpose(1, 0, 2) for part in np.split(whole, ends[:-1])]
    prompts = [part[:, : r.num_prompt] for part, r in zip(own, requests, strict=True)]
    return prompts, own


def _in_order_of_steps(trace: Trace) -> Trace:
    """Return the rows as the engine processed them, so that those of a step lie together."""
    if (np.diff(trace.step) >= 0).all():
        return trace
    return trace.take(np.argsort(trace.step, kind="stable"))
