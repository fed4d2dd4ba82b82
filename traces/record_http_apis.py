"""How vLLM and SGLang are asked for routed experts: path and body of each of their interfaces.

The answers are read by ``traces.importers.answers``, as those in files are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from traces.importers.answers import Answer, error_in, routed_of_sglang, routed_of_vllm
from traces.importers.routed import Routed
from traces.importers.told import Told
from traces.record_http import HttpClient, RefusedError
from traces.trace import TraceError, near_match

Prompt = str | list[int] | list[dict[str, Any]]
"""Text, token ids, or the messages of a chat."""


class Interface(NamedTuple):
    """One interface of an engine: its path, which prompts it takes, and where sampling goes."""

    path: str
    takes: tuple[str, ...]  # of "text", "tokens", "messages"
    nested: bool = False  # sampling in an object of its own


INTERFACES: dict[str, dict[str, Interface]] = {
    "sglang": {
        "native": Interface("/generate", ("text", "tokens"), nested=True),
        "completions": Interface("/v1/completions", ("text", "tokens")),
        "chat": Interface("/v1/chat/completions", ("text", "messages")),
    },
    "vllm": {
        "completions": Interface("/v1/completions", ("text", "tokens")),
        "tokens": Interface("/inference/v1/generate", ("tokens",), nested=True),
        "chat": Interface("/v1/chat/completions", ("text", "messages")),
    },
}
"""By engine and name; the first of an engine is its default."""

_OWN_KEYS = {
    *("n", "best_of", "stream", "max_tokens", "max_new_tokens", "temperature", "seed"),
    *("sampling_seed", "return_routed_experts", "routed_experts_start_len"),
    *("routed_experts_prompt_start", "return_token_ids", "return_logprob"),
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of an engine, the same for every prompt.

    ``seed`` None leaves it to the engine. ``extra`` is added to the sampling parameters, or to the
    body where an interface keeps them there (``top_p``, ``ignore_eos``, ...).
    """

    engine: str
    interface: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _known("engine", self.engine, list(INTERFACES))
        if self.interface is not None:
            _known(f"interface of {self.engine}", self.interface, list(INTERFACES[self.engine]))
        for key in _OWN_KEYS & self.extra.keys():
            raise TraceError(f"extra sampling parameter {key!r}: the recorder sets it itself")
        if self.max_new_tokens < 1:
            raise TraceError(f"max_new_tokens is {self.max_new_tokens}: must be >= 1")
        if not 0 <= self.temperature < float("inf"):
            raise TraceError(f"temperature is {self.temperature}: must be finite and >= 0")

    @property
    def name(self) -> str:
        """The interface's name."""
        return self.interface or next(iter(INTERFACES[self.engine]))

    @property
    def how(self) -> Interface:
        """The interface."""
        return INTERFACES[self.engine][self.name]


def _known(what: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        rule = f"must be one of {', '.join(names)}"
        raise TraceError(f"{what} is {name!r}: {rule}{near_match(name, names)}")


def kind_of(prompt: Prompt) -> str:
    """Return "text", "tokens" or "messages"."""
    if isinstance(prompt, str):
        return "text"
    return "messages" if prompt and isinstance(prompt[0], dict) else "tokens"


def check_prompts(prompts: Sequence[Prompt], asked: Asked) -> None:
    """Raise TraceError for prompts that the interface does not take."""
    if not prompts:
        raise TraceError("prompts are empty: at least one is needed")
    for number, prompt in enumerate(prompts):
        kind = kind_of(prompt)
        if not prompt:
            raise TraceError(f"prompt {number} is empty")
        if kind not in asked.how.takes:
            rule = f"{asked.engine}'s {asked.name} takes {' or '.join(asked.how.takes)}"
            raise TraceError(f"prompt {number} is {kind}: {rule}")


def body_for(prompt: Prompt, asked: Asked, model: str | None) -> dict[str, Any]:
    """Return the body of a request; ``model`` is the name by which the engine serves it."""
    how = asked.how
    native = asked.engine == "sglang" and how.nested
    sampling: dict[str, Any] = {
        "max_new_tokens" if native else "max_tokens": asked.max_new_tokens,
        "temperature": asked.temperature,
    }
    if asked.seed is not None:
        sampling["sampling_seed" if native else "seed"] = asked.seed
    sampling |= asked.extra
    body: dict[str, Any] = {"stream": False}
    if model is not None and not native:
        body["model"] = model
    body |= {"sampling_params": sampling} if how.nested else sampling
    return body | _prompt_fields(prompt, asked) | _routing_fields(prompt, asked)


def _prompt_fields(prompt: Prompt, asked: Asked) -> dict[str, Any]:
    kind = kind_of(prompt)
    if "messages" in asked.how.takes:
        chat = prompt if kind == "messages" else [{"role": "user", "content": prompt}]
        return {"messages": chat}
    if not asked.how.nested:
        return {"prompt": prompt}
    if asked.engine == "vllm":
        return {"token_ids": prompt}
    return {"text": prompt} if kind == "text" else {"input_ids": prompt}


def _routing_fields(prompt: Prompt, asked: Asked) -> dict[str, Any]:
    """Return what asks for routing and for the token ids that go with it."""
    if asked.engine == "vllm":  # its server's flag is the only switch
        return {} if asked.how.nested else {"return_token_ids": True}
    fields: dict[str, Any] = {"return_routed_experts": True}
    if asked.how.nested:
        start = {"logprob_start_len": 0} if kind_of(prompt) == "text" else {}
        fields |= {"return_logprob": True, **start}  # the log probabilities name the token ids
    return fields


def read_answer(answer: Answer, prompt: Prompt, asked: Asked, told: Told, name: str) -> Routed:
    """Return the request in an answer; see ``traces.importers.answers`` for what is refused."""
    if not isinstance(answer, Mapping):
        raise TraceError(f"{name}: the answer is {type(answer).__name__}: must be an object")
    if reason := error_in(answer):
        raise TraceError(f"{name}: the server answers with an error: {reason}")
    given = prompt if kind_of(prompt) == "tokens" else None
    if asked.engine == "vllm":
        return routed_of_vllm(answer, name=name, prompt_ids=given)[0]  # type: ignore[arg-type]
    layers, top_k = shape_needed(told)
    return routed_of_sglang(answer, layers, top_k, name=name, prompt_ids=given)  # type: ignore[arg-type]


def shape_needed(told: Told) -> tuple[int, int]:
    """Return hidden layers and top-k, without which SGLang's bytes have no shape."""
    top_k = told.top_k or told.native_top_k
    if told.num_hidden_layers is None or top_k is None:
        missing = "num_hidden_layers" if told.num_hidden_layers is None else "top_k"
        raise TraceError(
            f"{missing} is not known: SGLang sends bytes without a shape: give --config or --model"
        )
    return told.num_hidden_layers, top_k


@dataclass(frozen=True)
class Server:
    """What a server says of itself; None where it says nothing."""

    model: str | None
    version: str | None


def ask_server(client: HttpClient, engine: str) -> Server:
    """Return the served model's name and the engine's version.

    Raises TraceError where nobody answers; a server that lacks these pages is asked all the same.
    """
    try:
        served = client.get("/v1/models")
    except RefusedError as error:
        if error.status not in (404, 405):
            raise
        served = {}
    models = served.get("data") if isinstance(served, dict) else None
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("id") if isinstance(first, dict) else None
    page = "/version" if engine == "vllm" else "/get_server_info"
    try:
        told = client.get(page, retries=0)
    except TraceError:
        told = {}
    version = told.get("version") if isinstance(told, dict) else None
    return Server(name if isinstance(name, str) else None, str(version) if version else None)
