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
from router_reference import Reference  # noqa: E402

from traces.record import (  # noqa: E402
    Annotation,
    Generation,
    RouterRecorder,
    record_batches,
    record_generate,
)
from traces.schema import DECODE, NO_EXPERT, PREFILL, Trace, TraceError, concat, validate  # noqa: E402
from traces.store import read_trace, write_trace  # noqa: E402

PROMPTS = [[5, 6, 7, 8, 9, 30, 31], [3, 4], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]
SAMPLED = Generation(max_new_tokens=7, batch_size=3, temperature=1.0, eos=())
NOT_PADDING_EXACT = {"deepseek_v4"}  # its compressed attention sees the padding
NO_STATIC_CACHE = {
    "deepseek_v4",
    "jamba",
    "nemotron_h",
    "lfm2_moe",
}  # transformers refuses, or drifts
COLUMNS = ("request_id", "position", "phase", "token_id", "expert_ids", "next_gate_ids")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def request(trace: Trace, number: int) -> Trace:
    return trace.take(np.flatnonzero(trace.request_id == number))


def assert_same(left: Trace, right: Trace) -> None:
    """Compare what was routed, not when (steps depend on batches and chunks)."""
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
    assert_close(left.expert_weights, right.expert_weights)


def assert_close(recorded: Any, expected: Any) -> None:
    recorded, expected = np.float32(recorded), np.float32(expected)
    np.testing.assert_allclose(recorded, expected, rtol=2e-3, atol=2e-3)


def assert_matches_model(model: Any, rows: Trace) -> None:
    """Hold one request's rows against an independent forward of its tokens."""
    reference = Reference(model, rows.token_id.tolist())
    for layer in range(rows.meta.num_layers):
        ids, weights = reference.routing(layer)
        np.testing.assert_array_equal(rows.expert_ids[:, layer], ids)
        assert_close(rows.expert_weights[:, layer], weights)
        assert_close(rows.router_logits[:, layer], reference.logits(layer))
        last = layer == rows.meta.num_layers - 1
        early = np.full_like(ids, NO_EXPERT) if last else reference.next_gate(layer)
        np.testing.assert_array_equal(rows.next_gate_ids[:, layer], early)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recorded_routing_is_what_the_model_computed(name: str) -> None:
    model = build(name)
    size = 1 if name in NOT_PADDING_EXACT else 3
    trace = record_generate(model, PROMPTS, replace(SAMPLED, batch_size=size), logits=True)
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


def test_sampling_depends_on_seed_and_request_alone() -> None:
    model = build("olmoe")
    base = record_generate(model, PROMPTS, SAMPLED)
    state = torch.get_rng_state()
    again = record_generate(model, PROMPTS, replace(SAMPLED, batch_size=2))
    other = record_generate(model, PROMPTS, replace(SAMPLED, seed=1))
    assert torch.equal(state, torch.get_rng_state())
    assert_same(base, again)
    assert base.token_id.tolist() != other.token_id.tolist()


def test_noise_samples_the_softmax() -> None:
    from traces.record import SeededNoise

    logits = torch.tensor([[1.0, 0.0, -1.0]])
    picks = [
        int(SeededNoise(0, 0.5, [number], [0])(torch.zeros(1, 4), logits).argmax())
        for number in range(4000)
    ]
    shares = np.bincount(picks, minlength=3) / len(picks)
    np.testing.assert_allclose(shares, torch.softmax(logits[0] / 0.5, 0), atol=0.02)


def hook_counts(model: Any) -> list[tuple[int, ...]]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs")
    names += ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
    return [tuple(len(getattr(module, name)) for name in names) for module in model.modules()]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4", "deepseek_v4"])
def test_detach_restores_the_model(name: str) -> None:
    model = build(name)
    inputs = torch.tensor([PROMPTS[2]])
    attributes = [sorted(vars(module)) for module in model.modules()]
    with torch.no_grad():
        before, counts = model(inputs).logits, hook_counts(model)
        with RouterRecorder(model, logits=True) as recorder:
            during = model(inputs).logits
            assert hook_counts(model) != counts
            assert len(recorder.take()) == 1
        after = model(inputs).logits
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    assert hook_counts(model) == counts
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert recorder.take() == []


def test_an_error_inside_detaches_and_forgets() -> None:
    model = build("mixtral")
    counts = hook_counts(model)
    recorder = RouterRecorder(model)
    with pytest.raises(RuntimeError, match="stop"), recorder:
        raise RuntimeError("stop")
    assert hook_counts(model) == counts
    with recorder, torch.no_grad():  # it can be used again
        with pytest.raises(TraceError, match="already attached"):
            recorder.attach()
        model(torch.tensor([PROMPTS[0]]))
        assert len(recorder.take()) == 1


def test_buffers_that_the_model_reuses_are_copied() -> None:
    """Ids, weights, logits, hidden states and tokens are overwritten before the decoder returns."""
    model, tokens = build("qwen2_moe"), torch.tensor([PROMPTS[2]])
    with RouterRecorder(model, logits=True) as recorder, torch.no_grad():
        model(tokens)
        (expected,) = recorder.take()

        def spoil(_module: Any, args: Any, output: Any) -> None:
            for tensor in (*args, *(output if isinstance(output, tuple) else ())):
                tensor.zero_()

        def spoil_tokens(_module: Any, args: Any, _output: Any) -> None:
            args[0].zero_()

        layers = model.model.layers
        hooks = [layers[1].mlp.experts.register_forward_hook(spoil)]
        hooks.append(model.model.embed_tokens.register_forward_hook(spoil_tokens))
        model(tokens)
        (record,) = recorder.take()
    assert record.token_id.tolist() == PROMPTS[2]
    for name in ("expert_ids", "expert_weights", "router_logits", "next_gate_ids"):
        theirs, ours = getattr(expected, name)[:, :2], getattr(record, name)[:, :2]
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


def test_header_describes_the_model() -> None:
    model = build("deepseek_v3")
    trace = record_generate(model, PROMPTS[:1], SAMPLED, name="toy", licence="MIT")
    meta = trace.meta
    assert (meta.num_layers, meta.num_experts, meta.top_k) == (2, 8, 2)
    assert meta.layer_indices == (1, 2)  # the first layer is dense
    assert (meta.scoring, meta.normalized, meta.weight_semantics) == ("sigmoid", True, "applied")
    assert (meta.hidden_size, meta.intermediate_size, meta.num_shared_experts) == (32, 16, 1)
    assert meta.expert_bytes == (3 * 32 * 16 * 4,) * 2
    assert (meta.provenance.kind, meta.provenance.source) == ("recorded", "toy")
    for word in (transformers.__version__, torch.__version__, "float32", "cpu"):
        assert word in meta.provenance.detail
    assert meta.sampling["temperature"] == 1.0
    assert (meta.seed, meta.licence, meta.sorted_by_weight) == (0, "MIT", True)


@pytest.mark.parametrize(
    ("name", "scoring", "normalized", "shared"),
    [
        ("mixtral", "softmax", True, 0),
        ("olmoe", "softmax", False, 0),
        ("qwen2_moe", "softmax", False, 1),
        ("deepseek_v2", "softmax", False, 1),
        ("gpt_oss", "softmax", True, 0),
        ("granitemoe", "softmax", True, 0),
        ("glm4_moe", "sigmoid", True, 1),
        ("llama4", "sigmoid", False, 1),
        ("ernie4_5_moe", "softmax", True, 2),
        ("longcat", "softmax", False, 0),
        ("deepseek_v4", "sqrtsoftplus", True, 1),
        ("phimoe", "unknown", False, 0),
    ],
)
def test_scoring_is_measured(name: str, scoring: str, normalized: bool, shared: int) -> None:
    meta = record_generate(build(name), PROMPTS[2:], Generation(max_new_tokens=1)).meta
    assert (meta.scoring, meta.normalized) == (scoring, normalized)
    assert meta.num_shared_experts == shared


def test_text_and_stages() -> None:
    pieces = {5: "", 6: "a", 7: "bc", 8: "D", 9: "e"}  # 5 is a token without text

    def stages(text: str) -> list[str]:
        return ["upper" if "D" in text[: place + 1] else "lower" for place in range(len(text))]

    annotation = Annotation(lambda token: pieces.get(token, "x"), stages, ("lower", "upper"))
    trace = record_generate(build("mixtral"), [[5, 6, 7, 8, 9]], SAMPLED, annotation=annotation)
    assert trace.text[:5] == ["", "a", "bc", "D", "e"]
    assert trace.stage.tolist() == [0, 0, 0] + [1] * (len(trace) - 3)
    assert trace.meta.stage_names == ("lower", "upper")
    short = Annotation(annotation.piece, lambda _text: [], ("lower",))
    with pytest.raises(TraceError, match="one a character"):
        record_generate(build("mixtral"), [[6]], SAMPLED, annotation=short)
    wrong = replace(annotation, stage_names=("lower",))
    with pytest.raises(TraceError, match="'upper' is not one of lower"):
        record_generate(build("mixtral"), [[8]], SAMPLED, annotation=wrong)


def test_file_is_deterministic_and_streams(tmp_path: Any) -> None:
    model, generation = build("mixtral"), replace(SAMPLED, batch_size=1)
    paths = [tmp_path / name for name in ("a.parquet", "b.parquet")]
    for path in paths:
        write_trace(path, record_generate(model, PROMPTS, generation, logits=True))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    pieces = list(record_batches(model, PROMPTS, generation, logits=True))
    assert [piece.num_requests for piece in pieces] == [1, 1, 1]
    assert_same(concat(pieces), read_trace(paths[0]))
    assert np.unique(np.diff(concat(pieces).step)).tolist() == [0, 1]  # steps run on


def test_progress_is_reported() -> None:
    seen: list[tuple[int, int]] = []
    generation = replace(SAMPLED, batch_size=2)
    record_generate(build("mixtral"), PROMPTS, generation, on_batch=lambda *done: seen.append(done))
    assert seen == [(2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"num_beams": 4}}, "num_beams is 4: must be 1"),
        ({"options": {"num_return_sequences": 2}}, "num_return_sequences is 2"),
        ({"options": {"do_sample": True}}, "do_sample"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_generation_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        replace(SAMPLED, **change)


def test_record_refuses() -> None:
    model = build("mixtral")
    with pytest.raises(TraceError, match="prompts are empty"):
        record_generate(model, [])
    with pytest.raises(TraceError, match="prompt 1 has 0 tokens"):
        record_generate(model, [[3], []], SAMPLED)
    with pytest.raises(TraceError, match="prompt 0 has ids outside"):
        record_generate(model, [[999]], SAMPLED)
    with pytest.raises(TraceError, match="128 positions"):
        record_generate(model, [[3]], Generation(max_new_tokens=128))
    with pytest.raises(TraceError, match=r"training mode: call model\.eval"):
        record_generate(model.train(), PROMPTS, SAMPLED)
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(TraceError, match="no MoE block"):
        RouterRecorder(transformers.LlamaForCausalLM(config))


def test_bypassed_experts_and_packed_batches_are_refused() -> None:
    model = build("mixtral")
    block, tokens = model.model.layers[1].mlp, torch.tensor([PROMPTS[0]])
    with RouterRecorder(model), torch.no_grad():
        with pytest.raises(TraceError, match="packed sequences"):
            model(tokens, cu_seq_lens_q=torch.tensor([0, 7]))
        block.forward = lambda hidden: hidden  # as a fused kernel would
        with pytest.raises(TraceError, match=r"layers\.1\.mlp: its experts were not called"):
            model(tokens)
