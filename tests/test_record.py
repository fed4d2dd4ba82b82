"""The recorder against the models' own routers, on tiny random models of many architectures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="recording needs torch")
transformers = pytest.importorskip("transformers", reason="recording needs transformers")

from moe_models import ARCHITECTURES, build  # noqa: E402
from router_reference import Reference, assert_close, assert_same  # noqa: E402

from traces.record import Generation, RouterRecorder, record_generate  # noqa: E402
from traces.schema import (  # noqa: E402
    DECODE,
    GATE_COLUMNS,
    NO_EXPERT,
    PREFILL,
    Trace,
    validate,
)

PROMPTS = [[5, 6, 7, 8, 9, 30, 31], [3, 4], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]
SAMPLED = Generation(max_new_tokens=7, batch_size=3, temperature=1.0, eos=())
NOT_PADDING_EXACT = {"deepseek_v4"}  # its compressed attention sees the padding
NO_STATIC_CACHE = {
    "deepseek_v4",
    "jamba",
    "nemotron_h",
    "lfm2_moe",
}  # transformers refuses, or drifts


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def request(trace: Trace, number: int) -> Trace:
    return trace.take(np.flatnonzero(trace.request_id == number))


def assert_matches_model(model: Any, rows: Trace) -> None:
    """Hold one request's rows against an independent forward of its tokens."""
    reference = Reference(model, rows.token_id.tolist())
    for layer in range(rows.meta.num_layers):
        ids, weights = reference.routing(layer)
        np.testing.assert_array_equal(rows.expert_ids[:, layer], ids)
        assert_close(rows.expert_weights[:, layer], weights)
        assert_close(rows.router_logits[:, layer], reference.logits(layer))
        for distance, name in enumerate(GATE_COLUMNS, start=1):
            beyond = layer + distance >= rows.meta.num_layers
            early = (
                np.full_like(ids, NO_EXPERT) if beyond else reference.gate_ahead(layer, distance)
            )
            np.testing.assert_array_equal(getattr(rows, name)[:, layer], early, err_msg=name)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recorded_routing_is_what_the_model_computed(name: str) -> None:
    model = build(name)
    size = 1 if name in NOT_PADDING_EXACT else 3
    sampled = replace(SAMPLED, batch_size=size)
    trace = record_generate(model, PROMPTS, sampled, logits=True, gates_ahead=3)
    validate(trace, name)
    for number, prompt in enumerate(PROMPTS):
        rows = request(trace, number)
        assert len(rows) == len(prompt) + SAMPLED.max_new_tokens - 1
        assert rows.token_id[: len(prompt)].tolist() == prompt
        phases = [PREFILL] * len(prompt) + [DECODE] * (len(rows) - len(prompt))
        assert rows.phase.tolist() == phases
        assert_matches_model(model, rows)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_output_router_logits(name: str) -> None:
    model = build(name)
    places = {
        place
        for place, kind in enumerate(model._can_record_outputs or {})
        if kind == "router_logits"
    }
    if name in ("deepseek_v4", "jetmoe") or not places:
        pytest.skip("transformers does not return the logits of every MoE layer alone")
    with RouterRecorder(model, logits=True) as recorder, torch.no_grad():
        output = model.get_decoder()(torch.tensor([PROMPTS[2]]), output_router_logits=True)
        (record,) = recorder.take()
    expected = np.stack([logits.numpy() for logits in output.router_logits], axis=1)
    assert_close(record.router_logits, expected)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "llama4", "lfm2_moe"])
def test_greedy_tokens_are_those_of_the_bare_model(name: str) -> None:
    model = build(name)
    prompt = torch.tensor([PROMPTS[0]])
    mask = torch.ones_like(prompt)
    expected = model.generate(
        input_ids=prompt, attention_mask=mask, do_sample=False, max_new_tokens=9, pad_token_id=0
    )[0]
    trace = record_generate(model, [PROMPTS[0]], Generation(max_new_tokens=9))
    assert trace.token_id.tolist() == expected.tolist()[:-1]


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - NOT_PADDING_EXACT))
def test_left_padded_batch_equals_alone(name: str) -> None:
    model = build(name, seed=1)
    together = record_generate(model, PROMPTS, SAMPLED)
    alone = record_generate(model, PROMPTS, replace(SAMPLED, batch_size=1))
    assert_same(together, alone)
    assert any("padding" in note for note in together.meta.notes)
    assert not any("padding" in note for note in alone.meta.notes)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2", "gpt_oss", "minimax_m2"])
@pytest.mark.parametrize("chunk", [1, 5])
def test_prefill_in_chunks_equals_whole(name: str, chunk: int) -> None:
    model = build(name)
    whole = record_generate(model, PROMPTS[2:], replace(SAMPLED, batch_size=1))
    options = {"prefill_chunk_size": chunk}
    chunked = record_generate(model, PROMPTS[2:], replace(SAMPLED, batch_size=1, options=options))
    assert_same(whole, chunked)
    prefill = chunked.step[chunked.phase == PREFILL]
    assert prefill.tolist() == [position // chunk for position in range(len(PROMPTS[2]))]


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - NO_STATIC_CACHE))
def test_static_cache_equals_dynamic(name: str) -> None:
    model = build(name)
    dynamic = record_generate(model, PROMPTS, SAMPLED)
    static = record_generate(
        model, PROMPTS, replace(SAMPLED, options={"cache_implementation": "static"})
    )
    assert_same(dynamic, static)
    assert dynamic.meta.notes == static.meta.notes  # padding was seen as padding


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_experts_implementations_record_the_same(name: str) -> None:
    model = build(name)
    traces = []
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        traces.append(record_generate(model, PROMPTS, SAMPLED))
        assert implementation in traces[-1].meta.provenance.detail
    assert_same(traces[0], traces[1])
    assert_same(traces[0], traces[2])


def test_rejected_drafts_leave_no_rows() -> None:
    model = build("qwen3_moe", seed=3)
    looping = Generation(max_new_tokens=24, temperature=0.3, seed=5, eos=())
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8]]
    plain = record_generate(model, prompts, looping)
    drafted = record_generate(
        model, prompts, replace(looping, options={"prompt_lookup_num_tokens": 3})
    )
    assert_same(plain, drafted)
    assert any("rejected draft" in note for note in drafted.meta.notes)
    assert drafted.step.max() < plain.step.max()  # some drafts were accepted


def test_rows_after_the_end_token_are_dropped() -> None:
    model = build("mixtral", seed=2)
    endless = record_generate(model, PROMPTS, SAMPLED)
    first = request(endless, 0)
    end = int(first.token_id[len(PROMPTS[0]) + 2])  # the third new token ends request 0
    ended = record_generate(model, PROMPTS, replace(SAMPLED, eos=(end,)))
    tokens = request(ended, 0).token_id.tolist()
    assert tokens == first.token_id.tolist()[: len(tokens)]
    assert end not in tokens[len(PROMPTS[0]) :]
    assert len(tokens) <= len(PROMPTS[0]) + 2
    for number in (1, 2):
        whole, cut = request(endless, number), request(ended, number)
        assert_same(whole.take(slice(0, len(cut))), cut)
    assert any("ended sequence" in note for note in ended.meta.notes)
