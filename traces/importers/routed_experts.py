"""Reads what SGLang and vLLM return as ``routed_experts``: answers in JSON, or the arrays by themselves.

``.json`` and ``.jsonl`` hold answers as the engines send them (one, a list, or one a line; wrapped with
their request as ``{request, response}``, or as a batch file of the OpenAI style). ``.npy`` is the array
[rows, layers, k] of one request, ``.npz`` several of them, or the parts of one by name
(``routed_experts``, ``prompt_routed_experts``, ``prompt_token_ids``, ``output_token_ids``). Other files are
raw int32, as SGLang packs into base64. A folder is all such files in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traces.importers.answers import (
    SGLANG_FLAG,
    VLLM_FLAG,
    Answer,
    cached_tokens,
    error_in,
    routed_of_sglang,
    routed_of_vllm,
)
from traces.importers.assemble import assemble
from traces.importers.json_file import json_values
from traces.importers.routed import STEPS_DERIVED, Origin, Routed
from traces.importers.routed_arrays import RAW_SUFFIXES, requests_of_array_file
from traces.importers.sequence import natural
from traces.importers.sources import files_of
from traces.importers.told import Told, needed
from traces.trace import Trace, TraceError

_JSON = (".json", ".jsonl", ".ndjson")
_NOTES = (
    "ids only: the engine returns no weights; the order of the slots is the engine's",
    STEPS_DERIVED,
)


@dataclass(slots=True)
class _Found:
    """What a source has held so far."""

    requests: list[Routed] = field(default_factory=list)
    engines: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    versions: set[str] = field(default_factory=set)
    num_cached: int = 0
    num_errors: int = 0
    num_forks: int = 0  # choices after the first
    first_error: str = ""


def read(path: Path, told: Told) -> Trace:
    """Return the requests of a file, or of a folder of files, as a trace.

    Raises
    ------
    TraceError
        If the engine's flag was off, rows and tokens do not fit, or a shape that raw int32 needs (layers and
        top-k of the model) is not told.
    """
    path = Path(path)
    found = _Found()
    for file in sorted(files_of(path, *_JSON, ".npy", ".npz", *RAW_SUFFIXES), key=_by_name):
        label = f"{file.name}: " if path.is_dir() else ""
        if file.suffix.lower() in _JSON:
            _read_answers(file, label, told, found)
        else:
            found.requests += requests_of_array_file(file, label, told)
            found.engines.add("engine that is not told")
    if not found.requests:
        raise TraceError(f"{path}: no answer with routing in it{found.first_error}")
    return assemble(found.requests, told, _origin(path, found))


def _read_answers(file: Path, label: str, told: Told, found: _Found) -> None:
    for place, value in json_values(file):
        for answer, request in _answers(value, f"{file}: {place}"):
            if error := error_in(answer):
                found.num_errors += 1
                found.first_error = found.first_error or f": {place} is an error: {error}"
                continue
            _read_answer(answer, request, f"{file}: {place}", label + place, told, found)


def _read_answer(
    answer: Answer, request: Answer, where: str, label: str, told: Told, found: _Found
) -> None:
    prompt_ids, start = _of_request(request)
    if _is_sglang(answer):
        name = "the number of layers, dense ones too"
        option = "--num-hidden-layers, --model or --config"
        layers = needed(where, name, told.num_hidden_layers, option)
        top_k = needed(where, "top-k", told.top_k or told.native_top_k, "--top-k, or --model")
        routed = routed_of_sglang(
            answer, layers, top_k, name=where, prompt_ids=prompt_ids, start=start
        )
        requests = [routed]
        found.engines.add("SGLang")
    else:
        _refuse_none(answer, where)
        requests = routed_of_vllm(answer, name=where, prompt_ids=prompt_ids, start=start)
        is_megatron = any("moe_topk_indices" in choice for choice in answer["choices"])
        found.engines.add("Megatron" if is_megatron else "vLLM")
    for place, routed in enumerate(requests):
        routed.name = f"{label}, choice {place}" if len(requests) > 1 else label
    found.requests += requests
    found.num_forks += len(requests) - 1
    found.num_cached += cached_tokens(answer)
    if isinstance(answer.get("model"), str):
        found.models.add(answer["model"])
    if isinstance(answer.get("system_fingerprint"), str):
        found.versions.add(answer["system_fingerprint"])


def _answers(value: Any, where: str) -> Iterator[tuple[Answer, Answer]]:
    """Yield answers and the requests they came with (empty where none did)."""
    if isinstance(value, list):  # SGLang answers a batch with a list
        for place, item in enumerate(value):
            yield from _answers(item, f"{where}, {place}")
        return
    if not isinstance(value, Mapping):
        raise TraceError(f"{where} is {type(value).__name__}: must be an answer, a JSON object")
    answer, request = value, value.get("request")
    if "response" in value and "choices" not in value and "meta_info" not in value:
        answer = (
            value["response"] if value["response"] is not None else {"error": value.get("error")}
        )
        if isinstance(answer, Mapping) and isinstance(answer.get("body"), Mapping):
            answer = answer["body"]
    if isinstance(answer, list):
        yield from _answers(answer, where)
        return
    if not isinstance(answer, Mapping):
        raise TraceError(f"{where}: response is {type(answer).__name__}: must be a JSON object")
    yield answer, request if isinstance(request, Mapping) else {}


def _of_request(request: Answer) -> tuple[list[int] | None, int]:
    """Return the prompt's token ids, if the request was made of them, and the first row asked for."""
    candidates = (
        request.get(key) for key in ("input_ids", "prompt_token_ids", "token_ids", "prompt")
    )
    ids = next(
        (
            value
            for value in candidates
            if isinstance(value, list) and value and type(value[0]) is int
        ),
        None,
    )
    sampling = request.get("sampling_params")
    start = request.get("routed_experts_start_len")
    if start is None and isinstance(sampling, Mapping):
        start = sampling.get("routed_experts_prompt_start")
    return ids, start if isinstance(start, int) else 0


def _is_sglang(answer: Answer) -> bool:
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    inside = isinstance(first, Mapping) and isinstance(first.get("meta_info"), Mapping)
    return "meta_info" in answer or "sglext" in answer or inside


def _refuse_none(answer: Answer, where: str) -> None:
    """Refuse what is no answer, or one without any routing, of which the engine cannot be told."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        keys = ", ".join(map(str, list(answer)[:6])) or "nothing"
        raise TraceError(f"{where}: has {keys}: must have meta_info (SGLang) or choices (vLLM)")
    found = {key for source in (answer, *choices) if isinstance(source, Mapping) for key in source}
    if not found.intersection(("routed_experts", "prompt_routed_experts", "moe_topk_indices")):
        raise TraceError(f"{where}: no routed_experts in it: {VLLM_FLAG}, or {SGLANG_FLAG}")


def _origin(path: Path, found: _Found) -> Origin:
    engine = " and ".join(sorted(found.engines))
    notes = [*_NOTES]
    if found.num_cached:
        notes.append(
            f"warning: {found.num_cached} prompt tokens came from the prefix cache: their rows show routing "
            "that an earlier request caused"
        )
    if found.num_forks:
        notes.append(f"{found.num_forks} further choices of a prompt have no rows for it")
    if found.num_errors:
        notes.append(f"{found.num_errors} answers that are errors were left out{found.first_error}")
    return Origin(
        file=str(path),
        what=f"routed_experts of {engine}",
        recorder=f"routed_experts of {engine}",
        recorder_version=", ".join(sorted(found.versions)) or None,
        zero_means_dense=True,
        model=found.models.pop() if len(found.models) == 1 else None,
        notes=tuple(notes),
    )


def _by_name(file: Path) -> list[tuple[int, str]]:
    return natural(file.name)
