"""Megatron's router traces: ranks are fitted together, requests derived, logits read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from routing_samples import NUM_EXPERTS, distinct_ids

from traces.importers.megatron_trace import read
from traces.importers.told import Told
from traces.schema import Trace, TraceError

LAYERS = (1, 2, 4)
TOLD = Told(num_experts=NUM_EXPERTS)


def passes(*counts: int, layers: int = len(LAYERS), seed: int = 0) -> list[NDArray[np.int32]]:
    """Ids [tokens, layers, k] of passes of so many tokens."""
    rng = np.random.default_rng(seed)
    return [distinct_ids(rng, count, layers) for count in counts]


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def save_rank(
    folder: Path,
    made: Sequence[NDArray[np.int32]],
    rank: int = 0,
    layers: Sequence[int] = LAYERS,
    steps: Sequence[int] | None = None,
    logits: bool = False,
) -> Path:
    """What ``RouterTracer`` of one rank writes."""
    lines, bits = [], b""
    for place, ids in enumerate(made):
        for at, layer in enumerate(layers):
            record: dict[str, Any] = {
                "step": place if steps is None else steps[place],
                "stage": "pre_dispatch",
                "block": "decoder",
                "layer": layer,
                "rank": rank,
                "num_tokens": len(ids),
                "topk": ids.shape[-1],
            }
            if logits:
                held = bfloat16(logits_of(ids[:, at])).tobytes()
                record |= {"logit_offset": len(bits), "logit_bytes": len(held)}
                record["logit_shape"] = [len(ids), NUM_EXPERTS]
                bits += held
            record["top_indices"] = ids[:, at].tolist()
            lines.append(json.dumps(record) + "\n")
    path = folder / f"router_trace_rank{rank}.jsonl"
    path.write_text("".join(lines))
    if logits:
        (folder / f"logits_rank{rank}.bin").write_bytes(bits)
    return path


def logits_of(ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Logits [tokens, experts] that would choose these ids, exact in bfloat16 and float16."""
    logits = np.tile(-np.arange(NUM_EXPERTS, dtype=np.float32), (len(ids), 1))
    np.put_along_axis(logits, ids.astype(np.int64), np.float32(4.5), axis=1)
    return logits


def rewrite(path: Path, at: int, **change: Any) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[at].update(change)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def notes(trace: Trace) -> str:
    return "\n".join(trace.meta.notes)


def test_one_prompt_and_what_is_decoded_after_it_are_a_request(tmp_path: Path) -> None:
    made = passes(5, 1, 1, 1, 3, 1)
    trace = read(save_rank(tmp_path, made), TOLD)
    assert np.array_equal(trace.expert_ids, np.concatenate(made))
    assert trace.request_id.tolist() == [0] * 8 + [1] * 4
    assert trace.position.tolist() == [*range(8), *range(4)]
    assert trace.phase.tolist() == [0] * 5 + [1] * 3 + [0] * 3 + [1]
    assert trace.step.tolist() == [0] * 5 + [1, 2, 3] + [4] * 3 + [5]
    assert trace.meta.layer_indices == LAYERS
    assert "requests derived from the tokens of each pass" in notes(trace)


def test_rows_of_a_batch_are_linked_by_their_place(tmp_path: Path) -> None:
    made = passes(7, 2, 2, 2)
    trace = read(save_rank(tmp_path, made), TOLD)
    assert trace.request_id.tolist() == [0] * 7 + [1, 2] * 3
    assert trace.step.tolist() == [0] * 7 + [1, 1, 2, 2, 3, 3]
    assert trace.phase.tolist() == [0] * 7 + [1] * 6
    for row in range(2):
        rows = trace.take(trace.request_id == 1 + row)
        assert np.array_equal(rows.expert_ids, np.stack([ids[row] for ids in made[1:]]))


def test_passes_that_are_all_alike_need_a_word(tmp_path: Path) -> None:
    made = passes(6, 6)
    path = save_rank(tmp_path, made)
    with pytest.raises(TraceError, match=r"each of 2 passes has 6 tokens: tell --context-tokens"):
        read(path, TOLD)
    training = read(path, replace(TOLD, context_tokens=3))
    assert training.request_id.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert training.step.tolist() == [0] * 6 + [1] * 6
    assert not training.phase.any()
    # Megatron lays a batch out [position, sequence]: sequence 1 has every second row.
    assert np.array_equal(training.expert_ids[3:6], made[0][1::2])
    decoding = read(path, replace(TOLD, prompt_tokens=0))
    assert decoding.request_id.tolist() == [*range(6), *range(6)]
    assert np.array_equal(decoding.expert_ids, np.concatenate(made))
    assert decoding.phase.all()
    with pytest.raises(TraceError, match=r"has 6 tokens: must be a multiple of --context-tokens 4"):
        read(path, replace(TOLD, context_tokens=4))


def test_micro_batches_of_a_step_are_apart_and_recomputed_ones_dropped(tmp_path: Path) -> None:
    first, second, third = passes(4, 4, 4)
    path = save_rank(tmp_path, [first, second, first, third], steps=[7, 7, 7, 8])
    trace = read(path, replace(TOLD, context_tokens=4))
    assert np.array_equal(trace.expert_ids, np.concatenate([first, second, third]))
    assert "1 passes that repeat another of their step were dropped" in notes(trace)
    again = read(save_rank(tmp_path, [first, first], steps=[7, 8]), replace(TOLD, context_tokens=4))
    assert len(again) == 8  # another step may well choose the same


def test_heads_of_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    path = save_rank(tmp_path, passes(5, 1))
    rewrite(path, 5, block="mtp", mtp_idx=0)
    lines = path.read_text().splitlines(keepends=True)
    record = json.loads(lines[5])
    path.write_text(
        "".join([*lines[:5], json.dumps({**record, "block": "decoder"}) + "\n", lines[5]])
    )
    trace = read(path, TOLD)
    assert len(trace) == 6
    assert "1 calls of multi-token prediction heads were left out" in notes(trace)


def test_logits_beside_the_trace_are_read(tmp_path: Path) -> None:
    made = passes(5, 1, 1, seed=3)
    trace = read(save_rank(tmp_path, made, logits=True), Told())
    assert trace.meta.num_experts == NUM_EXPERTS
    ids = np.concatenate(made)
    wanted = np.stack([logits_of(ids[:, at]) for at in range(len(LAYERS))], axis=1)
    assert trace.router_logits is not None
    assert np.array_equal(trace.router_logits, wanted.astype(np.float16))
    path = save_rank(tmp_path, made, logits=True)
    rewrite(path, 4, logit_offset=10**6)
    with pytest.raises(TraceError, match=r"line 5: logit_offset is 1000000: must be even, and"):
        read(path, Told())


def test_logits_that_some_calls_lack_are_left_out(tmp_path: Path) -> None:
    path = save_rank(tmp_path, passes(5, 1), logits=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[2]["logit_offset"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read(path, TOLD)
    assert trace.router_logits is None
    assert "logits were left out: some calls have none" in notes(trace)


def test_ranks_that_copy_each_other_count_once(tmp_path: Path) -> None:
    made = passes(5, 1, 1)
    for rank in range(2):
        save_rank(tmp_path, made, rank)
    trace = read(tmp_path, TOLD)
    assert np.array_equal(trace.expert_ids, np.concatenate(made))
    assert "1 ranks that copy another were dropped" in notes(trace)


def test_replicas_are_one_after_another(tmp_path: Path) -> None:
    made = [passes(5, 1, 1, seed=seed) for seed in (1, 2)]
    for rank, part in enumerate(made):
        save_rank(tmp_path, part, rank)
    trace = read(tmp_path, TOLD)
    assert np.array_equal(trace.expert_ids, np.concatenate([*made[0], *made[1]]))
    assert trace.step.tolist() == [0] * 5 + [1, 2] + [3] * 5 + [4, 5]
    assert "2 ranks hold other tokens of the same layers" in notes(trace)


def test_pipeline_stages_of_replicas_are_joined(tmp_path: Path) -> None:
    made = [passes(5, 1, 1, layers=4, seed=seed) for seed in (1, 2)]
    for replica, part in enumerate(made):
        for stage in range(2):
            held = [ids[:, 2 * stage : 2 * stage + 2] for ids in part]
            save_rank(tmp_path, held, 2 * stage + replica, layers=range(2 * stage, 2 * stage + 2))
    trace = read(tmp_path, TOLD)
    assert np.array_equal(trace.expert_ids, np.concatenate([*made[0], *made[1]]))
    assert trace.meta.layer_indices == (0, 1, 2, 3)


def test_stages_that_number_their_own_layers_need_to_be_told(tmp_path: Path) -> None:
    made = passes(5, 1, 1, layers=5)
    save_rank(tmp_path, [ids[:, :2] for ids in made], 0, layers=(1, 2))
    save_rank(tmp_path, [ids[:, 2:] for ids in made], 1, layers=(0, 1, 2))
    with pytest.raises(TraceError, match=r"ranks hold layers 0-2 and 1-2: must be apart"):
        read(tmp_path, TOLD)
    trace = read(tmp_path, replace(TOLD, layer_indices=(1, 2, 3, 4, 5)))
    assert np.array_equal(trace.expert_ids, np.concatenate(made))
    assert trace.meta.layer_indices == (1, 2, 3, 4, 5)
    assert "2 pipeline stages were joined in the order of their ranks" in notes(trace)
    save_rank(tmp_path, [ids[:-1, 2:] for ids in made[:1]], 1, layers=(0, 1, 2))
    with pytest.raises(TraceError, match="pipeline stages have 5 and 4 tokens: must be alike"):
        read(tmp_path, replace(TOLD, layer_indices=(1, 2, 3, 4, 5)))


def test_a_last_pass_that_is_cut_short_is_dropped_an_earlier_one_refused(tmp_path: Path) -> None:
    made = passes(5, 1, 1)
    path = save_rank(tmp_path, made)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    trace = read(path, TOLD)
    assert np.array_equal(trace.expert_ids, np.concatenate(made[:2]))
    assert "the last pass was cut short and dropped" in notes(trace)
    path.write_text("".join(lines[:4] + lines[5:]))
    with pytest.raises(TraceError, match=r"pass 1 \(step 1\) lacks layer 2: must have all 3"):
        read(path, TOLD)


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (
            1,
            {"num_tokens": 4},
            r"line 2: top_indices are int64\[5, 2\]: must be whole numbers \[4, 2\]",
        ),
        (1, {"top_indices": [[1, 2], [3]]}, "line 2: top_indices are of unequal lengths"),
        (1, {"top_indices": [[1, 99]], "num_tokens": 1}, "layers have .1, 5. tokens: must be one"),
        (0, {"layer": -1}, "line 1: layer is -1: must be a whole number"),
        (0, {"step": None}, "line 1: step is None: must be a whole number"),
        (
            2,
            {"top_indices": [[1, NUM_EXPERTS]] * 5},
            r"is expert 16: must lie in 0\.\.15 \(an expert",
        ),
        (2, {"top_indices": [[3, 3]] * 5}, "is there twice"),
    ],
)
def test_lines_that_cannot_be_are_refused(
    at: int, change: dict, message: str, tmp_path: Path
) -> None:
    path = save_rank(tmp_path, passes(5, 1))
    rewrite(path, at, **change)
    with pytest.raises(TraceError, match=message):
        read(path, TOLD)


def test_a_trace_without_calls_speaks_of_cuda_graphs(tmp_path: Path) -> None:
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_text("")
    with pytest.raises(TraceError, match=r"no router call in it: .*--cuda-graph-impl none"):
        read(path, TOLD)
    path.write_text('{"a": 1}\n')
    with pytest.raises(TraceError, match="line 1 has a: must have step, layer"):
        read(path, TOLD)
