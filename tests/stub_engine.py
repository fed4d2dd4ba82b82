"""A server that answers as vLLM or SGLang document it, with a made-up model, and fails on demand.

The model's next token and its routing are a function of the tokens so far, so that a test knows them
without asking.
"""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import numpy as np

NUM_EXPERTS, TOP_K, VOCABULARY = 16, 3, 200
MOE_LAYERS = (1, 2, 3)  # of four: the first is dense
NUM_LAYERS = 4
Body = dict[str, Any]


def ids_of_text(text: str) -> list[int]:
    return [ord(letter) % VOCABULARY for letter in text]


def next_token(tokens: list[int]) -> int:
    return (7 * sum(tokens) + len(tokens)) % VOCABULARY


def sequence(prompt: list[int], new_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(next_token(tokens))
    return tokens


def routing(tokens: list[int]) -> np.ndarray:
    """Return int32 [tokens - 1, hidden layers, k]: the last token is never processed."""
    ids = np.zeros((len(tokens) - 1, NUM_LAYERS, TOP_K), dtype=np.int32)
    for row, token in enumerate(tokens[:-1]):
        for layer in MOE_LAYERS:
            draw = np.random.default_rng([token, row % 5, layer])
            ids[row, layer] = draw.permutation(NUM_EXPERTS)[:TOP_K]
    return ids


def raw(ids: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(ids, dtype="<i4").tobytes()).decode()


def npy(ids: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, ids.astype(np.uint8))
    return base64.b64encode(buffer.getvalue()).decode()


@dataclass
class Stub:
    """The server, as a context manager; ``url`` is where it listens.

    ``faults`` befall the requests for tokens in turn, None is a good answer; after them all are good.
    Known: "http 503" (any status), "drop", "cut", "garbage", "slow", "abort", "no routing", "short".
    """

    engine: str = "vllm"
    flag: bool = True  # --enable-return-routed-experts
    split: bool = False  # vLLM 0.21
    has_detokenize: bool = True
    has_models: bool = True
    key: str | None = None
    delay_s: float = 0.0
    faults: deque[str | None] = field(default_factory=deque)
    asked: list[tuple[str, Body]] = field(default_factory=list)
    most_at_once: int = 0

    def __enter__(self) -> Stub:
        self._lock = threading.Lock()
        self._now = 0
        self.release = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def generations(self) -> list[Body]:
        """The bodies of the requests for tokens, oldest first."""
        return [body for path, body in self.asked if "tokenize" not in path]

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models" and self.has_models:
            return 200, {"object": "list", "data": [{"id": "stub-moe", "max_model_len": 512}]}
        if path == ("/version" if self.engine == "vllm" else "/get_server_info"):
            return 200, {"version": "9.9"}
        return 404, {"detail": "Not Found"}

    def post(self, path: str, body: Body) -> tuple[int, Any]:
        if path == "/detokenize" and self.has_detokenize:
            key = "prompt" if self.engine == "vllm" else "text"
            return 200, {key: "".join(f"<{token}>" for token in body["tokens"])}
        answers = {
            ("vllm", "/v1/completions"): self._vllm,
            ("vllm", "/v1/chat/completions"): self._vllm,
            ("vllm", "/inference/v1/generate"): self._vllm,
            ("sglang", "/generate"): self._sglang,
            ("sglang", "/v1/completions"): self._sglang_openai,
            ("sglang", "/v1/chat/completions"): self._sglang_openai,
        }
        answer = answers.get((self.engine, path))
        return (404, {"detail": "Not Found"}) if answer is None else (200, answer(body))

    def answered(self, path: str, body: Body) -> tuple[int, Any]:
        """Answer a request for tokens, counting how many are under way."""
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            time.sleep(self.delay_s)
            return self.post(path, body)
        finally:
            with self._lock:
                self._now -= 1

    def _vllm(self, body: Body) -> Body:
        sampling = body.get("sampling_params", body)
        prompt = _prompt_ids(body)
        tokens = sequence(prompt, sampling["max_tokens"])
        choice: Body = {"index": 0, "finish_reason": "length", "text": "..."}
        answer: Body = {"choices": [choice], "model": body.get("model")}
        answer["usage"] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens) - len(prompt),
        }
        if "token_ids" in body or body.get("return_token_ids"):
            choice["token_ids"] = tokens[len(prompt) :]
            if "messages" in body or "prompt" in body:
                choice["prompt_token_ids"] = prompt
        ids = routing(tokens)
        if self.split:
            answer["prompt_routed_experts"] = ids[: len(prompt)].tolist() if self.flag else None
            choice["routed_experts"] = ids[len(prompt) :].tolist() if self.flag else None
        elif self.flag:
            choice["routed_experts"] = npy(ids)
        return answer

    def _sglang(self, body: Body) -> Body:
        prompt = body["input_ids"] if "input_ids" in body else ids_of_text(body["text"])
        tokens = sequence(prompt, body["sampling_params"]["max_new_tokens"])
        meta: Body = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens) - len(prompt),
            "cached_tokens": 1,
            "finish_reason": {"type": "length"},
        }
        if body.get("return_logprob"):
            entries = [[-0.5, token, None] for token in tokens]
            meta["output_token_logprobs"] = entries[len(prompt) :]
            if body.get("logprob_start_len") == 0:
                meta["input_token_logprobs"] = entries[: len(prompt)]
        if self.flag and body.get("return_routed_experts"):
            meta["routed_experts"] = raw(routing(tokens))
        return {"text": "...", "meta_info": meta}

    def _sglang_openai(self, body: Body) -> Body:
        prompt = _prompt_ids(body)
        tokens = sequence(prompt, body["max_tokens"])
        answer: Body = {"choices": [{"index": 0, "text": "...", "finish_reason": "length"}]}
        answer["usage"] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens) - len(prompt),
        }
        if self.flag and body.get("return_routed_experts"):
            answer["sglext"] = {"routed_experts": raw(routing(tokens))}
        return answer


def _prompt_ids(body: Body) -> list[int]:
    if "messages" in body:
        return ids_of_text("".join(str(message["content"]) for message in body["messages"]))
    prompt = body["token_ids"] if "token_ids" in body else body["prompt"]
    return ids_of_text(prompt) if isinstance(prompt, str) else prompt


def _spoil(answer: Body, fault: str) -> Body:
    """Take away from a good answer what an engine's mishap takes away."""
    places = [answer.get("meta_info"), answer.get("sglext"), *answer.get("choices", [])]
    for place in places:
        if not place:
            continue
        if fault == "short" and isinstance(place.get("routed_experts"), str):
            ids = np.zeros((2, NUM_LAYERS, TOP_K), dtype=np.int32)
            place["routed_experts"] = raw(ids) if "meta_info" in answer else npy(ids)
        elif fault != "short":
            place.pop("routed_experts", None)
            if fault == "abort":
                reason = {"type": "abort", "message": "out of\nmemory"}
                place["finish_reason"] = reason if "meta_info" in answer else "abort"
    return answer


def _handler(stub: Stub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(*stub.get(self.path)) if self._may_ask() else None

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.asked.append((self.path, body))
            if not self._may_ask():
                return
            for_tokens = "tokenize" not in self.path
            fault = stub.faults.popleft() if for_tokens and stub.faults else None
            if fault == "slow":
                stub.release.wait(20)
                return
            if fault == "drop":
                return
            if fault is not None and fault.startswith("http "):
                self._say(int(fault[5:]), {"error": {"message": "not\nnow"}}, {"Retry-After": "0"})
                return
            status, answer = stub.answered(self.path, body)
            if fault in ("abort", "no routing", "short"):
                answer = _spoil(answer, fault)
            self._say(status, answer, fault=fault)

        def _may_ask(self) -> bool:
            good = stub.key is None or self.headers.get("Authorization") == f"Bearer {stub.key}"
            if not good:
                self._say(401, {"error": "Unauthorized"})
            return good

        def _say(
            self, status: int, answer: Any, headers: Body | None = None, fault: str | None = None
        ) -> None:
            content = b"<html>" if fault == "garbage" else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
