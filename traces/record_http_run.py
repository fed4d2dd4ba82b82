"""Record a running vLLM or SGLang server: send it prompts, and make a trace of the routing it returns.

The engine must have been started with ``--enable-return-routed-experts``. It returns expert ids, no
weights and not the step that processed a token; what is known to go wrong on the way (dense layers as
zeros, constant rows, whole rankings, missing stages) is looked for as in imported files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import numpy as np

from traces.importers.answers import cached_tokens
from traces.importers.assemble import assemble, shaped
from traces.importers.routed import Origin, Routed
from traces.importers.told import Told
from traces.record_http import HttpClient, RefusedError, StoppedError
from traces.record_http_apis import (
    Asked,
    Prompt,
    Server,
    ask_server,
    body_for,
    check_prompts,
    read_answer,
    shape_needed,
)
from traces.record_http_kept import KeptRequests
from traces.schema import Provenance, Trace, TraceError

RECORDER = "greenroom traces.record_http"
RECORDER_VERSION = "1"
PROBE_TOKENS = 2
_TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
_TEXT_KEYS = ("prompt", "text", "content")


def record_http(
    client: HttpClient,
    prompts: Sequence[Prompt],
    asked: Asked,
    told: Told,
    kept: Path,
    *,
    concurrency: int = 8,
    text: bool = True,
    on_request: Callable[[int], None] | None = None,
) -> Trace:
    """Send all prompts and return the trace, one request a prompt, in their order.

    Parameters
    ----------
    client, asked, told
        The server, what is asked of it, and what is known of the model. SGLang needs its hidden
        layers and top-k, both engines its number of experts.
    kept
        A folder for finished requests; where an interrupted run left it, only the rest is asked
        for. The caller removes it (``traces.record_http_kept.forget``) once the trace is written.
    concurrency
        Requests under way at a time.
    text
        Whether to ask the engine for each token's text (``/detokenize``).
    on_request
        Is told of each finished request's rows, those kept from before first.

    Raises
    ------
    TraceError
        For a server that cannot be reached or refuses, whose flag is off, or whose answers are not
        what the engine documents; finished requests stay in ``kept``.
    """
    check_prompts(prompts, asked)
    if concurrency < 1:
        raise TraceError(f"concurrency is {concurrency}: must be >= 1")
    if asked.engine == "sglang":
        shape_needed(told)
    server = ask_server(client, asked.engine)
    store = KeptRequests(kept, _settings(prompts, asked, told, server))
    before = store.numbers()
    todo = [number for number in range(len(prompts)) if number not in before]
    sender = _Sender(client, prompts, asked, told, server.model, store)
    if todo and not before:
        sender.probe()
    _send(client, sender, sorted(before), todo, concurrency, on_request)
    return _to_trace(client, store, len(prompts), asked, told, server, text)


class _Sender:
    """Asks for one prompt at a time and keeps what comes back; may be shared by threads."""

    def __init__(
        self,
        client: HttpClient,
        prompts: Sequence[Prompt],
        asked: Asked,
        told: Told,
        model: str | None,
        store: KeptRequests,
    ) -> None:
        self.store = store
        self._client, self._prompts, self._asked = client, prompts, asked
        self._told, self._model = told, model

    def probe(self) -> None:
        """Ask for two tokens of the first prompt: a flag that is off, or a wrong model, shows at once."""
        request, _ = self._request(0, replace(self._asked, max_new_tokens=PROBE_TOKENS))
        if request.expert_ids.shape[2] > 1:  # of one slot, a few zeros may be expert 0 by chance
            shaped([request], self._told, _origin(self._client, self._asked, self._model))
            _refuse_repeats(request)

    def send(self, number: int) -> int:
        """Ask for a prompt until its answer has routing; keep it, and return its rows."""
        for attempt in range(self._client.retries + 1):
            try:
                request, cached = self._request(number, self._asked)
            except _UnreadableError as error:
                if attempt == self._client.retries:
                    raise TraceError(str(error)) from None
                continue
            self.store.keep(number, request, cached)
            return len(request)
        raise AssertionError("a loop of one turn or more")

    def send_or_stop(self, number: int) -> int:
        """Send a prompt; where that fails, end the requests of all other threads too."""
        try:
            return self.send(number)
        except BaseException:
            self._client.stop()
            raise

    def _request(self, number: int, asked: Asked) -> tuple[Routed, int]:
        prompt, name = self._prompts[number], f"prompt {number}"
        body = body_for(prompt, asked, self._model)
        try:
            answer = self._client.post(asked.how.path, body)
        except StoppedError:
            raise
        except TraceError as error:
            raise TraceError(f"{name}: {error}{_hint(error, asked)}") from None
        try:
            return read_answer(answer, prompt, asked, self._told, name), cached_tokens(answer)
        except TraceError as error:
            raise _UnreadableError(str(error)) from None


def _refuse_repeats(request: Routed) -> None:
    """Refuse an expert that a token's layer has twice, as bytes cut by a wrong shape have.

    Zeros do not count: they may be of a layer that routes nothing.
    """
    ids = np.sort(np.where(request.is_empty_slot, 0, request.expert_ids), axis=-1)
    if ((ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] > 0)).any():
        rule = "is the model the one that was told, its layers and its top-k?"
        raise TraceError(f"{request.name}: a layer has an expert twice for one token: {rule}")


def _hint(error: TraceError, asked: Asked) -> str:
    """Return why a server may not know the page that was asked."""
    if not isinstance(error, RefusedError) or error.status != 404:
        return ""
    if "/v1/v1/" in str(error):
        return "; --url goes without /v1"
    if (asked.engine, asked.name) == ("vllm", "tokens"):
        return "; vLLM has this page with VLLM_ENABLE_SCALE_OUT_ENDPOINTS=1"
    return f"; is it a {_TITLES[asked.engine]} server?"


class _UnreadableError(TraceError):
    """An answer without the routing that it should have: perhaps the request was preempted."""


def _settings(
    prompts: Sequence[Prompt], asked: Asked, told: Told, server: Server
) -> dict[str, object]:
    """Return what must be the same for a run to go on where another stopped."""
    digest = hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()
    shape = {"num_hidden_layers": told.num_hidden_layers, "top_k": told.top_k or told.native_top_k}
    return {
        "engine": asked.engine,
        "interface": asked.name,
        "model": server.model,
        "max_new_tokens": asked.max_new_tokens,
        "temperature": asked.temperature,
        "seed": asked.seed,
        "extra": dict(asked.extra),
        "prompts": f"{len(prompts)}, sha256 {digest[:16]}",
        **(shape if asked.engine == "sglang" else {}),
    }


def _send(
    client: HttpClient,
    sender: _Sender,
    before: Sequence[int],
    todo: Sequence[int],
    concurrency: int,
    on_request: Callable[[int], None] | None,
) -> None:
    """Send the prompts that are left, several at a time; the first error ends all of them."""
    for number in before if on_request is not None else ():
        on_request(len(sender.store.load(number)[0]))  # type: ignore[misc]
    pool = ThreadPoolExecutor(max_workers=concurrency)
    stopped: BaseException | None = None
    try:
        for done in as_completed([pool.submit(sender.send_or_stop, number) for number in todo]):
            error = done.exception()
            if isinstance(error, StoppedError):
                stopped = error  # by a thread that tells why, or from outside
                continue
            rows = done.result()
            if on_request is not None:
                on_request(rows)
        if stopped is not None:
            raise stopped
    except BaseException:
        client.stop()  # on Ctrl-C there are requests under way
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _to_trace(
    client: HttpClient,
    store: KeptRequests,
    num_prompts: int,
    asked: Asked,
    told: Told,
    server: Server,
    text: bool,
) -> Trace:
    loaded = [store.load(number) for number in range(num_prompts)]
    requests = [request for request, _ in loaded]
    notes = ["steps are derived, a request after another: the engine does not tell its own"]
    if cached := sum(tokens for _, tokens in loaded):
        notes.append(
            f"{cached} prompt tokens came from the engine's prefix cache: it returned the routing "
            "of when they were computed"
        )
    if text and not _add_text(client, requests, server.model):
        notes.append("no text: the engine returned no token ids, or has no /detokenize")
    trace = assemble(requests, told, _origin(client, asked, server.model, notes))
    title = _TITLES[asked.engine]
    version = f" {server.version}" if server.version else ""
    detail = f"{title}{version}, {asked.how.path}, routed experts as the engine returns them"
    sampling = {
        "max_new_tokens": asked.max_new_tokens,
        "temperature": asked.temperature,
        **asked.extra,
    }
    meta = replace(
        trace.meta,
        provenance=Provenance("recorded", title_of(server.model) or trace.meta.model, detail),
        sampling=sampling,
        seed=asked.seed,
    )
    return replace(trace, meta=meta)


def _origin(
    client: HttpClient, asked: Asked, model: str | None, notes: Sequence[str] = ()
) -> Origin:
    title = _TITLES[asked.engine]
    return Origin(
        file=f"{title} at {client.url}",
        what=f"{title} {asked.how.path}",
        recorder=RECORDER,
        recorder_version=RECORDER_VERSION,
        zero_means_dense=True,
        model=title_of(model),
        notes=tuple(notes),
    )


def title_of(model: str | None) -> str | None:
    """Return a served model's name for a header: of a path on the server its last part."""
    return Path(model).name if model is not None and model.startswith(("/", ".")) else model


def _add_text(client: HttpClient, requests: Sequence[Routed], model: str | None) -> bool:
    """Give every token its text, asking the engine once for each distinct id; False if it cannot."""
    if any(request.token_id is None or (request.token_id < 0).any() for request in requests):
        return False
    named = [request.token_id for request in requests if request.token_id is not None]
    distinct = np.unique(np.concatenate(named)).tolist()
    pieces: dict[int, str] = {}
    for token in distinct:
        piece = _piece(client, token, model)
        if piece is None:
            return False
        pieces[token] = piece
    for request, tokens in zip(requests, named, strict=True):
        request.text = [pieces[token] for token in tokens.tolist()]
    return True


def _piece(client: HttpClient, token: int, model: str | None) -> str | None:
    body = {"tokens": [token], **({} if model is None else {"model": model})}
    try:
        answer = client.post("/detokenize", body)
    except TraceError:
        return None
    found = [answer[key] for key in _TEXT_KEYS if isinstance(answer, dict) and key in answer]
    if not found or not isinstance(found[0], str):
        return None
    return found[0].encode("utf-8", "replace").decode()  # half of a surrogate pair is no text
