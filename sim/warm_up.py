"""Requests that are replayed before the clock starts, so that caches and policies are warm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sim.arrivals import CLOSED
from sim.lockstep import run_lockstep
from sim.offloader import Offloader
from sim.types import ConfigError
from sim.workload import Workload, WorkStep, select_requests
from traces.schema import Trace


class WarmUp(Workload):
    """Work whose steps count up to -1, so that those of the run begin with 0 as always."""

    def steps(self) -> Iterator[WorkStep]:
        """Yield the steps in order, the last of them numbered -1."""
        first = -sum(1 for _ in super().steps())
        for step in super().steps():
            yield replace(step, info=replace(step.info, step=first + step.info.step))


def warm_up_of(settings: Mapping[str, Any], trace: Trace, run: Workload) -> WarmUp | None:
    """Return the work that the ``workload`` settings want done first; None if none.

    It runs in a closed loop, in batches like those of the run.
    """
    span = settings["warm_up"]
    if span is None:
        return None
    requests = select_requests(trace, tuple(span), "workload.warm_up")
    _check_apart(requests, run, span)
    limits = {name: settings[name] for name in ("prefill_chunk", "mixed", "expert_order")}
    return WarmUp(
        trace,
        settings["batch_size"],
        requests,
        arrivals=CLOSED,
        kv_limit_tokens=run.limits.kv_tokens,
        **limits,
    )


def _check_apart(requests: Sequence[Any], run: Workload, span: Sequence[Any]) -> None:
    counted = {request.source_id for request in run.requests}
    both = [request.request_id for request in requests if request.request_id in counted]
    if both:
        raise ConfigError(
            f"workload.warm_up = {list(span)}: holds request {both[0]}, which the run counts; must be "
            "apart from workload.requests"
        )


def warm(offloader: Offloader, work: WarmUp) -> None:
    """Replay ``work`` in no time, and begin to count afterwards."""
    run_lockstep(work, offloader)
    offloader.start_counting()
