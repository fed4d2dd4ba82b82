"""Servers that answer otherwise than any engine documents: one line says what came."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from stub_engine import NUM_EXPERTS, TOP_K, Stub

from traces.importers.told import Told
from traces.record_http import HttpClient
from traces.record_http_apis import Asked
from traces.record_http_run import record_http
from traces.schema import Trace, TraceError

TOLD = Told(num_experts=NUM_EXPERTS, native_top_k=TOP_K, num_hidden_layers=4)


@contextmanager
def served(answers: dict[str, tuple[int, dict[str, str], bytes]], engine: str) -> Iterator[str]:
    """A stub engine, some pages of which ("GET /path") answer a status, headers and bytes of their own."""
    stub = Stub(engine)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(stub.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(stub.post(self.path, body))

        def _answer(self, good: tuple[int, Any]) -> None:
            plain = good[0], {}, json.dumps(good[1]).encode()
            status, headers, content = answers.get(f"{self.command} {self.path}", plain)
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(content))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def record(url: str, engine: str, kept: Path) -> Trace:
    client = HttpClient(url, timeout_s=5, retries=0)
    return record_http(client, [[5, 6], [7]], Asked(engine=engine, max_new_tokens=4), TOLD, kept)


COMPLETIONS = "POST /v1/completions"


@pytest.mark.parametrize(
    ("page", "status", "headers", "content", "message"),
    [
        (COMPLETIONS, 200, {}, b"<html>hello", "11 bytes is not JSON: '<html>hello'"),
        (COMPLETIONS, 200, {}, b"[" * 100_000, "100000 bytes is not JSON: '[[["),
        (COMPLETIONS, 200, {"Content-Length": str(10**13)}, b"{}", "does not fit into memory"),
        (COMPLETIONS, 200, {}, b"null", "prompt 0: the answer is NoneType: must be an object"),
        (COMPLETIONS, 200, {}, b'{"choices": 5}', "no choices in it: must be an answer of vLLM"),
        (
            *(COMPLETIONS, 200, {}, b'{"error": {"message": "not\\nloaded"}}'),
            "prompt 0: the server answers with an error: not loaded",
        ),
        (
            *(COMPLETIONS, 307, {"Location": "http://there/v1"}, b""),
            "HTTP 307: is to be found at http://there/v1",
        ),
        (COMPLETIONS, 500, {}, b"[" * 100_000, "HTTP 500: [[["),
        (COMPLETIONS, 200, {"Content-Length": "9" * 30}, b"{}", "does not fit into memory"),
        (COMPLETIONS, 307, {"Location": "h" * 60_000}, b"", "is to be found at hhh"),
        (COMPLETIONS, 503, {"Retry-After": "²"}, b"later", "HTTP 503: later"),
        ("GET /v1/models", 200, {}, b"<html>", "/v1/models: the answer of 6 bytes is not JSON"),
    ],
)
def test_an_odd_answer_is_one_line(
    page: str, status: int, headers: dict[str, str], content: bytes, message: str, tmp_path: Path
) -> None:
    with (
        served({page: (status, headers, content)}, "vllm") as url,
        pytest.raises(TraceError) as caught,
    ):
        record(url, "vllm", tmp_path / "kept")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("HTTP/1.1 404 " + "r" * 60_000, "HTTP 404: rrr"),
        ("HTTP/1.1 503 " + "r" * 60_000, "HTTP 503: rrr"),
        ("HTTP/1.1 " + "9" * 60_000, "999"),
        ("junk" * 10_000, "junkjunk"),
    ],
)
def test_a_long_status_is_cut(line: str, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(f"{line}\r\nContent-Length: 0\r\n\r\n".encode())

        thread = threading.Thread(target=answer)
        thread.start()
        client = HttpClient(f"http://127.0.0.1:{server.getsockname()[1]}", retries=0)
        with pytest.raises(TraceError, match=message) as caught:
            client.get("/v1/models")
        thread.join()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("content", [b'{"data": 5}', b'{"data": "ab"}', b'{"data": [5]}', b"5"])
def test_a_server_that_does_not_name_its_model(content: bytes, tmp_path: Path) -> None:
    with served({"GET /v1/models": (200, {}, content)}, "vllm") as url:
        assert len(record(url, "vllm", tmp_path / "kept")) == 9


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_experts": NUM_EXPERTS // 2}, "is expert 1[0-9]: must lie in 0..7"),
        ({"num_experts": None}, "does not tell the number of experts: give --num-experts"),
        ({"layer_indices": (0, 1)}, "layer 2 has experts: must be one of the MoE layers"),
        ({"layer_indices": (1, 2, 3, 4)}, "layer 0 has no expert in any token"),
    ],
)
def test_a_wrong_model_is_told_of_after_the_first_answer(
    wrong: dict[str, Any], message: str, engine: str, tmp_path: Path
) -> None:
    with Stub(engine) as stub:
        client = HttpClient(stub.url, timeout_s=5, retries=0)
        asked = Asked(engine=engine, max_new_tokens=4)
        with pytest.raises(TraceError, match=message):
            record_http(client, [[5, 6], [7]], asked, replace(TOLD, **wrong), tmp_path / "kept")
        assert len(stub.generations) == 1


def test_bytes_cut_by_a_wrong_shape_are_told_of_after_the_first_answer(tmp_path: Path) -> None:
    with Stub("sglang") as stub:
        client = HttpClient(stub.url, timeout_s=5, retries=0)
        told = replace(TOLD, num_hidden_layers=3, native_top_k=4)
        with pytest.raises(TraceError, match="prompt 0: a layer has an expert twice for one token"):
            record_http(client, [[5, 6, 7, 8, 9]], Asked(engine="sglang"), told, tmp_path / "kept")
        assert len(stub.generations) == 1


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "http://", "http://[::1", "http://a:99999", "ftp://a", "http://me:key@a"],
)
def test_what_is_no_url_of_a_server(url: str) -> None:
    with pytest.raises(TraceError, match="must be http://host:port, or https"):
        HttpClient(url)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), 1e12])
def test_times_that_no_socket_waits(timeout_s: float) -> None:
    with pytest.raises(TraceError, match=r"timeout_s is .*: must be > 0"):
        HttpClient("http://a", timeout_s=timeout_s)


def test_a_url_as_openai_clients_want_it(tmp_path: Path) -> None:
    with Stub("vllm") as stub, pytest.raises(TraceError, match="--url goes without /v1"):
        record(f"{stub.url}/v1", "vllm", tmp_path / "kept")


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    with served({"POST /detokenize": (200, {}, b'{"prompt": "a\\ud83d"}')}, "vllm") as url:
        assert record(url, "vllm", tmp_path / "kept").text == ["a?"] * 9


def test_log_probabilities_of_another_form_name_no_tokens(tmp_path: Path) -> None:
    meta = Stub("sglang").post(
        "/generate",
        {"input_ids": [5, 6], "return_routed_experts": True, "sampling_params": SAMPLING},
    )[1]["meta_info"]
    meta["output_token_logprobs"] = [5] * meta["completion_tokens"]
    answer = json.dumps({"meta_info": meta}).encode()
    client_prompts = [[5, 6]]
    with served({"POST /generate": (200, {}, answer)}, "sglang") as url:
        client = HttpClient(url, timeout_s=5, retries=0)
        asked = Asked(engine="sglang", max_new_tokens=4)
        trace = record_http(client, client_prompts, asked, TOLD, tmp_path / "kept")
    assert trace.token_id.tolist() == [5, 6, -1, -1, -1]


SAMPLING = {"max_new_tokens": 4}
