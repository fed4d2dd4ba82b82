"""The requests from which policies may learn before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.policies.history import PastRequest
from sim.types import ConfigError
from sim.workload import Request, Workload, select_requests
from traces.locality_requests import expert_uses
from traces.schema import GATE_COLUMNS, Trace, TraceError


@dataclass(frozen=True, slots=True)
class Calibration:
    """A part of a trace, as policies see it (:class:`sim.policies.history.History`).

    ``span`` is the range of its requests by order in the trace, (first, last + 1).
    """

    trace: Trace
    span: tuple[int, int]
    chosen: Sequence[Request]

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        return self.trace.meta.num_layers

    @property
    def num_experts(self) -> int:
        """Number of experts a layer."""
        return self.trace.meta.num_experts

    @property
    def top_k(self) -> int:
        """Experts a token uses in a layer."""
        return self.trace.meta.top_k

    def popularity(self) -> NDArray[np.float64]:
        """Uses of each expert, float64[num_layers, num_experts]."""
        counts = np.zeros((self.num_layers, self.num_experts), dtype=np.int64)
        for request in self.chosen:  # one by one, for they may be more than memory holds
            counts += expert_uses(self.trace.expert_ids[request.rows], self.num_experts)
        return counts.astype(np.float64)

    def requests(self) -> Iterator[PastRequest]:
        """Yield the requests in order."""
        for request in self.chosen:
            part = self.trace.take(request.rows)
            gates = enumerate(GATE_COLUMNS, start=1)
            ahead = {distance: getattr(part, name) for distance, name in gates}
            yield PastRequest(
                ids=part.expert_ids,
                num_prompt=request.num_prompt,
                weights=part.expert_weights,
                router_logits=part.router_logits,
                gates_ahead={d: ids for d, ids in ahead.items() if ids is not None},
                texts=part.text,
                stages=part.stage,
            )

    def overlaps(self, workload: Workload) -> bool:
        """Tell whether a workload replays requests that these are."""
        if workload.trace is not self.trace:
            return False
        known = {request.request_id for request in self.chosen}
        return any(request.source_id in known for request in workload.requests)


def calibration_of(
    config: Mapping[str, Any], trace: Trace, load: Callable[[str], Trace]
) -> Calibration:
    """Return the part of the run's trace, or of another one, that policies may learn from."""
    path = config["calibration"]["trace"]
    source = trace
    if path is not None:
        try:
            source = load(path)
        except TraceError as error:
            raise ConfigError(f"calibration.trace: {error}") from error
        _same_shape(source, trace, path)
    span = config["calibration"]["requests"]
    first, last = span if span is not None else (0, max(1, source.num_requests // 4))
    requests = select_requests(source, (first, last), "calibration.requests")
    return Calibration(source, (first, first + len(requests)), requests)


def _same_shape(source: Trace, trace: Trace, path: str) -> None:
    found, wanted = (
        (t.meta.num_layers, t.meta.num_experts) for t in (source, trace)
    )  # fmt: skip
    if found != wanted:
        raise ConfigError(
            f"calibration.trace = {path}: has {found[0]} layers of {found[1]} experts, "
            f"must have {wanted[0]} of {wanted[1]} like the trace of the run"
        )
