"""Continuous batching: which tokens of which requests each step processes, decided step by step.

Requests are let in first come, first served, as places (``batch_size``) and KV memory allow. One that
does not fit yet waits, and those behind it wait with it; one that could never fit is refused when it
arrives. There may be more places in memory (``waiting``) than a batch holds: then each step decodes some
of those that are in memory (see sim/batching.py). A prompt is processed in chunks, each of them

    a step of its own, before decoding goes on                  (``mixed`` False), or
    beside one token of every request that decodes, as a rest   (``mixed`` True).

The last chunk of a prompt yields the request's first output token, every decoded token the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.arrivals import Arrivals
from sim.batching import Active, Batch, rows_of
from sim.tiling import Request
from sim.types import Phase, StepInfo

_NO_LIMIT = 1 << 62


class Admitted(NamedTuple):
    """A request whose first tokens a step processes."""

    request_id: int
    arrival_ns: int
    prompt_tokens: int


class Refused(NamedTuple):
    """A request that was turned away on arrival, for it could never have fitted."""

    request_id: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class WorkStep:
    """One forward pass: what may be known of it, the trace rows it processes, and what it completes.

    ``admitted`` are the requests whose first step it is; ``yields`` those that have one more output
    token when it ends, ``finished`` those of which that is the last; ``waited`` (request_id, steps that
    decoded without it) those that run again after a wait.
    """

    info: StepInfo
    rows: NDArray[np.intp]
    admitted: tuple[Admitted, ...]
    yields: tuple[int, ...]
    finished: tuple[int, ...]
    waited: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and the batch may hold; None is no limit.

    ``prompt_tokens`` bounds the prompt tokens of one step, ``kv_tokens`` the final lengths of all
    requests that are in memory at one time. ``waiting`` is how many these may be; None: no more than
    ``batch_size``. ``max_wait_steps``: see sim/batching.py.
    """

    batch_size: int
    prompt_tokens: int | None = None
    mixed: bool = False
    kv_tokens: int | None = None
    waiting: int | None = None
    max_wait_steps: int | None = None

    @property
    def places(self) -> int:
        """Requests that are in memory at one time, at most."""
        return self.batch_size if self.waiting is None else self.waiting

    def fits_alone(self, request: Request) -> bool:
        """Tell whether a request could run if it had the machine to itself."""
        return self.kv_tokens is None or len(request.rows) <= self.kv_tokens


class Schedule:
    """The steps of one run; the driver takes them by turns of :meth:`next` and :meth:`ended`.

    Parameters
    ----------
    requests
        In the order in which they arrive; ids differ.
    arrivals, limits
        When, and how many at a time.
    texts, stages
        The decoded piece and the annotated stage of each row of the trace, or None.
    batch
        Who decodes, where that is not all; by default made from ``limits``.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        arrivals: Arrivals,
        limits: Limits,
        texts: Sequence[str] | None = None,
        stages: NDArray[np.int16] | None = None,
        batch: Batch | None = None,
    ) -> None:
        self.refused: list[Refused] = []
        self._requests = requests
        self._arrivals = arrivals
        self._limits = limits
        self._texts = texts
        self._stages = stages
        self._prompt_limit = limits.prompt_tokens or _NO_LIMIT
        self._kv_limit = _NO_LIMIT if limits.kv_tokens is None else limits.kv_tokens
        self._num_come = self._number = 0
        self._waiting: deque[tuple[Request, int]] = deque()  # and its arrival_ns
        self._num_running = self._reserved_tokens = self._held_tokens = 0
        self._partial: Active | None = None  # within its prompt: at most one, for they take turns
        may_wait = limits.places > limits.batch_size
        self._batch = batch or Batch(limits.batch_size, may_wait, limits.max_wait_steps)
        self._joining: list[Admitted] = []  # let in, but in no step yet
        self._is_under_way = False

    # -- what a driver calls --------------------------------------------------------------------

    def next(self, now_ns: int) -> WorkStep | int | None:
        """Return the step that starts now; the time before which none can; or None when all is done.

        The step under way must have ended.
        """
        if self._is_under_way:
            raise RuntimeError("the step under way has not ended")
        if self._num_come < len(self._requests):
            self._let_arrive(now_ns)
        parts = self._prompt_parts() if self._partial is not None or self._waiting else ()
        if not parts and not self._batch.members:
            return self._arrivals.next_ns() if self._num_come < len(self._requests) else None
        self._is_under_way = True
        step = self._join(parts) if parts else self._decode()
        self._number += 1
        return step

    def ended(self, step: WorkStep, now_ns: int) -> None:
        """Learn that the step under way has ended: places and memory of finished requests are free."""
        self._is_under_way = False
        if not step.finished:
            return
        for sequence in self._batch.drop_finished():
            self._leave(sequence)
            self._arrivals.freed(now_ns)

    # -- who may come in ------------------------------------------------------------------------

    def _let_arrive(self, now_ns: int) -> None:
        """Queue the requests that have arrived by now, or refuse them."""
        while self._num_come < len(self._requests):
            arrival_ns = self._arrivals.next_ns()
            if arrival_ns is None or arrival_ns > now_ns:
                return
            request = self._requests[self._num_come]
            self._num_come += 1
            fits = self._limits.fits_alone(request)
            self._arrivals.take(refused=not fits)
            if fits:
                self._waiting.append((request, arrival_ns))
            else:
                lengths = request.num_prompt, request.num_outputs
                self.refused.append(Refused(request.request_id, arrival_ns, *lengths))

    def _admit(self) -> Active | None:
        """Let the first in the queue in, if there is one and it fits now."""
        if not self._waiting or self._num_running >= self._limits.places:
            return None
        request, arrival_ns = self._waiting[0]
        if self._reserved_tokens + len(request.rows) > self._kv_limit:
            return None
        self._waiting.popleft()
        self._num_running += 1
        self._reserved_tokens += len(request.rows)
        self._joining.append(Admitted(request.request_id, arrival_ns, request.num_prompt))
        return Active(request)

    def _leave(self, sequence: Active) -> None:
        self._num_running -= 1
        self._reserved_tokens -= sequence.num_rows
        self._held_tokens -= sequence.num_rows

    # -- what a step holds ----------------------------------------------------------------------

    def _prompt_parts(self) -> list[tuple[Active, int]]:
        """Choose the prompt tokens of this step, (request, how many), and let requests in for it."""
        room, parts = self._prompt_limit, list[tuple[Active, int]]()
        sequence, self._partial = self._partial or self._admit(), None
        while sequence is not None:
            if sequence.num_prompt:
                taken = min(room, sequence.num_prompt - sequence.done)
                parts.append((sequence, taken))
                room -= taken
                if not room or not self._limits.mixed:
                    break
            else:  # an imported trace may have no prompt: it begins with decoding
                self._batch.add([sequence])
            sequence = self._admit()
        return parts

    def _decode(self) -> WorkStep:
        """Make a step of one token of every request whose turn it is to decode."""
        waited = self._batch.take_turn()
        rows, finished, kv_tokens = self._decode_rows()
        ids = self._batch.running_ids
        sizes = len(ids), len(ids), kv_tokens, kv_tokens
        return self._work_step(Phase.DECODE, rows, ids, *sizes, ids, finished, waited)

    def _decode_rows(self) -> tuple[NDArray[np.intp], tuple[int, ...], int]:
        """Advance every request whose turn it is by a token; return rows, finished ids, KV entries."""
        sequences = self._batch.running
        if len(sequences) == 1:
            sequence = sequences[0]
            done = sequence.done
            sequence.done = kv_tokens = done + 1
            finished = self._batch.running_ids if kv_tokens == sequence.num_rows else ()
            return sequence.rows[done:kv_tokens], finished, kv_tokens
        rows = rows_of(sequences)
        kv_tokens = 0
        for sequence in sequences:
            sequence.done += 1
            kv_tokens += sequence.done
        finished = tuple([s.request_id for s in sequences if s.done == s.num_rows])
        return rows, finished, kv_tokens

    def _join(self, parts: Sequence[tuple[Active, int]]) -> WorkStep:
        """Make a step of prompt parts and, if mixed, of one token of every decoding request."""
        pieces, kv_tokens = list[NDArray[np.intp]](), 0
        ids: tuple[int, ...] = ()
        finished: tuple[int, ...] = ()
        waited: tuple[tuple[int, int], ...] = ()
        if self._limits.mixed and self._batch.members:
            waited = self._batch.take_turn()
            rows, finished, kv_tokens = self._decode_rows()
            pieces, ids = [rows], self._batch.running_ids
        phase = Phase.MIXED if ids else Phase.PREFILL
        yields, pairs, num_decoding = ids, kv_tokens, len(ids)
        for sequence, taken in parts:
            done = sequence.done + taken
            pieces.append(sequence.rows[sequence.done : done])
            sequence.done = done
            ids += (sequence.request_id,) * taken
            kv_tokens += done
            pairs += taken * done - taken * (taken - 1) // 2
            if done < sequence.num_prompt:
                self._partial = sequence
                continue
            yields += (sequence.request_id,)
            if done == sequence.num_rows:
                finished += (sequence.request_id,)
        rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        sizes = num_decoding, num_decoding + len(parts), kv_tokens, pairs
        step = self._work_step(phase, rows, ids, *sizes, yields, finished, waited)
        begun = [s for s, _ in parts if s is not self._partial]  # they decode from the next step on
        self._batch.add(begun)
        return step

    def _work_step(
        self,
        phase: Phase,
        rows: NDArray[np.intp],
        ids: tuple[int, ...],
        num_decoding: int,
        num_sequences: int,
        kv_tokens: int,
        pairs: int,
        yields: tuple[int, ...],
        finished: tuple[int, ...],
        waited: tuple[tuple[int, int], ...],
    ) -> WorkStep:
        texts, num_tokens = self._texts, len(rows)
        self._held_tokens += num_tokens
        info = StepInfo(
            step=self._number,
            phase=phase,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            kv_tokens=kv_tokens,
            attention_pairs=pairs,
            held_kv_tokens=self._held_tokens,
            num_outputs=len(yields),
            num_decoding=num_decoding,
            request_ids=ids,
            texts=None if texts is None else tuple([texts[row] for row in rows.tolist()]),
            stages=None if self._stages is None else tuple(self._stages[rows].tolist()),
        )
        admitted = self._take_admitted(phase) if self._joining else ()
        return WorkStep(info, rows, admitted, yields, finished, waited)

    def _take_admitted(self, phase: Phase) -> tuple[Admitted, ...]:
        """Return the newcomers that this step begins with; those without a prompt wait for decoding."""
        joining, self._joining = self._joining, []
        if phase == Phase.PREFILL and not self._limits.mixed:
            self._joining = [one for one in joining if not one.prompt_tokens]
            joining = [one for one in joining if one.prompt_tokens]
        return tuple(joining)
