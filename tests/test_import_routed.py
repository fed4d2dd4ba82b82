"""SGLang's and vLLM's returned routed experts become traces, in every documented form."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_samples import (
    DENSE,
    NUM_LAYERS,
    TOLD,
    TOP_K,
    b64,
    check_rows,
    npy_b64,
    sample,
    sglang_native,
    sglang_openai,
    vllm_split,
    vllm_tokens_out,
    vllm_whole,
)

from traces.importers.answers import cached_tokens, routed_of_sglang, routed_of_vllm
from traces.importers.routed_experts import read
from traces.importers.told import NOTHING
from traces.schema import TraceError

FORMS = (sglang_native, sglang_openai, vllm_whole, vllm_tokens_out, vllm_split)


def save(path: Path, value: object) -> Path:
    lines = path.suffix == ".jsonl"
    text = "".join(json.dumps(one) + "\n" for one in value) if lines else json.dumps(value)
    path.write_text(text)
    return path


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_answers_of_each_form_become_the_rows_they_were_made_of(form, tmp_path: Path) -> None:
    made = [sample(3, 4, seed=1), sample(5, 1, seed=2)]
    trace = read(save(tmp_path / "answers.jsonl", map(form, made)), TOLD)
    check_rows(trace, made, tokens=False)
    assert trace.step.tolist() == [0, 0, 0, 1, 2, 3] + [4] * 5
    assert trace.meta.provenance.kind == "imported"
    assert trace.meta.weight_semantics == "none"
    whole = form is not vllm_split  # which leaves dense layers out
    assert trace.meta.layer_indices == tuple(range(DENSE, NUM_LAYERS) if whole else range(3))
    assert any("dense layers were dropped" in note for note in trace.meta.notes) == whole


@given(
    form=st.sampled_from(FORMS),
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=30, deadline=None)
def test_any_lengths_and_forms_decode_to_t_minus_1_rows(form, sizes, seed: int) -> None:
    for at, (num_prompt, num_output) in enumerate(sizes):
        made = sample(num_prompt, num_output, seed + at)
        if form in (sglang_native, sglang_openai):
            routed = routed_of_sglang(form(made), NUM_LAYERS, TOP_K, prompt_ids=made.prompt)
        else:
            (routed,) = routed_of_vllm(form(made), prompt_ids=made.prompt)
        layers = made.moe_ids if form is vllm_split else made.ids
        assert np.array_equal(routed.expert_ids, layers)
        assert routed.num_prompt == num_prompt
        known = made.tokens if form in (sglang_native, vllm_whole, vllm_tokens_out) else made.prompt
        assert routed.token_id is not None
        assert routed.token_id[: len(known)].tolist() == known[: len(layers)]


def test_token_ids_come_from_the_answer_or_its_request(tmp_path: Path) -> None:
    made = sample()
    record = {"request": {"input_ids": made.prompt}, "response": sglang_native(made)}
    check_rows(read(save(tmp_path / "a.jsonl", [record]), TOLD), [made])
    check_rows(read(save(tmp_path / "b.json", vllm_whole(made)), TOLD), [made])
    logprobs = {
        "input_token_logprobs": [[None, token, None] for token in made.prompt],
        "output_token_logprobs": [[-1.0, token, None] for token in made.output],
    }
    answer = sglang_native(made, **logprobs)
    del answer["output_ids"]
    check_rows(read(save(tmp_path / "c.json", answer), TOLD), [made])


def test_of_several_choices_sglang_sends_the_routing_of_the_first(tmp_path: Path) -> None:
    made = sample()
    answer = sglang_openai(made)
    answer["choices"] *= 2
    answer["usage"]["completion_tokens"] = 9  # of both together
    answer["sglext"] |= {"input_ids": made.prompt, "output_ids": [made.output, [1, 2, 3, 4, 5]]}
    check_rows(read(save(tmp_path / "a.json", answer), TOLD), [made])
    inside = sglang_openai(made)
    inside["choices"][0]["meta_info"] = {"routed_experts": inside.pop("sglext")["routed_experts"]}
    check_rows(read(save(tmp_path / "b.json", inside), TOLD), [made], tokens=False)


def test_an_array_that_claims_more_than_there_is_is_refused(tmp_path: Path) -> None:
    header = io.BytesIO()
    shape = {"descr": "<i4", "fortran_order": False, "shape": (2**40, 4, 2)}
    np.lib.format.write_array_header_1_0(header, shape)
    answer = vllm_whole(sample())
    answer["choices"][0]["routed_experts"] = b64(header.getvalue() + bytes(64))
    with pytest.raises(TraceError, match="routed_experts: is not a npy array"):
        read(save(tmp_path / "a.json", answer), TOLD)


def test_a_batch_an_openai_batch_file_and_a_folder_are_read(tmp_path: Path) -> None:
    made = [sample(seed=seed) for seed in range(3)]
    batch = save(tmp_path / "batch.json", [list(map(sglang_native, made))])
    check_rows(read(batch, TOLD), made, tokens=False)
    lines = [
        {
            "custom_id": str(at),
            "response": {"status_code": 200, "body": vllm_whole(one)},
            "error": None,
        }
        for at, one in enumerate(made)
    ]
    check_rows(read(save(tmp_path / "lines.jsonl", lines), TOLD), made)
    folder = tmp_path / "all"
    folder.mkdir()
    for at, one in zip((10, 9, 2), made, strict=True):
        save(folder / f"r{at}.json", vllm_whole(one))
    check_rows(read(folder, TOLD), made[::-1])


def test_rows_asked_for_from_the_middle_keep_their_positions(tmp_path: Path) -> None:
    made = sample(5, 4)
    record = {
        "request": {"input_ids": made.prompt, "routed_experts_start_len": 2},
        "response": sglang_native(made, start=2),
    }
    check_rows(read(save(tmp_path / "a.jsonl", [record]), TOLD), [made], rows=slice(2, None))
    echoed = sglang_native(made, start=2, routed_experts_start_len=2)
    assert routed_of_sglang(echoed, NUM_LAYERS, TOP_K).first_position == 2
    answer = vllm_whole(made)
    answer["choices"][0]["routed_experts"] = npy_b64(made.ids[7:])
    record = {
        "request": {"sampling_params": {"routed_experts_prompt_start": 7}},
        "response": answer,
    }
    check_rows(read(save(tmp_path / "b.jsonl", [record]), TOLD), [made], rows=slice(7, None))


def test_tokens_of_the_prefix_cache_that_vllm_021_marks_are_dropped(tmp_path: Path) -> None:
    made = sample(6, 3)
    answer = vllm_split(made)
    answer["prompt_routed_experts"][:4] = np.full((4, NUM_LAYERS - DENSE, TOP_K), -1).tolist()
    trace = read(save(tmp_path / "a.json", answer), TOLD)
    check_rows(trace, [made], tokens=False, rows=slice(4, None))
    assert any("4 first rows without routing were dropped" in note for note in trace.meta.notes)


def test_cached_tokens_that_an_engine_tells_are_a_warning(tmp_path: Path) -> None:
    answer = sglang_native(sample(), cached_tokens=2)
    assert cached_tokens(answer) == 2
    trace = read(save(tmp_path / "a.json", answer), TOLD)
    assert any("2 prompt tokens came from the prefix cache" in note for note in trace.meta.notes)
    usage = {"usage": {"prompt_tokens_details": {"cached_tokens": 3}}}
    assert cached_tokens(usage) == 3


def test_a_row_made_up_for_the_last_token_is_left_out(tmp_path: Path) -> None:
    made = sample(3, 4)
    answer = vllm_split(made)
    rows = answer["choices"][0]["routed_experts"]
    rows.append(np.zeros((NUM_LAYERS - DENSE, TOP_K), int).tolist())
    check_rows(read(save(tmp_path / "a.json", answer), TOLD), [made], tokens=False)
    rows[-1] = rows[-2]  # routed after all, as the field's description has it
    assert len(read(save(tmp_path / "b.json", answer), TOLD)) == len(made.tokens)


def test_further_choices_have_no_rows_for_the_prompt_they_share(tmp_path: Path) -> None:
    made = sample(3, 4, seed=5)
    other = sample(3, 4, seed=6)
    other.ids[:3] = made.ids[:3]
    answer = vllm_split(made)
    answer["choices"].append(
        {**vllm_split(other)["choices"][0], "index": 1, "token_ids": other.output}
    )
    answer["choices"][0]["token_ids"] = made.output
    trace = read(save(tmp_path / "a.json", answer), TOLD)
    assert trace.request_id.tolist() == [0] * 6 + [1] * 3
    assert trace.position.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert np.array_equal(trace.expert_ids[6:], other.moe_ids[3:])
    assert any("1 further choices" in note for note in trace.meta.notes)


def test_answers_that_are_errors_are_left_out_and_told(tmp_path: Path) -> None:
    made = sample()
    bad = {"object": "error", "message": "too long", "code": 400}
    trace = read(save(tmp_path / "a.jsonl", [bad, vllm_whole(made)]), TOLD)
    check_rows(trace, [made])
    assert any(
        "1 answers that are errors were left out: line 1" in note for note in trace.meta.notes
    )
    with pytest.raises(
        TraceError, match="no answer with routing in it: line 1 is an error: too long"
    ):
        read(save(tmp_path / "b.jsonl", [bad]), TOLD)


def test_megatrons_server_is_read_too(tmp_path: Path) -> None:
    made = sample()
    choice = {
        "index": 0,
        "prompt_token_ids": made.prompt,
        "generation_token_ids": made.output,
        "moe_topk_indices": made.ids.tolist(),
        "prompt_moe_topk_indices": made.ids[:3].tolist(),
    }
    trace = read(save(tmp_path / "a.json", {"choices": [choice]}), TOLD)
    check_rows(trace, [made])
    assert trace.meta.recorder == "routed_experts of Megatron"


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32"])
def test_arrays_of_every_width_are_read(dtype: str, tmp_path: Path) -> None:
    made = sample(3, 4)
    np.save(tmp_path / "a.npy", made.ids.astype(dtype))
    told = replace(TOLD, prompt_tokens=3)
    check_rows(read(tmp_path / "a.npy", told), [made], tokens=False)
    (tmp_path / "a.bin").write_bytes(made.ids.astype("<i4").tobytes())
    check_rows(read(tmp_path / "a.bin", told), [made], tokens=False)
    check_rows(read(save(tmp_path / "w.json", vllm_whole(made, dtype)), TOLD), [made])


def test_archives_hold_one_request_in_parts_or_several(tmp_path: Path) -> None:
    made = [sample(3, 4, seed=1), sample(3, 2, seed=2)]
    one = made[0]
    parts = {
        "prompt_routed_experts": one.ids[:3],
        "routed_experts": one.ids[3:],
        "prompt_token_ids": one.prompt,
        "token_ids": one.output,
    }
    np.savez(tmp_path / "parts.npz", **parts)
    check_rows(read(tmp_path / "parts.npz", TOLD), [one])
    np.savez(tmp_path / "many.npz", *(each.ids for each in made))
    check_rows(read(tmp_path / "many.npz", replace(TOLD, prompt_tokens=3)), made, tokens=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routed_experts": None}, "start SGLang with --enable-return-routed-experts"),
        ({"routed_experts": None, "finish_reason": {"type": "abort", "message": "out of\nmemory"}},
         r"the engine aborted the request \(out of memory\)"),
        ({"routed_experts": "@@"}, "routed_experts: is not base64"),
        ({"routed_experts": b64(b"1234567")}, r"7 bytes: must be a multiple of 32 \(int32, 4 layers"),
        ({"routed_experts": npy_b64(sample().ids)}, "holds a npy array: must be raw int32"),
        ({"completion_tokens": 9}, "sampled tokens are 9: must be 4, as many as their ids"),
        ({"prompt_tokens": 4}, r"6 rows of routing: must be 7 \(4 prompt \+ 4 sampled - 1\)"),
        ({"prompt_tokens": "3"}, "prompt_tokens is '3': must be a whole number"),
    ],
)  # fmt: skip
def test_an_sglang_answer_that_cannot_be_is_refused(
    change: dict, message: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "a.json", sglang_native(sample(), **change))
    with pytest.raises(TraceError, match=message) as caught:
        read(path, TOLD)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routed_experts": None}, r"start vLLM with --enable-return-routed-experts \(a preempted"),
        ({"routed_experts": None, "finish_reason": "abort"}, "the engine aborted the request"),
        (
            {"routed_experts": b64(sample().ids.tobytes())},
            "raw int32, as SGLang sends, has no shape",
        ),
        (
            {"routed_experts": npy_b64(sample().ids[:-1])},
            r"5 rows of routing: must be 6 \(3 prompt",
        ),
        ({"routed_experts": [[[1, 2]], [[1]]]}, "lists of unequal lengths"),
        ({"routed_experts": 7}, "is int: must be base64 text, lists of ids"),
        (
            {"routed_experts": npy_b64(sample().ids, "float32")},
            r"float32\[6, 4, 2\]: must be whole",
        ),
        ({"token_ids": [1, 2, -3, 4]}, "token_ids holds -3 at 2: must lie in"),
        ({"token_ids": "so"}, "token_ids is str: must be a list of token ids"),
    ],
)
def test_a_vllm_answer_that_cannot_be_is_refused(
    change: dict, message: str, tmp_path: Path
) -> None:
    answer = vllm_whole(sample())
    answer["choices"][0].update(change)
    path = save(tmp_path / "a.json", answer)
    with pytest.raises(TraceError, match=message) as caught:
        read(path, TOLD)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_preempted_request_of_vllm_021_is_refused() -> None:
    answer = vllm_split(sample())
    answer["choices"][0]["routed_experts"] = None
    with pytest.raises(TraceError, match=r"routed_experts is empty: must be 3 rows \(a preempted"):
        routed_of_vllm(answer)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"choices": [{"text": "so"}]}, "start vLLM with .*, or start SGLang with"),
        ({"id": 1}, "has id: must have meta_info .SGLang. or choices .vLLM."),
        ([], "no answer with routing in it"),
        (7, "is int: must be an answer"),
    ],
)
def test_what_is_no_answer_is_refused(value: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=message):
        read(save(tmp_path / "a.json", value), TOLD)


def test_what_raw_int32_needs_must_be_told(tmp_path: Path) -> None:
    path = save(tmp_path / "a.json", sglang_native(sample()))
    with pytest.raises(
        TraceError, match=r"does not tell the number of layers.*--num-hidden-layers"
    ):
        read(path, NOTHING)
    with pytest.raises(TraceError, match=r"does not tell top-k: give --top-k"):
        read(path, replace(NOTHING, num_hidden_layers=4))
    np.save(tmp_path / "a.npy", sample().ids)
    with pytest.raises(TraceError, match="does not tell its prompt tokens: give --prompt-tokens"):
        read(tmp_path / "a.npy", TOLD)
    with pytest.raises(TraceError, match=r"does not tell the number of experts"):
        read(path, replace(TOLD, num_experts=None))


def test_a_wrong_shape_that_divides_the_bytes_is_seen_by_the_rows(tmp_path: Path) -> None:
    path = save(tmp_path / "a.json", sglang_native(sample()))
    with pytest.raises(TraceError, match=r"12 rows of routing: must be 6"):
        read(path, replace(TOLD, num_hidden_layers=2))


def test_a_missing_pipeline_stage_is_refused(tmp_path: Path) -> None:
    made = sample()
    made.ids[:, 2] = 0
    with pytest.raises(TraceError, match="layer 2 has no expert in any token"):
        read(save(tmp_path / "a.json", vllm_whole(made)), TOLD)


def test_expert_zero_alone_of_top_1_is_not_taken_for_a_dense_layer(tmp_path: Path) -> None:
    made = sample()
    made.ids = made.ids[..., :1]
    told = replace(TOLD, top_k=1)
    with pytest.raises(TraceError, match=r"layer 0 is 0 in every token.*tell the MoE layers"):
        read(save(tmp_path / "a.json", vllm_whole(made)), told)
    trace = read(tmp_path / "a.json", replace(told, layer_indices=(1, 2, 3)))
    check_rows(trace, [made])


def test_a_file_that_is_cut_short_names_its_last_line(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", [vllm_whole(sample()), vllm_whole(sample())])
    path.write_text(path.read_text()[:-200])
    with pytest.raises(TraceError, match=r"line 2 is not JSON: .*cut short"):
        read(path, TOLD)
