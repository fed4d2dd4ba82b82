"""Writes synthetic traces: requests drawn from a fitted model, composed into steps, chunk by chunk.

The header says "synthetic" and what the model was fitted to. A request's routing depends on the seed and
on its number only; the batch size decides which rows share a step, and nothing else. Memory holds one
block of tokens of each request that runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.schema import DECODE, PREFILL, Provenance, Trace, TraceError, TraceMeta, concat
from traces.synth_draw import RequestRoutes, Router, Routes, stage_generator
from traces.synth_model import SynthModel
from traces.synth_scores import BLOCK_TOKENS

_CHUNK_TOKENS = 2048
_LONGEST = 4
"""A request whose stages decide when it ends is cut at so many times the source's longest one."""


MOST_REQUEST_TOKENS = 2**22
"""Rows of a request's phase, at most: its stages are drawn before its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be drawn.

    Attributes
    ----------
    num_requests, num_tokens
        How many requests, how many rows in all; with both, whatever is reached first. The last request
        is cut short to meet ``num_tokens``. None and None: as many requests as the source has.
    prompt_tokens, output_tokens
        Rows of prefill (>= 1) and decode (>= 0) of each request. None: as the source's stages end where
        it has its own; else as one of the source's requests.
    batch_size
        Requests that run at a time: each starts when another has ended, its prompt in one step.
    seed
        Of all that is drawn.
    weights
        Whether to write expert weights.
    """

    num_requests: int | None = None
    num_tokens: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    batch_size: int = 1
    seed: int = 0
    weights: bool = True

    def __post_init__(self) -> None:
        least = {"num_requests": 1, "num_tokens": 1, "prompt_tokens": 1, "output_tokens": 0}
        for name, bound in {**least, "batch_size": 1, "seed": 0}.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise TraceError(f"{name} is {value}: must be >= {bound}")
        for name in ("prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if value is not None and value > MOST_REQUEST_TOKENS:
                raise TraceError(f"{name} is {value}: must be <= {MOST_REQUEST_TOKENS}")


def header(model: SynthModel, wanted: Wanted, about: Mapping[str, Any] | None = None) -> TraceMeta:
    """Return the header of what is drawn.

    ``about`` has fields of ``TraceMeta`` that are known of the model whose shape it is, its name as
    ``model`` among them.
    """
    source, about = model.source, dict(about or {})
    shape = (model.num_layers, model.num_experts, model.top_k)
    name = about.pop("model", source["model"])
    fitted = f"{source['kind']} {source['model']}, {source['tokens']} tokens"
    return TraceMeta(
        model=f"{name} (synthetic)",
        num_layers=model.num_layers,
        num_experts=model.num_experts,
        top_k=model.top_k,
        layer_indices=tuple(about.pop("layer_indices", range(model.num_layers))),
        provenance=Provenance("synthetic", f"greenroom synth, fitted to {fitted}", _detail(model)),
        scoring="softmax",
        normalized=True,
        weight_semantics="applied" if wanted.weights else "none",
        sorted_by_weight=True,
        recorder="greenroom synth",
        seed=wanted.seed,
        stage_names=model.stage_names,
        notes=_notes(model, shape != tuple(source["shape"])),
        licence=source["licence"],
        **about,
    )


def _detail(model: SynthModel) -> str:
    layers, experts, top_k = model.source["shape"]
    now = f"{model.num_layers} layers of {model.num_experts} experts, top-{model.top_k}"
    return (
        f"drawn from a Gaussian score model of rank {model.rank} fitted to {model.source['name']} "
        f"({layers} layers of {experts} experts, top-{top_k}); shape here: {now}"
    )


def _notes(model: SynthModel, is_scaled: bool) -> tuple[str, ...]:
    notes = ["synthetic: drawn from a fitted model; no row of it was recorded"]
    if is_scaled:
        notes.append("scaled: skew and persistence are the source's, not of a model of this shape")
    if not model.stages_told:
        notes.append("stages are clusters of the source's windows of 64 tokens, without a meaning")
    return (*notes, *model.notes)


class Request(NamedTuple):
    """A request to be drawn: its number, rows of prefill, and the stage of each row."""

    number: int
    prompt_tokens: int
    stages: NDArray[np.int16]  # of all rows


def requests(model: SynthModel, wanted: Wanted) -> Iterator[Request]:
    """Yield requests until there are as many, or as many rows, as wanted."""
    left = wanted.num_tokens
    most = wanted.num_requests
    if most is None and left is None:
        most = len(model.lengths_tokens)
    number = 0
    while (most is None or number < most) and (left is None or left > 0):
        request = _request(model, wanted, number)
        if left is not None:
            request = request._replace(stages=request.stages[:left])
            left -= len(request.stages)
        yield request
        number += 1


def _request(model: SynthModel, wanted: Wanted, number: int) -> Request:
    """Draw a request's length and stages."""
    rng = stage_generator(wanted.seed, number)
    prompt, output = wanted.prompt_tokens, wanted.output_tokens
    if not model.stages_told or (prompt is None) != (output is None):
        like = model.lengths_tokens[rng.integers(len(model.lengths_tokens))]
        prompt = max(1, int(like[0])) if prompt is None else prompt
        output = int(like[1]) if output is None else output
    longest = _LONGEST * int(model.lengths_tokens.sum(axis=1).max())
    first = model.prefill_chain.draw(prompt, rng)
    then = model.decode_chain.draw(output, rng) if output != 0 else first[:0]
    if output is None:
        then = then[:longest]
    return Request(number, len(first), np.concatenate([first, then]))


class _Slot:
    """A request that runs: what is drawn of it and has not been written."""

    def __init__(self, request: Request, routes: RequestRoutes, weights: bool) -> None:
        self.request, self._routes, self._weights = request, routes, weights
        self.position = 0
        self._block = Routes(np.empty((0, 0, 0), dtype=np.uint16), None)
        self._at = 0

    @property
    def in_prompt(self) -> bool:
        return self.position < self.request.prompt_tokens

    @property
    def left(self) -> int:
        """Rows that are to come."""
        return len(self.request.stages) - self.position

    def ready(self) -> int:
        """Return how many rows can be taken at once; draws a block where there is none."""
        if self._at == len(self._block.expert_ids):
            stages = self.request.stages[self.position : self.position + BLOCK_TOKENS]
            self._block, self._at = self._routes.next(stages, self._weights), 0
        return len(self._block.expert_ids) - self._at

    def take(self, count: int, meta: TraceMeta, first_step: int, is_prompt: bool) -> Trace:
        """Return the next rows: one a step, or all of one step for rows of the prompt."""
        rows = slice(self._at, self._at + count)
        positions = np.arange(self.position, self.position + count, dtype=np.int32)
        ahead = 0 if is_prompt else np.arange(count, dtype=np.int32)
        weights = self._block.expert_weights
        taken = Trace(
            meta,
            request_id=np.full(count, self.request.number, dtype=np.int32),
            position=positions,
            phase=np.full(count, PREFILL if is_prompt else DECODE, dtype=np.uint8),
            step=np.full(count, first_step, dtype=np.int32) + ahead,
            expert_ids=self._block.expert_ids[rows],
            stage=self.request.stages[positions],
            expert_weights=None if weights is None else weights[rows],
        )
        self._at += count
        self.position += count
        return taken


def draw_trace(model: SynthModel, wanted: Wanted, meta: TraceMeta) -> Iterator[Trace]:
    """Yield the rows in chunks of some thousand, in the order of their steps.

    ``meta`` is what ``header`` gave. Requests join as others end, so that each step but the last ones
    has ``batch_size`` requests; rows of a step are in the order of the slots.
    """
    pieces: list[Trace] = []
    for piece in _pieces(model, wanted, meta):
        pieces.append(piece)
        if sum(map(len, pieces)) >= _CHUNK_TOKENS:
            yield concat(pieces)
            pieces = []
    if pieces:
        yield concat(pieces)


def _pieces(model: SynthModel, wanted: Wanted, meta: TraceMeta) -> Iterator[Trace]:
    router, waiting = Router(model), requests(model, wanted)
    slots: list[_Slot] = []
    step = 0
    while True:
        while len(slots) < wanted.batch_size and (request := next(waiting, None)) is not None:
            routes = router.request(request.number, wanted.seed)
            slots.append(_Slot(request, routes, wanted.weights))
        if not slots:
            return
        if any(slot.in_prompt for slot in slots):
            for slot in slots:
                yield from _one_step(slot, meta, step)
            step += 1
        else:
            count = min(slot.ready() for slot in slots)
            yield _interleaved([slot.take(count, meta, step, False) for slot in slots])
            step += count
        slots = [slot for slot in slots if slot.left]


def _one_step(slot: _Slot, meta: TraceMeta, step: int) -> Iterator[Trace]:
    """Yield a slot's rows of a step in which a prompt is read: its whole prompt, or one token."""
    if not slot.in_prompt:
        slot.ready()
        yield slot.take(1, meta, step, False)
        return
    end = min(slot.request.prompt_tokens, len(slot.request.stages))
    while slot.position < end:
        yield slot.take(min(slot.ready(), end - slot.position), meta, step, True)


def _interleaved(parts: list[Trace]) -> Trace:
    """Order rows of as many steps of each slot by step, then by slot."""
    if len(parts) == 1:
        return parts[0]
    rows = concat(parts)
    order = np.arange(len(rows)).reshape(len(parts), -1).T.ravel()
    return rows.take(order)
