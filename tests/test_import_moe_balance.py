"""moe-balance archives and lines become traces; pickled arrays are read without running code."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from routing_samples import DENSE, NUM_LAYERS, TOLD, Sample, check_rows, sample

from traces.importers.moe_balance import read
from traces.importers.npz_file import load_npz
from traces.schema import TraceError


def save_request(path: Path, made: Sample, **changes: Any) -> Path:
    """One request as the project keeps it; rows are the tokens but the last."""
    arrays = {
        "request_id": path.stem,
        "prompt_token_ids": made.prompt,
        "output_token_ids": made.output,
        "routed_experts": made.ids,
        **changes,
    }
    np.savez(path, **arrays)
    return path


def boxed(value: object) -> np.ndarray:
    """A 0-d array of one object, which ``np.savez`` pickles."""
    box = np.empty((), dtype=object)
    box[()] = value
    return box


def test_a_folder_of_archives_becomes_requests_in_natural_order(tmp_path: Path) -> None:
    made = [sample(3, 4, seed=1), sample(2, 5, seed=2), sample(4, 1, seed=3)]
    for number, one in zip((10, 9, 1), made, strict=True):
        save_request(tmp_path / f"problem_id_{number}.npz", one)
    trace = read(tmp_path, TOLD)
    check_rows(trace, made[::-1])
    assert trace.meta.layer_indices == tuple(range(DENSE, NUM_LAYERS))


def test_pickled_arrays_and_requests_without_routing(tmp_path: Path) -> None:
    made = sample()
    save_request(tmp_path / "0.npz", made, routed_experts=boxed(made.ids))
    save_request(tmp_path / "1.npz", made, routed_experts=boxed(None))
    save_request(tmp_path / "2.npz", made, prompt_token_ids=np.array(made.prompt, dtype=object))
    save_request(tmp_path / "3.npz", made, routed_experts=np.zeros((0, 4, 2), np.int32))
    trace = read(tmp_path, TOLD)
    check_rows(trace, [made, made])
    assert "2 requests have no routing and were left out" in trace.meta.notes
    with pytest.raises(TraceError, match="no archive has routed_experts: nothing was recorded"):
        read(tmp_path / "1.npz", TOLD)


def test_as_many_rows_as_tokens_are_taken_too(tmp_path: Path) -> None:
    made = sample()
    padded = np.concatenate([made.ids, np.zeros_like(made.ids[:1])])
    check_rows(read(save_request(tmp_path / "0.npz", made, routed_experts=padded), TOLD), [made])
    padded[-1] = padded[-2]
    assert len(read(save_request(tmp_path / "1.npz", made, routed_experts=padded), TOLD)) == 7


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch attacked",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"routed_experts": boxed(Attack())},
            r"holds a Python object \(posix.system\), which could run",
        ),
        ({"routed_experts": boxed({1, 2})}, "routed_experts: is set: must be"),
        ({"routed_experts": np.zeros((6, 4), int)}, r"int64\[6, 4\]: must be whole numbers \[rows"),
        (
            {"output_token_ids": [1, 2]},
            r"6 rows of routing: must be 4 \(3 prompt \+ 2 sampled - 1\)",
        ),
        (
            {"prompt_token_ids": [[1], [2]]},
            "prompt_token_ids is int64.2, 1.: must be a list of token",
        ),
        ({"prompt_token_ids": [], "output_token_ids": []}, "give --prompt-tokens"),
    ],
)
def test_an_archive_that_cannot_be_is_refused(
    change: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save_request(tmp_path / "0.npz", sample(), **change)
    with pytest.raises(TraceError, match=message) as caught:
        read(path, TOLD)
    assert str(caught.value).startswith(f"{path}: ")
    assert not (tmp_path / "attacked").exists()


def test_an_archive_that_is_none_or_cut_short_is_refused(tmp_path: Path) -> None:
    path = save_request(tmp_path / "0.npz", sample())
    whole = path.read_bytes()
    for data in (b"", b"PK", whole[:-30], whole[:200]):
        path.write_bytes(data)
        with pytest.raises(TraceError, match="not a npz archive"):
            load_npz(path)
    with pytest.raises(TraceError, match="No such file"):
        load_npz(tmp_path / "1.npz")
    np.savez(path, other=np.zeros(2))
    with pytest.raises(TraceError, match="holds other: must have routed_experts"):
        read(path, TOLD)


def lines_of(made: list[Sample], layers: range, **more: Any) -> list[dict[str, Any]]:
    """What the project's converter writes: a line a request and layer."""
    return [
        {
            "layer": layer,
            "batch_id": number,
            "topk_experts": one.ids[:, layer].tolist(),
            "request_id": number,
            "source_file": f"problem_id_{number}.npz",
            **more,
        }
        for number, one in enumerate(made)
        for layer in layers
    ]


def save_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("first", [0, DENSE])
def test_lines_with_or_without_dense_layers(first: int, tmp_path: Path) -> None:
    made = [sample(1, 4, seed=1), sample(1, 6, seed=2)]
    path = save_lines(tmp_path / "a.jsonl", lines_of(made, range(first, NUM_LAYERS)))
    trace = read(path, TOLD)
    check_rows(trace, made, tokens=False)
    assert trace.meta.layer_indices == tuple(range(DENSE, NUM_LAYERS))
    assert any("does not tell prompt from output" in note for note in trace.meta.notes)
    told = read(path, replace(TOLD, prompt_tokens=3))
    assert told.phase.tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 1, 1]
    assert not any("does not tell prompt" in note for note in told.meta.notes)


def test_batches_without_request_are_passes_and_weights_are_kept(tmp_path: Path) -> None:
    made = sample(3, 4)
    lines = lines_of([made], range(DENSE, NUM_LAYERS))
    for line in lines:
        del line["request_id"], line["source_file"]
        line["origin_rows"] = [0] * len(made.ids)
        line["topk_weights"] = [[0.25, 0.75]] * len(made.ids)
    trace = read(save_lines(tmp_path / "a.jsonl", lines), TOLD)
    assert trace.step.tolist() == [0] * len(made.ids)
    assert trace.expert_weights is not None
    assert (trace.expert_weights == [0.75, 0.25]).all()
    assert np.array_equal(trace.expert_ids, made.moe_ids[..., ::-1])  # by falling weight
    assert trace.meta.weight_semantics == "applied"
    assert trace.meta.normalized is True


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (1, {"layer": 1}, r"line 2: layer 1 of .* is there twice"),
        (0, {"layer": "x"}, "line 1: layer is 'x': must be an index"),
        (2, {"topk_experts": [[1, 2], [3]]}, r"line 3: topk_experts: rows of unequal lengths"),
        (2, {"topk_experts": [[1, 2]]}, r"layer 3 is \[1, 2\]: must be \[6, 2\]"),
        (2, {"topk_experts": [[1, 2.5]]}, r"is float64\[1, 2\]: must be numbers"),
        (2, {"topk_experts": [[1, -7]]}, "go from -7 to 1: must be ids"),
        (2, {"topk_weights": [[0.5]]}, r"topk_weights are \[1, 1\]: must be \[6, 2\]"),
        (0, {"batch_id": None, "request_id": None}, "has no batch_id"),
    ],
)
def test_lines_that_cannot_be_are_refused(
    at: int, change: dict, message: str, tmp_path: Path
) -> None:
    lines = lines_of([sample()], range(DENSE, NUM_LAYERS))
    lines[at].update(change)
    with pytest.raises(TraceError, match=message):
        read(save_lines(tmp_path / "a.jsonl", lines), TOLD)


def test_a_batch_that_lacks_a_layer_is_refused(tmp_path: Path) -> None:
    lines = lines_of([sample(seed=1), sample(seed=2)], range(DENSE, NUM_LAYERS))
    path = save_lines(tmp_path / "a.jsonl", lines[:-1])
    with pytest.raises(
        TraceError, match=r"problem_id_1.npz, request 1 lacks layer 3: must have all 3"
    ):
        read(path, TOLD)


def test_archives_beside_the_lines_made_of_them_are_refused(tmp_path: Path) -> None:
    save_request(tmp_path / "0.npz", sample())
    save_lines(tmp_path / "trace.jsonl", lines_of([sample()], range(NUM_LAYERS)))
    with pytest.raises(TraceError, match=r"has archives and trace.jsonl: must be one of the two"):
        read(tmp_path, TOLD)
    with pytest.raises(TraceError, match="line 1 has a: must have layer, batch_id"):
        read(save_lines(tmp_path / "trace.jsonl", [{"a": 1}]), TOLD)
    (tmp_path / "trace.jsonl").write_text("\n")
    with pytest.raises(TraceError, match="no lines in it"):
        read(tmp_path / "trace.jsonl", TOLD)
