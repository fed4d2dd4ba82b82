"""Routed experts out of one answer of SGLang, vLLM or Megatron, as a client or a file of answers has it.

They return one row a processed token: the prompt and all sampled tokens but the last, which no forward
pass has seen (T - 1 rows for T tokens). None sends weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.checked import keys_of
from traces.importers.encoded import ids_of, raw_bytes, raw_int32
from traces.importers.routed import Routed
from traces.importers.sequence import (
    Tokens,
    count,
    request_of_rows,
    token_ids,
    without_last_blank,
)
from traces.trace import TraceError

Answer = Mapping[str, Any]

SGLANG_FLAG = (
    "start SGLang with --enable-return-routed-experts and send return_routed_experts: true"
)
VLLM_FLAG = "start vLLM with --enable-return-routed-experts"
_PREEMPTED = "a preempted or aborted request loses its routing, send it again"


def routed_of_sglang(
    answer: Answer,
    num_hidden_layers: int,
    top_k: int,
    *,
    name: str = "answer",
    prompt_ids: Sequence[int] | None = None,
    start: int = 0,
) -> Routed:
    """Return the request of one SGLang answer, ``/generate`` or OpenAI style.

    Its ids are raw int32 without a shape, hence the two numbers from the model's config (dense layers
    counted too; they are rows of zeros). Of an OpenAI answer with several choices only the first has
    routing.

    Parameters
    ----------
    name
        What errors call the answer.
    prompt_ids
        The prompt's token ids, where the client sent them; the answer seldom repeats them.
    start
        The request's ``routed_experts_start_len``, where the answer does not echo it.

    Raises
    ------
    TraceError
        If the engine's flag was off, the request was aborted, or the bytes are no whole number of tokens,
        or not the T - 1 of the answer's token counts.
    """
    meta, first = _meta_info(answer), _first_choice(answer)
    value = meta.get("routed_experts") or _inner(answer, "sglext").get("routed_experts")
    if not value:
        _refuse_aborted(meta.get("finish_reason", first.get("finish_reason")), name)
        raise TraceError(f"{name}: no routed_experts in it: {SGLANG_FLAG}")
    where = f"{name}: routed_experts"
    ids = raw_int32(raw_bytes(value, where), num_hidden_layers, top_k, where)
    tokens = _sglang_tokens(answer, meta, first, prompt_ids, name)
    echoed = count(meta.get("routed_experts_start_len"), f"{name}: routed_experts_start_len")
    return request_of_rows(name, ids, tokens, first=start if echoed is None else echoed)


def routed_of_vllm(
    answer: Answer,
    *,
    name: str = "answer",
    prompt_ids: Sequence[int] | None = None,
    start: int = 0,
) -> list[Routed]:
    """Return the requests of one vLLM answer, one a choice; choices after the first without the prompt.

    Reads base64 of npy for the whole sequence (token-in-token-out and completions API), and the lists of
    vLLM 0.21 that part ``prompt_routed_experts`` from each choice's ``routed_experts``; there, tokens from
    the prefix cache are -1. Send ``return_token_ids: true`` to have the token ids in the answer. Megatron's
    ``moe_topk_indices``, lists of the whole sequence, are read as well.

    Parameters
    ----------
    name
        What errors call the answer; a choice's number is added where there are several.
    prompt_ids
        The prompt's token ids, where the client sent them.
    start
        The request's ``routed_experts_prompt_start``.

    Raises
    ------
    TraceError
        If the engine's flag was off, the request was preempted, or rows and tokens do not fit.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        raise TraceError(f"{name}: no choices in it: must be an answer of vLLM")
    requests = []
    for place, choice in enumerate(choices):
        label = f"{name}, choice {place}" if len(choices) > 1 else name
        if not isinstance(choice, Mapping):
            raise TraceError(f"{label}: is {type(choice).__name__}: must be an object")
        request = _vllm_choice(answer, choice, label, prompt_ids, start)
        requests.append(request.without_first(request.num_prompt) if place else request)
    return requests


def cached_tokens(answer: Answer) -> int:
    """Return how many prompt tokens the engine says it took from its prefix cache, 0 if it is silent."""
    found = _meta_info(answer).get("cached_tokens")
    if found is None:
        found = _inner(_inner(answer, "usage"), "prompt_tokens_details").get("cached_tokens")
    return found if isinstance(found, int) else 0


def error_in(answer: Answer) -> str:
    """Return what an engine complains of in place of an answer, else an empty string."""
    error = answer.get("error")
    if answer.get("object") == "error":
        error = error or answer.get("message") or "error"
    if not error:
        return ""
    message = error.get("message") if isinstance(error, Mapping) else error
    return " ".join(str(message or error).split())[:120]


def _vllm_choice(
    answer: Answer, choice: Answer, name: str, prompt_ids: Sequence[int] | None, start: int
) -> Routed:
    whole = choice.get("moe_topk_indices")
    value = choice.get("routed_experts") if whole is None else whole
    prompt_value = answer.get("prompt_routed_experts")
    if value is None and prompt_value is None:
        _refuse_aborted(choice.get("finish_reason"), name)
        raise TraceError(f"{name}: no routed_experts in it: {VLLM_FLAG} ({_PREEMPTED})")
    tokens = _vllm_tokens(answer, choice, prompt_ids, name)
    if prompt_value is None and ("prompt_routed_experts" not in answer or isinstance(value, str)):
        return request_of_rows(name, ids_of(value, f"{name}: routed_experts"), tokens, first=start)
    ids, first = _joined(prompt_value, value, tokens, name)
    return request_of_rows(name, ids, tokens, first=first, last_may_have_row=True)


def _joined(
    prompt_value: object, value: object, tokens: Tokens, name: str
) -> tuple[NDArray[np.integer], int]:
    """Return the rows of a split answer and the position of the first one."""
    num_prompt, num_output = tokens.num_prompt, tokens.num_output
    prompt = ids_of([] if prompt_value is None else prompt_value, f"{name}: prompt_routed_experts")
    sampled = ids_of([] if value is None else value, f"{name}: routed_experts")
    if not len(sampled) and num_output is not None and num_output > 1:
        rule = f"must be {num_output - 1} rows ({_PREEMPTED})"
        raise TraceError(f"{name}: routed_experts is empty: {rule}")
    if num_prompt is not None and len(prompt) not in (0, num_prompt):
        rule = f"must be {num_prompt}, one a token of the prompt"
        raise TraceError(f"{name}: prompt_routed_experts has {len(prompt)} rows: {rule}")
    sampled = without_last_blank(sampled, num_output)
    if not len(prompt):
        if num_prompt is None:
            raise TraceError(f"{name}: prompt_routed_experts is missing: so is the prompt's length")
        return sampled, num_prompt
    if not len(sampled):
        return prompt, 0
    if prompt.shape[1:] != sampled.shape[1:]:
        found = f"routed_experts are [layers, k] {list(sampled.shape[1:])}"
        rule = f"must be {list(prompt.shape[1:])}, as of prompt_routed_experts"
        raise TraceError(f"{name}: {found}: {rule}")
    return np.concatenate([prompt, sampled]), 0


def _vllm_tokens(
    answer: Answer, choice: Answer, prompt_ids: Sequence[int] | None, name: str
) -> Tokens:
    usage = _inner(answer, "usage")
    output = _first_of((choice, "token_ids"), (choice, "generation_token_ids"))
    given = prompt_ids
    if given is None:
        given = _first_of((choice, "prompt_token_ids"), (answer, "prompt_token_ids"))
    output_ids = token_ids(output, f"{name}: token_ids")
    alone = len(answer["choices"]) == 1 and output_ids is None
    return _tokens(
        name,
        usage.get("prompt_tokens"),
        usage.get("completion_tokens") if alone else None,
        given,
        output_ids,
    )


def _sglang_tokens(
    answer: Answer, meta: Answer, first: Answer, prompt_ids: Sequence[int] | None, name: str
) -> Tokens:
    counts = {**_inner(answer, "usage"), **meta}
    ext = _inner(answer, "sglext")
    given = prompt_ids
    if given is None:
        sources = ((answer, "prompt_token_ids"), (first, "prompt_token_ids"), (ext, "input_ids"))
        given = _first_of(*sources)
    if given is None:
        given = _of_logprobs(meta.get("input_token_logprobs"), counts.get("prompt_tokens"))
    output = _first_of((answer, "output_ids"), (first, "token_ids"), (first, "response_token_ids"))
    if output is None and isinstance(ext.get("output_ids"), list) and ext["output_ids"]:
        output = ext["output_ids"][0]
    if output is None:
        output = _of_logprobs(meta.get("output_token_logprobs"), counts.get("completion_tokens"))
    choices = answer.get("choices")
    alone = not isinstance(choices, list) or len(choices) < 2  # else the count is of all together
    num_output = counts.get("completion_tokens") if alone else None
    return _tokens(
        name,
        counts.get("prompt_tokens"),
        num_output,
        given,
        token_ids(output, f"{name}: output_ids"),
    )


def _tokens(
    name: str,
    num_prompt: object,
    num_output: object,
    prompt_ids: object,
    output_ids: NDArray[np.int64] | None,
) -> Tokens:
    prompt = token_ids(prompt_ids, f"{name}: prompt_token_ids")
    told = count(num_prompt, f"{name}: prompt_tokens")
    sampled = count(num_output, f"{name}: completion_tokens")
    return Tokens(
        num_prompt=len(prompt) if told is None and prompt is not None else told,
        num_output=len(output_ids) if sampled is None and output_ids is not None else sampled,
        prompt_ids=prompt,
        output_ids=output_ids,
    )


def _of_logprobs(entries: object, num_tokens: object) -> list[int] | None:
    """Return the token ids of SGLang's (logprob, id, text) entries if they cover all tokens."""
    if not isinstance(entries, list) or not entries or len(entries) != num_tokens:
        return None
    good = all(isinstance(entry, (list, tuple)) and len(entry) > 1 for entry in entries)
    return [entry[1] for entry in entries] if good else None


def _meta_info(answer: Answer) -> Answer:
    """Return ``meta_info``, which an OpenAI style answer may have inside its first choice."""
    return _inner(answer, "meta_info") or _inner(_first_choice(answer), "meta_info")


def _first_choice(answer: Answer) -> Answer:
    choices = answer.get("choices")
    return keys_of(choices[0]) if isinstance(choices, list) and choices else {}


def _refuse_aborted(reason: object, name: str) -> None:
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    if kind == "abort":
        message = reason.get("message") if isinstance(reason, Mapping) else None
        told = f" ({' '.join(str(message).split())})" if message else ""
        raise TraceError(f"{name}: the engine aborted the request{told}: no routing in it")


def _first_of(*places: tuple[Answer, str]) -> Any:
    return next((source[key] for source, key in places if source.get(key) is not None), None)


def _inner(source: Answer, key: str) -> Answer:
    return keys_of(source.get(key))
