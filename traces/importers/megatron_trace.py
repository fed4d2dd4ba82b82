"""Reads Megatron's ``--moe-routing-trace-path``: JSON lines, a file a rank, of training or inference.

Lines name no requests. In training (``context_tokens`` is told) a pass is micro-batches of sequences of that
length, laid out [position, sequence]. In inference, requests are derived from the tokens of each pass: one of
many tokens that stands alone is a prompt, passes of one token go on with the request before them, and the
rows of successive passes with as many tokens are linked by their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from traces.importers.assemble import assemble
from traces.importers.megatron_passes import Pass, read_rank
from traces.importers.megatron_ranks import streams_of
from traces.importers.routed import Origin, Routed
from traces.importers.sequence import natural
from traces.importers.sources import files_of
from traces.importers.told import Told
from traces.trace import Trace, TraceError

_NOTES = (
    "the order of the slots is not stated; recorded before dispatch, so tokens that were dropped are there",
    "step derived: one a forward pass",
)
_TRAINING = "training: each sequence is a request, all of it prompt"
_INFERENCE = (
    "requests derived from the tokens of each pass: a pass of many that stands alone is a prompt (it may be "
    "several), and a row of successive passes with as many tokens is one request"
)


def read(path: Path, told: Told) -> Trace:
    """Return the passes of a file, or of a folder with a file a rank, as a trace.

    Raises
    ------
    TraceError
        If ranks do not fit together, or all passes have the same number of tokens and nothing tells whether
        they are training (``context_tokens``) or decoding (``prompt_tokens`` 0).
    """
    path = Path(path)
    notes: list[str] = []
    ranks = []
    for file in sorted(_files(path), key=lambda file: natural(file.name)):
        passes, found = read_rank(file)
        notes += [note for note in found if note not in notes]
        ranks.append((file, passes))
    streams = streams_of(ranks, told)
    requests, base = list[Routed](), 0
    for place, passes in enumerate(streams.passes):
        label = f"replica {place}, " if len(streams.passes) > 1 else ""
        requests += _requests(passes, told, str(path), label, base)
        base += len(passes)
    logits = requests[0].router_logits
    notes += [*streams.notes, _INFERENCE if told.context_tokens is None else _TRAINING]
    if logits is None and any(held.logits for passes in streams.passes for held in passes):
        notes.append("logits were left out: some calls have none")
    origin = Origin(
        file=str(path),
        what="Megatron router trace",
        recorder="Megatron-LM RouterTracer",
        num_experts=None if logits is None else logits.shape[2],
        layer_indices=streams.layer_indices,
        notes=(*_NOTES, *notes),
    )
    return assemble(requests, told, origin)


def _files(path: Path) -> list[Path]:
    files = files_of(path, ".jsonl")
    return [file for file in files if file.name.startswith("router_trace_rank")] or files


def _requests(passes: Sequence[Pass], told: Told, file: str, label: str, base: int) -> list[Routed]:
    """Return the requests of one replica; its first pass is step ``base``."""
    counts = [held.num_tokens for held in passes]
    if told.context_tokens is not None:
        requests = _sequences(passes, told.context_tokens, file, label)
    elif len(counts) > 1 and min(counts) == max(counts) > 1 and told.prompt_tokens != 0:
        raise TraceError(
            f"{file}: each of {len(counts)} passes has {counts[0]} tokens: tell --context-tokens, the length "
            "of a sequence (training), or --prompt-tokens 0 (decoding of as many requests)"
        )
    else:
        requests = _derived(passes, counts, label)
    if any(request.router_logits is None for request in requests):
        for request in requests:
            request.router_logits = None
    for request in requests:
        assert request.step is not None
        request.step = request.step + base
    return requests


def _sequences(passes: Sequence[Pass], context_tokens: int, file: str, label: str) -> list[Routed]:
    requests = []
    for place, held in enumerate(passes):
        batch, rest = divmod(held.num_tokens, context_tokens)
        if rest:
            where = f"{file}: {label}pass {place} (step {held.step}) has {held.num_tokens} tokens"
            raise TraceError(f"{where}: must be a multiple of --context-tokens {context_tokens}")
        ids, logits = _arrays(held)
        for at in range(batch):
            part = None if logits is None else logits[at::batch]
            step = np.full(context_tokens, place)
            name = f"{label}pass {place}, sequence {at}"
            requests.append(
                Routed(name, ids[at::batch], context_tokens, step=step, router_logits=part)
            )
    return requests


def _derived(passes: Sequence[Pass], counts: Sequence[int], label: str) -> list[Routed]:
    requests: list[Routed] = []
    goes_on = False
    for num_tokens, places in groupby(range(len(passes)), key=lambda place: counts[place]):
        run = list(places)
        steps = np.array(run)
        name = f"{label}pass {run[0]}"
        parts = [_arrays(passes[place]) for place in run]
        ids = np.stack([part[0] for part in parts], axis=1)  # [rows, passes, layers, k]
        held = [part[1] for part in parts if part[1] is not None]
        logits = np.stack(held, axis=1) if len(held) == len(parts) else None
        if len(run) == 1 and num_tokens > 1:
            found = Routed(name, ids[:, 0], num_tokens, step=np.repeat(steps, num_tokens))
            found.router_logits = None if logits is None else logits[:, 0]
            requests.append(found)
            goes_on = True
            continue
        for row in range(num_tokens):
            part = None if logits is None else logits[row]
            found = Routed(f"{name}, row {row}", ids[row], 0, step=steps, router_logits=part)
            if goes_on and num_tokens == 1:
                requests[-1] = _continued(requests[-1], found)
            else:
                requests.append(found)
        goes_on = False
    return requests


def _continued(request: Routed, more: Routed) -> Routed:
    """Return a prompt and what was decoded after it as one request."""
    assert request.step is not None
    assert more.step is not None
    both = [part for part in (request.router_logits, more.router_logits) if part is not None]
    return Routed(
        request.name,
        np.concatenate([request.expert_ids, more.expert_ids]),
        request.num_prompt,
        step=np.concatenate([request.step, more.step]),
        router_logits=np.concatenate(both) if len(both) == 2 else None,
    )


def _arrays(held: Pass) -> tuple[NDArray[np.int32], NDArray[np.float16] | None]:
    """Return ids [num_tokens, layers, k] and logits [num_tokens, layers, num_experts] of a pass."""
    layers = sorted(held.ids)
    ids = np.stack([held.ids[layer] for layer in layers], axis=1)
    if len(held.logits) < len(layers):
        return ids, None
    return ids, np.stack([held.logits[layer] for layer in layers], axis=1)
