"""Traces of a model with one set of gates or another, on the same prompts and with the same noise."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from real.remoe_gates import Gates
from real.remoe_subject import GateSubject
from traces.record import Annotation, Generation, record_batches
from traces.store import TraceWriter, read_meta, read_trace
from traces.trace import DECODE, TraceError

_TOGETHER = 8
_NOTE = "gates"


def record_gates(
    subject: GateSubject,
    name: str,
    values: Mapping[str, Tensor] | None,
    path: Path,
    settings: Mapping[str, Any],
) -> None:
    """Write the trace of the model with these gates (None: its own), unless the file is that already.

    Router logits are kept, so that a transform can rank by them. ``settings`` is the group ``speed``.
    """
    note = f"{_NOTE} {name} {_digest(values, settings)}"
    if _is_there(path, note):
        return
    prompts, generation, annotation, described = _asked(subject, settings)
    with Gates(subject.model, reference=False) as gates:
        before = gates.values()
    if values is not None:
        gates.set(values)
    try:
        pieces = record_batches(
            subject.model,
            prompts,
            generation,
            annotation=annotation,
            logits=True,
            gates_ahead=0,
            notes=(note,),
            **described,
        )
        with closing(pieces):
            first = next(pieces)
            with TraceWriter(path, first.meta) as writer:
                writer.append(first)
                for piece in pieces:
                    writer.append(piece)
    finally:
        gates.set(before)


def eor_of_trace(path: Path, requests: Sequence[int] | None = None) -> float:
    """Return the mean EOR at lag 1 over decoded tokens and layers; ``requests`` is [first, last + 1]."""
    trace = read_trace(path, ["request_id", "position", "phase", "step", "expert_ids"])
    if requests is not None:
        trace = trace.take((trace.request_id >= requests[0]) & (trace.request_id < requests[1]))
    follows = (np.diff(trace.request_id) == 0) & (np.diff(trace.position) == 1)
    follows &= trace.phase[1:] == DECODE
    now, before = trace.expert_ids[1:][follows], trace.expert_ids[:-1][follows]
    same = (now[:, :, :, None] == before[:, :, None, :]).any(axis=3)
    return float(same.mean()) if len(same) else 0.0


def _digest(values: Mapping[str, Tensor] | None, settings: Mapping[str, Any]) -> str:
    """Return what tells one recording from another: the gates, and what was asked."""
    asked = [str(settings[key]) for key in ("requests", "seed", "new_tokens")]
    found = hashlib.sha256(" ".join(asked).encode())
    for name, tensor in sorted((values or {}).items()):
        found.update(name.encode() + tensor.float().numpy().tobytes())
    return found.hexdigest()[:16]


def _is_there(path: Path, note: str) -> bool:
    try:
        return note in read_meta(path).notes
    except (TraceError, OSError):
        return False


def _asked(
    subject: GateSubject, settings: Mapping[str, Any]
) -> tuple[list[list[int]], Generation, Annotation, dict[str, Any]]:
    """Return prompts, how to generate, what to write beside the routing, and what the header says."""
    if subject.is_tiny:
        return _tiny(settings)
    prompts = []
    for batch in subject.texts.held_out():
        for row, real in zip(batch.ids.tolist(), batch.real.sum(dim=1).tolist(), strict=True):
            prompts.append(row[: max(1, real // 2)])
    generation = Generation(max_new_tokens=settings["new_tokens"], batch_size=_TOGETHER)
    tokenizer = subject.tokenizer
    annotation = Annotation(piece=lambda token: str(tokenizer.decode([token])))
    described = {"name": str(subject.described["model"]), "tokenizer": type(tokenizer).__name__}
    return prompts[: settings["requests"]], generation, annotation, described


def _tiny(
    settings: Mapping[str, Any],
) -> tuple[list[list[int]], Generation, Annotation, dict[str, Any]]:
    """The bundled model's prompts and noise, as ``greenroom record --model tiny`` has them."""
    from argparse import Namespace

    from traces.record_subject import load_subject

    options = Namespace(
        model="tiny",
        prompts=None,
        requests=settings["requests"],
        seed=settings["seed"],
        device="cpu",
        licence="Apache-2.0",
    )
    found = load_subject(options)
    generation = Generation(
        max_new_tokens=settings["new_tokens"],
        temperature=found.temperature,
        seed=settings["seed"],
        batch_size=_TOGETHER,
        eos=found.eos,
    )
    return found.prompts, generation, replace(found.annotation), dict(found.described)
