"""Generating while recording: sampling, the header, text and stages, files, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="recording needs torch")
transformers = pytest.importorskip("transformers", reason="recording needs transformers")

from moe_models import build  # noqa: E402
from router_reference import assert_same  # noqa: E402

from traces.record import (  # noqa: E402
    Annotation,
    Generation,
    RouterRecorder,
    SeededNoise,
    record_batches,
    record_generate,
)
from traces.schema import TraceError, concat  # noqa: E402
from traces.store import read_trace, write_trace  # noqa: E402

PROMPTS = [[5, 6, 7, 8, 9, 30, 31], [3, 4], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]
SAMPLED = Generation(max_new_tokens=7, batch_size=3, temperature=1.0, eos=())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    picks = [
        int(SeededNoise(0, 0.5, [number], [0])(torch.zeros(1, 4), logits).argmax())
        for number in range(4000)
    ]
    shares = np.bincount(picks, minlength=3) / len(picks)
    np.testing.assert_allclose(shares, torch.softmax(logits[0] / 0.5, 0), atol=0.02)


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
    with pytest.raises(TraceError, match="max_new_tokens is 128: must be < 128"):
        record_generate(model, [[3]], Generation(max_new_tokens=128))
    with pytest.raises(TraceError, match="prompt 0 has 2 tokens: must be 1 to 1"):
        record_generate(model, [[3, 4]], Generation(max_new_tokens=127))
    with pytest.raises(TraceError, match=r"training mode: call model\.eval"):
        record_generate(model.train(), PROMPTS, SAMPLED)
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(TraceError, match="no MoE block"):
        RouterRecorder(transformers.LlamaForCausalLM(config))
