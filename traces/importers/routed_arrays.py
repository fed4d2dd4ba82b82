"""Reads arrays of routed experts by themselves: ``.npy``, ``.npz``, and raw int32 without a header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.encoded import ids_of, npy, raw_int32
from traces.importers.npz_file import load_npz
from traces.importers.routed import Routed
from traces.importers.sequence import (
    Tokens,
    natural,
    request_of_rows,
    token_ids,
    without_last_blank,
)
from traces.importers.sources import read_bytes
from traces.importers.told import Told, needed
from traces.trace import TraceError

RAW_SUFFIXES = (".bin", ".raw", ".i32", ".int32")
_WHOLE, _PROMPT = "routed_experts", "prompt_routed_experts"


def requests_of_array_file(file: Path, label: str, told: Told) -> list[Routed]:
    """Return the requests of one file; ``label`` begins their names.

    Raises TraceError for a file that is none, and where the prompt's length is told nowhere.
    """
    suffix = file.suffix.lower()
    if suffix == ".npz":
        return _of_npz(file, label, told)
    data = read_bytes(file)
    if suffix == ".npy":
        ids = ids_of(npy(data, str(file)), str(file))
    else:
        option = "--num-hidden-layers, --model or --config"
        name = "the number of layers, dense ones too"
        layers = needed(str(file), name, told.num_hidden_layers, option)
        top_k = needed(str(file), "top-k", told.top_k or told.native_top_k, "--top-k, or --model")
        ids = raw_int32(data, layers, top_k, str(file))
    return [_named(request_of_rows(str(file), ids, _tokens(told)), f"{label}request 0")]


def request_of_arrays(arrays: dict[str, Any], name: str, told: Told) -> Routed | None:
    """Return the request that ``routed_experts`` and its companions make, None if the array is empty.

    The companions are ``prompt_routed_experts`` (the prompt's rows apart), ``prompt_token_ids``, and
    ``output_token_ids`` or ``token_ids``. T rows are taken for T tokens, too; a last one of zeros is left
    out.

    Raises TraceError if rows and tokens do not fit, or nothing tells the prompt's length.
    """
    value, prompt_rows = arrays.get(_WHOLE), arrays.get(_PROMPT)
    if _is_nothing(value) and _is_nothing(prompt_rows):
        return None
    ids = ids_of([] if value is None else value, f"{name}: {_WHOLE}")
    tokens = _tokens_of(arrays, name)
    if not _is_nothing(prompt_rows):
        prompt = ids_of(prompt_rows, f"{name}: {_PROMPT}")
        tokens = tokens if tokens is not None else Tokens(num_prompt=len(prompt))
        ids = _joined(prompt, ids, name)
    if tokens is None:
        tokens = _tokens(told)
    num_tokens = None
    if tokens.prompt_ids is not None and tokens.output_ids is not None:
        num_tokens = len(tokens.prompt_ids) + len(tokens.output_ids)
    ids = without_last_blank(ids, num_tokens)
    return request_of_rows(name, ids, tokens, last_may_have_row=True)


def _of_npz(file: Path, label: str, told: Told) -> list[Routed]:
    arrays = load_npz(file)
    if _WHOLE in arrays or _PROMPT in arrays:
        request = request_of_arrays(arrays, str(file), told)
        return [] if request is None else [_named(request, f"{label}request 0")]
    requests = []
    for name in sorted(arrays, key=natural):
        ids = ids_of(np.asarray(arrays[name]), f"{file}: {name}")
        request = request_of_rows(f"{file}: {name}", ids, _tokens(told))
        requests.append(_named(request, f"{label}{name}"))
    return requests


def _joined(
    prompt: NDArray[np.integer], sampled: NDArray[np.integer], name: str
) -> NDArray[np.integer]:
    if not len(sampled):
        return prompt
    if prompt.shape[1:] != sampled.shape[1:]:
        rule = f"must be {list(prompt.shape[1:])}, as of {_PROMPT}"
        raise TraceError(f"{name}: {_WHOLE} are [layers, k] {list(sampled.shape[1:])}: {rule}")
    return np.concatenate([prompt, sampled])


def _tokens_of(arrays: dict[str, Any], name: str) -> Tokens | None:
    """Return the token ids that come with the arrays, None if there are none."""
    parts = []
    for keys in (("prompt_token_ids",), ("output_token_ids", "token_ids")):
        key = next((key for key in keys if not _is_nothing(arrays.get(key))), None)
        parts.append(None if key is None else token_ids(_flat(arrays[key]), f"{name}: {key}"))
    if parts[0] is None and parts[1] is None:
        return None
    return Tokens(prompt_ids=parts[0], output_ids=parts[1])


def _flat(value: Any) -> Any:
    """Return an object array of numbers, as a pickled list may come, as a list."""
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype.hasobject else value


def _tokens(told: Told) -> Tokens:
    return Tokens(num_prompt=told.prompt_tokens)


def _is_nothing(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.size == 0
    return value is None or (isinstance(value, list) and not value)


def _named(request: Routed, name: str) -> Routed:
    request.name = name
    return request
