"""Recording continuous batching: the rows of packed steps against plain generation."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="recording needs torch")
transformers = pytest.importorskip("transformers", reason="recording needs transformers")

from moe_models import build  # noqa: E402
from router_reference import assert_close, assert_same  # noqa: E402

from traces.record import (  # noqa: E402
    Annotation,
    DroppedRows,
    Generation,
    RouterRecorder,
    record_generate,
)
from traces.record_calls import Segment, owners  # noqa: E402
from traces.record_continuous import (  # noqa: E402
    Scheduling,
    record_continuous,
    scheduled,
)
from traces.schema import DECODE, PREFILL, Trace, TraceError, concat, validate  # noqa: E402
from traces.store import read_trace, write_trace  # noqa: E402

PROMPTS = [
    [5, 6, 7, 8, 9, 30, 31],
    [3, 4],
    [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20],
    [40, 41, 42],
    [50],
]
SAMPLED = Generation(max_new_tokens=7, batch_size=3, temperature=1.0, eos=())
PACKED = Scheduling(max_batch_tokens=8, page_tokens=4)
CHECKED = ["mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "jetmoe"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    """Keep torch's modules out of the full collections that the engine asks for when it stops."""
    gc.freeze()
    yield
    gc.unfreeze()


def recorded(model: Any, generation: Generation = SAMPLED, **options: Any) -> Trace:
    options = {"scheduling": PACKED, **options}
    trace = concat(list(record_continuous(model, PROMPTS, generation, **options)))
    validate(trace, "continuous")
    return trace


@cache
def usual() -> Trace:
    """What ``recorded`` gives of the plainest model: several tests look at it."""
    return recorded(build("mixtral"))


def by_request(trace: Trace) -> Trace:
    return trace.take(np.lexsort((trace.position, trace.request_id)))


@pytest.mark.parametrize("name", CHECKED)
def test_the_rows_are_those_of_plain_generation(name: str) -> None:
    model = build(name)
    packed = by_request(recorded(model, logits=True, gates_ahead=3))
    plain = record_generate(
        model, PROMPTS, replace(SAMPLED, batch_size=1), logits=True, gates_ahead=3
    )
    assert_same(packed, plain)
    assert_close(packed.router_logits, plain.router_logits)


def test_greedy_tokens_are_those_of_the_bare_model() -> None:
    model = build("qwen3_moe")
    trace = recorded(model, replace(SAMPLED, temperature=0.0, max_new_tokens=9))
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        said = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=9,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert trace.token_id[trace.request_id == number].tolist() == said[0].tolist()[:-1]


def test_a_batch_of_more_than_all_requests_takes_no_memory_for_the_others() -> None:
    model = build("mixtral")
    trace = recorded(model, replace(SAMPLED, batch_size=10**8, max_new_tokens=2))
    assert_same(trace, recorded(model, replace(SAMPLED, batch_size=len(PROMPTS), max_new_tokens=2)))


def test_steps_are_shared_as_the_engine_packed_them() -> None:
    trace = usual()
    assert (np.diff(trace.step) >= 0).all(), "rows stand in the order of the steps"
    assert np.unique(trace.step).tolist() == list(range(trace.step[-1] + 1))
    first = trace.step == 0
    assert trace.request_id[first].tolist() == [0] * 7 + [1], "a prompt is cut where a step is full"
    assert trace.position[first].tolist() == [*range(7), 0]
    tokens = np.bincount(trace.step)
    assert tokens.max() == PACKED.max_batch_tokens
    for step in np.unique(trace.step):
        assert len({*trace.request_id[trace.step == step]}) <= SAMPLED.batch_size
    mixed = {
        int(step)
        for step in np.unique(trace.step)
        if {*trace.phase[trace.step == step].tolist()} == {PREFILL, DECODE}
    }
    assert mixed, "prompts run beside decoding"
    for number, prompt in enumerate(PROMPTS):
        mine = trace.request_id == number
        assert (trace.phase[mine] == PREFILL).sum() == len(prompt)
        decoded = trace.step[mine & (trace.phase == DECODE)]
        assert (np.diff(decoded) == 1).all(), "a token a step"


def test_the_scheduler_is_the_users() -> None:
    first = recorded(build("mixtral"), scheduling=replace(PACKED, scheduler="prefill_first"))
    other = usual()
    split = first.step == 2  # the third prompt's second half, and two that decode
    assert first.request_id[split].tolist() == [2] * 5 + [0, 1]
    assert other.request_id[other.step == 2].tolist() == [0, 1] + [2] * 5
    assert first.meta.sampling["continuous"]["scheduler"] == "prefill_first"


def test_a_request_that_was_given_up_keeps_its_first_visit() -> None:
    model, dropped = build("mixtral"), DroppedRows()
    generation = replace(SAMPLED, max_new_tokens=20)
    small = replace(PACKED, cache_tokens=64)
    trace = recorded(model, generation, scheduling=small, dropped=dropped)
    assert dropped.recomputed > 0
    assert any("recomputed" in note for note in dropped.notes())
    assert_same(by_request(trace), by_request(recorded(model, generation)))
    for number, prompt in enumerate(PROMPTS):
        steps = trace.step[trace.request_id == number][len(prompt) :]
        assert (np.diff(steps) >= 1).all(), "no decoded token was taken for a prompt's"


def test_equal_runs_give_equal_files_and_stream(tmp_path: Any) -> None:
    model = build("mixtral")
    paths = [tmp_path / name for name in ("a.parquet", "b.parquet")]
    for path, trace in zip(paths, (usual(), recorded(model)), strict=True):
        write_trace(path, trace)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    heard: list[int] = []
    pieces = list(record_continuous(model, PROMPTS, SAMPLED, PACKED, on_request=heard.append))
    assert sorted(heard) == sorted(len(prompt) + 7 - 1 for prompt in PROMPTS)
    assert len(pieces) > 1
    assert_same(concat(pieces), read_trace(paths[0]))


def test_text_and_stages_are_those_of_whole_requests() -> None:
    def stages(text: str) -> list[str]:
        return ["late" if place > 20 else "early" for place in range(len(text))]

    annotation = Annotation(lambda token: f"<{token}>", stages, ("early", "late"))
    model = build("mixtral")
    packed = by_request(recorded(model, annotation=annotation))
    plain = record_generate(model, PROMPTS, replace(SAMPLED, batch_size=1), annotation=annotation)
    assert packed.text == plain.text
    assert packed.stage.tolist() == plain.stage.tolist()
    assert {0, 1} == {*packed.stage.tolist()}


def test_an_end_token_ends_a_request() -> None:
    model = build("mixtral")
    endless = usual()
    mine = endless.token_id[endless.request_id == 0]
    end = int(mine[len(PROMPTS[0]) + 2])
    plain = record_generate(model, PROMPTS, replace(SAMPLED, batch_size=1, eos=(end,)))
    assert_same(by_request(recorded(model, replace(SAMPLED, eos=(end,)))), plain)
    assert len(plain) < len(endless)


@pytest.mark.parametrize("name", ["lfm2_moe", "deepseek_v2"])
def test_what_the_engine_cannot_pack_is_one_line(name: str, capfd: Any) -> None:
    model = build(name)
    attention, hooks = model.config._attn_implementation, len(model._forward_hooks)
    with pytest.raises(TraceError, match="continuous batching cannot run this model") as caught:
        recorded(model)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == "", "the engine's own traceback is not for the user"
    assert model.config._attn_implementation == attention
    assert len(model._forward_hooks) == hooks
    assert logging.getLogger("ContinuousBatchingLogger").level != logging.CRITICAL


def test_the_model_is_as_before_afterwards() -> None:
    model = build("gpt_oss")
    assert model.config._attn_implementation == "eager"
    run = record_continuous(model, PROMPTS, SAMPLED, PACKED)
    next(run)
    assert model.config._attn_implementation == "paged|eager"
    run.close()
    assert model.config._attn_implementation == "eager"
    assert not model._forward_hooks
    record_generate(model, PROMPTS[:1], SAMPLED)  # no hook of the packed run is left


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_tokens": 0}, "max_batch_tokens is 0: must be >= 1"),
        ({"page_tokens": 2}, "page_tokens is 2: must be >= 4"),
        ({"cache_tokens": 3}, "cache_tokens is 3: must hold a page"),
        ({"scheduler": "fiffo"}, "scheduler is 'fiffo': must be one of fifo, prefill_first; did"),
    ],
)
def test_scheduling_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        replace(PACKED, **options)


@pytest.mark.filterwarnings("ignore:Passing .repetition_penalty")
def test_refusals() -> None:
    model = build("mixtral")
    with pytest.raises(TraceError, match=r"options \(prompt_lookup_num_tokens\) are for generate"):
        recorded(model, replace(SAMPLED, options={"prompt_lookup_num_tokens": 3}))
    with pytest.raises(TraceError, match="prompts are empty"):
        list(record_continuous(model, [], SAMPLED))
    with pytest.raises(TraceError, match="continuous batching cannot run this model"):
        recorded(model, scheduling=replace(PACKED, cache_tokens=4))
    model.generation_config.repetition_penalty = 1.5
    with pytest.raises(TraceError, match="ask for RepetitionPenalty"):
        recorded(model)


def test_an_engine_of_the_users_own_can_be_watched() -> None:
    model = build("mixtral")
    config = transformers.GenerationConfig(do_sample=False, max_new_tokens=4, eos_token_id=-1)
    engine = transformers.ContinuousBatchingConfig(
        page_size=4, num_blocks=64, max_batch_tokens=8, use_async_batching=False
    )
    manager = model.init_continuous_batching(config, engine)
    with RouterRecorder(model, segments=partial(scheduled, manager)) as recorder:
        names = [manager.add_request(prompt) for prompt in PROMPTS]
        manager.start()
        results = {}
        while len(results) < len(PROMPTS):
            if (result := manager.get_result(timeout=1)) is not None:
                results[result.request_id] = result
        manager.stop()
        records = recorder.take()
    for number, name in enumerate(names):
        assert name == f"req_{number}"
        mine = [record.token_id[record.batch_row == number] for record in records]
        said = [*PROMPTS[number], *results[name].generated_tokens]
        assert np.concatenate(mine).tolist() == said[:-1]


def test_packed_rows_without_their_requests_are_refused() -> None:
    model = build("mixtral")
    packed = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "position_ids": torch.tensor([[0, 1, 0]]),
        "cu_seq_lens_q": torch.tensor([0, 2, 3], dtype=torch.int32),
    }
    with RouterRecorder(model), pytest.raises(TraceError, match="without their requests"):
        model(**packed)
    segments = [Segment(4, 1, 1, False), Segment(9, 2, 2, True)]
    with pytest.raises(TraceError, match=r"segments of \[2, 1\] tokens: must be \[1, 2\]"):
        owners(segments, np.array([0, 2, 3]))
    assert owners(segments, np.array([0, 1, 3, 3])).tolist() == [4, 9, 9]
