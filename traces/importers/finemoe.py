"""Reads FineMoE's pickled states, ``{model}~{dataset}~{n}.pkl``: each token's choices and probabilities.

A dict of sequence id to ``{"matrix": [L, E], "iters": [...]}``, an entry of ``iters`` a token: ``stage``
("prefill" or "decode"), ``embed`` [h], ``states`` [L, h], ``nodes`` [L, E] (1 where an expert was chosen) and
``probs`` [L, E], torch tensors all of them. A batch is padded on the left, and padding is routed too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.assemble import assemble
from traces.importers.cells import EMPTY
from traces.importers.routed import Origin, Routed
from traces.importers.told import Told
from traces.importers.torch_pickle import load_pickle
from traces.trace import Trace, TraceError

_STAGES = ("prefill", "decode")
_NOTES = (
    "weights are the router's probabilities before any renormalisation",
    "no token ids or text",
)


def read(path: Path, told: Told) -> Trace:
    """Return each sequence as a request; slots are in order of probability.

    Raises
    ------
    TraceError
        For a pickle that calls for anything but tensors, for values of other shapes, and for a sequence
        whose tokens have several choices counted together.
    """
    requests, found = _requests(path)
    _even_out(requests, path)
    probs = [one.router_logits for one in requests if one.router_logits is not None]
    if all(np.abs(part.sum(axis=2) - 1).max() < _SUM_TOLERANCE for part in probs):
        found.append("logits are the logarithms of the probabilities: right up to a constant")
        _take_logarithms(requests)
    else:
        for one in requests:
            one.router_logits = None
    num_experts = probs[0].shape[2] if probs else None
    return assemble(requests, told, _origin(path, num_experts, found))


def _requests(path: Path) -> tuple[list[Routed], list[str]]:
    """Return the sequences and what was repaired; their logits are the probabilities yet."""
    loaded = load_pickle(path)
    if not isinstance(loaded, dict) or not loaded:
        found = type(loaded).__name__
        raise TraceError(f"{path}: holds {found}: must be a dict of sequences, not empty")
    requests: list[Routed] = []
    padding = unfinished = 0
    for number, (name, entry) in enumerate(loaded.items()):
        label = f"sequence {number} ({str(name)[:8]})"
        iters = _iters(entry, f"{path}: {label}")
        first, last = _span(iters)
        padding, unfinished = padding + first, unfinished + len(iters) - last
        if first < last:
            requests.append(_request(iters[first:last], label, path))
    notes = []
    if padding:
        what = "of one embedding were dropped: padding on the left"
        notes.append(f"repaired: {padding} first rows {what}")
    if unfinished:
        notes.append(f"repaired: {unfinished} last rows without any choice were dropped")
    return requests, notes


_SUM_TOLERANCE = 0.02
"""How far probabilities in 16 bits may sum from one."""


def _take_logarithms(requests: list[Routed]) -> None:
    for one in requests:
        assert one.router_logits is not None
        with np.errstate(divide="ignore"):
            one.router_logits = np.log(one.router_logits)


def _origin(path: Path, num_experts: int | None, found: list[str]) -> Origin:
    parts = path.stem.split("~")
    return Origin(
        file=str(path),
        what="FineMoE states",
        recorder="FineMoE",
        detail=f"dataset {parts[1]}" if len(parts) > 1 else "",
        weight_semantics="raw_prob",
        model=parts[0] if len(parts) > 1 else None,
        num_experts=num_experts,
        notes=(*_NOTES, *found),
    )


def _iters(entry: Any, where: str) -> list[dict[str, Any]]:
    """Return the tokens of a sequence, checked."""
    iters = entry.get("iters") if isinstance(entry, dict) else None
    if not isinstance(iters, list) or not iters:
        raise TraceError(f"{where}: has no 'iters': must be a list of tokens")
    for number, token in enumerate(iters):
        if not isinstance(token, dict) or token.get("stage") not in _STAGES:
            raise TraceError(f"{where}: token {number}: must have a stage, {' or '.join(_STAGES)}")
        for key, ndim in (("embed", 1), ("nodes", 2), ("probs", 2)):
            value = token.get(key)
            if not isinstance(value, np.ndarray) or value.ndim != ndim:
                shown = getattr(value, "shape", type(value).__name__)
                raise TraceError(
                    f"{where}: token {number}: {key} is {shown}: must be a tensor [{'x' * ndim}]"
                )
        if token["nodes"].shape != token["probs"].shape or 0 in token["nodes"].shape:
            shapes = f"nodes {token['nodes'].shape}, probs {token['probs'].shape}"
            raise TraceError(
                f"{where}: token {number}: {shapes}: must be the same, [layers, experts]"
            )
    return iters


def _span(iters: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the first token behind the padding, and the end of those that were routed.

    Padding is a run of one embedding at the beginning of the prompt.
    """
    last = len(iters)
    while last and not iters[last - 1]["nodes"].any():
        last -= 1
    same = 0
    prompt = [token for token in iters[:last] if token["stage"] == "prefill"]
    while same < len(prompt) and np.array_equal(prompt[same]["embed"], prompt[0]["embed"]):
        same += 1
    return (same if 1 < same < len(prompt) else 0), last


def _request(iters: list[dict[str, Any]], label: str, path: Path) -> Routed:
    """Return the request; its logits are the probabilities yet."""
    nodes = _stacked(iters, "nodes", f"{path}: {label}")
    probs = _stacked(iters, "probs", f"{path}: {label}").astype(np.float32)
    where = f"{path}: {label}"
    rule = "must be 0 or 1 (several tokens counted together?)"
    _refuse((nodes != 0) & (nodes != 1), nodes, "count", rule, where)
    is_probability = (probs >= 0) & (probs <= 1 + _SUM_TOLERANCE)
    _refuse(~is_probability, probs, "probability", "must lie in 0..1", where)
    ids, weights = _chosen(nodes != 0, probs)
    stages = [token["stage"] for token in iters]
    num_prompt = stages.count("prefill")
    if "decode" in stages[:num_prompt]:
        raise TraceError(
            f"{where}: token {stages.index('decode')} decodes: the prompt must come first"
        )
    return Routed(label, ids, num_prompt, weights, router_logits=probs)


def _refuse(
    wrong: NDArray[np.bool_], values: NDArray[Any], what: str, rule: str, where: str
) -> None:
    if wrong.any():
        token, layer, expert = np.argwhere(wrong)[0].tolist()
        place = f"token {token}, layer {layer}, expert {expert}"
        raise TraceError(f"{where}: {place}: {what} is {values[token, layer, expert]:g}: {rule}")


def _stacked(iters: list[dict[str, Any]], key: str, where: str) -> NDArray[Any]:
    shape = iters[0][key].shape
    for number, token in enumerate(iters):
        if token[key].shape != shape:
            rule = f"must be {shape} as in token 0"
            raise TraceError(f"{where}: token {number}: {key} is {token[key].shape}: {rule}")
    return np.stack([token[key] for token in iters])


def _chosen(
    is_chosen: NDArray[np.bool_], probs: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the chosen experts by falling probability, and their probabilities."""
    top_k = int(is_chosen.sum(axis=2).max(initial=1))
    order = np.argsort(np.where(is_chosen, -probs, np.inf), axis=2, kind="stable")[..., :top_k]
    is_there = np.take_along_axis(is_chosen, order, 2)
    weights = np.where(is_there, np.take_along_axis(probs, order, 2), 0)
    return np.where(is_there, order, EMPTY).astype(np.int32), weights.astype(np.float32)


def _even_out(requests: list[Routed], path: Path) -> None:
    """Pad all requests to the widest top-k; refuse other numbers of layers or experts."""
    width = max((one.expert_ids.shape[2] for one in requests), default=0)
    shapes = [one.router_logits.shape[1:] for one in requests if one.router_logits is not None]
    for one, shape in zip(requests, shapes, strict=True):
        if shape != shapes[0]:
            rule = f"must be {shapes[0]} as in {requests[0].name}"
            raise TraceError(f"{path}: {one.name}: [layers, experts] are {shape}: {rule}")
        wider = ((0, 0), (0, 0), (0, width - one.expert_ids.shape[2]))
        one.expert_ids = np.pad(one.expert_ids, wider, constant_values=EMPTY)
        assert one.expert_weights is not None
        one.expert_weights = np.pad(one.expert_weights, wider)
