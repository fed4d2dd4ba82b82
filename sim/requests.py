"""The request table: when each request came, began, gave its first and its last token, or was refused."""

from __future__ import annotations

from enum import IntEnum

from sim.schedule import Refused, WorkStep
from sim.tables import Table

REQUEST_COLUMNS = (
    "request_id",
    "arrival_ns",
    "start_ns",
    "first_token_ns",
    "end_ns",
    "prompt_tokens",
    "output_tokens",
    "ttft_ns",
    "tpot_ns",
    "queue_ns",
    "wait_steps",
    "longest_wait_steps",
    "outcome",
)


class Outcome(IntEnum):
    """How a request ended."""

    DONE = 0
    REFUSED = 1  # it could never have fitted; times it never had are -1


class _Life:
    """What is known of a request under way."""

    __slots__ = (
        "arrival_ns",
        "first_ns",
        "longest_wait_steps",
        "output_tokens",
        "prompt_tokens",
        "start_ns",
        "wait_steps",
    )

    def __init__(self, arrival_ns: int, start_ns: int, prompt_tokens: int) -> None:
        self.arrival_ns = arrival_ns
        self.start_ns = start_ns
        self.prompt_tokens = prompt_tokens
        self.first_ns = self.output_tokens = self.wait_steps = self.longest_wait_steps = 0


class RequestClock:
    """Follows requests through steps; adds a row to ``table`` as each ends or is refused.

    None: a table that keeps its rows. ``start_ns`` is the start of the first step that processes a
    token of the request; what the other columns mean stands at the head of sim/metrics.py.
    """

    def __init__(self, table: Table | None = None) -> None:
        self.table = Table(REQUEST_COLUMNS) if table is None else table
        self._under_way: dict[int, _Life] = {}

    def end_step(self, step: WorkStep, start_ns: int, end_ns: int) -> None:
        """Learn that a step ran from ``start_ns`` to ``end_ns``."""
        lives = self._under_way
        for request, arrival_ns, prompt_tokens in step.admitted:
            lives[request] = _Life(arrival_ns, start_ns, prompt_tokens)
        for request, steps in step.waited:
            lives[request].wait_steps += steps
            lives[request].longest_wait_steps = max(lives[request].longest_wait_steps, steps)
        for request in step.yields:
            life = lives[request]
            if not life.output_tokens:
                life.first_ns = end_ns
            life.output_tokens += 1
        for request in step.finished:
            self._finish(request, lives.pop(request), end_ns)

    def refuse(self, refused: Refused) -> None:
        """Add the row of a request that was turned away on arrival."""
        request, arrival_ns, prompt_tokens, output_tokens = refused
        times = (arrival_ns, -1, -1, arrival_ns)
        counts = (prompt_tokens, output_tokens)
        self.table.append((request, *times, *counts, -1, -1, -1, -1, -1, Outcome.REFUSED))

    def _finish(self, request: int, life: _Life, end_ns: int) -> None:
        tokens = life.output_tokens
        times = (life.arrival_ns, life.start_ns, life.first_ns, end_ns)
        ttft_ns = life.first_ns - life.arrival_ns
        tpot_ns = (end_ns - life.first_ns) // (tokens - 1) if tokens > 1 else 0
        spans = (ttft_ns, tpot_ns, life.start_ns - life.arrival_ns)
        counts = life.prompt_tokens, tokens
        waits = life.wait_steps, life.longest_wait_steps
        self.table.append((request, *times, *counts, *spans, *waits, Outcome.DONE))
