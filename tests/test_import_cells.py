"""Rows of token and layer, and a damaged file of any kind, on their way to a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign import (
    META,
    choices,
    export,
    lattice_lines,
    mpt,
    read_as,
    routes,
    small_trace,
    with_logits,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import LAW
from test_import_damage import damaged, places

from traces.importers.cells import Cells, padded, pivot
from traces.schema import Trace, TraceError


@LAW
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    first=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_rows_in_any_order_give_the_same_tokens(lengths: list[int], first: int, seed: int) -> None:
    """A request's rows may stand anywhere; requests come in the order of their first rows."""
    rng = np.random.default_rng(seed)
    ids = choices(sum(lengths), num_layers=3, seed=seed)
    request = np.repeat(np.arange(len(lengths)), lengths)
    token = np.concatenate([np.arange(length) + first for length in lengths])
    row, layer = (axis.reshape(-1) for axis in np.indices(ids.shape[:2]))
    order = np.concatenate(
        [rng.permutation(np.flatnonzero(request[row] == r)) for r in range(len(lengths))]
    )
    row, layer = row[order], layer[order]
    cells = Cells(
        request=request[row],
        token=token[row],
        layer=10 * layer + 1,
        expert_ids=ids[row, layer].astype(np.int32),
        expert_weights=ids[row, layer].astype(np.float32) / 2,
        of_token={"token_id": token[row] * 3},
    )
    found, layers = pivot(cells, "a file", str)
    assert layers == (1, 11, 21)
    assert [one.routed.first_position for one in found] == [first] * len(lengths)
    np.testing.assert_array_equal(np.concatenate([one.routed.expert_ids for one in found]), ids)
    weights = np.concatenate([one.routed.expert_weights for one in found])
    np.testing.assert_array_equal(weights, ids / 2)
    tokens = np.concatenate([one.of_token["token_id"] for one in found])
    np.testing.assert_array_equal(tokens, 3 * token)


def test_short_rows_are_filled_up() -> None:
    assert padded([[1, 2, 3], [], [4]], -1, np.int32).tolist() == [[1, 2, 3], [-1] * 3, [4, -1, -1]]


# -- damage ----------------------------------------------------------------------------------------

ODD = (
    *(None, "", "x", True, -1, 0, 1.5, 2**31, 10**30, float("nan"), {}, {"a": 1}),
    *([], [[]], [None], ["a"], [1, 2], [[1]], [1.5], [10**30]),
)
IDS = choices(6)


def policylang_lines() -> list[Any]:
    rows = [
        {
            "p": 0,
            "t": t,
            "l": k,
            "e": IDS[t, k].tolist(),
            "s": [0.4, 0.3, 0.2, 0.1],
            "ti": 5,
            "ph": "decode",
        }
        for t in range(6)
        for k in range(3)
    ]
    return [{"model_name": "toy", "num_experts": 16, "top_k": 4, "num_entries": 18}, *rows]


JSON_FILES: dict[str, tuple[str, list[Any]]] = {
    "vllm-patch": ("a.jsonl", [META, *routes(IDS[:, 0]), *routes(IDS[:3, 0])]),
    "lattice": ("a.jsonl", lattice_lines(IDS)),
    "moe-policylang": ("a.jsonl", policylang_lines()),
    "imp": (
        "a.json",
        [[layer, *IDS[token, layer].tolist()] for token in range(6) for layer in range(3)],
    ),
}


@pytest.mark.parametrize("name", JSON_FILES)
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_odd_values_are_told_in_one_line(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file_name, value = JSON_FILES[name]
    at = data.draw(st.sampled_from(list(places(value))))
    value = damaged(value, at, data.draw(st.sampled_from(ODD)))
    path = tmp_path_factory.getbasetemp() / f"{name}.{file_name}"
    lines = [json.dumps(one) for one in value] if path.suffix == ".jsonl" else [json.dumps(value)]
    path.write_text("\n".join(lines) + "\n")
    tell(name, path)


def csv_lines() -> bytes:
    lines = [f"{pos},{k},{','.join(map(str, IDS[pos, k]))}" for pos in range(6) for k in range(3)]
    return "\n".join(lines).encode()


def stream() -> bytes:
    parts = [([k, 6, 4], IDS[:, k]) for k in range(3)]
    return b"".join(
        np.array(head, dtype="<i4").tobytes() + ids.astype("<i4").tobytes() for head, ids in parts
    )


def parquet(folder: Path) -> bytes:
    export("moe-policylang", with_logits(small_trace()), folder / "whole.parquet")
    return (folder / "whole.parquet").read_bytes()


BYTE_FILES: dict[str, tuple[str, Callable[[Path], bytes]]] = {
    "moe-trace-csv": ("a.csv", lambda _: csv_lines()),
    "moe-trace-bin": ("a.bin", lambda _: stream()),
    "mpt": ("a.mpt", lambda _: mpt(IDS)),
    "moe-policylang": ("a.parquet", parquet),
}


@pytest.mark.parametrize("name", BYTE_FILES)
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_changed_bytes_are_told_in_one_line(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    file_name, make = BYTE_FILES[name]
    content = bytearray(make(folder))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[
        : data.draw(st.sampled_from([len(content), len(content), len(content) * 2 // 3]))
    ]
    path = folder / f"{name}.{file_name}"
    path.write_bytes(content)
    tell(name, path)


def tell(name: str, path: Path) -> None:
    """A trace, or an error of one line that names the file."""
    try:
        found: object = read_as(name, path, num_experts=16)
    except TraceError as error:
        found = str(error)
    if not isinstance(found, Trace):
        assert "\n" not in str(found)
        assert str(path) in str(found)
