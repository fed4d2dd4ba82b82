"""From a trace to the work of a run: which requests, when they arrive, how they are batched."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import compress, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.arrivals import CLOSED, POISSON, Arrivals, ClosedLoop, OpenLoop, poisson_ns, recorded_ns
from sim.batching import Batch, TokenKeys
from sim.policies.base import BatchFormer
from sim.routing import ordering
from sim.schedule import Admitted, Limits, Refused, Schedule, WorkStep
from sim.tiling import Request, Tiling, select_requests
from sim.types import Choices, ConfigError, LayerRouting
from traces.schema import NO_EXPERT, Trace

__all__ = [
    "Admitted",
    "Refused",
    "Request",
    "Schedule",
    "WorkStep",
    "Workload",
    "select_requests",
    "split_layers",
]

_BLOCK_TOKENS = 1024


class Workload:
    """What a run has to do; :meth:`schedule` plays it, as often as one likes.

    Parameters
    ----------
    trace
        The recorded routing.
    batch_size
        Requests of which one step decodes a token at most, >= 1.
    requests
        The requests to run, or a range of them by order in the trace, (first, last + 1); None takes
        all. Those left out stay free for calibration.
    prefill_chunk
        Prompt tokens that one step processes at most, >= 1; None: a prompt is processed at once.
    mixed
        False: prompt chunks are steps of their own, one request at a time, before decoding goes on.
        True: every step decodes, and takes prompt tokens besides.
    arrivals
        "closed": a request arrives when a place is free; "poisson": ``rate_per_s`` arrivals a second,
        drawn from ``seed``; else a file of times (see :func:`sim.arrivals.recorded_ns`).
    length, cut, repeat
        See :class:`sim.tiling.Tiling`.
    kv_limit_tokens
        Sum of the final lengths of all requests that are in memory at one time, at most; None: no limit.
    waiting
        Requests that are in memory at one time, >= batch_size, so that a step decodes some of them
        (see sim/batching.py); None: batch_size.
    max_wait_steps
        Steps after which one that was left out must run, >= 0; None: no bound.
    expert_order
        In which order an event's experts are served and admitted: "router" (one token: as its router
        ranks them, several: by index), "index", or "tokens" (those that serve most tokens first).

    ``one_by_one`` may be set to make every expert an event of its own: for counts only, not for time.
    """

    def __init__(
        self,
        trace: Trace,
        batch_size: int = 1,
        requests: tuple[int, int | None] | list[Request] | None = None,
        *,
        prefill_chunk: int | None = None,
        mixed: bool = False,
        arrivals: str = CLOSED,
        rate_per_s: float | None = None,
        seed: int = 0,
        length: tuple[int, int] | None = None,
        cut: bool = False,
        repeat: int = 1,
        kv_limit_tokens: int | None = None,
        waiting: int | None = None,
        max_wait_steps: int | None = None,
        expert_order: str = "router",
    ) -> None:
        for name, count in (
            ("batch_size", batch_size),
            ("prefill_chunk", prefill_chunk),
            ("kv_limit_tokens", kv_limit_tokens),
        ):
            if count is not None and count < 1:
                raise ConfigError(f"workload.{name} = {count}: must be >= 1")
        if waiting is not None and waiting < batch_size:
            raise ConfigError(
                f"workload.waiting = {waiting}: must be >= workload.batch_size = {batch_size}, or null"
            )
        if requests is None or isinstance(requests, tuple):
            requests = select_requests(trace, requests, "workload.requests")
        tiling = Tiling(length, cut, repeat)
        self.trace = trace
        self.batch_size = batch_size
        self.requests: Sequence[Request] = tiling.apply(requests)
        places = waiting, max_wait_steps
        self.limits = Limits(batch_size, prefill_chunk, mixed, kv_limit_tokens, *places)
        self._make_former: Callable[[], BatchFormer] | None = None
        self._former_key: Hashable = None
        self._order = ordering(expert_order)
        self.one_by_one = False
        self.made_note = tiling.note(requests)
        self.is_open = arrivals != CLOSED
        self._times_ns = _times_ns(arrivals, rate_per_s, seed, len(self.requests))

    @classmethod
    def from_settings(
        cls,
        settings: Mapping[str, Any],
        trace: Trace,
        kept_back: Sequence[tuple[int, int]] = (),
    ) -> Workload:
        """Return the work that the ``workload`` settings describe.

        Without ``workload.requests`` it leaves out those that calibration and warm-up keep back, ranges
        by order in the trace, unless that leaves none.
        """
        options = {k: v for k, v in settings.items() if k not in ("requests", "warm_up")}
        if options["length"] is not None:
            options["length"] = tuple(options["length"])
        span = settings["requests"]
        chosen = select_requests(trace, tuple(span) if span else None, "workload.requests")
        if span is None:
            aside = {place for spared in kept_back for place in range(*spared)}
            chosen = [r for place, r in enumerate(chosen) if place not in aside] or chosen
        return cls(trace, requests=chosen, **options)

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        return self.trace.meta.num_layers

    @property
    def num_experts(self) -> int:
        """Number of experts a layer."""
        return self.trace.meta.num_experts

    @property
    def num_steps(self) -> int | None:
        """Number of steps; None where it depends on the clock (open arrivals)."""
        return None if self.is_open else self._extent[0]

    @property
    def num_choices(self) -> int:
        """Number of (token, expert) choices of all requests, which is what knowing the future takes."""
        meta = self.trace.meta
        return sum(len(request.rows) for request in self.requests) * meta.num_layers * meta.top_k

    def peak_kv_tokens(self) -> int:
        """Most tokens whose keys and values are held at one time; with open arrivals a bound on it."""
        if not self.is_open:
            return self._extent[1]
        lengths = [len(request.rows) for request in self.requests if self._fits(request)]
        bound = sum(sorted(lengths, reverse=True)[: self.limits.places])
        limit = self.limits.kv_tokens
        return bound if limit is None else min(bound, limit)

    def limit_kv(self, tokens: int) -> None:
        """Let requests in only while the final lengths of all that run come to at most ``tokens``."""
        limit = self.limits.kv_tokens
        self.limits = replace(
            self.limits, kv_tokens=tokens if limit is None else min(limit, tokens)
        )
        self.__dict__.pop("_extent", None)  # of the schedule without this limit

    def form_batches(self, make: Callable[[], BatchFormer], key: Hashable) -> None:
        """Let a rule choose who decodes; ``make`` gives a fresh one for each time that the work is played.

        ``key`` tells the rule from others. Without it the longest waiting run first.
        """
        self._make_former, self._former_key = make, key
        self.__dict__.pop("_extent", None)  # of the schedule without this rule

    @property
    def has_choice(self) -> bool:
        """Tell whether more requests may be in memory than a step decodes."""
        return self.limits.places > self.limits.batch_size

    def token_keys(self) -> TokenKeys:
        """Return the experts of the tokens of this work's requests."""
        return TokenKeys(self.trace, self.requests)

    def key(self) -> tuple[Any, ...]:
        """Return what tells this work from other work on the same trace; hashable."""
        lengths = tuple((r.source_id, r.num_prompt, len(r.rows)) for r in self.requests)
        times_ns = None if self._times_ns is None else tuple(self._times_ns)
        return (lengths, self.limits, times_ns, self._former_key)

    def schedule(self) -> Schedule:
        """Return the steps of a run, to be played from its beginning."""
        arrivals: Arrivals
        if self._times_ns is None:
            arrivals = ClosedLoop(min(self.limits.places, len(self.requests)))
        else:
            arrivals = OpenLoop(self._times_ns)
        marks = self.trace.text, self.trace.stage
        return Schedule(self.requests, arrivals, self.limits, *marks, self._batch())

    def steps(self) -> Iterator[WorkStep]:
        """Yield the steps of a run in which no step takes any time.

        In a closed loop they are those of any run; open arrivals find each earlier one done.
        """
        schedule, now_ns = self.schedule(), 0
        while (step := schedule.next(now_ns)) is not None:
            if isinstance(step, int):
                now_ns = step
                continue
            yield step
            schedule.ended(step, now_ns)

    def routings(self, step: WorkStep) -> list[LayerRouting]:
        """Return the routing of every layer for one step of this workload."""
        trace, rows = self.trace, step.rows
        one = len(rows) == 1  # a view will do
        choices = Choices(trace, slice(rows[0], rows[0] + 1) if one else rows, self._order)
        ids = choices.column("expert_ids")
        assert ids is not None
        routings = split_layers(ids, trace.meta.num_experts, choices)
        if self._order is not None:
            routings = [self._order(routing) for routing in routings]
        if self.one_by_one:
            return [
                routing.reordered([key], [tokens])
                for routing in routings
                for key, tokens in zip(routing.experts, routing.token_counts, strict=True)
            ]
        return routings

    def _batch(self) -> Batch | None:
        """Return who decides which requests decode; None where all of them do, or the longest waiting."""
        limits, make = self.limits, self._make_former
        if make is None or not self.has_choice:
            return None
        bound, keys_of_row = limits.max_wait_steps, self.token_keys().of_row
        return Batch(limits.batch_size, True, bound, make(), keys_of_row)

    def _fits(self, request: Request) -> bool:
        return self.limits.fits_alone(request)

    @cached_property
    def _extent(self) -> tuple[int, int]:
        """Number of steps and peak of KV tokens, found by playing the schedule once."""
        count = peak = 0
        for step in self.steps():
            count += 1
            peak = max(peak, step.info.held_kv_tokens)
        return count, peak


def _times_ns(
    arrivals: str, rate_per_s: float | None, seed: int, num_requests: int
) -> list[int] | None:
    """Return the arrival times of a run's requests; None in a closed loop."""
    if arrivals == CLOSED:
        return None
    if arrivals != POISSON:
        return recorded_ns(arrivals, num_requests)
    if rate_per_s is None or not rate_per_s > 0:
        raise ConfigError(
            f"workload.rate_per_s = {rate_per_s}: must be > 0, as workload.arrivals is {POISSON!r}"
        )
    return poisson_ns(num_requests, rate_per_s, seed)


@lru_cache(maxsize=8)
def _first_keys(num_layers: int, num_experts: int) -> NDArray[np.int64]:
    """Return the key of each layer's expert 0, int64[num_layers, 1]."""
    return np.arange(num_layers, dtype=np.int64)[:, None] * num_experts


def split_layers(
    ids: NDArray[np.integer], num_experts: int, choices: Choices | None = None
) -> list[LayerRouting]:
    """Turn one step's choices int[num_tokens, num_layers, top_k] into a routing for each layer.

    One token keeps the router's order; several give their union in index order with token counts.
    """
    num_tokens, num_layers, top_k = ids.shape
    offsets = _first_keys(num_layers, num_experts)
    if num_tokens == 1:
        rows = (ids[0] + offsets).tolist()
        used = ids[0] != NO_EXPERT
        if not used.all():
            rows = [
                list(compress(row, mask)) for row, mask in zip(rows, used.tolist(), strict=True)
            ]
        ones = (1,) * top_k
        return [
            LayerRouting(layer, keys, ones[: len(keys)], choices) for layer, keys in enumerate(rows)
        ]
    counts = np.zeros(num_layers * num_experts, dtype=np.int64)
    for first in range(0, num_tokens, _BLOCK_TOKENS):  # so that a long prompt takes little memory
        some = ids[first : first + _BLOCK_TOKENS]
        missing = some == NO_EXPERT
        keys = some + offsets
        flat = keys[~missing] if missing.any() else keys.ravel()
        counts += np.bincount(flat, minlength=len(counts))
    used = np.flatnonzero(counts)
    bounds = np.searchsorted(used, np.arange(num_layers + 1) * num_experts).tolist()
    experts, token_counts = used.tolist(), counts[used].tolist()
    return [
        LayerRouting(layer, experts[low:high], token_counts[low:high], choices)
        for layer, (low, high) in enumerate(pairwise(bounds))
    ]
