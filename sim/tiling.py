"""The requests of a run out of those of a trace: chosen, cut or tiled to a length, repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sim.types import ConfigError, Phase
from traces.schema import Trace

_MOST_TOKENS = 10**8


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its rows of the trace in order, of which the first ``num_prompt`` are its prompt.

    ``source_id`` is the request of the trace that it was made from.
    """

    request_id: int
    rows: NDArray[np.intp]
    num_prompt: int
    source_id: int

    @property
    def prompt_rows(self) -> NDArray[np.intp]:
        """Rows of the prompt."""
        return self.rows[: self.num_prompt]

    @property
    def decode_rows(self) -> NDArray[np.intp]:
        """Rows of the decoded tokens."""
        return self.rows[self.num_prompt :]

    @property
    def num_outputs(self) -> int:
        """Output tokens; the last of them is never processed, so that it has no row."""
        return len(self.rows) - self.num_prompt + (self.num_prompt > 0)


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
    for request_id in ids[first:last].tolist():
        low, high = np.searchsorted(sorted_ids, [request_id, request_id + 1])
        rows = by_request[low:high]
        rows = rows[np.argsort(trace.position[rows], kind="stable")]
        is_prompt = trace.phase[rows] == Phase.PREFILL
        rows = np.concatenate([rows[is_prompt], rows[~is_prompt]])
        chosen.append(Request(request_id, rows, int(is_prompt.sum()), request_id))
    return chosen


@dataclass(frozen=True, slots=True)
class Tiling:
    """How recorded requests are made into the requests of a run.

    length
        (prompt, output) tokens of every request, both >= 1; None leaves each as recorded. The rows
        of a recorded request, prompt first, are one sequence, which begins anew where it is too
        short; of a request's rows the first ``prompt`` are its prompt.
    cut
        Whether a long request gives as many consecutive ones of ``length`` as it holds, rather than
        its first.
    repeat
        How many times the list of requests runs.
    """

    length: tuple[int, int] | None = None
    cut: bool = False
    repeat: int = 1

    def __post_init__(self) -> None:
        if self.length is not None and min(self.length) < 1:
            raise ConfigError(f"workload.length = {list(self.length)}: both must be >= 1")
        if self.cut and self.length is None:
            raise ConfigError("workload.cut = true: must come with a workload.length")
        if self.repeat < 1:
            raise ConfigError(f"workload.repeat = {self.repeat}: must be >= 1")

    def apply(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests of the run; those made from one that gives several are numbered anew."""
        self._check_total(requests)
        made = [piece for request in requests for piece in self._pieces(request)] * self.repeat
        if len(made) == len(requests):
            return made
        return [replace(request, request_id=number) for number, request in enumerate(made)]

    def note(self, requests: Sequence[Request]) -> str:
        """Say in words what :meth:`apply` makes of ``requests``; empty if nothing."""
        words = []
        if self.length is not None:
            prompt, output = self.length
            tiled = sum(len(request.rows) < self._num_rows() for request in requests)
            how = "cut into consecutive requests of" if self.cut else "cut or tiled to"
            words.append(f"requests are {how} {prompt} prompt and {output} output tokens")
            if tiled:
                words.append(
                    f"{tiled} of {len(requests)} were shorter and repeat their rows, "
                    "so that they reuse experts more than recorded"
                )
        if self.repeat > 1:
            words.append(f"the list of requests runs {self.repeat} times over")
        return "; ".join(words)

    def _check_total(self, requests: Sequence[Request]) -> None:
        """Refuse work that no machine could hold the list of, before it is made."""
        rows = [
            max(len(r.rows), self._num_rows()) if self.length else len(r.rows) for r in requests
        ]
        total = sum(rows) * self.repeat
        if total > _MOST_TOKENS:
            field = "length" if self.length else "repeat"
            shown = list(self.length) if self.length else self.repeat
            raise ConfigError(
                f"workload.{field} = {shown}: makes {total} tokens of {len(requests)} request"
                f"{'s' * (len(requests) != 1)}, run "
                f"{self.repeat} times: must be at most {_MOST_TOKENS}; lower it, or take fewer "
                "workload.requests"
            )

    def _num_rows(self) -> int:
        """Return the rows of a request of ``length``: its last output token has none."""
        assert self.length is not None
        return sum(self.length) - 1

    def _pieces(self, request: Request) -> Iterator[Request]:
        """Yield what one recorded request is made into."""
        if self.length is None:
            yield request
            return
        num_rows, found = self._num_rows(), len(request.rows)
        count = max(1, found // num_rows) if self.cut else 1
        for first in range(0, count * num_rows, num_rows):
            rows = request.rows[np.arange(first, first + num_rows) % found]
            yield Request(request.request_id, rows, self.length[0], request.source_id)
