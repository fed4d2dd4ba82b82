"""moe-policylang traces: Parquet and JSON lines as its recorder writes them, oldest and odd ones too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foreign import choices, notes_with, read_as
from numpy.typing import NDArray

from traces.schema import TraceError

NUM_EXPERTS, LAYERS = 16, (1, 2, 4)
TYPES = {
    "prompt_id": pa.int32(),
    "token_idx": pa.int32(),
    "layer_idx": pa.int32(),
    "selected_experts": pa.list_(pa.int32()),
    "router_scores": pa.list_(pa.float32()),
    "router_softmax": pa.list_(pa.float32()),
    "token_id": pa.int32(),
    "phase": pa.string(),
    "domain_tag": pa.string(),
    "router_logits": pa.list_(pa.float32()),
}
SHORT = {
    "prompt_id": "p",
    "token_idx": "t",
    "layer_idx": "l",
    "selected_experts": "e",
    "router_scores": "s",
    "router_softmax": "sm",
    "token_id": "ti",
    "phase": "ph",
    "domain_tag": "dm",
    "router_logits": "lg_l",
}


def softmax_of(ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Probabilities whose largest are the chosen, in their order."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(*ids.shape[:2], NUM_EXPERTS))
    np.put_along_axis(logits, ids, np.linspace(5, 4, ids.shape[2])[None, None], axis=2)
    raised = np.exp(logits)
    return (raised / raised.sum(axis=2, keepdims=True)).astype(np.float32)


def entries(ids: NDArray[np.int64], num_prompt: int, prompt_id: int = 0) -> list[dict[str, Any]]:
    """Rows in the recorder's order: by forward pass, then layer, then token."""
    probs = softmax_of(ids)
    passes = [range(num_prompt), *((token,) for token in range(num_prompt, len(ids)))]
    return [
        {
            "prompt_id": prompt_id,
            "token_idx": token,
            "layer_idx": LAYERS[layer],
            "selected_experts": ids[token, layer].tolist(),
            "router_scores": probs[token, layer][ids[token, layer]].tolist(),
            "router_softmax": probs[token, layer].tolist(),
            "token_id": 100 + token if token < len(ids) - 1 else None,
            "phase": "prefill" if token < num_prompt else "decode",
            "domain_tag": "math",
            "router_logits": np.log(probs[token, layer]).tolist(),
        }
        for tokens in passes
        for layer in range(len(LAYERS))
        for token in tokens
    ]


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], *left_out: str) -> Path:
    names = [name for name in TYPES if name not in left_out]
    columns = {name: pa.array([row[name] for row in rows], type=TYPES[name]) for name in names}
    pq.write_table(pa.table(columns), path, compression="zstd")
    return path


def write_json(path: Path, rows: Sequence[dict[str, Any]], *left_out: str, **header: Any) -> Path:
    top = {"model_name": "org/Toy", "num_layers": 5, "num_experts": NUM_EXPERTS, "top_k": 4}
    top |= {"num_entries": len(rows), "records_full_softmax": False}
    lines = [top | header]
    for row in rows:
        kept = {SHORT[k]: v for k, v in row.items() if k not in left_out and v is not None}
        lines.append({"s": None} | kept)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def two_prompts() -> tuple[NDArray[np.int64], list[dict[str, Any]]]:
    ids = choices(20)
    return ids, entries(ids[:12], 5) + entries(ids[12:], 3, prompt_id=7)


SPARSE = ("router_softmax", "router_logits")


@pytest.mark.parametrize("write", [write_parquet, write_json])
def test_rows_of_token_and_layer_become_tokens(tmp_path: Path, two_prompts, write) -> None:
    ids, rows = two_prompts
    suffix = "parquet" if write is write_parquet else "jsonl"
    path = write(tmp_path / f"t.{suffix}", rows)
    trace = read_as("moe-policylang", path)  # the softmax tells the number of experts
    np.testing.assert_array_equal(trace.expert_ids, ids)
    assert np.bincount(trace.request_id).tolist() == [12, 8]
    assert (trace.phase == 0).tolist() == [True] * 5 + [False] * 7 + [True] * 3 + [False] * 5
    assert trace.token_id[:12].tolist() == [*range(100, 111), -1]
    meta = trace.meta
    assert (meta.layer_indices, meta.num_experts, meta.top_k) == (LAYERS, NUM_EXPERTS, 4)
    assert (meta.weight_semantics, meta.normalized, meta.sorted_by_weight) == (
        "raw_prob",
        False,
        True,
    )
    assert meta.model == ("unknown" if suffix == "parquet" else "org/Toy")
    assert notes_with(trace, "not kept: domain_tag")
    probs = np.exp(trace.router_logits.astype(np.float32))
    np.testing.assert_allclose(probs.sum(axis=2), 1, atol=0.02)


def test_parquet_has_lost_the_number_of_experts(tmp_path: Path, two_prompts) -> None:
    _, rows = two_prompts
    path = write_parquet(tmp_path / "t.parquet", rows, *SPARSE)
    with pytest.raises(TraceError, match="does not tell the number of experts: give --num-experts"):
        read_as("moe-policylang", path)
    trace = read_as("moe-policylang", path, num_experts=NUM_EXPERTS, model="toy")
    assert (trace.meta.num_experts, trace.meta.model) == (NUM_EXPERTS, "toy")
    assert trace.router_logits is None
    full = write_parquet(tmp_path / "f.parquet", rows)
    with pytest.raises(TraceError, match="num_experts is 16: must be 32, as you said"):
        read_as("moe-policylang", full, num_experts=32)
    header = write_json(tmp_path / "t.jsonl", rows, num_experts=32)
    with pytest.raises(TraceError, match="router_softmax has 16 values a row: must be 32"):
        read_as("moe-policylang", header)


def test_the_oldest_traces_have_the_softmax_alone(tmp_path: Path, two_prompts) -> None:
    ids, rows = two_prompts
    lacking = (
        "selected_experts",
        "router_scores",
        "router_logits",
        "token_id",
        "phase",
        "domain_tag",
    )
    path = write_parquet(tmp_path / "t.parquet", rows, *lacking)
    with pytest.raises(TraceError, match="does not tell the choices a token has, as the softmax"):
        read_as("moe-policylang", path)
    trace = read_as("moe-policylang", path, top_k=4, prompt_tokens=3)
    np.testing.assert_array_equal(trace.expert_ids, ids)
    assert (trace.phase == 0).sum() == 6
    assert notes_with(trace, "ids are the 4 largest of the recorded softmax")
    assert notes_with(trace, "logits are the logarithms of the recorded softmax")
    assert notes_with(trace, "phase is not in the source: the first 3 of a prompt")


def test_choices_in_no_order_are_put_in_order_of_score(tmp_path: Path, two_prompts) -> None:
    ids, rows = two_prompts
    for row in rows:  # as their own conversion of the oldest traces leaves them
        row["selected_experts"] = row["selected_experts"][::-1]
    path = write_parquet(tmp_path / "t.parquet", rows, "router_scores", "router_logits")
    trace = read_as("moe-policylang", path)
    np.testing.assert_array_equal(trace.expert_ids, ids)
    assert notes_with(trace, "repaired: the slots of 60 token-layers were put in order of weight")


def test_a_softmax_made_up_of_a_vllm_session_is_no_softmax(tmp_path: Path, two_prompts) -> None:
    _, rows = two_prompts
    for row in rows:
        weights = np.array([0.4, 0.3, 0.2, 0.1])
        level = np.full(NUM_EXPERTS, 1e-4)
        level[row["selected_experts"]] += weights * (1 - 1e-4 * (NUM_EXPERTS - 4))
        row |= {"router_scores": weights.tolist(), "router_softmax": level.tolist()}
    path = write_parquet(tmp_path / "t.parquet", rows, "router_logits")
    trace = read_as("moe-policylang", path)
    assert trace.router_logits is None
    assert (trace.meta.weight_semantics, trace.meta.normalized) == ("applied", True)
    assert notes_with(trace, "is made up of a vLLM session's weights")


def test_rows_that_do_not_fit_together_are_refused(tmp_path: Path, two_prompts) -> None:
    _, rows = two_prompts
    swapped = [dict(row) for row in rows]
    for row in swapped:
        row["phase"] = {"prefill": "decode", "decode": "prefill"}[row["phase"]]
    for changed, left_out, message in (
        (rows + rows[:1], (), "prompt 0: token 0, layer 1 is there 2 times: must be once"),
        ([row for row in rows if row["token_idx"] != 6], (), "prompt 0: token 7 follows token 5"),
        (rows[:5] + rows[6:], (), r"row 0: expert_ids\[layer 1\] is 65535: the layer is missing"),
        (swapped, (), "prompt 0: token 0: must not decode before the prompt ends"),
        (
            [*rows[:-1], rows[-1] | {"phase": "warm"}],
            (),
            "row 59: phase is 'warm': must be prefill or",
        ),
        ([*rows[:-1], rows[-1] | {"selected_experts": None}], (), "selected_experts has null rows"),
        (rows, ("selected_experts", "router_softmax"), "column 'selected_experts' is missing"),
        (rows, ("layer_idx",), "column 'layer_idx' is missing"),
        ([], (), "no rows"),
    ):
        path = write_parquet(tmp_path / "bad.parquet", changed, *left_out)
        with pytest.raises(TraceError, match=message) as error:
            read_as("moe-policylang", path)
        assert str(error.value).startswith(str(path))


def test_json_lines_that_are_none_are_refused(tmp_path: Path, two_prompts) -> None:
    _, rows = two_prompts
    path = write_json(tmp_path / "t.jsonl", rows)
    lines = path.read_text().splitlines()
    for changed, message in (
        (lines[1:], "line 1 is .*: must be a header with num_experts"),
        (lines[:-1], r"59 rows: must be 60 by the header \(cut short\?\)"),
        ([*lines[:-1], lines[-1][:40]], r"line 61 is not JSON: .*cut short"),
        ([*lines[:-1], "[]"], "line 61: is list: must be an object"),
        (
            [*lines[:-1], lines[-1].replace('"t": ', '"u": ')],
            "line 61: 't' is None: must be a whole",
        ),
        (
            [*lines[:-1], lines[-1].replace('"e": [', '"e": ["x", ')],
            "'e' is .*: must be a list of experts",
        ),
        ([*lines[:-1], lines[-1].replace('"sm"', '"sn"')], "1 of 60 rows lack router_softmax"),
    ):
        path.write_text("\n".join(changed))
        with pytest.raises(TraceError, match=message):
            read_as("moe-policylang", path)
