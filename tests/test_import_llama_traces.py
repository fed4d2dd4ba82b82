"""llama-moe-trace as text and as a binary stream: passes, prompts, and views that were read flat."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from foreign import choices, notes_with, read_as
from numpy.typing import NDArray

from traces.schema import NO_EXPERT, TraceError

PROMPT, DECODED = 6, 5


def passes(ids: NDArray[np.int64], prompts: Sequence[int] = (PROMPT,)) -> list[NDArray[np.int64]]:
    """The tokens of one request as an engine passes over them: pieces of the prompt, then one by one."""
    edges = np.cumsum([0, *prompts])
    pieces = [ids[a:b] for a, b in pairwise(edges)]
    return [*pieces, *(ids[at : at + 1] for at in range(edges[-1], len(ids)))]


def single_lines(stream: list[NDArray[np.int64]], *, prune_last: bool = True) -> list[str]:
    """`layer,expert`, layers 1.. ; the last layer runs for the last token of a pass only."""
    lines = []
    for part in stream:
        for layer in range(part.shape[1]):
            rows = part[-1:] if prune_last and layer == part.shape[1] - 1 else part
            lines += [f"{layer + 1},{expert}" for expert in rows[:, layer].reshape(-1)]
    return lines


def flat(part: NDArray[np.int64], num_experts: int) -> NDArray[np.int64]:
    """What a flat read of the strided view gives for a pass: whole rankings laid end to end."""
    num_tokens, num_layers, top_k = part.shape
    rng = np.random.default_rng(1)
    out = np.empty_like(part)
    for layer in range(num_layers):
        rankings = []
        for token in range(num_tokens):
            rest = np.setdiff1d(np.arange(num_experts), part[token, layer])
            rankings.append(np.concatenate([part[token, layer], rng.permutation(rest)]))
        out[:, layer] = np.concatenate(rankings)[: num_tokens * top_k].reshape(num_tokens, top_k)
    return out


def write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_line_a_choice_becomes_requests(tmp_path: Path) -> None:
    first, second = choices(PROMPT + DECODED), choices(8 + 3, seed=1)
    lines = single_lines(passes(first)) + single_lines(passes(second, (5, 3)))
    trace = read_as("moe-trace-csv", write(tmp_path / "t.csv", lines), num_experts=16)
    assert (trace.meta.top_k, trace.meta.layer_indices) == (4, (1, 2, 3))
    assert np.bincount(trace.request_id).tolist() == [11, 11]
    assert (trace.phase == 0).tolist() == [True] * 6 + [False] * 5 + [True] * 8 + [False] * 3
    whole = np.concatenate([first, second])
    np.testing.assert_array_equal(trace.expert_ids[:, :2], whole[:, :2])
    lacking = (trace.expert_ids[:, 2] == NO_EXPERT).all(axis=1)
    assert np.flatnonzero(~lacking).tolist() == [5, 6, 7, 8, 9, 10, 15, 18, 19, 20, 21]
    np.testing.assert_array_equal(trace.expert_ids[~lacking, 2], whole[~lacking, 2])
    assert trace.meta.incomplete_layers == (2,)
    assert notes_with(trace, "prompt rows lack the last layer")
    assert trace.meta.provenance.source == "t.csv: llama-moe-trace CSV"


def test_prompts_that_were_read_flat_are_dropped_and_decode_is_kept(tmp_path: Path) -> None:
    ids = choices(60, num_experts=64)
    stream = passes(ids, (20, 30))
    broken = [flat(part, 64) if len(part) > 1 else part for part in stream]
    lines = single_lines(broken) + single_lines(broken)
    trace = read_as("moe-trace-csv", write(tmp_path / "t.csv", lines), num_experts=64)
    assert np.bincount(trace.request_id).tolist() == [10, 10]
    assert trace.position.tolist() == [*range(50, 60)] * 2
    assert (trace.phase == 1).all()
    np.testing.assert_array_equal(trace.expert_ids, np.concatenate([ids[50:]] * 2))
    (told,) = notes_with(trace, "whole rankings")
    assert told.startswith("repaired: 100 prompt rows were dropped")
    whole = read_as(
        "moe-trace-csv", write(tmp_path / "o.csv", single_lines(stream)), num_experts=64
    )
    assert len(whole) == 60
    assert not notes_with(whole, "rankings")
    with pytest.raises(TraceError, match="there is no decode"):
        read_as(
            "moe-trace-csv",
            write(tmp_path / "p.csv", single_lines(broken[:2], prune_last=False)),
            num_experts=64,
            top_k=4,
        )


def test_a_few_distinct_prompt_tokens_are_no_rankings(tmp_path: Path) -> None:
    ids = (
        np.arange(8).reshape(2, 1, 4).repeat(3, axis=1)
    )  # two tokens that share nothing, by chance
    ids = np.concatenate([ids, choices(4, num_experts=64)])
    lines = single_lines(passes(ids, (2,)))
    trace = read_as("moe-trace-csv", write(tmp_path / "t.csv", lines), num_experts=64)
    assert len(trace) == 6


def test_choices_a_token_follow_from_the_shortest_run_or_are_told(tmp_path: Path) -> None:
    prompt_only = single_lines([choices(8)], prune_last=False)
    path = write(tmp_path / "p.csv", prompt_only)
    assert len(read_as("moe-trace-csv", path, num_experts=16, top_k=4)) == 8
    assert len(read_as("moe-trace-csv", path, num_experts=16, native_top_k=4)) == 8
    with pytest.raises(TraceError, match="is there twice"):
        read_as("moe-trace-csv", path, num_experts=64)
    forced = write(tmp_path / "f.csv", single_lines(passes(choices(11, top_k=3))))
    trace = read_as("moe-trace-csv", forced, num_experts=16, native_top_k=4)
    assert notes_with(trace, "top_k was forced from 4 to 3")


def test_a_line_a_choice_with_phases_ranks_and_tokens(tmp_path: Path) -> None:
    ids = choices(PROMPT + DECODED)
    heading, lines, token = "phase,token,layer,rank,expert", [], 0
    for part in passes(ids, (5, 1)):
        phase = "prefill" if token < PROMPT else "decode"
        for layer in range(3):
            for row, chosen in enumerate(part[:, layer]):
                for rank, expert in enumerate(chosen):
                    lines.append(f"{phase},{token + row},{layer},{rank},{expert}")
        token += len(part)
    trace = read_as("moe-trace-csv", write(tmp_path / "t.csv", [heading, *lines]), num_experts=16)
    np.testing.assert_array_equal(trace.expert_ids, ids)
    assert (trace.phase == 0).sum() == PROMPT  # the last piece of the prompt is one token
    twice = write(tmp_path / "two.csv", [heading, *lines, heading, *lines])
    assert (
        np.bincount(read_as("moe-trace-csv", twice, num_experts=16).request_id).tolist() == [11] * 2
    )
    for at, line, message in (
        (0, "warmup,0,0,0,3", "line 2 is 'warmup,0,0,0,3': must be phase,token"),
        (1, "prefill,0,0,2,3", "line 3 is 'prefill,0,0,2,3': ranks must count from 0"),
        (1, "prefill,0,0,1", "must be token,layer,rank,expert"),
    ):
        bad = write(tmp_path / "bad.csv", [heading, *lines[:at], line, *lines[at + 1 :]])
        with pytest.raises(TraceError, match=message):
            read_as("moe-trace-csv", bad, num_experts=16)


def test_a_line_a_token_and_layer_with_negative_prompt_positions(tmp_path: Path) -> None:
    ids, lines, at = choices(PROMPT + DECODED), [], 0
    for part in passes(ids):
        for layer in range(3):
            for row, chosen in enumerate(part[:, layer]):
                pos = -(PROMPT - row) if at < PROMPT else at - PROMPT
                lines.append(",".join(map(str, [pos, layer, *chosen])))
        at += len(part)
    trace = read_as("moe-trace-csv", write(tmp_path / "t.csv", lines), num_experts=16)
    np.testing.assert_array_equal(trace.expert_ids, ids)
    assert (trace.phase == 0).sum() == PROMPT
    cut = read_as("moe-trace-csv", write(tmp_path / "cut.csv", lines[:-2]), num_experts=16)
    assert len(cut) == len(ids) - 1
    assert notes_with(cut, "repaired: the last pass broke off at layer 0")
    wrong = [*lines[: 3 * PROMPT + 2], *lines[3 * PROMPT + 3 :]]
    with pytest.raises(TraceError, match="pass 1 lacks layer 2: must have all of the 3 layers"):
        read_as("moe-trace-csv", write(tmp_path / "gap.csv", wrong), num_experts=16)


def test_decode_only_text_of_several_prompts(tmp_path: Path) -> None:
    ids = choices(9)
    lines = [
        " ".join(map(str, [prompt, step, layer, *ids[step, layer]]))
        for prompt, steps in ((0, 9), (2, 4))
        for step in range(steps)
        for layer in range(3)
    ]
    trace = read_as("moe-trace-csv", write(tmp_path / "t.txt", lines), num_experts=16)
    assert np.bincount(trace.request_id).tolist() == [9, 4]
    assert (trace.phase == 1).all()
    np.testing.assert_array_equal(trace.expert_ids, np.concatenate([ids, ids[:4]]))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["0,1", "0,x"], "line 2 is '0,x': must be layer,expert"),
        (["0,1", "0"], r"line 2 is '0': must be layer,expert \(cut short\?\)"),
        (["0,-1"], "line 1 is '0,-1': must be >= 0"),
        ([], "no rows"),
        (
            ["0,1", "0,2", "1,1", "1,2", "0,3", "1,4", "1,5"],
            "row 5: layer 1 has 2 tokens in pass 1: must be 1, as layer 0",
        ),
        (["3,1", "3,2"], "has layer 3 only"),
    ],
)
def test_text_that_is_no_trace_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    path = write(tmp_path / "bad.csv", lines)
    with pytest.raises(TraceError, match=message) as error:
        read_as("moe-trace-csv", path, num_experts=16)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_the_number_of_experts_must_be_told(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", single_lines(passes(choices(9))))
    with pytest.raises(TraceError, match="does not tell the number of experts: give --num-experts"):
        read_as("moe-trace-csv", path)
    with pytest.raises(TraceError, match=r"is expert \d+: must lie in 0..7"):
        read_as("moe-trace-csv", path, num_experts=8)


# -- the binary stream -----------------------------------------------------------------------------


def records(contexts: Sequence[NDArray[np.int64]], first_layer: int = 0) -> bytes:
    parts = []
    for part in contexts:
        for layer in range(part.shape[1]):
            head = [layer + first_layer, len(part), part.shape[2]]
            parts += [np.array(head, dtype="<i4"), part[:, layer].astype("<i4").reshape(-1)]
    return b"".join(part.tobytes() for part in parts)


def test_the_stream_becomes_a_request_a_context(tmp_path: Path) -> None:
    ids, path = choices(40), tmp_path / "t.bin"
    path.write_bytes(records([ids[:16], ids[16:32], ids[32:]], first_layer=2))
    trace = read_as("moe-trace-bin", path, num_experts=16)
    assert np.bincount(trace.request_id).tolist() == [16, 16, 8]
    assert np.flatnonzero(trace.phase == 0).tolist() == [0, 16, 32]
    assert trace.meta.layer_indices == (2, 3, 4)
    np.testing.assert_array_equal(trace.expert_ids, ids)
    joined = read_as("moe-trace-bin", path, num_experts=16, context_tokens=32)
    assert np.bincount(joined.request_id).tolist() == [32, 8]
    with pytest.raises(TraceError, match="a context of 24 tokens begins at 24: must begin where"):
        read_as("moe-trace-bin", path, num_experts=16, context_tokens=24)


def test_a_stream_that_is_none_is_refused(tmp_path: Path) -> None:
    ids, path = choices(12), tmp_path / "t.bin"
    good = records([ids])
    ranks = choices(12, top_k=16, seed=3).transpose(1, 0, 2).reshape(3, -1, 4).transpose(1, 0, 2)
    uneven = records([ids[:, :2]]) + np.array([2, 1, 4, 0, 1, 2, 3], dtype="<i4").tobytes()
    for data, message in (
        (b"MOE2" + good, "is a MOE2 dump of tensors"),
        (good[:-8], r"byte 408: record 2 \(12 tokens, k 4\) is cut short: must have 204 bytes"),
        (good[:-2], "610 bytes: must be whole int32"),
        (b"", "0 bytes: must be whole int32, at least one record"),
        (np.array([0, 0, 4], dtype="<i4").tobytes(), r"record 0 begins with \[0, 0, 4\]"),
        (records([ids, choices(5, top_k=3)]), "k of record 3 is 3: must be 4 as in record 0"),
        (uneven, "the last layer has fewer tokens than the others"),
        (records([ranks]), "name every expert once"),
    ):
        path.write_bytes(data)
        with pytest.raises(TraceError, match=message):
            read_as("moe-trace-bin", path, num_experts=16)
