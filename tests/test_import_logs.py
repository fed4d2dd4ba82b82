"""Logs of engines and simulators: vLLM patches, lattice, imp and moepager."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign import META, choices, lattice_lines, mpt, notes_with, read_as, routes, write_lines
from numpy.typing import NDArray

from traces.schema import TraceError

# -- vLLM patches ----------------------------------------------------------------------------------


def warm_up(num_tokens: int) -> NDArray[np.int64]:
    return np.tile([3, 1, 2, 0], (num_tokens, 1))


def test_a_patch_that_knows_requests_is_read_by_request(tmp_path: Path) -> None:
    ids = choices(30, num_layers=2)
    lines = [META | {"layers_logged": [0, 5]}]
    for layer in (0, 1):  # two requests, rows mixed
        lines += routes(ids[:20, layer], "a", layer=5 * layer)
        lines += routes(ids[20:, layer], "b", layer=5 * layer)
    trace = read_as("vllm-patch", write_lines(tmp_path / "t.jsonl", lines), prompt_tokens=6)
    assert np.bincount(trace.request_id).tolist() == [20, 10]
    assert (trace.phase == 0).sum() == 12
    np.testing.assert_array_equal(trace.expert_ids, ids)
    meta = trace.meta
    assert (meta.model, meta.layer_indices, meta.recorder_version) == (
        "org/Toy-MoE",
        (0, 5),
        "0.15.1",
    )
    assert (meta.weight_semantics, meta.normalized) == ("applied", False)
    assert meta.provenance.detail == "device a GPU, seed 7"


def test_warm_up_rows_of_a_running_counter_are_dropped(tmp_path: Path) -> None:
    ids = choices(20, num_layers=1)
    whole = np.concatenate([warm_up(40), ids[:, 0]])
    trace = read_as("vllm-patch", write_lines(tmp_path / "t.jsonl", [META, *routes(whole, "r0")]))
    np.testing.assert_array_equal(trace.expert_ids, ids)
    assert notes_with(trace, "repaired: 40 warm-up rows were dropped")
    assert notes_with(trace, "one req_id for all rows")


def test_passes_of_one_request_at_a_time_are_rebuilt(tmp_path: Path) -> None:
    ids = choices(24, num_layers=1)
    parts = [ids[:7], *(ids[at : at + 1] for at in range(7, 12)), ids[12:20]]
    parts += [ids[at : at + 1] for at in range(20, 24)]
    lines = [META, *routes(warm_up(64)), *routes(warm_up(64))]
    lines += [line for part in parts for line in routes(part[:, 0])]
    trace = read_as("vllm-patch", write_lines(tmp_path / "t.jsonl", lines))
    assert np.bincount(trace.request_id).tolist() == [12, 12]
    assert (trace.phase == 0).tolist() == [True] * 7 + [False] * 5 + [True] * 8 + [False] * 4
    assert trace.step.tolist() == [0] * 7 + [*range(1, 6)] + [6] * 8 + [*range(7, 11)]
    np.testing.assert_array_equal(trace.expert_ids, ids)
    assert notes_with(trace, "repaired: 128 warm-up rows were dropped (2 passes of equal rows)")


def test_a_batch_is_linked_by_order_and_begins_anew_when_its_size_changes(tmp_path: Path) -> None:
    ids = choices(12 + 9 + 4, num_layers=1)
    parts = [ids[:12], ids[12:15], ids[15:18], ids[18:21], ids[21:23], ids[23:25]]
    # each call under a name of its own, as a logger without request ids counts them
    lines = [META, *(line for i, part in enumerate(parts) for line in routes(part[:, 0], f"r{i}"))]
    singles = [line for i in range(20) for line in routes(ids[i : i + 1, 0], f"s{i}")]
    trace = read_as("vllm-patch", write_lines(tmp_path / "t.jsonl", [*lines, *singles]))
    lengths = np.bincount(trace.request_id).tolist()
    assert lengths == [12, 3, 3, 3, 2, 2, 20]
    assert (trace.phase == 0).sum() == 12
    first_lane = trace.request_id == 1
    np.testing.assert_array_equal(trace.expert_ids[first_lane], ids[[12, 15, 18]])
    assert trace.step[first_lane].tolist() == [1, 2, 3]
    assert (
        sorted(trace.step[trace.step < 6].tolist())
        == [0] * 12 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 2 + [5] * 2
    )
    assert notes_with(trace, "warning: the source names no requests")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([META, {"type": "rout"}], "line 2: type is 'rout': must be meta or route; did you mean"),
        ([META], "no routes"),
        ([META, {"type": "route", "req": 1}], "line 2: 'req_id' is missing; did you mean 'req'?"),
        (
            [META, *routes(warm_up(2)), META | {"top_k": 2}],
            "line 4: top_k is 2: must be 4, as in the run before",
        ),
        ([META, {**routes(warm_up(1))[0], "topk_ids": [1, "x"]}], "topk_ids is"),
        (
            [META, {**routes(warm_up(1))[0], "topk_weights": [1.0]}],
            "must be 4 numbers, one an expert",
        ),
        (
            [META, *routes(warm_up(2)), {**routes(warm_up(1))[0], "topk_weights": None}],
            "1 of 3 routes lack topk_weights: must be all or none",
        ),
        ([META | {"num_experts": "many"}], "num_experts is 'many': must be a whole number"),
        ([META, *routes(warm_up(3)), *routes(warm_up(3), first=7)], "req_id 'r1': token 7 follows"),
        ([META, *routes(warm_up(40)), *routes(warm_up(40))], "only a warm-up was recorded"),
    ],
)
def test_patch_lines_that_are_none_are_refused(
    tmp_path: Path, lines: list[Any], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        read_as("vllm-patch", write_lines(tmp_path / "bad.jsonl", lines))


# -- lattice ---------------------------------------------------------------------------------------


def test_lattice_lines_in_any_order_with_and_without_weights(tmp_path: Path) -> None:
    ids = choices(12)
    lines = lattice_lines(ids)
    shuffled = [lines[at] for at in np.random.default_rng(0).permutation(len(lines))]
    path = write_lines(tmp_path / "t.jsonl", shuffled)
    trace = read_as("lattice", path, num_experts=16, prompt_tokens=5)
    np.testing.assert_array_equal(trace.expert_ids, ids[..., [1, 2, 3, 0]])
    assert notes_with(trace, "were put in order of weight")
    assert (trace.meta.layer_indices, trace.meta.normalized) == ((1, 2, 3), True)
    assert (trace.phase == 0).tolist() == [True] * 5 + [False] * 7
    plain = [line | {"extra": 1, "gate_weights": []} for line in lattice_lines(ids, False)]
    trace = read_as("lattice", write_lines(tmp_path / "p.jsonl", plain), num_experts=16)
    assert trace.expert_weights is None
    np.testing.assert_array_equal(trace.expert_ids, ids)


def test_lattice_sequences_that_begin_anew_become_requests(tmp_path: Path) -> None:
    ids = choices(12)
    lines = lattice_lines(ids) + lattice_lines(ids[:5])
    trace = read_as("lattice", write_lines(tmp_path / "t.jsonl", lines), num_experts=16)
    assert np.bincount(trace.request_id).tolist() == [12, 5]
    gap = [line for line in lattice_lines(ids) if line["token_idx"] != 3]
    for bad, message in (
        (gap, "sequence 0: token 4 follows token 2: must be 3"),
        ([{"layer_idx": 0, "token_idx": 0}], "line 1: 'selected_ids' is missing"),
        ([{**lines[0], "gate_weights": [1.0]}], "gate_weights is .*: must be 4 numbers"),
        ([{**lines[0], "token_idx": -1}], "token_idx is -1: must be a whole number >= 0"),
    ):
        path = write_lines(tmp_path / "bad.jsonl", bad)
        with pytest.raises(TraceError, match=message):
            read_as("lattice", path, num_experts=16)


# -- imp -------------------------------------------------------------------------------------------


def test_imp_records_as_lists_or_as_one_stream(tmp_path: Path) -> None:
    ids = choices(10)
    records = [[layer, *row] for token in ids.tolist() for layer, row in enumerate(token)]
    flat = [number for record in records for number in record]
    for name, value in (
        ("lists", records),
        ("object", {"top_k": 4, "trace": records}),
        ("flat", {"top_k": 4, "entries": flat}),
    ):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(value))
        trace = read_as("imp", path, num_experts=16)
        np.testing.assert_array_equal(trace.expert_ids, ids)
        assert (trace.phase == 1).all()
    cut = tmp_path / "cut.json"
    cut.write_text(json.dumps(records[:-1]))
    assert len(read_as("imp", cut, num_experts=16)) == 9
    for value, message in (
        (flat, "does not tell the choices a token has"),
        ({"top_k": 3, "data": flat}, "150 numbers: must be a multiple of 4"),
        ({"top_k": 3, "data": records}, "record 0 has 4 experts: must be at most top_k 3"),
        ([*records[:3], records[4]], "record 3 is of layer 1: must be 0"),
        ([[0, 1.5]], "must be .layer, expert"),
        ({"rows": []}, "must be a list of records, or an object with one as trace"),
    ):
        cut.write_text(json.dumps(value))
        with pytest.raises(TraceError, match=message):
            read_as("imp", cut, num_experts=16)


# -- moepager --------------------------------------------------------------------------------------


def test_mpt_records_become_decode_rows(tmp_path: Path) -> None:
    ids, path = choices(20), tmp_path / "t.mpt"
    path.write_bytes(mpt(ids, extra=[(2000, 19, 2, int(ids[19, 2, 0]))]))
    trace = read_as("mpt", path)
    np.testing.assert_array_equal(trace.expert_ids, ids)
    assert (trace.phase == 1).all()
    assert (trace.meta.model, trace.meta.num_experts) == ("Toy-Q4", 16)
    assert trace.meta.provenance.kind == "imported"
    assert notes_with(trace, "repaired: 1 records that name an expert of a token again")
    path.write_bytes(mpt(ids, source="synth", params={"zipf": 1.1}))
    assert read_as("mpt", path).meta.provenance.kind == "synthetic"
    path.write_bytes(mpt(ids, source="sentinel", top_k=None))
    assert notes_with(read_as("mpt", path), "where one ends was inferred")


def test_mpt_files_that_are_no_routing_are_refused(tmp_path: Path) -> None:
    ids, path = choices(6), tmp_path / "t.mpt"
    good = mpt(ids)
    wide = [(0, 0, 0, expert) for expert in range(16)]
    for data, message in (
        (mpt(ids, observation="miss-only"), "observation is 'miss-only': must be 'full'"),
        (mpt(ids, kind=2), r"kind of record is 2 \(events of the page cache\)"),
        (mpt(ids, version=2), "version is 2: this Greenroom reads 1"),
        (b"X" + good[1:], "must be b'MPTRACE"),
        (good[:-5], r"must be whole ones of 16 bytes, at least one \(cut short\?\)"),
        (mpt(ids[:0]), "0 bytes of records"),
        (mpt(ids, extra=wide), "token 0, layer 0: 16 experts: must be at most top_k 4"),
        (mpt(ids, n_experts="16"), "header 'n_experts' is '16'"),
        (mpt(ids, n_layers=2), "layer 2: must be < n_layers 2"),
        (mpt(ids, n_experts=8), r"is expert \d+: must lie in 0..7"),
    ):
        path.write_bytes(data)
        with pytest.raises(TraceError, match=message):
            read_as("mpt", path)
