"""From a trace to the steps an engine would run: closed loop, at most ``batch_size`` requests at once.

A waiting request joins as soon as a place is free: its whole prompt is one prefill step, after which
it decodes one token a step together with the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sim.types import ConfigError, LayerRouting, Phase, StepInfo
from traces.schema import NO_EXPERT

if TYPE_CHECKING:
    from traces.schema import Trace


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the trace: the rows of its prompt and of its decoded tokens, in order."""

    request_id: int
    prompt_rows: NDArray[np.intp]
    decode_rows: NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class WorkStep:
    """One forward pass: what may be known of it, the trace rows it processes, and what it completes.

    ``finished`` are the requests whose last token this step yields; ``held_kv_tokens`` the tokens
    whose keys and values are in memory, those of requests that sit the step out included.
    """

    info: StepInfo
    rows: NDArray[np.intp]
    finished: tuple[int, ...]
    held_kv_tokens: int


class Workload:
    """The steps of a run over some requests of a trace.

    Parameters
    ----------
    trace
        The recorded routing.
    batch_size
        Requests that run at one time, >= 1.
    requests
        Range of requests by order in the trace, (first, last + 1); None takes all. Those before it
        stay free for calibration.
    """

    def __init__(
        self, trace: Trace, batch_size: int = 1, requests: tuple[int, int | None] | None = None
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"workload.batch_size = {batch_size}: must be >= 1")
        self.trace = trace
        self.batch_size = batch_size
        self.requests = select_requests(trace, requests, "workload.requests")

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        return self.trace.meta.num_layers

    @property
    def num_experts(self) -> int:
        """Number of experts a layer."""
        return self.trace.meta.num_experts

    @property
    def num_steps(self) -> int:
        """Number of steps, counted by running the schedule once."""
        return sum(1 for _ in self.steps())

    def peak_kv_tokens(self) -> int:
        """Largest number of tokens whose keys and values are held at one time."""
        return max((step.held_kv_tokens for step in self.steps()), default=0)

    def steps(self) -> Iterator[WorkStep]:
        """Yield the steps in order."""
        waiting = deque(self.requests)
        running: list[tuple[Request, int]] = []  # a request and how many tokens it has decoded
        number = 0
        while waiting or running:
            if waiting and len(running) < self.batch_size:
                request = waiting.popleft()
                done = len(request.decode_rows) == 0
                if not done:
                    running.append((request, 0))
                if len(request.prompt_rows) == 0:  # an imported trace may have none
                    continue
                yield self._prefill(number, request, running, done)
            else:
                yield self._decode(number, running)
                grown = [(request, count + 1) for request, count in running]
                running = [(r, count) for r, count in grown if count < len(r.decode_rows)]
            number += 1

    def routings(self, step: WorkStep) -> list[LayerRouting]:
        """Return the routing of every layer for one step of this workload."""
        trace, rows = self.trace, step.rows
        ids = trace.expert_ids[rows]
        weights = None if trace.expert_weights is None else trace.expert_weights[rows]
        return split_layers(ids, trace.meta.num_experts, weights)

    def _prefill(
        self, number: int, request: Request, running: Sequence[tuple[Request, int]], done: bool
    ) -> WorkStep:
        rows = request.prompt_rows
        held = sum(len(r.prompt_rows) + count for r, count in running if r is not request)
        info = StepInfo(
            step=number,
            phase=Phase.PREFILL,
            num_tokens=len(rows),
            num_sequences=1,
            kv_tokens=len(rows),
            request_ids=(request.request_id,) * len(rows),
            texts=self._texts(rows),
        )
        finished = (request.request_id,) if done else ()
        return WorkStep(info, rows, finished, held + len(rows))

    def _decode(self, number: int, running: Sequence[tuple[Request, int]]) -> WorkStep:
        rows = np.array([r.decode_rows[count] for r, count in running], dtype=np.intp)
        info = StepInfo(
            step=number,
            phase=Phase.DECODE,
            num_tokens=len(rows),
            num_sequences=len(rows),
            kv_tokens=sum(len(r.prompt_rows) + count + 1 for r, count in running),
            request_ids=tuple(r.request_id for r, _ in running),
            texts=self._texts(rows),
        )
        finished = tuple(r.request_id for r, count in running if count + 1 == len(r.decode_rows))
        return WorkStep(info, rows, finished, info.kv_tokens)

    def _texts(self, rows: NDArray[np.intp]) -> tuple[str, ...] | None:
        text = self.trace.text
        return None if text is None else tuple(text[row] for row in rows)


def select_requests(trace: Trace, span: tuple[int, int | None] | None, field: str) -> list[Request]:
    """Return the requests of ``trace`` whose place in it lies in ``span``; ``field`` names it in errors."""
    order, first_rows = np.unique(trace.request_id, return_index=True)
    ids = order[np.argsort(first_rows, kind="stable")]
    first, last = span if span is not None else (0, None)
    last = len(ids) if last is None else last
    if not 0 <= first < last <= len(ids):
        raise ConfigError(
            f"{field} = [{first}, {last}]: must be a range within the trace's {len(ids)} requests"
        )
    by_request = np.argsort(trace.request_id, kind="stable")
    sorted_ids = trace.request_id[by_request]
    chosen = []
    for request_id in ids[first:last]:
        low, high = np.searchsorted(sorted_ids, [request_id, request_id + 1])
        rows = by_request[low:high]
        rows = rows[np.argsort(trace.position[rows], kind="stable")]
        prompt = trace.phase[rows] == Phase.PREFILL
        chosen.append(Request(int(request_id), rows[prompt], rows[~prompt]))
    return chosen


def split_layers(
    ids: NDArray[np.integer], num_experts: int, weights: NDArray[np.floating] | None = None
) -> list[LayerRouting]:
    """Turn one step's choices int[num_tokens, num_layers, top_k] into a routing for each layer.

    One token keeps the router's order; several give their union in index order with token counts.
    """
    num_tokens, num_layers, top_k = ids.shape
    offsets = np.arange(num_layers, dtype=np.int64)[:, None] * num_experts
    complete = not (ids == NO_EXPERT).any()
    if num_tokens == 1 and complete:
        ones = (1,) * top_k
        return [
            LayerRouting(layer, keys, ones, ids, weights)
            for layer, keys in enumerate((ids[0] + offsets).tolist())
        ]
    keys = ids + offsets
    flat = keys.ravel() if complete else keys[ids != NO_EXPERT]
    counts = np.bincount(flat, minlength=num_layers * num_experts)
    used = np.flatnonzero(counts)
    bounds = np.searchsorted(used, np.arange(num_layers + 1) * num_experts).tolist()
    experts, token_counts = used.tolist(), counts[used].tolist()
    return [
        LayerRouting(layer, experts[low:high], token_counts[low:high], ids, weights)
        for layer, (low, high) in enumerate(pairwise(bounds))
    ]
