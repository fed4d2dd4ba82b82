"""Reads the routed experts that RL trainers keep: slime and verl ``.pt`` files, verifiers JSON.

- slime (``--save-debug-rollout-data``): ``samples``, each with ``tokens``, ``response_length`` and
  ``rollout_routed_experts`` [tokens - 1, layers, k]; or its training data, the same as lists by name.
- verl: ``routed_experts`` [batch, prompt + response, layers, k], padded with zeros on both sides;
  ``attention_mask`` tells where a sample begins and ends, ``prompts`` or ``responses`` where its prompt ends.
- verifiers: see :mod:`traces.importers.verifiers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.importers.assemble import assemble
from traces.importers.checked import keys_of
from traces.importers.encoded import ids_of
from traces.importers.routed import STEPS_DERIVED, Origin, Routed
from traces.importers.sequence import (
    Tokens,
    count,
    is_blank,
    natural,
    request_of_rows,
    token_ids,
    without_last_blank,
)
from traces.importers.sources import files_of
from traces.importers.told import Told
from traces.importers.torch_file import load_torch
from traces.importers.verifiers import requests_of_verifiers
from traces.trace import Trace, TraceError

_SLIME, _VERL = "rollout_routed_experts", "routed_experts"
_JSON = (".json", ".jsonl", ".ndjson")
_HINT = "verl: save dict(data.batch), for a DataProto is a pickle of code"
_NOTES = (
    "ids only: trainers keep no weights of the rollout",
    STEPS_DERIVED,
    "a response may hold the words of tools: they are decode rows here, too",
)


def read(path: Path, told: Told) -> Trace:
    """Return the samples of a file, or of a folder of files, as a trace.

    Raises
    ------
    TraceError
        If a file holds Python objects, no routing, or rows that do not fit the tokens.
    """
    path = Path(path)
    requests: list[Routed] = []
    notes: list[str] = []
    kinds: set[str] = set()
    for file in sorted(files_of(path, ".pt", *_JSON), key=lambda file: natural(file.name)):
        label = f"{file.name}: " if path.is_dir() else ""
        if file.suffix.lower() in _JSON:
            kind, (found, told_of) = "verifiers", requests_of_verifiers(file, label, told)
        else:
            kind, (found, told_of) = _of_torch(file, label)
        requests += found
        notes += told_of
        kinds.add(kind)
    if not requests:
        raise TraceError(f"{path}: no sample with routing in it")
    trainer = " and ".join(sorted(kinds))
    what = f"routed experts of {trainer}"
    origin = Origin(
        file=str(path), what=what, recorder=trainer, zero_means_dense=True, notes=(*_NOTES, *notes)
    )
    return assemble(requests, told, origin)


def _of_torch(file: Path, label: str) -> tuple[str, tuple[list[Routed], list[str]]]:
    try:
        loaded = load_torch(file)
    except TraceError as error:
        raise TraceError(
            f"{error} ({_HINT})" if "DataProto" in str(error) else str(error)
        ) from None
    if isinstance(loaded, Mapping) and isinstance(loaded.get("batch"), Mapping):
        loaded = loaded["batch"]
    if isinstance(loaded, Mapping) and _VERL in loaded:
        return "verl", _of_verl(loaded, file, label)
    samples = loaded
    if isinstance(loaded, Mapping):
        samples = _by_sample(loaded, file) if _SLIME in loaded else loaded.get("samples", [loaded])
    if not isinstance(samples, list) or not any(_SLIME in keys_of(sample) for sample in samples):
        keys = ", ".join(map(str, list(keys_of(loaded))[:8])) or type(loaded).__name__
        rule = f"must have samples with {_SLIME} (slime) or {_VERL} (verl)"
        raise TraceError(f"{file}: holds {keys}: {rule}")
    return "slime", _of_slime(samples, file, label)


def _of_slime(samples: Sequence[Any], file: Path, label: str) -> tuple[list[Routed], list[str]]:
    requests = []
    for place, sample in enumerate(samples):
        where = f"{file}: sample {place}"
        value = sample.get(_SLIME) if isinstance(sample, Mapping) else None
        if value is None:
            continue
        ids = ids_of(value, f"{where}: {_SLIME}")
        tokens = token_ids(sample.get("tokens"), f"{where}: tokens")
        sampled = count(sample.get("response_length"), f"{where}: response_length")
        if tokens is None or sampled is None or sampled > len(tokens):
            rule = "must be there, the length not beyond the tokens"
            raise TraceError(f"{where}: tokens or response_length: {rule}")
        cut = len(tokens) - sampled
        parts = Tokens(prompt_ids=tokens[:cut], output_ids=tokens[cut:])
        request = request_of_rows(where, ids, parts)
        request.name = f"{label}sample {place}"
        requests.append(request)
    return requests, _left_out(len(samples) - len(requests), file)


def _by_sample(columns: Mapping[str, Any], file: Path) -> list[dict[str, Any]]:
    """Turn slime's training data, a list a column, into samples."""
    needed = {"tokens": "tokens", "response_lengths": "response_length", _SLIME: _SLIME}
    for name in needed:
        if not isinstance(columns.get(name), list):
            raise TraceError(f"{file}: {name} is missing: must be a list, one entry a sample")
        if len(columns[name]) != len(columns[_SLIME]):
            rule = f"must be {len(columns[_SLIME])}, one a sample"
            raise TraceError(f"{file}: {name} has {len(columns[name])} entries: {rule}")
    rows = zip(*(columns[name] for name in needed), strict=True)
    samples = [dict(zip(needed.values(), row, strict=True)) for row in rows]
    for sample in samples:
        length = sample["response_length"]
        sample["response_length"] = length.item() if hasattr(length, "item") else length
    return samples


def _of_verl(batch: Mapping[str, Any], file: Path, label: str) -> tuple[list[Routed], list[str]]:
    value = batch[_VERL]
    if not isinstance(value, np.ndarray) or value.ndim != 4 or value.dtype.kind not in "iu":
        shown = (
            f"{value.dtype}{list(value.shape)}"
            if isinstance(value, np.ndarray)
            else type(value).__name__
        )
        raise TraceError(
            f"{file}: {_VERL} is {shown}: must be whole numbers [batch, tokens, layers, k]"
        )
    mask = _mask(batch, value, file)
    tokens, prompt_width = _verl_tokens(batch, value.shape[:2], file)
    requests, unrouted = list[Routed](), 0
    for row in range(len(value)):
        where = f"{file}: row {row}"
        inside = np.flatnonzero(mask[row])
        if not len(inside):
            continue
        begin, end = int(inside[0]), int(inside[-1]) + 1
        if end - begin != len(inside):
            raise TraceError(f"{where}: attention_mask has holes: must be one run of ones")
        ids = without_last_blank(value[row, begin:end], end - begin)
        kept = _routed_rows(ids)
        unrouted += len(ids) - kept
        num_prompt = min(kept, max(0, prompt_width - begin))
        request = Routed(f"{label}row {row}", ids[:kept], num_prompt)
        if tokens is not None:
            request.token_id = tokens[row, begin : begin + kept]
        requests.append(request)
    notes = _left_out(len(value) - len(requests), file)
    if unrouted:
        notes.append(
            f"repaired: {unrouted} last tokens without routing were left out (a tool's words)"
        )
    return requests, notes


def _routed_rows(ids: NDArray[np.integer]) -> int:
    """Return how many rows there are up to the last with an expert; of top-1 all, as 0 is an expert."""
    if ids.shape[2] == 1:
        return len(ids)
    there = np.flatnonzero(~is_blank(ids))
    return int(there[-1]) + 1 if len(there) else 0


def _mask(batch: Mapping[str, Any], value: NDArray[np.integer], file: Path) -> NDArray[np.bool_]:
    """Return where tokens are [batch, tokens]; without ``attention_mask``, where experts are."""
    found = batch.get("attention_mask")
    if found is not None:
        return _table(found, value.shape[:2], f"{file}: attention_mask").astype(bool)
    there = np.asarray((value > 0).any(axis=(2, 3)))
    first, last = there.argmax(axis=1), there.shape[1] - there[:, ::-1].argmax(axis=1)
    places = np.arange(there.shape[1])
    inside = (places >= first[:, None]) & (places < last[:, None])
    return np.asarray(inside & np.any(there, axis=1, keepdims=True))


def _verl_tokens(
    batch: Mapping[str, Any], shape: tuple[int, ...], file: Path
) -> tuple[NDArray[np.integer] | None, int]:
    """Return the token ids [batch, tokens] where they are, and the width of the padded prompts."""
    num_tokens = shape[1]
    prompts, responses = batch.get("prompts"), batch.get("responses")
    if isinstance(prompts, np.ndarray) and prompts.ndim == 2:
        width = prompts.shape[1]
    elif isinstance(responses, np.ndarray) and responses.ndim == 2:
        width = num_tokens - responses.shape[1]
    else:
        raise TraceError(f"{file}: neither prompts nor responses: must tell where the prompts end")
    ids = batch.get("input_ids")
    if ids is None and prompts is not None and responses is not None:
        ids = np.concatenate([prompts, responses], axis=1)
    if not 0 <= width <= num_tokens:
        raise TraceError(
            f"{file}: prompts are {width} wide: must be at most {num_tokens}, the tokens"
        )
    return None if ids is None else _table(ids, shape, f"{file}: input_ids"), width


def _table(value: Any, shape: tuple[int, ...], where: str) -> NDArray[np.integer]:
    if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype.kind not in "iub":
        shown = (
            f"{value.dtype}{list(value.shape)}"
            if isinstance(value, np.ndarray)
            else type(value).__name__
        )
        raise TraceError(f"{where} is {shown}: must be whole numbers {list(shape)}")
    return value


def _left_out(number: int, file: Path) -> list[str]:
    return [f"{number} samples of {file.name} have no routing and were left out"] if number else []
