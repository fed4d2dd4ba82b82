"""What RL trainers keep of routed experts becomes a trace: slime and verl tensors, verifiers JSON."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from routing_samples import DENSE, NUM_LAYERS, TOLD, TOP_K, Sample, b64, check_rows, sample

from traces.importers.rl_tensors import read
from traces.schema import TraceError


def slime_sample(made: Sample, **changes: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "prompt": "so?",
        "tokens": made.tokens,
        "response": "so",
        "response_length": len(made.output),
        "rollout_routed_experts": torch.from_numpy(made.ids),
        "status": "completed",
        "spec_info": {"completion_token_num": 0},
        **changes,
    }


def save_slime(path: Path, samples: list[dict[str, Any]]) -> Path:
    torch.save({"rollout_id": 3, "samples": samples}, path)
    return path


def test_slime_rollouts_become_requests(tmp_path: Path) -> None:
    made = [sample(3, 4, seed=1), sample(2, 5, seed=2)]
    path = save_slime(tmp_path / "3.pt", list(map(slime_sample, made)))
    trace = read(path, TOLD)
    check_rows(trace, made)
    assert trace.meta.layer_indices == tuple(range(DENSE, NUM_LAYERS))
    assert trace.meta.recorder == "slime"


def test_slime_samples_may_hold_arrays_or_lists_or_no_routing(tmp_path: Path) -> None:
    made = [sample(seed=seed) for seed in range(3)]
    samples = list(map(slime_sample, made))
    samples[0]["rollout_routed_experts"] = made[0].ids
    samples[1]["rollout_routed_experts"] = made[1].ids.tolist()
    samples.insert(1, slime_sample(made[0], rollout_routed_experts=None, status="aborted"))
    trace = read(save_slime(tmp_path / "3.pt", samples), TOLD)
    check_rows(trace, made)
    assert "1 samples of 3.pt have no routing and were left out" in trace.meta.notes


def test_slime_training_data_are_lists_by_name(tmp_path: Path) -> None:
    made = [sample(3, 4, seed=1), sample(2, 5, seed=2)]
    data = {
        "tokens": [torch.tensor(one.tokens) for one in made],
        "response_lengths": [len(one.output) for one in made],
        "rollout_routed_experts": [torch.from_numpy(one.ids) for one in made],
    }
    torch.save(data, tmp_path / "a.pt")
    check_rows(read(tmp_path / "a.pt", TOLD), made)
    data["tokens"].pop()
    torch.save(data, tmp_path / "b.pt")
    with pytest.raises(TraceError, match="tokens has 1 entries: must be 2, one a sample"):
        read(tmp_path / "b.pt", TOLD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_length": 9}, "tokens or response_length: must be there"),
        ({"tokens": None}, "tokens or response_length: must be there"),
        ({"tokens": list(range(9))}, r"6 rows of routing: must be 8 \(5 prompt \+ 4 sampled - 1\)"),
        ({"rollout_routed_experts": torch.zeros(6, 4)}, r"float32\[6, 4\]: must be whole"),
        ({"rollout_routed_experts": 7}, "rollout_routed_experts: is int"),
    ],
)
def test_a_slime_sample_that_cannot_be_is_refused(
    change: dict, message: str, tmp_path: Path
) -> None:
    path = save_slime(tmp_path / "a.pt", [slime_sample(sample(), **change)])
    with pytest.raises(TraceError, match=message) as caught:
        read(path, TOLD)
    assert str(caught.value).startswith(f"{path}: sample 0: ")


def test_a_layer_of_zeros_as_slime_refuses_it_is_refused(tmp_path: Path) -> None:
    made = sample()
    made.ids[:, 2] = 0
    with pytest.raises(
        TraceError, match=r"layer 2 has no expert in any token.*a missing pipeline stage"
    ):
        read(save_slime(tmp_path / "a.pt", [slime_sample(made)]), TOLD)


def verl_batch(
    made: list[Sample], prompt_width: int, response_width: int
) -> dict[str, torch.Tensor]:
    """A padded batch as verl's agent loop makes it: prompts to the right, responses to the left."""
    shape = (len(made), prompt_width + response_width)
    ids = torch.zeros((*shape, NUM_LAYERS, TOP_K), dtype=torch.int32)
    mask, tokens = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    for row, one in enumerate(made):
        begin = prompt_width - len(one.prompt)
        ids[row, begin : begin + len(one.ids)] = torch.from_numpy(one.ids)
        mask[row, begin : begin + len(one.tokens)] = 1
        tokens[row, begin : begin + len(one.tokens)] = torch.tensor(one.tokens)
    return {
        "prompts": tokens[:, :prompt_width],
        "responses": tokens[:, prompt_width:],
        "input_ids": tokens,
        "attention_mask": mask,
        "routed_experts": ids,
    }


def test_a_verl_batch_is_freed_of_its_padding(tmp_path: Path) -> None:
    made = [sample(3, 4, seed=1), sample(5, 2, seed=2), sample(1, 6, seed=3)]
    batch = verl_batch(made, 5, 6)
    torch.save(batch, tmp_path / "a.pt")
    check_rows(read(tmp_path / "a.pt", TOLD), made)
    torch.save({"batch": batch, "meta_info": {}}, tmp_path / "b.pt")
    check_rows(read(tmp_path / "b.pt", TOLD), made)


def test_without_a_mask_padding_is_where_no_expert_is(tmp_path: Path) -> None:
    made = [sample(3, 4, seed=1), sample(5, 2, seed=2)]
    batch = verl_batch(made, 5, 6)
    del batch["attention_mask"], batch["prompts"]
    torch.save(batch, tmp_path / "a.pt")
    check_rows(read(tmp_path / "a.pt", TOLD), made)


def test_last_words_of_a_tool_that_nothing_routed_are_left_out(tmp_path: Path) -> None:
    made = sample(3, 6)
    batch = verl_batch([made], 3, 6)
    batch["routed_experts"][0, -3:] = 0
    torch.save(batch, tmp_path / "a.pt")
    trace = read(tmp_path / "a.pt", TOLD)
    assert trace.token_id is not None
    assert trace.token_id.tolist() == made.tokens[:6]
    assert any("2 last tokens without routing were left out" in note for note in trace.meta.notes)


def test_a_hole_in_the_routing_is_refused(tmp_path: Path) -> None:
    batch = verl_batch([sample(3, 6)], 3, 6)
    batch["routed_experts"][0, 4] = 0
    torch.save(batch, tmp_path / "a.pt")
    with pytest.raises(TraceError, match="row 0: row 4 has no expert in any layer"):
        read(tmp_path / "a.pt", TOLD)


def test_a_verl_batch_that_cannot_be_is_refused(tmp_path: Path) -> None:
    batch = verl_batch([sample(3, 6)], 3, 6)
    for change, message in (
        ({"attention_mask": batch["attention_mask"][:, :-1]}, r"attention_mask is int64\[1, 8\]"),
        ({"routed_experts": batch["routed_experts"][0]}, r"routed_experts is int32\[9, 4, 2\]"),
        ({"prompts": None, "responses": None}, "neither prompts nor responses"),
    ):
        torch.save({**batch, **change}, tmp_path / "a.pt")
        with pytest.raises(TraceError, match=message):
            read(tmp_path / "a.pt", TOLD)
    holed = batch["attention_mask"].clone()
    holed[0, 2] = 0
    torch.save({**batch, "attention_mask": holed}, tmp_path / "a.pt")
    with pytest.raises(TraceError, match="attention_mask has holes"):
        read(tmp_path / "a.pt", TOLD)


class DataProto:
    """Stands for verl's class, which no file may make us import."""


def test_files_with_objects_are_refused_without_running_them(tmp_path: Path) -> None:
    torch.save({"batch": DataProto()}, tmp_path / "a.pt")
    with pytest.raises(TraceError, match=r"holds a Python object.*save dict\(data.batch\)"):
        read(tmp_path / "a.pt", TOLD)
    (tmp_path / "b.pt").write_bytes(pickle.dumps({"samples": []}))
    with pytest.raises(TraceError, match=r"b.pt: "):
        read(tmp_path / "b.pt", TOLD)
    torch.save({"weights": torch.zeros(2)}, tmp_path / "c.pt")
    with pytest.raises(TraceError, match="holds weights: must have samples with rollout_routed"):
        read(tmp_path / "c.pt", TOLD)


def payload(ids: np.ndarray, start: int = 0, **changes: Any) -> dict[str, Any]:
    held = ids[start:].astype(np.uint8)
    return {"data": b64(held.tobytes()), "shape": list(held.shape), "start": start, **changes}


def turn(made: Sample, start: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "prompt_ids": made.prompt,
        "prompt_mask": [0] * len(made.prompt),
        "completion_ids": made.output,
        "completion_mask": [1] * len(made.output),
        "is_truncated": False,
        "routed_experts": payload(made.ids, start),
        **changes,
    }


def save_rollouts(path: Path, *turns: dict[str, Any]) -> Path:
    rollouts = [{"prompt": [], "trajectory": [{"tokens": one} for one in turns]}]
    path.write_text(json.dumps(rollouts))
    return path


def test_each_turn_of_a_verifiers_rollout_is_a_request(tmp_path: Path) -> None:
    made = [sample(3, 4, seed=1), sample(9, 3, seed=2)]
    trace = read(save_rollouts(tmp_path / "a.json", *map(turn, made)), TOLD)
    check_rows(trace, made)
    lines = [json.dumps({"trajectory": [{"tokens": turn(one)}]}) + "\n" for one in made]
    (tmp_path / "b.jsonl").write_text("".join(lines))
    check_rows(read(tmp_path / "b.jsonl", TOLD), made)


def test_a_turn_may_begin_where_the_one_before_it_ended(tmp_path: Path) -> None:
    made = [sample(3, 4, seed=1), sample(9, 3, seed=2)]
    made[1].ids[:7] = 1  # never sent
    turns = turn(made[0]), turn(made[1], start=7)
    trace = read(save_rollouts(tmp_path / "a.json", *turns), TOLD)
    late = trace.take(trace.request_id == 1)
    assert late.position.tolist() == [7, 8, 9, 10]
    assert late.phase.tolist() == [0, 0, 1, 1]
    assert np.array_equal(late.expert_ids, made[1].moe_ids[7:])
    assert any("1 turns begin after the tokens" in note for note in trace.meta.notes)


def test_routing_of_tokens_that_a_trainer_cut_off_is_cut_too(tmp_path: Path) -> None:
    made = sample(3, 6)
    cut = turn(made, is_truncated=True, completion_ids=made.output[:2])
    trace = read(save_rollouts(tmp_path / "a.json", cut), TOLD)
    assert np.array_equal(trace.expert_ids, made.moe_ids[:5])
    with pytest.raises(TraceError, match="8 rows of routing: must be 4"):
        read(save_rollouts(tmp_path / "a.json", {**cut, "is_truncated": False}), TOLD)


def test_wide_ids_say_their_type(tmp_path: Path) -> None:
    made = sample()
    wide = payload(made.ids, data=b64(made.ids.astype("<u2").tobytes()), dtype="uint16")
    check_rows(
        read(save_rollouts(tmp_path / "a.json", turn(made, routed_experts=wide)), TOLD), [made]
    )
    for change, message in (
        ({"dtype": None}, r"routed_experts: is 96 bytes: must be 48, uint8"),
        ({"dtype": "float16"}, "dtype is 'float16': must be one of uint8"),
        ({"shape": [6, 8]}, r"shape is \[6, 8\]: must be"),
        ({"data": "<memoryview>"}, r"saved without their raw buffers"),
        ({"data": None}, "must have data and shape"),
        ({"shape": [2**32, 2**32, 16]}, r"is 96 bytes: must be"),
        ({"start": -1}, "start is -1: must be a whole number"),
    ):
        path = save_rollouts(tmp_path / "b.json", turn(made, routed_experts={**wide, **change}))
        with pytest.raises(TraceError, match=message):
            read(path, TOLD)


def test_routing_that_stands_alone_needs_the_length_of_its_prompt(tmp_path: Path) -> None:
    made = sample(3, 4)
    for value in (payload(made.ids), {"routed_experts": payload(made.ids)}):
        (tmp_path / "a.json").write_text(json.dumps(value))
        with pytest.raises(
            TraceError, match="does not tell its prompt tokens: give --prompt-tokens"
        ):
            read(tmp_path / "a.json", TOLD)
        trace = read(tmp_path / "a.json", replace(TOLD, prompt_tokens=3))
        check_rows(trace, [made], tokens=False)


def test_turns_without_routing_are_left_out_or_all_refused(tmp_path: Path) -> None:
    made = sample()
    path = save_rollouts(tmp_path / "a.json", turn(made, routed_experts=None), turn(made))
    trace = read(path, TOLD)
    check_rows(trace, [made])
    assert "1 turns have no routing and were left out" in trace.meta.notes
    with pytest.raises(TraceError, match="no sample with routing in it"):
        read(save_rollouts(tmp_path / "b.json", turn(made, routed_experts=None)), TOLD)
