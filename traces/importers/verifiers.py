"""Finds the routed experts in saved rollouts of verifiers, however deep they lie.

A turn's tokens are ``prompt_ids``, ``completion_ids`` and ``routed_experts``: ``{data, shape, start,
dtype}``, base64 of raw ids (uint8 if ``dtype`` is missing), whose first row is the token at ``start``; this
object may stand alone, too. Each turn is a request of its own, for the engine was called for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from traces.importers.checked import keys_of
from traces.importers.encoded import ids_of
from traces.importers.json_file import json_values
from traces.importers.routed import Routed
from traces.importers.sequence import Tokens, count, request_of_rows, token_ids
from traces.importers.told import Told
from traces.trace import TraceError


def requests_of_verifiers(file: Path, label: str, told: Told) -> tuple[list[Routed], list[str]]:
    """Return the turns of a JSON or JSON lines file that have routing, and notes.

    Raises TraceError if rows and tokens do not fit, nothing tells the prompt's length, or the routing was
    lost when the file was written.
    """
    requests: list[Routed] = []
    without = later = 0
    for place, value in json_values(file):
        for at, turn in _turns(value, place):
            if turn.get("routed_experts") is None:
                without += 1
                continue
            request = _request(turn, f"{file}: {at}", told)
            request.name = f"{label}{at}"
            later += request.first_position > 0
            requests.append(request)
    notes = [f"{without} turns have no routing and were left out"] if without else []
    if later:
        notes.append(f"{later} turns begin after the tokens that an earlier turn had routed")
    return requests, notes


def _turns(value: Any, at: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every object that has a turn's tokens, and where it lies."""
    if isinstance(value, Mapping):
        if "completion_ids" in value or _is_payload(value.get("routed_experts")):
            yield at, value
            return
        if _is_payload(value):
            yield at, {"routed_experts": value}
            return
        for key, item in value.items():
            yield from _turns(item, f"{at}, {key}")
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _turns(item, f"{at} {place}")


def _request(turn: Mapping[str, Any], where: str, told: Told) -> Routed:
    payload = turn["routed_experts"]
    if isinstance(payload, Mapping):
        data = payload.get("data")
        if isinstance(data, str) and data.startswith("<"):
            rule = "must be base64 (the rollouts were saved without their raw buffers)"
            raise TraceError(f"{where}: routed_experts data is {data[:20]!r}: {rule}")
        if payload.get("dtype") is None:
            payload = {**payload, "dtype": "uint8"}
    ids = ids_of(payload, f"{where}: routed_experts")
    start = count(keys_of(payload).get("start", 0), f"{where}: start") or 0
    prompt = token_ids(turn.get("prompt_ids"), f"{where}: prompt_ids")
    output = token_ids(turn.get("completion_ids"), f"{where}: completion_ids")
    num_prompt = told.prompt_tokens if prompt is None and output is None else None
    tokens = Tokens(num_prompt=num_prompt, prompt_ids=prompt, output_ids=output)
    if not turn.get("is_truncated"):
        return request_of_rows(where, ids, tokens, first=start)
    known = sum(len(part) for part in (tokens.prompt_ids, tokens.output_ids) if part is not None)
    ids = ids[: max(0, known - start)]  # the trainer cut the tokens, not the routing
    return request_of_rows(where, ids, tokens, first=start, last_may_have_row=True)


def _is_payload(value: object) -> bool:
    return isinstance(value, Mapping) and "data" in value and "shape" in value
