"""Recording running engines over HTTP, against a stub that answers as they document it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stub_engine import MOE_LAYERS, NUM_EXPERTS, TOP_K, Stub, ids_of_text, routing, sequence

from traces.importers.told import Told
from traces.record_http import HttpClient, reason_in
from traces.record_http_apis import Asked, Prompt
from traces.record_http_kept import forget
from traces.record_http_run import record_http, title_of
from traces.schema import DECODE, PREFILL, Trace, TraceError, validate

TOLD = Told(
    model="stub",
    num_experts=NUM_EXPERTS,
    native_top_k=TOP_K,
    num_hidden_layers=4,
    layer_indices=MOE_LAYERS,
)
TOKENS: list[Prompt] = [[5, 6, 7, 8], [9], [40, 41, 42, 43, 44, 45]]
TEXTS: list[Prompt] = ["to be", "or", "not to be"]
CHATS: list[Prompt] = [[{"role": "user", "content": text}] for text in TEXTS]
NEW_TOKENS = 6


def asked(engine: str, interface: str | None = None, **changes: Any) -> Asked:
    return Asked(engine=engine, interface=interface, max_new_tokens=NEW_TOKENS, **changes)


def record(
    stub: Stub, prompts: list[Prompt], kept: Path, interface: str | None = None, **changes: Any
) -> Trace:
    client = HttpClient(stub.url, timeout_s=5, retries=2, pause_s=0)
    said = changes.pop("asked", asked(stub.engine, interface))
    told = changes.pop("told", TOLD)
    trace = record_http(client, prompts, said, told, kept, **{"concurrency": 2, **changes})
    validate(trace, "http")
    return trace


def plain_ids(prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return ids_of_text(prompt)
    if isinstance(prompt[0], dict):
        return ids_of_text(prompt[0]["content"])
    return prompt


def assert_is_what_the_engine_routed(trace: Trace, prompts: list[Prompt]) -> None:
    assert trace.num_requests == len(prompts)
    assert trace.meta.layer_indices == MOE_LAYERS, "the dense layer, zeros, is no layer of a trace"
    for number, prompt in enumerate(prompts):
        mine = trace.request_id == number
        ids = plain_ids(prompt)
        tokens = sequence(ids, NEW_TOKENS)
        expected = routing(tokens)[:, list(MOE_LAYERS)]
        np.testing.assert_array_equal(trace.expert_ids[mine], expected)
        assert len(expected) == len(ids) + NEW_TOKENS - 1, "the last token was never processed"
        phases = [PREFILL] * len(ids) + [DECODE] * (NEW_TOKENS - 1)
        assert trace.phase[mine].tolist() == phases
        assert trace.position[mine].tolist() == list(range(len(expected)))
        if trace.token_id is not None and trace.token_id[mine][0] >= 0:
            assert trace.token_id[mine].tolist() == tokens[:-1]


@pytest.mark.parametrize(
    ("engine", "interface", "prompts", "has_text"),
    [
        ("vllm", "completions", TOKENS, True),
        ("vllm", "completions", TEXTS, True),
        ("vllm", "tokens", TOKENS, True),
        ("vllm", "chat", CHATS, True),
        ("vllm", "chat", TEXTS, True),
        ("sglang", "native", TOKENS, True),
        ("sglang", "native", TEXTS, True),
        ("sglang", "completions", TEXTS, False),  # nothing names the token ids
        ("sglang", "chat", CHATS, False),
    ],
)
def test_every_interface(
    engine: str, interface: str, prompts: list[Prompt], has_text: bool, tmp_path: Path
) -> None:
    with Stub(engine) as stub:
        trace = record(stub, prompts, tmp_path / "kept", interface)
    assert_is_what_the_engine_routed(trace, prompts)
    assert (trace.text is not None) == has_text
    if has_text:
        assert trace.text == [f"<{token}>" for token in trace.token_id]
    meta = trace.meta
    assert (meta.model, meta.num_experts, meta.top_k) == ("stub", NUM_EXPERTS, TOP_K)
    assert (meta.provenance.kind, meta.provenance.source) == ("recorded", "stub-moe")
    assert "9.9" in meta.provenance.detail
    assert meta.sampling["max_new_tokens"] == NEW_TOKENS
    assert stub.url.split(":")[-1] not in meta.to_json(), "the header names no machine"
    assert any("steps are derived" in note for note in meta.notes)


def test_the_split_answers_of_vllm_0_21(tmp_path: Path) -> None:
    with Stub("vllm", split=True) as stub:
        trace = record(stub, TOKENS, tmp_path / "kept")
    assert_is_what_the_engine_routed(trace, TOKENS)


def test_what_is_asked_is_what_the_engines_document(tmp_path: Path) -> None:
    with Stub("sglang") as stub:
        record(stub, TEXTS[:1], tmp_path / "a", asked=asked("sglang", seed=3, extra={"top_p": 0.9}))
    assert [body["sampling_params"]["max_new_tokens"] for body in stub.generations] == [2, 6]
    assert stub.generations[1] == {
        "text": "to be",
        "stream": False,
        "sampling_params": {
            "max_new_tokens": 6,
            "temperature": 0.0,
            "sampling_seed": 3,
            "top_p": 0.9,
        },
        "return_routed_experts": True,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    with Stub("vllm") as stub:
        record(stub, TOKENS[:1], tmp_path / "b", asked=asked("vllm", seed=3, extra={"top_p": 0.9}))
    assert stub.generations[1] == {
        "model": "stub-moe",
        "prompt": TOKENS[0],
        "stream": False,
        "max_tokens": 6,
        "temperature": 0.0,
        "seed": 3,
        "top_p": 0.9,
        "return_token_ids": True,
    }


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_flag_that_is_off_shows_at_the_first_short_request(engine: str, tmp_path: Path) -> None:
    with Stub(engine, flag=False) as stub, pytest.raises(TraceError) as caught:
        record(stub, TOKENS, tmp_path / "kept")
    assert "--enable-return-routed-experts" in str(caught.value)
    assert len(stub.generations) == 1, "no second request, and none of full length"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "fault",
    ["http 503", "http 429", "drop", "cut", "garbage", "abort", "no routing", "short"],
)
def test_what_passes_is_asked_for_again(fault: str, engine: str, tmp_path: Path) -> None:
    with Stub(engine, faults=deque([None, fault, None, fault])) as stub:
        trace = record(stub, TOKENS, tmp_path / "kept")
    assert_is_what_the_engine_routed(trace, TOKENS)
    assert len(stub.generations) == 1 + len(TOKENS) + 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("http 503", "HTTP 503: not now (3 attempts)"),
        ("http 400", "HTTP 400: not now"),
        ("cut", "the answer broke off after"),
        ("garbage", "is not JSON: '<html>' (3 attempts)"),
        ("drop", "(3 attempts)"),
        ("abort", "aborted the request"),
        ("short", "2 rows of routing: must be 6"),
    ],
)
def test_what_does_not_pass_is_one_line_and_keeps_the_rest(
    fault: str, message: str, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    with Stub("sglang", faults=deque([None, None, *[fault] * 3])) as stub:
        with pytest.raises(TraceError) as caught:
            record(stub, TOKENS, kept, concurrency=1)
        assert message in str(caught.value)
        assert "prompt 1" in str(caught.value)
        assert "\n" not in str(caught.value)
        stub.faults.clear()
        before = len(stub.generations)
        trace = record(stub, TOKENS, kept)
    assert_is_what_the_engine_routed(trace, TOKENS)
    assert len(stub.generations) == before + 2, "the first prompt was kept, and no probe is needed"


def test_a_finished_run_is_not_asked_again_and_another_is_refused(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with Stub("vllm") as stub:
        first = record(stub, TOKENS, kept)
        count = len(stub.generations)
        rows: list[int] = []
        second = record(stub, TOKENS, kept, on_request=rows.append)
        assert len(stub.generations) == count
        assert sum(rows) == len(second)
        np.testing.assert_array_equal(first.expert_ids, second.expert_ids)
        assert first.meta == second.meta
        with pytest.raises(TraceError, match=r"was begun with temperature 0.0, not 0.5"):
            record(stub, TOKENS, kept, asked=asked("vllm", temperature=0.5))
        with pytest.raises(TraceError, match=r"was begun with prompts '3, sha256 "):
            record(stub, TOKENS[:2], kept)
        whole = (kept / "1.npz").read_bytes()
        for torn in (b"torn", b"", whole[:-9], whole[: len(whole) // 2]):
            (kept / "1.npz").write_bytes(torn)
            with pytest.raises(TraceError, match=r"1\.npz: is damaged: delete it"):
                record(stub, TOKENS, kept)
    forget(kept)
    assert not kept.exists()


def test_requests_run_side_by_side_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    prompts: list[Prompt] = [[number + 1] * 3 for number in range(12)]
    with Stub("vllm", delay_s=0.03) as stub:
        trace = record(stub, prompts, tmp_path / "kept", concurrency=4)
    assert 2 <= stub.most_at_once <= 4
    assert trace.token_id[trace.position == 0].tolist() == list(range(1, 13))


def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with Stub("vllm", faults=deque(["slow"])) as stub:
        client = HttpClient(stub.url, timeout_s=0.1, retries=0)
        with pytest.raises(TraceError, match=r"no answer for 0\.1 s"):
            record_http(client, TOKENS, asked("vllm"), TOLD, tmp_path / "kept")
    with pytest.raises(TraceError, match=r"Connection refused \(2 attempts\)"):
        HttpClient(stub.url, timeout_s=1, retries=1, pause_s=0).get("/version")


def test_stopping_ends_what_is_under_way() -> None:
    with Stub("vllm", faults=deque(["slow"])) as stub:
        client = HttpClient(stub.url, timeout_s=60, retries=3, pause_s=60)
        caught: list[Exception] = []

        def ask() -> None:
            try:
                client.post("/v1/completions", {"prompt": [1], "max_tokens": 1})
            except TraceError as error:
                caught.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        while not stub.asked:
            time.sleep(0.01)
        client.stop()
        thread.join(timeout=20)
        assert not thread.is_alive()
        assert "was stopped" in str(caught[0])


def test_one_failure_ends_the_others(tmp_path: Path) -> None:
    with Stub("vllm", faults=deque([None, "slow", "http 400"])) as stub:
        client = HttpClient(stub.url, timeout_s=60, retries=2, pause_s=60)
        with pytest.raises(TraceError, match="HTTP 400: not now"):
            record_http(client, TOKENS, asked("vllm"), TOLD, tmp_path / "kept", concurrency=2)


def test_keys_and_bare_servers(tmp_path: Path) -> None:
    with Stub("vllm", key="secret", has_models=False, has_detokenize=False) as stub:
        with pytest.raises(TraceError, match="HTTP 401: Unauthorized"):
            record(stub, TOKENS, tmp_path / "kept")
        client = HttpClient(stub.url, key="secret", retries=0)
        trace = record_http(client, TOKENS, asked("vllm"), TOLD, tmp_path / "kept")
        assert "secret" not in repr(client)
    assert trace.text is None
    assert any("no text" in note for note in trace.meta.notes)
    assert "model" not in stub.generations[0]
    assert trace.meta.provenance.source == "stub"
    assert_is_what_the_engine_routed(trace, TOKENS)


def test_another_engine_has_not_the_page(tmp_path: Path) -> None:
    with Stub("vllm") as stub, pytest.raises(TraceError, match="is it a SGLang server"):
        record(stub, TOKENS, tmp_path / "a", asked=asked("sglang"))
    with Stub("sglang") as stub, pytest.raises(TraceError, match="SCALE_OUT_ENDPOINTS=1"):
        record(stub, TOKENS, tmp_path / "b", asked=asked("vllm", "tokens"))


def test_a_header_names_a_model_and_no_folder_of_the_server() -> None:
    assert title_of("/data/models/qwen3") == "qwen3"
    assert title_of("Qwen/Qwen3-30B-A3B") == "Qwen/Qwen3-30B-A3B"
    assert title_of(None) is None


def test_cached_prompt_tokens_are_noted(tmp_path: Path) -> None:
    with Stub("sglang") as stub:
        trace = record(stub, TOKENS, tmp_path / "kept")
    assert any(
        note.startswith("3 prompt tokens came from the engine's") for note in trace.meta.notes
    )


@pytest.mark.parametrize(
    ("engine", "interface", "prompts", "told", "message"),
    [
        ("vllm", "completions", [], TOLD, "prompts are empty"),
        ("vllm", "completions", [[]], TOLD, "prompt 0 is empty"),
        ("vllm", "tokens", TEXTS, TOLD, "prompt 0 is text: vllm's tokens takes tokens"),
        ("sglang", "native", CHATS, TOLD, "prompt 0 is messages: sglang's native takes text or"),
        ("sglang", "native", TEXTS, Told(top_k=3), "num_hidden_layers is not known: SGLang sends"),
        ("vllm", "completions", TOKENS, Told(), "does not tell the number of experts"),
        ("vllm", "completions", TOKENS, Told(num_experts=9), "must lie in 0..8"),
    ],
)
def test_refusals(
    engine: str,
    interface: str,
    prompts: list[Prompt],
    told: Told,
    message: str,
    tmp_path: Path,
) -> None:
    with Stub(engine) as stub, pytest.raises(TraceError) as caught:
        record(stub, prompts, tmp_path / "kept", interface, told=told)
    assert message in str(caught.value)


def test_a_wrong_shape_for_raw_bytes_is_found_by_the_token_count(tmp_path: Path) -> None:
    told = replace(TOLD, num_hidden_layers=2, layer_indices=None)
    with Stub("sglang") as stub, pytest.raises(TraceError, match="10 rows of routing: must be 5"):
        record(stub, TOKENS, tmp_path / "kept", told=told)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "vlm"}, "engine is 'vlm': must be one of sglang, vllm; did you mean 'vllm'"),
        ({"interface": "native"}, "interface of vllm is 'native': must be one of completions"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"extra": {"n": 2}}, "'n': the recorder sets it itself"),
    ],
)
def test_asked_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        replace(asked("vllm"), **changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:x"])
def test_urls(url: str) -> None:
    with pytest.raises(TraceError, match="must be http://host:port"):
        HttpClient(url)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"error": {"message": "too\\nlong", "code": 400}}', "too long"),
        (b'{"object": "error", "message": "bad"}', "bad"),
        (
            b'{"detail": [{"loc": ["body"], "msg": "missing"}]}',
            '[{"loc": ["body"], "msg": "missing"}]',
        ),
        (b"Internal Server Error", "Internal Server Error"),
        (b"", ""),
    ],
)
def test_reasons_of_servers(content: bytes, reason: str) -> None:
    assert reason_in(content) == reason


def test_the_clients_load_no_torch() -> None:
    check = "import sys, traces.record_http_run; print({'torch', 'requests'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
