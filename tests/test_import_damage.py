"""A damaged recording gives a trace or an error of one line, whatever stands where a value should."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_samples import (
    NUM_LAYERS,
    TOLD,
    sample,
    sglang_native,
    sglang_openai,
    vllm_split,
    vllm_tokens_out,
    vllm_whole,
)
from test_import_megatron import passes, save_rank
from test_import_moe_balance import lines_of
from test_import_rl import turn

from traces.importers import megatron_trace, moe_balance, rl_tensors, routed_experts
from traces.importers.formats import Reader
from traces.schema import Trace, TraceError

_GONE = object()
_ODD = (
    *(None, "", "x", "AAAA", True, -1, 0, 1.5, 2**31, 10**30, float("nan"), {}, {"a": 1}),
    *([], [[]], [None], ["a"], [1, 2], [[1]], [[["a"]]], [[[1.5]]], [[[10**30]]], _GONE),
)
Place = tuple[int | str, ...]


def _megatron_lines(folder: Path) -> list[Any]:
    path = save_rank(
        folder, passes(3, 1, 1), logits=True
    )  # the logits stay beside the damaged lines
    return [json.loads(line) for line in path.read_text().splitlines()]


_MADE = sample()
_TRACES: dict[str, tuple[Reader, str, Any]] = {
    **{
        form.__name__: (routed_experts.read, "a.json", [form(_MADE)])
        for form in (sglang_native, sglang_openai, vllm_whole, vllm_tokens_out, vllm_split)
    },
    "with request": (
        routed_experts.read,
        "a.jsonl",
        [{"request": {"input_ids": _MADE.prompt}, "response": sglang_native(_MADE)}],
    ),
    "verifiers": (rl_tensors.read, "a.json", [{"trajectory": [{"tokens": turn(_MADE, start=1)}]}]),
    "moe-balance": (
        moe_balance.read,
        "a.jsonl",
        lines_of([_MADE], range(NUM_LAYERS), topk_weights=[[0.5, 0.5]] * len(_MADE.ids)),
    ),
    "megatron": (megatron_trace.read, "router_trace_rank0.jsonl", _megatron_lines),
}


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Yield where values stand in nested JSON, the first four of long lists only."""
    if at:
        yield at
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:4])
        if isinstance(value, list)
        else ()
    )
    for key, item in entries:
        yield from places(item, (*at, key))


def damaged(value: Any, at: Place, odd: object) -> Any:
    value = copy.deepcopy(value)
    target = value
    for key in at[:-1]:
        target = target[key]
    if odd is _GONE:
        del target[at[-1]]
    else:
        target[at[-1]] = odd
    return value


@pytest.mark.parametrize("name", _TRACES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_damage_is_told_in_one_line(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    read, file_name, value = _TRACES[name]
    folder = tmp_path_factory.getbasetemp() / name.replace(" ", "_")
    folder.mkdir(exist_ok=True)
    value = value(folder) if callable(value) else value
    at = data.draw(st.sampled_from(list(places(value))))
    value = damaged(value, at, data.draw(st.sampled_from(_ODD)))
    path = folder / file_name
    lines = [json.dumps(one) for one in value] if path.suffix == ".jsonl" else [json.dumps(value)]
    path.write_text("\n".join(lines) + "\n")
    found: Any
    try:
        found = read(path, TOLD)
    except TraceError as error:
        found = str(error)
    if not isinstance(found, Trace):
        assert "\n" not in found
        assert str(folder) in found
